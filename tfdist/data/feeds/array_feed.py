"""How the compiled step reads arrays in memory, and what every feed gives to a call of the step.

Update `u` of a run reads global batch `u mod n` of epoch `u div n`, in an order
that depends on the seed and that epoch alone, so a feed needs no state.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses

import keras
import numpy as np
import tensorflow as tf

from tfdist.data import table_memory
from tfdist.data.batch_layout import Layout
from tfdist.data.sources import Arrays, order


@dataclasses.dataclass(frozen=True, slots=True)
class FeedCall:
    """The arguments of one call of a compiled function: the next global batches.

    The call reads the batches `first` to `last - 1` of `feed`, of which `batch_layout.fetch` takes one.
    """

    feed: tuple
    first: int
    last: int
    full: bool
    """All batches are full and divide evenly over replicas and micro-batches; of a `StaticFeed`, that they are full."""
    count: int | None = None
    """Examples of each of these batches, where the step wants to know; see static_feed.py."""


class ArrayFeed:
    """Reads global batches out of tables in memory, by row numbers.

    Args:
      source: examples in memory.
      layout: batch size, replicas and micro-batches.
      shuffle: seed of the order, or None for the order of the source.
    """

    def __init__(self, source: Arrays, layout: Layout, shuffle: int | None = None):
        self._layout = layout
        self._size = source.size
        self._seed = shuffle
        # On the host, since a data set may be larger than a GPU's memory.
        self._table = keras.tree.map_structure(table_memory.tensor, source.columns)
        self.batches = -(-self._size // layout.batch)
        self._full = self._size // layout.batch if layout.even else 0
        self._ahead: dict[int, concurrent.futures.Future] = {}
        self._executor = concurrent.futures.ThreadPoolExecutor(1)
        self._rows: tuple[int, tuple] = (-1, ())
        counts = np.full(self.batches, layout.batch, np.int32)
        counts[-1] = self._size - (self.batches - 1) * layout.batch
        self._counts = counts

    def next(self, update: int, limit: int) -> FeedCall:
        """Returns at most `limit` batches from `update` on, none beyond its epoch."""
        epoch, first = divmod(update, self.batches)
        last = min(first + limit, self.batches)
        full = first < self._full
        if full:
            last = min(last, self._full)
        return FeedCall((self._table, *self._of_epoch(epoch)), first, last, full)

    def alike(self, update: int) -> tuple[int, int]:
        """Returns the examples of the batch of `update`, and how many batches from it on in its epoch have as many."""
        first, full = update % self.batches, self._size // self._layout.batch
        return int(self._counts[first]), full - first if first < full else 1

    def restart(self) -> None:
        """Does nothing: the position is a function of the update."""

    def resume(self, update: int, epoch: int, begun: int) -> None:
        """Does nothing: the position is a function of the update."""

    def _of_epoch(self, epoch: int) -> tuple:
        if self._seed is None:
            epoch = 0
        if self._rows[0] != epoch:
            ready = self._ahead.pop(epoch, None)
            rows = ready.result() if ready else self._layout_rows(epoch)
            self._ahead.clear()
            with tf.device("CPU:0"):
                self._rows = epoch, (tf.convert_to_tensor(rows), tf.convert_to_tensor(self._counts))
            if self._seed is not None:  # so that the next epoch begins without a pause
                self._ahead[epoch + 1] = self._executor.submit(self._layout_rows, epoch + 1)
        return self._rows[1]

    def _layout_rows(self, epoch: int) -> np.ndarray:
        """Returns [batches, layout.batch] row numbers of the whole global batches; -1 behind the last."""
        batch = self._layout.batch
        rows = np.arange(self._size, dtype=np.int32) if self._seed is None else order(self._seed, epoch, self._size)
        missing = self.batches * batch - self._size
        return np.pad(rows, (0, missing), constant_values=-1).reshape(-1, batch)
