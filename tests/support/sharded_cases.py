"""Tiny experiments that are trained with shards, and all that must be the same bits."""

import hashlib

import keras
import numpy as np

import tfdist
from support import training_cases
from support.training_cases import Case, L, images

SHARDS = 8


def dropout():
    return training_cases.compiled(
        keras.Sequential([keras.Input((4, 4, 1)), L.Flatten(), L.Dense(12, "tanh"), L.Dropout(0.3), L.Dense(5)])
    )


def batch_norm():
    layers = [L.Conv2D(3, 3), L.BatchNormalization(momentum=0.7), L.Activation("relu"), L.Flatten(), L.Dense(5)]
    return training_cases.compiled(keras.Sequential([keras.Input((4, 4, 1)), *layers]))


class Always(L.Layer):
    """Dropout in predictions, too."""

    def __init__(self):
        super().__init__()
        self.generator = keras.random.SeedGenerator(4)

    def call(self, x):
        return keras.random.dropout(x, 0.5, seed=self.generator)


def all_random():
    """Random layers of several kinds, one of them used twice in a pass, and one that draws in predictions too."""
    inputs = keras.Input((4, 4, 1))
    again = L.GaussianDropout(0.2, seed=5)
    x = L.Flatten()(L.RandomFlip()(inputs))
    x = again(L.Dense(8, "tanh")(again(x)))
    return training_cases.compiled(keras.Model(inputs, L.Dense(5)(Always()(x))))


def together():
    """Dropout, BatchNorm, clipping and averaged weights in one model."""
    layers = [L.Flatten(), L.Dense(12), L.BatchNormalization(momentum=0.7), L.Dropout(0.3), L.Dense(5)]
    optimizer = keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.8, global_clipnorm=0.05)
    return training_cases.compiled(keras.Sequential([keras.Input((4, 4, 1)), *layers]), optimizer)


def wide():
    """A tensor that is too large to travel with others."""
    return training_cases.compiled(
        keras.Sequential([keras.Input((4, 4, 1)), L.Flatten(), L.Dense(1500, "tanh"), L.Dense(12), L.Dense(5)])
    )


def attention():
    """Gradients that flow back from three places into one."""
    inputs = keras.Input((4, 4, 1))
    x = L.Reshape((4, 4))(inputs)
    for _ in range(2):
        x = x + L.MultiHeadAttention(2, 4, dropout=0.1)(x, x)
        x = L.LayerNormalization()(x + L.Dense(4, "gelu")(x))
    return training_cases.compiled(keras.Model(inputs, L.Dense(5)(L.Flatten()(x))))


def recurrent():
    return training_cases.compiled(
        keras.Sequential([keras.Input((4, 4, 1)), L.Reshape((4, 4)), L.LSTM(6, dropout=0.2), L.Dense(5)])
    )


OWN = [
    Case("dropout", dropout), Case("batch norm", batch_norm),
    Case("batch norm, float16", batch_norm, precision="mixed_float16", double=False), Case("all random", all_random),
    Case("together", together, fit={"class_weight": {0: 3.0, 2: 0.2}, "validation_data": images(31)}),
    Case("together, accumulated", together, accumulate=2), Case("wide", wide), Case("attention", attention),
    Case("recurrent", recurrent),
]  # fmt: skip
RANDOM = [case for case in OWN if case.name not in ("wide",)]
"""Their masks, or what BatchNorm takes together, are others than those of Keras on one device."""
CASES = [*OWN, *(c for c in training_cases.CASES if not c.name.startswith("batch norm"))]


def trained(case, distribution, **fit):
    """The model after its training, its history, an evaluation and predictions."""
    model = training_cases.build(case, distribution, case.precision)
    given = case.data(case.examples)
    options = {"distribution": distribution, "batch_size": case.batch, "verbose": 0}
    arguments = {
        "epochs": training_cases.EPOCHS, "accumulate": case.accumulate, "virtual_replicas": SHARDS, **case.fit, **fit,
    }  # fmt: skip
    history = tfdist.fit(model, given, **options, **arguments).history
    options["check_agreement"] = "off"  # the training has asked
    options["virtual_replicas"] = arguments["virtual_replicas"]
    evaluation = tfdist.evaluate(model, given, **options)
    inputs = given[0] if isinstance(given, tuple) else given
    outputs = keras.tree.flatten(tfdist.predict(model, inputs, **options))
    return model, history, evaluation, outputs


def bits(case, distribution, **fit):
    """All that must be the same, as bytes and text."""
    model, history, evaluation, outputs = trained(case, distribution, **fit)
    weights = [*model.get_weights(), *(np.asarray(v) for v in model.optimizer.variables)]
    return {
        "weights": hashlib.sha256(b"".join(np.ascontiguousarray(w).tobytes() for w in weights)).hexdigest(),
        "history": {name: [np.asarray(v).tobytes() for v in values] for name, values in history.items()},
        "evaluation": {name: np.asarray(value).tobytes() for name, value in evaluation.items()},
        "predictions": [o.tobytes() for o in outputs],
    }
