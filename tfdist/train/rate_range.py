"""The numbers of a range test of learning rates: which there are, and what the losses say of them. No TensorFlow.

L. N. Smith, *Cyclical Learning Rates for Training Neural Networks*, 2017, https://arxiv.org/abs/1506.01186,
section 3.3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfdist.config.schedule import Decay, Plan

LOWEST, HIGHEST = 1e-6, 10.0
UPDATES = 200
_KEEPS = 0.9
"""Share of the mean so far that an update leaves of it, in the smoothed loss."""
_DIVERGED = 4.0
"""A smoothed loss that is so many times the lowest ends the test, as nothing comes after it."""
WARM = 10
"""Updates before the end of which nothing is judged."""
SAFE = 10.0
"""The rate to begin with is that of the lowest loss divided by this."""


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One update of the test."""

    update: int
    """From 1 on."""
    rate: float
    loss: float
    """Of its batch, before the update."""
    smoothed: float


def plan(schedule: Plan) -> Plan:
    """Returns the plan of the test in place of that of the run: rates from `LOWEST` to `HIGHEST`, by one factor."""
    decay = Decay("exponential", factor=HIGHEST / LOWEST, every=UPDATES - 1)
    epochs = -(-UPDATES // schedule.updates_per_epoch)
    rates = {"warmup": 0, "decay": decay, "base_rate": LOWEST, "rate": LOWEST}
    return dataclasses.replace(schedule, updates=UPDATES, epochs=epochs, **rates)  # type: ignore[arg-type]


def diverged(means: Sequence[float]) -> bool:
    """Tells whether the last of these smoothed losses is beyond all use."""
    lowest = min(means[WARM:], default=math.inf)
    return means[-1] - lowest > (_DIVERGED - 1) * abs(lowest)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Returns the moving averages of losses, without the pull of the zero that they begin at."""
    means, mean = [], 0.0
    for i, loss in enumerate(losses, 1):
        mean = _KEEPS * mean + (1 - _KEEPS) * loss
        means.append(mean / (1 - _KEEPS**i))
    return means


def points(losses: Sequence[float]) -> list[Point]:
    """Returns the test as far as its losses are finite."""
    finite = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    step = (HIGHEST / LOWEST) ** (1 / (UPDATES - 1))
    rows = zip(losses[:finite], smoothed(losses[:finite]))
    return [Point(i + 1, LOWEST * step**i, loss, mean) for i, (loss, mean) in enumerate(rows)]


def suggested(found: Sequence[Point]) -> float | None:
    """Returns a rate to begin with, two digits of it; None where the loss has not fallen."""
    judged = found[WARM:]
    if not judged:
        return None
    lowest = min(judged, key=lambda point: point.smoothed)
    if judged[0].smoothed - lowest.smoothed < 0.02 * abs(judged[0].smoothed):
        return None
    return float(f"{lowest.rate / SAFE:.1e}")
