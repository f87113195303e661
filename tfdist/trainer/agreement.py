"""Decisions after each call that all workers take alike, though each sees its own clock and its own signals."""

import collections
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import numpy as np

from tfdist.data.protocol import Feed
from tfdist.distributed.distribution import Distribution
from tfdist.errors import Interrupted

SHORTEST_CALL_S = 0.2  # Python's share of such a call is small, and progress stays lively
TIMES_BETWEEN = 20
"""A call lasts this many times the time between two calls, where that is more: far workers take long to agree."""
LONGEST_CALL_S = 1.0  # a call never lasts longer than that, since signals and callbacks wait for its end
SLOW, WATCHED_S = 1.5, 60.0  # times the median of the other workers, over so many seconds of calls, is slow
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
    spent: Sequence[Sequence[float]]  # by worker


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
    spent: Sequence[float] = (),
) -> Decisions:
    """Exchanges what the workers see, and gives all models the same `stop_attribute`, by which callbacks stop Keras.

    Args:
      label: where this worker is.
      seconds, between: duration of the call here, and the time since the call before.
      should_stop: returns a reason to stop the run, or an empty string.
      spent: seconds of the call here waiting for input, and computing; empty where they are not known.
      digest, feed: checksums of the batches that this worker has read, and who has read them.

    Raises:
      UserError: another worker has read other batches, or other inputs where all have read the same at first.
      Interrupted: some worker has a reason to stop.
    """
    peers = distribution.peers
    own = [seconds, between, should_stop(), bool(getattr(model, stop_attribute, False)), due, list(digest), list(spent)]
    all_seconds, all_between, reasons, stops, dues, digests, all_spent = zip(*peers.gather(label, own))
    if feed is not None:
        feed.compare(digests, peers, label)
    for rank, reason in enumerate(reasons):
        if reason:
            raise Interrupted(reason + (f" (worker {rank})" if peers.size > 1 else ""))
    setattr(model, stop_attribute, any(stops))
    return Decisions(statistics.fmean(all_seconds), statistics.fmean(all_between), Due(*dues[0]), all_spent)


def any_worker(distribution: Distribution, label: str, *facts: bool) -> list[bool]:
    """Returns for each fact whether it holds on any worker: what one of them needs, all must do."""
    return list(map(any, zip(*distribution.peers.gather(label, list(facts)))))


def never() -> str:
    """Returns no reason to stop."""
    return ""


class SlowWorkers:
    """Names, once each, the workers of these hosts for which the others wait in every update."""

    def __init__(self, hosts: Sequence[str]):
        self._hosts, self._named = hosts, set[int]()
        self._spent, self._seconds = np.zeros((len(hosts), 2)), 0.0

    def record(self, decisions: Decisions) -> str:
        """Adds a call; returns a warning if a worker was slow for a minute of them, "" if none was."""
        if len(self._hosts) < 2 or not all(decisions.spent):
            return ""
        self._spent, self._seconds = self._spent + decisions.spent, self._seconds + decisions.seconds
        if self._seconds < WATCHED_S:
            return ""
        spent, seconds, busy = self._spent, self._seconds, self._spent.sum(1)
        self._spent, self._seconds, slow = np.zeros_like(spent), 0.0, int(busy.argmax())
        others = np.delete(spent, slow, 0)
        times = busy[slow] / max(float(np.median(others.sum(1))), 1e-9)
        if times < SLOW or slow in self._named:
            return ""
        self._named.add(slow)
        what = ("its input", "its computation")[int((spent[slow] - np.median(others, 0)).argmax())]
        gain = (busy[slow] - others.sum(1).max()) / seconds
        worker = f"worker {slow} ({self._hosts[slow]}) takes {times:.1f} times as long as the others"
        return f"WARNING: {worker}, mostly for {what}: they wait for it {gain:.0%} of the time"


class StepsPerCallTuner:
    """Decides the number of updates of the next call: `fixed`, or as many as last between 0.2 and 1 seconds."""

    def __init__(self, fixed: int | None):
        self._fixed = fixed
        self._between: collections.deque[float] = collections.deque(maxlen=RECENT_CALLS)
        self.updates = fixed or 1

    def record(self, seconds: float, updates: int, steady: bool, between: float = 0.0) -> None:
        """Records seconds of a call and `between` calls, alike on all workers; `steady`: nothing was compiled in it."""
        if self._fixed:
            return
        self._between.append(between)
        if not steady:
            return
        target = min(max(SHORTEST_CALL_S, TIMES_BETWEEN * min(self._between)), LONGEST_CALL_S)
        # At most tenfold at a time: the first measured call is short and may have been lucky.
        self.updates = max(1, min(int(target * updates / seconds), 10 * updates, 1 << 20))
