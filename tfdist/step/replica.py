"""What one replica does with its rows of a global batch: taking them, the forward and the backward pass."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tfdist.data import static_rows
from tfdist.data.batch_layout import Batch, Layout, Rows, rows_of, unpack
from tfdist.data.static_rows import Given
from tfdist.data.structures import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.keras_bridge import (
    batch_norm_ops,
    keras_internals,
    layer_state,
    own_steps,
    preconditions,
    random_layers,
    trace_patches,
)
from tfdist.keras_bridge.layer_state import LayerState
from tfdist.keras_bridge.loss import Objective
from tfdist.step.partial_sums import Payload, goals

Taken: TypeAlias = Batch | Given
"""What a replica gets of a global batch: all of it, its worker's part, or what the host has taken out for it."""


class PassResult(NamedTuple):
    """What a pass over a micro-batch gives."""

    payload: Payload
    """Gradients, if it trains, and sums, to be added up over replicas and micro-batches."""
    outputs: Structure
    """The model's, for the metrics, with Keras masks attached where there are any."""


class _Form:
    """The Python structure of a `PassResult` whose tensors come out of a function of their own."""

    def __init__(self) -> None:
        self._payload: Payload
        self._outputs: Structure = None
        self._masked: list[bool] = []

    def flat(self, result: PassResult, missing: int = 0) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """Returns the tensors, outputs and masks of a result within that function; so many rows are added to them."""
        more = lambda tensor: tf.concat([tensor, *[tensor[-1:]] * missing], 0) if missing else tensor
        leaves = keras.tree.flatten(result.outputs)
        masks = [keras_internals.mask_of(leaf) for leaf in leaves]
        self._payload, self._outputs = result.payload, result.outputs
        self._masked = [mask is not None for mask in masks]
        return result.payload.tensors(), list(map(more, leaves)), [more(mask) for mask in masks if mask is not None]

    def packed(self, tensors: list[tf.Tensor], leaves: list[tf.Tensor], masks: list[tf.Tensor]) -> PassResult:
        """Returns the result outside of that function, given what `flat` has returned within."""
        remaining = iter(masks)
        for leaf, masked in zip(leaves, self._masked):
            if masked:
                keras_internals.set_mask(leaf, next(remaining))
        return PassResult(self._payload.with_tensors(tensors), keras.tree.pack_sequence_as(self._outputs, leaves))


class Replica:
    """The part of a step that one replica computes by itself; called in replica context, while a step is traced."""

    def __init__(self, model: keras.Model, distribution: Distribution, jit: bool):
        self._model: Callable[[], keras.Model] = weakref.ref(model)  # see Step.model
        self.distribution = distribution
        self.jit = jit
        """Whether XLA compiles the passes."""
        self.timed = distribution.timed
        """Whether the compiled functions can tell what they wait for."""
        # A TPU has no float64 in hardware: what a replica tells is added up on the host.
        self.totals = tf.float32 if distribution.static_shapes else tf.float64
        """Type of the numbers that a replica tells of a batch, besides its losses."""
        self.objective = Objective(model, distribution, jit=jit)
        self.state = LayerState(model, distribution.replicas)
        self.bare = False
        """Whether Keras would hand inputs alone to a step as they are, and not as a tuple of one."""

    @property
    def model(self) -> keras.Model:
        """The model, which the caller keeps alive."""
        return self._model()

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Puts right, while a step is traced, what Keras does for a replica that is not all there is.

        Replicas are traced in threads: this surrounds them all.
        """
        with (
            trace_patches.recomputation_refused(),
            random_layers.as_the_environment_says(self.model),
            trace_patches.without_gradient_registry(),
            keras_internals.unscaled_losses(),
            layer_state.separate_losses(self.model),
            batch_norm_ops.synchronized(self.model, self.distribution.replicas),
        ):
            yield

    def count(self, layout: Layout, batch: Taken) -> tf.Tensor | int:
        """Returns how many examples a global batch has."""
        return layout.batch if isinstance(batch, Given) else batch.count

    def take(
        self,
        layout: Layout,
        batch: Taken,
        count: tf.Tensor | int,
        micro: tf.Tensor | int = 0,
        shard: tf.Tensor | None = None,
    ) -> Rows:
        """Returns this replica's rows of a micro-batch.

        Args:
          batch: see `Taken`.
          count: examples in the global batch; an int says that it is full and divides evenly, or that shapes are
            static.
          micro: number of the micro-batch.
          shard: which one's rows, where there are shards.
        """
        if isinstance(batch, Given):
            return static_rows.rows_of(batch, layout, micro)
        replica = self.distribution.replica_id() if layout.replicas > 1 else 0
        replica = replica if shard is None else shard
        share, in_own = layout.shared(count, micro, replica), layout.in_own(count, micro, replica)
        # The table stays with the host: on a GPU, each batch would first bring the whole data set there.
        on_gpu = self.distribution.device_kind == "GPU"
        with tf.device("CPU:0") if on_gpu else contextlib.nullcontext():
            data = rows_of(batch, share, in_own)
        whole = layout.micro_batch(count, micro).rows
        certain = layout.replicas * layout.accumulate == 1 or isinstance(count, int) or layout.none_empty
        most = layout.micro if layout.local else 0
        apart = layout.accumulate * (layout.replicas if layout.shards else 1)
        return Rows(data, share.rows, whole, apart, most, None if certain else share.rows > 0)

    def forward(self, x: Structure, training: bool) -> Structure:
        """Calls the model."""
        if keras_internals.takes_training(self.model):
            return self.model(x, training=training)
        return self.model(x)

    def as_keras_gives(self, data: tuple[Structure, ...]) -> Structure:
        """Returns a batch in the form in which Keras' `fit` hands it to a model's own step."""
        return data[0] if self.bare and len(data) == 1 else data

    def predict(self, data: tuple[Structure, ...]) -> Structure:
        """Returns the outputs for a batch, by the model's own `predict_step` if it has one."""
        if own_steps.replaced(self.model, own_steps.PREDICTION):
            return self.model.predict_step(self.as_keras_gives(data))
        return self.forward(data[0], training=False)

    def passes(self, rows: Rows, count: tf.Tensor | int, training: bool, scale: tf.Tensor | None = None) -> PassResult:
        """Runs forward, and for training backward, over one micro-batch; by XLA when asked for.

        Args:
          rows: (x, y, weight) of this replica.
          count: examples in the global batch.
          scale: factor on what is differentiated, of a `LossScaleOptimizer`; None for 1.

        Raises:
          UserError: there is nothing to train.
        """
        if rows.filled and not self.exchanges(rows.micro_batches):
            return self._of_either_number(rows, lambda some: self._passes(some, count, training, scale))
        if not self.jit:
            return self._passes(rows, count, training, scale)
        form = _Form()

        def flat(rows, count, scale):
            return form.flat(self._passes(rows, count, training, scale))

        return form.packed(*tf.function(flat, autograph=False, jit_compile=True)(rows, count, scale))

    def exchanges(self, micro_batches: int) -> bool:
        """Returns whether the replicas exchange something within a pass, so that all must run the same one."""
        if self.distribution.replicas == 1:
            return False
        return preconditions.synchronizes(self.model) or self.objective.gathers(micro_batches)

    def _of_either_number(self, rows: Rows, passes: Callable[[Rows], PassResult]) -> PassResult:
        """Runs a pass over the rows that count: all there are, or all but the last.

        Both are traced and one of them runs, so that the filler is in nothing that layers count, average or add.
        """
        form = _Form()

        def of(number: int) -> Callable[[], tuple]:
            data = keras.tree.map_structure(lambda tensor: tensor[:number], rows.data)
            some = rows._replace(data=data, number=number, filled=False)
            return lambda: form.flat(passes(some), missing=rows.most - number)

        return form.packed(*tf.cond(tf.equal(rows.number, rows.most), of(rows.most), of(rows.most - 1)))

    def _passes(self, rows: Rows, count: tf.Tensor | int, training: bool, scale: tf.Tensor | None) -> PassResult:
        x, y, weight = unpack(rows.data)
        targets = [v.value for v in self.model.trainable_variables]
        with tf.GradientTape(persistent=True) as tape:
            with self.state.of_real_rows(rows.present, rows.real()):
                outputs = self.forward(x, training)
            parts = self.objective.parts(y, outputs, weight, rows, count)
            if not parts and training and not self.objective.regularized:
                raise UserError("the model has no loss: give compile() a loss, or call add_loss() in a layer")
            scalars = goals(parts)
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
        return PassResult(Payload.of(groups, parts), outputs)
