"""The examples of a source, for tests of what reads data."""

import numpy as np

from tfdist.data.batch_layout import Layout
from tfdist.data.batches import Batches
from tfdist.data.records import RecordFeed


def columns_of(source):
    """Returns the columns of all examples, in the order of the source."""
    if source.columns is not None:
        return source.columns
    batches = source.decoded if isinstance(source, Batches) else source.in_order(7)
    return tuple(np.concatenate([np.asarray(part) for part in column]) for column in zip(*batches))


def check_order(source, *columns):
    """A run that resumes reads what it would have read; the judge is a shuffle of the arrays themselves."""
    batch = -(-source.size // 3)
    feed = RecordFeed(source, Layout(batch, 1, 1), shuffle=3)
    for epoch, number in ((0, 0), (1, 2), (4, 1)):
        rows = np.random.Generator(np.random.Philox(key=np.array([3, epoch], np.uint64))).permutation(source.size)
        rows = rows[batch * number : batch * (number + 1)]
        for read, column in zip(next(iter(feed.dataset(3 * epoch + number))), columns, strict=True):
            np.testing.assert_array_equal(read[: len(rows)], column[rows])
