"""A dynamic loss scale is halved on replicas where it is on one device, although each has a part of what overflows."""

import functools

import keras
import numpy as np
import pytest

import tfdist


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


@pytest.mark.covering(1)
@pytest.mark.parametrize("replicas", [3, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_as_many_updates_are_left_out_as_on_one_device(connect, optimizer, replicas):
    make = OPTIMIZERS[optimizer]
    loss, *counts = trained(connect(1), make, keras.Model.fit)
    assert counts[0] < 9, "some have overflowed"
    losses, *others = trained(connect(replicas), make, functools.partial(tfdist.fit, distribution=connect(replicas)))
    assert others == counts
    np.testing.assert_allclose(losses, loss, rtol=2e-3)
