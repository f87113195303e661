"""What a call of a compiled function gives, and how calls add up to the logs of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf


class CallResult(NamedTuple):
    """What a call that trains or measures gives of its global batches, as tensors."""

    sums: tf.Tensor
    """Loss values times examples, the total first and then each part, float64 [1 + parts]."""
    examples: tf.Tensor
    """How many examples there were, float64 []."""
    nonfinite: tf.Tensor
    """The number of the first batch with a loss that is not finite, counted as the arguments do; -1 for none."""
    done: tf.Tensor
    """How many batches there were, int32 []."""
    metrics: dict[str, tf.Tensor]
    """The metrics' results so far, by name."""
    measures: tf.Tensor
    """This worker's seconds of waiting for input and for the all-reduce, and the last gradient's norm, float64 [3]."""


class Totals:
    """Adds the sums of calls up to the logs of an epoch, in float64.

    Args:
      names: of the parts of the loss.
      sums: what an interrupted epoch has come to, as `CallResult.sums`.
      examples: how many examples that was.
    """

    def __init__(self, names: Sequence[str], sums: Sequence[float] = (), examples: float = 0.0):
        self._names = ["loss", *names]
        self.sums = np.array(sums) if len(sums) else np.zeros(len(self._names))
        self.examples = examples

    def add(self, result: CallResult) -> dict[str, float]:
        """Adds a call, and returns the loss values and metrics of the epoch so far, by name."""
        self.sums += result.sums.numpy()
        self.examples += float(result.examples)
        losses = self.sums / max(self.examples, 1.0)
        logs = dict(zip(self._names, losses.tolist()))
        for name, tensor in result.metrics.items():
            value = tensor.numpy()
            logs[name] = float(value) if value.ndim == 0 else value
        return logs
