"""How a global batch lies in memory: over replicas, over micro-batches, and with filler.

A global batch reaches a replica as a table of examples and row numbers into
it. Every shape is static: a batch that is short, or does not divide by the
number of replicas, is filled up with rows that repeat real examples and are
left out of every sum.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How a global batch is laid out over replicas and micro-batches."""

    batch: int
    """Examples of a full global batch."""
    replicas: int
    accumulate: int

    @property
    def micro(self) -> int:
        """Rows of one micro-batch of one replica."""
        return -(-self.batch // (self.replicas * self.accumulate))

    @property
    def share(self) -> int:
        """Rows of one replica."""
        return self.micro * self.accumulate

    @property
    def rows(self) -> int:
        """Rows of a global batch, filler included."""
        return self.share * self.replicas


def fetch(feed: tuple, i: Any, layout: Layout) -> tuple:
    """Global batch `i` of a feed, as (is there one, function that takes it).

    A feed is (table, rows [n, layout.rows], counts [n]) for a data set in
    memory, or (iterator,) over global batches, in which `i` is always the next.
    What is taken is (table, rows, count): `rows` index `table`, and the first
    `count` of them are examples, the rest filler.
    """
    if len(feed) == 3:
        table, rows, counts = feed
        return True, lambda: (table, with_shape(rows[i], [layout.rows]), counts[i])
    element = feed[0].get_next_as_optional()

    def take():
        batch = element.get_value()
        count = tf.shape(keras.tree.flatten(batch)[0])[0]
        fits = tf.debugging.assert_less_equal(
            count, layout.batch, f"a batch of the data set is larger than the first one ({layout.batch} examples)"
        )
        with tf.control_dependencies([fits] if fits is not None else []):
            return batch, tf.range(layout.rows) % count, count

    return element.has_value(), take


def unpack(data: tuple) -> tuple:
    """(x, y, weight) of a tuple of one to three entries; missing ones are None."""
    padded = (*data, None, None)
    return padded[0], padded[1], padded[2]


def with_shape(tensor: Any, shape: list) -> Any:
    """Restores a static shape that slicing by a tensor loses."""
    tensor.set_shape(shape)
    return tensor
