"""Logs a training to Weights & Biases by its callback for Keras: offline, or online after `wandb login`.

tfdist run --virtual_devices=2 examples/log_to_wandb.py
"""

import importlib.resources

import keras
import numpy as np
import wandb
from wandb.integration.keras import WandbMetricsLogger

keras.utils.set_random_seed(1)
digits = np.loadtxt(importlib.resources.files("tfdist.data.datasets") / "digits.csv.gz", delimiter=",")
x, y = digits[:, :64] / 16, digits[:, 64].astype("int32")
train, test = (x[:1437], y[:1437]), (x[1437:], y[1437:])

config = {"learning_rate": 3e-3, "batch_size": 64, "epochs": 5}
# mode="online" sends it. On several workers leave mode out and set WANDB_MODE, so that the chief alone logs.
with wandb.init(project="digits", config=config, mode="offline") as run:
    hidden = keras.layers.Dense(64, activation="gelu")
    model = keras.Sequential([keras.Input((64,)), hidden, keras.layers.Dense(10, activation="softmax")])
    optimizer = keras.optimizers.Adam(config["learning_rate"])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    options = dict(batch_size=config["batch_size"], epochs=config["epochs"], validation_data=test, verbose=2)
    # shuffle=False, since the order is random already, and Keras and tfdist shuffle differently.
    model.fit(*train, shuffle=False, callbacks=[WandbMetricsLogger()], **options)
    logged = dict(run.summary)
print(f"logged: validation loss {logged['epoch/val_loss']:.6f}, accuracy {logged['epoch/val_accuracy']:.1%}")
