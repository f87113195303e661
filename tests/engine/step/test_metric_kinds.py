"""Which metrics must see a whole batch is found out by trying them, before anything is trained."""

import keras
import pytest
from support.keras_programs.metrics import Highest, Lowest

from tfdist.engine.step import metrics
from tfdist.models import whole_metrics


@pytest.mark.parametrize(
    "metric, outputs",
    [
        (Highest, 1.0),
        (Highest, -1.0),  # no row is above the zero with which it begins
        (Lowest, 1.0),
        (keras.metrics.MeanSquaredError, -1.0),
        (keras.metrics.Poisson, 1.0),  # of numbers below zero it is NaN
    ],
)
def test_a_metric_that_does_not_add_up_is_noticed(metric, outputs):
    y, y_pred = keras.ops.ones((8, 2)), keras.ops.full((8, 2), outputs)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", metrics=[metric()])
    metrics.create_variables(model, y, y_pred)
    metrics.look(model, y, y_pred)
    found = [type(m) for m in whole_metrics.of(model)]
    assert found == ([metric] if metric in (Highest, Lowest) else [])
