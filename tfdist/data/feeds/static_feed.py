"""How a step reads whose shapes are all known: the batches of a call have one number of examples, known to Python.

What a pipeline gives is read by Python, since within a compiled function nobody knows how long the next batch is.
"""

from __future__ import annotations

import dataclasses
import itertools

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.batch_layout import Layout
from tfdist.data.feeds.array_feed import ArrayFeed, FeedCall
from tfdist.data.feeds.batch_feed import BatchFeed
from tfdist.data.feeds.record_feed import RecordFeed
from tfdist.data.structures import Structure
from tfdist.errors import UserError

MOST = 32
"""Batches that are read for one call; they lie in memory together."""


class StaticFeed:
    """Reads what another feed reads, batches of one length at a time.

    Args:
      inner: the feed.
      layout: of full batches.
    """

    def __init__(self, inner: ArrayFeed | BatchFeed | RecordFeed, layout: Layout):
        self.inner, self._layout = inner, layout
        self.batches = inner.batches
        self._ahead: list[Structure] = []
        """Batches that have been read for a call and belong to the next one."""
        self._shapes: list[list[int]] | None = None
        """Of an example, which all must have alike."""

    def next(self, update: int, limit: int) -> FeedCall:
        """Returns at most `limit` batches from `update` on, none beyond its epoch; none at the end of the data."""
        if isinstance(self.inner, ArrayFeed):
            count, alike = self.inner.alike(update)
            part = self.inner.next(update, min(limit, alike))
            return dataclasses.replace(part, full=count == self._layout.batch, count=count)
        if not self._ahead:
            part = self.inner.next(update, min(limit, MOST))
            self._ahead = [self._checked(batch) for _, batch in zip(range(part.last - part.first), part.feed[0])]
        if not self._ahead:
            return FeedCall((), 0, 0, False)
        count = _examples(self._ahead[0])
        same = list(itertools.takewhile(lambda batch: _examples(batch) == count, self._ahead[:limit]))
        self._ahead = self._ahead[len(same) :]
        with tf.device("CPU:0"):
            table = same[0] if len(same) == 1 else keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *same)
            rows = tf.constant(np.arange(len(same) * count, dtype=np.int32).reshape(-1, count))
            counts = tf.fill([len(same)], count)
        return FeedCall((table, rows, counts), 0, len(same), count == self._layout.batch, count)

    def restart(self) -> None:
        """Begins anew where the other feed does."""
        self._ahead = []
        self.inner.restart()

    def resume(self, update: int, epoch: int, begun: int) -> None:
        """Goes to an update, as the other feed does."""
        self._ahead = []
        self.inner.resume(update, epoch, begun)

    def _checked(self, batch: Structure) -> Structure:
        shapes = [leaf.shape[1:].as_list() for leaf in keras.tree.flatten(batch)]
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            raise UserError(
                f"the data set gives examples of shapes {shapes} after {self._shapes}, and each would be compiled anew "
                "here: pad them to one, or cut them (dataset.padded_batch with padded_shapes)"
            )
        return batch


def _examples(batch: Structure) -> int:
    return int(keras.tree.flatten(batch)[0].shape[0])
