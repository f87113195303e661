"""Names that 0.1 had for fields and arguments: understood in what it recorded, refused in what is new."""

import json

import numpy as np
import pytest
from support import training_cases

import tfdist
from tfdist import config
from tfdist.checkpoints import resume
from tfdist.errors import UserError
from tfdist.inference import trained_model

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
