"""All rows of a micro-batch on every replica, for what looks across a batch."""

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.batch_layout import Layout, MicroBatch, with_shape
from tfdist.data.batches import bits
from tfdist.data.spec import Structure
from tfdist.distributed.collectives import INTEGERS
from tfdist.distributed.distribution import Distribution
from tfdist.keras_bridge.keras_internals import MASK

_SMALL = (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16)  # types that collectives do not know
_LONG = (tf.int64, tf.uint64)  # types that those of a TPU do not know, either


def gathered(distribution: Distribution, values: Structure, rows: MicroBatch) -> Structure:
    """Returns the rows of all replicas in the order of the global batch; to be called by all in replica context.

    They travel as a sum of zeros and one replica's rows: there is one kind of collective to rely on.

    Args:
      values: tensors [n, ...] of the rows of this replica, with Keras masks attached where there are any.

    Returns:
      Tensors [rows.total, ...] with masks. A gradient flows to this replica's rows alone.
    """
    if distribution.replicas == 1:
        return values
    leaves = keras.tree.flatten(values)
    masks = [getattr(leaf, MASK, None) for leaf in leaves]
    own = [*leaves, *(mask for mask in masks if mask is not None)]
    place = (_StaticRows if distribution.static_shapes else _RowsOfReplica)(distribution, rows)
    spread = [place.spread(tf.cast(value, tf.int32) if value.dtype in _SMALL else value) for value in own]
    totals = _sums(distribution, [tf.stop_gradient(value) for value in spread])
    whole = iter([place.whole(mine, total, value) for mine, total, value in zip(spread, totals, own)])
    results = [next(whole) for _ in leaves]
    for result, mask in zip(results, masks):
        if mask is not None:
            setattr(result, MASK, next(whole))
    return keras.tree.pack_sequence_as(values, results)


def of_virtual_replicas(distribution: Distribution, values: Structure, layout: Layout, count: tf.Tensor) -> Structure:
    """Returns the rows of all virtual replicas in the order of the global batch, given those of this replica's."""
    if distribution.replicas == 1:
        return values
    own = layout.of_device(distribution.replicas, distribution.replica_id())
    start, leaves = layout.of_replica(count, 0, own.start).start, keras.tree.flatten(values)

    def spread(value: tf.Tensor) -> tf.Tensor:
        value = bits(value)
        padded = tf.pad(value, [[start, layout.batch - start - tf.shape(value)[0]], *[[0, 0]] * (value.shape.rank - 1)])
        return with_shape(padded, [layout.batch, *value.shape[1:]])

    totals = distribution.all_sum([spread(leaf) for leaf in leaves])
    rows = [_of_bits(total, leaf.dtype)[:count] for total, leaf in zip(totals, leaves)]
    return keras.tree.pack_sequence_as(values, rows)


def _of_bits(whole: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the values that `bits` was given, of this type."""
    if not dtype.is_floating:
        return tf.cast(whole, dtype)
    return tf.bitcast(tf.cast(whole, INTEGERS[dtype.size]), dtype)


def _sums(distribution: Distribution, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums int32 one by one: MirroredStrategy adds each up on the host, and refuses it beside any other."""
    totals = list(tensors)
    together = [i for i, tensor in enumerate(tensors) if tensor.dtype != tf.int32]
    alone = [[i] for i, tensor in enumerate(tensors) if tensor.dtype == tf.int32]
    for own in filter(None, [together, *alone]):
        for i, total in zip(own, distribution.all_sum([tensors[i] for i in own])):
            totals[i] = total
    return totals


def _places(rows: int, replicas: int, width: int) -> np.ndarray:
    """Returns which of `width` places for each replica have rows, int64 [rows]; earlier replicas may have one more."""
    sizes = [len(part) for part in np.array_split(np.arange(rows), replicas)]
    return np.concatenate([replica * width + np.arange(size) for replica, size in enumerate(sizes)])


class _RowsOfReplica:
    """Where the rows of a replica are among places for the rows of all, of which each has as many as the first."""

    def __init__(self, distribution: Distribution, rows: MicroBatch):
        replicas = distribution.replicas
        self._number, self._whole = rows.size, rows.total
        # Between workers a collective has one shape for good; TensorFlow ends with "Shape mismatch" otherwise.
        self._width = rows.max_size or -(-rows.total // replicas)
        self._places = replicas * self._width
        self._before = distribution.replica_id() * self._width
        at = tf.range(self._places)
        self._mine = (at >= self._before) & (at < self._before + rows.size)
        # Earlier replicas have one row more where the rows do not divide evenly.
        sizes = rows.total // replicas + tf.cast(at // self._width < rows.total % replicas, tf.int32)
        self._taken = at % self._width < sizes
        self._known = _places(rows.total, replicas, self._width) if isinstance(rows.total, int) else None
        self._static = isinstance(self._width, int)

    def spread(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the rows of this replica in their places, and zeros in the others."""
        after = self._places - self._before - self._number
        padded = tf.pad(value[: self._number], [[self._before, after], *[[0, 0]] * (value.shape.rank - 1)])
        return with_shape(padded, [self._places, *value.shape[1:]]) if self._static else padded

    def whole(self, spread: tf.Tensor, total: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        """Returns the rows of all replicas behind each other, in the type of `value`."""
        mine = tf.reshape(self._mine, [-1, *[1] * (value.shape.rank - 1)])
        total = tf.where(mine, spread, total)  # the same values, through which a gradient flows
        if self._known is None:
            total = tf.boolean_mask(total, self._taken)
        elif len(self._known) < self._places:
            total = tf.gather(total, self._known)
        return tf.cast(total, value.dtype)


class _StaticRows:
    """The same where every shape is known: how many rows there are in all is, and how many a replica has at most."""

    def __init__(self, distribution: Distribution, rows: MicroBatch):
        width, replicas = rows.max_size, distribution.replicas
        self._taken = _places(rows.total, replicas, width)
        place = tf.equal(tf.range(replicas), distribution.replica_id())[:, None]
        own = tf.range(width)[None] < tf.broadcast_to(rows.size, [1, 1])
        self._mine = tf.logical_and(place, own)

    def spread(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the rows of this replica in their places, and zeros in the others."""
        if value.dtype in _LONG:  # zeros and one replica's bits add up in halves, too
            value = tf.bitcast(value, tf.int32)
        placed = tf.where(self._in_shape(self._mine, value.shape.rank - 1), value[None], tf.zeros_like(value)[None])
        return tf.reshape(placed, [-1, *value.shape[1:]])

    def whole(self, spread: tf.Tensor, total: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        """Returns the rows of all replicas behind each other, in the type of `value`."""
        mine = self._in_shape(tf.reshape(self._mine, [-1]), spread.shape.rank - 1)
        total = tf.gather(tf.where(mine, spread, total), self._taken)  # the same, through which a gradient flows
        return tf.bitcast(total, value.dtype) if value.dtype in _LONG else tf.cast(total, value.dtype)

    def _in_shape(self, mask: tf.Tensor, inner: int) -> tf.Tensor:
        return tf.reshape(mask, [*mask.shape, *[1] * inner])
