"""Run folders and names that earlier versions have written go on working: run_folder_0.1.0/ holds two of them.

Both are of one experiment: digits, a small MLP with dropout, Adam, averaged weights, early stopping and the best
checkpoint. `interrupted` was stopped by SIGTERM after update 40 of 60, in the middle of the second epoch.
"""

import json
import pathlib
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import training_cases

import tfdist
from tfdist import config
from tfdist.checkpoints import files, resume, training_state
from tfdist.config import schedule
from tfdist.data import spec_file
from tfdist.errors import UserError
from tfdist.inference import job, trained_model
from tfdist.models import optimizers
from tfdist.monitoring import recorder

RUNS = pathlib.Path(__file__).parent / "run_folder_0.1.0"


def read(folder, name):
    return json.loads((folder / name).read_text())


def place(name):
    """Kind and number of a tensor: Keras counts names up within a process."""
    return "/".join(name.split("/")[:3])


def request(folder, checkpoint=""):
    return trained_model.ModelRequest(str(folder), "", checkpoint, config.Experiment(), {})


@pytest.fixture
def runs(tmp_path):
    return pathlib.Path(shutil.copytree(RUNS, tmp_path / "runs"))


@pytest.mark.whole
def test_an_interrupted_run_goes_on_to_the_end_of_one_that_was_not(run, runs, tmp_path):
    """The processor that began it may round otherwise than this one, so its end is compared to some digits."""
    same = [f"--{name}={value}" for name, value in config.flat(read(runs / "interrupted", "experiment.json")).items()]
    same += ["--strategy=default", "--progress=none", "--notensorboard"]
    for folder in ("runs/interrupted", "fresh"):
        done = run("tfdist.train", f"--workdir={folder}", *same)
        assert done.returncode == 0, done.stderr
    resumed, fresh = (read(tmp_path / folder, "result.json") for folder in ("runs/interrupted", "fresh"))
    assert resumed["status"] == fresh["status"] == "completed"
    assert (resumed["resumed_from"], resumed["updates"], resumed["epochs"]) == (40, 60, 2)
    for name, values in fresh["history"].items():
        np.testing.assert_allclose(resumed["history"][name], values, rtol=1e-6, err_msg=name)
    assert resumed["evaluation"] == pytest.approx(fresh["evaluation"], rel=1e-6)
    pairs = [keras.saving.load_model(tmp_path / f / "model.keras") for f in ("runs/interrupted", "fresh")]
    for ours, theirs in zip(*(model.get_weights() for model in pairs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name, checkpoint", [("interrupted", "40"), ("completed", "60")])
def test_the_state_is_loaded_to_the_last_bit(name, checkpoint, runs, connect):
    """Weights, optimizer, averages and random streams."""
    folder = runs / name
    experiment = trained_model.read_experiment(request(folder))
    spec = spec_file.read(folder)
    # The weights with which a run ends there are the averaged ones, whose checksum the run has left.
    weights = trained_model.read_weights(request(folder, checkpoint), experiment, lambda: job.built(experiment, spec))
    model = job.built(experiment, spec)
    model.set_weights(weights[1])
    assert recorder.fingerprint(model)[0] == read(folder, "result.json")["weights_sha256"]

    path = str(folder / "checkpoints" / checkpoint / files.TENSORS)
    stored = tf.train.load_checkpoint(path)
    model.optimizer = optimizers.build(experiment, schedule.make(experiment, 1437, 1))
    model.optimizer.build(model.trainable_variables)
    # The sums of metrics and what callbacks hold have their place in a run only.
    tensors = {name: t for name, t in training_state.read(path).items() if name.split("/")[1] in ("model", "optimizer")}
    none = keras.callbacks.CallbackList()
    training_state.restore(model, connect(1), none, tensors)
    captured = {place(name): np.asarray(t) for name, t in training_state.capture(model, connect(1), none).items()}
    assert captured.keys() == {place(name) for name in tensors} and len(tensors) > 10
    for name in tensors:
        np.testing.assert_array_equal(captured[place(name)], stored.get_tensor(name), err_msg=name)


@pytest.mark.whole
def test_a_completed_run_is_measured_as_it_measured_itself(run, runs):
    done = run("tfdist.evaluate", "--workdir=runs/completed", "--output=-")
    assert done.returncode == 0, done.stderr
    told, result = json.loads(done.stdout), read(runs / "completed", "result.json")
    assert told["evaluation"] == pytest.approx(result["evaluation"], rel=1e-6)
    assert told["weights_sha256"] == result["weights_sha256"]


FORMER = ("config.train.shards", "config.data.broken")


def test_what_earlier_versions_recorded_is_understood(said):
    recorded = json.loads(json.dumps({"name": "old", "train": {"shards": 4}, "data": {"broken": "skip"}}))
    experiment = trained_model.experiment_from(recorded)
    assert (experiment.train.virtual_replicas, experiment.data.on_error) == (4, "skip")
    here = config.flat(experiment)
    assert here == {**config.flat(config.Experiment()), **config.flat(recorded)}
    former = {name: text for name, text in here.items() if name not in map(config.current_name, FORMER)}
    assert resume.differences(here, former | {"config.train.shards": "4", "config.data.broken": "skip"}) == []
    assert resume.differences(here, former | {"config.train.shards": "8", "config.data.broken": "skip"})
    assert said == []


def test_a_former_name_suggests_the_present_one(run):
    done = run("tfdist.train", "--config.train.shards=4")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "tfdist: error: unknown config field --config.train.shards: did you mean 'virtual_replicas'? Known are "
    )
    with pytest.raises(UserError, match=r"^predict\(\) has no option 'shards': did you mean 'virtual_replicas'\?"):
        tfdist.predict(training_cases.dense(), np.ones((4, 4, 4, 1)), shards=2)
