"""Compares values that all workers of a run must have in common. No TensorFlow, no sockets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence


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
