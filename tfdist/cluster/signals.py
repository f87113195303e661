"""When a worker that was asked to stop cannot stop in order. No TensorFlow, no clock."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tfdist.cluster import heartbeat
from tfdist.cluster.heartbeat import State

GRACE_S = 4.0
"""Time for the main thread to notice a loss or a second Ctrl-C and to leave in order, before the process is ended."""
IN_CALL_S = 1.0
"""The same while it is in a call, in C++: TensorFlow tells it of a loss at once, or after ten seconds, or never."""
SIGNAL_S = 25.0
"""A worker that was asked to stop and waits for another for so long cannot stop in order; platforms kill after 30 s."""
BY_SIGNAL = (130, 143)
"""Exit codes that stay, whatever else a signal's end brings about."""


class Seen(NamedTuple):
    """A signal that this process was sent."""

    signal: signal.Signals
    at: float
    """When it came, by this process' monotonic clock."""


class Stop(NamedTuple):
    """The end of a worker that does not see its signal."""

    code: int
    """Exit code of the process."""
    why: str
    """What to tell the others and a person."""


def overdue(seen: Sequence[Seen], own: State, others: Iterable[State], longest_call: float, now: float) -> Stop | None:
    """Judges whether the main thread, which may wait in C++ for another worker, will ever see its signal.

    Args:
      seen: the signals that have come.
      own: what this worker is doing.
      others: what the others are doing.
      longest_call: seconds of the longest call so far.
      now: the time, by the clock of `seen`.

    Returns:
      How the worker has to end; None while it may still end in order.
    """
    if not seen:
        return None
    name, code = seen[0].signal, 143
    interrupts = [s.at for s in seen if s.signal == signal.SIGINT]
    if len(interrupts) > 1 and now - interrupts[1] > GRACE_S:
        name, code = signal.SIGINT, 130
    else:
        others_are_busy = any(state.phase in heartbeat.EXEMPT for state in others)
        waited = now - max(seen[0].at, own.since) if own.phase in ("call", "waiting") else 0.0
        if others_are_busy or waited <= max(SIGNAL_S, 2 * longest_call):
            return None
    why = f"stopped by {name.name} after update {own.update}, which cannot be saved: no update has ended since"
    return Stop(code, why)
