"""What a call of a compiled function gives, and how calls add up to the logs of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.structures import Structure


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


class LogNames:
    """What the logs of a model's own step are, known when it has been traced."""

    def __init__(self) -> None:
        self.plain: list[str] = []
        """Names of the values that the step itself has computed, in the order of `CallResult.sums[1:]`."""
        self.of_metrics: dict[str, str | list[str]] = {}
        """The names under which it logs results of metrics, and what `CallResult.metrics` calls these."""


class Totals:
    """Adds the sums of calls up to the logs of an epoch, in float64.

    Args:
      names: of the parts of the loss.
      sums: what an interrupted epoch has come to, as `CallResult.sums`.
      examples: how many examples that was.
      handed_on: each call goes on with the sums of the one before. Else where the calls end decides about the last
        bits, and that is a matter of time.
    """

    def __init__(
        self, names: Sequence[str], sums: Sequence[float] = (), examples: float = 0.0, handed_on: bool = False
    ):
        self._handed_on = handed_on
        self._names = ["loss", *names]
        self.sums = np.array(sums) if len(sums) else np.zeros(len(self._names))
        self.examples = examples

    def arguments(self) -> tuple[tf.Tensor, ...]:
        """Returns what a call must be given besides its batches."""
        return (tf.constant(self.sums),) if self._handed_on else ()

    def add(self, result: CallResult) -> dict[str, float]:
        """Adds a call, and returns the loss values and metrics of the epoch so far, by name."""
        self.sums = result.sums.numpy() + (0.0 if self._handed_on else self.sums)
        self.examples += float(result.examples)
        losses = self.sums / max(self.examples, 1.0)
        logs = dict(zip(self._names, losses.tolist()))
        logs.update({name: _as_python(tensor) for name, tensor in result.metrics.items()})
        return logs


class LastLogs:
    """Takes the logs that a model's own step has given for the last batch, in place of `Totals`.

    Args:
      names: of the logs.
      examples: how many there were before, in an interrupted epoch.
    """

    def __init__(self, names: LogNames, examples: float = 0.0):
        self._names = names
        self.sums = np.zeros(0)
        self.examples = examples

    def arguments(self) -> tuple[()]:
        """Returns what a call must be given besides its batches."""
        return ()

    def add(self, result: CallResult) -> dict[str, Any]:
        """Takes a call, and returns the logs by name; as in Keras the metrics' results where the names are the same."""
        self.sums = result.sums.numpy()
        self.examples += float(result.examples)
        values = {name: _as_python(tensor) for name, tensor in result.metrics.items()}
        plain = dict(zip(self._names.plain, self.sums[1:].tolist()))
        if {*plain, *self._names.of_metrics} == set(values):
            return values
        of_metrics = {
            name: values[known] if isinstance(known, str) else {key: values[key] for key in known}
            for name, known in self._names.of_metrics.items()
        }
        return {**plain, **of_metrics}


def _as_python(tensor: tf.Tensor) -> float | np.ndarray:
    value = tensor.numpy()
    return float(value) if value.ndim == 0 else value


def computed_from(tensor: tf.Tensor, values: Sequence[Structure]) -> bool:
    """Returns whether a tensor of a graph is computed from one of these values."""
    if not hasattr(tensor, "graph"):
        return False
    leaves = [leaf for value in values for leaf in keras.tree.flatten(value)]
    known = {leaf.name for leaf in leaves if getattr(leaf, "graph", None) is tensor.graph}
    seen, ahead = set[str](), [tensor]
    while ahead:
        before = ahead.pop()
        if before.name in known:
            return True
        if before.op.name not in seen:
            seen.add(before.op.name)
            ahead += before.op.inputs
    return False
