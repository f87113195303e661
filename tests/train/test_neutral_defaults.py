"""An experiment of only a model, data and an optimizer trains as in Keras."""

import keras
import numpy as np
import pytest
from support import training_cases
from support.covering import first

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


@pytest.mark.parametrize("name", first(1, ["sgd", "adam", "adamw"]))
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
