"""What each worker of a run says that it is doing, and when it was last heard. No TensorFlow, no sockets."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import NamedTuple

from tfdist.cluster.heartbeat import State

SILENT_S = 10.0
"""A worker that says nothing for so long is lost."""
_MAY_HOLD_LOCK = ("starting", "saving")
"""Phases in which a worker may hold Python's lock for so long that its heartbeats fail to come."""


class Silence(NamedTuple):
    """A worker that says nothing."""

    rank: int
    seconds: float


class Activity:
    """What this worker and those that it is connected with are doing.

    Args:
      others: ranks at the other ends of this worker's connections.
    """

    def __init__(self, others: Iterable[int]):
        now = time.monotonic()
        self.own = State("starting", 0, now)
        self.others = dict.fromkeys(others, self.own)
        """What the others are doing, by rank."""
        self.longest_call = 0.0
        """Seconds of this worker's longest call so far."""
        self._heard = dict.fromkeys(self.others, now)

    def begin(self, phase: str, update: int | None = None) -> None:
        """Notes what this worker is about to do; `update` as before if not given."""
        now = time.monotonic()
        if self.own.phase == "call":
            self.longest_call = max(self.longest_call, now - self.own.since)
        self.own = State(phase, self.own.update if update is None else update, now)

    def hear(self, rank: int, now: float) -> None:
        """Notes that another worker has said something."""
        self._heard[rank] = now

    def pardon(self, now: float) -> None:
        """Counts the others' silence anew, after a time in which this worker could not listen."""
        self._heard = dict.fromkeys(self._heard, now)

    def silence(self, gone: Collection[int], start_timeout: float, now: float) -> Silence | None:
        """Looks for a worker that has been silent for too long.

        Args:
          gone: workers of which it is known that they will say nothing more.
          start_timeout: seconds for a worker that may hold Python's lock.
        """
        for rank, heard in self._heard.items():
            limit = max(SILENT_S, start_timeout) if self.others[rank].phase in _MAY_HOLD_LOCK else SILENT_S
            if now - heard > limit and rank not in gone:
                return Silence(rank, now - heard)
        return None
