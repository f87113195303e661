"""What fits where an update does not: the largest batch, or as many micro-batches as it takes. No TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

TRIES = 6
"""Compilations that each of the two searches may take; a deep network takes minutes for one."""
FINENESS = 16
"""The largest batch is looked for to this part of what did not fit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """What fits instead."""

    batch: int
    """The largest global batch that was seen to fit, 0 for none."""
    too_many: int
    """The smallest one that was seen not to."""
    accumulate: int
    """Micro-batches with which the batch that was asked for fits, 0 where none were found."""


def search(
    needs: Callable[[int, int], float], batch: int, replicas: int, accumulate: int, used: float, limit: float
) -> Fit:
    """Looks for what fits.

    Args:
      needs: compiles for a batch and a number of micro-batches; returns the bytes of a device.
      batch: that does not fit.
      accumulate: its micro-batches.
      used: bytes that it needs.
      limit: bytes that there are.
    """
    parts = replicas * accumulate
    fits, too_many = 0, -(-batch // parts)
    step = max(1, too_many // FINENESS)
    guess = int(too_many * limit / used)  # memory grows no faster than the batch
    for _ in range(TRIES):
        if too_many - fits <= step:
            break
        middle = min(max(guess, fits + 1), too_many - 1)
        if needs(middle * parts, accumulate) <= limit:
            fits = middle
        else:
            too_many = middle
        guess = (fits + too_many) // 2
    found = 0
    most = batch // replicas
    micro = accumulate * max(2, -(-batch // (fits * parts))) if fits else 2 * accumulate
    for _ in range(TRIES):
        if micro > most or found:
            break
        found = micro if needs(batch, micro) <= limit else 0
        micro *= 2
    return Fit(fits * parts, too_many * parts, found)
