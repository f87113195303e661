"""What can be asked of the checkpoints of a run."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

from tfdist.config import schedule
from tfdist.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """The arguments of `tfdist.Checkpoints`, checked; that is where they are explained."""

    folder: pathlib.Path
    every: str
    keep: int
    best: str
    asynchronous: bool
    resume: str
    changed: bool
    experiment: Mapping[str, str]
    data_sha256: str

    def __post_init__(self):
        schedule.interval("checkpoint.every", self.every)
        if self.keep < 1:
            raise UserError(f"checkpoint.keep must be at least 1, got {self.keep}")
        schedule.better(self.best)

    @property
    def off(self) -> bool:
        """Tells whether there are to be no checkpoints at all."""
        return self.every == "off"

    @property
    def best_metric(self) -> tuple[str, int]:
        """Returns the metric whose best epoch is kept (empty for none), and +1 where more is better, else -1."""
        return schedule.better(self.best)
