"""The compiled function that predicts: the model's outputs for a global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist.data import static_rows
from tfdist.data.batch_layout import Layout, Rows, unpack
from tfdist.data.structures import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.keras_bridge import gathering
from tfdist.step.next_batch import next_batch
from tfdist.step.replica import Replica, Taken
from tfdist.step.shards.shard_loop import ShardLoop

NO_BATCH = "no batch left"
"""What a prediction says behind the last batch of a data set of unknown length."""


class Predicted(NamedTuple):
    """The outputs for one global batch."""

    outputs: Structure
    """Tensors [rows, ...] in order; with targets, (outputs, targets), () where there are none."""
    examples: tf.Tensor
    """How many rows there are, an int32 scalar."""


def prediction_call(replica: Replica, layout: Layout, beside_targets: bool = False) -> Callable[..., Predicted]:
    """Makes `call(feed, i)`, which gives the outputs for global batch `i`, and if wanted the targets beside them."""
    distribution = replica.distribution
    one = rows_predicted(replica, layout, beside_targets)

    def call(feed: tuple, i: tf.Tensor) -> Predicted:
        more, take = next_batch(feed, i, layout, distribution)
        with tf.control_dependencies([] if more is True else [tf.debugging.Assert(more, [NO_BATCH])]):
            batch = take()
        of_replica = distribution.per_replica(static_rows.given(batch, layout)) if layout.static else batch
        return Predicted(joined(distribution, layout, distribution.run(one, (of_replica,))), batch.count)

    return tf.function(call, autograph=False, reduce_retracing=True)


def rows_predicted(replica: Replica, layout: Layout, beside_targets: bool = False) -> Callable[[Taken], Structure]:
    """Makes the function that gives the outputs for the rows of one replica; it runs in replica context."""

    def of_rows(rows: Rows) -> Structure:
        _, y, _ = unpack(rows.data)
        outputs = replica.predict(rows.data)
        return (outputs, () if y is None else y) if beside_targets else outputs

    def one(batch: Taken) -> Structure:
        distribution = replica.distribution
        count = replica.count(layout, batch)
        if layout.shards:
            outputs = ShardLoop(replica, layout).outputs(batch, count, of_rows)
            return gathering.of_shards(distribution, outputs, layout, count) if layout.local else outputs
        rows = replica.take(layout, batch, count)
        outputs = of_rows(rows)
        if layout.local:  # every replica then has them all
            return gathering.gathered(distribution, outputs, rows)
        if layout.replicas == 1 or layout.static:
            return outputs
        return keras.tree.map_structure(lambda t: t[: rows.number], outputs)

    return one


def joined(distribution: Distribution, layout: Layout, of_replicas: Structure) -> Structure:
    """Returns the outputs for a global batch, given what the function of `rows_predicted` gives on each replica."""
    outputs = distribution.local(of_replicas)
    if layout.local:
        return outputs[0]
    if layout.static:
        shares = [layout.shared(layout.batch, 0, replica) for replica in range(layout.replicas)]
        outputs = tuple(_first_rows(output, share.rows) for output, share in zip(outputs, shares))
    return keras.tree.map_structure(lambda *o: tf.concat(o, 0), *outputs)


def _first_rows(outputs: Structure, number: int) -> Structure:
    return keras.tree.map_structure(lambda tensor: tensor[:number], outputs)
