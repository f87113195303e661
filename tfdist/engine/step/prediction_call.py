"""The compiled function that predicts: the model's outputs for a global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist.data.batch_layout import Layout, fetch, unpack
from tfdist.data.structures import Structure
from tfdist.engine.step.replica import Replica

NO_BATCH = "no batch left"
"""What a prediction says behind the last batch of a data set of unknown length."""


class Predicted(NamedTuple):
    """The outputs for one global batch."""

    outputs: Structure
    """Tensors [rows, ...] in order, filler included; with targets, (outputs, targets), () where there are none."""
    examples: tf.Tensor
    """How many of the rows are examples, an int32 scalar."""


def prediction_call(replica: Replica, layout: Layout, beside_targets: bool = False) -> Callable[..., Predicted]:
    """Makes `call(feed, i)`, which gives the outputs for global batch `i`, and if wanted the targets beside them."""
    distribution = replica.distribution

    def one(batch: tuple) -> Structure:
        x, y, _ = unpack(replica.take(layout, *batch))
        outputs = replica.forward(x, training=False)
        if beside_targets:
            outputs = (outputs, () if y is None else y)
        return _gathered(replica, layout, outputs) if layout.local else outputs

    def call(feed: tuple, i: tf.Tensor) -> Predicted:
        more, take = fetch(feed, i, layout)
        with tf.control_dependencies([] if more is True else [tf.debugging.Assert(more, [NO_BATCH])]):
            table, rows, count = take()
        outputs = distribution.local(distribution.run(one, ((table, rows),)))
        if layout.local:  # every replica has them all
            return Predicted(outputs[0], count)
        return Predicted(keras.tree.map_structure(lambda *o: tf.concat(o, 0), *outputs), count)

    return tf.function(call, autograph=False, reduce_retracing=True)


def _gathered(replica: Replica, layout: Layout, outputs: Structure) -> Structure:
    """The outputs of all replicas, each in its place, as a sum: there is one kind of collective to rely on."""
    place = tf.one_hot(replica.distribution.replica_id(), layout.replicas, dtype=tf.int32)

    def spread(own: tf.Tensor) -> tf.Tensor:
        dtype = tf.int32 if own.dtype in (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16) else own.dtype
        mask = tf.reshape(place, [-1, *[1] * own.shape.rank]) > 0
        # Chosen and not multiplied: zero times NaN is NaN.
        return tf.where(mask, tf.cast(own, dtype)[None], tf.zeros([], dtype))

    leaves = keras.tree.flatten(outputs)
    whole = [
        tf.cast(tf.reshape(total, [layout.rows, *own.shape[1:]]), own.dtype)
        for total, own in zip(replica.distribution.all_sum([spread(own) for own in leaves]), leaves)
    ]
    return keras.tree.pack_sequence_as(outputs, whole)
