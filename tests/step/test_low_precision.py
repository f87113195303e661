"""Weights in bfloat16 against NumPy: rates and corrections are in float32; and a loss scale is that of one device."""

import functools

import keras
import ml_dtypes
import numpy as np
import pytest
from support.covering import first

import tfdist
from tfdist.keras_bridge import optimizer_update

RATE, UPDATES = 0.03, 6


def rounded(value):
    """The nearest bfloat16, as a float32 to go on with."""
    return np.asarray(value, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def adam(weights, gradient, decay):
    m = v = np.zeros_like(weights)
    for t in range(1, UPDATES + 1):
        weights = rounded(weights - weights * np.float32(RATE * decay)) if decay else weights
        m, v = np.float32(0.9) * m + np.float32(0.1) * gradient, np.float32(0.999) * v + np.float32(0.001) * gradient**2
        rate = RATE * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        weights = rounded(weights - np.float32(rate) * m / (np.sqrt(v) + np.float32(1e-7)))
        m, v = rounded(m), rounded(v)
    return weights


def momentum(weights, gradient, nesterov):
    velocity = np.zeros_like(weights)
    for _ in range(UPDATES):
        step = -np.float32(RATE) * gradient
        velocity = np.float32(0.9) * velocity + step
        weights = rounded(weights + (np.float32(0.9) * velocity + step if nesterov else velocity))
        velocity = rounded(velocity)
    return weights


optimizers = keras.optimizers
CASES = {
    "adam": (lambda: optimizers.Adam(RATE), lambda w, g: adam(w, g, 0)),
    "adamw": (lambda: optimizers.AdamW(RATE, weight_decay=0.1), lambda w, g: adam(w, g, 0.1)),
    "sgd": (lambda: optimizers.SGD(RATE, momentum=0.9), lambda w, g: momentum(w, g, False)),
    "nesterov": (lambda: optimizers.SGD(RATE, momentum=0.9, nesterov=True), lambda w, g: momentum(w, g, True)),
}


@pytest.mark.parametrize("replicas", first(1, [2, 1]))
@pytest.mark.parametrize("case", first(1, ["adam", "nesterov", "adamw", "sgd"]))
def test_updates_are_those_of_numpy(connect, case, replicas, said):
    """Adam's beta_2 is 1 in bfloat16: the second update divided zero by zero."""
    optimizer_update._warn_of_low_precision.cache_clear()
    make, expected = CASES[case]
    distribution = connect(replicas)
    keras.config.set_dtype_policy("bfloat16")
    x = np.array([[0.5, -1.0, 2.0, 0.25]] * 4, np.float32)
    with distribution.scope():
        layer = keras.layers.Dense(1, use_bias=False)
        model = keras.Sequential([keras.Input((4,)), layer])
        # The mean of the outputs is linear: its gradient is x, whatever the weights are.
        model.compile(make(), lambda y_true, y_pred: y_pred)
    start = rounded([[0.5], [-0.25], [1.0], [0.125]])
    layer.set_weights([start])
    tfdist.fit(
        model, x, np.zeros((4, 1)), batch_size=4, epochs=UPDATES, distribution=distribution, verbose=0, shuffle=False
    )
    assert model.trainable_variables[0].dtype == "bfloat16"
    ours = np.asarray(layer.get_weights()[0], np.float32)
    np.testing.assert_array_equal(ours, expected(start, x[:1].T))
    warned = [line for line in said if "the weights are kept in bfloat16" in line]
    assert len(warned) == 1 and "use the policy mixed_bfloat16" in warned[0]


def test_an_optimizer_that_rounds_its_own_numbers_is_named(connect, said):
    optimizer_update._warn_of_low_precision.cache_clear()
    keras.config.set_dtype_policy("bfloat16")
    with connect(2).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizers.Adamax(RATE), "mse")
    tfdist.fit(model, np.ones((4, 4)), np.zeros((4, 1)), batch_size=4, distribution=connect(2), verbose=0)
    assert any("Adamax rounds its own numbers" in line and "or Adam, AdamW or SGD" in line for line in said)


def trained(distribution, optimizer, by):
    random = np.random.RandomState(0)
    x = random.randn(45, 4).astype("float32")
    y = (x @ random.randn(4, 2)).astype("float32")
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with distribution.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(2)])
            model.compile(optimizer(), "mse", run_eagerly=by is keras.Model.fit)
        history = by(model, x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    number = lambda variable: float(keras.ops.convert_to_numpy(variable))
    optimizer = model.optimizer
    return history.history["loss"], number(optimizer.inner_optimizer.iterations), number(optimizer.dynamic_scale)


OPTIMIZERS = {
    "fused": lambda: keras.optimizers.Adam(0.05, clipnorm=0.5),
    "of Keras": lambda: keras.optimizers.Lion(0.01),
    "large scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**17),
}


@pytest.mark.parametrize("replicas", first(1, [2, 3]))
@pytest.mark.parametrize("optimizer", first(1, OPTIMIZERS))
def test_as_many_updates_are_left_out_as_on_one_device(connect, optimizer, replicas):
    make = OPTIMIZERS[optimizer]
    loss, *counts = trained(connect(1), make, keras.Model.fit)
    assert counts[0] < 9, "some have overflowed"
    options = {"distribution": connect(replicas), "check_agreement": "off"}
    losses, *others = trained(connect(replicas), make, functools.partial(tfdist.fit, **options))
    assert others == counts
    np.testing.assert_allclose(losses, loss, rtol=2e-3)
