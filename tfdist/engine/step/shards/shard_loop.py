"""A global batch in shards: each replica computes its own one after the other, and the sums depend on no order.

All shards are computed by one compiled function of the shard's number. So the same operations see the same shapes on
any number of replicas, and what they give is the same bit for bit; `ExactSum` adds it up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist.data.batch_layout import Layout, Rows, with_shape
from tfdist.data.structures import Structure
from tfdist.engine.step import graph_clock, metrics
from tfdist.engine.step.partial_sums import Payload
from tfdist.engine.step.replica import Replica, Taken
from tfdist.engine.step.shards import shard_graph
from tfdist.engine.step.shards.exact_sum import ExactSum
from tfdist.engine.step.shards.shard_state import ShardState


class ShardResult(NamedTuple):
    """What the shards of a global batch come to."""

    payload: Payload
    """The sums over all shards."""
    seconds: tf.Tensor | None
    """That this replica has spent with the sums; None where no clock is read."""


class _KeptOfShards(NamedTuple):
    """What the shards of one replica give."""

    each: list[tf.TensorArray]
    """Tensors of every shard."""
    most: list[tf.Tensor]
    """The maximum over the shards of other tensors."""
    sums: tf.Tensor
    """The sum of whole numbers."""
    number: tf.Tensor | int
    """Shards of this replica, in all micro-batches."""


class ShardLoop:
    """What one replica does with a global batch in shards; called in replica context, while a step is traced.

    Args:
      layout: with shards.
    """

    def __init__(self, replica: Replica, layout: Layout):
        self._replica, self._layout = replica, layout
        self._payload: Payload
        self._sum: ExactSum
        self._outputs: Structure = None
        self._own: set[int] = set()

    def run(
        self, batch: Taken, examples: tf.Tensor | int, training: bool, scale: tf.Tensor | None = None
    ) -> ShardResult:
        """Runs forward, and for training backward, over all shards, and updates metrics and states of layers.

        Args:
          batch: the global batch.
          examples: how many it has.
          scale: as for `Replica.passes`.

        Raises:
          UserError: the model draws random numbers, or changes variables, in a way that depends on the device.
        """
        replica, layout, distribution = self._replica, self._layout, self._replica.distribution
        state = ShardState(replica.model, layout)

        def work(micro: tf.Tensor, shard: tf.Tensor) -> tuple:
            part = micro * layout.replicas + shard
            self._own = state.begin(part)
            rows = replica.take(layout, batch, examples, micro, shard)
            self._payload, outputs = replica.passes(rows, examples, training, scale)
            metrics.update(replica.model, distribution, rows, outputs)
            # Each sum has a unit of its own: losses and counts may be far apart.
            values = [*self._gradients(), *tf.unstack(self._payload.sums), *state.changes(part)]
            self._sum = ExactSum(values, layout.replicas * layout.accumulate)
            return self._sum.term(values)

        kept = self._over_own(work)
        begun = None
        if replica.timed and distribution.replicas > 1:
            begun = graph_clock.now(*kept.most, kept.sums, *(array.flow for array in kept.each))
            kept = kept._replace(sums=graph_clock.after(begun, kept.sums))
        totals = self._sum.total(distribution, *kept)
        seconds = None if begun is None else graph_clock.now(*totals) - begun
        gradients = len(self._payload.grads)
        behind = gradients + self._payload.sums.shape[0]
        state.end(totals[behind:], examples, distribution)
        payload = self._payload.with_tensors([*totals[:gradients], tf.stack(totals[gradients:behind])])
        return ShardResult(payload, seconds)

    def _gradients(self) -> list[tf.Tensor]:
        """The gradients of a shard; those of an embedding do not know their shape."""
        variables = self._replica.model.trainable_variables
        present = [variables[i] for group in self._payload.layout for i, there in enumerate(group) if there]
        return [with_shape(g, v.shape) for g, v in zip(self._payload.grads, present, strict=True)]

    def outputs(self, batch: Taken, examples: tf.Tensor | int, of_rows: Callable[[Rows], Structure]) -> Structure:
        """Returns what `of_rows` makes of each of this replica's shards, tensors [rows, ...], behind each other."""
        layout = self._layout
        state = ShardState(self._replica.model, layout)

        def work(micro: tf.Tensor, shard: tf.Tensor) -> tuple:
            part = micro * layout.replicas + shard
            self._own = state.begin(part)
            rows = self._replica.take(layout, batch, examples, micro, shard)
            self._outputs = keras.tree.map_structure(lambda t: t[: rows.number], of_rows(rows))
            drawn = state.drawn(part)
            return keras.tree.flatten(self._outputs), [], tf.stack(drawn) if drawn else tf.zeros([0], tf.int64)

        kept = self._over_own(work)
        state.put_back(tf.unstack(kept.sums))
        return keras.tree.pack_sequence_as(self._outputs, [array.concat() for array in kept.each])

    def _over_own(self, work: Callable[[tf.Tensor, tf.Tensor], tuple]) -> _KeptOfShards:
        """Lets one compiled function do the work for each of this replica's shards.

        Args:
          work: of the numbers of micro-batch and shard, gives tensors of which each is kept, tensors of which the
            maximum is, and one of which the sum is.
        """
        replica, layout = self._replica, self._layout
        number = tf.TensorSpec([], tf.int32)
        compiled = tf.function(work, autograph=False, input_signature=[number, number]).get_concrete_function()
        shard_graph.check(compiled.graph, self._own)
        each, most, sums = compiled.structured_outputs
        own = layout.of_device(replica.distribution.replicas, replica.distribution.replica_id())
        rounds = own.rows * layout.accumulate
        arrays = [tf.TensorArray(t.dtype, rounds, element_shape=t.shape, infer_shape=False) for t in each]

        def body(i: tf.Tensor, arrays: list, most: list, sums: tf.Tensor) -> tuple:
            micro, shard = (i // own.rows, i % own.rows) if layout.accumulate > 1 else (tf.constant(0), i)
            now_each, now_most, now_sums = compiled(micro, own.start + shard)
            arrays = [array.write(i, value) for array, value in zip(arrays, now_each)]
            return i + 1, arrays, [tf.maximum(a, b) for a, b in zip(most, now_most)], sums + now_sums

        start = tf.constant(0), arrays, [tf.zeros(t.shape, t.dtype) for t in most], tf.zeros(sums.shape, sums.dtype)
        _, arrays, most, sums = tf.while_loop(lambda i, *_: i < rounds, body, start, parallel_iterations=1)
        return _KeptOfShards(arrays, most, sums, rounds)
