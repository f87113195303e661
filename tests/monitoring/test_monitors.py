"""What a run tells of itself as it goes: where the time goes, the gradient's norm, FLOPs, display, TensorBoard."""

import contextlib
import http.server
import json
import math
import os
import pty
import re
import threading
import time
import types
from unittest import mock

import certifi
import keras
import numpy as np
import pytest
import tensorflow as tf
from support import shipped
from support.covering import first
from support.nvidia_drivers import driver, printing  # noqa: F401  driver is a fixture
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import tfdist
from tfdist.config import schedule
from tfdist.distributed import gpus
from tfdist.errors import UserError
from tfdist.monitoring import flops, monitors, progress
from tfdist.train import dry_run
from tfdist.trainer.callbacks import Spent

L = keras.layers


class Calls(tfdist.Callback):
    takes_many_updates = True
    wants_gradient_norm = True

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_call(self, call):
        self.calls.append(call)

    @property
    def steady(self):
        return sum((c.spent for c in self.calls if c.steady), Spent())


def small(distribution, optimizer="sgd"):
    keras.utils.set_random_seed(1)
    with distribution.scope():
        model = keras.Sequential([keras.Input((8,)), L.Dense(16, activation="tanh"), L.Dense(3)])
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def data(n):
    rng = np.random.default_rng(2)
    return rng.normal(size=(n, 8)).astype("float32"), rng.integers(0, 3, n).astype("int32")


@pytest.mark.parametrize("replicas", first(0, [2, 1]))
def test_waiting_for_input_is_told_from_computing(replicas, connect):
    """A pipeline that takes its time, against the same data in memory."""
    distribution, found = connect(replicas), {}
    slow = tf.data.Dataset.from_tensor_slices(data(240)).batch(8)
    slow = slow.map(lambda x, y: (tf.py_function(lambda x: (time.sleep(0.02), x)[1], [x], tf.float32), y))
    slow = slow.map(lambda x, y: (tf.ensure_shape(x, [None, 8]), y))
    for name, source in (("slow", slow), ("memory", data(240))):
        calls = Calls()
        tfdist.fit(small(distribution), source, distribution=distribution, epochs=3, callbacks=[calls], verbose=0)
        found[name] = calls
    slow, memory = found["slow"].steady, found["memory"].steady
    assert slow.share("input") > 0.5 > memory.share("input")
    assert sum(c.updates for c in found["slow"].calls) == 3 * 30
    assert sum(c.examples for c in found["slow"].calls) == 3 * 240
    assert (memory.all_reduce > 0) == (replicas > 1)
    assert min(slow.input, slow.compute, slow.python) > 0 and slow.all_reduce >= 0


@pytest.mark.parametrize("replicas, optimizer", first(1, [(3, "scaled"), (1, "clipped"), (1, "sgd"), (3, "sgd")]))
def test_the_gradient_norm_is_that_of_the_whole_batch(replicas, optimizer, connect):
    distribution, (x, y) = connect(replicas), data(10)  # 10 = 4 + 4 + 2 and filler
    model = small(distribution)
    with distribution.scope():
        chosen = keras.optimizers.SGD(0.1, global_clipnorm=0.01 if optimizer == "clipped" else None)
        model.compile(keras.optimizers.LossScaleOptimizer(chosen) if optimizer == "scaled" else chosen, model.loss)
    reference = small(connect(1))
    with tf.GradientTape() as tape:
        loss = reference.loss(y, reference(x))
    expected = tf.linalg.global_norm(tape.gradient(loss, [v.value for v in reference.trainable_variables]))
    calls = Calls()
    tfdist.fit(model, (x, y), distribution=distribution, batch_size=10, epochs=1, callbacks=[calls], verbose=0)
    assert calls.calls[0].gradient_norm == pytest.approx(float(expected), rel=1e-5)


def attention():
    x = keras.Input((6, 8))
    return keras.Model(x, L.MultiHeadAttention(2, 4)(x, x))


@pytest.mark.parametrize("model, forward", [
    (lambda: keras.Sequential([keras.Input((8,)), L.Dense(16), L.Dense(3)]), 2 * (8 * 16 + 16 * 3)),
    (lambda: keras.Sequential([keras.Input((9, 9, 3)), L.Conv2D(4, 3)]), 2 * 7 * 7 * 4 * 3 * 3 * 3),
    (lambda: keras.Sequential([keras.Input((9, 9, 4)), L.Conv2D(6, 3, groups=2)]), 2 * 7 * 7 * 6 * 3 * 3 * 2),
    (lambda: keras.Sequential([keras.Input((9, 9, 3)), L.DepthwiseConv2D(3)]), 2 * 7 * 7 * 3 * 3 * 3),
    (lambda: keras.Sequential([keras.Input((4, 4, 3)), L.Conv2DTranspose(5, 2, 2)]), 2 * 4 * 4 * 3 * 2 * 2 * 5),
    # projections of query, key, value and output; scores and their sum, each 2 heads x 6 x 6 x 4
    (attention, 4 * 2 * 6 * 8 * 8 + 2 * 2 * 2 * 6 * 6 * 4),
])  # fmt: skip
def test_model_flops(model, forward):
    """Against the textbook: a product of [a, b] and [b, c] is 2abc, a convolution one per output and filter weight."""
    built = model()
    assert flops.per_example(built, np.zeros((7, *built.input_shape[1:]), "float32")) == 3 * forward


def test_usage_of_gpus_and_of_a_process(driver):  # noqa: F811
    two = "0, GPU-a, 90, 16000, 12000, 4000, 550.1, Tesla T4\n1, GPU-b, [N/A], 16000, [N/A], 1, 550.1, Tesla T4"
    driver(printing(two))
    watched = monitors.Usage((0, 1), gpus.survey)
    watched.start()
    found = watched.latest()
    watched.stop()
    assert found["gpus"] == [
        {"number": 0, "load": 0.9, "memory_used": 12000, "memory_total": 16000},
        {"number": 1, "load": None, "memory_used": None, "memory_total": 16000},
    ]
    assert found["memory"] > 1e7 and monitors.peak_memory() >= found["memory"] * 0.5


def scalars(folder, run):
    accumulator = EventAccumulator(str(folder / run), {"tensors": 0})
    accumulator.Reload()
    found = {tag: accumulator.Tensors(tag) for tag in accumulator.Tags()["tensors"]}
    value = lambda event: tf.make_ndarray(event.tensor_proto)
    return {tag: [(e.step, float(value(e))) for e in events] for tag, events in found.items()}


def test_tensorboard_forgets_what_a_resumed_run_repeats(tmp_path):
    for start, steps in ((0, (10, 20, 30)), (20, (25, 30))):
        board = monitors.Board(tmp_path / "tensorboard")
        board.begin(start)
        for step in steps:
            board.scalars(step, {"loss": start + step / 100, "array": np.ones(3), "unknown": None})
        board.close()
    found = scalars(tmp_path / "tensorboard", "train")
    assert [step for step, _ in found["loss"]] == [10, 20, 25, 30] and set(found) == {"loss"}
    assert found["loss"][2][1] == pytest.approx(20.25)


def test_a_disk_that_fills_up_ends_tensorboard_alone(tmp_path, said, monkeypatch):
    printed = mock.Mock()
    monkeypatch.setattr(threading, "excepthook", printed)
    board = monitors.Board(tmp_path / "tensorboard")
    board.begin(0)
    board._writers["train"].close()
    board._writers["train"] = tf.io.TFRecordWriter("/dev/full")
    board.scalars(1, {"loss": 1.0})
    board.scalars(2, {"loss": 1.0})
    board.close()
    assert len(said) == 1 and "No space left on device" in said[0] and said[0].endswith("training goes on without it")
    assert not printed.called


PLAN = schedule.make(shipped.digits(), 1437, 1)


def recorder(**values):
    return types.SimpleNamespace(**{"updates": 0, "begun": time.monotonic(), "seconds": 0.0} | values)


def test_the_display_on_a_terminal_of_80_columns(monkeypatch):
    """A real terminal, the default experiment, GPUs and an input that is too slow."""
    ours, theirs = pty.openpty()
    shown_text = []

    def read():  # until the other end is closed; a terminal gives what it has, not all that is to come
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 1 << 16):
                shown_text.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    gpu = {"number": 0, "load": 0.9, "memory_used": 12000.0, "memory_total": 16000.0}
    record = recorder(updates=870, of_epoch=Spent(0.3, 0.7, 0.0, 0.0))
    with open(theirs, "w") as screen:
        monkeypatch.setattr("sys.stdout", screen)
        monkeypatch.setenv("JPY_PARENT_PID", "1")  # a notebook's cell that runs a command
        assert isinstance(progress.create("auto", PLAN, record)[0], progress.Plain)
        monkeypatch.delenv("JPY_PARENT_PID")
        (shown,) = progress.create("auto", PLAN, record, lambda: {"gpus": [gpu]})
        assert isinstance(shown, progress.Bar)
        shown.on_train_begin()
        shown.on_epoch_begin(29)
        record.updates = 900
        logs = {"loss": 0.5126, "accuracy": 1.0}
        shown.on_train_batch_end(29, logs)
        shown._bar.refresh()
        shown.on_epoch_end(29, logs | {"val_loss": 0.5817, "val_accuracy": 0.9806})
        shown.on_train_end()
    reader.join()
    os.close(ours)
    text = b"".join(shown_text).decode()
    plain = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip() for line in re.split(r"[\r\n]+", text)]
    assert all(len(line) <= 80 for line in plain), plain
    text = "\n".join(plain)
    assert "epoch 30/30  loss 0.5126 (val 0.5817)  accuracy 1.0000 (val 0.9806)" in text
    assert "900/900" in text and "gpu 90% 12/16G" in text and "input 30%" in text


def test_a_profile(tmp_path, connect, said):
    """The trace has just the updates that were asked for."""

    class Count(tfdist.Callback):
        takes_many_updates = True
        updates = 0

        def on_train_batch_end(self, batch, logs=None):
            self.updates = batch + 1

    count = Count()
    profiler = monitors.Profiler(21, 30, count, tmp_path, True)
    distribution = connect(2)
    options = dict(distribution=distribution, batch_size=16, epochs=1, verbose=0, check_agreement="off")
    tfdist.fit(small(distribution), data(960), callbacks=[count, profiler], **options)
    (trace,) = (tmp_path / "tensorboard" / "plugins" / "profile").glob("*/*.xplane.pb")
    planes = xplane_pb2.XSpace.FromString(trace.read_bytes()).planes
    names = [p.event_metadata[e.metadata_id].name for p in planes for line in p.lines for e in line.events]
    product = next(name for name in names if re.search(r":_?\w*MatMul$", name) and "gradient_tape" not in name)
    assert names.count(product) == 10  # updates of a replica
    shown_by = f"tensorboard --logdir={tmp_path}/tensorboard (pip install xprof)"
    assert said == [f"profile of updates 21 to 30: {shown_by}"]


def test_more_memory_than_there_is(connect):
    model = small(connect(1), keras.optimizers.Adam())
    needs = dry_run.memory(model, dry_run.available(1, ()), connect(1), 0)
    count = 8 * 16 + 16 + 16 * 3 + 3
    assert (needs.weights, needs.gradients) == (4 * count, 4 * count)
    assert 8 * count <= needs.optimizer <= 8 * count + 16  # two moments, a rate and a counter
    tiny = gpus.DriverGPU(3, "u", "Tesla T4", 0.0, 0.0, 0.001, "550")
    with pytest.raises(UserError, match=r"needs 3.1 kB for weights, .*, GPU 3 \(Tesla T4\) has 1.0 kB for it: use a"):
        dry_run.memory(model, dry_run.available(1, (tiny,)), connect(1), 0)


def test_a_dry_run_says_what_would_be_done_and_does_nothing(run, tmp_path):
    done = run("tfdist.train", "--dry_run", "--virtual_devices=2", "--config.train.accumulate=3", "--workdir=out")
    assert done.returncode == 0 and done.stderr == ""
    for words in (
        "30 per epoch of 48, the last of 45",
        "24 examples per replica, 2 of them in 3 micro-batches of 8",
        "900 in 30 epochs, evaluated every epoch",
        "update 1: 0, 61: 0.05, 450: 0.0279, 900: 1.74e-07",
        "cnn, 338,634 parameters, float32",
        "4.1 MB per replica: weights 1.4 MB, gradients 1.4 MB,",
    ):
        assert words in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if line.startswith(" "))
    assert not (tmp_path / "out").exists()


@pytest.mark.whole
def test_what_a_run_leaves_of_its_time(run, tmp_path):
    """One run with everything on; its files against each other."""
    flags = ["--config.model.name=mlp", "--config.train.epochs=40", "--config.optimizer.warmup=0%"]
    done = run("tfdist.train", *flags, "--virtual_devices=2", "--workdir=out", "--profile=40:60")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "out"
    result = json.loads((folder / "result.json").read_text())
    assert set(result["time"]) == {"input", "compute", "all_reduce", "python"}
    assert 0 < sum(result["time"].values()) < result["seconds"] and result["time"]["all_reduce"] > 0
    assert result["flops_per_example"] == 3 * 2 * (64 * 32 + 32 * 10) and result["flops_share"] is None
    assert result["flops_per_second"] == pytest.approx(result["flops_per_example"] * result["examples_per_second"])
    assert result["peak_memory_bytes"] > 1e8 and result["peak_device_memory_bytes"] is None
    epochs = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()][:-1]
    cosine = [0.025 * (1 + math.cos(math.pi * update / 1200)) for update in (29, 1199)]  # of the last updates, from 0
    assert [epochs[i]["learning_rate"] for i in (0, -1)] == pytest.approx(cosine, rel=0.02)  # float32 near zero
    assert epochs[0]["gradient_norm"] > 0
    samples = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
    assert [s["mark"] for s in samples if "mark" in s] == ["checkpoint"]
    samples = [s for s in samples if "mark" not in s]
    assert samples[-1]["updates"] == result["updates"] == 1200
    assert samples[-1]["loss"] == pytest.approx(result["history"]["loss"][-1])
    assert sorted(s["seconds"] for s in samples) == [s["seconds"] for s in samples]
    train = scalars(folder / "tensorboard", "train")
    assert {"loss", "accuracy", "learning_rate", "gradient_norm"} <= set(train)
    assert {"speed/examples_per_second", "share/input"} <= set(train)
    assert train["loss"] == [(s["updates"], pytest.approx(s["loss"], rel=1e-5)) for s in samples]
    validation, _ = scalars(folder / "tensorboard", "validation")
    assert [v for _, v in validation["loss"]] == pytest.approx(result["history"]["val_loss"], rel=1e-5)
    assert list((folder / "tensorboard").glob("plugins/profile/*/*.xplane.pb"))


@pytest.mark.whole
def test_a_trainjob_is_told_its_progress(run, tmp_path):
    """By what Trainer's status server asks for: a token from a file, and this JSON (its statusserver/server.go)."""
    got = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["trainerStatus"]
            got.append((self.path, self.headers["Authorization"], body))
            self.send_error(503)  # which must not matter

    (tmp_path / "token").write_text("renewed\n")
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        own = dict(URL=f"http://127.0.0.1:{server.server_port}/x", CA_CERT=certifi.where(), TOKEN="token")
        words = ["--config=digits_mlp", "--config.train.epochs=2", "--notensorboard", "--progress=none"]
        own = {f"KUBEFLOW_TRAINER_SERVER_{name}": value for name, value in own.items()}
        done = run("tfdist.train", *words, **own)
        server.shutdown()
    again = run("tfdist.train", *words, "--resume=require", **own)  # there is no update to tell of
    assert again.returncode == 0, again.stderr
    (path, authorization, last), names = got[-1], {metric["name"] for metric in got[-1][2]["metrics"]}
    assert (done.returncode, path, authorization, last["progressPercentage"]) == (0, "/x", "Bearer renewed", 100)
    assert last["estimatedRemainingSeconds"] == 0 and {"loss", "accuracy", "val_loss"} <= names and len(got) > 1
