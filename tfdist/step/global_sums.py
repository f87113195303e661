"""The sums of a global batch: over the slices of this replica, and then over all replicas in one all-reduce."""

from __future__ import annotations

import functools
from typing import NamedTuple

import tensorflow as tf

from tfdist.data.batch_layout import Layout, ReplicaBatch
from tfdist.distributed import collectives
from tfdist.keras_bridge import metrics, preconditions
from tfdist.step import virtual_replicas
from tfdist.step.replica import Replica
from tfdist.step.sums import StepSums, timed


class GlobalSums(NamedTuple):
    """The sums of a global batch, the same on every replica."""

    sums: StepSums
    seconds: tf.Tensor | None  # from this replica's last gradient to the last sum; None where there is no clock
    own_grads: list[tf.Tensor]
    """This replica's gradients before the all-reduce; after it, if they have traveled together."""


def global_sums(
    replica: Replica,
    layout: Layout,
    batch: ReplicaBatch,
    count: tf.Tensor | int,
    training: bool,
    scale: tf.Tensor | None = None,
    reduce_dtype: str = "float32",
) -> GlobalSums:
    """Runs forward, and for training backward, over a global batch, updates the metrics, and sums over all replicas.

    Args:
      count: examples in the global batch; an int says that it is full and divides evenly, or that shapes are static.
      scale: factor of a `LossScaleOptimizer` on the loss; None for 1.
      reduce_dtype: type in which gradients travel between replicas; loss sums keep theirs.
    """
    distribution = replica.distribution
    clock = training and replica.times_sums
    if layout.virtual:
        sums, seconds = virtual_replicas.exact_sums(replica, layout, batch, count, training, scale, clock)
        return GlobalSums(sums, seconds, sums.grads)
    one_slice = functools.partial(_sums_of_slice, replica, layout, batch, count, training, scale)
    sums = one_slice(0)
    if layout.accumulate > 1:
        sums = _accumulated(replica, layout, sums, one_slice)
    own_grads = sums.grads

    def all_reduce(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if reduce_dtype == "float32" or distribution.replicas == 1:
            return distribution.all_sum(tensors)
        *grads, scalars = tensors
        *totals, scalars = distribution.all_sum([*collectives.shrunk(grads, reduce_dtype), scalars])
        return [*(tf.cast(total, g.dtype) for total, g in zip(totals, grads)), scalars]

    totals, seconds = timed(all_reduce, sums.tensors(), clock)
    sums = sums.with_tensors(totals)
    return GlobalSums(sums, seconds, sums.grads if collectives.together(own_grads) else own_grads)


def _sums_of_slice(
    replica: Replica,
    layout: Layout,
    batch: ReplicaBatch,
    count: tf.Tensor | int,
    training: bool,
    scale: tf.Tensor | None,
    micro: tf.Tensor | int,
) -> StepSums:
    model, rows = replica.model, replica.micro_batch(layout, batch, count, micro)
    sums, outputs = replica.passes(rows, count, training, scale)
    metrics.update(model, replica.distribution, rows, outputs)
    if training and layout.accumulate == 1 and rows.present is not None:  # a replica's while loop cannot reduce
        replica.state.share(rows.present, replica.distribution.all_sum)
    return sums


def _accumulated(replica: Replica, layout: Layout, sums: StepSums, one_slice: functools.partial[StepSums]) -> StepSums:
    """Adds the sums of all further micro-batches of this replica."""
    # Synchronized BatchNorm reduces inside the forward pass, which a replica's while loop cannot.
    if replica.distribution.replicas > 1 and preconditions.synchronizes(replica.model):
        for micro in range(1, layout.accumulate):
            sums = sums.plus(one_slice(micro).tensors())
        return sums

    def body(micro: tf.Tensor, tensors: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        return micro + 1, sums.with_tensors(tensors).plus(one_slice(micro).tensors()).tensors()

    _, tensors = tf.while_loop(lambda micro, _: micro < layout.accumulate, body, (tf.constant(1), sums.tensors()))
    return sums.with_tensors(tensors)
