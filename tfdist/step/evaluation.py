"""The compiled functions that measure and predict; they change nothing but metrics and random generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist.data.batch_layout import Layout, MicroBatch, ReplicaBatch, unpack
from tfdist.data.structures import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.keras_bridge import gathering
from tfdist.step import virtual_replicas
from tfdist.step.batch_loop import CallResult, StepOutput, batch_loop, next_batch, per_replica
from tfdist.step.global_sums import global_sums
from tfdist.step.replica import Replica

NO_BATCH = "no batch left"  # message of a prediction behind the last batch of a data set of unknown length


def evaluation_call(replica: Replica, layout: Layout, losses: int) -> Callable[..., CallResult]:
    """Makes `call(feed, first, last, sums=None)`, which measures these global batches, with so many loss values."""

    def step(batch: ReplicaBatch, is_last: tf.Tensor) -> StepOutput:
        del is_last
        total = global_sums(replica, layout, batch, replica.count(layout, batch), training=False)
        return StepOutput(total.sums.losses(replica.objective.penalties()))

    measured = batch_loop(replica, layout, losses, step)

    def call(feed: tuple, first: tf.Tensor, last: tf.Tensor, sums: tf.Tensor | None = None) -> CallResult:
        with replica.tracing():
            return measured(feed, first, last, sums)

    return tf.function(call, autograph=False, reduce_retracing=True)


class Predicted(NamedTuple):
    """The outputs for one global batch."""

    outputs: Structure  # tensors [rows, ...] in order; with targets, (outputs, targets), () where there are none
    examples: tf.Tensor  # number of rows, an int32 scalar


def prediction_call(replica: Replica, layout: Layout, with_targets: bool = False) -> Callable[..., Predicted]:
    """Makes `call(feed, i)`, which predicts global batch `i`, and returns the targets, too, `with_targets`."""
    distribution = replica.distribution
    step = prediction_step(replica, layout, with_targets)

    def call(feed: tuple, i: tf.Tensor) -> Predicted:
        more, take = next_batch(feed, i, layout, distribution)
        with tf.control_dependencies([] if more is True else [tf.debugging.Assert(more, [NO_BATCH])]):
            batch = take()
        outputs = distribution.run(step, (per_replica(distribution, layout, batch),))
        return Predicted(joined(distribution, layout, outputs), batch.count)

    return tf.function(call, autograph=False, reduce_retracing=True)


def prediction_step(
    replica: Replica, layout: Layout, with_targets: bool = False
) -> Callable[[ReplicaBatch], Structure]:
    """Makes the function that predicts the rows of one replica; it runs in replica context."""

    def predict(rows: MicroBatch) -> Structure:
        _, y, _ = unpack(rows.data)
        outputs = replica.predict(rows.data)
        return (outputs, () if y is None else y) if with_targets else outputs

    def step(batch: ReplicaBatch) -> Structure:
        distribution, count = replica.distribution, replica.count(layout, batch)
        if layout.virtual:
            outputs = virtual_replicas.outputs(replica, layout, batch, count, predict)
            return gathering.of_virtual_replicas(distribution, outputs, layout, count) if layout.local else outputs
        rows = replica.micro_batch(layout, batch, count)
        outputs = predict(rows)
        if layout.local:  # every replica then has them all
            return gathering.gathered(distribution, outputs, rows)
        if layout.replicas == 1 or layout.static:
            return outputs
        return keras.tree.map_structure(lambda t: t[: rows.size], outputs)

    return step


def joined(distribution: Distribution, layout: Layout, of_replicas: Structure) -> Structure:
    """Returns the outputs for a global batch, given those that `prediction_step` returns on each replica."""
    outputs = distribution.local(of_replicas)
    if layout.local:
        return outputs[0]
    if layout.static:
        sizes = [layout.of_replica(layout.batch, 0, replica).size for replica in range(layout.replicas)]
        outputs = tuple(
            keras.tree.map_structure(lambda t, size=size: t[:size], output) for output, size in zip(outputs, sizes)
        )
    return keras.tree.map_structure(lambda *o: tf.concat(o, 0), *outputs)
