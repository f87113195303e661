"""Searches hyperparameters with Optuna and prunes trials that fall behind; `tfdist sweep` does so without a script.

tfdist run --virtual_devices=2 examples/tune_with_optuna.py
"""

import importlib.resources

import keras
import numpy as np
import optuna

digits = np.loadtxt(importlib.resources.files("tfdist.data.datasets") / "digits.csv.gz", delimiter=",")
x, y = digits[:, :64] / 16, digits[:, 64].astype("int32")


class Prune(keras.callbacks.Callback):
    def __init__(self, trial):
        super().__init__()
        self.trial = trial

    def on_epoch_end(self, epoch, logs=None):
        self.trial.report(logs["val_loss"], epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned()


def objective(trial):
    keras.utils.set_random_seed(1)
    hidden = keras.layers.Dense(trial.suggest_int("units", 16, 64, step=16), activation="gelu")
    model = keras.Sequential([keras.Input((64,)), hidden, keras.layers.Dense(10, activation="softmax")])
    rate = trial.suggest_float("learning_rate", 1e-3, 1e-1, log=True)
    model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    # shuffle=False, since the order is random already, and Keras and tfdist shuffle differently.
    options = dict(batch_size=64, epochs=4, shuffle=False, validation_data=(x[1437:], y[1437:]), verbose=0)
    return model.fit(x[:1437], y[:1437], callbacks=[Prune(trial)], **options).history["val_loss"][-1]


sampler = optuna.samplers.TPESampler(seed=1)  # with a seed, all workers make the same search
study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.MedianPruner(n_startup_trials=2))
study.optimize(objective, n_trials=5)
best = study.best_params
print(f"best: {best['units']} units, learning rate {best['learning_rate']:.6f}, validation loss {study.best_value:.6f}")
