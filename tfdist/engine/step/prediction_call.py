"""The compiled function that predicts: the model's outputs for a global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist.data.batch_layout import Batch, Layout, fetch, unpack
from tfdist.data.structures import Structure
from tfdist.engine.step import gathering
from tfdist.engine.step.replica import Replica

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

    def one(batch: Batch) -> Structure:
        rows = replica.take(layout, batch, batch.count)
        _, y, _ = unpack(rows.data)
        outputs = replica.predict(rows.data)
        if beside_targets:
            outputs = (outputs, () if y is None else y)
        if layout.local:  # every replica then has them all
            return gathering.gathered(distribution, outputs, rows)
        return keras.tree.map_structure(lambda t: t[: rows.number], outputs) if layout.replicas > 1 else outputs

    def call(feed: tuple, i: tf.Tensor) -> Predicted:
        more, take = fetch(feed, i, layout)
        with tf.control_dependencies([] if more is True else [tf.debugging.Assert(more, [NO_BATCH])]):
            batch = take()
        outputs = distribution.local(distribution.run(one, (batch,)))
        if layout.local:
            return Predicted(outputs[0], batch.count)
        return Predicted(keras.tree.map_structure(lambda *o: tf.concat(o, 0), *outputs), batch.count)

    return tf.function(call, autograph=False, reduce_retracing=True)
