"""How a global batch lies in memory: over replicas, over micro-batches, and with filler.

A global batch reaches a replica as a table of examples and row numbers into
it. Every shape is static: a batch that is short, or does not divide by the
number of replicas, is filled up with rows that repeat real examples and are
left out of every sum.
"""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How a global batch is laid out over replicas and micro-batches."""

    batch: int
    """Examples of a full global batch."""
    replicas: int
    """Copies of the model over all workers."""
    accumulate: int
    """Micro-batches of an update."""
    first: int = 0
    """This worker's first replica among all."""
    local: int = 0
    """This worker's replicas; 0 for all of them."""

    @property
    def micro(self) -> int:
        """Returns the rows of one micro-batch of one replica."""
        return -(-self.batch // (self.replicas * self.accumulate))

    @property
    def share(self) -> int:
        """Returns the rows of one replica."""
        return self.micro * self.accumulate

    @property
    def rows(self) -> int:
        """Returns the rows of a global batch, filler included."""
        return self.share * self.replicas

    @property
    def here(self) -> int:
        """Returns the number of this worker's replicas."""
        return self.local or self.replicas

    @property
    def own_rows(self) -> int:
        """Returns how many rows of a global batch belong to this worker."""
        return self.share * self.here

    def own(self, rows: np.ndarray) -> np.ndarray:
        """Returns this worker's part of the last axis of `rows` [..., layout.rows]: [..., layout.own_rows].

        Micro-batch by micro-batch over all replicas, so that the same examples
        are together in one whatever their number: synchronized BatchNorm looks
        at them together.
        """
        if not self.local:
            return rows
        by_replica = np.reshape(rows, [*np.shape(rows)[:-1], self.accumulate, self.replicas, self.micro])
        part = by_replica[..., self.first : self.first + self.local, :]
        return np.reshape(part, [*np.shape(rows)[:-1], self.own_rows])


def fetch(feed: tuple, i: tf.Tensor, layout: Layout) -> tuple:
    """Returns whether a feed has global batch `i`, and a function that takes it.

    A feed is (table, rows [n, layout.own_rows], counts [n]) for a data set in
    memory, or (iterator,) over global batches, in which `i` is always the next.
    What is taken is (table, rows, count): `rows` index `table`, and of the
    global batch the first `count` rows are examples, the rest filler.
    """
    if len(feed) == 3:
        table, rows, counts = feed
        return True, lambda: (table, with_shape(rows[i], [layout.own_rows]), counts[i])
    element = feed[0].get_next_as_optional()

    def take():
        batch = element.get_value()
        if layout.local:  # the pipeline has left out the rows of the other workers
            return batch[0], tf.range(layout.own_rows), batch[1]
        count = tf.shape(keras.tree.flatten(batch)[0])[0]
        with tf.control_dependencies(_fits(count, layout)):
            return batch, tf.range(layout.rows) % count, count

    return element.has_value(), take


def own_rows(batch: tuple, layout: Layout) -> tuple:
    """Takes this worker's rows of a global batch, filler included, inside a data set.

    Returns them and the number of examples of the whole batch.
    """
    count = tf.shape(keras.tree.flatten(batch)[0])[0]
    with tf.control_dependencies(_fits(count, layout)):
        rows = tf.constant(layout.own(np.arange(layout.rows, dtype=np.int32))) % count
    return keras.tree.map_structure(lambda t: tf.gather(t, rows), batch), count


def _fits(count: tf.Tensor, layout: Layout) -> list:
    fits = tf.debugging.assert_less_equal(
        count, layout.batch, f"a batch of the data set is larger than the first one ({layout.batch} examples)"
    )
    return [fits] if fits is not None else []


def unpack(data: tuple) -> tuple:
    """Returns (x, y, weight) of a tuple of one to three entries; missing ones are None."""
    padded = (*data, None, None)
    return padded[0], padded[1], padded[2]


def with_shape(tensor: tf.Tensor, shape: list) -> tf.Tensor:
    """Restores a static shape that slicing by a tensor loses."""
    tensor.set_shape(shape)
    return tensor
