"""Values that all workers of a run contribute, or must have in common. No TensorFlow, no sockets."""

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
    """Collects on the chief the values of each `Peers.gather`."""

    def __init__(self, hosts: Sequence[str]):
        self._hosts = hosts
        self._collected: dict[int, dict[int, _Vote]] = {}

    def cast(self, rank: int, number: int, label: str, value: object) -> list[object] | None:
        """Adds one worker's value to a gather; returns all in order of rank once complete, else None.

        Raises:
          MismatchError: another worker uses another label for this gather.
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

    def waiting(self) -> dict[int, str]:
        """Returns the labels at which workers wait for others, by rank."""
        return {rank: vote.label for votes in self._collected.values() for rank, vote in votes.items()}


def difference(facts: Sequence[Mapping[str, object]], hosts: Sequence[str]) -> str:
    """Returns the first fact in which a worker differs from the chief, as an error message; "" if there is none."""
    first, *others = facts
    for rank, theirs in enumerate(others, 1):
        for name, value, expected in differing_facts(theirs, first):
            return (
                f"worker {rank} ({hosts[rank]}) has other data than worker 0 ({name}: {value} and not "
                f"{expected}): give all workers the same, the whole of it, since each takes its own rows"
            )
    return ""


def differing_facts(theirs: Mapping[str, object], mine: Mapping[str, object]) -> Iterator[tuple[str, str, str]]:
    """Yields name, their value and mine of each fact in which both differ, numbers in lists by more than rounding."""
    for name, expected in mine.items():  # in its order, so that all workers report the same
        value = theirs.get(name)
        if isinstance(expected, list) and isinstance(value, list) and any(isinstance(v, float) for v in expected):
            value, expected = next(_differing(value, expected), (None, None))
        if name in theirs and value != expected:
            yield name, str(value)[:100], str(expected)[:100]


def _differing(theirs: list[object], mine: list[object]) -> Iterator[tuple[object, object]]:
    """Yields pairs that differ by more than rounding, or the lengths if they differ."""
    if len(theirs) != len(mine):
        yield f"{len(theirs)} values", f"{len(mine)} values"
        return
    floats = [abs(v) for v in mine if isinstance(v, float) and math.isfinite(v)]
    allowed = ROUNDING * max(floats, default=0.0)
    for value, expected in zip(theirs, mine):
        if not (isinstance(value, float) and isinstance(expected, float)):
            same = value == expected
        elif math.isnan(expected):
            same = math.isnan(value)
        else:
            same = math.isclose(value, expected, rel_tol=10 * ROUNDING, abs_tol=allowed)
        if not same:
            yield value, expected


ROUNDING = 1e-5  # relative to the largest number of a list; ten times this relative to a number itself
TURNS = 3


def turn(rank: int, hosts: Sequence[str]) -> int:
    """Returns a worker's turn in work on a disk that hosts may share: chief 0, first of each other host 1, others 2."""
    if rank == 0:
        return 0
    return 1 if hosts.index(hosts[rank]) == rank else 2
