"""Batches that Python makes reach each worker whole, in their order, and as they were."""

import concurrent.futures
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.covering import first

from tfdist.data import python_batches, sources
from tfdist.data.batch_layout import Layout, fetch
from tfdist.data.batches import BatchFeed, SequenceFeed

SIZES = (24, 24, 7)


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return len(SIZES)

    def __getitem__(self, number):
        return (np.arange(24 * number, 24 * number + SIZES[number]),)


def generator():
    yield from Sequence()


@pytest.mark.parametrize("accumulate", first(1, [2, 1]))
@pytest.mark.parametrize("kind, feed", first(0, [(Sequence, SequenceFeed), (generator, BatchFeed)]))
def test_workers_divide_every_batch(kind, feed, accumulate):
    """Each of three workers, with two replicas each, reads all of it and keeps its own rows."""
    layouts = [Layout(24, 6, accumulate, first, 2) for first in range(0, 6, 2)]
    workers = [(feed(sources.as_source(kind()), layout), layout) for layout in layouts]
    for number, size in enumerate(SIZES):
        seen = []
        for reading, layout in workers:
            now = reading.next(number, 1)
            batch = fetch(now.feed, now.first, layout)[1]()
            own = np.concatenate(layout.worker_positions(size))
            assert int(batch.count) == size
            assert batch.table[0].numpy().tolist() == (24 * number + (own if len(own) else np.zeros(1, int))).tolist()
            seen += own.tolist()
        assert sorted(seen) == list(range(size))


def read(feed, layout, update, limit=1):
    now = feed.next(update, limit)
    (x,), *_ = fetch(now.feed, now.first, layout)[1]()
    return int(x[0]) // 24, now.last


def test_a_sequence_is_read_at_any_update_in_an_order_of_seed_and_pass():
    layout = Layout(24, 1, 1)
    feed = lambda: SequenceFeed(sources.as_source(Sequence()), layout, shuffle=5)
    expected = [int(n) for number in range(3) for n in sources.order(5, number, 3)]
    whole = feed()
    assert [read(whole, layout, update)[0] for update in range(9)] == expected
    for update in range(9):
        assert read(feed(), layout, update, 9) == (expected[update], 3 - update % 3), "no call beyond a pass"
    whole.resume(4, 1, 1)
    assert read(whole, layout, 4)[0] == expected[4]


class Pool(concurrent.futures.ThreadPoolExecutor):
    submitted, ended = 0, False

    def submit(self, *args):
        self.submitted += 1
        return super().submit(*args)

    def shutdown(self, **kwargs):
        super().shutdown(**kwargs)
        self.ended = True


def test_a_pool_is_ahead_by_the_size_of_the_queue_and_ends_with_the_reading():
    pool = Pool(2)
    made = python_batches._in_order(pool, lambda n: n * n, itertools.count(), 3)
    assert [next(made) for _ in range(4)] == [0, 1, 4, 9]
    assert pool.submitted == 4 + 3 - 1
    made.close()
    assert pool.ended
    pool = Pool(2)
    assert list(python_batches._in_order(pool, abs, range(-5, 0), 10)) == [5, 4, 3, 2, 1] and pool.ended


def test_types_stay_and_shapes_that_differ_are_open():
    batches = [
        ({"word": np.array(["a", "b"]), "x": [np.ones((2, n)), tf.ones((2, 3), tf.bfloat16)]}, np.ones(2, "int8"), None)
        for n in (3, 4)
    ]
    source = sources.as_source(b for b in batches)
    x, y = source.dataset.element_spec
    assert x["word"] == tf.TensorSpec([None], tf.string) and y == tf.TensorSpec([None], tf.int8)
    assert x["x"] == (tf.TensorSpec([None, None], tf.float64), tf.TensorSpec([None, 3], tf.bfloat16))
    assert source.first_batch()[0]["x"][0].shape == (2, 3)
    assert [b[0]["x"][0].shape[1] for b in source.dataset] == [3, 4], "the look at the first has lost nothing"


def test_frames_are_columns_as_in_keras():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2], "b": [0.5, 1.5]})
    (x, y) = sources.as_source(frame, frame["a"]).columns
    assert x.dtype == "float32" and x.tolist() == [[1, 0.5], [2, 1.5]] and y.tolist() == [[1], [2]]
