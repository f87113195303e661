"""Private names of Keras' optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfdist.keras_bridge.keras_internals.replacing import PATCHED


def inner_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer itself, out of a `LossScaleOptimizer` if it is wrapped in one; this name is public."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def updating(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns those that write weights: what is in a `MultiOptimizer`, or the optimizer; these names are public."""
    inner = inner_optimizer(optimizer)
    return list(getattr(inner, "optimizers", [inner]))


def rate_setting(
    optimizer: keras.optimizers.Optimizer,
) -> keras.Variable | keras.optimizers.schedules.LearningRateSchedule | None:
    """Returns a variable or the schedule of the learning rate; `optimizer.learning_rate` is a schedule's value now."""
    return getattr(optimizer, "_learning_rate", None)


def weight_averages(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the moving averages of the weights, one each; in public they can only replace the weights for good."""
    return optimizer._model_variables_moving_average


def adam_slots(optimizer: keras.optimizers.Adam, index: int) -> tuple[keras.Variable, keras.Variable]:
    """Returns the first and second moment of variable `index`, which `optimizer.variables` has without a name."""
    return optimizer._momentums[index], optimizer._velocities[index]


def decays(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Returns whether weight decay is for this variable; what `exclude_from_weight_decay` was told is private."""
    return optimizer._use_weight_decay(variable)


def variable_key(optimizer: keras.optimizers.Optimizer, variable: keras.Variable | tf.Variable) -> str:
    """Returns what the optimizer knows a variable by: the same for a Keras variable, its tf.Variable and its copies."""
    return optimizer._var_key(variable)


@contextlib.contextmanager
def without_reduction() -> Iterator[None]:
    """Keeps optimizers, within it, from summing gradients over replicas; Keras has an option for that no longer.

    By class: an optimizer may hand its gradients on to others that it holds, Keras' own or anybody's.
    """
    from keras.src.backend.tensorflow.optimizer import TFOptimizer

    with PATCHED:
        theirs = TFOptimizer._all_reduce_sum_gradients
        TFOptimizer._all_reduce_sum_gradients = lambda self, grads_and_vars: grads_and_vars
        try:
            yield
        finally:
            TFOptimizer._all_reduce_sum_gradients = theirs


@contextlib.contextmanager
def scaled_rates(
    optimizer: keras.optimizers.Optimizer, factor: Callable[[keras.Variable | tf.Variable], float]
) -> Iterator[None]:
    """Lets an optimizer, within it, multiply its learning rate by `factor` of each variable; Keras has one rate.

    Weight decay and the optimizers that look the rate up for themselves go through private methods.
    """
    step, decay, rate = optimizer.update_step, optimizer._apply_weight_decay, optimizer._get_current_learning_rate
    # Replicas are traced in threads that meet in each update of a variable, so they are at the same one.
    now = [1.0]

    def scaled_step(gradient: tf.Tensor, variable: tf.Variable, rate: tf.Tensor) -> None:
        own = factor(variable)
        step(gradient, variable, rate if own == 1 else rate * own)

    def scaled_decay(variables: list[keras.Variable]) -> None:
        for variable in variables:
            now[0] = factor(variable)
            decay([variable])
        now[0] = 1.0

    optimizer.update_step, optimizer._apply_weight_decay = scaled_step, scaled_decay
    optimizer._get_current_learning_rate = lambda: rate() if now[0] == 1 else rate() * now[0]
    try:
        yield
    finally:
        del optimizer.update_step, optimizer._apply_weight_decay, optimizer._get_current_learning_rate


@contextlib.contextmanager
def optimizer_updates(update: Callable) -> Iterator[None]:
    """Replaces, within it, what optimizers do when a `train_step` of the user's gives them gradients.

    By class: an optimizer may be anybody's, and an attribute of its own would stay with it if it is copied.

    Args:
      update: called with (theirs, optimizer, gradients, variables or None); `theirs` takes the last three.
    """
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    kinds = BaseOptimizer, keras.optimizers.LossScaleOptimizer
    with PATCHED:
        theirs = [kind.__dict__["apply"] for kind in kinds]

        def apply(own: Callable) -> Callable:
            return lambda self, grads, trainable_variables=None: update(own, self, grads, trainable_variables)

        for kind, own in zip(kinds, theirs):
            kind.apply = apply(own)
        try:
            yield
        finally:
            for kind, own in zip(kinds, theirs):
                kind.apply = own


def optimized_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the weights that an optimizer was built for; in public it tells only its own variables."""
    return optimizer._trainable_variables
