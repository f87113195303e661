"""All rows of a micro-batch on every replica, for what looks across a batch."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.data.batch_layout import Rows
from tfdist.data.structures import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.models import keras_internals

_SMALL = (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16)
"""Types that collectives do not know."""


def gathered(distribution: Distribution, values: Structure, rows: Rows) -> Structure:
    """Returns the rows of all replicas in the order of the global batch; to be called by all in replica context.

    They travel as a sum of zeros and one replica's rows: there is one kind of collective to rely on.

    Args:
      values: tensors [n, ...] of the rows of this replica, with Keras masks attached where there are any.
      rows: how many these are, and how many all are.

    Returns:
      Tensors [rows.whole, ...] with masks. A gradient flows to this replica's rows alone.
    """
    if distribution.replicas == 1:
        return values
    leaves = keras.tree.flatten(values)
    masks = [keras_internals.mask_of(leaf) for leaf in leaves]
    own = [*leaves, *(mask for mask in masks if mask is not None)]
    place = _RowsOfReplica(distribution, rows)
    spread = [place.spread(value) for value in own]
    totals = distribution.all_sum([tf.stop_gradient(value) for value in spread])
    whole = iter([place.whole(mine, total, value) for mine, total, value in zip(spread, totals, own)])
    results = [next(whole) for _ in leaves]
    for result, mask in zip(results, masks):
        if mask is not None:
            keras_internals.set_mask(result, next(whole))
    return keras.tree.pack_sequence_as(values, results)


class _RowsOfReplica:
    """Where the rows of a replica are among places for the rows of all, of which each has as many as the first."""

    def __init__(self, distribution: Distribution, rows: Rows):
        replicas = distribution.replicas
        self._number, self._whole = rows.number, rows.whole
        # Between workers a collective has one shape for good; TensorFlow ends with "Shape mismatch" otherwise.
        self._width = rows.most or -(-rows.whole // replicas)
        self._places = replicas * self._width
        self._before = distribution.replica_id() * self._width
        at = tf.range(self._places)
        self._mine = (at >= self._before) & (at < self._before + rows.number)
        # Earlier replicas have one row more where the rows do not divide evenly.
        sizes = rows.whole // replicas + tf.cast(at // self._width < rows.whole % replicas, tf.int32)
        self._taken = at % self._width < sizes
        self._even = isinstance(rows.whole, int)
        self._static = isinstance(self._width, int)

    def spread(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the rows of this replica in their places, and zeros in the others."""
        if value.dtype in _SMALL:
            value = tf.cast(value, tf.int32)
        after = self._places - self._before - self._number
        padded = tf.pad(value[: self._number], [[self._before, after], *[[0, 0]] * (value.shape.rank - 1)])
        if self._static:
            padded.set_shape([self._places, *value.shape[1:]])
        return padded

    def whole(self, spread: tf.Tensor, total: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        """Returns the rows of all replicas behind each other, in the type of `value`."""
        mine = tf.reshape(self._mine, [-1, *[1] * (value.shape.rank - 1)])
        total = tf.where(mine, spread, total)  # the same values, through which a gradient flows
        if not self._even:
            total = tf.boolean_mask(total, self._taken)
        return tf.cast(total, value.dtype)
