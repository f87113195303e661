"""One optimizer update from gradients that are already summed over all replicas.

Keras' optimizers spend many small ops per variable, and under tf.distribute
they reduce again, clip what one replica sees, and cannot average weights in a
graph. For Adam, AdamW and SGD the update is
TensorFlow's fused op on the slots that the Keras optimizer owns; every other
optimizer is called as it is, with its own reduction switched off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.engine.step import ema as ema_lib
from tfdist.errors import UserError
from tfdist.models.keras_internals import inner_optimizer

FUSED = (keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.SGD)


def is_fused(optimizer: Any) -> bool:
    """Exact classes only: a subclass may compute something else."""
    optimizer = inner_optimizer(optimizer)
    return type(optimizer) in FUSED and not getattr(optimizer, "amsgrad", False)


def check(optimizer: Any) -> None:
    """Raises UserError for optimizer settings that tfdist replaces."""
    if inner_optimizer(optimizer).gradient_accumulation_steps:
        raise UserError(
            f"optimizer has gradient_accumulation_steps={inner_optimizer(optimizer).gradient_accumulation_steps}: "
            "leave it out and give tfdist accumulate (train.accumulate) instead"
        )


@contextlib.contextmanager
def owned(optimizer: Any, variables: Sequence = (), factors: Sequence[float] = ()) -> Iterator[None]:
    """While an update is traced, keeps a Keras optimizer from reducing again and from averaging weights.

    It reduces through a private method (tests/models/test_keras_internals.py notices when
    that changes), and writing averages over the weights fails in a graph
    (keras issue 20582). Replicas are traced in threads: this surrounds them all.

    Args:
      factors: on the learning rate of each of `variables`; none for 1.
    """
    base = inner_optimizer(optimizer)
    ema = base.use_ema
    by_key = {base._var_key(v): f for v, f in zip(variables, factors)}
    base.tfdist_factor = lambda variable: by_key.get(base._var_key(variable), 1.0)
    base._all_reduce_sum_gradients = lambda grads_and_vars: grads_and_vars
    base.use_ema = False
    base.tfdist_ema = ema
    with _scaled(base) if factors and not is_fused(optimizer) else contextlib.nullcontext():
        try:
            yield
        finally:
            base.use_ema = ema
            del base._all_reduce_sum_gradients
            del base.tfdist_ema
            del base.tfdist_factor


@contextlib.contextmanager
def _scaled(base: Any) -> Iterator[None]:
    """Lets a Keras optimizer multiply its learning rate by `tfdist_factor` of each variable."""
    step, decay, rate = base.update_step, base._apply_weight_decay, base._get_current_learning_rate
    # Replicas are traced in threads that meet in each update of a variable, so they are at the same one.
    now = [1.0]

    def each(variables):
        for variable in variables:
            now[0] = base.tfdist_factor(variable)
            decay([variable])
        now[0] = 1.0

    base.update_step = lambda gradient, variable, rate: step(gradient, variable, _times(rate, base, variable))
    base._apply_weight_decay = each
    base._get_current_learning_rate = lambda: rate() if now[0] == 1 else rate() * now[0]
    try:
        yield
    finally:
        del base.update_step, base._apply_weight_decay, base._get_current_learning_rate


def apply(optimizer: Any, grads: list, variables: list, penalty: Callable[[list], list]) -> None:
    """Updates `variables` and the optimizer's state; called in replica context, within `owned`.

    Args:
      optimizer: a Keras optimizer built for `variables`, possibly a
        `LossScaleOptimizer`, whose scale is then still in `grads`.
      grads: one dense tensor or None per variable, the same on every replica.
      variables: the model's trainable variables.
      penalty: adds the gradient of the regularisers to a list like `grads`.
    """
    if not any(g is not None for g in grads):
        raise UserError("no trainable variable has a gradient: the loss does not depend on the model's weights")
    if not is_fused(optimizer):
        _apply_keras(optimizer, grads, variables, penalty)
    elif optimizer is inner_optimizer(optimizer):
        _apply_fused(optimizer, penalty(grads), variables)
    else:
        _apply_scaled(optimizer, grads, variables, penalty)


def _apply_keras(optimizer: Any, grads: list, variables: list, penalty: Callable[[list], list]) -> None:
    base = inner_optimizer(optimizer)
    if optimizer is not base:
        scale = tf.convert_to_tensor(optimizer.dynamic_scale)
        extra = penalty([None] * len(grads))
        grads = [_add(g, None if e is None else e * tf.cast(scale, e.dtype)) for g, e in zip(grads, extra)]
    else:
        grads = penalty(grads)
    pairs = [(g, v) for g, v in zip(grads, variables) if g is not None]
    before = tf.identity(base.iterations.value)
    optimizer.apply([g for g, _ in pairs], [v for _, v in pairs])
    ema_lib.add(base, variables, before, tf.not_equal(before, tf.identity(base.iterations.value)))


def _apply_scaled(optimizer: Any, grads: list, variables: list, penalty: Callable[[list], list]) -> None:
    """keras.optimizers.LossScaleOptimizer, deciding on the sum over all replicas."""
    given = [g for g in grads if g is not None]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in given])
    scale, steps = optimizer.dynamic_scale, optimizer.step_counter

    def good():
        factor = 1.0 / tf.convert_to_tensor(scale)
        unscaled = [None if g is None else g * tf.cast(factor, g.dtype) for g in grads]
        _apply_fused(optimizer.inner_optimizer, penalty(unscaled), variables)
        grow = tf.equal(tf.convert_to_tensor(steps), optimizer.dynamic_growth_steps - 1)
        scale.assign(tf.where(grow, scale * 2.0, scale))
        steps.assign(tf.where(grow, tf.zeros_like(steps), steps + 1))
        return tf.constant(0)

    def bad():
        scale.assign(scale * 0.5)
        steps.assign(tf.zeros_like(steps))
        return tf.constant(0)

    tf.cond(finite, good, bad)


def _apply_fused(optimizer: Any, grads: list, variables: list) -> None:
    grads = clip(optimizer, grads)
    rate = tf.convert_to_tensor(optimizer.learning_rate)
    pairs = [(i, g, v) for i, (g, v) in enumerate(zip(grads, variables)) if g is not None]
    for _, _, variable in pairs:
        if optimizer.weight_decay is not None and optimizer._use_weight_decay(variable):
            decay = tf.cast(_times(rate, optimizer, variable), variable.dtype) * tf.cast(
                optimizer.weight_decay, variable.dtype
            )
            variable.assign_sub(variable * decay)
    step = _sgd(optimizer, rate) if isinstance(optimizer, keras.optimizers.SGD) else _adam(optimizer, rate)
    # A weight that the backward pass still reads would be copied before it is written; once all gradients are
    # there, nothing reads any more.
    with tf.control_dependencies([grad for _, grad, _ in pairs]):
        for i, grad, variable in pairs:
            step(i, tf.cast(grad, variable.dtype), variable)
    before = tf.identity(optimizer.iterations.value)
    ema_lib.add(optimizer, variables, before, None)
    for _, _, variable in pairs:
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))
    # The variable's own assign_add would gather all replicas; each adds to its copy instead.
    tf.raw_ops.AssignAddVariableOp(resource=optimizer.iterations.value.handle, value=tf.ones_like(before))


def _adam(optimizer: Any, rate: Any) -> Callable:
    """keras.optimizers.Adam.update_step as one op per variable.

    The op takes 1 - beta_2 from a beta_2 that is rounded to float32, 1.3e-5
    beside the 0.001 that Keras multiplies with. The second moment is then off
    by (1 - b^t) / (1 - d^t), b and d being what the two decay by; to first order
    in e = b - d, its root by 1 - e t b^t / (2 (1 - b^t)), which is put right
    here. Without it, ten updates differ from Keras' by 1.3e-6.
    """
    step = optimizer.iterations + 1
    shared: dict = {}

    def constants(dtype):
        constant = lambda value: tf.cast(value, dtype)
        beta1, beta2, t = constant(optimizer.beta_1), constant(optimizer.beta_2), constant(step)
        beta2_power = tf.pow(beta2, t)
        exact = dtype.as_numpy_dtype
        half = 0.5 * (float(exact(optimizer.beta_2)) - (1.0 - float(exact(1.0 - optimizer.beta_2))))
        right = 1 - constant(half) * t * beta2_power / (1 - beta2_power)
        return dict(
            beta1=beta1,
            beta2=beta2,
            beta1_power=tf.pow(beta1, t),
            beta2_power=beta2_power,
            lr=constant(rate) * right,
            epsilon=constant(optimizer.epsilon) * right,
        )

    def update(i, grad, variable):
        if grad.dtype not in shared:
            shared[grad.dtype] = constants(grad.dtype)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.value.handle,
            m=optimizer._momentums[i].value.handle,
            v=optimizer._velocities[i].value.handle,
            grad=grad,
            **{**shared[grad.dtype], "lr": _times(shared[grad.dtype]["lr"], optimizer, variable)},
        )

    return update


def _sgd(optimizer: Any, rate: Any) -> Callable:
    """keras.optimizers.SGD.update_step as one op per variable."""

    def update(i, grad, variable):
        lr = tf.cast(_times(rate, optimizer, variable), grad.dtype)
        if optimizer.momentum == 0:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.value.handle, alpha=lr, delta=grad)
        else:
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=variable.value.handle,
                accum=optimizer.momentums[i].value.handle,
                lr=lr,
                grad=grad,
                momentum=tf.cast(optimizer.momentum, grad.dtype),
                use_nesterov=optimizer.nesterov,
            )

    return update


def _times(rate: Any, optimizer: Any, variable: Any) -> Any:
    """A learning rate for this variable."""
    factor = optimizer.tfdist_factor(variable)
    return rate if factor == 1 else rate * factor


def clip(optimizer: Any, grads: list) -> list:
    """clipnorm, global_clipnorm or clipvalue of `optimizer`, on the summed gradients."""
    given = [g for g in grads if g is not None]
    if optimizer.clipnorm:
        given = [tf.clip_by_norm(g, optimizer.clipnorm) for g in given]
    elif optimizer.global_clipnorm:
        given, _ = tf.clip_by_global_norm(given, optimizer.global_clipnorm)
    elif optimizer.clipvalue:
        given = [tf.clip_by_value(g, -optimizer.clipvalue, optimizer.clipvalue) for g in given]
    clipped = iter(given)
    return [None if g is None else next(clipped) for g in grads]


def _add(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b
