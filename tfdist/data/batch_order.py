"""Whether all workers read the same batches: checksums that a data set takes of itself while it is read.

Each worker reads whole global batches and keeps its own rows of them. A `shuffle()` without a seed has another order on
each worker, and then some examples would be trained on twice and others never. A look at the data set beforehand shows
nothing of that: each time that it is begun, it has another order.
"""

from __future__ import annotations

import struct
import zlib

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.batch_layout import unpack
from tfdist.data.structures import Structure

_ROWS, _ENTRIES = 64, 1024
"""Rows of a batch, and entries of each, that a checksum looks at, about."""
_FACTOR = 0x1E3779B97F4A7C15
"""Odd, with many bits set."""


class BatchOrder:
    """The checksums of the batches that one worker has read, in their order."""

    def __init__(self) -> None:
        self._sums: dict[int, int] = {}
        """By the number of the batch since the iterator's beginning; those that were read ahead are there, too."""
        self._next, self._digest = 0, 0

    def watched(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the same data set, which notes a checksum of each of its batches."""

        def noted(number: tf.Tensor, batch: tuple) -> tuple:
            done = tf.numpy_function(self._note, [number, checksum(batch)], tf.int64)
            with tf.control_dependencies([done]):  # before whoever reads the batch can ask
                return keras.tree.map_structure(tf.identity, batch)

        return dataset.enumerate().map(noted)

    def begin(self) -> None:
        """Forgets what an earlier iterator has read ahead."""
        self._sums.clear()
        self._next = 0

    def digest(self, batches: int) -> str:
        """Returns the checksum of all that was trained on so far, which now has `batches` more."""
        for number in range(self._next, self._next + batches):
            self._digest = zlib.crc32(struct.pack("<q", self._sums.pop(number, 0)), self._digest)
        self._next += batches
        return f"{self._digest:08x}"

    def _note(self, number: np.int64, value: np.int64) -> np.int64:
        self._sums[int(number)] = int(value)
        return np.int64(0)


def checksum(batch: tuple) -> tf.Tensor:
    """Returns a number, int64, that depends on which examples a batch has, and on their order.

    It looks at the targets and weights, where there are any: workers may draw other random changes of the same inputs.
    """
    _, y, weight = unpack(batch)
    looked_at = keras.tree.flatten([part for part in (y, weight) if part is not None]) or keras.tree.flatten(batch)
    tensors = [tf.convert_to_tensor(part) for part in looked_at]
    count = tf.shape(tensors[0], tf.int64)[0]
    total = count
    for tensor in tensors:
        if tensor.shape[1:].num_elements() == 0:
            continue
        table = tf.reshape(_bits(tensor), [count, -1])
        width = tf.shape(table, tf.int64)[1]
        some = table[:: tf.maximum(count // _ROWS, 1), :: tf.maximum(width // _ENTRIES, 1)]
        rows = tf.reduce_sum(some * _odd(tf.shape(some, tf.int64)[1]), 1)
        total = _scattered(total) + tf.reduce_sum(_scattered(rows) * _odd(tf.shape(some, tf.int64)[0]))
    return total


def _odd(count: tf.Tensor) -> tf.Tensor:
    return 2 * tf.range(count, dtype=tf.int64) + 1


def _scattered(numbers: tf.Tensor) -> tf.Tensor:
    """Returns a hash of each number: weighted by its place as it is, a row of 0 and 1 would count alike anywhere."""
    for _ in range(2):
        numbers = numbers * _FACTOR
        numbers = tf.bitwise.bitwise_xor(numbers, tf.bitwise.right_shift(numbers, tf.constant(29, tf.int64)))
    return numbers


def _bits(tensor: tf.Tensor) -> Structure:
    """Returns the entries of a tensor as int64, each by its bits."""
    if tensor.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(tensor, 2**62)
    if tensor.dtype.is_complex:
        tensor = tf.math.real(tensor) + tf.math.imag(tensor)
    if tensor.dtype.is_floating:
        tensor = tf.bitcast(tensor, {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}[tensor.dtype.size])
    return tf.cast(tensor, tf.int64)
