"""Searches hyperparameters with KerasTuner, each trial on all devices. On several workers all make the same search.

tfdist run --virtual_devices=2 examples/tune_with_keras_tuner.py
"""

import importlib.resources
import tempfile

import keras
import keras_tuner
import numpy as np

keras.utils.set_random_seed(1)
digits = np.loadtxt(importlib.resources.files("tfdist.data.datasets") / "digits.csv.gz", delimiter=",")
x, y = digits[:, :64] / 16, digits[:, 64].astype("int32")
held_out = x[1437:], y[1437:]


def build(hp):
    units, rate = hp.Int("units", 16, 64, step=16), hp.Float("learning_rate", 1e-3, 1e-1, sampling="log")
    hidden = keras.layers.Dense(units, activation="gelu")
    model = keras.Sequential([keras.Input((64,)), hidden, keras.layers.Dense(10, activation="softmax")])
    model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


with tempfile.TemporaryDirectory() as folder:
    tuner = keras_tuner.RandomSearch(build, objective="val_accuracy", max_trials=3, seed=3, directory=folder)
    # shuffle=False, since the order is random already, and Keras and tfdist shuffle differently.
    tuner.search(x[:1437], y[:1437], batch_size=64, epochs=3, shuffle=False, validation_data=held_out, verbose=2)
    best = tuner.get_best_hyperparameters()[0].values
    loss, accuracy = tuner.get_best_models()[0].evaluate(*held_out, verbose=0)
print(f"best: {best['units']} units, rate {best['learning_rate']:.6f}, loss {loss:.6f}, accuracy {accuracy:.1%}")
