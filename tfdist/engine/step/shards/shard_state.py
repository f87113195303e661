"""What layers and metrics keep from batch to batch, where a batch is computed shard by shard.

Each shard begins with what there was before the batch, and so what it changes does not depend on the device that
computes it, nor on what that has computed before. The changes of all shards are added up.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.data.batch_layout import Layout
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.models import freezing, keras_internals


class ShardState:
    """The state of a model before a global batch, during each shard, and after all; in replica context.

    Averages that layers keep, as BatchNorm does, become what they were plus the mean of the shards' changes; what they
    count, and what metrics sum up, grows by the sum. A random generator gets a state for each shard from its own,
    which moves on by one if any shard has drawn.

    Raises:
      UserError: a variable is neither a float nor an integer.
    """

    def __init__(self, model: keras.Model, layout: Layout):
        fixed = {id(v) for v in freezing.fixed(model)}
        of_losses = {id(v) for metric in keras_internals.loss_metrics(model) if metric for v in metric.variables}
        sums = {id(v): v for v in model.metrics_variables if id(v) not in of_losses}
        rest = [v for v in model.non_trainable_variables if id(v) not in fixed | of_losses and id(v) not in sums]
        self._sums = list(sums.values())
        self._seeds = [v for v in rest if keras_internals.is_seed(v)]
        self._kept = [v for v in rest if not keras_internals.is_seed(v)]
        for variable in (*self._kept, *self._sums):
            dtype = tf.as_dtype(variable.dtype)
            if not (dtype.is_floating or dtype.is_integer):
                raise UserError(f"shards cannot add up {variable.path}, which is {dtype.name}: leave shards out")
        self._parts = layout.replicas * layout.accumulate
        # Outside of the shards, where nothing has changed yet.
        self._before = {id(v): _read(v) for v in (*self._sums, *self._seeds, *self._kept)}
        self._streams = [self._stream(self._before[id(v)]) for v in self._seeds]

    def _stream(self, state: tf.Tensor) -> tf.Tensor:
        """The state of a generator for each shard, [shards, 2]: drawn from its own, so that none follows another."""
        return tf.random.stateless_uniform(
            [self._parts, 2], tf.cast(state, tf.int64), minval=None, maxval=None, dtype=tf.uint32, alg="philox"
        )

    def begin(self, part: tf.Tensor) -> set[int]:
        """Sets the state for a shard, while its graph is traced.

        Args:
          part: its number among those of all micro-batches.

        Returns:
          The ids of the tensors that stand for these variables in that graph.
        """
        for variable, stream in zip(self._seeds, self._streams):
            _assign(variable, tf.cast(stream[part], self._before[id(variable)].dtype))
        for variable in self._kept:
            _assign(variable, self._before[id(variable)])
        for variable in self._sums:
            _assign(variable, tf.zeros_like(self._before[id(variable)]))
        graph = tf.compat.v1.get_default_graph()
        return {id(graph.capture(v.value.handle)) for v in (*self._seeds, *self._kept, *self._sums)}

    def changes(self, part: tf.Tensor) -> list[tf.Tensor]:
        """Returns what the shard has changed, to be added up over all shards; arguments as for `begin`."""
        changes = [_read(v) for v in self._sums]
        changes += [_read(v) - self._before[id(v)] for v in self._kept]
        return [*changes, *self.drawn(part)]

    def drawn(self, part: tf.Tensor) -> list[tf.Tensor]:
        """Returns for each random generator 1 if the shard has drawn from it, else 0; arguments as for `begin`."""
        states = [tf.cast(_read(v), tf.uint32) for v in self._seeds]
        moved = [tf.not_equal(now, stream[part]) for now, stream in zip(states, self._streams)]
        return [tf.cast(tf.reduce_any(m), tf.int64) for m in moved]

    def end(self, changes: Sequence[tf.Tensor], examples: tf.Tensor | int, distribution: Distribution) -> None:
        """Sets the state after all shards.

        Args:
          changes: the sums of what `changes` gave.
          examples: of the global batch; shards without any have changed nothing.
        """
        remaining = iter(changes)
        first = tf.equal(distribution.replica_id(), 0)
        shards = tf.minimum(examples, self._parts)
        for variable in self._sums:  # which are read as the sum over the replicas
            before, change = self._before[id(variable)], next(remaining)
            _assign(variable, before + tf.where(first, change, tf.zeros_like(change)))
        for variable in self._kept:
            before, change = self._before[id(variable)], next(remaining)
            mean = change / tf.cast(shards, change.dtype) if change.dtype.is_floating else change
            _assign(variable, before + mean)
        self._move_on(list(remaining))

    def put_back(self, drawn: Sequence[tf.Tensor]) -> None:
        """Sets the state after a prediction, which changes nothing but random generators.

        Args:
          drawn: sums of what `drawn` gave.
        """
        for variable in (*self._sums, *self._kept):
            _assign(variable, self._before[id(variable)])
        self._move_on(drawn)

    def _move_on(self, drawn: Sequence[tf.Tensor]) -> None:
        for variable, times in zip(self._seeds, drawn):
            before = self._before[id(variable)]
            _assign(variable, tf.stack([before[0], before[1] + tf.cast(tf.minimum(times, 1), before.dtype)]))


def _read(variable: keras.Variable) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=variable.value.handle, dtype=variable.value.dtype)


def _assign(variable: keras.Variable, value: tf.Tensor) -> None:
    # Not the variable's own assign, which would meet the other replicas: each writes its copy.
    tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=value)
