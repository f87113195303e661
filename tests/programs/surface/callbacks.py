"""Callbacks of Keras and of one's own."""

import csv

import keras
import numpy as np

from programs.surface.program import Program, classes, compiled, dense

callbacks = keras.callbacks


def net(rate=0.1, **optimizer):
    return compiled(dense(), optimizer=keras.optimizers.SGD(rate, **optimizer), metrics=["accuracy"])


def called(name, make, build=net, look=lambda model, folder: [], epochs=3, **kwargs):
    """A program around callbacks: `make(folder)` returns a list. The validation data has 31 rows."""
    fit = lambda folder: {"callbacks": make(folder), "validation_data": classes(31)}
    return Program(f"callback {name}", build, classes, fit, look, epochs=epochs, **kwargs)


class Notes(callbacks.Callback):
    """Notes which hooks are called, and what with."""

    def __init__(self, folder):
        super().__init__()
        self.path = folder / "notes.txt"
        self.lines = []

    def on_epoch_begin(self, epoch, logs=None):
        self.lines.append([epoch])

    def on_train_batch_end(self, batch, logs=None):
        self.lines.append([batch, logs["loss"], logs["accuracy"]])

    def on_test_batch_end(self, batch, logs=None):
        self.lines.append([batch, logs["loss"]])

    def on_test_end(self, logs=None):
        self.lines.append([logs["loss"], logs["accuracy"]])

    def on_epoch_end(self, epoch, logs=None):
        self.lines.append([logs[name] for name in sorted(logs)])

    def on_train_end(self, logs=None):
        numbers = [float(n) for line in self.lines for n in line]
        if not self.path.exists():  # each worker writes the same
            self.path.write_text(" ".join(map(repr, numbers)))


def noted(model, folder):
    return [float(n) for n in (folder / "notes.txt").read_text().split()]


def csv_rows(model, folder):
    with open(folder / "log.csv", newline="") as file:
        return [float(v) for row in csv.DictReader(file) for v in row.values()]


def saved(model, folder):
    """The numbers in the files that ModelCheckpoint has written."""
    paths = sorted(folder.glob("*.keras"))
    return [len(paths), *(np.square(w).sum() for p in paths for w in keras.models.load_model(p).get_weights())]


def saved_weights(model, folder):
    paths = sorted(folder.glob("*.weights.h5"))
    model.load_weights(paths[-1])
    return [len(paths), *(np.square(w).sum() for w in model.get_weights())]


class StopsInEpoch(callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.stop_training = True


class SetsWeights(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.set_weights([0.9 * w for w in self.model.get_weights()])


class SetsRateByBatch(callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.1 / (1 + batch)


class AddsToLogs(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["rate"] = float(self.model.optimizer.learning_rate)
        logs["updates"] = int(self.model.optimizer.iterations)


class Freezes(callbacks.Callback):
    """Changes a hyperparameter variable between epochs."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate.assign(0.0 if epoch == 1 else 0.1)


class LooksAtWeights(callbacks.Callback):
    def __init__(self, folder):
        super().__init__()
        self.path = folder / "notes.txt"
        self.norms = []

    def on_train_batch_end(self, batch, logs=None):
        self.norms.append(sum(np.square(w).sum() for w in self.model.get_weights()))

    def on_train_end(self, logs=None):
        if not self.path.exists():
            self.path.write_text(" ".join(repr(float(n)) for n in self.norms))


def lambdas(folder):
    seen = []
    return [
        callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.extend([epoch, logs["loss"], logs["val_accuracy"]]),
            on_train_end=lambda logs: (folder / "notes.txt").write_text(" ".join(repr(float(v)) for v in seen)),
        )
    ]


PROGRAMS = [
    called("EarlyStopping that restores", lambda folder: [callbacks.EarlyStopping("val_loss", patience=1,
                                                                                  restore_best_weights=True)],
           lambda: net(30.0), epochs=8, precision="float64"),
    called("EarlyStopping with a baseline", lambda folder: [callbacks.EarlyStopping("loss", min_delta=1.0, patience=1,
                                                                                    start_from_epoch=1, baseline=9.0)],
           epochs=8),
    called("ReduceLROnPlateau", lambda folder: [callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1,
                                                                            min_delta=1.0)], epochs=5),
    called("LearningRateScheduler", lambda folder: [callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.6)]),
    called("ModelCheckpoint", lambda folder: [callbacks.ModelCheckpoint(folder / "{epoch}-{val_loss:.4f}.keras")],
           look=saved),
    called("ModelCheckpoint of the best weights", lambda folder: [callbacks.ModelCheckpoint(folder / "best.weights.h5",
                                                                                            "val_accuracy",
                                                                                            save_best_only=True,
                                                                                            save_weights_only=True)],
           look=saved_weights),
    called("ModelCheckpoint by batches", lambda folder: [callbacks.ModelCheckpoint(folder / "at.weights.h5",
                                                                                   save_weights_only=True,
                                                                                   save_freq=2)], look=saved_weights),
    called("BackupAndRestore", lambda folder: [callbacks.BackupAndRestore(folder / "backup")]),
    called("TerminateOnNaN", lambda folder: [callbacks.TerminateOnNaN()]),
    called("CSVLogger", lambda folder: [callbacks.CSVLogger(folder / "log.csv")], look=csv_rows),
    called("LambdaCallback", lambdas, look=noted),
    called("SwapEMAWeights", lambda folder: [callbacks.SwapEMAWeights()], lambda: net(use_ema=True, ema_momentum=0.8)),
    called("SwapEMAWeights and ModelCheckpoint", lambda folder: [callbacks.SwapEMAWeights(swap_on_epoch=True),
                                                                 callbacks.ModelCheckpoint(folder / "{epoch}.keras")],
           lambda: net(use_ema=True, ema_momentum=0.8), saved),
    called("TensorBoard", lambda folder: [callbacks.TensorBoard(folder / "logs", histogram_freq=1)]),
    called("of one's own that notes all hooks", lambda folder: [Notes(folder)], look=noted),
    called("of one's own that looks at weights", lambda folder: [LooksAtWeights(folder)], look=noted),
    called("that stops within an epoch", lambda folder: [StopsInEpoch()]),
    called("that sets weights", lambda folder: [SetsWeights()]),
    called("that sets the rate by batch", lambda folder: [SetsRateByBatch()]),
    called("that adds to the logs", lambda folder: [AddsToLogs()]),
    called("that assigns the rate", lambda folder: [Freezes()]),
]  # fmt: skip
