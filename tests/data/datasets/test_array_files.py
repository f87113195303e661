"""`numpy:/path`: arrays of NumPy's own files, in memory or by number, against the arrays themselves."""

import keras
import numpy as np
import pytest
from support.refusals import refused
from support.source_columns import check_order, columns_of

import tfdist
from tfdist.cluster.peers import differing_facts
from tfdist.data.sources import Arrays, Records

RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (50, 6, 4), dtype=np.uint8)
Y = RNG.integers(0, 4, (50, 1))
MNIST = dict(x_train=X[:40], y_train=Y[:40], x_test=X[40:], y_test=Y[40:])
FLAT = dict(train_split="train[:40]", eval_split="train[40:]")


def npz(path, **arrays):
    np.savez(path, **arrays)
    return f"numpy:{path}"


def npy(path, **arrays):
    path.mkdir()
    for name, array in arrays.items():
        np.save(path / f"{name}.npy", array)
    return f"numpy:{path}"


@pytest.mark.parametrize("write, cache", [(npz, "auto"), (npy, "auto"), (npy, "stream")])
@pytest.mark.parametrize("kind", ["uint8", "float64", ">f4", "int64"])
def test_the_same_wherever_it_is_read(write, cache, kind, tmp_path):
    x = X.astype(kind)
    data = tfdist.load_data(
        write(tmp_path / "d.npz", x_train=x[:40], y_train=Y[:40], x_test=x[40:], y_test=Y[40:]),
        cache=cache,
        options="shape=(6, 4, 1)",
    )
    assert isinstance(data.train, Records if cache == "stream" else Arrays)
    stored = {"float64": "float32", ">f4": "float32"}.get(kind, kind)
    largest = 255.0 if kind == "uint8" else float(X[:40].max())
    assert (data.spec.shape, data.spec.dtype, data.spec.classes) == ((6, 4, 1), stored, 4)
    assert (data.spec.maximum, data.examples) == (largest, 40)
    for source, rows in ((data.train, slice(40)), (data.eval, slice(40, None))):
        got = columns_of(source)
        np.testing.assert_array_equal(got[0], X[rows, ..., None])
        np.testing.assert_array_equal(got[1], Y[rows, 0])
        assert (got[0].dtype, got[1].dtype) == (stored, "int32")


def test_the_order_of_an_epoch_goes_on_at_any_update(tmp_path):
    data = tfdist.load_data(npy(tmp_path / "d", **MNIST), cache="stream")
    check_order(data.train, X, Y[:, 0])


def test_names_weights_and_slices(tmp_path):
    weight = RNG.random(50)
    named = npz(tmp_path / "a.npz", images=X, labels=Y[:, 0], weight=weight, notes=np.array({"by": "me"}, object))
    data = tfdist.load_data(named, options="x=images, y=labels", **FLAT)
    np.testing.assert_array_equal(data.eval.columns[0], X[40:])
    np.testing.assert_array_equal(data.eval.columns[2], weight[40:].astype("float32"))
    parts = npy(tmp_path / "b", train_images=X[:30], train_labels=Y[:30], val_images=X[30:], val_labels=Y[30:])
    options = dict(options="x=images, y=labels", train_split="train[:5]+val[2:]", eval_split="train[5:]")
    data = tfdist.load_data(parts, cache="stream", **options)
    np.testing.assert_array_equal(columns_of(data.train)[0], np.concatenate([X[:5], X[32:]]))
    assert data.train.name(4) == "example 4 of train_images.npy"
    assert data.train.name(5) == "example 2 of val_images.npy"


def test_no_number_of_a_file_is_taken_for_rounding(tmp_path):
    of = lambda n: tfdist.load_data(npz(tmp_path / "a.npz", x=np.full(50, n), y=Y[:, 0]), **FLAT).train.contents()
    assert [name for name, *_ in differing_facts(of(1.0), of(1.000001))] == ["checksum of all numbers"]


@pytest.mark.parametrize("weight, told", [(-0.5, "-0.5"), (np.nan, "nan"), (np.inf, "inf"), (1e300, "inf")])
@pytest.mark.parametrize("shape", [(50,), (50, 1)])
def test_weights_that_are_none(weight, told, shape, tmp_path):
    """The loss of an example would grow in training, or become NaN."""
    weights = np.ones(shape)
    weights[7] = weight
    with refused() as error:
        tfdist.load_data(npz(tmp_path / "a.npz", x=X, y=Y[:, 0], weight=weights), **FLAT)
    assert str(error.value) == (
        f"numpy:{tmp_path}/a.npz has the weight {told}: give finite ones of 0 or more, and 0 to leave an example out"
    )


@pytest.mark.parametrize("y, options, classes, dtype", [
    (Y[:, 0], "", 4, "int32"), (Y[:, 0], "classes=7", 7, "int32"), (Y[:, 0], "classify=False", None, "float32"),
    (Y[:, 0] > 1, "", 2, "int32"), (X[:, 0, 0] / 3, "", None, "float32"), (X[:, 0] / 3, "", None, "float32"),
])  # fmt: skip
def test_what_is_a_class(y, options, classes, dtype, tmp_path):
    data = tfdist.load_data(npz(tmp_path / "a.npz", x=X, y=y), options=options, **FLAT)
    assert (data.spec.classes, data.train.columns[1].dtype) == (classes, dtype)
    np.testing.assert_array_equal(data.train.columns[1], y[:40].astype(dtype))


def test_models_train_on_them(tmp_path):
    """In memory and by number end with the weights of Keras' own fit on the arrays."""
    x = (X / 255).astype("float32")
    flat = npy(tmp_path / "d", x=x, y=Y)
    weights = []
    for how in ("keras", "memory", "stream"):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6, 4)), keras.layers.Flatten(), keras.layers.Dense(4)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        if how == "keras":
            model.fit(x[:40], Y[:40], batch_size=16, epochs=2, shuffle=False, verbose=0)
        else:
            data = tfdist.load_data(flat, cache=how, **FLAT)
            tfdist.fit(model, data.train, batch_size=16, epochs=2, shuffle=False, verbose=0)
        weights.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    np.testing.assert_allclose(weights[1], weights[0], atol=1e-6)
    np.testing.assert_array_equal(weights[2], weights[1])


def damaged(path):
    np.savez(path, x=X, y=Y)
    whole = path.read_bytes()
    path.write_bytes(whole[:200] + b"\xff" * 50 + whole[250:])
    return f"numpy:{path}"


@pytest.mark.parametrize("make, fields, message", [
    (lambda p: f"numpy:{p}/no.npz", {}, "there is no such file: give a .npz file, or a folder of .npy files"),
    (lambda p: npy(p / "d"), {}, "there are no .npy files"),
    (lambda p: npy(p / "d", x=X) + "/x.npy", {}, "x.npy is not an .npz file: write it with numpy.savez"),
    (lambda p: damaged(p / "a.npz"), {}, "a.npz: x cannot be read: Bad CRC-32 for file 'x.npy': write it anew"),
    (lambda p: npz(p / "a.npz", x=X, y=np.array([None] * 50)), {}, "y cannot be read: .*, without Python objects"),
    (lambda p: npz(p / "a.npz", a=X, b=Y), {}, "has no array 'x' or x_train: it has a, b; name them with data.op"),
    (lambda p: npz(p / "a.npz", x=X, z=Y), {}, r"train has no array for y \(y\): it has x, z"),
    (lambda p: npz(p / "a.npz", x=X, x_train=X, y=Y), {}, "x and x_train are both x of train: rename one"),
    (lambda p: npz(p / "a.npz", x=X, y=Y[:3]), {}, "arrays of different lengths: x has 50, y has 3"),
    (lambda p: npz(p / "a.npz", x=X.astype("complex64"), y=Y), {}, "x is complex64 .*: give numbers"),
    (lambda p: npz(p / "a.npz", x=X, y=Y - 1), {}, "label -1 of example "),
    (lambda p: npz(p / "a.npz", x=X, y=Y * 999), {}, "to 2,997, more classes than examples"),
    (lambda p: npz(p / "a.npz", x=X, y=Y), dict(options="classes=3"), "label 3 of example .* 3 classes"),
    (lambda p: npz(p / "a.npz", x=X, y=Y / 2), dict(options="classes=3"), "classes=3 is for targets that are integers"),
    (lambda p: npz(p / "a.npz", x=X, y=Y / 0), {}, "some targets are NaN or infinite"),
    (lambda p: npz(p / "a.npz", x=X / 0, y=Y), {}, "x has numbers that are NaN or infinite"),
    (lambda p: npz(p / "a.npz", x=X * 1e39, y=Y), {}, "x has numbers that are NaN or infinite in float32"),
    (lambda p: npz(p / "a.npz", x=X, y=Y, w=np.ones((50, 2))), dict(options="weight=w"),
     r"has weights \[2\] for each example, of targets \[\]: give one"),
    (lambda p: npz(p / "a.npz", x=X, y=Y * 1e39), {}, "some targets are NaN or infinite in float32"),
    (lambda p: npz(p / "a.npz", x_train=X / 1, y_train=Y, x_test=X / 0, y_test=Y), dict(eval_split="test"),
     "x_test has numbers that are NaN or infinite"),
    (lambda p: npz(p / "a.npz", x=X, y=Y), dict(options="shape=(5, 5)"), r"shape=\(5, 5\) does not fit x, of \[6, 4"),
    (lambda p: npz(p / "a.npz", x=X, y=Y), dict(options="colour=1"), "unknown 'colour' in data.options"),
    (lambda p: npz(p / "a.npz", x=X, y=Y), dict(eval_split="test"), "has no split 'test'"),
    (lambda p: npz(p / "a.npz", x=X, y=Y), dict(cache="stream"), "can only be read into memory as a whole"),
    (lambda p: npz(p / "a.npz", **MNIST | {"x_test": X[40:, :3]}), dict(train_split="train", eval_split="test"),
     r"x_test is uint8 \[3, 4\] and x_train uint8 \[6, 4\] for each example: make them alike"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_refused(make, fields, message, tmp_path):
    with np.errstate(all="ignore"):
        name = make(tmp_path)
    with refused(message):
        tfdist.load_data(name, **(FLAT | fields))
