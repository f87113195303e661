"""Fused batch normalization computes what Keras' own does: outputs, gradients and moving statistics."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.training_cases import all_same

import tfdist
from tfdist.keras_bridge import batch_norm

L = keras.layers
RENORM = "renorm" in inspect.signature(L.BatchNormalization).parameters
X = np.random.default_rng(0).normal(2, 3, (4, 5, 5, 3)).astype("float32")


def measured(model, replaced):
    """Everything that a forward and a backward pass give, and the ops that they took."""
    x = tf.constant(X)

    @tf.function
    def passes():
        with batch_norm.fused(replaced), tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=True)
            total = tf.reduce_sum(tf.sin(y))
        return y, *tape.gradient(total, [x, *(v.value for v in model.trainable_variables)])

    concrete = passes.get_concrete_function()
    ops = {op.type for op in concrete.graph.get_operations()}
    return [*(t.numpy() for t in concrete()), *model.get_weights()], "FusedBatchNormV3" in ops


@pytest.mark.parametrize("center, scale", [(True, True), (True, False), (False, True)])
def test_same_as_keras(center, scale):
    layer = L.BatchNormalization(center=center, scale=scale, momentum=0.6)
    model = keras.Sequential([keras.Input(X.shape[1:]), layer])
    start = [w * 1.3 + 0.1 for w in model.get_weights()]
    found = []
    for replaced in (None, model):
        model.set_weights(start)
        values, was_fused = measured(model, replaced)
        assert was_fused is (replaced is not None)
        found.append(values)
    all_same(found[1], found[0], rtol=1e-5, atol=2e-5)
    assert "call" not in vars(layer)


class _Own(L.BatchNormalization):
    pass


@pytest.mark.parametrize("layer", [
    lambda: L.BatchNormalization(synchronized=True),
    pytest.param(lambda: L.BatchNormalization(renorm=True), marks=pytest.mark.skipif(not RENORM, reason="older Keras")),
    lambda: L.BatchNormalization(axis=1), lambda: L.BatchNormalization(epsilon=1e-6),
    lambda: L.BatchNormalization(trainable=False), lambda: L.BatchNormalization(dtype="float64"), lambda: _Own(),
])  # fmt: skip
def test_left_to_keras(layer):
    model = keras.Sequential([keras.Input(X.shape[1:]), layer()])
    assert measured(model, model)[1] is False


@pytest.mark.whole
def test_a_fit_agrees_with_keras():
    keras.utils.set_random_seed(0)
    layers = [L.Conv2D(4, 3), L.BatchNormalization(), L.Activation("tanh"), L.Flatten(), L.Dense(2)]
    model = keras.Sequential([keras.Input(X.shape[1:]), *layers])
    start, y = model.get_weights(), np.array([0, 1, 1, 0])
    ends = []
    for fit in (lambda m, **k: m.fit(X, y, **k), lambda m, **k: tfdist.fit(m, X, y, **k)):
        model.set_weights(start)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        history = fit(model, batch_size=4, epochs=3, shuffle=False, verbose=0).history
        ends.append([*model.get_weights(), np.array(history["loss"])])
    all_same(*ends, rtol=1e-5, atol=1e-6)


@pytest.mark.whole
def test_a_micro_batch_without_rows_anywhere_leaves_the_averages(connect):
    """The last batch has one row and two micro-batches: on several replicas the second moved averages towards 0."""
    x = np.random.default_rng(1).normal(2, 3, (21, 4)).astype("float32")
    found = []
    for replicas in (1, 2):
        distribution = connect(replicas)
        with distribution.scope():
            model = keras.Sequential([keras.Input((4,)), L.BatchNormalization(momentum=0.7, synchronized=True)])
            model.compile("sgd", "mse")
        data = {"batch_size": 10, "accumulate": 2, "shuffle": False, "distribution": distribution}
        tfdist.fit(model, (x, x), epochs=2, verbose=0, **data)
        found.append(model.get_weights())
    all_same(*found, rtol=1e-5)
