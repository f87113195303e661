"""What all workers must do alike after a call, though each sees its own clock and its own signals."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tfdist.engine.step.step import Step
from tfdist.errors import Interrupted


class Agreed(NamedTuple):
    """What the workers have agreed upon; the same on all of them."""

    seconds: float
    """How long the call took, on average."""
    save: bool
    """Whether the chief finds it time for a checkpoint."""


class _StopVote(NamedTuple):
    """What one worker has to tell the others."""

    seconds: float
    reason: str
    stop_training: bool
    save: bool


def agree(step: Step, label: str, seconds: float, should_stop: Callable[[], str], save: bool = False) -> Agreed:
    """Exchanges what the workers see, and gives all models the same `stop_training`.

    Args:
      label: where this worker is.
      seconds: how long the call took here.
      should_stop: returns a reason to stop the run, or nothing.
      save: whether this worker finds it time for a checkpoint.

    Raises:
      Interrupted: some worker has a reason to stop.
    """
    peers = step.distribution.peers
    mine = _StopVote(seconds, should_stop(), bool(getattr(step.model, "stop_training", False)), save)
    votes = [_StopVote(*vote) for vote in peers.gather(label, list(mine))]
    for rank, vote in enumerate(votes):
        if vote.reason:
            raise Interrupted(vote.reason + (f" (worker {rank})" if peers.size > 1 else ""))
    step.model.stop_training = any(vote.stop_training for vote in votes)
    return Agreed(sum(vote.seconds for vote in votes) / len(votes), votes[0].save)


def never() -> str:
    """Returns no reason to stop."""
    return ""
