"""Who holds up the others, judged from what each worker says that it is doing. No TensorFlow, no sockets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

EXEMPT = ("starting", "compiling", "saving")
"""Phases that may take long, and in which a worker may hold Python's lock; the stall timeout is longer for them."""
PHASES = (*EXEMPT, "call", "waiting", "python")
"""All of them; see `State`."""
TOGETHER = ("compiling", "call", "waiting")
"""Phases in which a worker needs the others."""
EXEMPT_FACTOR = 6
AHEAD_S = 10.0
"""A call of the others that has not ended so long after a worker has finished will not end."""


class State(NamedTuple):
    """What a worker is doing."""

    phase: str
    """One of `EXEMPT`, `call` (in a collective call), `waiting` (in a `gather`) or `python`."""
    update: int
    """Updates made so far."""
    since: float
    """When it began, by this process' monotonic clock."""


class Stall(NamedTuple):
    """Why the run stands still."""

    rank: int | None
    """The worker to blame; None if it cannot be told."""
    why: str
    """What is wrong with it, or with all."""


def find(states: Mapping[int, State], ended: Collection[int], now: float, stall_timeout: float) -> Stall | None:
    """Judges whether the run stands still, and who is to blame.

    Args:
      states: of all workers by rank.
      ended: workers that wait for the end of the run.
      stall_timeout: seconds without movement that are allowed.

    Returns:
      None while all is well.
    """
    others = {rank: state for rank, state in states.items() if rank not in ended}
    if ended:
        # They may wait for ever for a worker that is busy with something of its own, but a call needs all of them.
        if others and all(s.phase == "call" and now - s.since > AHEAD_S for s in others.values()):
            return Stall(
                min(ended), "it has finished while the others wait for it: every worker must make the same updates"
            )
        return None
    if any(now - s.since <= stall_timeout * (EXEMPT_FACTOR if s.phase in EXEMPT else 1) for s in others.values()):
        return None
    for rank, (phase, update, since) in others.items():
        if phase not in ("call", "waiting"):
            what = "stuck in Python" if phase == "python" else phase
            return Stall(rank, f"{what} for {now - since:.0f} s after update {update} (--stall_timeout)")
    update = min(s.update for s in others.values())
    waited = min(now - s.since for s in others.values())
    return Stall(None, f"no worker has finished a call for {waited:.0f} s since update {update} (--stall_timeout)")
