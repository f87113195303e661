"""Searches of KerasTuner and Optuna, which know nothing of tfdist."""

import json

import keras
import keras_tuner
import numpy as np
import optuna

rng = np.random.default_rng(0)
x, y = rng.normal(size=(50, 6)).astype("float32"), rng.integers(0, 3, 50)
held_out = rng.normal(size=(20, 6)).astype("float32"), rng.integers(0, 3, 20)
options = dict(batch_size=20, epochs=2, shuffle=False, verbose=0, validation_data=held_out)


def show(name, *numbers):
    print("result", name, *(f"{float(number):.9g}" for number in numbers), flush=True)


def built(units, rate):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


build = lambda hp: built(hp.Int("units", 4, 16, 4), hp.Float("rate", 1e-3, 1e-1, sampling="log"))
for make, limits in (
    (keras_tuner.RandomSearch, dict(max_trials=2, executions_per_trial=2)),
    (keras_tuner.Hyperband, dict(max_epochs=2, factor=2)),
    (keras_tuner.BayesianOptimization, dict(max_trials=3, num_initial_points=2)),
):
    name = make.__name__
    keras.utils.set_random_seed(5)
    folder = dict(directory="tuned", project_name=name, overwrite=True)
    tuner = make(build, objective=keras_tuner.Objective("val_loss", "min"), seed=7, **folder, **limits)
    tuner.search(x, y, **options)
    for trial in tuner.oracle.get_best_trials(9):
        print("result", name, trial.trial_id, json.dumps(trial.hyperparameters.values), f"{trial.score:.9g}")
    best = tuner.get_best_models()[0]
    show(name, *best.evaluate(*held_out, verbose=0), *(np.square(w).sum() for w in best.get_weights()))


def prune(trial):
    def after(epoch, logs):
        trial.report(logs["val_loss"], epoch)
        if trial.should_prune():
            raise optuna.TrialPruned()

    return keras.callbacks.LambdaCallback(on_epoch_end=after)


def objective(trial):
    keras.utils.set_random_seed(3)
    model = built(trial.suggest_int("units", 4, 16), trial.suggest_float("rate", 1e-3, 1e-1, log=True))
    return model.fit(x, y, callbacks=[prune(trial)], **options).history["val_loss"][-1]


optuna.logging.set_verbosity(optuna.logging.WARNING)
sampler = optuna.samplers.TPESampler(seed=1, n_startup_trials=2)
study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.MedianPruner(n_startup_trials=2))
study.optimize(objective, n_trials=4)
for trial in study.trials:
    show(f"{trial.number} {trial.state.name}", *trial.params.values(), *trial.intermediate_values.values())
