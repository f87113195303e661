"""`tfdist.launch(function)`: workers from a cell of a notebook."""

import os
import pathlib
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import tfdist
from tfdist.errors import TrainingError, UserError


def rank_and(text):
    print(f"hello from {os.environ['RANK']}")
    return int(os.environ["RANK"]), os.environ["WORLD_SIZE"], text


def test_what_each_worker_returns_and_prints(capsys, monkeypatch):
    """Within a job of two machines, too, whose variables are not about these workers."""
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NODE_RANK", "1")
    assert tfdist.launch(rank_and, "x", nproc=2) == [(0, "2", "x"), (1, "2", "x")]
    out = capsys.readouterr().out
    assert "hello from 0" in out and "hello from 1" in out


@pytest.mark.whole
def test_a_closure(tmp_path):
    factor = 3
    assert tfdist.launch(lambda x: factor * x, 2, nproc=1) == [6]


def test_the_first_failure_is_told():
    def fails():
        if os.environ["RANK"] == "1":
            raise ValueError("no such thing\nin two lines")

    with pytest.raises(TrainingError, match="fails has failed on rank 1: ValueError: no such thing in two lines"):
        tfdist.launch(fails, nproc=2)


@pytest.mark.whole
def test_a_worker_that_dies():
    with pytest.raises(TrainingError, match="has ended with code 137"):
        tfdist.launch(lambda: os.kill(os.getpid(), signal.SIGKILL), nproc=1)


@pytest.mark.whole
def test_what_cannot_travel():
    lock = threading.Lock()
    with pytest.raises(UserError, match=r"cannot be sent to workers \(.*lock.*\): make model, data and distribution"):
        tfdist.launch(lambda: lock)
    with pytest.raises(TrainingError, match=r"rank 0: what it returned cannot be sent back \(.*lock.*\)"):
        tfdist.launch(threading.Lock, nproc=1)


class Unloadable:
    def __reduce__(self):
        return int, ("no number",)


class UntellableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def raises(error):
    raise error


@pytest.mark.parametrize(
    "function, told",
    [
        (lambda: sys.exit(0), "has ended rank 0 without returning: leave out sys.exit"),
        (Unloadable, r"returned on rank 0 cannot be loaded here \(invalid literal.*\): return numbers"),
        (lambda: raises(ValueError("a\udcff\x1b[2J")), r"ValueError: a.udcff.x1b\[2J"),
        (lambda: raises(UntellableError()), "UntellableError: its text cannot be made, RuntimeError"),
    ],
)
def test_what_is_told_of_odd_ends(function, told):
    with pytest.raises(TrainingError, match=told) as error:
        tfdist.launch(function, nproc=1)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "arguments, line",
    [(("train",), "runs a function, got str"), ((print,), "nproc must be a whole number of at least 1, got 0")],
)
def test_bad_arguments(arguments, line):
    with pytest.raises(UserError, match=line):
        tfdist.launch(*arguments, nproc=0)


INTERRUPTED = """
import os, pathlib, signal, sys, time
import tfdist
def waits(folder):
    pathlib.Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    signal.pause()
try:
    tfdist.launch(waits, sys.argv[1], nproc=2)
except KeyboardInterrupt:
    print("was interrupted")
"""


@pytest.mark.whole
def test_an_interrupt_ends_the_workers(tmp_path):
    program = [sys.executable, "-u", "-c", INTERRUPTED, str(tmp_path)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        workers = [tmp_path / "0", tmp_path / "1"]
        while not all(w.exists() and w.read_text() for w in workers):
            assert process.poll() is None
            threading.Event().wait(0.05)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=120)[0].endswith("was interrupted\n")
        assert process.returncode == 0
    assert not any(pathlib.Path("/proc", w.read_text()).exists() for w in workers)


@pytest.mark.whole
def test_a_training_in_a_cell_ends_as_on_one_device(connect):
    """The function is the whole cell: strategy, model, data."""

    def train(strategy):
        import numpy as np

        import tfdist

        distribution = tfdist.connect(strategy)
        import keras

        with distribution.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
            model.compile("adam", "mse")
        r = np.random.default_rng(0)
        x, y = r.normal(size=(61, 4)).astype("float32"), r.normal(size=(61, 3)).astype("float32")
        tfdist.fit(model, x, y, batch_size=24, epochs=2, distribution=distribution, verbose=0)
        return distribution.replicas, [w.tolist() for w in model.get_weights()]

    (one,) = tfdist.launch(train, "default", nproc=1)
    two = tfdist.launch(train, "multi_worker", nproc=2)
    assert (one[0], two[0][0]) == (1, 2) and two[0] == two[1]
    for a, b in zip(one[1], two[0][1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
