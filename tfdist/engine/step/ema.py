"""The moving average of the weights (EMA): kept up at each update, put in the weights' place to measure and to end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


def add(optimizer: Any, variables: list, before: Any, updated: Any) -> None:
    """Adds an update's weights to their average, as Keras' `use_ema`; in a replica, within `optimizer_update.owned`.

    Args:
      before: `iterations` before this update.
      updated: bool scalar, False where the update was skipped, or None.
    """
    if not optimizer.tfdist_ema:
        return
    for variable, average in zip(variables, optimizer._model_variables_moving_average):
        momentum = tf.where(
            tf.equal(before, 0), tf.zeros((), average.dtype), tf.cast(optimizer.ema_momentum, average.dtype)
        )
        new = momentum * average + (1 - momentum) * variable
        average.assign(new if updated is None else tf.where(updated, new, average))
    if optimizer.ema_overwrite_frequency:
        due = tf.equal((before + 1) % optimizer.ema_overwrite_frequency, 0)
        if updated is not None:
            due = tf.logical_and(due, updated)
        for variable, average in zip(variables, optimizer._model_variables_moving_average):
            variable.assign(tf.where(due, average, variable))


def finalize(optimizer: Any, variables: list) -> None:
    """Ends a training with the averaged weights, as Keras' `fit` does; in cross-replica context."""
    if _there(optimizer):
        for variable, average in zip(variables, optimizer._model_variables_moving_average):
            variable.assign(tf.convert_to_tensor(average.value))


@contextlib.contextmanager
def instead(optimizer: Any, variables: list) -> Iterator[None]:
    """Within it the model has the averaged weights, and after it its own again, bit for bit, on every replica.

    Keras' callback SwapEMAWeights exchanges them by adding and subtracting, which rounds.

    Args:
      optimizer: built for `variables`; without `use_ema` nothing happens.
    """
    if not _there(optimizer):
        yield
        return
    _exchange(optimizer, variables)
    try:
        yield
    finally:
        _exchange(optimizer, variables)


def _there(optimizer: Any) -> bool:
    """Whether there is an average: before the first update, and as long as loss scaling skips them, it is zeros."""
    return bool(getattr(optimizer, "use_ema", False)) and int(optimizer.iterations.numpy()) > 0


def _exchange(optimizer: Any, variables: list) -> None:
    """The weights wait in the averages' place meanwhile, so no memory is needed."""
    for variable, average in zip(variables, optimizer._model_variables_moving_average):
        for one, other in zip(_copies(variable), _copies(average)):
            kept = _read(one)
            one.assign(_read(other))
            other.assign(kept)


def _copies(variable: Any) -> tuple:
    """This worker's copies of a Keras variable."""
    return tuple(getattr(variable.value, "values", (variable.value,)))


def _read(copy: Any) -> Any:
    return tf.raw_ops.ReadVariableOp(resource=copy.handle, dtype=copy.dtype)
