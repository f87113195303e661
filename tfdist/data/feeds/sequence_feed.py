"""How the compiled step reads a `keras.utils.PyDataset`, whose batches have numbers."""

from __future__ import annotations

import itertools

from tfdist.data.batch_layout import Layout
from tfdist.data.feeds.table_and_batch_feed import BatchFeed, FeedCall
from tfdist.data.python_batches import SequenceReader
from tfdist.data.sources import Batches, order


class SequenceFeed(BatchFeed):
    """Reads the batch that belongs to an update, so that nothing is read to go on in the middle.

    Update `u` reads batch number `u mod n` of pass `u div n` over the data, in an order of its batches that depends on
    the seed and that pass alone. Each epoch begins to read anew, and finds what `on_epoch_end` has changed.

    Args:
      source: read by a `SequenceReader`.
      layout: its batch has the size of the first one.
      shuffle: seed of the order of batches, or None for that of the source.
    """

    def __init__(self, source: Batches, layout: Layout, shuffle: int | None = None):
        super().__init__(source, layout, once=True)
        self._seed = shuffle

    def next(self, update: int, limit: int) -> FeedCall:
        """Returns at most `limit` batches from `update` on, none beyond the end of its pass."""
        size, first = self.batches, update
        if size:
            number, first = divmod(update, size)
            limit = min(limit, size - first)
        if self._iterator is None or (size and first == 0):
            reader = self._source.reader
            assert isinstance(reader, SequenceReader)
            if not size:
                reader.numbers = itertools.count(first)
            else:
                passed = range(size) if self._seed is None else order(self._seed, number, size).tolist()
                reader.numbers = passed[first:]
            self._iterator = iter(self._dataset)
        return FeedCall((self._iterator,), 0, limit, False)

    def resume(self, update: int, epoch: int, begun: int) -> None:
        """Begins to read anew; the position is a function of the update."""
        self._iterator = None
