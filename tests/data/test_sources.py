"""Every example once per epoch, in an order that depends on the seed and the epoch alone."""

import dataclasses
import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.covering import first
from support.refusals import refused

import tfdist
from tfdist.cluster.peers import Peers
from tfdist.data import loaded, sources
from tfdist.data.arrays import ArrayFeed
from tfdist.data.batch_layout import Layout, fetch
from tfdist.data.batches import BatchFeed
from tfdist.data.datasets import tables, tfrecords

BATCH = 8


def counting(distribution, examples):
    """A model with one weight per example, which falls by one each time the example is trained on."""
    with distribution.scope():
        model = keras.Sequential(
            [keras.Input((1,), dtype="int32"), keras.layers.Embedding(examples, 1), keras.layers.Flatten()]
        )
        model.compile(keras.optimizers.SGD(1.0), keras.losses.MeanAbsoluteError(reduction="sum"))
    # Far above the target, so that the gradient of |weight - 0| is 1.
    model.set_weights([np.full((examples, 1), 100.0, "float32")])
    return model


EXAMPLES = first(3, [1, BATCH, 3 * BATCH - 1, BATCH - 1, BATCH + 1])


def times_seen(model):
    return (100.0 - model.get_weights()[0][:, 0]).tolist()


@pytest.mark.covering(0)
@pytest.mark.parametrize("replicas", [1, 3, 8])
@pytest.mark.parametrize("examples", EXAMPLES)
def test_each_example_once_per_epoch(examples, replicas, connect):
    distribution = connect(replicas)
    x, y = np.arange(examples)[:, None], np.zeros(examples)
    model = counting(distribution, examples)
    options = {"batch_size": BATCH, "epochs": 2, "verbose": 0, "check_agreement": "off"}
    tfdist.fit(model, x, y, distribution=distribution, **options)
    assert times_seen(model) == [2.0] * examples


@pytest.mark.whole
@pytest.mark.covering(0)
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("examples", [1, BATCH - 1, BATCH, BATCH + 1, 3 * BATCH - 1])
def test_each_example_of_a_dataset_once_per_epoch(examples, known, replicas, connect):
    distribution = connect(replicas)
    dataset = tf.data.Dataset.from_tensor_slices((np.arange(examples)[:, None], np.zeros(examples)))
    if not known:
        dataset = dataset.filter(lambda x, y: True)
    model = counting(distribution, examples)
    dataset = dataset.batch(BATCH)
    if examples < replicas and not known:
        words = r"the data set's first batch \(of 1\) is smaller than 3 replicas: use at least 3"
        with refused(words):
            tfdist.fit(model, dataset, distribution=distribution, verbose=0)
        return
    tfdist.fit(model, dataset, distribution=distribution, epochs=2, verbose=0)
    assert times_seen(model) == [2.0] * examples


@pytest.mark.covering(0)
@pytest.mark.parametrize("replicas", [1, 3, 8])
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("as_dataset", [False, True, "of unknown length"])
def test_predict_and_evaluate_see_each_example_once_in_order(examples, replicas, as_dataset, connect):
    distribution = connect(replicas)
    with distribution.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Rescaling(2.0)])
        model.compile(loss="mae", metrics=[keras.metrics.MeanAbsoluteError(name="mae")])
    x = np.random.default_rng(0).normal(size=(examples, 2)).astype("float32")
    unknown = lambda dataset: dataset.filter(lambda *_: True) if isinstance(as_dataset, str) else dataset
    given = unknown(tf.data.Dataset.from_tensor_slices(x)).batch(BATCH) if as_dataset else x
    options = {"distribution": distribution, "batch_size": BATCH, "check_agreement": "off"}
    outputs = tfdist.predict(model, given, **options)
    np.testing.assert_allclose(outputs, 2 * x, rtol=1e-6)
    pairs = unknown(tf.data.Dataset.from_tensor_slices((x, 0 * x))).batch(BATCH) if as_dataset else (x, 0 * x)
    values = tfdist.evaluate(model, pairs, **options)
    expected = np.abs(2 * x).mean()
    assert values == pytest.approx({"loss": expected, "mae": expected}, rel=1e-5)


def test_the_order_is_a_permutation_that_changes_with_seed_and_epoch_only():
    one = sources.order(seed=1, epoch=0, size=1000)
    assert sorted(one) == list(range(1000))
    assert (one == sources.order(1, 0, 1000)).all()
    assert (one != sources.order(1, 1, 1000)).any()
    assert (one != sources.order(2, 0, 1000)).any()


@pytest.mark.whole
def test_replicas_drop_different_units(connect):
    """Keras gives every replica the same stream; correlated masks would make dropout weaker than it should be."""
    distribution = connect(4)
    with distribution.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    tfdist.fit(model, np.ones((8, 64)), np.ones((8, 1)), distribution=distribution, batch_size=8, verbose=0)
    state = next(v for v in model.non_trainable_variables if "seed_generator" in v.path)
    assert len({tuple(copy.numpy()) for copy in state.value.values}) == 4


def test_steps_per_epoch_goes_through_the_data_across_epochs(connect, said):
    model = counting(connect(1), 3 * BATCH)
    x = np.arange(3 * BATCH)[:, None]
    history = tfdist.fit(model, x, np.zeros(3 * BATCH), batch_size=BATCH, epochs=3, steps_per_epoch=1, verbose=0)
    assert len(history.epoch) == 3
    assert times_seen(model) == [1.0] * 3 * BATCH
    assert not any("WARNING" in line for line in said)
    tfdist.fit(model, x, np.zeros(3 * BATCH), batch_size=BATCH, epochs=3, steps_per_epoch=2, verbose=0)
    assert times_seen(model) == [3.0] * 3 * BATCH
    assert (
        "WARNING: each epoch has 2 updates, and goes on from the beginning of the data where it ends after 3" in said[0]
    )


def test_endless_data_with_steps_per_epoch(connect):
    dataset = tf.data.Dataset.from_tensor_slices((np.arange(BATCH)[:, None], np.zeros(BATCH))).batch(BATCH).repeat()
    model = counting(connect(1), BATCH)
    with refused("never ends: give steps_per_epoch"):
        tfdist.fit(model, dataset, verbose=0)
    tfdist.fit(model, dataset, epochs=2, steps_per_epoch=3, verbose=0)
    assert times_seen(model) == [6.0] * BATCH


def test_string_features_and_more_inputs(connect):
    """Facts K6: Keras' fit crashes on a string feature under MirroredStrategy."""
    distribution = connect(2)
    words = np.array(["red", "green", "blue", "red", "green"])
    with distribution.scope():
        word = keras.Input((), dtype="string", name="word")
        number = keras.Input((1,), name="number")
        lookup = keras.layers.StringLookup(vocabulary=["red", "green", "blue"], output_mode="one_hot")
        model = keras.Model([word, number], keras.layers.Dense(1)(keras.layers.Concatenate()([lookup(word), number])))
        model.compile("sgd", "mse")
    x = [words, np.ones((5, 1), "float32")]
    history = tfdist.fit(model, (x, np.ones((5, 1))), distribution=distribution, batch_size=2, epochs=3, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]


@pytest.mark.parametrize("wrong", [-1, 3])
def test_a_label_of_no_class_is_no_row_of_zeros(wrong, connect):
    """TFDS has -1 for the labels of splits that have none."""
    labels = np.array([0, 1, 2, 0, wrong, 2], np.int64)
    dataset = tf.data.Dataset.from_tensor_slices((np.zeros((6, 2), "float32"), labels)).batch(4)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
    with refused(r"a label value of no class, outside the valid range of \[0, 3\): correct labels or"):
        tfdist.fit(model, sources.one_hot(sources.as_source(dataset), 3), distribution=connect(1), verbose=0)


@pytest.mark.parametrize("given, message", [
    ((np.zeros((0, 2)), np.zeros(0)), "the data set is empty: give it at least one example"),
    ((np.zeros((3, 2)), np.zeros(4)), r"one entry per example each, got lengths x 3, y 4$"),
    (([np.zeros(2), np.zeros(2)], np.zeros(3)), "got lengths x 2, y 3: of a list that is one input, give numpy.ar"),
    ((object(),), "cannot train on object: give NumPy arrays"),
    ((np.ones((2, 2)), None, np.ones(2)), "sample weights without targets have nothing to weigh"),
    ((tf.data.Dataset.range(3),), "has single examples and no batches: give dataset.batch"),
    ((tf.data.Dataset.from_tensors((tf.zeros(3), tf.zeros(1))),), "has single examples and no batches"),
    ((type("Photos", (), {"__module__": "torch.utils"})(),), "cannot train on Photos: give NumPy arrays"),
    ((tf.data.Dataset.range(0).batch(2),), "the data set is empty: give it at least one batch"),
    ((tf.data.Dataset.from_tensors(tf.ragged.constant([[1], [2, 3]])),), "make its tensors dense"),
    (([[1, 2], [3]],), "must have one entry per example|cannot train on|rectangular"),
])  # fmt: skip
def test_unusable_data(given, message):
    with refused(message):
        source = sources.as_source(given if len(given) > 1 else given[0])
        assert source.batches


@pytest.mark.whole
def test_a_later_batch_that_is_larger_than_the_first(connect):
    """As in Keras, every batch is an update, whatever its size."""
    dataset = tf.data.Dataset.range(10).map(lambda i: (tf.reshape(i, [1]), 0.0))
    dataset = dataset.take(2).batch(2).concatenate(dataset.skip(2).batch(4))
    for replicas in (1, 2):
        model = counting(connect(replicas), 10)
        tfdist.fit(model, dataset, distribution=connect(replicas), verbose=0)
        assert int(model.optimizer.iterations.numpy()) == 3
        assert tfdist.predict(model, dataset.map(lambda x, y: x), distribution=connect(replicas)).shape == (10, 1)


def test_a_batch_size_beside_a_dataset(connect):
    dataset = tf.data.Dataset.range(10).map(lambda i: (tf.reshape(i, [1]), 0.0)).batch(4)
    tfdist.fit(counting(connect(1), 10), dataset, batch_size=4, verbose=0)
    with refused("batch_size=8 does not fit a data set of batches of 4: leave it out"):
        tfdist.fit(counting(connect(1), 10), dataset, batch_size=8, verbose=0)
    with refused("batch_size must be at least 1, got 0"):
        tfdist.predict(counting(connect(1), 10), np.ones((3, 1)), batch_size=0)


def feeds(source, accumulate=1, replicas=6, local=2, **kwargs):
    """The feed of each of three workers with two replicas each."""
    kind = ArrayFeed if isinstance(source, sources.Arrays) else BatchFeed
    layouts = [Layout(24, replicas, accumulate, first, local) for first in range(0, replicas, local)]
    return [(kind(source, layout, **kwargs), layout) for layout in layouts]


@pytest.mark.covering(0)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("examples", [24, 24 + 7, 2 * 24 + 23])
@pytest.mark.parametrize("kind", ["arrays", "shuffled", "batches"])
def test_workers_divide_every_global_batch(kind, examples, accumulate):
    x = np.arange(examples)
    batches = lambda: sources.Batches(tf.data.Dataset.from_tensor_slices((x,)).batch(24))
    source = batches() if kind == "batches" else sources.Arrays((x,))
    workers = feeds(source, accumulate, **({"shuffle": 5} if kind == "shuffled" else {}))
    seen = []
    for number in range(-(-examples // 24)):
        batch, counts = [], set()
        for feed, layout in workers:
            now = feed.next(number, 1)
            _, take = fetch(now.feed, now.first, layout)
            whole = take()
            batch.append(taken(whole, layout))
            counts.add(int(whole.count))
        assert len(counts) == 1
        for micro in range(accumulate):
            sizes = [len(rows) for own in batch for rows in own[micro]]
            assert max(sizes) - min(sizes) <= 1, "the rows are shared as evenly as can be"
            seen += [row for own in batch for rows in own[micro] for row in rows]
    assert sorted(seen) == x.tolist()
    if kind != "shuffled":
        assert seen == x.tolist(), "and in their order"


def taken(batch, layout):
    """The rows of each micro-batch and replica of this worker."""

    def rows(micro, replica):
        own = batch.micro_batch(layout, batch.count, micro, replica)
        data = own.data[0].numpy()
        assert len(data) == max(int(own.size), 1), "there is always a row to compute on"
        return data[: int(own.size)].tolist()

    own = range(layout.first, layout.first + (layout.local or layout.replicas))
    return [[rows(micro, replica) for replica in own] for micro in range(layout.accumulate)]


@pytest.mark.whole
def test_a_worker_decodes_its_own_rows_only():
    decoded = []

    def decode(x):
        seen = tf.numpy_function(lambda rows: decoded.append(len(rows)) or rows * 10, [x], x.dtype)
        return (tf.ensure_shape(seen, [None]),)

    source = sources.Batches(tf.data.Dataset.from_tensor_slices((np.arange(48),)).batch(24), decode)
    decoded.clear()
    for feed, layout in feeds(source):
        now = feed.next(0, 1)
        batch = fetch(now.feed, now.first, layout)[1]()
        np.testing.assert_array_equal(batch.table[0], 10 * np.arange(layout.first * 4, layout.first * 4 + 8))
    assert set(decoded) == {8}


class Others(Peers):
    """Stands for the workers: what the second one tells is given."""

    size, rank, hosts = 2, 0, ("here", "there")

    def __init__(self, second):
        self.second = second

    def gather(self, label, mine):
        return json.loads(json.dumps([mine, self.second]))


X, Y = np.zeros((12, 3), "float32"), np.arange(12) % 3
SHARED = {
    "arrays": lambda: sources.as_source((X, Y)),
    "tables": lambda: sources.as_source(({"a": X}, Y)),
    "records": lambda: sources.Records(12, lambda rows: tf.gather(X, rows), lambda x, seed: (x,), labels=Y),
    "batches": lambda: sources.Batches(tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)),
}


@pytest.mark.parametrize("kind", SHARED)
def test_all_workers_have_the_same_data(kind):
    facts = SHARED[kind]().facts()
    Others(facts).check_same(facts, "it")
    for name, other in SHARED.items():
        if {name, kind} & {"records"} and "batches" not in (name, kind):
            Others(other().facts()).check_same(facts, "what fits into the memory of one alone")
        elif name != kind:
            with refused(r"worker 1 \(there\) has other data than worker 0 \("):
                Others(other().facts()).check_same(facts, "it")


def test_numbers_are_the_same_to_rounding_and_texts_are_alike():
    """Machines with other instructions prepare them; with rows of its own a worker would leave out others."""
    r = np.random.default_rng(0)
    columns = [{"a": r.normal(size=(500, 3)), "b": r.integers(0, 255, (500, 2, 2), "uint8"), "c": np.full(500, "x")}]
    columns += [1e4 * r.normal(size=500).astype("float32"), np.r_[np.nan, np.inf, r.uniform(size=498)]]
    mine = sources.Arrays(tuple(columns)).facts()
    assert all(isinstance(v, (float, str)) for name in ("an input", "a target", "a weight") for v in mine[name])
    rounded = [columns[0] | {"a": columns[0]["a"] * (1 + 1e-7) + 1e-7}, columns[1] * np.float32(1 + 1e-6), columns[2]]
    Others(sources.Arrays(tuple(rounded)).facts()).check_same(mine, "it")
    for i, name in enumerate(["an input", "a target", "a weight"]):
        # As `y[rank::size]` leaves them, with the others as they were.
        other = list(columns)
        other[i] = keras.tree.map_structure(lambda a: np.roll(a, 1, 0), columns[i])
        with refused(rf"\({name}: .* and not .*\): give all workers the same"):
            Others(sources.Arrays(tuple(other)).facts()).check_same(mine, "it")


@pytest.mark.parametrize("theirs, what", [
    ((X[1:], Y[1:]), "examples: 11 and not 12"), ((X, Y[::-1]), r"checksum of targets: \d+ and not \d+"),
    ((X[:, :2], Y), "elements: .*"), ((X + 0.001, Y), "an input: .* and not .*"),
    ((np.where(np.arange(36).reshape(12, 3) == 35, np.nan, X).astype("float32"), Y), "an input: nan and not .*"),
])  # fmt: skip
def test_a_worker_with_other_arrays_is_named(theirs, what, connect):
    """Before a call of one worker waits for ever for that of another."""
    second = sources.as_source(theirs).facts() | {"batch": 4}
    distribution = dataclasses.replace(connect(2), peers=Others(second))
    with refused(rf"^worker 1 \(there\) has other data than worker 0 \({what}\): give all"):
        sources.layout_of(sources.as_source((X, Y)), 4, distribution, 1)
    second = SHARED["arrays"]().facts() | {"batch": 5}
    distribution = dataclasses.replace(connect(2), peers=Others(second))
    with refused(r"\(batch: 5 and not 4\)"):
        sources.layout_of(sources.as_source((X, Y)), 4, distribution, 1)


def changed(array, place, value):
    array = array.copy()
    array[place] = value
    return array


WIDE, LONG = np.random.default_rng(0).normal(size=(2, 4000, 300)).astype("float32")
COLUMNS = {  # what one worker may have otherwise, in one row: the column, the value there, and what shows it
    "images": ((WIDE * 50 + 128).clip(0, 255).astype("uint8"), 7, "a sum over all inputs"),
    "wide": (WIDE, 1.5, "a sum over all inputs"),
    "long": (LONG.reshape(-1), 0.5, "a sum over all inputs"),
    "small beside large": (WIDE[:, :2] * np.float32([1e6, 1]), (0, 1.5), "a sum over all inputs"),
    "missing": (np.where(WIDE > 2, np.nan, WIDE)[:, :4], (0, np.nan, 0, 0), "checksum of all inputs"),
    "infinite": (np.where(WIDE > 2, np.inf, WIDE)[:, 0], -np.inf, "checksum of all inputs"),
    "tokens": ((WIDE * 1000).astype("int32"), 5, "checksum of all inputs"),
    "texts": (np.array([b"a", "b"] * 2000, object), "c", "checksum of all inputs"),
    "letters": (np.array(["a", "b"] * 2000), "c", "checksum of all inputs"),
    "bits": ((WIDE > 0).astype("uint8"), 1, "checksum of all numbers"),
    "beside a sentinel": (np.where(WIDE > 1, -999999, WIDE)[:, :1], 1.5, "a squashed sum over all inputs"),
    "all zero": (0 * WIDE, 1e-9, "a sum over all inputs"),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_row_that_only_one_worker_has_otherwise_is_noticed(kind, connect):
    """Some numbers of the arrays were compared, and a row between them trained other weights without a word."""
    column, value, what = COLUMNS[kind]
    row = 1340  # which the sample of `facts` does not see
    at = (row, 7) if kind == "wide" else row
    x, y, weight = column, np.resize(LONG, len(column)), np.resize(LONG, [len(column), 2])
    mine = sources.Arrays((x, y, weight))
    cases = [((changed(x, at, value), y, weight), what)]
    if kind == "wide":
        cases += [
            ((x, changed(y, row, 1), weight), "a sum over all targets"),
            ((x, y, changed(weight, row, 1)), "a sum over all weights"),
            ((np.concatenate([x[:5], x[6:7], x[5:6], x[7:]]), y, weight), what),
        ]
    for theirs, name in cases:
        source = sources.Arrays(theirs)
        second = source.facts() | source.contents() | {"batch": 4}
        with refused(rf"^worker 1 \(there\) has other data than worker 0 \({name}: .* and not .*\): give all"):
            sources.layout_of(mine, 4, dataclasses.replace(connect(2), peers=Others(second)), 1)


def test_a_label_that_only_one_worker_has_otherwise_is_noticed():
    """Of more than 65,536 only some were compared. An image that is augmented counts, too, though it is in memory."""
    y = np.arange(300_000) % 10
    records = lambda labels: dataclasses.replace(SHARED["records"](), labels=labels)
    theirs = records(changed(y, 150_001, 3))
    assert theirs.facts() == records(y).facts()
    with refused("checksum of all labels: .* and not"):
        Others(theirs.contents()).check_same(records(y).contents(), "it")
    images = COLUMNS["images"][0]
    mine, theirs = (sources.Arrays((x, np.zeros(4000, int))) for x in (images, changed(images, 1340, 7)))
    with refused("a sum over all inputs: .* and not"):
        Others(theirs.by_number("").contents()).check_same(mine.by_number("").contents(), "it")


@pytest.mark.parametrize("kind", ["csv", "tfrecord"])
def test_a_row_in_the_middle_of_a_file_that_only_one_worker_has_otherwise_is_noticed(kind, tmp_path):
    """Each worker has a folder of its own."""
    contents = []
    for folder, value in (("mine", 0), ("theirs", 1)):
        (tmp_path / folder).mkdir()
        rows = [[i % 7, i % 3] for i in range(2999)] + [[-999_999_999, 0]]  # beside which the others are alike
        rows[1501][0] += value
        path = tmp_path / folder / f"data.{kind}"
        if kind == "csv":
            path.write_text("x,y\n" + "".join(f"{x},{y}\n" for x, y in rows))
            source = tables.prepare(str(path), {"target": "y"}, ("train", "train")).train
        else:
            with tf.io.TFRecordWriter(str(path)) as writer:
                for row in rows:
                    x = tf.train.Feature(float_list=tf.train.FloatList(value=row[:1]))
                    y = tf.train.Feature(int64_list=tf.train.Int64List(value=row[1:]))
                    example = tf.train.Example(features=tf.train.Features(feature={"x": x, "y": y}))
                    writer.write(example.SerializeToString())
            splits = {"data.train_split": "train", "data.eval_split": "train"}
            source = tfrecords.load(str(path), splits, {"x": "float32", "y": "int64", "classes": 3}).train
        contents.append(source.contents())
    with refused(
        r"worker 1 \(there\) has other data than worker 0 \((checksum of all numbers|checksum of all records): "
    ):
        Others(contents[1]).check_same(contents[0], "it")
    Others(contents[0]).check_same(contents[0], "it")


def test_contents_are_the_same_to_rounding():
    """Also of a column that is constant, so that only rounding is left of its deviation from the mean."""
    r = np.random.default_rng(0)
    scaled = np.stack([r.normal(size=9000), 1e-7 * r.normal(size=9000), np.full(9000, np.nan)], 1)
    images = r.integers(0, 255, (9000, 8, 8), "uint8")
    inputs = {"scaled": scaled, "images": images, "none": np.zeros([9000, 0])}
    mine = sources.Arrays((inputs, scaled[:, 0]), exact=0).contents()
    for rounding in (1e-7, -1e-6):
        theirs = scaled * (1 + rounding * r.normal(size=scaled.shape))
        theirs[:, 1] = 1e-7 * r.normal(size=9000)
        rounded = {
            "scaled": theirs,
            "images": images + (r.uniform(size=images.shape) < 1e-5),
            "none": np.zeros([9000, 0]),
        }
        Others(sources.Arrays((rounded, theirs[:, 0]), exact=0).contents()).check_same(mine, "it")


@pytest.mark.parametrize("seed", [-1, 2**31, None, 0.5])
def test_seeds_that_are_none(seed):
    with refused(f"^seed must be an integer between 0 and 2147483647, got {seed}"):
        sources.read(SHARED["arrays"](), Layout(4, 1, 1), True, seed)


def test_what_a_function_returns_is_described():
    """Examples by number as well as arrays."""
    arrays, records = (loaded.described(SHARED[kind](), SHARED[kind]()).spec for kind in ("arrays", "records"))
    assert (arrays.shape, arrays.dtype, arrays.classes) == (records.shape, records.dtype, records.classes)
    images = sources.Records(12, lambda rows: tf.gather(np.zeros((12, 8, 8, 3), "uint8"), rows), lambda x, seed: (x,))
    assert loaded.described(images, images).spec.maximum == 255
    strings = np.array(["a", "b"], object)
    assert sources.as_source((strings, np.array([0, 1]))).columns[0] is strings
    with refused("cannot train on ndarray of Python objects"):
        sources.as_source(np.array([1, None], object))


def test_some_of_the_digits_are_those_of_the_data_set():
    """Against what TFDS has prepared from the same file."""
    import tensorflow_datasets as tfds

    from tfdist.data.datasets import digits

    builder = tfds.builder("digits")
    builder.download_and_prepare()
    for split in ("train", "test"):
        images, labels = tfds.as_numpy(builder.as_dataset(split=split, batch_size=-1, as_supervised=True))
        x, y = digits.some(split, first=5, last=7)
        wanted = (labels >= 5) & (labels <= 7)
        assert sorted(map(bytes, x)) == sorted(map(bytes, images[wanted]))
        assert np.bincount(y).tolist() == np.bincount(labels[wanted])[5:].tolist()
    x, y = digits.some("train", last=2, each=4)
    assert np.bincount(y).tolist() == [4, 4, 4] and x.shape == (12, 8, 8, 1) and x.dtype == np.uint8


@pytest.mark.parametrize("given, message", [
    (dict(split="tets"), "unknown split 'tets' of the digits: did you mean 'test'?"),
    (dict(first=4, last=4), "the digits from 4 to 4 are not at least two of 0 to 9"),
    (dict(last=10), "the digits from 0 to 10 are not at least two"),
])  # fmt: skip
def test_digits_that_do_not_exist(given, message):
    from tfdist.data.datasets import digits

    with refused(re.escape(message)):
        digits.some(**given)


def test_batches_that_change_their_order_are_noticed():
    shuffled = tf.data.Dataset.range(100).shuffle(100).batch(50)
    assert not sources.Batches(shuffled).repeats_order()
