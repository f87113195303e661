"""Private names of Keras that tfdist uses, each with the reason why nothing public does."""

from __future__ import annotations

from typing import Any


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer itself, out of a `LossScaleOptimizer` if it is wrapped in one."""
    return getattr(optimizer, "inner_optimizer", optimizer)
