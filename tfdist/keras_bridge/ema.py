"""The moving average of the weights (EMA): kept up at each update, put in the weights' place to measure and to end."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from tfdist.keras_bridge import keras_internals

Constraints: TypeAlias = "dict[int, Callable[[keras.Variable], tf.Tensor]]"
"""What weights are constrained by, by the `id` of each."""


def add(
    optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable], before: tf.Tensor, updated: tf.Tensor | None
) -> None:
    """Adds an update's weights to their average, as Keras' `use_ema`; in a replica, while an update is traced.

    Args:
      before: batches before this one, an integer scalar. As in Keras, each counts, also those that are accumulated.
      updated: bool scalar, False where the update was skipped, or None.
    """
    averages = keras_internals.weight_averages(optimizer, variables)
    updates = before // (optimizer.gradient_accumulation_steps or 1)
    for variable, average in zip(variables, averages):
        momentum = tf.where(
            tf.equal(updates, 0), tf.zeros((), average.dtype), tf.constant(optimizer.ema_momentum, average.dtype)
        )
        new = momentum * average + (1 - momentum) * variable
        average.assign(new if updated is None else tf.where(updated, new, average))
    if optimizer.ema_overwrite_frequency:
        due = tf.equal((updates + 1) % optimizer.ema_overwrite_frequency, 0)
        if updated is not None:
            due = tf.logical_and(due, updated)
        for variable, average in zip(variables, averages):
            variable.assign(tf.where(due, average, variable))


@contextlib.contextmanager
def unconstrained(variables: Sequence[keras.Variable]) -> Iterator[Constraints]:
    """Keeps Keras, within it, from constraining weights before they are averaged; yields what `constrain` takes."""
    constraints = {id(v): v.constraint for v in variables if v.constraint is not None}
    held = [v for v in variables if id(v) in constraints]
    for variable in held:
        variable.constraint = None
    try:
        yield constraints
    finally:
        for variable in held:
            variable.constraint = constraints[id(variable)]


def constrain(constraints: Constraints, variables: Sequence[keras.Variable], updated: tf.Tensor) -> None:
    """Constrains those of `variables` that have been updated; in a replica, after `add`."""
    for variable in variables:
        if id(variable) in constraints:
            variable.assign(tf.where(updated, constraints[id(variable)](variable), variable))


def finalize(optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> None:
    """Ends a training with the averaged weights, as Keras' `fit` does; in cross-replica context."""
    if _has_average(optimizer):
        for variable, average in _averages(optimizer, variables):
            variable.assign(tf.convert_to_tensor(average.value))


@contextlib.contextmanager
def instead(optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> Iterator[None]:
    """Gives the model the averaged weights within it, and after it its own again, bit for bit, on every replica.

    Keras' callback SwapEMAWeights exchanges them by adding and subtracting, which rounds.
    """
    if not _has_average(optimizer):
        yield
        return
    _exchange(optimizer, variables)
    try:
        yield
    finally:
        _exchange(optimizer, variables)


def _averages(optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> Iterator[tuple]:
    """Returns weights with their averages; a `train_step` may leave out weights that get no gradient."""
    averaged = {id(variable) for variable in keras_internals.optimized_variables(optimizer)}
    variables = [variable for variable in variables if id(variable) in averaged]
    return zip(variables, keras_internals.weight_averages(optimizer, variables))


def _has_average(optimizer: keras.optimizers.Optimizer) -> bool:
    """Before the first update, and as long as loss scaling skips them, the average is zeros."""
    return bool(getattr(optimizer, "use_ema", False)) and int(keras_internals.counter(optimizer).numpy()) > 0


def _exchange(optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> None:
    """Puts weights and averages in each other's place, one at a time, so that hardly any memory is needed."""
    for variable, average in _averages(optimizer, variables):
        for one, other in zip(keras_internals.copies(variable), keras_internals.copies(average)):
            kept = one.read_value()
            one.assign(other.read_value())
            other.assign(kept)
