"""What all workers must do alike after a call, though each sees its own clock and its own signals."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

from tfdist.distributed.distribution import Distribution
from tfdist.errors import Interrupted, UserError
from tfdist.step.step import Step


class Due(NamedTuple):
    """What it is time for, by the clock of a worker; that of the chief counts."""

    save: bool = False
    """A checkpoint."""
    hold: bool = False
    """To hold the state in memory, should another worker be lost."""


NOTHING = Due()


class Agreed(NamedTuple):
    """What the workers have agreed upon; the same on all of them."""

    seconds: float
    """How long the call took, on average."""
    between: float
    """How long it was from the call before to this one, on average."""
    due: Due
    """As the chief sees it."""


class _StopVote(NamedTuple):
    """What one worker has to tell the others."""

    seconds: float
    between: float
    reason: str
    stop: bool
    due: Due
    read: str


def agree(
    step: Step,
    label: str,
    seconds: float,
    should_stop: Callable[[], str],
    due: Due = NOTHING,
    read: str = "",
    stops: str = "stop_training",
    between: float = 0.0,
) -> Agreed:
    """Exchanges what the workers see, and gives all models the same `stop_training`.

    Args:
      label: where this worker is.
      seconds: how long the call took here.
      should_stop: returns a reason to stop the run, or nothing.
      due: what it is time for, by this worker's clock.
      read: checksum of the batches that this worker has read.
      stops: the attribute by which callbacks tell Keras' model to stop what it is doing.
      between: seconds from the call before to this one here.

    Raises:
      UserError: another worker has read other batches.
      Interrupted: some worker has a reason to stop.
    """
    peers = step.distribution.peers
    mine = _StopVote(seconds, between, should_stop(), bool(getattr(step.model, stops, False)), due, read)
    votes = [_StopVote(*vote) for vote in peers.gather(label, list(mine))]
    for rank, vote in enumerate(votes):
        if vote.read != votes[0].read:
            raise UserError(
                f"worker {rank} ({peers.hosts[rank]}) has read other batches than worker 0 up to {label}: give "
                "shuffle() a seed, as in shuffle(1000, seed=0), and set a global seed, if any, alike on all workers"
            )
    for rank, vote in enumerate(votes):
        if vote.reason:
            raise Interrupted(vote.reason + (f" (worker {rank})" if peers.size > 1 else ""))
    setattr(step.model, stops, any(vote.stop for vote in votes))
    seconds, between = (statistics.fmean(times) for times in zip(*((vote.seconds, vote.between) for vote in votes)))
    return Agreed(seconds, between, Due(*votes[0].due))


def anywhere(distribution: Distribution, label: str, *facts: bool) -> list[bool]:
    """Returns of each fact whether it holds on any worker.

    Workers may have been given other callbacks; what these want, such as every single batch, all workers must do.

    Args:
      label: what this is about.
    """
    return [any(each) for each in zip(*distribution.peers.gather(label, list(facts)))]


def never() -> str:
    """Returns no reason to stop."""
    return ""
