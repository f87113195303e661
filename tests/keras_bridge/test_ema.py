"""Averaged weights (EMA) are what is measured during training, and nothing else of the training notices."""

import json

import keras
import numpy as np
import pytest
from support import training_cases

import tfdist
from tfdist.checkpoints import files
from tfdist.errors import Interrupted
from tfdist.keras_bridge import ema, keras_internals
from tfdist.monitoring.recorder import fingerprint

pytestmark = pytest.mark.whole

EPOCHS = 4
VALIDATION = training_cases.images(37)


def model(distribution, scaled=False, **options):
    """BatchNorm makes the statistics of each replica its own."""
    keras.utils.set_random_seed(1)
    with distribution.scope():
        layers = [keras.Input((4, 4, 1)), keras.layers.Conv2D(3, 3), keras.layers.BatchNormalization()]
        made = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(5)])
        optimizer = keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.9, **options)
        return training_cases.compiled(made, keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer)


def train(distribution, epochs=EPOCHS, made=None, **options):
    made = made or model(distribution)
    options = {"validation_data": VALIDATION, "evaluate_ema": True, "steps_per_call": 2} | options
    data = dict(batch_size=24, distribution=distribution, epochs=epochs, verbose=0)
    return made, tfdist.fit(made, *training_cases.images(109), check_agreement="off", **data, **options).history


@pytest.mark.parametrize("replicas", [1, 3])
def test_each_epoch_measures_what_a_training_that_ends_there_would(replicas, connect):
    distribution = connect(replicas)
    made, history = train(distribution)
    for epochs in (1, EPOCHS):  # its end puts the average into the weights in another way
        ended, _ = train(distribution, epochs, validation_data=None)
        found = tfdist.evaluate(ended, *VALIDATION, distribution=distribution, batch_size=24)
        assert (history["val_loss"][epochs - 1], history["val_accuracy"][epochs - 1]) == (
            found["loss"],
            found["accuracy"],
        )
    raw, plain = train(distribution, evaluate_ema=False)
    assert plain["val_loss"] != history["val_loss"]
    assert (plain["loss"], fingerprint(raw)) == (history["loss"], fingerprint(made)), "measuring has changed something"


def test_the_api_measures_what_keras_measures(connect):
    """Keras' fit validates the weights as they are, and its callback SwapEMAWeights the average; so does tfdist's."""
    case = next(c for c in training_cases.CASES if c.name == "weights averaged")

    def of_keras(callbacks):
        made = training_cases.build(case, connect(1), "float32")
        x, y = training_cases.images(109)
        options = dict(batch_size=24, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
        return made.fit(x, y, validation_data=VALIDATION, **options).history

    def ours(**options):
        made = training_cases.build(case, connect(1), "float32")
        return train(connect(1), made=made, shuffle=False, **{"evaluate_ema": False} | options)[1]

    np.testing.assert_allclose(ours()["val_loss"], of_keras([])["val_loss"], rtol=1e-5)
    swapped = of_keras([keras.callbacks.SwapEMAWeights()])["val_loss"]
    np.testing.assert_allclose(ours(callbacks=[keras.callbacks.SwapEMAWeights()])["val_loss"], swapped, rtol=1e-5)
    np.testing.assert_allclose(ours(evaluate_ema=True)["val_loss"], swapped, rtol=1e-5)


@pytest.mark.parametrize("replicas", [3, 1])
def test_they_are_exchanged_bit_for_bit_on_every_replica(replicas, connect):
    distribution = connect(replicas)
    made, _ = train(distribution, 1, evaluate_ema=False)
    optimizer, weights, rng = made.optimizer, made.trainable_variables, np.random.default_rng(0)
    copies = [c for v in weights for c in keras_internals.copies(v)]
    others = [c for v in keras_internals.weight_averages(optimizer, weights) for c in keras_internals.copies(v)]
    for copy in [*copies, *others]:  # each replica another, with what arithmetic would not bring back
        copy.assign(rng.normal(size=copy.shape) * 10.0 ** rng.integers(-30, 30, copy.shape))
    before = [c.numpy() for c in copies], [c.numpy() for c in others]
    with pytest.raises(ZeroDivisionError), ema.instead(optimizer, made.trainable_variables):
        for copy, other in zip(copies, before[1]):
            np.testing.assert_array_equal(copy.numpy(), other)
        raise ZeroDivisionError
    for copy, kept in zip([*copies, *others], [*before[0], *before[1]]):
        np.testing.assert_array_equal(copy.numpy(), kept)


def test_stopped_within_a_validation_and_resumed(connect, tmp_path):
    whole = train(connect(1))
    for calls in range(6, 30, 3):
        checkpoints = tfdist.Checkpoints(tmp_path / "checkpoints", every="1000 steps", best="val_loss")
        try:
            done = train(connect(1), should_stop=training_cases.StopAt(calls), checkpoints=checkpoints)
            break
        except Interrupted:
            pass
    assert calls > 6
    assert (fingerprint(done[0]), done[1]) == (fingerprint(whole[0]), whole[1])
    best = 5 * (1 + int(np.argmin(whole[1]["val_loss"])))
    assert best in [files.update_of(p) for p in files.newest_first(tmp_path / "checkpoints")]


def test_without_a_single_update_there_is_no_average(connect):
    """Loss scaling skips what overflows: the average is then zeros, and must not become the weights."""
    made = model(connect(1), scaled=True)
    made.optimizer.build(made.trainable_variables)
    made.optimizer.dynamic_scale.assign(float("inf"))
    first = np.array(made.trainable_variables[0])
    train(connect(1), 1, made=made)
    np.testing.assert_array_equal(made.trainable_variables[0], first)


def test_a_run_is_measured_by_what_it_ends_with(run, tmp_path):
    flags = ["--config.model.name=mlp", "--config.train.epochs=2", "--config.optimizer.ema_momentum=0.99"]
    done = run("tfdist.train", *flags, "--config.optimizer.warmup=0%", "--workdir=out", "--notensorboard")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["evaluation"]["loss"] == result["history"]["val_loss"][-1]
