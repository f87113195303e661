"""The mathematics of one update, one evaluation and one prediction, compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.data.batch_layout import Layout, fetch, unpack, with_shape
from tfdist.distributed import collectives
from tfdist.distributed.collectives import sum_in_order
from tfdist.distributed.distribution import Distribution
from tfdist.engine import preconditions
from tfdist.engine.step import fused_batch_norm, graph_clock, metrics, optimizer_update, trace_patches
from tfdist.engine.step.loss import Objective
from tfdist.engine.step.partial_sums import Payload, goals
from tfdist.errors import UserError, one_line
from tfdist.models import keras_internals

NO_BATCH = "no batch left"
"""What `predict` says behind the last batch of a data set of unknown length."""


class Step:
    """Compiled functions for one compiled model under one distribution.

    The functions take many global batches at once: a call lasts long enough to
    hide Python. They are traced once per structure of the data.
    """

    def __init__(self, model: keras.Model, distribution: Distribution):
        self.model = model
        self.distribution = distribution
        self.jit = preconditions.use_xla(model, distribution)
        self.objective = Objective(model, jit=self.jit)
        self.part_names: list[str] = []
        self.output_shape: tuple = ()
        # A GPU works behind the back of the host, whose clock then tells nothing.
        self.timed = distribution.devices[0].startswith("CPU")
        """Whether the compiled functions can tell what they wait for."""
        self.warm: set[int] = set()
        """Ids of the functions that have been called, and so compiled."""
        self._compiled: dict[tuple, Callable] = {}
        self._reset: Callable | None = None

    def compiled(
        self,
        kind: str,
        layout: Layout,
        full: bool = False,
        reduce_dtype: str = "float32",
        norm: bool = False,
        factors: tuple[float, ...] = (),
    ) -> Callable:
        """`train`, `test`, `predict` or `predict beside targets` for a layout, made once."""
        key = (kind, layout, full, reduce_dtype, norm, factors)
        if key not in self._compiled:
            match kind:
                case "train":
                    self._compiled[key] = self.train(layout, full, reduce_dtype, norm, factors)
                case "test":
                    self._compiled[key] = self.test(layout)
                case "predict":
                    self._compiled[key] = self.predict(layout)
                case "predict beside targets":
                    self._compiled[key] = self.predict(layout, beside_targets=True)
        return self._compiled[key]

    def reset(self) -> None:
        """Resets all metrics."""
        if self._reset is None:
            self._reset = tf.function(lambda: [m.reset_state() for m in self.model.metrics] and None, autograph=False)
        with self.distribution.peers.during("call"):  # it may sum over workers what it resets
            self._reset()

    # -- what a call does ---------------------------------------------------

    def train(
        self, layout: Layout, full: bool, reduce_dtype: str, norm: bool, factors: tuple[float, ...] = ()
    ) -> Callable:
        """`call(feed, first, last)` makes an update of each of these global batches.

        With `full`, they are known to be full and to divide evenly, which saves
        small models the handling of filler. Gradients travel as `reduce_dtype`.
        With `norm`, the norm of the last update's gradient is taken. `factors`
        are those of `layerwise_rates`. See `_loop` for what it returns.
        """
        optimizer = self.model.optimizer
        optimizer_update.check(optimizer)

        def one(batch, count, is_last):
            return self._update(layout, batch, layout.batch if full else count, reduce_dtype, is_last if norm else None)

        call = self._loop(layout, one)

        def owned(feed, first, last):
            # XLA fuses by itself.
            own = optimizer_update.owned(optimizer, self.model.trainable_variables, factors)
            with own, trace_patches.quick(), fused_batch_norm.normalization(None if self.jit else self.model):
                return call(feed, first, last)

        return tf.function(owned, autograph=False, reduce_retracing=True)

    def test(self, layout: Layout) -> Callable:
        """As `train`, but only measures."""
        call = self._loop(layout, lambda batch, count, is_last: self._measure(layout, batch, count))
        return tf.function(call, autograph=False, reduce_retracing=True)

    def _loop(self, layout: Layout, one: Callable) -> Callable:
        """A loop over global batches, to be compiled.

        It returns (sums, examples, bad, done, metrics, watched): loss values
        times examples [1 + outputs] and examples as float64, the first batch
        with a loss that is not finite (or -1), how many batches there were, the
        metric results so far by name, and of this worker, as float64 [3], the
        seconds of waiting for input and for the all-reduce, and the last norm.
        """
        distribution = self.distribution
        size = 1 + len(self.part_names)

        def call(feed, first, last):
            def body(i, sums, examples, bad, more, watched, ended):
                more, take = fetch(feed, i, layout)
                waited = graph_clock.wait(ended, more) if self.timed and graph_clock.can_wait(feed) else None

                def work():
                    before = graph_clock.count()
                    table, rows, count = take()
                    values = distribution.local(distribution.run(one, ((table, rows), count, tf.equal(i + 1, last))))[0]
                    losses, seen = values[:size], values[size:]
                    weight = tf.cast(count, tf.float64)
                    finite = tf.math.is_finite(losses[0])
                    return (
                        i + 1,
                        sums + tf.cast(losses, tf.float64) * weight,
                        examples + weight,
                        tf.where(tf.logical_or(finite, bad >= 0), bad, i),
                        tf.constant(True),
                        graph_clock.add(watched, waited, seen),
                        ended if waited is None else graph_clock.now(finite, *graph_clock.changes(before)),
                    )

                if more is True:
                    return work()
                return tf.cond(more, work, lambda: (i, sums, examples, bad, more, watched, ended))

            i, sums, examples, bad, _, watched, _ = tf.while_loop(
                lambda i, sums, examples, bad, more, *_: tf.logical_and(i < last, more),
                body,
                (
                    first,
                    tf.zeros([size], tf.float64),
                    tf.zeros([], tf.float64),
                    tf.constant(-1),
                    tf.constant(True),
                    tf.zeros([3], tf.float64),
                    graph_clock.now(),
                ),
                # Two rounds at a time would have a collective in flight twice under one name.
                parallel_iterations=1 if distribution.workers > 1 else 10,
            )
            return sums, examples, bad, i - first, metrics.results(self.model, distribution), watched

        return call

    def predict(self, layout: Layout, beside_targets: bool = False) -> Callable:
        """`call(feed, i)` returns the outputs for global batch `i`, rows in order, filler included.

        With `beside_targets`, they are (outputs, targets), the latter () where there are none.
        """
        distribution = self.distribution

        def one(batch):
            x, y, _ = unpack(self._take(layout, *batch))
            outputs = self._forward(x, training=False)
            if beside_targets:
                outputs = (outputs, () if y is None else y)
            return self._gathered(layout, outputs) if layout.local else outputs

        def call(feed, i):
            more, take = fetch(feed, i, layout)
            with tf.control_dependencies([] if more is True else [tf.debugging.Assert(more, [NO_BATCH])]):
                table, rows, count = take()
            outputs = distribution.local(distribution.run(one, ((table, rows),)))
            if layout.local:  # every replica has them all
                return outputs[0], count
            return keras.tree.map_structure(lambda *o: tf.concat(o, 0), *outputs), count

        return tf.function(call, autograph=False, reduce_retracing=True)

    # -- one replica --------------------------------------------------------

    def _take(self, layout: Layout, table: Any, rows: Any) -> Any:
        """This replica's rows of a global batch."""
        if layout.here > 1:  # see Layout.own for the order
            by_replica = tf.reshape(rows, [layout.accumulate, layout.here, layout.micro])
            rows = tf.reshape(by_replica[:, self.distribution.replica_id() - layout.first], [layout.share])
        # The table stays with the host: on a GPU, each batch would first bring the whole data set there.
        on_gpu = self.distribution.devices[0].startswith("GPU")
        with tf.device("CPU:0") if on_gpu else contextlib.nullcontext():
            return keras.tree.map_structure(lambda t: tf.gather(t, rows), table)

    def _real(self, layout: Layout, count: Any, micro: Any = 0) -> Any:
        """How many rows of a micro-batch are examples and not filler; None for all."""
        if isinstance(count, int):
            return None
        before = (micro * layout.replicas + self.distribution.replica_id()) * layout.micro
        return tf.clip_by_value(count - before, 0, layout.micro)

    def _forward(self, x: Any, training: bool) -> Any:
        if self.model._call_has_training_arg:
            return self.model(x, training=training)
        return self.model(x)

    def _pass(self, data: Any, real: Any, count: Any, training: bool, scale: Any = None) -> tuple:
        """Forward, and for training backward, over one micro-batch.

        Returns:
          (payload, outputs): gradients and sums to be added up over replicas
          and micro-batches, and the model's outputs for the metrics.
        """
        x, y, weight = unpack(data)
        targets = self._targets()
        with tf.GradientTape(persistent=True) as tape:
            y_pred = self._forward(x, training)
            parts = self.objective.parts(y, y_pred, weight, real, count)
            if not parts and training and not self.objective.regularized:
                raise UserError("the model has no loss: give compile() a loss, or call add_loss() in a layer")
            wanted = goals(parts)
            if scale is not None:
                wanted = [g * tf.cast(scale, g.dtype) for g in wanted]
        groups = []
        if training:
            for goal in wanted:
                grads = tape.gradient(goal, targets)
                # Embeddings give IndexedSlices; Keras' optimizers treat them as dense, and so does the sum.
                groups.append([None if g is None else tf.convert_to_tensor(g) for g in grads])
        del tape
        return Payload.of(groups, parts), y_pred

    def _targets(self) -> list:
        return [v.value for v in self.model.trainable_variables]

    def _compiled_pass(self, data: Any, real: Any, count: Any, training: bool, scale: Any = None) -> tuple:
        """`_pass`, by XLA when asked for; the Python structure of its result is kept outside the graph."""
        if not self.jit:
            return self._pass(data, real, count, training, scale)
        kept: dict = {}

        def flat(data, real, count, scale):
            payload, y_pred = self._pass(data, real, count, training, scale)
            leaves = keras.tree.flatten(y_pred)
            masks = [getattr(leaf, "_keras_mask", None) for leaf in leaves]
            kept.update(payload=payload, outputs=y_pred, masks=[m is not None for m in masks])
            return payload.tensors(), leaves, [m for m in masks if m is not None]

        tensors, leaves, masks = tf.function(flat, autograph=False, jit_compile=True)(data, real, count, scale)
        found = iter(masks)
        for leaf, masked in zip(leaves, kept["masks"]):
            if masked:
                leaf._keras_mask = next(found)
        return kept["payload"].with_tensors(tensors), keras.tree.pack_sequence_as(kept["outputs"], leaves)

    def _update(self, layout: Layout, batch: tuple, count: Any, reduce_dtype: str, norm_wanted: Any) -> Any:
        """One update on one replica.

        Args:
          norm_wanted: bool scalar, whether to take the norm of the gradient; None for never.

        Returns:
          The loss values, the same on every replica, and if anything was watched: the seconds that the all-reduce
          took here, and the norm.
        """
        model, optimizer = self.model, self.model.optimizer
        data = self._take(layout, *batch)
        scale = (
            None
            if optimizer is keras_internals.inner_optimizer(optimizer)
            else tf.convert_to_tensor(optimizer.dynamic_scale)
        )
        if layout.accumulate == 1:
            payload, y_pred = self._compiled_pass(data, self._real(layout, count), count, True, scale)
            metrics.update(self.model._compile_metrics, data, y_pred, self._real(layout, count))
        else:
            payload = self._accumulate(layout, data, count, scale)
        begun = None
        if self.timed and self.distribution.replicas > 1:
            begun = graph_clock.now(*payload.tensors())
            payload.sums = graph_clock.after(begun, payload.sums)
        payload = payload.with_tensors(self._summed(payload, reduce_dtype))
        seconds = None if begun is None else graph_clock.now(*payload.tensors()) - begun
        penalties, penalty = self._penalty()
        gradients = payload.gradients()
        norm = None if norm_wanted is None else graph_clock.norm(gradients, scale, norm_wanted)
        optimizer_update.apply(optimizer, gradients, model.trainable_variables, penalty)
        return graph_clock.beside(payload.losses(penalties), seconds, norm)

    def _summed(self, payload: Payload, dtype: str) -> list:
        """`payload.tensors()` over all replicas; gradients may travel in a smaller type, sums do not."""
        if dtype == "float32" or self.distribution.replicas == 1:
            return self.distribution.all_sum(payload.tensors())
        small = collectives.shrunk(payload.grads, dtype)
        *grads, sums = self.distribution.all_sum([*small, payload.sums])
        return [*(tf.cast(total, g.dtype) for total, g in zip(grads, payload.grads)), sums]

    def _gathered(self, layout: Layout, outputs: Any) -> Any:
        """The outputs of all replicas, each in its place, as a sum: there is one kind of collective to rely on."""
        place = tf.one_hot(self.distribution.replica_id(), layout.replicas, dtype=tf.int32)

        def spread(own):
            dtype = tf.int32 if own.dtype in (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16) else own.dtype
            mask = tf.reshape(place, [-1, *[1] * own.shape.rank]) > 0
            # Chosen and not multiplied: zero times NaN is NaN.
            return tf.where(mask, tf.cast(own, dtype)[None], tf.zeros([], dtype))

        leaves = keras.tree.flatten(outputs)
        whole = [
            tf.cast(tf.reshape(total, [layout.rows, *own.shape[1:]]), own.dtype)
            for total, own in zip(self.distribution.all_sum([spread(own) for own in leaves]), leaves)
        ]
        return keras.tree.pack_sequence_as(outputs, whole)

    def _accumulate(self, layout: Layout, data: Any, count: Any, scale: Any) -> Payload:
        """Adds up the payloads of all micro-batches of this replica."""
        slices = keras.tree.map_structure(
            lambda t: tf.reshape(t, tf.concat([[layout.accumulate, layout.micro], tf.shape(t)[1:]], 0)), data
        )

        def micro(i):
            part = keras.tree.map_structure(
                lambda t, whole: with_shape(t[i], [layout.micro, *whole.shape[1:]]), slices, data
            )
            real = self._real(layout, count, i)
            payload, y_pred = self._compiled_pass(part, real, count, True, scale)
            metrics.update(self.model._compile_metrics, part, y_pred, real)
            return payload

        payload = micro(0)
        if self._unrolled():
            for i in range(1, layout.accumulate):
                payload = payload.plus(micro(i).tensors())
            return payload

        def body(i, tensors):
            return i + 1, payload.with_tensors(tensors).plus(micro(i).tensors()).tensors()

        _, tensors = tf.while_loop(lambda i, _: i < layout.accumulate, body, (tf.constant(1), payload.tensors()))
        return payload.with_tensors(tensors)

    def _unrolled(self) -> bool:
        """Synchronized BatchNorm reduces inside the forward pass, which a replica's while loop cannot."""
        return self.distribution.replicas > 1 and preconditions.synchronizes(self.model)

    def _penalty(self) -> tuple[list, Callable]:
        """Regularisers: the same on every replica, so added after the sum and counted once."""
        regularized = self.objective.regularized
        if not regularized:
            return [], lambda grads: grads
        targets = [v.value for v in regularized]
        with tf.GradientTape() as tape:
            penalties = self.objective.regularization()
            total = sum_in_order([tf.cast(p, penalties[0].dtype) for p in penalties])
        found = dict(zip([id(v) for v in regularized], tape.gradient(total, targets)))

        def penalty(grads):
            result = []
            for variable, grad in zip(self.model.trainable_variables, grads):
                extra = found.get(id(variable))
                result.append(extra if grad is None else grad if extra is None else grad + tf.cast(extra, grad.dtype))
            return result

        return penalties, penalty

    def _measure(self, layout: Layout, batch: tuple, count: Any) -> Any:
        data = self._take(layout, *batch)
        real = self._real(layout, count)
        payload, y_pred = self._compiled_pass(data, real, count, False)
        metrics.update(self.model._compile_metrics, data, y_pred, real)
        payload = payload.with_tensors(self.distribution.all_sum(payload.tensors()))
        return payload.losses(self.objective.regularization())

    def build(self, data: Any, outputs_only: bool = False) -> None:
        """Creates what Keras creates lazily (weights, metric and optimizer variables), under the scope.

        Args:
          data: (x, y, weight) with at least one row.
          outputs_only: the model need not be compiled, nor `data` have targets.
        """
        x, y, _ = unpack(keras.tree.map_structure(lambda t: t[:1], data))
        model = self.model
        with self.distribution.scope():
            y_pred = self._forward(x, training=False)
            self.output_shape = tuple(keras.tree.flatten(y_pred)[0].shape)
            if outputs_only:
                return
            self.part_names = self.objective.names(y, y_pred)
            if model._compile_metrics is not None and not model._compile_metrics.built:
                try:
                    model._compile_metrics.build(y, y_pred)
                except ValueError as error:
                    raise UserError(f"metrics do not fit the outputs: {one_line(error)}") from error
            optimizer = model.optimizer
            if optimizer is not None and not optimizer.built:
                optimizer.build(model.trainable_variables)
        self.objective = Objective(model, jit=self.jit)
