"""One optimizer update from gradients that are already summed over all replicas.

Keras' optimizers spend many small ops per variable, and under tf.distribute they reduce again, clip what one replica
sees, and cannot average weights in a graph. For Adam, AdamW and SGD the update is TensorFlow's fused op on the slots
that the Keras optimizer owns; every other optimizer is called as it is, with its own reduction switched off.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist.config.messages import logger
from tfdist.distributed.collectives import isolated_sum
from tfdist.errors import UserError
from tfdist.keras_bridge import ema, keras_internals, zero
from tfdist.keras_bridge.keras_internals import inner_optimizer

OVERFLOW = 65520.0  # smallest number that is rounded to infinity in float16
FUSED = (keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.SGD)

Gradients: TypeAlias = "list[tf.Tensor | None]"
"""One dense tensor per trainable variable, None where the loss does not depend on it."""


def check_methods(optimizer: keras.optimizers.Optimizer, names: Sequence[str]) -> None:
    """Raises UserError if an optimizer has a method of its own, of these names, in whose place tfdist acts."""
    for asked in (optimizer, *keras_internals.updating(optimizer)):
        for name in names:
            if not keras_internals.is_theirs(asked, name):
                what = f"optimizer {type(asked).__name__} has its own {name}, which tfdist does not call"
                raise UserError(what, "leave it out, and do what it does in update_step or in a callback")


def check(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises UserError for optimizer settings, and methods of a subclass, that tfdist replaces."""
    check_methods(optimizer, ("scale_loss", "finalize_variable_values"))
    for updating in keras_internals.updating(optimizer):
        if updating.use_ema and updating is not inner_optimizer(optimizer):
            raise UserError(f"optimizer {updating.name!r} within a {optimizer.name!r} has use_ema=True", "leave it out")


class OwnedOptimizer:
    """A built Keras optimizer, maybe a `LossScaleOptimizer`, whose updates tfdist makes.

    Args:
      variables: what it updates.
      factors: on the learning rate of each of `variables`; none for 1.
      in_float16: ids of variables whose gradient one device computes in float16, see `keras_internals.in_float16`.
      sliced: the optimizer's state, where replicas have slices of it.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable] = (),
        factors: Sequence[float] = (),
        in_float16: Collection[int] = (),
        sliced: zero.SlicedState | None = None,
    ):
        self._optimizer, self._variables = optimizer, list(variables)
        self._in_float16, self._sliced = in_float16, sliced
        self.base = base = inner_optimizer(optimizer)
        self._factors = {keras_internals.variable_key(base, v): f for v, f in zip(variables, factors)}
        # Whether updates are TensorFlow's fused ops, of exact classes only: others may compute something else.
        as_made = all(
            keras_internals.is_theirs(o, name) for o in (optimizer, base) for name in keras_internals.UPDATING
        )
        self._is_fused = as_made and type(base) in FUSED and not getattr(base, "amsgrad", False)
        self._places = keras_internals.places(base, variables) if self._is_fused or sliced else []
        if sliced and factors:
            own = [(sliced.slices[place], f) for place, f in zip(self._places, factors) if place in sliced.slices]
            self._factors |= {keras_internals.variable_key(base, part): f for part, f in own}
        self._averages = base.use_ema  # whether it keeps moving averages of the weights
        self._constraints: ema.Constraints = {}  # those that Keras is kept from

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """While an update is traced, keeps Keras' optimizer from reducing again and from averaging weights.

        Writing averages over the weights fails in a graph (keras issue 20582), so tfdist keeps them up itself. Replicas
        are traced in threads: this surrounds them all.
        """
        for dtype in {str(v.dtype) for v in self._variables} & {"bfloat16", "float16"}:
            _warn_of_low_precision(dtype, "" if self._is_fused else type(self.base).__name__)
        with contextlib.ExitStack() as changes:
            changes.enter_context(keras_internals.replaced("use_ema", [(self.base, False)]))
            if self._sliced:
                changes.enter_context(keras_internals.known_slices(self.base, self._sliced.slices))
                changes.enter_context(keras_internals.update_steps(self._update_slices))
            if (self._averages or self._sliced) and not self._is_fused:
                self._constraints = changes.enter_context(ema.unconstrained(self._variables))
            changes.enter_context(keras_internals.without_reduction())
            if self._factors and not self._is_fused:
                for updating in keras_internals.updating(self._optimizer):
                    changes.enter_context(keras_internals.scaled_rates(updating, self._factor))
            yield

    def loss_scale(self) -> tf.Tensor | None:
        """Returns the factor that a `LossScaleOptimizer` wants on the loss, a scalar; None for other optimizers."""
        return None if self._optimizer is self.base else tf.convert_to_tensor(self._optimizer.dynamic_scale)

    def _factor(self, variable: keras.Variable | tf.Variable) -> float:
        """Returns the factor on the learning rate of a variable."""
        return self._factors.get(keras_internals.variable_key(self.base, variable), 1.0) if self._factors else 1.0

    def apply(self, grads: Gradients, penalty_grads: Gradients, after: list[tf.Tensor]) -> None:
        """Updates the variables and the optimizer's state; called in replica context, within `tracing`.

        Args:
          grads: the same on every replica; the scale of a `LossScaleOptimizer` is still in them.
          penalty_grads: of the regularizers, without that scale.
          after: tensors of the backward pass: once they exist, nothing reads a weight anymore.
        """
        if not self._variables:
            return  # as in Keras, which says that there is nothing to train
        present = [own is not None or penalty is not None for own, penalty in zip(grads, penalty_grads)]
        if not any(present):
            raise UserError("no trainable variable has a gradient: the loss does not depend on the model's weights")
        if self._optimizer is not self.base and self._in_float16:
            # A sum over replicas as one device has it: a loss scale is halved for what overflows there.
            halved = [g is not None and id(v) in self._in_float16 for g, v in zip(grads, self._variables)]
            grads = [tf.where(tf.abs(g) < OVERFLOW, g, float("inf")) if h else g for g, h in zip(grads, halved)]
        before = tf.identity(keras_internals.counter(self.base).value)
        if self._sliced and (self._optimizer is not self.base or self.base.gradient_accumulation_steps):
            for place, variable in zip(self._places, self._variables):
                self._sliced.load(place, variable)  # as the weight is, if this turns out to be no update
        if not self._is_fused:
            self._apply_keras(grads, penalty_grads)
        elif self._optimizer is self.base:
            self._apply_fused(_added(grads, penalty_grads), after)
        else:
            self._apply_scaled(grads, penalty_grads)
        if self._sliced:
            updated = itertools.compress(zip(self._places, self._variables), present)
            self._sliced.spread(dict(updated), tf.minimum(before, 0))
        if self._sliced or (self._averages and not self._is_fused):
            # Averages all weights and constrains those updated, after Keras or where both need whole ones of slices.
            counted = tf.not_equal(before, tf.identity(keras_internals.counter(self.base).value))
            if self._averages:
                ema.add(self.base, self._variables, before, counted)
            changed = list(itertools.compress(self._variables, present))
            constraints = self._constraints or {id(v): v.constraint for v in changed if v.constraint is not None}
            ema.constrain(constraints, changed, counted)

    def _update_slices(
        self, optimizer: keras.optimizers.Optimizer, grads: list[tf.Tensor], variables: list[keras.Variable], rate: Any
    ) -> None:
        """Makes an optimizer of Keras update this replica's slices; replicas cannot meet within its branches."""
        assert self._sliced is not None
        for place, grad, variable in zip(keras_internals.places(optimizer, variables), grads, variables):
            grad, part = self._sliced.taken(place, grad, variable)
            optimizer.update_step(grad, part.value, rate)

    def _apply_keras(self, grads: Gradients, penalty_grads: Gradients) -> None:
        # The optimizer divides by its loss scale; nobody has multiplied the loss by a `loss_scale_factor`.
        scale, factor = self.loss_scale(), self.base.loss_scale_factor
        if scale is not None:
            penalty_grads = [None if g is None else g * tf.cast(scale, g.dtype) for g in penalty_grads]
        grads = _added(grads, penalty_grads)
        if scale is None and factor is not None:
            grads = [None if g is None else g * tf.constant(factor, g.dtype) for g in grads]
        # And not apply(), as Keras: a subclass may have changed it. Those without a gradient go along: MultiOptimizer
        # needs as many gradients as it has variables.
        self._optimizer.apply_gradients(list(zip(grads, self._variables)))

    def _apply_scaled(self, grads: Gradients, penalty_grads: Gradients) -> None:
        """Does what keras.optimizers.LossScaleOptimizer does, deciding on the sum over all replicas."""
        present = [g for g in grads if g is not None]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in present])
        scale, steps = self._optimizer.dynamic_scale, self._optimizer.step_counter

        def good() -> tf.Tensor:
            # Divides, as Keras: the reciprocal of most scales is rounded, and that of 2.0**127 is flushed to zero.
            unscaled = [None if g is None else keras.ops.divide(g, scale) for g in grads]
            self._apply_fused(_added(unscaled, penalty_grads), [])  # all sums exist: they were looked at
            grow = tf.equal(tf.convert_to_tensor(steps), self._optimizer.dynamic_growth_steps - 1)
            scale.assign(tf.where(grow, scale * 2.0, scale))
            steps.assign(tf.where(grow, tf.zeros_like(steps), steps + 1))
            return tf.constant(0)

        def bad() -> tf.Tensor:
            scale.assign(scale * 0.5)
            steps.assign(tf.zeros_like(steps))
            return tf.constant(0)

        tf.cond(finite, good, bad)

    def _apply_fused(self, grads: Gradients, after: list[tf.Tensor]) -> None:
        """Updates by TensorFlow's fused ops; with `gradient_accumulation_steps` at the last of so many batches."""
        optimizer, counter = self.base, keras_internals.counter(self.base).value
        before = tf.identity(counter)
        if steps := optimizer.gradient_accumulation_steps:
            accumulators = keras_internals.accumulators(optimizer)
            sums = [accumulators[i] for i in self._places]
            totals = [None if g is None else tf.cast(g, s.dtype) + s for g, s in zip(grads, sums)]

            def add() -> tf.Tensor:
                for total, accumulator in zip(totals, sums):
                    if total is not None:
                        _write(accumulator, total)
                return tf.constant(0)

            def update() -> tf.Tensor:
                self._update([None if t is None else t / steps for t in totals], after)
                for accumulator in accumulators:
                    _write(accumulator, tf.zeros(accumulator.shape, accumulator.dtype))
                return tf.constant(0)

            tf.cond(tf.equal((before + 1) % steps, 0), update, add)
        else:
            self._update(grads, after)
        if self._averages and not self._sliced:
            ema.add(optimizer, self._variables, before, None)
        for grad, variable in zip(grads, self._variables) if not self._sliced else ():
            if grad is not None and variable.constraint is not None:
                variable.assign(variable.constraint(variable))
        # The variable's own assign_add would gather all replicas; each adds to its copy instead.
        tf.raw_ops.AssignAddVariableOp(resource=counter.handle, value=tf.ones_like(before))

    def _update(self, grads: Gradients, after: list[tf.Tensor]) -> None:
        """Clips, decays weights, and updates them."""
        optimizer = self.base
        grads = clip(optimizer, grads)
        rate = tf.convert_to_tensor(optimizer.learning_rate)
        triples = [(i, g, v) for i, g, v in zip(self._places, grads, self._variables) if g is not None]
        for _, _, variable in triples:
            if optimizer.weight_decay is not None and keras_internals.decays(optimizer, variable):
                exact = _exact(variable.value.dtype)
                decay = tf.cast(self._times(rate, variable), exact) * tf.cast(optimizer.weight_decay, exact)
                variable.assign_sub(tf.cast(tf.cast(variable, exact) * decay, variable.dtype))
        update = self._sgd(rate) if isinstance(optimizer, keras.optimizers.SGD) else self._adam(rate)
        # A weight that the backward pass still reads would be copied before it is written.
        with tf.control_dependencies(after):
            for i, grad, variable in triples:
                if self._sliced:
                    grad, variable = self._sliced.taken(i, grad, variable)
                update(i, tf.cast(grad, variable.dtype), variable)

    def _adam(self, rate: tf.Tensor) -> Callable[[int, tf.Tensor, keras.Variable], None]:
        """keras.optimizers.Adam.update_step as one op per variable.

        The op takes 1 - beta_2 from a beta_2 that is rounded to float32, 1.3e-5 beside the 0.001 that Keras multiplies
        with. The second moment is then off by (1 - b^t) / (1 - d^t), b and d being what the two decay by; to first
        order in e = b - d, its root by 1 - e t b^t / (2 (1 - b^t)), which is put right here. Without it, ten updates
        differ from Keras' by 1.3e-6.
        """
        optimizer = self.base
        moments, velocities = keras_internals.adam_slots(optimizer)
        step = optimizer.iterations + 1

        @functools.cache
        def constants(dtype: tf.DType) -> dict[str, tf.Tensor]:
            # As in Keras, whose `cast` makes a float32 of a number first: only the powers are of such.
            t = tf.cast(step, dtype)
            power = lambda beta: tf.pow(tf.cast(beta, dtype), t)
            constant = lambda value: tf.constant(value, dtype)
            beta2_power = power(optimizer.beta_2)
            exact = dtype.as_numpy_dtype
            half = 0.5 * (float(exact(optimizer.beta_2)) - (1.0 - float(exact(1.0 - optimizer.beta_2))))
            right = 1 - constant(half) * t * beta2_power / (1 - beta2_power)
            return dict(
                beta1=constant(optimizer.beta_1),
                beta2=constant(optimizer.beta_2),
                beta1_power=power(optimizer.beta_1),
                beta2_power=beta2_power,
                lr=tf.cast(rate, dtype) * right,
                epsilon=constant(optimizer.epsilon) * right,
            )

        def update(i: int, grad: tf.Tensor, variable: keras.Variable) -> None:
            exact = _exact(grad.dtype)
            first, second = moments[i], velocities[i]
            c = {**constants(exact), "lr": self._times(constants(exact)["lr"], variable)}
            if exact == grad.dtype:
                handles = dict(var=variable.value.handle, m=first.value.handle, v=second.value.handle)
                tf.raw_ops.ResourceApplyAdam(**handles, grad=grad, **c)
                return
            grad = tf.cast(grad, tf.float32)
            m = c["beta1"] * tf.cast(first, tf.float32) + (1 - c["beta1"]) * grad
            v = c["beta2"] * tf.cast(second, tf.float32) + (1 - c["beta2"]) * tf.square(grad)
            rate = c["lr"] * tf.sqrt(1 - c["beta2_power"]) / (1 - c["beta1_power"])
            _write(first, m)
            _write(second, v)
            _write(variable, tf.cast(variable, tf.float32) - rate * m / (tf.sqrt(v) + c["epsilon"]))

        return update

    def _sgd(self, rate: tf.Tensor) -> Callable[[int, tf.Tensor, keras.Variable], None]:
        """keras.optimizers.SGD.update_step as one op per variable."""
        optimizer = self.base

        def update(i: int, grad: tf.Tensor, variable: keras.Variable) -> None:
            exact = _exact(grad.dtype)
            lr = tf.cast(self._times(rate, variable), exact)
            if exact != grad.dtype:
                step = -lr * tf.cast(grad, exact)
                if optimizer.momentum:
                    velocity = optimizer.momentum * tf.cast(optimizer.momentums[i], exact) + step
                    _write(optimizer.momentums[i], velocity)
                    step = optimizer.momentum * velocity + step if optimizer.nesterov else velocity
                _write(variable, tf.cast(variable, exact) + step)
            elif optimizer.momentum == 0:
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

    def _times(self, rate: tf.Tensor, variable: keras.Variable) -> tf.Tensor:
        """The learning rate of a variable."""
        factor = self._factor(variable)
        return rate if factor == 1 else rate * factor


def _exact(dtype: tf.DType) -> tf.DType:
    """Returns the type to compute an update in: in bfloat16, beta_2 is 1, and Adam divides zero by zero."""
    return tf.float32 if dtype in (tf.bfloat16, tf.float16) else dtype


def _write(variable: keras.Variable, value: tf.Tensor) -> None:
    """Rounds a value to the type of a variable and writes this replica's copy, as TensorFlow's fused ops do."""
    keras_internals.write_copy(variable.value, tf.cast(value, variable.value.dtype))


@functools.cache
def _warn_of_low_precision(dtype: str, rounding: str) -> None:
    """Warns once; `rounding` is the optimizer that rounds its own numbers, such as beta_2, to `dtype`, if it does."""
    too = f", and {rounding} rounds its own numbers, too" if rounding else ""
    logger.info(
        f"WARNING: the weights are kept in {dtype}, which loses updates that are small beside a weight (below about "
        f"1/{512 if dtype == 'bfloat16' else 4096} of it): a weight may not move at all{too}; use the policy "
        f"mixed_{dtype}{', or Adam, AdamW or SGD' if rounding else ''}"
    )


def clip(optimizer: keras.optimizers.Optimizer, grads: Gradients) -> Gradients:
    """Applies clipnorm, global_clipnorm or clipvalue of `optimizer` to the summed gradients."""
    present = [g for g in grads if g is not None]
    if optimizer.clipnorm:
        present = [tf.clip_by_norm(g, optimizer.clipnorm) for g in present]
    elif optimizer.global_clipnorm:
        present, _ = tf.clip_by_global_norm(present, optimizer.global_clipnorm)
    elif optimizer.clipvalue:
        present = [tf.clip_by_value(g, -optimizer.clipvalue, optimizer.clipvalue) for g in present]
    clipped = iter(present)
    return [None if g is None else next(clipped) for g in grads]


def _added(grads: Gradients, others: Gradients) -> Gradients:
    """Adds gradients variable by variable, in the type of the first."""
    pairs = zip(grads, others)
    return [b if a is None else a if b is None else isolated_sum(a, tf.cast(b, a.dtype)) for a, b in pairs]
