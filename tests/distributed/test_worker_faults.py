"""What goes wrong among workers, in real runs: the right exit code, a line that names the rank, nothing left, no hang.

`make faults` runs them; they take minutes.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import sys
import time

import psutil
import pytest
from conftest import REPOSITORY
from support import processes

from tfdist.distributed.strategies import multi_worker

pytestmark = pytest.mark.faults
LIMIT_S = 40
"""Each fault must have come to its end by then."""
HOST = os.uname().nodename
LONG = ("--config.model.name=mlp", "--config.train.epochs=100000", "--config.optimizer.warmup=0%", "--workdir=run")
TOOLS = '''
"""Given to the workers: what makes them fail."""
import json, os, signal, sys, time
import numpy as np

task = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
rank = int(os.environ.get("RANK", os.environ.get("HOROVOD_RANK", task)))

def connect(strategy="multi_worker"):
    import tfdist
    return tfdist.connect(strategy, threads=1, start_timeout=20, stall_timeout=8)

def fit(distribution, callback=None, epochs=100000, change=None):
    """Trains a small model, with a callback of the name and code given."""
    import keras, tfdist
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")
    with distribution.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(2)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    if change:
        change(model)
    callbacks = [keras.callbacks.LambdaCallback(**callback)] if callback else []
    def epoch_end(epoch, logs):
        print("epoch", epoch + 1, flush=True)
        if os.path.exists("enough"):
            model.stop_training = True
    callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=epoch_end))
    tfdist.fit(model, x, y, distribution=distribution, batch_size=32, epochs=epochs, callbacks=callbacks, verbose=0)
    print("trained", flush=True)
'''


class Worker:
    """A process whose output goes to a file."""

    def __init__(self, command, environ, folder, name):
        self.output = folder / f"{name}.log"
        with open(self.output, "wb") as log:
            self.process = processes.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log, real=True)

    @property
    def text(self):
        return self.output.read_text(errors="replace")

    def said(self, prefix):
        """The lines of tfdist that begin with `prefix`."""
        return [
            line.removeprefix("tfdist: ") for line in self.text.splitlines() if line.startswith(f"tfdist: {prefix}")
        ]

    def end(self, until):
        """Exit code; not later than `until`."""
        try:
            return self.process.wait(max(0.0, until - time.monotonic()))
        except processes.TimeoutExpired:
            raise AssertionError(f"{self.output.name} hangs: {self.text[-2000:]}") from None


class Crew:
    """Starts the workers of a run."""

    def __init__(self, folder, tfds_dir):
        self.folder = folder
        (folder / "tools.py").write_text(TOOLS)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        keep = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "TF_CONFIG")}
        path = os.pathsep.join([str(folder), str(REPOSITORY)])
        self.environ = keep | {"TFDS_DATA_DIR": str(tfds_dir), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        self.workers = []

    def place(self, rank, size=2, port=None):
        """Variables that give a worker its place."""
        world = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port or self.port, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
        }  # fmt: skip
        return {k: str(v) for k, v in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()}

    def start(self, *arguments, **environ):
        """Starts one process: `python <arguments>`, or a program by its path."""
        words = [str(a) for a in arguments]
        command = words if words[0].startswith("/") else [sys.executable, *words]
        self.workers.append(Worker(command, self.environ | environ, self.folder, f"worker-{len(self.workers)}"))
        return self.workers[-1]

    def train(self, *flags, **environ):
        return self.start("-m", "tfdist.train", *flags, **environ)

    def script(self, text, **environ):
        """Starts a program of the user that uses tools.py."""
        name = self.folder / f"script-{len(self.workers)}.py"
        name.write_text(f"from tools import *\n{text}")
        return self.start(name.name, **environ)

    def pair(self, text, connect="d = connect()\n"):
        """Two workers that run the same program."""
        return [self.script(connect + text, **self.place(rank)) for rank in (0, 1)]

    def until(self, condition, what):
        """Waits for something to become true."""
        end = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < end, f"{what}: never came: {[w.text[-1500:] for w in self.workers]}"
            assert any(w.process.poll() is None for w in self.workers), (
                f"{what}: {[w.text[-1500:] for w in self.workers]}"
            )
            time.sleep(0.05)

    def until_said(self, text, *workers):
        for worker in workers or self.workers:
            self.until(lambda w=worker: text in w.text, text)

    def ends(self, *workers, limit=LIMIT_S):
        """Exit codes of these, or of all, within the limit from now."""
        until = time.monotonic() + limit
        return [worker.end(until) for worker in workers or self.workers]

    def result(self):
        return json.loads((self.folder / "run" / "result.json").read_text())

    def close(self):
        """Kills what is left and says what that was."""
        left = [w for w in self.workers if w.process.poll() is None]
        for worker in left:
            for child in psutil.Process(worker.process.pid).children(recursive=True):
                child.kill()
            worker.process.kill()
            worker.process.wait()
        mine = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(self.folder):
                    mine.append(process)
        _, alive = psutil.wait_procs(mine, 5)
        for process in alive:
            process.kill()
        return [w.output.name for w in left] + [str(p) for p in alive]


@pytest.fixture
def crew(tmp_path, tfds_dir):
    crew = Crew(tmp_path, tfds_dir)
    yield crew
    left = crew.close()
    assert not left, f"had to be killed: {left}"


def tf_config(ports, index):
    addresses = [f"127.0.0.1:{port}" for port in ports]
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})}


@pytest.fixture
def ports():
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    found = [sock.getsockname()[1] for sock in held]
    for sock in held:
        sock.close()
    return found


# -- before the first update --------------------------------------------------------

SHIM = """
import importlib.metadata as m
real = m.version
m.version = lambda name: "3.99.0" if name == "keras" else real(name)
"""


@pytest.mark.parametrize("what", ["experiment", "versions"])
def test_workers_that_do_not_fit_together(crew, what):
    (crew.folder / "shim").mkdir()
    (crew.folder / "shim" / "sitecustomize.py").write_text(SHIM)
    crew.train(*LONG, **crew.place(0))
    if what == "experiment":
        crew.train(*LONG, "--config.seed=7", **crew.place(1))
    else:
        crew.train(*LONG, **crew.place(1), PYTHONPATH=f"{crew.folder}/shim:{crew.environ['PYTHONPATH']}")
    assert set(crew.ends()) == {2}
    message = {"experiment": "in config.seed: 7 and 0", "versions": "in the version of keras: 3.99.0 and"}[what]
    for worker in crew.workers:
        [line] = worker.said("error")
        assert message in line and line.startswith("error: worker 1 ")


AT = "import tensorflow as tf\nif rank == {who}:\n  {patch} = lambda *a, **k: os.kill(os.getpid(), 9)\n"
EARLY = {
    "before the servers": AT.format(who=1, patch="import tfdist.distributed.strategies.multi_worker as m; m._start"),
    "in the constructor": AT.format(who=1, patch="tf.distribute.MultiWorkerMirroredStrategy"),
    "the chief in the constructor": AT.format(who=0, patch="tf.distribute.MultiWorkerMirroredStrategy"),
    "after the constructor": AT.format(who=1, patch="import tfdist.distributed.shared_memory_sum as m; m.between"),
}


@pytest.mark.parametrize("when", EARLY)
def test_killed_during_the_start(crew, when):
    workers = crew.pair("fit(d)", EARLY[when] + "d = connect()\n")
    dead = 0 if "chief" in when else 1
    # Nothing ends TensorFlow's constructor but its own limit.
    codes = crew.ends(limit=LIMIT_S + multi_worker.REGISTER_S)
    assert (codes[dead], codes[1 - dead]) == (-9, 1)
    assert f"lost worker {dead} ({HOST}): its process ended" in workers[1 - dead].text


# -- in the middle ------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["on_epoch_end", "on_train_batch_begin", "on_train_batch_end"])
def test_asleep_in_python(crew, moment):
    sleep = "lambda n, logs: time.sleep(1000) if rank == 1 and n == 1 else None"
    workers = crew.pair(f"fit(d, {{'{moment}': {sleep}}})")
    crew.until_said("lost worker")
    assert crew.ends() == [1, 1]
    for worker in workers:
        assert f"lost worker 1 ({HOST}): stuck in Python for " in worker.text


@pytest.mark.parametrize("how", ["variables", "tf_config"])
def test_a_stray_with_a_taken_index(crew, ports, how):
    places = [crew.place(r) if how == "variables" else tf_config(ports[:2], r) for r in (0, 1)]
    run = [crew.script("fit(connect())", **place) for place in places]
    crew.until_said("epoch 3", *run)
    strays = [crew.script("fit(connect())", **place) for place in places]
    assert crew.ends(*strays) == [1, 1]
    for stray, index in zip(strays, (0, 1)):
        assert f"worker {index}" in stray.text.splitlines()[-1]
    (crew.folder / "enough").touch()
    assert crew.ends(*run) == [0, 0]
    assert all("trained" in worker.text for worker in run)


FINISHED = {
    "fewer epochs": "fit(d, epochs=3 if rank else 100000)",
    "sys.exit": "fit(d, {'on_epoch_end': lambda e, logs: sys.exit(0) if rank and e == 2 else None})",
    "an error": "fit(d, {'on_epoch_end': lambda e, logs: 1 // (0 if rank and e == 2 else 1)})",
}


@pytest.mark.parametrize("how", FINISHED)
def test_one_finishes_early(crew, how):
    workers = crew.pair(FINISHED[how])
    assert crew.ends() == [1, 1]
    assert f"worker 1 ({HOST})" in workers[0].text.splitlines()[-1]


@pytest.mark.parametrize("when", ["before", "later"])
def test_weights_that_differ(crew, when):
    change = "def change(model):\n  rank and model.layers[1].kernel.assign(model.layers[1].kernel + 1)\n"
    use = (
        "fit(d, change=change)"
        if when == "before"
        else (
            "found = []\nfit(d, {'on_epoch_begin': lambda e, logs: change(found[0]) if e == 3 else None}, "
            "change=found.append)"
        )
    )
    workers = crew.pair(change + use)
    assert crew.ends() == [1, 1]
    for worker in workers:
        assert "dense_1/kernel differs on worker 1" in worker.text


# -- signals ------------------------------------------------------------------------

SLEEPS = """
from tfdist.monitoring import recorder
from tfdist.train import __main__ as train
real = recorder.Recorder.on_epoch_end
def slow(self, epoch, logs=None):
    real(self, epoch, logs)
    if rank and epoch == 2:
        print("asleep", flush=True)
        time.sleep(1000)
recorder.Recorder.on_epoch_end = slow
sys.argv += FLAGS
train.main()
"""


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_asked_to_stop_while_another_hangs(crew, number, code):
    workers = crew.pair(SLEEPS.replace("FLAGS", repr([*LONG])), connect="")
    crew.until_said("asleep", workers[1])
    chief = workers[0].process
    while chief.poll() is None:  # the second Ctrl-C means at once
        chief.send_signal(number)
        try:
            chief.wait(LIMIT_S if number == signal.SIGTERM else 0.5)
        except processes.TimeoutExpired:
            assert number == signal.SIGINT
    assert crew.ends() == [code, 1]
    assert f"lost worker 0 ({HOST}): " in workers[1].text
    result = crew.result()
    assert result["status"] == "failed"
    if number == signal.SIGTERM:
        line = f"stopped by SIGTERM after update {result['updates']}, which cannot be saved: no update has ended since"
        assert result["reason"] == line
        assert f"failed: {line}" in workers[0].text


def test_a_loss_that_is_not_finite(crew):
    for rank in (0, 1):
        crew.train(*LONG, "--config.optimizer.learning_rate=1e38", **crew.place(rank))
    crew.until_said("failed:")
    assert crew.ends() == [1, 1]
    for worker in crew.workers:
        assert "failed: the loss is nan since update" in worker.text
    assert crew.result()["status"] == "failed"


BAD_DATA = """
import numpy as np, os
def data(split):
    y = np.zeros(64, "int64")
    y[3] = -1 if os.environ["RANK"] == "1" else 0
    return np.zeros((64, 8, 8, 1), "float32"), y
"""
BAD_LABEL = """
import keras, tensorflow as tf, tfdist
x, y = np.zeros((64, 8), "float32"), np.zeros(64, "int32")
y[63] = 99
with d.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
tfdist.fit(model, tf.data.Dataset.from_tensor_slices((x, y)).batch(32), distribution=d, epochs=100)
"""


def test_data_that_one_worker_has_not(crew):
    (crew.folder / "own.py").write_text(BAD_DATA)
    for rank in (0, 1):
        crew.train(*LONG, "--config.data.name=own:data", "--config.train.batch_size=16", **crew.place(rank))
    assert crew.ends() == [1, 2]
    line = "label -1 of example 3 is out of range"
    assert f"failed: lost worker 1 ({HOST}): it stopped: {line}" in crew.workers[0].text
    assert f"error: {line}" in crew.workers[1].text


def test_a_label_that_one_worker_cannot_use(crew):
    workers = crew.pair(BAD_LABEL)
    assert crew.ends() == [1, 1]
    for worker in workers:
        assert "Received a label value of 99 which is outside the valid range of [0, 2)" in worker.text
    assert "UserError" in workers[1].text


# -- Horovod --------------------------------------------------------------------------


def horovodrun(crew, *arguments):
    runner = shutil.which("horovodrun", path=str(pathlib.Path(sys.executable).parent))
    assert runner, "Horovod is not built: run python -m tfdist.horovod_build"
    return crew.start(runner, "-np", "2", sys.executable, *arguments)


def test_a_rank_of_horovod_sleeps_in_python(crew):
    sleep = "lambda n, logs: time.sleep(1000) if rank == 1 and n == 1 else None"
    (crew.folder / "program.py").write_text(
        f"from tools import *\nfit(connect('horovod'), {{'on_epoch_end': {sleep}}})\n"
    )
    runner = horovodrun(crew, "program.py")
    crew.until_said("lost worker")
    assert crew.ends() == [1]
    assert f"lost worker 1 ({HOST}): stuck in Python for " in runner.text


def test_horovod_that_is_not_built(crew):
    (crew.folder / "shim" / "horovod").mkdir(parents=True)
    (crew.folder / "shim" / "horovod" / "__init__.py").touch()
    path = f"{crew.folder / 'shim'}{os.pathsep}{crew.environ['PYTHONPATH']}"
    place = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "2"}
    worker = crew.train(*LONG, PYTHONPATH=path, **place)
    assert crew.ends() == [2]
    [line] = worker.said("error")
    assert line.endswith(": run python -m tfdist.horovod_build")
