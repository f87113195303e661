"""What a worker trains with callbacks and data sets; see `SCENES`.

Each worker is given paths of its own, so that it shows which of them has written.
"""

import contextlib
import functools
import io
import itertools
import os
import select
import signal
import sys
import types

import keras
import numpy as np
import tensorflow as tf

import tfdist
from support import training_cases
from tfdist.keras_bridge import keras_internals
from tfdist.trainer import on_batch as on_batch_lib

L = keras.layers
# Among the models is one whose replicas normalize by themselves.
fit = functools.partial(tfdist.fit, check_agreement="off")


def model_of(distribution, seed=3, **norm):
    keras.utils.set_random_seed(seed)
    with distribution.scope():
        model = keras.Sequential([keras.Input((4, 4, 1)), L.Flatten(), L.Dense(6), L.BatchNormalization(**norm)])
        model.add(L.Dense(5))
        return training_cases.compiled(model, keras.optimizers.SGD(0.1, momentum=0.9))


def plain(distribution, seed=3):
    keras.utils.set_random_seed(seed)
    with distribution.scope():
        return training_cases.compiled(training_cases.dense(), keras.optimizers.SGD(0.1, momentum=0.9))


class Writer(keras.callbacks.Callback):
    """Writes, and tries what the chief cannot do alone."""

    chief_only = True

    def __init__(self, distribution):
        super().__init__()
        self.distribution, self.called, self.refused = distribution, [], []

    def on_epoch_end(self, epoch, logs=None):
        self.called.append((epoch, sorted(logs)))
        x, y = training_cases.images(24)
        for attempt in (
            lambda: tfdist.evaluate(self.model, x, y, distribution=self.distribution),
            lambda: self.model.metrics[0].result(),
        ):
            try:
                attempt()
            except tfdist.UserError as error:
                self.refused.append(str(error))


class Everywhere(keras.callbacks.Callback):
    """Notes what it sees on its worker."""

    def __init__(self):
        super().__init__()
        self.rates, self.statistics = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.statistics.append(self.model.layers[2].moving_mean.numpy())

    def on_epoch_end(self, epoch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))


def writers(distribution, folder):
    model, own = model_of(distribution), folder / f"rank {distribution.rank}"
    writer, everywhere = Writer(distribution), Everywhere()
    callbacks = [
        everywhere,
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.5, min_delta=100),
        keras.callbacks.EarlyStopping("loss", patience=3, min_delta=100, verbose=1),
        keras.callbacks.ModelCheckpoint(own / "{epoch}.keras"),
        keras.callbacks.ModelCheckpoint(own / "update {batch}.keras", save_freq=2),
        keras.callbacks.CSVLogger(own / "log.csv"),
        keras.callbacks.TensorBoard(own / "tb"),
        writer,
    ]
    if distribution.is_chief:
        own.mkdir()
    x, y = training_cases.images(48)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        history = fit(model, x, y, distribution=distribution, batch_size=12, epochs=9, verbose=1, callbacks=callbacks)
    return {
        "files": sorted(str(p.relative_to(own)) for p in own.rglob("*") if p.is_file()), "epochs": history.epoch,
        "rates": everywhere.rates, "statistics": everywhere.statistics, "writer": writer.called,
        "refused": writer.refused, "left": [name for name in vars(writer) if name.startswith("on_")],
        "said": said.getvalue(), "weights": model.get_weights(),
    }  # fmt: skip


class Forks(keras.callbacks.Callback):
    """Forks a child that ends by sys.exit, which unwinds the training it has come from; the code, or "it hangs"."""

    def on_epoch_end(self, epoch, logs=None):
        child = os.fork()
        if child == 0:
            sys.exit(3)
        ended = os.pidfd_open(child)
        in_time = select.select([ended], [], [], 20)[0]
        os.close(ended)
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        self.code = code if in_time else "it hangs"


def forked(distribution, folder):
    """Both workers go on to the end after it."""
    if distribution.name == "horovod":  # Gloo's threads abort once a child has run the exit handlers of C++
        return None
    model, forks = plain(distribution), Forks()
    x, y = training_cases.images(24)
    history = fit(model, x, y, distribution=distribution, batch_size=12, epochs=2, verbose=0, callbacks=[forks])
    return {"codes": forks.code, "epochs": history.epoch}


def changed(distribution, folder):
    """The message of each worker when the last one alone changes its learning rate, or a weight, between two calls."""
    x, y = training_cases.images(24)
    options = {"distribution": distribution, "batch_size": 12, "verbose": 0}
    calls = {
        "optimizer": lambda model: fit(model, x, y, **options),
        "weights": lambda model: tfdist.evaluate(model, x, y, **options),
    }
    found = {}
    for name, call in calls.items():
        model = plain(distribution)
        fit(model, x, y, **options)
        if distribution.rank == distribution.workers - 1:
            variable = model.optimizer.learning_rate if name == "optimizer" else model.layers[-1].bias
            for copy in keras_internals.copies(variable):
                copy.assign(copy + 1.0)
        try:
            call(model)
            found[name] = "nothing was noticed"
        except tfdist.TrainingError as error:
            found[name] = str(error)
    return found


BACKUP = {"batch_size": 12, "shuffle": False, "verbose": 0}


def backup(distribution, folder):
    """A training of two epochs, and another, of a model with other weights, that goes on after them."""
    x, y = training_cases.images(42)
    where = folder / f"backup {distribution.rank}"
    for seed, epochs in ((3, 2), (9, 4)):
        model = plain(distribution, seed)
        keep = keras.callbacks.BackupAndRestore(where, delete_checkpoint=False)
        history = fit(model, x, y, distribution=distribution, epochs=epochs, callbacks=[keep], **BACKUP)
    iterations = int(model.optimizer.iterations.numpy())
    return {"epochs": history.epoch, "weights": training_cases.weights(model), "iterations": iterations}


def batches(seed, augment=False):
    data = tf.data.Dataset.from_tensor_slices(training_cases.images(42)).shuffle(42, seed=seed).batch(12)
    return data.map(lambda x, y: (x + tf.random.normal(tf.shape(x)), y)) if augment else data


def of_worker(rank, rows):
    """Data of which one worker has other inputs in some rows, and the same targets."""
    x, y = training_cases.images(48)
    x = np.array(x)
    x[rows] += rank
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(12)


class OfWorker(keras.utils.PyDataset):
    """The same as batches that Python makes."""

    def __init__(self, rank, **options):
        super().__init__(**options)
        self._batches = list(of_worker(rank, slice(None)).as_numpy_iterator())

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, number):
        return self._batches[number]


def shuffled(distribution, folder, name):
    """What comes of a data set with or without a seed."""
    options = {"distribution": distribution, "check_agreement": "off"}
    call = {
        "fit": lambda model: fit(model, batches(None), distribution=distribution, epochs=2, verbose=0),
        "evaluate": lambda model: tfdist.evaluate(model, batches(None), **options),
        "predict": lambda model: tfdist.predict(model, batches(None), **options),
        "seeded": lambda model: fit(model, batches(7), distribution=distribution, epochs=3, verbose=0),
        "of unknown length": lambda model: fit(
            model, batches(7).filter(lambda x, y: True), distribution=distribution, epochs=3, verbose=0
        ),
        "with a batch without rows": lambda model: fit(
            model, batches(7).concatenate(batches(7).map(lambda x, y: (x[:0], y[:0]))), distribution=distribution
        ),
        "augmented": lambda model: fit(model, batches(7, True), distribution=distribution, epochs=2, verbose=0),
        "other inputs": lambda model: fit(model, of_worker(distribution.rank, slice(None)), distribution=distribution),
        "other inputs of a PyDataset": lambda model: fit(
            model, OfWorker(distribution.rank), distribution=distribution, steps_per_call=1
        ),
        "another row": lambda model: fit(
            model, of_worker(distribution.rank, 30), distribution=distribution, steps_per_call=1
        ),
    }[name]
    model = plain(distribution)
    tf.random.set_seed(None)  # else what has no seed of its own would be the same everywhere
    try:
        call(model)
        return training_cases.weights(model)
    except tfdist.UserError as error:
        return str(error)


def ended(distribution, folder, name):
    """The message of each worker where the last one's data ends earlier, and goes on with data that ends alike."""

    def some(count):
        x, y = training_cases.images(48)
        yield from ((x[i : i + 12], y[i : i + 12]) for i in range(0, 12 * count, 12))

    options = {"distribution": distribution, "verbose": 0, "check_agreement": "off"}
    call = {
        "fit": lambda model, count: fit(model, some(count), **options),
        "several updates a call": lambda model, count: fit(
            model, some(count), steps_per_epoch=4, steps_per_call=8, **options
        ),
        "evaluate": lambda model, count: tfdist.evaluate(model, some(count), **options),
        "predict": lambda model, count: tfdist.predict(model, some(count), **options),
    }[name]
    model = plain(distribution)
    try:
        call(model, 3 if distribution.rank == distribution.workers - 1 else 4)
        found = "nothing was noticed"
    except (tfdist.UserError, tfdist.TrainingError) as error:
        found = f"{type(error).__name__}: {error}"
    call(model, 4)
    return found


class StopsAfter(keras.callbacks.Callback):
    """Ends what it is called for after the third batch, or only counts."""

    def __init__(self, stops=True):
        super().__init__()
        self.stops, self.batches = stops, 0

    def count(self, attribute):
        self.batches += 1
        setattr(self.model, attribute, self.stops and self.batches == 3)

    def on_train_batch_end(self, batch, logs=None):
        self.count("stop_training")

    def on_test_batch_end(self, batch, logs=None):
        self.count("stop_evaluating")

    def on_predict_batch_end(self, batch, logs=None):
        self.count("stop_predicting")


def stopped(distribution, folder):
    """What a callback ends on the last worker; in most cases no other worker has such a callback at all."""
    model, last = plain(distribution), distribution.rank == distribution.workers - 1
    x, y = training_cases.images(120)
    options = {"batch_size": 12, "verbose": 0, "distribution": distribution}
    everywhere, there = [StopsAfter(last)], [StopsAfter()] if last else []
    logs = [tfdist.evaluate(model, x, y, callbacks=callbacks, **options) for callbacks in (everywhere, there)]
    rows = tfdist.predict(model, x, callbacks=[StopsAfter()] if last else [], **options)
    callbacks = [StopsAfter()] if last else [keras.callbacks.ModelCheckpoint(folder / "{batch}.keras", save_freq=2)]
    tfdist.fit(model, x, y, shuffle=False, callbacks=callbacks, **options)
    batches = [everywhere[0].batches, *(callback.batches for callback in there)]
    return {"batches": batches, "logs": logs, "rows": rows, "weights": training_cases.weights(model)}


class Measures(keras.callbacks.Callback):
    """Calls what Keras' own callbacks may call, as one that draws a confusion matrix does."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_epoch_end(self, epoch, logs=None):
        x, y = training_cases.images(25)
        rows = self.model.predict(x, 12, verbose=0)
        rows *= 1.0  # in place, as scripts do with those of Keras
        one_batch = self.model.predict(x[:3], verbose=0)
        one_batch *= 1.0
        values = self.model.evaluate(x, y, batch_size=12, verbose=0)
        self.found.append((rows, values, sorted(self.model.evaluate(x, y, verbose=0, return_dict=True))))


def measured(distribution, folder):
    """What a callback measures within a training, and Keras' methods after it."""
    model, callback = plain(distribution), Measures()
    x, y = training_cases.images(42)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        options = {"distribution": distribution, "check_agreement": "on"}
        tfdist.fit(model, x, y, 12, 2, 0, [callback], shuffle=False, **options)
    return {"found": callback.found, "said": said.getvalue(), "left": {"evaluate", "predict"} & set(vars(keras.Model))}


def calls(by, model):
    """Calls with batches of several lengths, where one worker of two may have as many rows as before, the other not."""
    x, y = training_cases.images(60)
    ends = itertools.accumulate((24, 24, 7, 1), initial=0), itertools.accumulate((5, 9, 3, 17, 2, 8), initial=0)
    batches = [(x[a:b], y[a:b]) for size in ends for a, b in itertools.pairwise(size)]
    several = lambda x, y: (
        by.train_on_batch(model, x, y),
        by.test_on_batch(model, x, y),
        by.predict_on_batch(model, x),
    )
    return [several(*batch) for batch in batches], model.get_weights()


def on_batch(distribution, folder):
    """What calls return, and the messages of each worker where the model returns text, or the last one's x differs."""
    options, x, y = {"distribution": distribution}, *training_cases.images(24)
    names = "train_on_batch", "test_on_batch", "predict_on_batch"
    by = types.SimpleNamespace(**{name: functools.partial(getattr(on_batch_lib, name), **options) for name in names})
    model = plain(distribution)
    with distribution.scope():
        text = keras.Sequential([keras.Input((1,), dtype="int64"), L.StringLookup(vocabulary=["a", "b"], invert=True)])
    return (
        calls(by, model),
        refusal(by.predict_on_batch, text, y[:, None]),
        refusal(lambda: [by.train_on_batch(model, x + distribution.rank * (i > 9), y) for i in range(12)]),
    )


def refusal(function, *arguments):
    try:
        return f"nothing was noticed: {function(*arguments)}"
    except tfdist.UserError as error:
        return str(error)


SCENES = {"writers": writers, "backup": backup, "stopped": stopped, "measured": measured, "forked": forked}
SCENES |= {"changed": changed, "on_batch": on_batch}
SCENES_BY_NAME = {"shuffled": shuffled, "ended": ended}
"""Scenes of several names each, such as `shuffled seeded`."""


def found(name, distribution, folder):
    """What a scene finds."""
    kind, _, rest = name.partition(" ")
    return SCENES_BY_NAME[kind](distribution, folder, rest) if rest else SCENES[kind](distribution, folder)
