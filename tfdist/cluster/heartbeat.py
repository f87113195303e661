"""Judges from heartbeats which worker is stuck, or cannot stop in order. No TensorFlow, no sockets, no clock."""

import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

BEAT_S = 1.0  # seconds between heartbeats
SILENT_S = 10.0  # a worker or launcher that sends nothing for so long is lost, or its machine, or the network
EXEMPT = ("starting", "compiling", "saving")  # phases that may take long, with a longer stall timeout
PHASES = (*EXEMPT, "call", "waiting", "python")  # all phases; see `State`
TOGETHER = ("compiling", "call", "waiting")  # phases in which a worker needs the others
MAY_HOLD_LOCK = ("starting", "saving")  # Python's lock, for so long that heartbeats fail to come
EXEMPT_FACTOR = 6
AHEAD_S = 10.0  # what the others have not ended, or failed in, this long after a worker did, they never will
GRACE_S = 4.0  # for the main thread to notice a loss or a second Ctrl-C, and to exit in order
IN_CALL_S = 1.0  # the same in a call, in C++: TensorFlow reports a loss at once, or after ten seconds, or never
SIGNAL_S = 25.0  # who was signaled and waits so long for another cannot stop in order; platforms kill after 30 s
END = "the end of the run"  # the gather with which workers exit
RAISED = "an error of "  # begins the label of the gather of workers in which a call has raised an error
BY_SIGNAL = (130, 143)  # exit codes that stay, whatever else a signal's end brings about


class State(NamedTuple):
    phase: str  # one of `EXEMPT`, `call` (in a collective call), `waiting` (in a `gather`) or `python`
    update: int  # updates made so far
    since: float  # when it began, by this process' monotonic clock


Finding: TypeAlias = tuple[int | None, str]  # who caused that the run cannot go on, if that is known, and how


def find_stall(
    states: Mapping[int, State], waiting: Mapping[int, str], now: float, stall_timeout: float
) -> Finding | None:
    """Decides whether the run stands still, and which worker holds it up.

    Args:
      states: of all workers by rank.
      waiting: labels of the gathers in which workers wait for others, by rank.
      now: the time.
      stall_timeout: seconds without progress that are allowed.
    """
    ended = [rank for rank, label in waiting.items() if label == END]
    others = {rank: state for rank, state in states.items() if rank not in ended}
    if ended:
        # They may wait for ever for a worker that is busy with something of its own, but a call needs all of them.
        if others and all(s.phase == "call" and now - s.since > AHEAD_S for s in others.values()):
            return min(ended), "it has finished while the others wait for it: every worker must make the same updates"
        return None
    if any(now - s.since <= stall_timeout * (EXEMPT_FACTOR if s.phase in EXEMPT else 1) for s in others.values()):
        return None
    for rank, (phase, update, since) in others.items():
        if phase not in ("call", "waiting"):
            activity = "stuck in Python" if phase == "python" else phase
            return rank, f"{activity} for {now - since:.0f} s after update {update} (--stall_timeout)"
    update = min(s.update for s in others.values())
    waited = min(now - s.since for s in others.values())
    called = [s.update for s in others.values() if s.phase == "call"]
    early = [rank for rank in waiting if called and others[rank].update <= min(called)]
    if early:  # one with more updates has ended the call that another hangs in
        return (
            early[0],
            f"it is at {waiting[early[0]]!r} while others have been in a call for {waited:.0f} s since update {update} "
            "(--stall_timeout): every worker must have as much data, and make the same calls",
        )
    return None, f"no worker has finished a call for {waited:.0f} s since update {update} (--stall_timeout)"


class ReceivedSignal(NamedTuple):
    signal: signal.Signals
    at: float  # when, by this process' monotonic clock


def overdue_stop(
    signals: Sequence[ReceivedSignal], own: State, others: Iterable[State], longest_call: float, now: float
) -> tuple[int, str] | None:
    """Decides whether the main thread, which may wait in C++ for another worker, will ever see its signal.

    Returns its exit code and why it has to end, or None while it may still end in order; `longest_call` is in seconds.
    """
    if not signals:
        return None
    name, code = signals[0].signal, 143
    interrupts = [s.at for s in signals if s.signal == signal.SIGINT]
    if len(interrupts) > 1 and now - interrupts[1] > GRACE_S:
        name, code = signal.SIGINT, 130
    else:
        others_are_busy = any(state.phase in EXEMPT for state in others)
        waited = now - max(signals[0].at, own.since) if own.phase in ("call", "waiting") else 0.0
        if others_are_busy or waited <= max(SIGNAL_S, 2 * longest_call):
            return None
    why = f"stopped by {name.name} after update {own.update}, which cannot be saved: no update has ended since"
    return code, why
