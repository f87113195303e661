"""The compiled function that measures: losses and metrics of global batches."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdist.data.batch_layout import Layout
from tfdist.engine.step import metrics
from tfdist.engine.step.batch_loop import batch_loop
from tfdist.engine.step.replica import Replica, Taken
from tfdist.engine.step.results import CallResult
from tfdist.engine.step.shards.shard_loop import ShardLoop


def evaluation_call(replica: Replica, layout: Layout, losses: int) -> Callable[..., CallResult]:
    """Makes `call(feed, first, last, sums=None)`, which measures these global batches and changes nothing but metrics.

    Args:
      losses: loss values of a batch, the total included.
    """

    def one(batch: Taken, is_last: tf.Tensor) -> tf.Tensor:
        del is_last
        count = replica.count(layout, batch)
        if layout.shards:
            payload = ShardLoop(replica, layout).run(batch, count, False).payload
            return payload.losses(replica.objective.regularization())
        rows = replica.take(layout, batch, count)
        payload, outputs = replica.passes(rows, count, False)
        metrics.update(replica.model, replica.distribution, rows, outputs)
        payload = payload.with_tensors(replica.distribution.all_sum(payload.tensors()))
        return payload.losses(replica.objective.regularization())

    measured = batch_loop(replica, layout, losses, one)

    def call(feed: tuple, first: tf.Tensor, last: tf.Tensor, sums: tf.Tensor | None = None) -> CallResult:
        with replica.tracing():
            return measured(feed, first, last, sums)

    return tf.function(call, autograph=False, reduce_retracing=True)
