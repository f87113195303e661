"""The command, run as a person runs it."""

import hashlib
import json
import os
import re

import keras
import numpy as np
import pytest
from conftest import REPOSITORY
from support import shipped

import tfdist
from tfdist.checkpoints import run_folder
from tfdist.config import schedule

FAST = ["--config.model.name=mlp", "--config.train.epochs=3", "--config.optimizer.warmup=0%"]


def result(folder):
    return json.loads((folder / "result.json").read_text())


def trained_digits(run, folder, *flags):
    """The main job, on real data, with a network that has BatchNorm."""
    done = run("tfdist.train", f"--workdir={folder.name}", *flags)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return result(folder)


def test_digits_reach_97_percent(run, tmp_path):
    one = trained_digits(run, tmp_path / "one", "--config.train.epochs=12")
    assert one["evaluation"]["accuracy"] >= 0.97
    assert one["strategy"] == "default"


@pytest.mark.whole
def test_digits_end_the_same_on_two_replicas(run, tmp_path):
    """The promise over 900 updates, and the accuracy that README tells."""
    one, two = trained_digits(run, tmp_path / "one"), trained_digits(run, tmp_path / "two", "--virtual_devices=2")
    assert one["evaluation"]["accuracy"] >= 0.97
    assert two["evaluation"]["accuracy"] == pytest.approx(one["evaluation"]["accuracy"], abs=1e-3)
    assert two["weights_norm"] == pytest.approx(one["weights_norm"], rel=1e-6)
    assert two["history"]["loss"] == pytest.approx(one["history"]["loss"], rel=1e-5)
    assert (one["strategy"], two["strategy"], two["replicas"]) == ("default", "mirrored", 2)


def test_the_run_folder_and_what_is_printed(run, tmp_path):
    done = run("tfdist.train", *FAST, "--config.name=mine")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "tfdist: strategy default, because 1 CPU here: 1 replica on CPU:0"
    assert "tfdist: mine: 90 updates of 48 examples: 3 epochs of 1437 examples" in lines
    assert lines[-1] == "tfdist: results are in runs/mine/: report.html, result.json, model.keras"
    assert all(len(line) <= 110 for line in lines)

    folder = tmp_path / "runs" / "mine"
    r = result(folder)
    expected = dict(status="completed", replicas=1, workers=1, global_batch=48, updates=90, epochs=3, resumed_from=None)
    assert {k: r[k] for k in expected} == expected
    assert r["examples_seen"] == 3 * 1437 and r["examples_per_second"] > 0 and r["seconds_to_first_update"] > 0
    assert r["versions"]["keras"] == keras.__version__
    assert len(r["history"]["val_accuracy"]) == 3 and r["evaluation"]["loss"] == pytest.approx(
        r["history"]["val_loss"][-1]
    )

    model = keras.saving.load_model(folder / "model.keras")
    raw = b"".join(np.ascontiguousarray(w, "<f4").tobytes() for w in model.get_weights())
    assert hashlib.sha256(raw).hexdigest() == r["weights_sha256"]
    assert sum(float((w.astype("f8") ** 2).sum()) for w in model.get_weights()) == pytest.approx(
        r["weights_norm"], rel=1e-12
    )
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [line.get("epoch") for line in lines] == [1, 2, 3, None]
    assert json.loads((folder / "experiment.json").read_text())["model"]["name"] == "mlp"
    assert json.loads((folder / "environment.json").read_text())["reason"] == "1 CPU here"
    assert not [p for p in folder.iterdir() if p.name.startswith(".")], "temporary files are left"

    # again: the same bits, and the first run is kept
    assert run("tfdist.train", *FAST, "--config.name=mine").returncode == 0
    assert result(folder)["weights_sha256"] == r["weights_sha256"]
    assert result(tmp_path / "runs" / "mine.1") == r


@pytest.mark.whole
def test_a_resume_on_a_renamed_table_is_refused_and_writes_nothing(run, tmp_path):
    """Predictions got the new names, and rows in the old words others."""
    rows = "a,town,y\n" + "".join(f"{i % 9},{'uvw'[i % 3]},{('cat', 'dog')[i % 2]}\n" for i in range(99))
    flags = ["--config=table_mlp", "--config.data.name=csv:t.csv", "--config.data.options=target=y", "--workdir=w"]
    flags += ["--config.data.train_split=train[:80]", "--config.data.eval_split=train[80:]", "--config.train.epochs=1"]
    (tmp_path / "t.csv").write_text(rows)
    done = run("tfdist.train", *flags)
    assert done.returncode == 0, done.stderr
    described = (tmp_path / "w" / "data.json").read_bytes()
    for old, new, told in (
        ("cat", "cow", "names of classes is ['cat', 'dog'] there and ['cow', 'dog'] here"),
        ("v", "x", "(column 'town' is 'v' there and 'w' here"),
        ("a,", "b,", "(columns is ['a', 'town', 'y'] there and ['b', 'town', 'y'] here)"),
    ):
        (tmp_path / "t.csv").write_text(rows.replace(old, new))
        done = run("tfdist.train", *flags, "--resume=require")
        assert done.returncode == 2 and told in done.stderr, done.stderr
    assert (tmp_path / "w" / "data.json").read_bytes() == described


@pytest.mark.whole
def test_flagfiles_hold_environment_flags_only(run):
    for file in (REPOSITORY / "flags").glob("*.flags"):
        names = [line.split("=")[0] for line in file.read_text().splitlines() if line.startswith("--")]
        assert names and set(names) <= {"--strategy", "--devices", "--virtual_devices", "--threads", "--jit"}
    done = run("tfdist.train", f"--flagfile={REPOSITORY}/flags/cpu_2.flags", *FAST, "--progress=none")
    assert "2 replicas on CPU:0, CPU:1" in done.stdout


def test_a_data_function_and_a_model_function(run, tmp_path):
    (tmp_path / "mine.py").write_text(
        """
import keras, numpy as np, tensorflow as tf
def data(split, slope):
    x = np.linspace(0, 1, 90 if split == "train" else 30, dtype="float32")[:, None]
    return x, slope * x
def model(spec, units):
    m = keras.Sequential([keras.Input(spec.shape), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)])
    m.compile(loss="mae")
    return m
"""
    )
    flags = [
        "--config.data.name=mine:data", "--config.data.options=slope=3.0", "--config.model.name=mine:model",
        "--config.model.options=units=4", "--config.train.label_smoothing=0", "--virtual_devices=3", "--workdir=out",
    ]  # fmt: skip
    done = run("tfdist.train", *flags)
    assert done.returncode == 0, done.stderr
    losses = result(tmp_path / "out")["history"]["loss"]
    assert losses[-1] < 0.1 * losses[0]
    done = run("tfdist.evaluate", "--workdir=out")  # without --trust_code: it is the user's own work
    assert done.returncode == 0 and "mine:data, test, 30 examples" in done.stdout, done.stderr


@pytest.mark.whole
def test_precisions(run, tmp_path):
    for precision in ("float64", "mixed_bfloat16", "mixed_float16"):
        done = run("tfdist.train", *FAST, f"--config.train.precision={precision}", f"--workdir={precision}")
        assert done.returncode == 0, done.stderr
        assert result(tmp_path / precision)["evaluation"]["accuracy"] > 0.5
    weights = keras.saving.load_model(tmp_path / "float64" / "model.keras").get_weights()
    assert {w.dtype for w in weights} == {np.dtype("float64")}


@pytest.mark.whole
def test_stream_and_memory_hold_the_same_data(run, tmp_path):
    for cache in ("stream", "memory"):
        flags = [*FAST, f"--config.data.cache={cache}", "--config.data.shuffle=False", f"--workdir={cache}"]
        assert run("tfdist.train", *flags).returncode == 0
    assert result(tmp_path / "stream")["weights_norm"] == pytest.approx(
        result(tmp_path / "memory")["weights_norm"], rel=1e-6
    )


@pytest.mark.parametrize("text, updates", [
    ("7", 7), ("7 steps", 7), ("1 step", 1), ("2 epochs", 60), ("0.5 epoch", 15), ("480 examples", 10), ("5%", 15),
    ("0%", 0),
])  # fmt: skip
def test_durations(text, updates):
    assert schedule.duration("x", text, per_epoch=30, batch=48, updates=300) == updates


def test_a_plan_by_steps():
    e = shipped.digits()
    e.train.epochs, e.train.steps = 0, 70
    p = schedule.make(e, 1437, 2)
    assert (p.updates, p.epochs, p.updates_per_epoch) == (70, 3, 30)
    assert p.describe() == "70 updates of 48 examples on 2 replicas: 3 epochs of 1437 examples"


def test_json_has_no_nan(tmp_path):
    folder = run_folder.RunFolder(str(tmp_path / "a" / "b"))
    folder.create()
    folder.write(
        "x.json", {"loss": float("nan"), "n": np.float32(2), "list": [np.int64(1), float("inf")], "array": np.ones(2)}
    )
    assert json.loads((tmp_path / "a" / "b" / "x.json").read_text()) == {
        "loss": None, "n": 2.0, "list": [1, None], "array": [1.0, 1.0],
    }  # fmt: skip


def test_importing_tfdist_imports_no_tensorflow(run, tmp_path):
    (tmp_path / "light.py").write_text(
        "import sys, tfdist\nassert 'tensorflow' not in sys.modules\nprint(tfdist.UserError)\n"
    )
    done = run("light", real=True)
    assert done.returncode == 0 and "UserError" in done.stdout, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        tfdist.fitt  # noqa: B018


OWN_CODE = """
import keras
import tensorflow as tf

def focal(y, outputs):
    right = tf.gather(tf.nn.log_softmax(outputs), tf.cast(y, tf.int32), batch_dims=1)
    return -(1 - tf.exp(right)) * right

class Notes(keras.callbacks.Callback):
    chief_only = True

    def on_epoch_end(self, epoch, logs=None):
        with open("notes.txt", "a") as file:
            file.write(f"{epoch} {sorted(logs)} {float(self.model.optimizer.learning_rate):.3f}\\n")
"""


def test_a_dry_run_leaves_no_data_set_and_no_control_character(run, tmp_path):
    words = ["--strategy=mirrored", "--virtual_devices=2", "--config.optimizer.schedule=constant"]
    words += ["--config.optimizer.warmup=0", "--workdir=\x1b[31mred"]
    done = run("tfdist.train", "--dry_run", *words, TFDS_DATA_DIR=str(tmp_path / "tfds"))
    assert done.returncode == 0, done.stderr
    assert "  rate         0.05 throughout\n" in done.stdout
    assert "  folder       \\x1b[31mred\n" in done.stdout and "\x1b" not in done.stdout
    assert list(tmp_path.iterdir()) == []
    prepared = re.search(r"preparing the data set digits in (.*)/digits/", done.stdout)[1]
    assert not os.path.exists(prepared)


@pytest.mark.whole
def test_loss_metrics_and_callbacks_of_ones_own(run, tmp_path):
    """They train on two replicas as on one, are shown by a dry run and the report, and measure the run afterwards."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "code.py").write_text(OWN_CODE)
    metrics = "accuracy, SparseTopKCategoricalAccuracy(k=3, name=top)"
    asked = ["--config.train.loss=own.code:focal", f"--config.train.metrics={metrics}"]
    asked += ["--config.train.callbacks=own.code:Notes, EarlyStopping(patience=3)"]
    asked += ["--config.train.label_smoothing=0", *FAST]
    done = run("tfdist.train", *asked, "--dry_run")
    assert done.returncode == 0, done.stderr
    assert "  loss         own.code:focal\n" in done.stdout and f"  metrics      {metrics}\n" in done.stdout
    results = []
    for name, flags in (("one", []), ("two", ["--virtual_devices=2"])):
        done = run("tfdist.train", *asked, f"--workdir={name}", *flags)
        assert done.returncode == 0, done.stderr
        results.append(result(tmp_path / name))
    one, two = results
    assert one["evaluation"].keys() == {"loss", "accuracy", "top"}
    assert two["evaluation"] == pytest.approx(one["evaluation"], rel=1e-4)
    assert two["weights_norm"] == pytest.approx(one["weights_norm"], rel=1e-5)
    notes = (tmp_path / "notes.txt").read_text().splitlines()
    assert len(notes) == 6 and notes[0].startswith(
        "0 ['accuracy', 'loss', 'top', 'val_accuracy', 'val_loss', 'val_top']"
    )
    assert "own.code:focal" in (tmp_path / "two" / "report.html").read_text()
    done = run("tfdist.evaluate", "--workdir=two", "--output=measured.json")
    assert done.returncode == 0, done.stderr
    measured = json.loads((tmp_path / "measured.json").read_text())["evaluation"]
    assert measured == pytest.approx(two["evaluation"], rel=1e-5)
