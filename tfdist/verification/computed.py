"""What some rows give when they are computed, and how far apart two of these are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

STATE, METRIC, OUTPUT = "the variable", "metric", "output"
"""How the names of some values begin."""


class Computed(NamedTuple):
    """What some rows give."""

    values: dict[str, np.ndarray]
    """Losses, logs, metrics, outputs, and what a layer keeps, by what they are called in a message."""
    gradient: list[np.ndarray]
    """One array per weight that has one."""

    def is_finite(self) -> bool:
        """Returns whether there is no NaN and no infinity in it, but for outputs: a model may mean to give some."""
        told = [value for name, value in self.values.items() if not name.startswith(OUTPUT)]
        return all(np.isfinite(array).all() for array in (*told, *self.gradient))

    def distance(self, other: Computed) -> dict[str, float]:
        """Returns relative differences by name; of the gradient the norm over all weights.

        By weight it would raise false alarms: biases that change nothing are pure rounding.
        """
        distances = {name: _relative([value], [other.values[name]]) for name, value in self.values.items()}
        if self.gradient:
            distances["the gradient"] = _relative(self.gradient, other.gradient)
        return distances


def array(value: tf.Tensor) -> np.ndarray:
    """Returns a value as numbers; text as it is."""
    array = np.asarray(tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value)
    return array if array.dtype.kind in "OSU" else array.astype(np.float64)


def _relative(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    size = apart = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape:
            return np.inf
        if a.dtype.kind in "OSU":
            apart += float((a != b).sum())
            size += a.size
            continue
        alike = (a == b) | (np.isnan(a) & np.isnan(b))  # infinities, too
        difference = np.where(alike, 0.0, a) - np.where(alike, 0.0, b)
        if not np.isfinite(difference).all():
            return np.inf
        apart += np.square(difference).sum()
        size += np.square(np.where(np.isfinite(a), a, 0.0)).sum()
    return float(np.sqrt(apart) / max(np.sqrt(size), 1e-6)) if apart else 0.0
