"""The part of a step that one replica computes by itself: its rows, the forward and the backward pass."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist.data.batch_layout import HostSlice, Layout, MicroBatch, ReplicaBatch
from tfdist.data.structures import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals, preconditions, tracing
from tfdist.keras_bridge.keras_internals import MASK
from tfdist.keras_bridge.layer_state import LayerState
from tfdist.keras_bridge.loss import Objective, objectives
from tfdist.step.sums import StepSums


class PassResult(NamedTuple):
    """The result of a pass over a micro-batch."""

    sums: StepSums
    outputs: Structure  # the model's, for the metrics, with Keras masks attached where there are any


class Replica:
    """One replica of a model; called in replica context, while a step is traced."""

    def __init__(self, model: keras.Model, distribution: Distribution, jit: bool):
        self._model: Callable[[], keras.Model] = weakref.ref(model)  # see Step.model
        self.distribution = distribution
        self.jit = jit  # whether XLA compiles the passes
        self.timed = distribution.timed  # whether the compiled functions can measure what they wait for
        # A TPU has no float64 in hardware: numbers of single batches are added up on the host.
        self.totals = tf.float32 if distribution.static_shapes else tf.float64
        """Type of the numbers that a replica returns for a batch, besides its losses."""
        self.objective = Objective(model, distribution, jit=jit)
        self.state = LayerState(model, distribution.replicas)
        self.times_sums = distribution.times_sums
        self._on_gpu = distribution.device_kind == "GPU"
        self._takes_training = keras_internals.takes_training(model)
        self.bare = False  # whether Keras would pass inputs alone to a step as they are, and not as a tuple of one

    @property
    def model(self) -> keras.Model:
        """The model, which the caller keeps alive."""
        return self._model()

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """Patches Keras code that assumes a single replica, while a step is traced.

        Replicas are traced in threads: this surrounds them all.
        """
        return tracing.patched(self._model(), self.distribution.replicas)

    def count(self, layout: Layout, batch: ReplicaBatch) -> tf.Tensor | int:
        """Returns the number of examples in a global batch."""
        return layout.batch if isinstance(batch, HostSlice) else batch.count

    def micro_batch(
        self,
        layout: Layout,
        batch: ReplicaBatch,
        count: tf.Tensor | int,
        micro: tf.Tensor | int = 0,
        virtual: tf.Tensor | None = None,
    ) -> MicroBatch:
        """Returns the rows of this replica, or of a virtual one, in a micro-batch; `count` is as for `global_sums`."""
        replica = self.distribution.replica_id() if layout.replicas > 1 and virtual is None else 0
        # The table stays with the host: on a GPU, each batch would first bring the whole data set there.
        on_gpu = self._on_gpu and not isinstance(batch, HostSlice)
        with tf.device("CPU:0") if on_gpu else contextlib.nullcontext():
            return batch.micro_batch(layout, count, micro, replica if virtual is None else virtual)

    def forward(self, x: Structure, training: bool) -> Structure:
        """Calls the model."""
        model = self._model()
        return model(x, training=training) if self._takes_training else model(x)

    def as_keras_gives(self, data: tuple[Structure, ...]) -> Structure:
        """Returns a batch in the form in which Keras' `fit` passes it to a model's own step."""
        return data[0] if self.bare and len(data) == 1 else data

    def predict(self, data: tuple[Structure, ...]) -> Structure:
        """Returns the outputs for a batch, by the model's own `predict_step` if it has one."""
        if preconditions.replaced(self.model, preconditions.PREDICTION):
            return self.model.predict_step(self.as_keras_gives(data))
        return self.forward(data[0], training=False)

    def passes(
        self, rows: MicroBatch, count: tf.Tensor | int, training: bool, scale: tf.Tensor | None = None
    ) -> PassResult:
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
        x, y, weight = (*rows.data, None, None)[:3]
        targets = [v.value for v in self._model().trainable_variables]
        with tf.GradientTape(persistent=True) as tape:
            with self.state.restored_without_rows(rows.present, rows.row_mask):
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
        return PassResult(StepSums.of(groups, terms), outputs)


def _across_function(passes: Callable[..., PassResult], run: Callable[[Callable[..., list]], list]) -> PassResult:
    """Returns the result of `passes` where `run` calls it in a graph of its own, out of which only tensors come.

    Args:
      run: given a function that takes the arguments of `passes` and how many rows to append to the outputs, it returns
        what that has returned.
    """
    traced: list[PassResult] = []

    def flat(*arguments: object, padding: int = 0) -> list:
        result = passes(*arguments)
        traced[:] = [result]
        padded = lambda tensor: tf.concat([tensor, *[tensor[-1:]] * padding], 0) if padding else tensor
        leaves = keras.tree.flatten(result.outputs)
        attached = enumerate(getattr(leaf, MASK, None) for leaf in leaves)
        masks = {str(i): padded(mask) for i, mask in attached if mask is not None}
        return [result.sums.tensors(), [padded(leaf) for leaf in leaves], masks]

    tensors, leaves, masks = run(flat)
    for i, mask in masks.items():
        setattr(leaves[int(i)], MASK, mask)
    (result,) = traced
    return PassResult(result.sums.with_tensors(tensors), keras.tree.pack_sequence_as(result.outputs, leaves))
