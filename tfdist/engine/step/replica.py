"""What one replica does with its rows of a global batch: taking them, the forward and the backward pass."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.data.batch_layout import Layout, unpack
from tfdist.data.structures import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.engine.step.loss import Objective
from tfdist.engine.step.partial_sums import Payload, goals
from tfdist.errors import UserError
from tfdist.models import keras_internals


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
        self.objective = Objective(model, jit=jit)

    @property
    def model(self) -> keras.Model:
        """The model, which the caller keeps alive."""
        return self._model()

    def take(self, layout: Layout, table: Structure, rows: tf.Tensor) -> Structure:
        """Returns this replica's rows of a global batch, tensors [layout.share, ...].

        Args:
          table: examples, tensors [n, ...].
          rows: of this worker's replicas in `table`, int32 [layout.own_rows].
        """
        if layout.here > 1:  # see Layout.own for the order
            by_replica = tf.reshape(rows, [layout.accumulate, layout.here, layout.micro])
            rows = tf.reshape(by_replica[:, self.distribution.replica_id() - layout.first], [layout.share])
        # The table stays with the host: on a GPU, each batch would first bring the whole data set there.
        on_gpu = self.distribution.devices[0].startswith("GPU")
        with tf.device("CPU:0") if on_gpu else contextlib.nullcontext():
            return keras.tree.map_structure(lambda t: tf.gather(t, rows), table)

    def real_rows(self, layout: Layout, count: tf.Tensor | int, micro: tf.Tensor | int = 0) -> tf.Tensor | None:
        """Returns how many rows of a micro-batch are examples and not filler, an int32 scalar; None for all.

        Args:
          count: examples in the global batch; an int says that it is full.
          micro: number of the micro-batch.
        """
        if isinstance(count, int):
            return None
        before = (micro * layout.replicas + self.distribution.replica_id()) * layout.micro
        return tf.clip_by_value(count - before, 0, layout.micro)

    def forward(self, x: Structure, training: bool) -> Structure:
        """Calls the model."""
        if keras_internals.takes_training(self.model):
            return self.model(x, training=training)
        return self.model(x)

    def passes(
        self,
        data: tuple[Structure, ...],
        real: tf.Tensor | None,
        count: tf.Tensor | int,
        training: bool,
        scale: tf.Tensor | None = None,
    ) -> PassResult:
        """Runs forward, and for training backward, over one micro-batch; by XLA when asked for.

        Args:
          data: (x, y, weight), tensors [layout.micro, ...].
          real: as `real_rows` gives it.
          count: examples in the global batch.
          scale: factor on what is differentiated, of a `LossScaleOptimizer`; None for 1.

        Raises:
          UserError: there is nothing to train.
        """
        if not self.jit:
            return self._passes(data, real, count, training, scale)
        # The Python structure of the result is kept outside the graph.
        kept: dict[str, Any] = {}

        def flat(data, real, count, scale):
            payload, outputs = self._passes(data, real, count, training, scale)
            leaves = keras.tree.flatten(outputs)
            masks = [keras_internals.mask_of(leaf) for leaf in leaves]
            kept.update(payload=payload, outputs=outputs, masked=[mask is not None for mask in masks])
            return payload.tensors(), leaves, [mask for mask in masks if mask is not None]

        tensors, leaves, masks = tf.function(flat, autograph=False, jit_compile=True)(data, real, count, scale)
        remaining = iter(masks)
        for leaf, masked in zip(leaves, kept["masked"]):
            if masked:
                keras_internals.set_mask(leaf, next(remaining))
        return PassResult(kept["payload"].with_tensors(tensors), keras.tree.pack_sequence_as(kept["outputs"], leaves))

    def _passes(
        self,
        data: tuple[Structure, ...],
        real: tf.Tensor | None,
        count: tf.Tensor | int,
        training: bool,
        scale: tf.Tensor | None,
    ) -> PassResult:
        x, y, weight = unpack(data)
        targets = [v.value for v in self.model.trainable_variables]
        with tf.GradientTape(persistent=True) as tape:
            outputs = self.forward(x, training)
            parts = self.objective.parts(y, outputs, weight, real, count)
            if not parts and training and not self.objective.regularized:
                raise UserError("the model has no loss: give compile() a loss, or call add_loss() in a layer")
            scalars = goals(parts)
            if scale is not None:
                scalars = [scalar * tf.cast(scale, scalar.dtype) for scalar in scalars]
        groups = []
        if training:
            for scalar in scalars:
                gradients = tape.gradient(scalar, targets)
                # Embeddings give IndexedSlices; Keras' optimizers treat them as dense, and so does the sum.
                groups.append([None if g is None else tf.convert_to_tensor(g) for g in gradients])
        del tape
        return PassResult(Payload.of(groups, parts), outputs)
