"""An experiment of only a model, data and an optimizer trains as in Keras; 0.1 had defaults of its own."""

import keras
import numpy as np
import pytest
from support import training_cases

from tfdist import config
from tfdist.config.commands import config_files
from tfdist.data.datasets import registry
from tfdist.models import build

CONFIG = """
from tfdist.config import Data, Experiment, Model, Optimizer, Train

def get_config(name):
    data = Data(name="csv:table.csv", options="target=y, classify=False", eval_split="train", shuffle=False)
    return Experiment(model=Model(name="table_mlp"), data=data, optimizer=Optimizer(name=name))
"""


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = np.random.default_rng(0).normal(size=(75, 4))
    lines = ["a,b,c,y", *(",".join(f"{value:.6f}" for value in row) for row in rows)]
    (tmp_path / "table.csv").write_text("\n".join(lines))
    (tmp_path / "mine.py").write_text(CONFIG)
    scope = {}
    exec(CONFIG, scope)
    return scope["get_config"]


@pytest.mark.parametrize("name", [pytest.param("adam", marks=pytest.mark.whole), "adamw", "sgd"])
def test_what_is_not_written_is_as_in_keras(run, tmp_path, table, name):
    experiment = table(name)
    data = registry.load(experiment)
    model = build.build(experiment, data.spec)
    model.compile(optimizer=name, loss="mse")
    model.fit(*data.train.columns, shuffle=False, verbose=0)
    done = run("tfdist.train", f"--config=mine.py:{name}", "--workdir=out", "--progress=none")
    assert done.returncode == 0, done.stderr
    trained = keras.saving.load_model(tmp_path / "out/model.keras")
    assert training_cases.distance(training_cases.weights(trained), training_cases.weights(model)) < 1e-6
    # What 0.1 had refused, options of SGD with another optimizer, is nothing that has changed.
    told = [line for line in done.stdout.splitlines() if "defaults have changed" in line]
    assert len(told) == (name == "sgd"), done.stdout
    assert all(
        "optimizer.warmup is '0 steps' (was '2 epochs'), optimizer.weight_decay is 0.0 (was 0.02)" in t for t in told
    )


def test_fields_that_are_written_rely_on_no_default(table):
    experiment = config.Experiment(name="x", optimizer=config.Optimizer(learning_rate=0.0, schedule="constant"))
    experiment.optimizer.warmup = "0 steps"
    experiment.train.batch_size = 32
    told = " ".join(config.take_changed_defaults(experiment))
    for field in ("name", "learning_rate", "schedule", "warmup", "batch_size"):
        assert f"{field} is" not in told
    assert "optimizer.options is ''" in told and "train.epochs is 1 (was 30)" in told
    assert not config.take_changed_defaults(experiment) and type(experiment.train.epochs) is int


def test_shipped_experiments_rely_on_no_default():
    for name, path in config_files.files("config").items():
        scope = {}
        exec(path.read_text(), scope)
        assert not config.take_changed_defaults(scope["get_config"]()), name
