"""The mathematics of an update where training compares with nothing quick: against NumPy.

The sums themselves are compared with Keras' own fit by `test_agreement.py`, and updates with NumPy by
`test_low_precision.py` and `test_optimizers.py`.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.keras_bridge import optimizer_update
from tfdist.keras_bridge.loss import LossTerm
from tfdist.step.replica import StepSums


def test_a_denominator_of_zero_gives_zero_and_not_nan():
    sums = StepSums.of([[tf.ones(2)]], [LossTerm("masked", 1.0, tf.zeros([]), tf.zeros([]))])
    assert sums.losses([]).numpy().tolist() == [0.0]
    assert sums.gradients()[0].numpy().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("option, expected", [
    ({"clipnorm": 1.0}, lambda gs: [g / max(1.0, np.linalg.norm(g)) for g in gs]),
    ({"global_clipnorm": 2.0}, lambda gs: [g * 2.0 / np.linalg.norm(np.concatenate(gs)) for g in gs]),
    ({"clipvalue": 0.5}, lambda gs: [np.clip(g, -0.5, 0.5) for g in gs]), ({}, lambda gs: gs),
])  # fmt: skip
def test_clipping(option, expected):
    grads = [np.float32([3, -4]), np.float32([0.1, 0.2, 0.7])]
    clipped = optimizer_update.clip(
        keras.optimizers.SGD(**option), [tf.constant(grads[0]), None, tf.constant(grads[1])]
    )
    assert clipped[1] is None
    for got, want in zip([clipped[0], clipped[2]], expected(grads)):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_the_gradients_of_regularizers_are_added_before_clipping():
    optimizer, variable = keras.optimizers.SGD(1.0, clipvalue=0.5), keras.Variable(np.float32([1, -2]))
    optimizer.build([variable])
    owned = optimizer_update.OwnedOptimizer(optimizer, [variable])
    with owned.tracing():
        owned.apply([tf.constant([0.5, -1.0])], [tf.constant([0.25, 0.75])], [])
    np.testing.assert_allclose(variable.numpy(), [1 - 0.5, -2 + 0.25], rtol=1e-6)
