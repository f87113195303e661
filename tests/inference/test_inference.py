"""`python -m tfdist.evaluate` and `.predict`: what a run ended with, under any strategy; nothing else is touched."""

import csv
import dataclasses
import errno
import hashlib
import importlib
import json
import os
import pathlib
import re
import select
import shutil
import signal
import sys
import types
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import REPOSITORY
from support import many_commands
from support.covering import first
from support.finished_runs import TRAIN, made_run
from support.refusals import refused

import tfdist
from tfdist import config
from tfdist.checkpoints import training_state
from tfdist.config import user_functions
from tfdist.data import spec_file
from tfdist.data.augmentation import ops
from tfdist.doctor import checkpoints as doctor
from tfdist.errors import TrainingError
from tfdist.inference import compatibility, job, prediction_rows, trained_model
from tfdist.models import build as models

pytest_plugins = ("support.finished_runs",)  # its fixtures

HOROVODRUN = str(pathlib.Path(sys.executable).parent / "horovodrun")
WORLDS = {
    "one device": ((sys.executable, "-m"), []),
    "mirrored": ((sys.executable, "-m"), ["--virtual_devices=3"]),
    "launched": ((sys.executable, "-m", "tfdist.launch", "--nproc_per_node=2", "--", "-m"), []),
    "horovod": ((HOROVODRUN, "-np", "2", sys.executable, "-m"), ["--strategy=horovod"]),
}


def files(folder):
    """Every file below a folder with its bytes and the time of its last change."""
    found = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p): (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in found}


def digits(tfds_dir, split="test"):
    from tfdist.data.datasets import registry

    e = config.Experiment()
    e.data.eval_split, e.data.data_dir = split, str(tfds_dir)
    return registry.load(e)


@pytest.mark.parametrize("world", first(1, WORLDS))
def test_every_strategy_finds_what_the_run_ended_with(world, after, trained, tfds_dir):
    """Evaluation and predictions, beside Keras' own on the saved model; and the run is as it was."""
    starter, flags = WORLDS[world]
    flags = [*flags, "--check_agreement=on"]
    before = files(trained / "run")
    done = after("tfdist.evaluate", "--workdir=run", "--output=e.json", "--overwrite", *flags, starter=starter)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in done.stdout.splitlines() if "360 examples: loss " in line]) == 1
    found, result = (json.loads((trained / name).read_text()) for name in ("e.json", "run/result.json"))
    assert found["examples"] == 360 and found["weights_sha256"] == result["weights_sha256"]
    assert found["evaluation"] == pytest.approx(result["evaluation"], rel=1e-6)
    assert found["replicas"] == {"one device": 1, "mirrored": 3}.get(world, 2)
    checked = f"checked: 1 and {found['replicas']} replicas agree on "
    assert (f"{checked}measuring this model" in done.stdout) == (found["replicas"] > 1)
    if world == "launched":  # what such workers predict is compared in test_workers.py
        return

    done = after(
        "tfdist.predict", "--workdir=run", "--output=p.csv", "--overwrite", "--scores", *flags, starter=starter
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (f"{checked}predicting with this model" in done.stdout) == (found["replicas"] > 1)
    assert files(trained / "run") == before
    assert {p.name for p in trained.iterdir()} - {"logs"} <= {"run", "e.json", "p.csv", "p.jsonl"}
    rows = list(csv.DictReader((trained / "p.csv").read_text().splitlines()))
    model = keras.saving.load_model(trained / "run" / "model.keras")
    x, y = digits(tfds_dir).eval.columns
    scores = model.predict(x, verbose=0)
    assert [int(r["number"]) for r in rows] == list(range(360))
    assert [int(r["target"]) for r in rows] == y.tolist()
    assert [int(r["prediction"]) for r in rows] == scores.argmax(1).tolist() == [int(r["name"]) for r in rows]
    written = np.array([[float(r[f"scores_{k}"]) for k in range(10)] for r in rows])
    np.testing.assert_allclose(written, scores, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(written, tfdist.predict(model, x), rtol=1e-4, atol=1e-5)
    probabilities = np.exp(scores - scores.max(1, keepdims=True))
    probabilities = (probabilities / probabilities.sum(1, keepdims=True)).max(1)
    np.testing.assert_allclose([float(r["probability"]) for r in rows], probabilities, rtol=1e-4)


@pytest.mark.whole
def test_a_file_of_keras_and_other_data(after, trained, tfds_dir):
    """The training split, and the file alone, whose own loss wants one-hot targets: as Keras measures it."""
    flags = ["--model=run/model.keras", "--config.data.eval_split=train[:100]", "--config.eval.batch_size=7"]
    done = after("tfdist.evaluate", *flags, "--output=-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    x, y = (a[:100] for a in digits(tfds_dir, "train").eval.columns)
    model = keras.saving.load_model(trained / "run" / "model.keras")
    expected = model.evaluate(x, keras.utils.to_categorical(y, 10), verbose=0, return_dict=True)
    assert found["examples"] == 100 and found["evaluation"] == pytest.approx(expected, rel=1e-5)
    assert all(line.startswith("tfdist: ") for line in done.stderr.splitlines())


def test_json_lines_on_any_checkpoint(after, trained):
    done = after("tfdist.predict", "--workdir=run", "--checkpoint=latest", "--output=p.jsonl", "--overwrite")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (trained / "p.jsonl").read_text().splitlines()]
    assert len(rows) == 360 and list(rows[0]) == ["number", "prediction", "name", "probability", "target"]


# -- weights, without a process ---------------------------------------------


def wanted(folder, checkpoint=""):
    return trained_model.ModelRequest(str(folder), "", checkpoint, config.Experiment(), {})


def weights(folder, checkpoint=""):
    asked = wanted(folder, checkpoint)
    experiment = trained_model.read_experiment(asked)
    build = lambda: job.built(experiment, spec_file.read(folder))
    return trained_model.read_weights(asked, experiment, build)


@pytest.fixture
def copy(trained, tmp_path):
    return pathlib.Path(shutil.copytree(trained / "run", tmp_path / "copy"))


@pytest.mark.whole
def test_checkpoints_hold_what_the_run_would_have_ended_with(copy):
    """The last one has the averaged weights with which the run ended, bit for bit."""
    saved = keras.saving.load_model(copy / "model.keras").get_weights()
    for name in ("latest", "60", ""):
        found = weights(copy, name)
        for a, b in zip(found[1], saved, strict=True):
            np.testing.assert_array_equal(a, b)
    assert found[0] == str(copy / "model.keras")
    best = json.loads((copy / "checkpoints" / "60" / "state.json").read_text())["best"]["update"]
    assert pathlib.Path(weights(copy, "best")[0]).name == str(best)
    other = next(p for p in (copy / "checkpoints").iterdir() if p.name not in ("60", "latest"))
    assert any((a != b).any() for a, b in zip(weights(copy, other.name)[1], saved, strict=True))


@pytest.mark.whole
def test_weights_reach_every_replica(copy, connect):
    experiment = trained_model.read_experiment(wanted(copy))
    distribution = connect(3)
    with distribution.scope():
        model = job.built(experiment, spec_file.read(copy))
    training_state.assign(model, distribution, weights(copy)[1])
    expected = keras.saving.load_model(copy / "model.keras").get_weights()
    for variable, array in zip(model.weights, expected, strict=True):
        for replica in variable.value.values:
            np.testing.assert_array_equal(replica.numpy(), array)


def test_a_damaged_checkpoint_is_passed_over_and_left_where_it_is(copy, said):
    file = copy / "checkpoints" / "60" / "tensors.data-00000-of-00001"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    before = files(copy)
    assert pathlib.Path(weights(copy, "latest")[0]).name != "60"
    assert len(said) == 1 and "60 is not used: tensors.data-00000-of-00001 has changed" in said[0]
    assert files(copy) == before
    with refused("none of the checkpoints that --checkpoint=60 means is valid: choose another"):
        weights(copy, "60")
    with refused("60, which tells the best checkpoint, is damaged: choose another one by its update"):
        weights(copy, "best")  # an older one would take its own best for that of the run


def edited(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def damaged_weights(folder):
    """Changes a byte in the midst of the weights, which are not compressed."""
    path = folder / "model.keras"
    with zipfile.ZipFile(path) as archive:
        place = archive.getinfo("model.weights.h5").header_offset + 5000
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def unlisted(folder):
    """Leaves out the checksums, which folders of earlier versions do not have."""
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({k: v for k, v in result.items() if k not in ("files", "sha256")}))


def other_weights(folder):
    model = keras.saving.load_model(folder / "model.keras")
    model.layers[-1].bias.assign_add(np.full(10, 1e-3, "float32"))
    model.save(folder / "model.keras")


SPOILT = [
    (lambda f: (f / "model.keras").unlink(), "", "copy has no model.keras yet: use its newest checkpoint with"),
    (lambda f: [(f / "model.keras").unlink(), shutil.rmtree(f / "checkpoints")], "",
     "has no model.keras yet: it has no checkpoint either: train it"),
    (lambda f: shutil.rmtree(f / "checkpoints"), "latest", "there is no checkpoint in "),
    (lambda f: None, "7", "--checkpoint=7 is not there: the updates that have one are "),
    (lambda f: edited(f / "experiment.json", checkpoint={"best": ""}), "best",
     "--checkpoint=best, and the run has not recorded it (checkpoint.best): use latest"),
    (lambda f: (f / "result.json").unlink(), "",
     "result.json has no checksum of model.keras, so the run has not completed"),
    (lambda f: edited(f / "result.json", weights_sha256=""), "", "result.json has changed: its checksum is wrong: "),
    (lambda f: [edited(f / "result.json", weights_sha256=""), unlisted(f)], "", "has no checksum of model"),
    (other_weights, "", "copy is damaged: model.keras has "),
    (lambda f: [other_weights(f), unlisted(f)], "",
     "model.keras has other weights than result.json (weights_sha256): it is of another run, or damaged"),
    (lambda f: [(f / "model.keras").write_bytes((f / "model.keras").read_bytes()[:5000]), unlisted(f)], "",
     "model.keras is damaged (File is not a zip file): use --checkpoint=latest, or train again"),
    (lambda f: [damaged_weights(f), unlisted(f)], "",  # HDF5's reader ended the process by SIGSEGV
     "model.keras is damaged (model.weights.h5 in it): use --checkpoint=latest, or train again"),
    (lambda f: [edited(f / "experiment.json", model={"name": "mlp"}), unlisted(f)], "", "the setup of the model "),
    (lambda f: [edited(f / "experiment.json", model={"name": "mlp"}), edited(f / "environment.json", code={}),
                unlisted(f)], "", "model.keras does not fit the model that"),
    (lambda f: edited(f / "experiment.json", model={"name": "mlp"}), "latest", "experiment.json is not what "),
    (lambda f: [edited(f / "experiment.json", colour="red"), unlisted(f)], "",
     "experiment.json has a field 'colour', which this tfdist does not know"),
    (lambda f: edited(f / "experiment.json", train=5), "latest",
     "experiment.json has train=5, which it cannot have been written with: copy it back"),
    (lambda f: edited(f / "experiment.json", seed="x"), "latest",
     "experiment.json has seed='x', which it cannot have been written with"),
    (lambda f: (f / "experiment.json").write_text("{"), "",
     "holds no run (no experiment.json that can be read): check the path"),
]  # fmt: skip


@pytest.mark.parametrize("spoil, checkpoint, message", first(8, SPOILT), ids=[str(i) for i in range(len(SPOILT))])
def test_runs_that_cannot_be_used(spoil, checkpoint, message, copy):
    spoil(copy)
    with refused(re.escape(message)):
        weights(copy, checkpoint)


@pytest.mark.whole
def test_functions_that_have_changed_since_the_training_are_refused(run, tmp_path, monkeypatch):
    """The function's own file, and what that imports or reads: a constant, a module that is imported late, settings."""
    text = (
        "import json, keras\nfrom parts import UNITS\ndef model(spec):\n    import late.kind\n    k = keras.layers\n"
        "    scale = k.Rescaling(json.load(open('settings.json'))['scale'])\n"
        "    layers = [k.Flatten(), scale, k.Dense(UNITS, late.kind.KIND), k.Dense(10)]\n"
        "    return keras.Sequential([keras.Input(spec.shape), *layers])\n"
    )
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "kind.py").write_text("KIND = 'relu'\n")
    (tmp_path / "parts.py").write_text("UNITS = 9\n")
    (tmp_path / "settings.json").write_text('{"scale": 0.5}')
    (tmp_path / "mine.py").write_text(text)
    flags = ["--config.model.name=mine:model", "--config.train.epochs=1", "--config.optimizer.warmup=0%", "--workdir=w"]
    done = run("tfdist.train", "--config=digits_mlp", "--config.model.options=", *flags)
    assert done.returncode == 0, done.stderr
    (tmp_path / "mine.py").write_text("# of mine\n" + text)
    done = run("tfdist.evaluate", "--workdir=w")
    assert done.returncode == 0, done.stderr
    (tmp_path / "keras.json").write_text('{"epsilon": 0.1}')
    parts = [(tmp_path / file, (tmp_path / file).read_text()) for file in ("parts.py", "late/kind.py", "settings.json")]
    for (path, content), was, now in zip(parts, ("9", "relu", "0.5"), ("10", "elu", "0.7")):
        path.write_text(content.replace(was, now))
    done = run("tfdist.evaluate", "--workdir=w", KERAS_HOME=str(tmp_path))
    named = ["late/kind.py", "parts.py", "settings.json", "Keras' settings epsilon and image_data_format"]
    assert done.returncode == 2 and ", ".join(f"the code of {name}" for name in named) in done.stderr, done.stderr
    for path, content in parts:
        path.write_text(content)
    (tmp_path / "mine.py").write_text(text.replace("k.Flatten()", "k.Flatten(), k.Activation('tanh')"))
    files = {path: path.read_bytes() for path in (tmp_path / "w").glob("*.*")}
    done = run("tfdist.train", "--config=digits_mlp", "--config.model.options=", *flags, "--resume=require")
    assert done.returncode == 2 and "another experiment (the code of mine.py has changed" in done.stderr, done.stderr
    assert files == {path: path.read_bytes() for path in (tmp_path / "w").glob("*.*")}, "what is refused has written"
    for command in (["tfdist.evaluate", "--checkpoint=latest"], ["tfdist.predict", "--output=-"]):
        done = run(*command, "--workdir=w")
        assert done.returncode == 2 and "the code of mine.py has changed since w was trained" in done.stderr, (
            done.stderr
        )
    assert run("tfdist.evaluate", "--workdir=w", "--trust_code").returncode == 0
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path / "late")  # names do not depend on the working folder, or nothing would be compared
    found = user_functions.code_digests(["mine:model"])
    names = [f"{user_functions.CODE} {name}" for name in ("late/kind.py", "mine.py", "parts.py")]
    assert [name for name in found if name.endswith(".py")] == names and user_functions.KERAS_SETTINGS in found
    assert not any("site-packages" in name for name in found), "of an environment below the working folder"


@pytest.mark.whole
def test_a_vocabulary_that_has_changed_since_the_training_is_refused(run, tmp_path):
    """The layer reads its file with TensorFlow, and no weight tells what was in it."""
    (tmp_path / "own.py").write_text("""
import keras, numpy as np
def data(split):
    k = np.random.default_rng(0).integers(0, 6, 60)
    return np.array(list("abcdef"), object)[k], k // 2
def model(spec):
    words, L = keras.Input((), dtype="string"), keras.layers
    return keras.Model(words, L.Dense(3)(L.Embedding(8, 4)(L.StringLookup(vocabulary="words.txt")(words))))
""")
    (tmp_path / "words.txt").write_text("a\nb\nc\nd\ne\nf\n")
    fields = ["data.name=own:data", "model.name=own:model", "model.options=", "optimizer.warmup=0%", "train.epochs=1"]
    command = ["tfdist.train", *(f"--config.{field}" for field in fields), "--config.checkpoint.every=1 epoch"]
    assert (done := run(*command, "--workdir=w")).returncode == 0, done.stderr
    assert (done := run("tfdist.evaluate", "--workdir=w")).returncode == 0, done.stderr
    (tmp_path / "words.txt").write_text("a\nb\nc\nd\nf\ne\n")
    for again in ["tfdist.evaluate"], [*command, "--resume=require"]:
        done = run(*again, "--workdir=w")
        assert done.returncode == 2 and re.search(r"the setup of the model \(.*\) has changed", done.stderr), (
            done.stderr
        )


def digit_changed(folder, name, before, after):
    """Changes a digit of a number: the file is as long, and JSON, as before."""
    text = (folder / name).read_text()
    assert before in text and len(before) == len(after)
    (folder / name).write_text(text.replace(before, after, 1))


CHANGES = [
    ("data.json", '"maximum": 16', '"maximum": 12'),
    ("data.json", '"classes": 10', '"classes": 90'),
    ("experiment.json", '"label_smoothing": 0.1', '"label_smoothing": 0.3'),
    ("experiment.json", '"ema_momentum": 0.9', '"ema_momentum": 0.0'),
]


@pytest.mark.parametrize("name, before, after", CHANGES)
def test_a_changed_digit_is_found(name, before, after, copy):
    """They changed every measure and prediction, and the exit code was 0."""
    digit_changed(copy, name, before, after)
    for checkpoint, why in (("", f"is damaged: {name} has changed"), ("latest", f"{name} is not what ")):
        with refused(f"{why}.*: copy it back, or repeat the training command with --resume="):
            weights(copy, checkpoint)
    findings = doctor.run_files(str(copy), doctor.examine(copy / "checkpoints"))
    assert [finding.status for finding in findings] == ["fail", "fail"] and name in findings[0].finding


@pytest.mark.whole
def test_a_changed_layer_of_a_model_from_a_file_is_found(run, tmp_path):
    """Its weights are those that `result.json` names; only the layers that they are put into are others."""
    layers = [keras.layers.Flatten(), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(10)]
    keras.Sequential([keras.Input((8, 8, 1)), *layers]).save(tmp_path / "mine.keras")
    flags = ["--config=digits_mlp", "--config.name=own", "--config.model.name=mine.keras", "--config.model.options="]
    done = run("tfdist.train", *flags, "--config.train.steps=3", "--config.train.epochs=0", "--progress=none")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "runs/own/model.keras"
    with zipfile.ZipFile(path) as file:
        content = {name: file.read(name) for name in file.namelist()}
    assert content["config.json"].count(b'"relu"') == 1
    content["config.json"] = content["config.json"].replace(b'"relu"', b'"tanh"')
    with zipfile.ZipFile(path, "w") as file:
        for name, data in content.items():
            file.writestr(name, data)
    done = run("tfdist.evaluate", "--workdir=runs/own", "--checkpoint=latest")
    assert done.returncode == 2 and "runs/own is damaged: model.keras has changed" in done.stderr, done.stderr
    # Of a run that was interrupted, the file that its model was built from.
    (tmp_path / "runs/own/result.json").unlink()
    path.rename(tmp_path / "mine.keras")
    done = run("tfdist.evaluate", "--workdir=runs/own", "--checkpoint=latest")
    assert done.returncode == 2 and "mine.keras is not what runs/own/checkpoints/3 was made with" in done.stderr
    done = run("tfdist.train", *flags, "--config.train.steps=3", "--config.train.epochs=0", "--progress=none")
    assert done.returncode == 2 and "of another experiment (the model's file has changed" in done.stderr, done.stderr


def test_averages_that_a_checkpoint_does_not_have(copy):
    """Nothing of a folder that earlier versions have written could say so."""
    experiment = trained_model.read_experiment(wanted(copy))
    plain = job.built(experiment, spec_file.read(copy))
    tensors = training_state.read(str(copy / "checkpoints/60/tensors"))
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("_average")}
    with refused(r"the checkpoint has averages of 0 weights, and the model with optimizer.ema_"):
        training_state.weights(plain, tensors, averaged=True)


def test_a_folder_as_it_was_written_elsewhere(copy):
    (finding,) = doctor.run_files(str(copy), doctor.examine(copy / "checkpoints"))
    listed = "data.json, environment.json, experiment.json, model.keras"
    assert (finding.status, finding.finding) == ("ok", f"{copy}: {listed} are as the run wrote them")
    (copy / "environment.json").unlink()
    damaged_weights(copy)
    findings = [finding.finding for finding in doctor.run_files(str(copy), [])]
    assert len(findings) == 2 and "environment.json: no such file" in findings[0] + findings[1]
    unlisted(copy)
    (finding,) = doctor.run_files(str(copy), [])
    assert finding.status == "ok" and "has no checksums" in finding.finding


# -- data that is not the run's ---------------------------------------------


def spec(**changes):
    from tfdist.data.spec import Spec

    return Spec(
        **{"shape": (8, 8, 1), "dtype": "uint8", "classes": 2, "maximum": 16.0, "names": ("cat", "dog"), **changes}
    )


@pytest.mark.parametrize("changes, message", [
    (dict(shape=(9, 9, 3)), "data.name='digits' has inputs of shape [9, 9, 3], the model was trained on [8, 8, 1]"),
    (dict(dtype="float32"), "has inputs of type float32, the model was trained on uint8"),
    (dict(names=("cat", "cow")),
     "has other classes than the model was trained on ('cow' is a class of only one of them)"),
    (dict(names=("dog", "cat")), "(they are in another order)"),
    (dict(names=(), classes=3), "has 3 classes, the model was trained on 2"),
])  # fmt: skip
def test_data_that_the_model_was_not_trained_for(changes, message):
    compatibility.check_data(config.Experiment(), spec(), spec())
    compatibility.check_data(config.Experiment(), spec(names=(), classes=1), spec())
    with refused(re.escape(message)):
        compatibility.check_data(config.Experiment(), spec(**changes), spec())


@pytest.mark.parametrize("cache", first(0, ["memory", "stream"]))
def test_fractions_for_a_classifier(cache, after, trained):
    """A loss would take 0.9 for class 0."""
    for end in "xy":
        (trained / "d").mkdir(exist_ok=True)
        np.save(trained / "d" / f"{end}.npy", np.zeros((4, 8, 8, 1), "uint8") if end == "x" else np.full(4, 0.9))
    data = ("--config.data.name=numpy:d", "--config.data.eval_split=train", f"--config.data.cache={cache}")
    done = after("tfdist.predict" if cache == "stream" else "tfdist.evaluate", "--workdir=run", "--output=-", *data)
    assert done.returncode == 2 and not done.stdout
    assert "the model classifies, and the targets are not integers: choose other data" in done.stderr


def test_a_table_with_other_statistics():
    from tfdist.data.spec import Column

    table = lambda mean: spec(columns=(Column("age", "number", mean, 2.0),), names=())
    with refused(r"other columns than the model was trained on, or other statistics of them \(age\)"):
        compatibility.check_data(config.Experiment(), table(1.0), table(2.0))


@pytest.mark.whole
def test_new_rows_of_a_table(run, tmp_path, monkeypatch):
    """By the statistics of the training: predicted without a target, and measured with it."""
    from tfdist.data.spec import Column, Spec

    (tmp_path / "mine.py").write_text(
        """
import keras
def model(spec):
    numbers = keras.Input((1,), name="numbers")
    dense = keras.layers.Dense(1, kernel_initializer="ones")
    whole = keras.Model({"numbers": numbers}, dense(numbers))
    dense.enable_lora(1)  # whose weights Keras merges in the file, so that other ones are read
    return whole
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    e = config.Experiment()
    e.name, e.data.name, e.data.options, e.model.name = "table", "csv:gone.csv", "target=pay", "mine:model"
    e.train.label_smoothing = 0.0
    table = Spec((1,), "float32", None, 1.0, (), (Column("age", "number", 40.0, 10.0),), Column("pay", "number"))
    made_run(tmp_path, e, importlib.import_module("mine").model(table), table)
    monkeypatch.delitem(sys.modules, "mine")
    (tmp_path / "new.csv").write_text("name,age\nann,50\nbob,\ncyd,35\n")
    done = run("tfdist.predict", "--workdir=.", "--config.data.name=csv:new.csv", "--output=p.csv")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "p.csv").read_text() == "number,output\n0,1.0\n1,0.0\n2,-0.5\n"
    (tmp_path / "paid.csv").write_text("name,age,pay\nann,50,2\nbob,,0\ncyd,35,-1.5\n")
    done = run("tfdist.evaluate", "--workdir=.", "--config.data.name=csv:paid.csv", "--output=-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["examples"] == 3 and found["evaluation"] == pytest.approx({"loss": 2 / 3, "mae": 2 / 3})
    assert ".keras on csv:paid.csv, train, 3 examples: loss " in done.stderr
    table_of_its_own = ["--config.data.name=csv:paid.csv", "--config.data.options=target=pay, classify=False"]
    done = run("tfdist.evaluate", "--model=model.keras", *table_of_its_own, "--config.data.eval_split=train")
    assert done.returncode == 2 and "does not tell how the columns of its training's table" in done.stderr, done.stderr
    asked = dataclasses.replace(wanted(tmp_path), changes={"config.data.eval_split": "x"})
    e.data.name = "digits"
    with refused(r"data.name='digits' is not a table, and the model was trained on one: give csv:PATH"):
        job.new_rows(e, table, asked, True)
    e.data.name = "csv:new.csv"
    with refused(r"all rows of another table are taken: leave out --config.data.eval_split"):
        job.new_rows(e, table, asked, True)
    asked = dataclasses.replace(asked, changes={"config.data.on_error": "skip"})
    with refused(r"every row of a table gets a prediction: .* leave out data.on_error=skip"):
        job.new_rows(e, table, asked, True)


def test_rows_of_the_runs_own_table_keep_the_order_and_the_numbers_of_the_file(run, tmp_path):
    """Which rows are held out is drawn, so only their numbers say which they are; a blank line is no row."""
    from tfdist.data.datasets import registry

    lines = [f"{30 + i},{i}.5" for i in range(40)]
    lines[7], lines[30] = "30,7.5,1", "50,"  # bad, and without a target
    (tmp_path / "t.csv").write_text("\n".join(["age,pay", *lines[:20], "", *lines[20:]]))
    e = config.Experiment()
    e.name, e.data.name, e.data.options, e.model.name = "table", f"csv:{tmp_path}/t.csv", "target=pay", "table_mlp"
    e.data.train_split, e.data.eval_split, e.data.on_error = "train[:50%]", "train[50%:]", "skip"
    e.train.label_smoothing = 0.0
    loaded = registry.load(e)
    made_run(tmp_path, e, models.build(e, loaded.spec), loaded.spec)
    done = run("tfdist.predict", "--workdir=.", "--output=p.jsonl")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    numbers = [row["number"] for row in rows]
    assert numbers == sorted(numbers) == [row["target"] - 0.5 for row in rows] and len(rows) == 19
    trained = loaded.train.columns[1] - 0.5
    assert sorted([*numbers, *trained]) == [i for i in range(40) if i not in (7, 30)]


def test_a_file_of_keras_that_does_not_fit(connect, tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.save(tmp_path / "m.keras")
    loaded = trained_model.load(tmp_path / "m.keras")
    with refused(re.escape("has inputs of shape [8, 8, 1], the model takes [4]")):
        compatibility.check_inputs(loaded, config.Experiment(), spec())

    with refused("was saved without a loss and metrics: compile the model before it is saved"):
        compatibility.for_own_loss(loaded, None, "m.keras")


@pytest.mark.parametrize("loss, rows", [
    (keras.losses.CategoricalFocalCrossentropy(), True),
    ("CategoricalCrossentropy", True),
    ("kl_divergence", True),
    ("mse", True),
    ("sparse_categorical_crossentropy", False),
    (lambda y, p: p[:, 0], False),
    (["mse"], False),
])  # fmt: skip
def test_the_loss_of_a_file_says_what_targets_it_wants(loss, rows):
    from tfdist.data.loaded import Loaded
    from tfdist.data.sources import Arrays

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    model.compile("sgd", loss)
    y = np.array([0, 2], "int32")
    source = Arrays((np.zeros((2, 4), "float32"), y))
    found = compatibility.for_own_loss(
        model, Loaded(source, source, 2, spec(shape=(4,), classes=3)), "m.keras"
    ).eval.columns[1]
    np.testing.assert_array_equal(found, np.eye(3)[y] if rows else y)


def test_a_file_that_holds_code_is_not_loaded(tmp_path):
    """Safe mode: a lambda in a model file is somebody's code."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda x: x + 1), keras.layers.Dense(2)])
    model.save(tmp_path / "m.keras")
    with refused(r"m.keras cannot be loaded \(.*it must be a whole .keras file of registered layers"):
        trained_model.load(tmp_path / "m.keras")


# -- rows and files ---------------------------------------------------------


def rows(reader, outputs, targets=(), kind=".jsonl"):
    return prediction_rows.Lines(kind).text(reader.settled(outputs).rows(outputs, targets, 5))


def test_outputs_that_are_no_classes():
    outputs = np.array([[1.5], [np.nan]], "float32")
    assert (
        rows(prediction_rows.OutputReader(None), outputs, np.array([1, 2]), ".csv")
        == "number,output,target\n5,1.5,1\n6,nan,2\n"
    )
    several = {"kind": np.float32([[0.1, 2]]), "size": np.array([7])}
    assert (
        rows(prediction_rows.OutputReader(None), several, kind=".csv")
        == "number,output_kind_0,output_kind_1,output_size\n5,0.1,2.0,7\n"
    )
    assert json.loads(rows(prediction_rows.OutputReader(None), outputs[1:])) == {"number": 5, "output": [None]}
    for outputs, kind in [
        ({"box": np.ones((1, 3)), "box_0": np.ones((1, 1))}, ".csv"),
        ({"a": {"b_c": np.ones(1)}, "a_b": {"c": np.ones(1)}}, ".jsonl"),
    ]:
        with refused(r"two outputs of the model make a column 'output_(box_0|a_b_c)': rename one of them"):
            rows(prediction_rows.OutputReader(None), outputs, kind=kind)


def test_the_loss_of_a_run_tells_what_its_scores_are():
    inputs = keras.Input((4,))
    heads = [keras.layers.Dense(3, "softmax")(inputs) for _ in range(2)]
    model = keras.Model(inputs, keras.layers.Average()(heads))  # which does not end with a softmax
    told = config.Train(loss="sparse_categorical_crossentropy(from_logits=False)")
    assert compatibility.from_logits(model, told) is False
    assert compatibility.from_logits(model, config.Train()) is True and compatibility.from_logits(model, None) is None


def test_scores_that_are_probabilities_are_seen():
    assert not prediction_rows.look_like_probabilities(np.array([[0.25, 0.7], [2.0, -1.0]]))
    assert prediction_rows.look_like_probabilities(np.array([[np.nan, 1], [0.25, 0.75]]))


def test_scores_of_classes():
    """Probabilities as they are, logits through softmax; a score that is not finite is of no class; one-hot targets."""
    reader = prediction_rows.OutputReader(2, ("cat", "dog"), example="{}.png".format)
    scores = np.array([[0.25, 0.75], [np.nan, 0.0]], "float32")
    text = rows(reader, scores, np.eye(2)[[0, 1]], ".csv")
    assert text == "number,example,prediction,name,probability,target\n5,5.png,1,dog,0.75,0\n6,6.png,,,nan,1\n"
    logits = np.log([[1.0, 3.0]]) + 7
    assert json.loads(rows(prediction_rows.OutputReader(2, from_logits=True), logits))["probability"] == pytest.approx(
        0.75
    )


def test_tokens():
    logits = np.zeros((1, 4, 4), "float32")  # as many steps as classes
    logits[0, [0, 1, 2, 3], [3, 1, 2, 0]] = 50
    row = json.loads(rows(prediction_rows.OutputReader(4, from_logits=True), logits, np.array([[3, 1, 0, 2]])))
    assert row == {"number": 5, "prediction": [3, 1, 2, 0], "probability": [1.0] * 4, "target": [3, 1, 0, 2]}
    with refused(r"'output' is a table for each example, and a line of CSV holds none: write a .jsonl"):
        rows(prediction_rows.OutputReader(None), logits, kind=".csv")
    with refused("--scores is for the scores of classes, and this model gives none"):
        rows(prediction_rows.OutputReader(None, scores=True), logits)


def test_a_float_is_read_back_as_it_was():
    values = np.random.default_rng(0).normal(size=1000).astype("float32")
    lines = rows(prediction_rows.OutputReader(None), values).splitlines()
    np.testing.assert_array_equal(np.float32([json.loads(line)["output"] for line in lines]), values)


def test_an_output_is_whole_or_not_there(tmp_path):
    path = tmp_path / "x.csv"
    with pytest.raises(KeyboardInterrupt), prediction_rows.OutputFile(str(path)) as file:
        file.write("half")
        assert list(tmp_path.iterdir())
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with prediction_rows.OutputFile(str(path)) as file:
        file.write("all")
        assert not path.exists()
    assert path.read_text() == "all" and list(tmp_path.iterdir()) == [path]
    with refused(r"x.csv is there already: give --overwrite"):
        prediction_rows.OutputFile(str(path)).check()
    with refused("is not a regular file: give another name"):
        prediction_rows.OutputFile(str(tmp_path)).check()
    with refused("/dev/null is not a regular file: give another name, or - for standard output"):
        prediction_rows.OutputFile("/dev/null", overwrite=True).check()
    with refused("none cannot be written in: choose another one, or make it first"):
        prediction_rows.OutputFile(str(tmp_path / "none" / "x.csv")).check()


def test_an_output_that_cannot_be_written(monkeypatch, tmp_path):
    def full(text):
        raise OSError(errno.ENOSPC, "No space left on device")

    file = prediction_rows.OutputFile(str(tmp_path / "x.csv"))
    with pytest.raises(TrainingError, match=r"x.csv cannot be written \(No space left on device\)"), file:
        file.write("begun")
        monkeypatch.setattr(file, "_file", types.SimpleNamespace(write=full, close=file._file.close))
        file.write("more")
    assert not list(tmp_path.iterdir())


# -- the commands as such ---------------------------------------------------

BAD_FLAGS = [
    ([], "neither --workdir nor --model says which model: give a run folder such as --workdir=runs/digits"),
    (["--workdir=run", "--model=m.keras"], "--workdir and --model name two models"),
    (["--model=m.keras", "--checkpoint=best"],
     "--checkpoint=best is for runs: give their --workdir instead of --model"),
    (["--workdir=run", "--checkpoint=first"], "--checkpoint=first is not understood: use latest, best, or the number"),
    (["--workdir=run", f"--config={REPOSITORY}/configs/digits.py"],
     "the experiment of --workdir is in the run folder: leave out --config"),
    (["--workdir=run", "--config.train.epochs=3"],
     "--config.train.epochs changes nothing once a model is trained: leave it out"),
    (["--workdir=run", "--config.optimizer.name=adam"], "--config.optimizer.name changes nothing once"),
    (["--workdir=run", "--config.data.evalsplit=x"],
     "unknown config field --config.data.evalsplit: did you mean 'eval_split'?"),
    (["--workdir=run", "--resume=never"], "unknown flag --resume"),
    (["--workdr=run"], "unknown flag --workdr: did you mean --workdir=run?"),
    (["--workdir=missing"], "--workdir=missing holds no run (no experiment.json that can be read): check the path"),
    (["--model=missing.keras"], "--model=missing.keras does not exist"),
    (["--model=folder"], "--model=folder is a folder: give it as --workdir"),
    (["--workdir=run", "--overwrite", "--output=-"], "--overwrite without a file in --output has nothing to replace"),
    (["--workdir=missing", "--strategy=tpu"], "--strategy=tpu cannot run here: TensorFlow 2"),
]  # fmt: skip


def test_bad_flags_need_no_tensorflow(tmp_path):
    (tmp_path / "folder").mkdir()
    many_commands.refuses("tfdist.evaluate", BAD_FLAGS, tmp_path, PATH="/usr/bin:/bin")


def test_predict_wants_a_file(tmp_path):
    table = [
        (["--workdir=run"], "--output is missing: give a name that ends in .csv or .jsonl, or - for standard output"),
        (["--workdir=run", "--output=p.txt"], "--output=p.txt is of no kind that is known: give a name"),
    ]
    many_commands.refuses("tfdist.predict", table, tmp_path)


SLOW = """
import os
import keras, numpy as np, tensorflow as tf
calls = []
def wait(x):
    calls.append(0)
    if len(calls) == 4:  # the file has been begun; goes on once the signal is there
        os.write(os.open("ready", os.O_WRONLY), b"r")
        os.read(os.open("go", os.O_RDONLY), 1)
    return x
@keras.saving.register_keras_serializable("slow")
class Wait(keras.layers.Layer):
    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), x.shape)
    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "float32")
def model(spec):
    layers = [keras.Input(spec.shape), Wait(), keras.layers.Flatten(), keras.layers.Dense(10)]
    return keras.Sequential(layers)
"""


@pytest.mark.parametrize("number", first(0, [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_leaves_no_half_file(number, run, tmp_path, monkeypatch):
    """It comes while the fourth batch is computed."""
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    slow = importlib.import_module("slow")
    monkeypatch.delitem(sys.modules, "slow")
    model = slow.model(spec(names=()))
    e = config.Experiment()
    e.model.name = "slow:model"
    made_run(tmp_path, e, model, spec(classes=10, names=()))
    ends = []
    for name in ("ready", "go"):
        os.mkfifo(tmp_path / name)
        ends.append(os.open(tmp_path / name, os.O_RDWR))
    process = run("tfdist.predict", "--workdir=.", "--output=p.csv", "--config.eval.batch_size=8", popen=True)
    try:
        assert select.select([ends[0]], [], [], 60)[0]
        assert [p for p in tmp_path.iterdir() if p.name.startswith(".p.csv.")]
        process.send_signal(number)
        os.write(ends[1], b"g")
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        for end in ends:
            os.close(end)
    assert process.returncode == 143, out + err
    assert f"stopped by {number.name}: nothing was written" in out
    assert not [p.name for p in tmp_path.iterdir() if "p.csv" in p.name]


@pytest.mark.whole
def test_an_image_folder_tells_the_files(run, tmp_path):
    """Also where the images fit into memory."""
    r = np.random.default_rng(0)
    for place in ("train/ant", "train/bee", "test/ant", "test/bee"):
        (tmp_path / "pictures" / place).mkdir(parents=True)
        for i in range(3):
            image = r.integers(0, 256, (9 + i, 10, 3)).astype("uint8")
            keras.utils.save_img(tmp_path / "pictures" / place / f"{i}.png", image, scale=False)
    e = config.Experiment()
    e.data.name, e.data.image_size, e.model.name = f"image_folder:{tmp_path}/pictures", "8", "mlp"
    pictures = spec(shape=(8, 8, 3), maximum=255.0, names=("ant", "bee"))
    (tmp_path / "run").mkdir()
    model = models.build(e, pictures)
    made_run(tmp_path / "run", e, model, pictures)
    done = run("tfdist.predict", "--workdir=run", "--output=p.csv", "--virtual_devices=2", "--config.eval.batch_size=4")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    named = [(r["example"].removeprefix(f"{tmp_path}/pictures/test/"), r["target"]) for r in rows]
    assert sorted(named) == [(f"{name}/{i}.png", str(k)) for k, name in enumerate(("ant", "bee")) for i in range(3)]
    for row in rows:  # that its line is about this very file
        image = ops.resize(tf.constant(keras.utils.img_to_array(keras.utils.load_img(row["example"]))), (8, 8))
        logits = model(np.round(image)[None])[0].numpy()
        assert row["name"] == pictures.names[logits.argmax()]
        assert float(row["probability"]) == pytest.approx(1 / (1 + np.exp(-abs(logits[0] - logits[1]))), abs=1e-3)


@pytest.mark.whole
def test_a_run_is_measured_without_the_file_that_it_began_with(after, trained, tmp_path):
    """`model.weights`, and a file as `model.name`, with their layers that did not train."""
    begun = tmp_path / "begun.keras"
    for name, flags in (
        ("fine", [f"--config.model.weights={begun}", "--config.model.freeze=conv2d"]),
        ("on", [f"--config.model.name={begun}", "--config.model.freeze=conv2d"]),
    ):
        shutil.copy(trained / "run" / "model.keras", begun)
        flags += ["--config.train.epochs=1", "--config.optimizer.warmup=0%", "--notensorboard"]
        flags += TRAIN[:1] * (name == "fine")
        done = after("tfdist.train", f"--workdir={tmp_path / name}", *flags)
        assert done.returncode == 0, done.stdout + done.stderr
        begun.unlink()
        done = after("tfdist.evaluate", f"--workdir={tmp_path / name}", f"--output={tmp_path / name}.json")
        assert done.returncode == 0, done.stdout + done.stderr
        result = json.loads((tmp_path / name / "result.json").read_text())
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert found["weights_sha256"] == result["weights_sha256"]
        assert found["evaluation"] == pytest.approx(result["evaluation"], rel=1e-6)
