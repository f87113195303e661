"""Sums through the memory of a host: NumPy says what they must be, and each worker is a thread with its own view."""

import errno
import itertools
import threading

import numpy as np
import pytest

from tfdist.config import host_memory
from tfdist.distributed import shared_memory_sum
from tfdist.distributed.shared_memory_sum import PIECE, OutOfStepError


class Workers:
    """What workers in threads of one process see of each other."""

    def __init__(self, size, hosts=None, addresses=None):
        self.size, self.failure = size, ""
        self.hosts = hosts or ("h",) * size
        self.addresses = addresses or tuple(f"10.0.0.1:{29500 + rank}" for rank in range(size))
        self.gathered, self.met = {}, threading.Barrier(size, timeout=60)

    def run(self, work):
        """What `work(peers)` returns, or raises, on each worker."""
        results = [None] * self.size

        def one(rank):
            try:
                results[rank] = work(Worker(self, rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=[rank], daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "it hangs"
        return results


class Worker:
    def __init__(self, workers, rank):
        self._workers, self.rank, self._count = workers, rank, itertools.count()
        self.size, self.hosts, self.addresses = workers.size, workers.hosts, workers.addresses

    @property
    def failure(self):
        return self._workers.failure

    def gather(self, label, value=None):
        given = self._workers.gathered.setdefault((next(self._count), label), {})
        given[self.rank] = value
        self._workers.met.wait()
        return [given[rank] for rank in range(self.size)]


def between(peers):
    through = shared_memory_sum.between(peers)
    assert through, "no memory in common"
    return through


DTYPES = ["float32", "float64", "int32", "int64", "uint8", "complex64", "complex128"]
SIZES = [0, 1, 7, PIECE // 8 - 1, PIECE // 8, PIECE // 8 + 1, 3 * PIECE // 8 + 5]


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_sums_are_those_of_numpy_in_order_of_rank(workers):
    rng = np.random.default_rng(workers)
    arrays = [  # of each worker
        [(rng.normal(size=size) * 1e3).astype(dtype) for dtype in DTYPES for size in SIZES] for _ in range(workers)
    ]
    extremes = np.array([np.inf, -np.inf, np.nan, 1e38, -1e38, 0.0, -0.0, 1e-45], "float32")
    for rank, own in enumerate(arrays):
        own += [np.roll(extremes, rank), np.full([2, 3, 4], rank, "float64"), np.array(rank, "int16")]

    def work(peers):
        through = between(peers)
        return [through.sum(key, array).copy() for key, array in enumerate(arrays[peers.rank] * 2)]

    results = Workers(workers).run(work)
    with np.errstate(all="ignore"):
        for number, given in enumerate(zip(*arrays, strict=True)):
            wanted = given[0]
            for array in given[1:]:
                wanted = wanted + array
            for sums in results:
                np.testing.assert_array_equal(sums[number], wanted.reshape(given[0].shape), strict=True)
                np.testing.assert_array_equal(sums[number], sums[number + len(arrays[0])])


def test_a_result_that_somebody_holds_is_not_written_again():
    def work(peers):
        through = between(peers)
        held = [through.sum(1, np.full([100], value, "float32")) for value in range(5)]
        again = {through.sum(1, np.zeros([100], "float32")).ctypes.data for _ in range(5)}
        return [float(array[0]) for array in held], len(again), [array.ctypes.data % 64 for array in held]

    assert Workers(2).run(work) == [([0.0, 2.0, 4.0, 6.0, 8.0], 1, [0] * 5)] * 2


@pytest.mark.parametrize("second", [
    pytest.param((1, np.zeros([4], "float32")), id="shape"), pytest.param((1, np.zeros([3], "int32")), id="type"),
    pytest.param((1, np.zeros([3, 1], "float32")), id="form"),
    pytest.param((1, np.zeros([0], "float32")), id="nothing"), pytest.param((2, np.zeros([3], "float32")), id="order"),
])  # fmt: skip
def test_workers_that_sum_something_else_are_told(second):
    def work(peers):
        through = between(peers)
        through.sum(0, np.ones([5]))
        return through.sum(*(second if peers.rank else (1, np.zeros([3], "float32"))))

    errors = Workers(2).run(work)
    assert [type(error) for error in errors] == [OutOfStepError] * 2
    assert {str(error) for error in errors} == {"worker 1 sums other tensors than worker 0, or in another order"}


def test_shapes_that_change_do_not_fill_the_memory():
    def work(peers):
        through = between(peers)
        for size in range(20_000, 21_000):
            through.sum(size, np.zeros([size], "float32"))
        return [[room.nbytes for room in rooms] for rooms in through._results.values()]

    assert Workers(2).run(work) == [[[(1 << 17) + 64]]] * 2


def test_a_lost_worker_ends_the_wait():
    workers = Workers(3)

    def work(peers):
        through = between(peers)
        if peers.rank == 2:
            workers.failure = "lost worker 2"
            return None
        return through.sum(0, np.ones([5]))

    errors = workers.run(work)
    assert [str(error) for error in errors[:2]] == ["a collective sum has lost worker 2"] * 2


@pytest.mark.parametrize("workers", [
    pytest.param(Workers(1), id="alone"), pytest.param(Workers(9), id="many"),
    pytest.param(Workers(2, hosts=("a", "b")), id="two hosts"),
    pytest.param(Workers(2, addresses=("10.0.0.1:1", "10.0.0.2:1")), id="two addresses"),
])  # fmt: skip
def test_where_workers_sum_through_the_network(workers):
    assert workers.run(shared_memory_sum.between) == [None] * workers.size


@pytest.mark.parametrize("missing", ["x86", "room", "sight", "sight of one"])
def test_without_memory_in_common_all_sum_through_the_network(missing, monkeypatch):
    def unseen(note, writing=False):
        assert writing
        return None if missing == "sight" or threading.current_thread() is one else opened(note, writing)

    opened, one = host_memory.opened, None
    if missing == "x86":
        monkeypatch.setattr(shared_memory_sum.platform, "machine", lambda: "aarch64")
    elif missing == "room":

        def full(*arguments):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(shared_memory_sum.os, "posix_fallocate", full)
    else:
        monkeypatch.setattr(host_memory, "opened", unseen)

    def work(peers):
        nonlocal one
        if peers.rank == 2:
            one = threading.current_thread()
        peers.gather("who is who")
        return shared_memory_sum.between(peers)

    assert Workers(3).run(work) == [None] * 3


def test_nobody_else_finds_the_memory_later(monkeypatch):
    notes = []
    monkeypatch.setattr(host_memory, "opened", lambda note, writing, opened=host_memory.opened: (
        notes.append(note) or opened(note, writing)
    ))  # fmt: skip
    Workers(2).run(between)
    monkeypatch.undo()
    (note,) = notes
    assert host_memory.opened(note) is None


UNEVEN = """
import keras
import numpy as np
import tensorflow as tf
import tfdist

distribution = tfdist.connect("multi_worker")
assert distribution.communication == "shared memory"

class Uneven(keras.layers.Layer):
    def call(self, x):
        context = tf.distribute.get_replica_context()
        ones = tf.ones([3 + distribution.rank])
        return x if context is None else x + tf.reduce_sum(context.all_reduce("SUM", ones))

with distribution.scope():
    model = keras.Sequential([keras.Input((4,)), Uneven(), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
data = np.ones([8, 4], "float32"), np.ones([8, 2], "float32")
tfdist.fit(model, *data, distribution=distribution, batch_size=4, verbose=0, check_agreement="off")
"""


def test_a_layer_that_depends_on_the_worker_is_told_in_a_line(tmp_path, run):
    (tmp_path / "uneven.py").write_text(UNEVEN)
    done = run("tfdist.launch", "--nproc_per_node=2", "--", str(tmp_path / "uneven.py"))
    assert done.returncode != 0
    assert "worker 1 sums other tensors than worker 0, or in" in done.stderr
