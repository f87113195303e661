"""What `fit` does with checkpoints at each point of a training; nothing, where there are none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from tfdist.checkpoints import oom_note
from tfdist.checkpoints.manager import Checkpoints
from tfdist.checkpoints.resume import Position
from tfdist.checkpoints.training_run import TrainingRun
from tfdist.config.messages import logger
from tfdist.data.batch_layout import Layout
from tfdist.data.structures import Structure
from tfdist.errors import TrainingError
from tfdist.step.call_errors import OutOfMemory
from tfdist.trainer import agreement
from tfdist.trainer.agreement import Agreed, Due
from tfdist.trainer.callbacks import callback


class _Place(NamedTuple):
    """A place in a training, to tell whether a checkpoint was taken just there."""

    update: int
    epoch: int
    begun: int
    measured: bool

    @classmethod
    def of(cls, position: Position) -> _Place:
        """Returns where a position is."""
        return cls(position.update, position.epoch, position.begun, position.measured)


class Keeper:
    """The checkpoints of one training.

    Args:
      checkpoints: None for none.
      run: what they are taken of.
    """

    def __init__(self, checkpoints: Checkpoints | None, run: TrainingRun):
        self._checkpoints = None if checkpoints is None or checkpoints.off else checkpoints
        self._run = run
        self._saved: _Place | None = None
        """Where the last one was taken."""
        self._back = 0
        """How often the training has gone back."""

    def begin(self, position: Position, rollback: bool) -> Position:
        """Returns where the training begins, or goes on.

        Args:
          rollback: whether `back` may be needed, and so something to go back to.
        """
        if self._checkpoints is None:
            return position
        self._run.distribution.peers.on_loss = self._checkpoints.write_held
        resumed = self._checkpoints.begin(self._run)
        if resumed is not None:
            self._saved = _Place.of(resumed)
            return resumed
        if self._run.distribution.workers == 1:
            self._checkpoints.hold(self._run, position)
        if rollback:
            self._save(position)
        return position

    def limit(self, now: Position) -> float:
        """Returns how many updates there may be before the next checkpoint, or the next one to skip."""
        skip = min((u for u in now.skipped if u >= now.update), default=math.inf) - now.update
        return min(skip, math.inf if self._checkpoints is None else self._checkpoints.limit(now.update))

    def due(self) -> Due:
        """Tells what it is time for, by this worker's clock."""
        if self._checkpoints is None:
            return agreement.NOTHING
        several = self._run.distribution.workers > 1
        return Due(self._checkpoints.late(), several and self._checkpoints.should_hold())

    def after_call(self, now: Position, agreed: Agreed) -> None:
        """Takes a checkpoint in the middle of an epoch, if one is due by number or by the chief's clock."""
        if self._checkpoints is not None and (agreed.due.save or self._checkpoints.due(now.update)):
            self._save(now)
        elif self._checkpoints is not None and agreed.due.hold:
            self._checkpoints.hold(self._run, now)

    def after_epoch(self, now: Position, logs: Mapping[str, Structure], agreed: Agreed) -> None:
        """Takes a checkpoint between two epochs, if one is due or the epoch was the best."""
        if self._checkpoints is not None and self._checkpoints.improved(logs, now.update):
            self._save(now)
        else:
            self.after_call(now, agreed)

    def end(self, now: Position) -> None:
        """Takes the last checkpoint when training ends or is interrupted, and waits until it is on the disk."""
        if self._checkpoints is None:
            return
        self._checkpoints.wait()
        gather = self._run.distribution.peers.gather
        failed = gather("the last checkpoint", bool(self._checkpoints.failure))[0]
        if failed or _Place.of(now) != self._saved:
            with self._run.distribution.peers.during("saving"):
                self._save(now, wait=True)
        self._run.distribution.peers.on_loss = lambda: None

    def back(self, error: TrainingError, update: int, position: Position, most: int) -> Position:
        """Goes back to the last good checkpoint, from which the offending updates will be left out.

        The loss shows a weight that is not finite one update later than it came about: that one is left out as well.

        Args:
          error: to raise when this was tried `most` times.
          update: the first with a loss that is not finite.
          position: where the training was.
          most: how often it may go back.
        """
        if self._checkpoints is None or self._back == most:
            raise error
        self._back += 1
        bad = sorted({*position.skipped, max(0, update - 1), update})
        good = self._checkpoints.back(self._run, max(0, update - 1))
        good.skipped = bad
        self._saved = None
        self._run.model.stop_training = False
        if self._run.distribution.is_chief:
            logger.info(
                f"WARNING: {error}; back to update {good.update}, and without updates "
                f"{', '.join(str(u + 1) for u in bad)} from there ({self._back} of {most} times)"
            )
        for hooked in callback.with_hooks(self._run.callbacks):
            hooked.on_rollback(good.update, bad)
        return good

    def smaller(self, error: OutOfMemory, layout: Layout, ordered: bool) -> tuple[Layout, Position]:
        """Makes the micro-batches smaller after an update for which there was not the memory, and goes back.

        Args:
          error: to raise where that cannot be: there are no checkpoints; or other workers, whose collectives are
            broken now; or the data's order depends on how often it has been begun.
          layout: of the update.
          ordered: the data has an order to go back in.

        Returns:
          The layout to go on with, and the place of the last good checkpoint.
        """
        accumulate = min(2 * layout.accumulate, layout.batch // layout.replicas)
        text = f"{error}, at {layout.micro} example{'s' * (layout.micro > 1)} at a time"
        if accumulate == layout.accumulate:
            raise TrainingError(f"{text}, the fewest there can be: use a smaller model or more memory") from error
        if self._checkpoints is None or self._run.distribution.workers > 1 or not ordered:
            raise OutOfMemory(f"{text}: {oom_note.advice(accumulate)}") from error
        smaller = dataclasses.replace(layout, accumulate=accumulate)
        position = self._checkpoints.again(self._run)
        self._saved = None
        logger.info(
            f"WARNING: {text}: from update {position.update} on again, at {smaller.micro} "
            f"(train.accumulate={accumulate}), with the same result"
        )
        for hooked in callback.with_hooks(self._run.callbacks):
            hooked.on_accumulate(accumulate)
        return smaller, position

    def _save(self, now: Position, wait: bool = False) -> None:
        assert self._checkpoints is not None
        self._checkpoints.save(self._run, now, wait)
        self._saved = _Place.of(now)
        for hooked in callback.with_hooks(self._run.callbacks):
            hooked.on_checkpoint(now.update)
