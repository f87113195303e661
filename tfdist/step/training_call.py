"""The compiled function that trains: one update for each global batch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import tensorflow as tf

from tfdist.data.batch_layout import Layout
from tfdist.distributed import collectives
from tfdist.distributed.collectives import sum_in_order
from tfdist.keras_bridge import batch_norm_ops, keras_internals, metrics, optimizer_update, preconditions
from tfdist.keras_bridge.optimizer_update import Gradients, OwnedOptimizer
from tfdist.step import graph_clock
from tfdist.step.batch_loop import StepOutput, batch_loop
from tfdist.step.partial_sums import Payload
from tfdist.step.replica import Replica, Taken
from tfdist.step.results import CallResult
from tfdist.step.shards.shard_loop import ShardLoop


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What sets one compiled training function apart from another."""

    full: bool = False
    """The global batches are known to be full and to divide evenly: then all shapes are known."""
    reduce_dtype: str = "float32"
    """Type in which gradients travel between replicas."""
    norm: bool = False
    """Whether the norm of the last update's gradient is taken."""
    factors: tuple[float, ...] = ()
    """On the learning rate of each trainable variable, as `layerwise_rates` gives them; none for 1."""


def training_call(replica: Replica, layout: Layout, losses: int, options: TrainingOptions) -> Callable[..., CallResult]:
    """Makes `call(feed, first, last, sums=None)`, which makes an update of each of these global batches.

    Args:
      losses: loss values of an update, the total included.

    Raises:
      UserError: settings of the optimizer that tfdist replaces.
    """
    optimizer_update.check(replica.model.optimizer)

    def call(feed: tuple, first: tf.Tensor, last: tf.Tensor, sums: tf.Tensor | None = None) -> CallResult:
        with update(replica, layout, options) as one:
            return batch_loop(replica, layout, losses, one)(feed, first, last, sums)

    return tf.function(call, autograph=False, reduce_retracing=True)


@contextlib.contextmanager
def update(
    replica: Replica, layout: Layout, options: TrainingOptions
) -> Iterator[Callable[[Taken, tf.Tensor], tf.Tensor]]:
    """Yields, while a function is traced, what makes one update on one replica.

    It takes what the replica gets of a global batch, and whether this is the last update of a call; it returns a packed
    `StepOutput`.
    """
    model = replica.model
    with (
        optimizer_update.owned(model.optimizer, model.trainable_variables, options.factors) as optimizer,
        replica.tracing(),
        keras_internals.sums_in_order() if layout.shards else contextlib.nullcontext(),
        batch_norm_ops.fused(None if replica.jit else model),  # XLA fuses by itself
    ):
        yield _Update(replica, layout, options, optimizer)


class _Regularization(NamedTuple):
    """The regularisers' part in an update: the same on every replica, so added after the sum and counted once."""

    penalties: list[tf.Tensor]
    """One scalar per regularised variable."""
    added: Callable[[Gradients], Gradients]
    """Adds the gradient of the penalties to one gradient or None per trainable variable."""


class _Summed(NamedTuple):
    """What a global batch gives, the same on every replica."""

    payload: Payload
    seconds: tf.Tensor | None
    """From the last gradient here to the last sum; None where there is no clock."""
    made: list[tf.Tensor]
    """This replica's own gradients, before the sum; after it, if they have travelled together."""


class _Update:
    """One update on one replica."""

    def __init__(self, replica: Replica, layout: Layout, options: TrainingOptions, optimizer: OwnedOptimizer):
        self._replica = replica
        self._distribution = replica.distribution
        self._layout = layout
        self._options = options
        self._optimizer = optimizer

    def __call__(self, batch: Taken, is_last: tf.Tensor) -> tf.Tensor:
        """Makes the update.

        Args:
          batch: the global batch.
          is_last: whether it is the last update of the call, a bool scalar.

        Returns:
          A packed `StepOutput`.
        """
        replica, layout, model = self._replica, self._layout, self._replica.model
        examples = layout.batch if self._options.full else replica.count(layout, batch)
        scale = self._optimizer.loss_scale()
        if layout.shards:
            payload, seconds = ShardLoop(replica, layout).run(batch, examples, True, scale)
            made = payload.grads
        else:
            payload, seconds, made = self._of_rows(batch, examples, scale)
        regularization = self._regularization()
        gradients = payload.gradients()
        norm = graph_clock.norm(gradients, scale, is_last, replica.totals) if self._options.norm else None
        self._optimizer.apply(gradients, model.trainable_variables, regularization.added, made)
        return StepOutput.packed(payload.losses(regularization.penalties), seconds, norm, replica.totals)

    def _of_rows(self, batch: Taken, examples: tf.Tensor | int, scale: tf.Tensor | None) -> _Summed:
        """Runs over this replica's rows, and adds up what all replicas have."""
        if self._layout.accumulate == 1:
            payload = self._of_micro_batch(batch, examples, scale, 0)
        else:
            payload = self._accumulated(batch, examples, scale)
        made, begun = payload.grads, None
        if self._distribution.times_sums:
            first, *others = payload.tensors()
            begun = graph_clock.now(first, *others)
            # What is sent last waits for the clock, so that the sums of the others begin within the backward pass.
            payload = payload.with_tensors([graph_clock.after(begun, first), *others])
        payload = payload.with_tensors(self._summed(payload))
        if collectives.together(made):  # the sums, too, are there at the same moment
            made = payload.grads
        return _Summed(payload, None if begun is None else graph_clock.now(*payload.tensors()) - begun, made)

    def _summed(self, payload: Payload) -> list[tf.Tensor]:
        """`payload.tensors()` over all replicas; gradients may travel in a smaller type, sums do not."""
        dtype = self._options.reduce_dtype
        if dtype == "float32" or self._distribution.replicas == 1:
            return self._distribution.all_sum(payload.tensors())
        small = collectives.shrunk(payload.grads, dtype)
        *totals, sums = self._distribution.all_sum([*small, payload.sums])
        return [*(tf.cast(total, g.dtype) for total, g in zip(totals, payload.grads)), sums]

    def _of_micro_batch(
        self, batch: Taken, examples: tf.Tensor | int, scale: tf.Tensor | None, micro: tf.Tensor | int
    ) -> Payload:
        """Runs forward and backward over this replica's rows of a micro-batch, and updates the metrics."""
        replica = self._replica
        rows = replica.take(self._layout, batch, examples, micro)
        payload, outputs = replica.passes(rows, examples, True, scale)
        metrics.update(replica.model, self._distribution, rows, outputs)
        if self._layout.accumulate == 1:  # a replica's while loop cannot reduce
            replica.state.share(rows.present, self._distribution.all_sum)
        return payload

    def _accumulated(self, batch: Taken, examples: tf.Tensor | int, scale: tf.Tensor | None) -> Payload:
        """Adds up the payloads of all micro-batches of this replica."""
        micro = functools.partial(self._of_micro_batch, batch, examples, scale)
        payload = micro(0)
        if self._unrolled():
            for i in range(1, self._layout.accumulate):
                payload = payload.plus(micro(i).tensors())
            return payload

        def body(i: tf.Tensor, tensors: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
            return i + 1, payload.with_tensors(tensors).plus(micro(i).tensors()).tensors()

        _, tensors = tf.while_loop(lambda i, _: i < self._layout.accumulate, body, (tf.constant(1), payload.tensors()))
        return payload.with_tensors(tensors)

    def _unrolled(self) -> bool:
        """Synchronized BatchNorm reduces inside the forward pass, which a replica's while loop cannot."""
        return self._distribution.replicas > 1 and preconditions.synchronizes(self._replica.model)

    def _regularization(self) -> _Regularization:
        objective, variables = self._replica.objective, self._replica.model.trainable_variables
        if not objective.regularized:
            return _Regularization([], lambda gradients: gradients)
        targets = [v.value for v in objective.regularized]
        with tf.GradientTape() as tape:
            penalties = objective.regularization()
            total = sum_in_order([tf.cast(p, penalties[0].dtype) for p in penalties])
        by_variable = dict(zip([id(v) for v in objective.regularized], tape.gradient(total, targets)))

        def added(gradients: Gradients) -> Gradients:
            sums = []
            for variable, gradient in zip(variables, gradients):
                extra = by_variable.get(id(variable))
                if gradient is not None and extra is not None:
                    extra = gradient + tf.cast(extra, gradient.dtype)
                sums.append(gradient if extra is None else extra)
            return sums

        return _Regularization(penalties, added)
