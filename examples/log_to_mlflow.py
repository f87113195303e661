"""Logs a training to MLflow by its `autolog`: to a database in a local folder, or to a server.

tfdist run --virtual_devices=2 examples/log_to_mlflow.py
"""

import importlib.resources

import keras
import mlflow
import numpy as np

keras.utils.set_random_seed(1)
digits = np.loadtxt(importlib.resources.files("tfdist.data.datasets") / "digits.csv.gz", delimiter=",")
x, y = digits[:, :64] / 16, digits[:, 64].astype("int32")

# Without MLFLOW_TRACKING_URI it logs to mlflow.db and mlruns/ in the working folder: `mlflow ui` shows them.
mlflow.set_experiment("digits")
mlflow.tensorflow.autolog(log_models=False, checkpoint=False)
with mlflow.start_run() as run:
    hidden = keras.layers.Dense(64, activation="gelu")
    model = keras.Sequential([keras.Input((64,)), hidden, keras.layers.Dense(10, activation="softmax")])
    model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    # shuffle=False, since the order is random already, and Keras and tfdist shuffle differently.
    options = dict(batch_size=64, epochs=5, shuffle=False, validation_data=(x[1437:], y[1437:]), verbose=2)
    model.fit(x[:1437], y[:1437], **options)
mlflow.flush_async_logging()  # autolog logs the epochs in the background
logged = mlflow.get_run(run.info.run_id).data.metrics
print(f"logged: validation loss {logged['val_loss']:.6f}, accuracy {logged['val_accuracy']:.1%}")
