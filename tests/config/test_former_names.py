"""Fields and arguments under the names that 0.1 had for them: accepted for one release, with a warning."""

import json

import numpy as np
import pytest
from support import training_cases

import tfdist
from tfdist import config
from tfdist.checkpoints import resume
from tfdist.config.commands import command_line
from tfdist.errors import UserError
from tfdist.inference import trained_model
from tfdist.sweep import space

WARNING = "WARNING: train.shards is deprecated and will be removed in the next release: use train.virtual_replicas"


def test_a_config_file_may_use_the_former_names(said):
    experiment = config.Experiment(train=config.Train(epochs=2, shards=4), data=config.Data(broken="skip"))
    assert (experiment.train.virtual_replicas, experiment.data.on_error, experiment.train.epochs) == (4, "skip", 2)
    assert said[0] == WARNING and len(said) == 2
    experiment.train.shards = 6
    assert (experiment.train.virtual_replicas, experiment.train.shards) == (6, 6)
    assert said[2:] == [WARNING]
    assert "config.train.shards" not in config.flat(experiment)


def test_both_names_must_say_the_same():
    with pytest.raises(UserError, match=r"^train.shards=4 and train.virtual_replicas=8 differ, .*: give train.virtual"):
        config.Train(shards=4, virtual_replicas=8)
    assert config.Train(shards=4, virtual_replicas=4).virtual_replicas == 4
    model = training_cases.dense()
    with pytest.raises(UserError, match=r"^shards=2 and virtual_replicas=4 differ, .*: give virtual_replicas alone$"):
        tfdist.predict(model, np.ones((4, 4, 4, 1)), shards=2, virtual_replicas=4)


@pytest.mark.parametrize("form", [["--config.train.shards=4"], ["-config.train.shards", "4"]])
def test_a_command_line_may_use_the_former_names(said, form):
    argv = ["train", *form, "--config.data.broken=skip"]
    command_line.replace_former_names(argv)
    expected = "--config.train.virtual_replicas"
    assert argv[1:-1] == ([f"{expected}=4"] if len(form) == 1 else [expected, "4"])
    assert argv[-1] == "--config.data.on_error=skip"
    assert said[0] == WARNING.replace("train.", "--config.train.") and len(said) == 2


def test_a_command_that_gives_both_is_refused(run):
    done = run("tfdist.train", "--config.train.shards=4", "--config.train.virtual_replicas=8")
    assert done.returncode == 2
    assert done.stderr == (
        "tfdist: error: --config.train.shards='4' and --config.train.virtual_replicas='8' differ, and "
        "--config.train.shards is the deprecated name of --config.train.virtual_replicas: give "
        "--config.train.virtual_replicas alone\n"
    )


def test_a_sweep_may_use_the_former_names():
    assert space.parse("train.shards=2,4") == {"train.virtual_replicas": [2, 4]}


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


FORMER = ("config.train.shards", "config.data.broken")


def test_fit_evaluate_and_predict_take_the_former_argument(said, connect):
    model = training_cases.compiled(training_cases.dense())
    x, y = np.ones((8, 4, 4, 1), "float32"), np.zeros(8, "int64")
    options = dict(shards=2, batch_size=8, verbose=0, distribution=connect(1))
    tfdist.fit(model, x, y, **options)
    tfdist.evaluate(model, x, y, **options)
    tfdist.predict(model, x, **options)
    assert sum(line == WARNING.replace("train.", "") for line in said) == 3
