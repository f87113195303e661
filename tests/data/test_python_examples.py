"""Examples that a function of one's own returns by number: of Grain, or of anything with a length and items."""

import sys
import types

import keras
import numpy as np
import pytest
from support.refusals import refused
from support.source_columns import columns_of

import tfdist
from tfdist.data.sources import Arrays
from tfdist.errors import UserError

X = np.random.default_rng(0).normal(size=(20, 3))
Y = np.arange(20) % 4
PIXELS = np.random.default_rng(1).integers(0, 256, (20, 6, 5, 3), dtype=np.uint8)


class Source:
    """What Grain calls a random-access source, and torch a map-style data set."""

    def __init__(self, get, size=20, **attributes):
        self._get, self._size = get, size
        self.__dict__.update(attributes)

    def __len__(self):
        return self._size

    def __getitem__(self, row):
        return self._get(row)


@pytest.fixture
def load(monkeypatch):
    """Loads what a function of the user's own returns."""

    def loaded(made, **options):
        module = types.ModuleType("users_own")
        module.data = lambda split: made
        monkeypatch.setitem(sys.modules, "users_own", module)
        return tfdist.load_data("users_own:data", **{"cache": "stream", **options})

    return loaded


def grains():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(Source(lambda i: i)).map(lambda i: (X[i], Y[i]))


def test_what_fits_is_held(load):
    data = load(Source(lambda i: (X[i], Y[i], X[i, 0] ** 2)), cache="auto")
    assert isinstance(data.train, Arrays)
    for found, expected in zip(data.train.columns, (X, Y, X[:, 0] ** 2)):
        np.testing.assert_array_equal(found, expected.astype(found.dtype))


@pytest.mark.whole
def test_images_of_several_sizes_and_inputs_by_name(load):
    ragged = Source(lambda i: (PIXELS[i][: 5 + i % 2], np.float64(i)))
    data = load(ragged, image_size="4")
    assert (data.spec.shape, data.spec.classes) == ((4, 4, 3), None)
    assert columns_of(data.train)[0].shape == (20, 4, 4, 3) and columns_of(data.train)[1].dtype == "float32"
    whole = load(Source(lambda i: (PIXELS[i], Y[i]), labels=Y), image_size="4", augment="resized_crop(0.5)")
    assert columns_of(whole.train)[0].shape == (20, 4, 4, 3)
    np.testing.assert_array_equal(whole.train.labels, Y)
    listed = load(Source(lambda i: ([float(i), 1.0], Y[i])), cache="memory")  # as Dataset.map has it: an array
    np.testing.assert_array_equal(listed.train.columns[0], [[i, 1] for i in range(20)])
    named = load(Source(lambda i: ({"a": X[i], "b": PIXELS[i]}, Y[i])), cache="memory")
    np.testing.assert_array_equal(named.train.columns[0]["b"], PIXELS)
    with refused(r"example 1 of users_own:data cannot be decoded: it has uint8 \[6, 5, 3\] where"):
        load(ragged, cache="memory")


def test_what_grain_is_asked_for(load, said):
    base = grains()
    for made, message in (
        (
            base.batch(5),
            "users_own:data returned batches, and needs examples, which are batched later: leave out batch",
        ),
        (base.repeat(), r"users_own:data returned examples without end: leave out repeat\(\)"),
        (base.filter(lambda e: e[1] > 0), "example 0 of users_own:data cannot be read: it is None, as behind filter"),
    ):
        with refused(message):
            load(made)
    drawn = base.seed(1).random_map(lambda e, rng: (e[0] + rng.normal(), e[1])).map(lambda e: e)
    load(drawn)
    assert [line for line in said if "random_map of users_own:data draws once for an example, alike in each" in line]


@pytest.mark.parametrize(
    "made, message",
    [
        (Source(lambda i: X[i]),
         r"example 0 of users_own:data cannot be read: it must be \(x, y\) or \(x, y, weight\)"),
        (Source(lambda i: (X[i], "cat")), "example 0 of .*: it has a str where numbers are needed"),
        (Source(lambda i: ([X[i], Y[i]], Y[i])), "example 0 of .*: setting an array element with a sequence"),
        (Source(lambda i: X[i], size=0), "the data set is empty"),
        (Source(lambda i: (X[i], Y[i]), labels=Y[:3]),
         r"its attribute `labels` must have 20 integers, got int64 \[3"),
        (Source(lambda i: (X[i], Y[i] - 1), labels=Y - 1), "label -1 of example 0"),
    ],
)  # fmt: skip
def test_what_is_refused(made, message, load):
    with refused(message):
        load(made)


@pytest.mark.whole
def test_an_example_that_cannot_be_read_is_named(load, connect):
    data = load(Source(lambda i: (X[i], Y[i]) if i != 9 else 1 / 0, labels=Y))
    wrong = load(Source(lambda i: (X[i], Y[i]), labels=Y[::-1].copy()))
    by_zero = "example 9 of .* cannot be decoded: division by zero"
    for made, message in ((data, by_zero), (wrong, r"its target is \d, and `labels` has \d")):
        model = keras.Sequential([keras.layers.Dense(4)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        with pytest.raises((UserError, tfdist.TrainingError), match=message):
            tfdist.fit(model, made.train, batch_size=20, verbose=0, shuffle=False, distribution=connect(1))
