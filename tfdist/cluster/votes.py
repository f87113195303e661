"""What all workers of a run must give, or have alike. No TensorFlow, no sockets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class MismatchError(Exception):
    """Two workers are at different points of the program."""


class _Vote(NamedTuple):
    label: str
    value: Any


class Votes:
    """The values that workers have given to each call of `Peers.gather`, as the chief collects them.

    Args:
      hosts: host name of each worker, by rank.
    """

    def __init__(self, hosts: Sequence[str]):
        self._hosts = hosts
        self._collected: dict[int, dict[int, _Vote]] = {}

    def cast(self, rank: int, number: int, label: str, value: object) -> list[object] | None:
        """Takes in one worker's value.

        Args:
          rank: the worker that gives it.
          number: the count of gathers before this one.
          label: what the value is about.
          value: anything that JSON can hold.

        Returns:
          All values in order of rank, once the last has come; None before.

        Raises:
          MismatchError: another worker has given this gather another label.
        """
        votes = self._collected.setdefault(number, {})
        votes[rank] = _Vote(label, value)
        first, expected = next((other, vote.label) for other, vote in votes.items())
        if label != expected:
            raise MismatchError(
                f"worker {rank} ({self._hosts[rank]}) is at {label!r} while worker {first} ({self._hosts[first]}) "
                f"is at {expected!r}: every worker must make the same calls"
            )
        if len(votes) < len(self._hosts):
            return None
        del self._collected[number]
        return [votes[r].value for r in range(len(self._hosts))]

    def waiting_at(self, label: str) -> set[int]:
        """Returns the ranks whose gathers with this label have not ended."""
        return {rank for votes in self._collected.values() for rank, vote in votes.items() if vote.label == label}


def difference(facts: Sequence[Mapping[str, object]], hosts: Sequence[str]) -> str:
    """Compares what the workers have, by rank.

    Returns:
      The first fact in which a worker differs from the chief, as an error for a person; "" if there is none.
    """
    first, *others = facts
    for rank, theirs in enumerate(others, 1):
        for name, there, here in differing_facts(theirs, first):
            return (
                f"worker {rank} ({hosts[rank]}) has other data than worker 0 ({name}: {there} and not "
                f"{here}): give all workers the same, the whole of it, since each takes its own rows"
            )
    return ""


def differing_facts(theirs: Mapping[str, object], mine: Mapping[str, object]) -> Iterator[tuple[str, str, str]]:
    """Yields name, their value and mine of each fact in which both differ, numbers in lists by more than rounding."""
    for name, here in mine.items():  # in its order, so that all workers report the same
        there = theirs.get(name)
        if isinstance(here, list) and isinstance(there, list) and any(isinstance(v, float) for v in here):
            there, here = next(_differing(there, here), (None, None))
        if name in theirs and there != here:
            yield name, str(there)[:100], str(here)[:100]


def _differing(theirs: list[object], mine: list[object]) -> Iterator[tuple[object, object]]:
    """Yields pairs that differ by more than rounding, or the lengths if these differ."""
    if len(theirs) != len(mine):
        yield f"{len(theirs)} of it", f"{len(mine)} of it"
        return
    floats = [abs(v) for v in mine if isinstance(v, float) and math.isfinite(v)]
    allowed = ROUNDING * max(floats, default=0.0)
    for there, here in zip(theirs, mine):
        if not (isinstance(there, float) and isinstance(here, float)):
            same = there == here
        elif math.isnan(here):
            same = math.isnan(there)
        else:
            same = math.isclose(there, here, rel_tol=10 * ROUNDING, abs_tol=allowed)
        if not same:
            yield there, here


ROUNDING = 1e-5
"""Of the largest number of a list; ten times as much of a number itself."""
TURNS = 3


def turn(rank: int, hosts: Sequence[str]) -> int:
    """Returns whose turn a worker has in work that leaves something on a disk, which hosts may or may not share.

    The chief has turn 0, the first worker of each other host turn 1, all others turn 2.
    """
    if rank == 0:
        return 0
    return 1 if hosts.index(hosts[rank]) == rank else 2
