"""Early stopping and class weights of the command, against Keras' own and scikit-learn's formula."""

import contextlib
import inspect
import json
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import training_cases
from support.covering import first
from support.refusals import refused

import tfdist
from tfdist.config import schedule
from tfdist.data.augmentation import mixup
from tfdist.data.loaded import Loaded
from tfdist.data.sources import Arrays, Batches, Records, weigh_classes
from tfdist.data.spec import Spec
from tfdist.errors import Interrupted
from tfdist.models import objective
from tfdist.monitoring.recorder import fingerprint
from tfdist.train.early_stopping import Measured, Patience

EPOCHS = 20
MONITORS = [("val_accuracy", "max"), ("val_loss", "min"), ("min val_accuracy", "min")]


def model(distribution, average=False):
    keras.utils.set_random_seed(1)
    with distribution.scope():
        optimizer = keras.optimizers.Adam(0.05, use_ema=average, ema_momentum=0.9 if average else 0.99)
        return training_cases.compiled(training_cases.dense(), optimizer)


DATA = training_cases.images(72)
VALIDATION = training_cases.images(109)[0][72:], training_cases.images(109)[1][:37]  # labels by chance


def train(distribution, stopping, made=None, **options):
    made = made or model(distribution)
    data = dict(batch_size=24, epochs=EPOCHS, shuffle=False, verbose=0, distribution=distribution)
    options |= {"callbacks": [stopping], "check_agreement": "off"}
    history = tfdist.fit(made, *DATA, validation_data=VALIDATION, **data, **options)
    return made, history


@pytest.mark.parametrize("replicas", first(1, [3, 1]))
@pytest.mark.parametrize("monitor, direction", first(1, MONITORS))
def test_it_ends_where_keras_ends(monitor, direction, replicas, connect):
    ours, history = train(connect(replicas), stopping := Patience(monitor, 2))
    theirs = model(connect(1))
    theirs.run_eagerly = True
    name = monitor.split()[-1]
    early = keras.callbacks.EarlyStopping(name, patience=2, mode=direction, restore_best_weights=True)
    options = dict(batch_size=24, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[early])
    kept = theirs.fit(*DATA, validation_data=VALIDATION, **options)
    assert len(history.epoch) == len(kept.epoch) < EPOCHS
    assert training_cases.distance(training_cases.weights(ours), training_cases.weights(theirs)) < 1e-6
    assert stopping.reason == (
        f"early stopping: {name} has not improved for 2 evaluations; the weights are those of epoch "
        f"{early.best_epoch + 1}"
    )


def test_patience_counts_evaluations(connect):
    """With an evaluation every third epoch, in silence between them."""
    stopping = Patience("val_loss", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, history = train(connect(1), stopping, validation_freq=3)
    losses = history.history["val_loss"]
    best = int(np.argmin(losses))
    assert len(losses) == best + 3 and len(history.epoch) == 3 * len(losses)
    assert stopping.best_epoch == 3 * best + 2


@pytest.mark.whole
def test_with_an_average_the_best_weights_are_averaged(connect):
    stopping = Patience("val_loss", 2)
    made, history = train(connect(2), stopping, model(connect(2), average=True), evaluate_ema=True)
    measured = tfdist.evaluate(made, *VALIDATION, distribution=connect(2), batch_size=24)
    assert measured["loss"] == min(history.history["val_loss"]) and len(history.epoch) < EPOCHS


@pytest.mark.whole
def test_resumed_it_ends_the_same(connect, tmp_path):
    whole, history = train(connect(1), stopping := Patience("val_loss", 2))
    reason, again = stopping.reason, 0
    while True:
        checkpoints = tfdist.Checkpoints(tmp_path / "checkpoints", every="1000 steps")
        again += 1
        try:
            stopping, stop = Patience("val_loss", 2), training_cases.StopAt(5)
            made, found = train(connect(1), stopping, checkpoints=checkpoints, should_stop=stop, steps_per_call=3)
            break
        except Interrupted:
            assert again < 50
    assert again > 2
    assert (found.history, fingerprint(made), stopping.reason) == (history.history, fingerprint(whole), reason)
    # and once more, when it had ended already
    checkpoints = tfdist.Checkpoints(tmp_path / "checkpoints")
    made, _ = train(connect(1), stopping := Patience("val_loss", 2), checkpoints=checkpoints)
    assert (fingerprint(made), stopping.reason) == (fingerprint(whole), reason)


def test_a_metric_that_nobody_measures_is_refused_before_the_first_update(connect):
    made = model(connect(1))
    with refused(r"train.monitor=val_auc is not measured: choose one of accuracy, loss, val_acc"):
        train(connect(1), Measured({"train.monitor": "val_auc"}), made)
    assert int(made.optimizer.iterations) == 0
    two = training_cases.compile_two_outputs()
    data = training_cases.two_outputs_data(24)
    with refused(r"train.monitor=val_loose_loss is not measured: choose one of kind_accuracy, "):
        tfdist.fit(two, data, validation_data=data, verbose=0, callbacks=[Patience("val_loose_loss", 1)])


def metrics_of_keras():
    """An instance of each metric of Keras that says whether more of it is better, named as Keras names it."""
    for kind in sorted(filter(inspect.isclass, vars(keras.metrics).values()), key=str):
        for arguments in ((), (0.5,), (3,), (3, [0])):
            with contextlib.suppress(TypeError, ValueError):
                made = kind(*arguments)
                if kind is not keras.metrics.MeanMetricWrapper and hasattr(made, "_direction"):
                    yield made
                break


def test_the_best_of_a_metric_is_what_keras_takes_for_it():
    """The worst epoch was kept as the best by mean_io_u, r2_score and others."""
    metrics = list(metrics_of_keras())
    assert len(metrics) > 30 and any(metric.name.startswith("mean_io_u") for metric in metrics)
    for metric in metrics:
        for name in (metric.name, f"val_{metric.name}", f"val_kind_{metric.name}"):
            assert schedule.better(name).better == {"up": 1, "down": -1}[metric._direction], name


@pytest.mark.parametrize(
    "name, better",
    [("top_loss", -1), ("val_accent_loss", -1), ("val_face_accuracy", 1), ("max val_gain", 1), ("min val_gain", -1)],
)
def test_what_an_output_is_called_says_nothing(name, better):
    assert schedule.better(name) == (name.split()[-1], better)


def test_a_name_that_does_not_tell_is_refused():
    with refused(r"^train.monitor='val_gain' does not tell .*: write min val_gain or max val_ga"):
        schedule.better("val_gain", "train.monitor")


def test_a_run_says_why_it_ended(run, tmp_path):
    flags = ["--config.model.name=mlp", "--config.train.patience=1", "--config.train.monitor=val_accuracy"]
    flags += ["--config.optimizer.learning_rate=0.5", "--config.train.class_weight=balanced", "--notensorboard"]
    done = run("tfdist.train", *flags, "--config.optimizer.warmup=0%", "--workdir=out")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    accuracies = result["history"]["val_accuracy"]
    best = int(np.argmax(accuracies))
    assert result["status"] == "completed" and len(accuracies) == best + 2 < 30
    assert result["reason"] == (
        f"early stopping: val_accuracy has not improved for 1 evaluation; the weights are those of epoch {best + 1}"
    )
    assert result["evaluation"]["accuracy"] == max(accuracies)
    assert f"({result['reason']})" in done.stdout
    weights = next(line for line in done.stdout.splitlines() if line.startswith("tfdist: class weights: "))
    assert [float(words.split()[-1]) for words in weights.split(",")] == pytest.approx([1.0] * 10, abs=0.1)


# -- class weights ----------------------------------------------------------


def loaded(y, classes=4, names=(), batches=False):
    source = Arrays((np.zeros((len(y), 2)), np.asarray(y)))
    if batches:
        source = Batches(tf.data.Dataset.from_tensor_slices(source.columns).batch(3))
    return Loaded(source, source, len(y), Spec((2,), "float32", classes, 1.0, names))


@pytest.mark.parametrize("batches", [False, True])
def test_balanced_is_what_scikit_learn_documents(batches):
    y = np.array([0, 0, 0, 0, 1, 2, 2])
    expected = {0: 7 / (3 * 4), 1: 7 / 3, 2: 7 / (3 * 2)}  # n_samples / (n_classes * np.bincount(y)), classes in y
    assert objective.class_weights("balanced", loaded(y, batches=batches)) == pytest.approx(expected)
    assert objective.class_weights("balanced", loaded(y[:, None], batches=batches)) == pytest.approx(expected)


def by_number(y, **options):
    """One-hot rows of examples by number, whose input is their number."""
    targets = tf.one_hot(y, 3)
    rows = lambda numbers: (numbers, tf.gather(targets, numbers))
    return Records(len(y), rows, lambda stored, seed: (tf.cast(stored[0], tf.float32)[None], stored[1]), **options)


def test_examples_by_number_are_counted_by_their_labels():
    y = np.array([0, 0, 0, 0, 1, 2, 2])
    table = lambda numbers: tf.gather(y, numbers)
    source = Records(7, table, lambda label, seed: (tf.zeros([2]), label), labels=y)
    data = Loaded(source, source, 7, Spec((2,), "float32", 4, 1.0))
    assert objective.class_weights("balanced", data) == pytest.approx({0: 7 / (3 * 4), 1: 7 / 3, 2: 7 / (3 * 2)})
    source = Records(7, table, lambda label, seed: (tf.zeros([2]), label))
    with refused("would have to read all examples first to count them: write the weights"):
        objective.class_weights("balanced", Loaded(source, source, 7, data.spec))


def test_examples_are_weighed_before_they_are_mixed():
    """MixUp of half and half: the loss must be that of the one and the other, each with the weight of its class."""
    half = lambda own, partners, seeds: (own[0], *mixup.weighed(own[1:], partners[1:], tf.fill([3], 0.5)))
    source = weigh_classes(by_number([0, 1, 2], mix=half), {0: 4.0, 2: 0.5})
    ((_, y, weight),) = source.in_order(3)
    np.testing.assert_allclose(weight, [(4 + 1) / 2, (1 + 0.5) / 2, (0.5 + 4) / 2])
    expected = np.array([[2, 0.5, 0], [0, 0.5, 0.25], [2, 0, 0.25]])  # half a weight for each of both classes
    np.testing.assert_allclose(y * weight[:, None], expected)


def test_by_number_and_by_name():
    assert objective.class_weights("", loaded([0, 1])) is None
    assert objective.class_weights("0=3.0, 2=0.2", loaded([0, 1])) == {0: 3.0, 2: 0.2}
    assert objective.class_weights("cat=3, 0=2", loaded([0, 1], 2, ("dog", "cat"))) == {1: 3.0, 0: 2.0}
    assert objective.class_weights("7=3", loaded([0, 1], 2, ("7", "3"))) == {0: 3.0}
    with refused(r"unknown class 'cta' in train.class_weight: did you mean 'cat'"):
        objective.class_weights("cta=3", loaded([0, 1], 2, ("dog", "cat")))
    with refused(r"unknown class '4' in train.class_weight"):
        objective.class_weights("4=3", loaded([0, 1]))


@pytest.mark.parametrize("y, classes", [(np.zeros((4, 7), int), 4), (np.zeros(4), None), (np.zeros(4), 4)])
def test_weights_for_what_has_no_classes(y, classes):
    with refused(r"is for data with one class per example: leave it out"):
        objective.class_weights("balanced", loaded(y, classes))
