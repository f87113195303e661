"""Decisions after each call that all workers take alike, though each sees its own clock and its own signals."""

import collections
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras

from tfdist.data.protocol import Feed
from tfdist.distributed.distribution import Distribution
from tfdist.errors import Interrupted

SHORTEST_CALL_S = 0.2  # Python's share of such a call is small, and progress stays lively
TIMES_BETWEEN = 20
"""A call lasts this many times the time between two calls, where that is more: far workers take long to agree."""
LONGEST_CALL_S = 1.0  # a call never lasts longer than that, since signals and callbacks wait for its end
RECENT_CALLS = 3  # the shortest time between these calls counts: a callback may take long now and then


class Due(NamedTuple):
    """Timed actions now due; the chief's clock decides."""

    save: bool = False  # take a checkpoint
    hold: bool = False  # hold the state in memory, in case another worker is lost


NOTHING_DUE = Due()


class Decisions(NamedTuple):
    """Agreed by the workers; the same on all of them."""

    seconds: float  # mean duration of the call
    between: float  # mean time from the call before to this one, in seconds
    due: Due


def agree(
    distribution: Distribution,
    model: keras.Model,
    label: str,
    seconds: float,
    should_stop: Callable[[], str],
    due: Due = NOTHING_DUE,
    digest: Sequence[str] = (),
    feed: Feed | None = None,
    stop_attribute: str = "stop_training",
    between: float = 0.0,
) -> Decisions:
    """Exchanges what the workers see, and gives all models the same `stop_attribute`, by which callbacks stop Keras.

    Args:
      label: where this worker is.
      seconds, between: duration of the call here, and the time since the call before.
      should_stop: returns a reason to stop the run, or an empty string.
      digest, feed: checksums of the batches that this worker has read, and who has read them.

    Raises:
      UserError: another worker has read other batches, or other inputs where all have read the same at first.
      Interrupted: some worker has a reason to stop.
    """
    peers = distribution.peers
    own = [seconds, between, should_stop(), bool(getattr(model, stop_attribute, False)), due, list(digest)]
    all_seconds, all_between, reasons, stops, dues, digests = zip(*peers.gather(label, own))
    if feed is not None:
        feed.compare(digests, peers, label)
    for rank, reason in enumerate(reasons):
        if reason:
            raise Interrupted(reason + (f" (worker {rank})" if peers.size > 1 else ""))
    setattr(model, stop_attribute, any(stops))
    return Decisions(statistics.fmean(all_seconds), statistics.fmean(all_between), Due(*dues[0]))


def any_worker(distribution: Distribution, label: str, *facts: bool) -> list[bool]:
    """Returns for each fact whether it holds on any worker: what one of them needs, all must do."""
    return list(map(any, zip(*distribution.peers.gather(label, list(facts)))))


def never() -> str:
    """Returns no reason to stop."""
    return ""


class StepsPerCallTuner:
    """Decides the number of updates of the next call: `fixed`, or as many as last between 0.2 and 1 seconds."""

    def __init__(self, fixed: int | None):
        self._fixed = fixed
        self._compiled: set[bool] = set()
        self._between: collections.deque[float] = collections.deque(maxlen=RECENT_CALLS)
        self.updates = fixed or 1

    def record(self, seconds: float, updates: int, full: bool, between: float = 0.0) -> None:
        """Records a call; the first of each kind is left out, since it was compiled in it.

        Args:
          seconds, between: duration of the call, and the time since the call before; the same on all workers.
          full: whether its batches were known to be full, which is another compiled function.
        """
        if self._fixed:
            return
        self._between.append(between)
        if full not in self._compiled:
            self._compiled.add(full)
            return
        target = min(max(SHORTEST_CALL_S, TIMES_BETWEEN * min(self._between)), LONGEST_CALL_S)
        # At most tenfold at a time: the first measured call is short and may have been lucky.
        self.updates = max(1, min(int(target * updates / seconds), 10 * updates, 1 << 20))
