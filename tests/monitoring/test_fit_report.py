"""`tfdist.Report`: what it writes about calls of `fit`, judged by their History."""

import copy
import json

import keras
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tfdist
from tfdist.monitoring import fit_report

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(45, 6)).astype("float32"), RNG.integers(0, 3, 45)


def trained(distribution, callbacks, epochs=(2, 3), **options):
    """Trains one model in calls of so many epochs, of three batches of 15."""
    keras.utils.set_random_seed(1)
    with distribution.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)], name="head")
        model.compile("adam", "mse", metrics=["accuracy", keras.metrics.F1Score()])  # a number, one for each class
    y = np.eye(3)[Y]
    options |= dict(validation_data=(X[:15], y[:15]), batch_size=15, verbose=0, callbacks=callbacks)
    histories = [tfdist.fit(model, X, y, distribution=distribution, epochs=n, **options).history for n in epochs]
    return model, histories


def result(folder):
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.whole), 2])
def test_two_calls_have_their_sections_and_train_to_the_same_bits(replicas, connect, tmp_path):
    report = tfdist.Report(tmp_path / "mine")
    plain, histories = trained(connect(replicas), [])
    model, _ = trained(connect(replicas), [copy.deepcopy(report)])  # as KerasTuner passes it
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    found = result(tmp_path / "mine")
    assert (found["status"], found["replicas"], found["calls_made"]) == ("completed", replicas, 2)
    for call, history, epochs in zip(found["calls"], histories, (2, 3), strict=True):
        assert (call["status"], call["epochs"], call["updates"]) == ("completed", epochs, 3 * epochs)
        assert call["examples_seen"] == 45 * epochs and call["model"] == "head"
        assert call["history"].keys() == history.keys()
        for name, values in call["history"].items():
            np.testing.assert_allclose(values, np.asarray(history[name]), rtol=1e-6)
        board = tmp_path / "mine" / "tensorboard" / f"call_{call['call']:04d}"
        for run, prefix in (("train", ""), ("validation", "val_")):
            events = EventAccumulator(str(board / run)).Reload()
            assert [event.step for event in events.Tensors("loss")] == [3 * (i + 1) for i in range(epochs)]
            shown = [float(event.tensor_proto.float_val[0]) for event in events.Tensors("loss")]
            np.testing.assert_allclose(shown, history[f"{prefix}loss"], rtol=1e-6)
    page = (tmp_path / "mine" / "report.html").read_text()
    assert "Call 1: head, completed" in page and "Call 2: head, completed" in page


def test_a_call_that_fails_stays_unfinished_and_a_full_disk_stops_nothing(connect, tmp_path, said):
    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyError("k")

    report = tfdist.Report(tmp_path / "mine")
    with pytest.raises(KeyError):
        trained(connect(1), [report, Fails()])
    assert result(tmp_path / "mine")["status"] == "unfinished"
    trained(connect(1), [report])
    assert [call["status"] for call in result(tmp_path / "mine")["calls"]] == ["unfinished", "completed", "completed"]
    assert "Call 1: head, unfinished" in (tmp_path / "mine" / "report.html").read_text()
    (tmp_path / "file").touch()
    trained(connect(1), [tfdist.Report(tmp_path / "file" / "mine")])
    assert sum("WARNING: no report: " in line for line in said) == 1


def test_a_call_goes_on_where_its_checkpoint_is(connect, tmp_path):
    """A finished one returns at once and is in the report of the new process all the same."""
    for epochs in ([2], [5], [5]):
        options = {"checkpoints": tfdist.Checkpoints(tmp_path / "kept")}
        _, (history,) = trained(connect(1), [tfdist.Report(tmp_path / "mine")], epochs, **options)
        (call,) = result(tmp_path / "mine")["calls"]
        assert (call["epochs"], call["updates"]) == (epochs[0], 3 * epochs[0])
        np.testing.assert_allclose(call["history"]["loss"], history["loss"], rtol=1e-6)


@pytest.mark.whole
def test_thousands_of_calls_take_no_more_room(connect, tmp_path, monkeypatch):
    monkeypatch.setattr(fit_report, "LISTED", 40)
    model, _ = trained(connect(1), [], [1])
    report = tfdist.Report(tmp_path)
    report.set_model(model)
    sizes = []
    for _ in range(fit_report.LISTED + 100):
        report.on_train_begin()
        report.on_epoch_begin(0)
        report.on_train_batch_end(0)
        report.on_epoch_end(0, {"loss": 1.0})
        report.on_train_end()
        report.end("completed", connect(1))
        sizes.append((tmp_path / "report.html").stat().st_size)
    assert sizes[-1] < sizes[fit_report.LISTED] + 5000 and sizes[-1] < 300_000
    found = result(tmp_path)
    assert found["calls_made"] == fit_report.LISTED + 100 and len(found["calls"]) == fit_report.LISTED


def test_a_bucket_is_refused():
    with pytest.raises(tfdist.UserError, match=r"the folder of a Report=gs://b/run is a URL"):
        tfdist.Report("gs://b/run")
