"""What one replica does with its rows of a global batch: taking them, the forward and the backward pass."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.data.batch_layout import Batch, Layout, Rows, rows_of, unpack
from tfdist.data.structures import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.engine.step.loss import Objective
from tfdist.engine.step.partial_sums import Payload, goals
from tfdist.engine.tracing import layer_state, synchronized_batch_norm, trace_patches
from tfdist.engine.tracing.layer_state import LayerState
from tfdist.errors import UserError
from tfdist.models import keras_internals, own_steps


class PassResult(NamedTuple):
    """What a pass over a micro-batch gives."""

    payload: Payload
    """Gradients, if it trains, and sums, to be added up over replicas and micro-batches."""
    outputs: Structure
    """The model's, for the metrics, with Keras masks attached where there are any."""


class Replica:
    """The part of a step that one replica computes by itself; called in replica context, while a step is traced."""

    def __init__(self, model: keras.Model, distribution: Distribution, jit: bool):
        self._model: Callable[[], keras.Model] = weakref.ref(model)  # see Step.model
        self.distribution = distribution
        self.jit = jit
        """Whether XLA compiles the passes."""
        # A GPU works behind the back of the host, whose clock then tells nothing.
        self.timed = distribution.devices[0].startswith("CPU")
        """Whether the compiled functions can tell what they wait for."""
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
            trace_patches.quick(),
            keras_internals.unscaled_losses(),
            layer_state.separate_losses(self.model),
            synchronized_batch_norm.exact(self.model, self.distribution.replicas),
        ):
            yield

    def take(self, layout: Layout, batch: Batch, count: tf.Tensor | int, micro: tf.Tensor | int = 0) -> Rows:
        """Returns this replica's rows of a micro-batch.

        Args:
          batch: the global batch, or this worker's part of it.
          count: examples in the global batch; an int says that it is full and divides evenly.
          micro: number of the micro-batch.
        """
        replica = self.distribution.replica_id() if layout.replicas > 1 else 0
        share, in_own = layout.shared(count, micro, replica), layout.in_own(count, micro, replica)
        # The table stays with the host: on a GPU, each batch would first bring the whole data set there.
        on_gpu = self.distribution.devices[0].startswith("GPU")
        with tf.device("CPU:0") if on_gpu else contextlib.nullcontext():
            data = rows_of(batch, share, in_own)
        whole = layout.micro_batch(count, micro).rows
        certain = layout.replicas * layout.accumulate == 1 or isinstance(count, int)
        most = layout.micro if layout.local else None
        return Rows(data, share.rows, whole, layout.accumulate, most, None if certain else share.rows > 0)

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
        if not self.jit:
            return self._passes(rows, count, training, scale)
        # The Python structure of the result is kept outside the graph.
        kept: dict[str, Any] = {}

        def flat(rows, count, scale):
            payload, outputs = self._passes(rows, count, training, scale)
            leaves = keras.tree.flatten(outputs)
            masks = [keras_internals.mask_of(leaf) for leaf in leaves]
            kept.update(payload=payload, outputs=outputs, masked=[mask is not None for mask in masks])
            return payload.tensors(), leaves, [mask for mask in masks if mask is not None]

        tensors, leaves, masks = tf.function(flat, autograph=False, jit_compile=True)(rows, count, scale)
        remaining = iter(masks)
        for leaf, masked in zip(leaves, kept["masked"]):
            if masked:
                keras_internals.set_mask(leaf, next(remaining))
        return PassResult(kept["payload"].with_tensors(tensors), keras.tree.pack_sequence_as(kept["outputs"], leaves))

    def _passes(self, rows: Rows, count: tf.Tensor | int, training: bool, scale: tf.Tensor | None) -> PassResult:
        x, y, weight = unpack(rows.data)
        targets = [v.value for v in self.model.trainable_variables]
        with tf.GradientTape(persistent=True) as tape:
            with self.state.of_real_rows(rows.present):
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
