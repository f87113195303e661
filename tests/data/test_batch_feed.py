"""The checksums by which workers notice that they have read other batches."""

import contextlib
import functools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.covering import first

import tfdist
from tfdist.data import batches
from tfdist.data.batch_layout import Layout
from tfdist.data.sources import Batches, as_source

X = np.random.default_rng(1).normal(size=(12, 3)).astype("float32")
COLUMNS = {
    "class numbers": np.arange(12) % 5, "one-hot rows": np.eye(5, dtype="uint8")[np.arange(12) % 5],
    "fractions": X[:, 0], "double": X.astype("float64"), "half": X.astype("float16"),
    "truth values": np.arange(12) % 3 == 0, "texts": np.array([f"label {i}" for i in range(12)]),
    "large numbers": np.arange(12).astype("uint64") + 2**63, "complex numbers": X[:, 0] + 1j * X[:, 1],
}  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
def test_another_order_has_another_checksum(name):
    y = COLUMNS[name]
    orders = y, y, np.roll(y, 1, 0), y[::-1], y[[1, 0, *range(2, 12)]]
    one, again, *others = (int(batches.checksum((X, tf.constant(order)))) for order in orders)
    assert one == again and one not in others


def test_what_counts():
    y, weight = tf.constant(np.arange(12)), tf.constant(X[:, 0])
    base = batches.checksum((X, y))
    assert batches.checksum((X, y, weight)) != batches.checksum((X, y, weight[::-1]))
    assert batches.checksum((tf.constant(X),)) != batches.checksum((tf.constant(X[::-1]),))
    ragged = [batches.checksum(tf.ragged.constant(rows)) for rows in ([[1], [2, 3]], [[1, 2], [3]], [[1], [2, 4]])]
    assert len(set(map(int, ragged))) == 3
    assert batches.checksum(({"a": X, "b": tf.constant(X[:, :0])},)) != base
    short = batches.checksum((X[:8], y[:8]))
    assert short != base


def feed_of(dataset, **layout):
    return batches.BatchFeed(Batches(dataset), Layout(4, 2, 1, **layout))


def read(feed, update, count):
    """Reads batches as a call does; returns the digest, and the targets of this worker's rows."""
    iterator = feed.next(update, count).feed[0]
    rows = [next(iterator)[0][1].numpy().tolist() for _ in range(count)]
    return feed.digest(count), rows


def data(seed):
    return tf.data.Dataset.from_tensor_slices((X, np.arange(12))).shuffle(12, seed=seed).batch(4)


@pytest.mark.parametrize("unknown", first(1, [True, False]))
def test_it_goes_on_after_a_resume_and_a_restart(unknown):
    made = lambda: data(3).filter(lambda x, y: True) if unknown else data(3)
    one, two = (feed_of(made(), first=rank, local=1) for rank in range(2))
    (digest, rows), (same, others) = read(one, 0, 2), read(two, 0, 2)
    assert digest == same and rows != others, "each has its own rows of them"
    for feed in (one, two):
        feed.resume(5, 1, 2)
    assert read(one, 5, 1)[0] == read(two, 5, 1)[0]
    for feed in (one, two):
        feed.restart()
    assert read(one, 6, 1)[0] == read(two, 6, 1)[0]


@pytest.mark.parametrize("unknown", first(1, [True, False]))
def test_a_resume_of_a_training_that_began_later_reads_no_more_than_it_had(unknown):
    """It skipped the epochs before `initial_epoch`, too, so that all that followed had another order."""
    made = lambda: feed_of(data(3).filter(lambda x, y: True) if unknown else data(3), first=0, local=1)
    whole, resumed = made(), made()
    for _ in range(2):  # epochs of 3 updates, from update 6 on
        whole.restart()
        expected = read(whole, 6, 3)[1]
    resumed.resume(10, 1, 1, first=6)
    assert read(resumed, 10, 2)[1] == expected[1:]


@pytest.mark.whole
def test_what_is_read_ahead_moves_no_order_on(connect):
    """How far that had come, when a first fit ended, decided the order of a second one."""
    counted = []

    def count(row):
        counted.append(int(row))
        return np.float32([row / 40])

    def rows_read(steps):
        made = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        made.compile("sgd", "mse")
        rows = tf.data.Dataset.range(40).shuffle(4, seed=1)
        rows = rows.map(lambda i: (tf.ensure_shape(tf.numpy_function(count, [i], tf.float32), [1]), 0.0))
        counted.clear()
        tfdist.fit(made, rows.repeat().batch(4), steps_per_epoch=steps, verbose=0, distribution=connect(1))
        return len(counted)

    assert rows_read(13) - rows_read(1) == 12 * 4


class Passes:
    """A generator that counts, as one whose order or difficulty depends on the number of the pass."""

    def __init__(self):
        self.passes, self.order = 0, []

    @classmethod
    def name(cls):  # of a class that derives from it, also once what is counted has been put back
        return cls.__name__

    def __call__(self):
        self.passes, self.order = self.passes + 1, [0] * len(Passes.name()[:5])
        yield from ((np.full((4, 1), self.passes, "float32"), np.zeros((4, 1))) for _ in self.order)


def test_data_are_those_of_the_epoch(connect, tmp_path):
    """Batches of the next one were made before a callback had set what they depend on, and looks counted as passes."""
    factors, variable, file = [1.0], tf.Variable(1.0), tmp_path / "factor"

    def set_all(epoch, _):
        file.write_text(str(epoch + 1.0))
        factors[0] = epoch + 1.0
        variable.assign(factors[0])

    set_all(0, {})
    ones = tf.data.Dataset.from_tensors((np.ones((4, 1), "float32"), np.zeros((4, 1)))).repeat(5)
    by_python = lambda x: tf.ensure_shape(
        tf.numpy_function(lambda x: x * np.float32(factors[0]), [x], tf.float32), [4, 1]
    )
    by_file = lambda x: x * tf.strings.to_number(tf.io.read_file(str(file)))
    data = [ones.map(lambda x, y, f=f: (f(x), y)) for f in (by_python, by_file, lambda x: x * variable)]
    counts = tf.data.Dataset.from_generator(Passes(), output_signature=ones.element_spec)
    for each in (*data, counts.apply(tf.data.experimental.assert_cardinality(5))):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        sets = [keras.callbacks.LambdaCallback(on_epoch_begin=set_all)]
        history = tfdist.fit(model, each, epochs=3, distribution=connect(1), callbacks=sets, verbose=0).history
        assert history["loss"] == [1, 4, 9]
    assert type("Other", (Passes,), {}).name() == "Other"


def test_each_pass_over_a_sequence_is_compared():
    class Data(keras.utils.PyDataset):
        passes, later = 0, 0  # what it adds to numbers of the passes after the first

        __len__ = lambda self: 2
        __getitem__ = lambda self, i: (np.full((4, 1), i + self.passes * self.later, "float32"), np.zeros(4))

    def digests(later):
        data = Data()
        data.later = later
        feed = as_source(data).feed(Layout(4, 2, 1, first=0, local=1))
        for data.passes in (0, 1):
            iterator = feed.next(2 * data.passes, 2).feed[0]
            yield [*iterator] and feed.digest(2)

    (first, second), (same, other) = digests(0), digests(1)
    assert first == same and second != other


def test_a_shuffle_that_two_data_sets_read():
    one, kept = data(3), tf.data.Dataset.range(9).shuffle(9, seed=1, reshuffle_each_iteration=False)
    assert batches.share_order(one.skip(1), one.take(1).map(lambda x, y: (x, y)))
    assert not batches.share_order(one, data(3)) and not batches.share_order(kept.skip(1), kept.take(1))
    assert not batches.share_order(one, (X, X))


@pytest.mark.whole
def test_other_batches_have_another_digest():
    tf.random.set_seed(None)
    found = {tuple(read(feed_of(data(None), first=0, local=1), 0, 3)[0]) for _ in range(4)}
    assert len(found) > 1


def test_a_lone_worker_looks_at_nothing():
    feed = feed_of(data(3))
    next(feed.next(0, 1).feed[0])
    assert feed.digest(1) == []


@pytest.mark.parametrize("replicas", first(0, [1, 3]))
@pytest.mark.parametrize("loss", first(1, [lambda y, x: keras.ops.mean(keras.ops.square(y - x)), "mse"]))
def test_a_batch_without_rows_is_an_update_without_a_gradient(connect, replicas, loss):
    """As in Keras, momentum goes on; one that makes the mean of nothing NaN is asked for no loss."""
    whole = tf.data.Dataset.from_tensor_slices((X, X[:, :1], X[:, 1] ** 2)).batch(8)
    empty = whole.take(1).map(lambda *columns: tuple(column[:0] for column in columns))
    dataset = empty.concatenate(whole.take(1)).concatenate(empty).concatenate(whole.skip(1)).concatenate(empty)
    if loss != "mse":
        dataset = dataset.map(lambda x, y, weight: (x, y))

    def results(fit, evaluate, predict, scope):
        keras.utils.set_random_seed(0)
        with scope:
            norm = keras.layers.BatchNormalization(synchronized=True)
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), norm, keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["mae"], weighted_metrics=["mse"])
        logs = fit(model, dataset, epochs=2, verbose=0).history
        logs |= evaluate(model, dataset, verbose=0, return_dict=True)
        if loss != "mse":
            del logs["loss"]
        return [*logs.values(), predict(model, dataset.map(lambda x, *_: x), verbose=0), *model.get_weights()]

    kinds = "fit", "evaluate", "predict"
    theirs = results(*(getattr(keras.Model, kind) for kind in kinds), connect(1).scope())
    here = {"distribution": connect(replicas), "check_agreement": "off"}
    ways = [functools.partial(getattr(tfdist, kind), **here) for kind in kinds]
    for ours, of_keras in zip(results(*ways, connect(replicas).scope()), theirs, strict=True):
        np.testing.assert_allclose(ours, of_keras, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("count, known", first(0, [(None, True), (3, True), (None, False)]))
def test_the_order_of_a_cache_is_that_of_keras(connect, count, known):
    """What `prefetch` had read when the first batch had been looked at decided which order was kept."""
    x = np.random.default_rng(0).normal(size=(48, 6))
    weights = []
    for fit in (keras.Model.fit, tfdist.fit):
        keras.utils.set_random_seed(1)
        data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(48, seed=3)
        data = (data if known else data.filter(lambda x, y: x[0] > -9)).batch(16).cache()
        data = (data.repeat() if count else data).prefetch(2)
        distribution = connect(2)
        with distribution.scope() if fit is tfdist.fit else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        options = {"distribution": distribution} if fit is tfdist.fit else {"verbose": 0}
        fit(model, data, epochs=3, steps_per_epoch=count, **options)
        weights.append(model.get_weights()[0])
    np.testing.assert_allclose(weights[1], weights[0], rtol=1e-5)


def drawing(kind):
    """A data set with functions that draw for each example, and rows at its end that make no batch."""
    x = np.random.default_rng(0).normal(size=(42, 4, 5, 1)).astype("float32")
    layer, generator = keras.layers.RandomTranslation(0.4, 0.4, seed=3), tf.random.Generator.from_seed(5)
    of_numpy = np.random.default_rng(6)
    noise = {
        "numpy": lambda: of_numpy.normal(),
        "global": lambda: np.random.normal(),
        "python": lambda: random.random(),
    }
    random.seed(7)
    of_python = lambda draw: (
        lambda x: x + tf.ensure_shape(tf.numpy_function(lambda: np.float32(draw()), [], "float32"), [])
    )
    changes = {
        "layer": lambda x: layer(x, training=True),
        "generator": lambda x: x + generator.normal(tf.shape(x)),
        "operation": lambda x: tf.image.random_brightness(x, 3.0, seed=2),
        **{name: of_python(draw) for name, draw in noise.items()},
    }
    changes["global"] = tf.function(changes["global"])

    def examples():
        yield from ((row + of_numpy.normal(), row[0, 0]) for row in x)

    data = tf.data.Dataset.from_tensor_slices((x, x[:, 0, 0]))
    if kind == "python examples":
        data = tf.data.Dataset.from_generator(examples, output_signature=data.element_spec)
    else:
        for name in kind.split(" and "):
            data = data.map(lambda x, y, change=changes[name]: (change(x), y))
    return data.batch(8, drop_remainder="numpy" in kind)


DRAWS = ["layer and generator and operation", "numpy and global and python", "python examples"]
"""The draws of TensorFlow's, those of functions of Python's, and those of a generator of Python's."""
ALONE = [kind for kinds in DRAWS[:2] for kind in kinds.split(" and ")]
DRAWN = [(kind, *how) for kind in [*DRAWS, *ALONE] for how in ((1, None), (2, None), (2, 4))]
SHORT = (DRAWS[1], 2, 4)


@pytest.mark.parametrize("kind, replicas, steps", first(1, sorted(DRAWN, key=lambda cell: cell != SHORT)))
def test_what_a_data_set_draws_is_what_it_draws_for_keras(connect, tmp_path, kind, replicas, steps):
    """Looks at the first batch drew, and reading ahead did so by an amount that depended on the time."""

    def weights(fit, *starts, **options):
        for epochs in starts:
            keras.utils.set_random_seed(1)
            with options["distribution"].scope() if options else contextlib.nullcontext():
                model = keras.Sequential([keras.Input((4, 5, 1)), keras.layers.Flatten(), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            data = drawing(kind)
            data = data.repeat() if steps else data
            fit(model, data, epochs=epochs, steps_per_epoch=steps, verbose=0, **options)
        return model.get_weights()[0]

    options, theirs = {"distribution": connect(replicas)}, weights(keras.Model.fit, 3)
    np.testing.assert_allclose(weights(tfdist.fit, 3, **options), theirs, rtol=1e-5, atol=1e-7)
    options["checkpoints"] = tfdist.Checkpoints(tmp_path / "kept", every="3 steps")
    np.testing.assert_allclose(weights(tfdist.fit, 2, 3, **options), theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.whole
def test_validation_data_that_change_at_the_end_of_an_epoch_change_as_often_as_in_keras(connect):
    class Data(keras.utils.PyDataset):
        factor = 1.0

        def __len__(self):
            return 3

        def __getitem__(self, i):
            return X[4 * i : 4 * i + 4] * self.factor, X[4 * i : 4 * i + 4, :1]

        def on_epoch_end(self):
            self.factor *= 2.0

    def losses(fit, **options):
        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        made.compile("sgd", "mse")
        options |= dict(batch_size=4, epochs=3, shuffle=False, verbose=0, validation_data=Data())
        return fit(made, X, X[:, :1], **options).history["val_loss"]

    assert losses(tfdist.fit, distribution=connect(1)) == pytest.approx(losses(keras.Model.fit), rel=1e-5)


@pytest.mark.whole
def test_validation_data_that_draw_and_have_no_end(connect):
    """The rest of the data set was read before the next evaluation."""
    model = keras.Sequential([keras.Input((4, 5, 1)), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    options = {"validation_data": drawing("numpy").repeat(), "validation_steps": 2, "distribution": connect(1)}
    assert len(tfdist.fit(model, drawing("numpy"), epochs=2, verbose=0, **options).history["val_loss"]) == 2


@pytest.mark.whole
def test_an_object_that_holds_the_data_sets_which_its_methods_change(connect):
    """The search for what they draw from went round in a circle."""

    class Data:
        def __init__(self):
            self.generator, x = np.random.default_rng(1), np.ones((20, 3), "float32")
            self.one, self.other = (
                tf.data.Dataset.from_tensor_slices((x, x[:, :1])).map(self.changed).batch(4) for _ in range(2)
            )

        def changed(self, x, y):
            noise = tf.numpy_function(lambda: np.float32(self.generator.normal()), [], tf.float32)
            return x + tf.ensure_shape(noise, []), y

    histories = []
    for fit, options in (keras.Model.fit, {}), (tfdist.fit, {"distribution": connect(1)}):
        keras.utils.set_random_seed(1)
        model, data = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), Data()
        model.compile("sgd", "mse")
        histories.append(fit(model, data.one, epochs=2, verbose=0, **options).history["loss"])
    np.testing.assert_allclose(*histories, rtol=1e-5)


def test_a_cache_that_may_have_no_end_or_is_cut_is_not_read():
    read = []

    def endless():
        while True:
            read.append(0)
            yield np.zeros(3)

    data = tf.data.Dataset.from_generator(endless, output_signature=tf.TensorSpec([3]))
    for dataset in (data.batch(2).cache(), data.batch(2).cache().take(4)):
        assert Batches(dataset).first_batch()[0].shape == (2, 3)
    assert len(read) < 100
    some = tf.data.Dataset.range(10**12).map(lambda i: (tf.ones([1, 2]), tf.ones([1]))).cache().take(5)
    assert Batches(some).first_batch()[0].shape == (1, 2)
