"""The rows of replicas that want all shapes to be known when a step is traced, as those on a TPU do.

The host takes them out of a global batch, whose number of examples is then known, too. So the shares of replicas and
micro-batches differ by one row at most, and each of the shorter ones is filled up with a row that counts nowhere.
"""

from __future__ import annotations

from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.batch_layout import Batch, Layout, Rows
from tfdist.data.structures import Structure


class Given(NamedTuple):
    """What the host gives to one replica of a global batch."""

    data: Structure
    """Tensors [micro-batches, layout.micro, ...]."""
    numbers: tf.Tensor
    """How many rows of each micro-batch count, int32 [micro-batches]."""


def given(batch: Batch, layout: Layout) -> list[Given]:
    """Takes the rows of each replica out of a global batch of `layout.batch` examples."""
    shares = [
        [layout.shared(layout.batch, micro, replica) for micro in range(layout.accumulate)]
        for replica in range(layout.replicas)
    ]
    numbers = np.array([[share.rows for share in of_one] for of_one in shares], np.int32)
    starts = np.array([[share.start for share in of_one] for of_one in shares])
    # Behind its last row a replica has that one again; without any it has the first of the batch.
    at = np.minimum(np.arange(layout.micro), np.maximum(numbers - 1, 0)[..., None])
    positions = np.where(numbers[..., None] > 0, starts[..., None] + at, 0)
    with tf.device("CPU:0"):
        rows = tf.constant(positions.reshape(-1), tf.int32)
        if not isinstance(batch.rows, tuple):
            rows = tf.gather(batch.rows, rows)

        def of_replicas(tensor: tf.Tensor) -> list[tf.Tensor]:
            taken = tf.gather(tensor, rows)
            return tf.unstack(tf.reshape(taken, [*positions.shape, *tensor.shape[1:]]))

        columns = [of_replicas(tensor) for tensor in keras.tree.flatten(batch.table)]
        return [
            Given(
                keras.tree.pack_sequence_as(batch.table, [column[replica] for column in columns]),
                tf.constant(numbers[replica]),
            )
            for replica in range(layout.replicas)
        ]


def rows_of(given: Given, layout: Layout, micro: int | tf.Tensor) -> Rows:
    """Returns a replica's rows of a micro-batch."""
    least = layout.batch // (layout.replicas * layout.accumulate)
    number = layout.micro if layout.even else given.numbers[micro]
    return Rows(
        data=keras.tree.map_structure(lambda tensor: tensor[micro], given.data),
        number=number,
        whole=layout.micro_batch(layout.batch, micro).rows,
        micro_batches=layout.accumulate,
        most=layout.micro,
        present=None if least else number > 0,
        filled=bool(least) and not layout.even,
    )
