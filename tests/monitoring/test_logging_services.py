"""The callbacks for logging services that docs/seeing.md shows, each with its service offline, if it is installed."""

import json
import pathlib
import re
import types

import keras
import numpy as np
import pytest

import tfdist
from tfdist.trainer.callbacks import is_chief_only

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def services():
    """The module that the page asks to write."""
    (text,) = re.findall(r"^```python\n(import json.*?)^```", (ROOT / "docs/seeing.md").read_text(), re.S | re.M)
    module = types.ModuleType("services")
    exec(text, vars(module))
    return module


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "experiment.json").write_text(json.dumps({"seed": 7, "train": {"epochs": 3}}))
    return tmp_path


def trained(*callbacks, fit=tfdist.fit):
    """Trains for three epochs; returns the losses."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.arange(12, dtype="float32").reshape(4, 3)
    return fit(model, x, x[:, :1], epochs=3, callbacks=[*callbacks], verbose=0).history["loss"]


def test_they_are_called_on_the_chief_alone(services):
    for made in (services.WeightsAndBiases("x"), services.MLflow("x", "y")):
        assert is_chief_only(made)


def test_weights_and_biases(services, folder, monkeypatch):
    pytest.importorskip("wandb")
    logged, init = [], __import__("wandb").init

    def watched(**options):
        run = init(**options)
        assert options["config"]["seed"] == 7 and run.offline
        log = run.log
        monkeypatch.setattr(run, "log", lambda data, step: (logged.append((step, data["loss"])), log(data, step=step)))
        return run

    monkeypatch.setattr("wandb.init", watched)
    losses = trained(services.WeightsAndBiases(str(folder), project="digits", mode="offline"))
    assert logged == list(enumerate(losses))
    assert list(folder.glob("wandb/offline-run-*/*.wandb")), "what wandb sync would send"


def test_mlflow(services, folder):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{folder}/mlflow.db"
    pytest.importorskip("mlflow.store.tracking.sqlalchemy_store")  # which mlflow-skinny has without what it needs
    losses = trained(services.MLflow(str(folder), uri))
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tfdist").experiment_id])
    assert run.data.params == {"seed": "7", "train.epochs": "3"} and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in sorted(history, key=lambda m: m.step)] == list(enumerate(losses))


def test_autolog_and_keras_callbacks_under_patch_keras(connect, folder, monkeypatch):
    """As with Keras: the metrics of each epoch of `model.fit`, on two replicas."""
    mlflow, wandb = pytest.importorskip("mlflow"), pytest.importorskip("wandb")
    pytest.importorskip("mlflow.store.tracking.sqlalchemy_store")
    from wandb.integration.keras import WandbMetricsLogger

    uri, logged = f"sqlite:///{folder}/mlflow.db", []
    mlflow.set_tracking_uri(uri)
    experiment = mlflow.set_experiment("patched").experiment_id
    monkeypatch.chdir(folder)
    tfdist.patch_keras(connect(2))
    try:
        mlflow.tensorflow.autolog(log_models=False)
        with wandb.init(project="digits", mode="offline", dir=folder):
            monkeypatch.setattr("wandb.log", lambda data: logged.append((data["epoch/epoch"], data["epoch/loss"])))
            losses = trained(WandbMetricsLogger(), fit=lambda model, *data, **options: model.fit(*data, **options))
    finally:
        mlflow.tensorflow.autolog(disable=True)
        tfdist.unpatch_keras()
    assert logged == list(enumerate(losses))
    (run,) = mlflow.MlflowClient(uri).search_runs([experiment])
    history = mlflow.MlflowClient(uri).get_metric_history(run.info.run_id, "loss")
    assert [m.value for m in sorted(history, key=lambda m: m.step)] == losses
    assert float(run.data.params["opt_learning_rate"]) == pytest.approx(0.01) and run.data.params["epochs"] == "3"
