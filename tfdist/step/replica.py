"""The part of a step that one replica computes by itself: its rows, forward and backward pass, and their sums.

The sums of slices add up to those of the global batch, which are divided once.
"""

import contextlib
import dataclasses
import operator
import os
import time
import weakref
from collections.abc import Callable
from typing import TypeAlias

import keras
import tensorflow as tf

from tfdist.cluster.env_vars import HOLD
from tfdist.data.batch_layout import HostSlice, Layout, MicroBatch, ReplicaBatch, unpack
from tfdist.data.spec import Structure
from tfdist.distributed.collectives import isolated_sum, sum_in_order
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.keras_bridge import batch_norm, keras_internals, layer_state, metrics, preconditions, rematerialization
from tfdist.keras_bridge.loss import LossTerm, Objective, objectives


@dataclasses.dataclass(slots=True)
class StepSums:
    """The sums of a slice of a global batch: gradients in groups, and one vector of loss sums.

    Group 0 is the gradient of all losses whose denominator is known beforehand; each further one has its own.
    """

    present: list[list[bool]]  # for each group, which of the trainable variables have a gradient
    terms: list[LossTerm]  # without their tensors
    grads: list[tf.Tensor]  # of all groups, one after the other
    scalars: tf.Tensor  # the numerators of all terms, and then the denominators of those that have one

    @classmethod
    def of(cls, groups: list[list[tf.Tensor | None]], terms: list[LossTerm]) -> "StepSums":
        """Packs the results of a backward pass.

        `groups`: one gradient or None per trainable variable, for each of `loss.objectives`; none where nothing trains.
        """
        own = [t for t in terms if t.denominator is not None]
        scalars = [t.numerator for t in terms] + [t.denominator for t in own]
        dtype = scalars[0].dtype if scalars else tf.float32
        for scalar in scalars:
            dtype = scalar.dtype if scalar.dtype.size > dtype.size else dtype
        return cls(
            present=[[g is not None for g in group] for group in groups],
            terms=[t._replace(numerator=None, denominator=None if t.denominator is None else True) for t in terms],
            grads=[g for group in groups for g in group if g is not None],
            scalars=tf.stack([tf.cast(s, dtype) for s in scalars]) if scalars else tf.zeros([1], dtype),
        )

    def tensors(self) -> list[tf.Tensor]:
        """Returns the tensors to add up, in an order that is the same everywhere."""
        return [*self.grads, self.scalars]

    def with_tensors(self, tensors: list[tf.Tensor]) -> "StepSums":
        """Returns the same with other `tensors`."""
        return dataclasses.replace(self, grads=list(tensors[:-1]), scalars=tensors[-1])

    def plus(self, tensors: list[tf.Tensor], add: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] = tf.add) -> "StepSums":
        """Returns the same with `tensors` of another slice added."""
        return self.with_tensors([add(a, b) for a, b in zip(self.tensors(), tensors)])

    def _values(self) -> list[tuple[LossTerm, tf.Tensor, tf.Tensor | None]]:
        """Returns the losses of the global batch: the one division.

        Each with one over its denominator, for its gradients; None where that was known beforehand.
        """
        own = iter(range(len(self.terms), len(self.terms) + sum(t.denominator is not None for t in self.terms)))
        values = []
        for i, term in enumerate(self.terms):
            value, factor = self.scalars[i], None
            if term.denominator is not None:
                factor = tf.math.divide_no_nan(tf.ones_like(value), self.scalars[next(own)])
                value = value * factor
            values.append((term, value, factor))
        return values

    def gradients(self) -> list[tf.Tensor | None]:
        """Returns the gradient of the global batch's loss, one tensor or None per trainable variable."""
        factors = [term.weighted(f) for term, _, f in self._values() if f is not None]
        if len(self.present) > len(factors):
            factors = [None, *factors]
        remaining = iter(self.grads)
        totals: list[tf.Tensor | None] = [None] * (len(self.present[0]) if self.present else 0)
        for present, factor in zip(self.present, factors):
            for i in (i for i, has_gradient in enumerate(present) if has_gradient):
                grad, total = next(remaining), totals[i]
                grad = grad if factor is None else grad * tf.cast(factor, grad.dtype)
                totals[i] = grad if total is None else isolated_sum(total, grad)
        return totals

    def by_term(self) -> dict[str, tf.Tensor]:
        """Returns each loss of the global batch, and the sum of all `add_loss`, by their names in messages."""
        values: dict[str, tf.Tensor] = {}
        for term, value, _ in self._values():
            name = f"loss {term.name!r}" if term.name else "add_loss"
            values[name] = values[name] + value if name in values else value
        return values

    def losses(self, penalties: list[tf.Tensor]) -> tf.Tensor:
        """Returns the total loss of the global batch, then the single losses if there are several, [1 + outputs]."""
        if len(self.terms) == 1 and self.terms[0].denominator is None and not penalties:
            return self.terms[0].weighted(self.scalars)
        values = self._values()
        weighted = [term.weighted(value) for term, value, _ in values]
        weighted += [tf.cast(p, self.scalars.dtype) for p in penalties]
        single = [value for term, value, _ in values if term.name]
        total = sum_in_order(weighted) if weighted else tf.zeros([], self.scalars.dtype)
        return tf.stack([total, *(single if len(single) > 1 else [])])


def seconds_now(*after: tf.Tensor | tf.Operation) -> tf.Tensor:
    """Returns seconds since 1970 as float64, read once the tensors `after` exist, and the operations have run."""
    with tf.control_dependencies(list(after)):
        if keras_internals.is_deterministic():  # where TensorFlow refuses its own clock
            return tf.ensure_shape(tf.numpy_function(time.time, [], tf.float64, name="tfdist"), [])
        return tf.timestamp()


def timed(
    reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]], tensors: list[tf.Tensor], clock: bool
) -> tuple[list[tf.Tensor], tf.Tensor | None]:
    """Returns what `reduce` makes of tensors, and its seconds, float64; None without a clock."""
    if not clock:
        return reduce(tensors), None
    begun = seconds_now(*tensors)
    # What is sent last waits for the clock, so that the sums of the others begin within the backward pass; without
    # this dependency, a busy executor may read the clock any time later.
    with tf.control_dependencies([begun]):
        first = tf.identity(tensors[0])
    totals = reduce([first, *tensors[1:]])
    return totals, seconds_now(*totals) - begun


PassResult: TypeAlias = tuple[StepSums, Structure]
"""Sums of a micro-batch, and the model's outputs, for the metrics, with Keras masks attached where there are any."""


class Replica:
    """One replica of a model; called in replica context, while a step is traced."""

    def __init__(self, model: keras.Model, distribution: Distribution, jit: bool):
        self.model_ref: Callable[[], keras.Model] = weakref.ref(model)  # see Step.model
        self.distribution = distribution
        self.jit = jit  # whether XLA compiles the passes
        self._on_gpu = distribution.device_kind == "GPU"
        # A TPU has no float64 in hardware: numbers of single batches are added up on the host.
        self.totals = tf.float32 if distribution.static_shapes else tf.float64  # of what is returned besides losses
        self.objective = Objective(model, distribution, jit=jit)
        self._takes_training = keras_internals.takes_training(model)
        # Whether Keras would pass inputs alone to a step as they are, and not as a tuple of one; None where it would
        # pass three entries always, as its `train_on_batch` does.
        self.bare: bool | None = False

    model = property(operator.methodcaller("model_ref"))
    """The model, which the caller keeps alive."""

    def calling(self) -> contextlib.AbstractContextManager:
        """Lets layers be called: those that reduce by `Distribution.all_reduce`, and those that are computed again.

        Beyond it, optimizers in a loop of a script would reduce, too.
        """
        reduce, context = self.distribution.all_reduce, tf.distribute.get_replica_context()
        with contextlib.ExitStack() as patches:
            patches.enter_context(keras_internals.replaced("all_reduce", [(context, reduce)] if reduce else []))
            patches.enter_context(rematerialization.supported(self.model, self.jit or self.distribution.static_shapes))
            patches.enter_context(keras_internals.settings_in_threads())
            patches.enter_context(keras_internals.rows_are_no_bias())
            patches.enter_context(keras_internals.plain_gradients())
            return patches.pop_all()

    def tracing(self) -> contextlib.AbstractContextManager:
        """Patches Keras and TensorFlow, which assume a single replica, while a step is traced.

        Replicas are traced in threads: this surrounds them all.
        """
        model, replicas = self.model, self.distribution.replicas
        with contextlib.ExitStack() as patches:
            if os.environ.get(HOLD):  # a run that only checks others
                patches.enter_context(layer_state.inference_only(model))
            patches.enter_context(self.calling())
            patches.enter_context(keras_internals.without_gradient_registry())
            patches.enter_context(keras_internals.unscaled_losses())
            patches.enter_context(keras_internals.separate_losses(model))
            patches.enter_context(batch_norm.synchronized(model, replicas))
            return patches.pop_all()

    def count(self, layout: Layout, batch: ReplicaBatch) -> tf.Tensor | int:
        """Returns the number of examples in a global batch."""
        return layout.batch if layout.full or isinstance(batch, HostSlice) else batch.count

    def micro_batch(
        self,
        layout: Layout,
        batch: ReplicaBatch,
        count: tf.Tensor | int,
        micro: tf.Tensor | int = 0,
        virtual: tf.Tensor | None = None,
    ) -> MicroBatch:
        """Returns the rows of this replica, or of a virtual one, in a micro-batch.

        `count`: examples in the global batch; an int says that it is full, or shapes are static.
        """
        replica = self.distribution.replica_id() if layout.replicas > 1 and virtual is None else 0
        if isinstance(count, int) and (known := tf.get_static_value(replica)) is not None:
            replica = int(known)
        # The table stays with the host: on a GPU, each batch would first bring the whole data set there.
        on_gpu = self._on_gpu and not isinstance(batch, HostSlice)
        with tf.device("CPU:0") if on_gpu else contextlib.nullcontext():
            rows = batch.micro_batch(layout, count, micro, replica if virtual is None else virtual)
        carried = keras_internals.fixed_batch(self.model) if keras_internals.stateful_layers(self.model) else None
        if carried:
            what = f"stateful layers carry on {carried} rows: give full batches, of the size that the model is made for"
            if isinstance(rows.size, int) and rows.size != carried:
                raise UserError(what)
            # Else the loop over time of a layer whose state has one row would not know that its shape stays.
            with tf.control_dependencies([tf.debugging.Assert(tf.equal(rows.size, carried), [what])]):
                shaped = lambda t: tf.ensure_shape(tf.identity(t), [carried, *t.shape[1:]]) if t.shape.rank else t
                rows = rows._replace(data=keras.tree.map_structure(shaped, rows.data))
        return rows

    def forward(self, x: Structure, training: bool) -> Structure:
        """Calls the model."""
        model = self.model
        return model(x, training=training) if self._takes_training else model(x)

    def as_keras_gives(self, data: tuple[Structure, ...]) -> Structure:
        """Returns a batch in the form in which Keras passes it to a model's own step."""
        if self.bare is None:
            return unpack(data)
        return data[0] if self.bare and len(data) == 1 else data

    def predict(self, data: tuple[Structure, ...]) -> Structure:
        """Returns the outputs for a batch, by the model's own `predict_step` if it has one."""
        if preconditions.replaced(self.model, preconditions.PREDICTION):
            return self.model.predict_step(self.as_keras_gives(data))
        return self.forward(data[0], training=False)

    def sums(self, rows: MicroBatch, count: tf.Tensor | int, training: bool, scale: tf.Tensor | None) -> StepSums:
        """Runs `passes` over one micro-batch, updates the metrics, and returns the sums."""
        sums, outputs = self.passes(rows, count, training, scale)
        metrics.update(self.model, self.distribution, rows, outputs)
        return sums

    def passes(self, rows: MicroBatch, count: tf.Tensor | int, training: bool, scale: tf.Tensor | None) -> PassResult:
        """Runs forward, and for training backward, over one micro-batch; by XLA if configured.

        Args:
          count: examples in the global batch.
          scale: factor on what is differentiated, of a `LossScaleOptimizer`; None for 1.
        """
        run = lambda rows, count, scale: self._passes(rows, count, training, scale)
        if rows.padded and not self.exchanges(rows.parts):
            # Both sizes are traced and one of them runs, so that layers never count, average or add the padding.
            def branch(size: int, flat: Callable[..., list]) -> Callable[[], list]:
                data = keras.tree.map_structure(lambda tensor: tensor[:size], rows.data)
                real = rows._replace(data=data, size=size, padded=False, row_mask=None)
                return lambda: flat(real, count, scale, padding=rows.max_size - size)

            is_full = tf.equal(rows.size, rows.max_size)
            return _across_function(
                run, lambda flat: tf.cond(is_full, branch(rows.max_size, flat), branch(rows.max_size - 1, flat))
            )
        if not self.jit:
            return run(rows, count, scale)
        return _across_function(
            run, lambda flat: tf.function(flat, autograph=False, jit_compile=True)(rows, count, scale)
        )

    def exchanges(self, parts: int) -> bool:
        """Returns whether the replicas exchange something within a pass, so that all must run the same one."""
        if self.distribution.replicas == 1:
            return False
        return preconditions.synchronizes(self.model) or self.objective.gathers(parts)

    def _passes(self, rows: MicroBatch, count: tf.Tensor | int, training: bool, scale: tf.Tensor | None) -> PassResult:
        model, (x, y, weight) = self.model, unpack(rows.data)
        targets = [v.value for v in model.trainable_variables]
        with tf.GradientTape(persistent=True) as tape, keras_internals.recording(tape):
            undone: contextlib.AbstractContextManager = contextlib.nullcontext()
            if rows.present is not None or rows.row_mask is not None:
                replicas = self.distribution.replicas
                undone = layer_state.restored_without_rows(
                    model, replicas, rows.present, rows.row_mask, parts=rows.parts
                )
            with undone:
                outputs = self.forward(x, training)
            terms = self.objective.terms(y, outputs, weight, rows, count)
            if not terms and training and not self.objective.regularized:
                raise UserError("the model has no loss", "give compile() a loss, or call add_loss() in a layer")
            scalars = objectives(terms)
            if scale is not None:
                scalars = [scalar * tf.cast(scale, scalar.dtype) for scalar in scalars]
        # Regularization alone is added after the sum.
        groups: list[list[tf.Tensor | None]] = [] if scalars or not training else [[None] * len(targets)]
        if training:
            for scalar in scalars:
                gradients = tape.gradient(scalar, targets)
                # Embeddings give IndexedSlices; Keras' optimizers treat them as dense, and so does the sum.
                groups.append([None if g is None else tf.convert_to_tensor(g) for g in gradients])
        del tape
        return StepSums.of(groups, terms), outputs


def _across_function(passes: Callable[..., PassResult], run: Callable[[Callable[..., list]], list]) -> PassResult:
    """Returns the result of `passes` where `run` calls it in a graph of its own, out of which only tensors come.

    `run`: given a function that takes the arguments of `passes` and the rows to append to the outputs, as it returns.
    """
    traced: list[PassResult] = []

    def flat(*arguments: object, padding: int = 0) -> list:
        sums, outputs = passes(*arguments)
        traced[:] = [(sums, outputs)]
        padded = lambda tensor: tf.concat([tensor, *[tensor[-1:]] * padding], 0) if padding else tensor
        leaves = keras.tree.flatten(outputs)
        attached = enumerate(getattr(leaf, keras_internals.MASK, None) for leaf in leaves)
        masks = {str(i): padded(mask) for i, mask in attached if mask is not None}
        return [sums.tensors(), [padded(leaf) for leaf in leaves], masks]

    tensors, leaves, masks = run(flat)
    for i, mask in masks.items():
        setattr(leaves[int(i)], keras_internals.MASK, mask)
    ((sums, outputs),) = traced
    return sums.with_tensors(tensors), keras.tree.pack_sequence_as(outputs, leaves)
