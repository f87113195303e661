"""Examples by number: the same batches, the same random changes and partners on any number of workers."""

import dataclasses
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.covering import first
from support.refusals import refused
from support.training_cases import all_same

import tfdist
from tfdist.data import sources
from tfdist.data.batch_layout import Layout, fetch
from tfdist.data.records import RecordFeed, example_seeds
from tfdist.trainer import evaluation

SIZE, BATCH = 61, 24


def numbers(size=SIZE, **options):
    """Examples (row, two random numbers)."""

    def decode(row, seed):
        return row, tf.random.stateless_uniform([2], seed)

    return sources.Records(size, lambda rows: rows, decode, **options)


def beside(columns, partners, seeds):
    """Each row beside that of its partner."""
    return (*columns, partners[0], seeds)


def layouts(workers, accumulate, local=2):
    if workers == 1:
        return [Layout(BATCH, 1, accumulate), Layout(BATCH, 2, accumulate), Layout(BATCH, 5, accumulate)]
    return [Layout(BATCH, workers * local, accumulate, w * local, local) for w in range(workers)]


def taken(feed, layout, update):
    """What this worker has of an update: columns [own rows, ...], and the examples of the batch."""
    call = feed.next(update, 1)
    batch = fetch(call.feed, call.first, layout)[1]()
    count = int(batch.count)
    if isinstance(batch.rows, tuple):
        return [column.numpy() for column in batch.table], count
    own = batch.rows.numpy()[positions(layout, count)]
    return [tf.gather(column, own).numpy() for column in batch.table], count


def positions(layout, count):
    """Of the own rows, in the global batch; of none, the first."""
    own = np.concatenate(layout.worker_positions(count))
    return own if len(own) else np.zeros(1, int)


@pytest.mark.parametrize("workers, accumulate", first(1, [(3, 2), (1, 1), (1, 3), (2, 1), (2, 3), (3, 1)]))
def test_same_batches_and_same_random_changes_for_any_number_of_workers(workers, accumulate):
    for layout in layouts(workers, accumulate):
        feed = RecordFeed(numbers(mix=beside), layout, shuffle=5, seed=7)
        for update in (0, 1, 2, 3, 5):
            (rows, drawn, partner, seeds), count = taken(feed, layout, update)
            epoch, number = divmod(update, 3)
            batch = sources.order(5, epoch, SIZE)[number * BATCH :][:BATCH]
            assert count == len(batch)
            at = positions(layout, count)
            np.testing.assert_array_equal(rows, batch[at])
            np.testing.assert_array_equal(partner, batch[(at + 1) % count])
            expected = example_seeds(7, epoch, rows)
            np.testing.assert_array_equal(seeds, ~expected)
            for one, seed in zip(drawn, expected):
                np.testing.assert_array_equal(one, tf.random.stateless_uniform([2], seed))


def test_it_continues_anywhere_and_reads_nothing_twice():
    """Mid-epoch, without reading what comes before; one iterator serves as long as the updates follow each other."""
    layout = Layout(BATCH, 6, 1, 2, 2)
    through = RecordFeed(numbers(), layout, shuffle=5, seed=5)
    expected = [taken(through, layout, update)[0] for update in range(7)]
    for update in (4, 1):
        asked = []

        def read(rows, asked=asked):
            found = tf.numpy_function(lambda r: asked.append(r.tolist()) or r, [rows], tf.int64)
            return tf.ensure_shape(found, rows.shape)

        fresh = RecordFeed(dataclasses.replace(numbers(), read=read), layout, shuffle=5, seed=5)
        fresh.resume(update, 0, update)
        all_same(taken(fresh, layout, update)[0], expected[update])
        assert expected[update][0].tolist() in asked
        assert not [rows for rows, _ in expected[:update] if rows.tolist() in asked], "what was seen is read again"
    again = through.next(7, 1)
    assert again.feed[0] is through.next(8, 1).feed[0]
    assert through.next(2, 1).feed[0] is not again.feed[0], "after a rollback"


def test_all_batches_of_a_call_are_in_one_epoch():
    feed = RecordFeed(numbers(), Layout(BATCH, 2, 1), shuffle=5)
    calls = [feed.next(update, limit) for update, limit in ((0, 10), (2, 10), (3, 1), (4, 10))]
    assert [(c.first, c.last, c.full) for c in calls] == [(0, 2, True), (2, 3, False), (0, 1, True), (1, 2, True)]
    assert all(not RecordFeed(numbers(), Layout(BATCH, 5, 1)).next(u, 9).full for u in (0, 2))


def test_measuring_again_and_again_sees_the_same():
    """In the order of the source, with the same draw each time, by one iterator."""
    layout = Layout(BATCH, 2, 1)
    feed = RecordFeed(numbers(), layout)
    rounds = [[taken(feed, layout, update)[0] for update in range(3)] for _ in range(2)]
    all_same(itertools.chain(*rounds[0]), itertools.chain(*rounds[1]))
    rows = np.concatenate([batch[0][: (24, 24, 13)[i]] for i, batch in enumerate(rounds[0])])
    np.testing.assert_array_equal(rows, np.arange(SIZE))
    plain = list(numbers().in_order(BATCH))
    assert [len(batch[0]) for batch in plain] == [24, 24, 13]
    np.testing.assert_array_equal(np.concatenate([b[0] for b in plain]), np.arange(SIZE))
    assert next(iter(numbers().in_order(3)))[0].shape == (3,)


def test_seeds_are_all_different_and_look_random():
    seeds = [example_seeds(s, e, np.arange(20_000)) for s, e in ((0, 0), (0, 1), (1, 0))]
    whole = np.concatenate(seeds)
    assert whole.dtype == np.int32 and len(np.unique(whole, axis=0)) == 60_000
    bits = np.unpackbits(whole.view(np.uint8), axis=1)
    assert np.abs(bits.mean(0) - 0.5).max() < 6 * 0.5 / 60_000**0.5
    # Of the published generator (Vigna, splitmix64.c): state 0 and then 0 gives this first output.
    assert example_seeds(0, 0, np.array([0])).view(np.uint64) == splitmix(splitmix(splitmix(0)))


def splitmix(state):
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@pytest.mark.whole
@pytest.mark.parametrize(
    "replicas", [pytest.param(1, marks=pytest.mark.whole), 2, pytest.param(3, marks=pytest.mark.whole)]
)
def test_training_is_that_of_arrays(replicas, connect):
    x = np.random.default_rng(0).normal(size=(SIZE, 4)).astype("float32")
    y = np.random.default_rng(1).integers(0, 3, SIZE)
    by_number = sources.Records(
        SIZE, lambda rows: (tf.gather(x, rows), tf.gather(y, rows)), lambda stored, seed: stored
    )

    def trained(source, distribution):
        keras.utils.set_random_seed(0)
        with distribution.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", loss, metrics=["accuracy"])
        options = dict(distribution=distribution, batch_size=BATCH)
        history = tfdist.fit(
            model, source, epochs=3, verbose=0, validation_data=source, class_weight={0: 2.0}, **options
        )
        outputs = tfdist.predict(model, source, **options)
        return history.history, evaluation.evaluate(model, source, **options), outputs, model.get_weights()

    expected = trained(sources.Arrays((x, y)), connect(1))
    got = trained(by_number, connect(replicas))
    all_same(keras.tree.flatten(got), keras.tree.flatten(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.whole
def test_a_model_with_its_own_train_step(connect):
    class Own(keras.Model):
        def train_step(self, batch):
            return super().train_step(batch)

    def trained(source, shuffle=False):
        keras.utils.set_random_seed(0)
        tokens = keras.Input((1,))
        model = Own(tokens, keras.layers.Dense(1)(tokens))
        model.compile("sgd", "mse")
        options = dict(batch_size=BATCH, validation_batch_size=BATCH, validation_data=source, shuffle=shuffle)
        history = tfdist.fit(model, source, epochs=2, verbose=0, **options).history
        return [*history["loss"], *history["val_loss"], *keras.tree.flatten(model.get_weights())]

    x = np.linspace(-1, 1, SIZE, dtype="float32")[:, None]
    by_number = sources.Records(SIZE, lambda rows: (tf.gather(x, rows),) * 2, lambda stored, seed: stored)
    expected = trained(sources.Arrays((x, x)))
    all_same(trained(by_number), expected, rtol=1e-5)
    assert trained(by_number, shuffle=True)[0] != expected[0]


def test_one_hot_targets_are_there_before_examples_are_mixed():
    source = sources.Records(5, lambda rows: rows, lambda row, seed: (row, row % 3), mix=lambda c, p, s: (c[0], p[1]))
    ((_, y),) = sources.one_hot(source, 3).in_order(5)
    assert y.dtype == tf.float32
    np.testing.assert_array_equal(y, np.eye(3)[[1, 2, 0, 1, 0]])
    plain = sources.one_hot(dataclasses.replace(source, mix=None), 3)
    assert next(iter(plain.in_order(5)))[1].dtype == tf.uint8


@pytest.mark.parametrize(
    "source, message",
    [
        (lambda: numbers(0), "the data set is empty: give it at least one example"),
        (lambda: sources.Records(3, lambda r: r, lambda r, s: tf.zeros([tf.cast(r, tf.int32)])),
         r"gives TensorSpec\(shape=\(None,\), .* for an example: all must have one shape to be batched"),
    ],
)  # fmt: skip
def test_unusable_records(source, message, connect):
    with refused(message):
        next(iter(source().in_order(1)))
    with refused("targets and weights belong into the data set itself"):
        sources.as_source(numbers(), y=np.ones(SIZE))
