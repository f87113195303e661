"""Arrays as tensors: which are copied, and which lie in the memory of several workers at the same time."""

import json
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.config import host_memory
from tfdist.data import arrays
from tfdist.data import loaded as loaded_lib
from tfdist.data.sources import Arrays, Batches
from tfdist.data.spec import Column, Spec

ROWS = 1 << 12
SPEC = Spec((64,), "float32", 3, float("inf"), ("a", "b", "ü"), (Column("n", "number", 1 / 3, float("nan")),))


def table(rows=ROWS, dtype=np.float32):
    return np.random.default_rng(1).integers(0, 100, [rows, 256]).astype(dtype)


def mapped(tmp_path, array, start=0):
    np.save(tmp_path / "x.npy", array)
    return np.load(tmp_path / "x.npy", mmap_mode="r")[start:]


def place(tensor):
    return np.frombuffer(memoryview(tensor), tensor.dtype.as_numpy_dtype).ctypes.data


# -- one process ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"])
def test_what_nobody_can_write_to_is_not_copied(dtype, tmp_path):
    array = mapped(tmp_path, table(dtype=np.dtype(dtype)))
    tensor = arrays.tensor(array)
    assert place(tensor) == array.ctypes.data and tensor.device.endswith("CPU:0")
    np.testing.assert_array_equal(tensor, table(dtype=np.dtype(dtype)), strict=True)
    np.testing.assert_array_equal(tf.gather(tensor, [7, 0]), table(dtype=np.dtype(dtype))[[7, 0]])


def test_the_memory_lives_as_long_as_the_tensor(tmp_path):
    tensor = arrays.tensor(mapped(tmp_path, table()))
    os.remove(tmp_path / "x.npy")
    np.testing.assert_array_equal(tensor + 1, table() + 1)


@pytest.mark.parametrize("array", [
    table(), table()[::2], np.asfortranarray(table()), table().astype(">f4"), table()[1:, 1:], table() > 50, table(0),
    table(3), np.broadcast_to(table(1), [ROWS, 256]),
])  # fmt: skip
@pytest.mark.parametrize("writable", [True, False])
def test_whatever_else_is_copied(array, writable):
    """And begins where a kernel with AVX-512 can read it: it would end the process over one that does not."""
    base = array.copy() if writable else array
    base.flags.writeable = writable
    tensor = arrays.tensor(base)
    np.testing.assert_array_equal(tensor, array)
    assert tensor.dtype.as_numpy_dtype == array.dtype.newbyteorder("=")
    assert place(tensor) % arrays.ALIGNMENT == 0 or array.nbytes < arrays._SMALL or array.dtype == bool
    if writable:
        base[...] = 0
        np.testing.assert_array_equal(tensor, array)


def test_a_view_that_cannot_be_written_to_of_an_array_that_can():
    array = table()
    view = array[:]
    view.flags.writeable = False
    tensor = arrays.tensor(view)
    array[...] = 0
    np.testing.assert_array_equal(tensor, table())


def test_rows_of_a_file_that_begin_anywhere(tmp_path):
    array = mapped(tmp_path, table()[:, :255].copy(), start=1)
    assert array.ctypes.data % arrays.ALIGNMENT
    np.testing.assert_array_equal(arrays.tensor(array) * 2, table()[1:, :255] * 2)


@pytest.mark.whole
def test_a_training_from_a_file_ends_as_from_memory(connect, tmp_path):
    x, y = table() / np.float32(100), np.arange(ROWS) % 3
    weights = []
    for given in (x, mapped(tmp_path, x)):
        keras.utils.set_random_seed(1)
        with connect(2).scope():
            model = keras.Sequential([keras.layers.Input([256]), keras.layers.Dense(3)])
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        tfdist.fit(model, given, y, batch_size=100, verbose=0, distribution=connect(2), check_agreement="off")
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)


# -- workers of a host ------------------------------------------------------------


def loaded(train=None, evaluation=None):
    x, y = table(5_000 * 4), np.arange(20_000) % 3
    parts = {"numbers": x, "more": (x[:, 0] > 50, [y.astype(np.uint8)])}
    return loaded_lib.Loaded(train or Arrays((parts, y)), evaluation or Arrays((x[:7], y[:7], y[:7] / 2)), 20_000, SPEC)


def assert_same(one, other):
    assert repr(one.spec) == repr(other.spec) and one.examples == other.examples  # NaN is in it
    for a, b in ((one.train, other.train), (one.eval, other.eval)):
        tf.nest.assert_same_structure(a.columns, b.columns)
        for array, copy in zip(tf.nest.flatten(a.columns), tf.nest.flatten(b.columns), strict=True):
            np.testing.assert_array_equal(array, copy, strict=True)


@pytest.fixture
def tables():
    made = loaded_lib.SharedTables()
    yield made
    made.close()


def test_what_is_offered_is_taken_without_a_copy(tables):
    given = loaded()
    moved, note = tables.offer(given)
    taken = loaded_lib.take(note)
    assert_same(moved, given)
    assert_same(taken, given)
    x = taken.train.columns[0]["numbers"]
    assert place(arrays.tensor(x)) == x.ctypes.data
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 0
    with pytest.raises(PermissionError):  # by whoever else finds it
        os.pwrite(os.open(f"/proc/{os.getpid()}/fd/{note['file']}", os.O_RDWR), b"x", 0)
    tables.close()
    assert loaded_lib.take(note) is None
    assert_same(taken, given)


def test_the_memory_of_somebody_else_is_not_taken(tables, tmp_path):
    """As in a container, where the same number is another process, and the same place another file."""
    _, note = tables.offer(loaded())
    with open(tmp_path / "x", "wb+") as other:
        other.truncate(note["size"])
        assert loaded_lib.take({**note, "file": other.fileno()}) is None
    another = host_memory.Offer("sum")
    os.truncate(another.fileno(), note["size"])
    assert loaded_lib.take({**note, "file": another.fileno()}) is None
    another.close()
    assert loaded_lib.take({**note, "size": note["size"] + 1}) is None
    assert loaded_lib.take({**note, "process": 2**22}) is None
    assert loaded_lib.take(note) is not None


@pytest.mark.parametrize("data", [
    loaded(evaluation=Batches(tf.data.Dataset.from_tensors((tf.zeros([2, 64]), tf.zeros([2]))))),
    loaded(evaluation=Arrays((np.array(["a", "b"]), np.zeros(2)))),
    loaded(evaluation=Arrays((np.array([None, 2]), np.zeros(2)))),
    loaded(evaluation=Arrays(({7: np.zeros(2)}, np.zeros(2)))),
    loaded_lib.Loaded(Arrays((np.zeros(9), np.zeros(9))), Arrays((np.zeros(9), np.zeros(9))), 9, SPEC),
])  # fmt: skip
def test_what_is_not_shared(data, tables):
    assert tables.offer(data) == (data, None)


def test_without_such_memory_each_has_its_own(tables, monkeypatch):
    monkeypatch.setattr(loaded_lib.os, "memfd_create", lambda *_: os.open("/dev/full", os.O_WRONLY))
    data = loaded()
    assert tables.offer(data) == (data, None)


LOADING = """
import json, sys, tfdist
from tfdist import config
from tfdist.data.datasets import registry

peers = tfdist.connect("multi_worker").peers
calls = []

def load(name):
    def read():
        calls.append(name)
        return registry.load_data("synthetic", options="examples=6000, shape=(28, 28, 1), classes=3")

    return registry.load_together(peers, config.Data(name=name), read)

data = load("synthetic")
shared = "memfd:tfdist data" in open("/proc/self/maps").read()
again = load("of_the_user:function")
with open(f"{sys.argv[1]}/{peers.rank}.json", "w") as file:
    json.dump([calls, shared, str(data.train.facts()), str(again.train.facts())], file)
"""


@pytest.mark.whole
def test_workers_of_a_host_load_once_but_each_calls_a_function_of_the_user(tmp_path, run):
    """The others of three find what one has read. A function may leave a mean behind, at which the model looks."""
    (tmp_path / "loading.py").write_text(LOADING)
    done = run("tfdist.launch", "--nproc_per_node=3", "--", str(tmp_path / "loading.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    one, *others = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3))
    function = ["of_the_user:function"]
    assert one[:2] == [["synthetic", *function], True]
    assert [other[:2] for other in others] == [[function, True]] * 2
    assert {facts for worker in (one, *others) for facts in worker[2:]} == {one[2]}


def test_a_pipe_at_the_place_of_the_memory_is_not_read(tables):
    """In another container the number is that of another process, and what it has there may be anything."""
    _, note = tables.offer(loaded())
    out, into = os.pipe()
    try:
        assert loaded_lib.take({**note, "file": out}) is None  # and does not wait for it
        os.write(into, b"x" * 50)
        assert loaded_lib.take({**note, "file": out}) is None
        assert os.read(out, 100) == b"x" * 50
    finally:
        os.close(out)
        os.close(into)


def test_numbers_of_other_libraries_are_left_alone(tables):
    import ml_dtypes

    data = loaded(train=Arrays((np.zeros((1 << 24, 2), ml_dtypes.float8_e5m2), np.zeros(1 << 24))))
    assert tables.offer(data) == (data, None)
    with pytest.raises(ValueError, match="NPY_LONGDOUBLE"):
        arrays.tensor(np.zeros(1 << 20, np.longdouble))
