"""What a callback changes within fit and could not take effect is refused."""

import functools
import types

import keras
import numpy as np
import pytest
from support.covering import first

import tfdist
from tfdist.trainer import on_batch


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_callback_that_compiles_the_model_is_refused(connect, epoch):
    class Compiles(keras.callbacks.Callback):
        def on_epoch_begin(self, now, logs=None):
            if now == epoch:
                with connect(1).scope():
                    self.model.compile("adam", "mae")

    with connect(1).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    with pytest.raises(tfdist.UserError, match="a callback compiled the model within fit"):
        tfdist.fit(model, x, y, epochs=3, callbacks=[Compiles()], distribution=connect(1), verbose=0)
    tfdist.fit(model, x, y, distribution=connect(1), verbose=0)


class OwnStep(keras.Model):
    """A model with a step of its own, whose logs are the results of its metrics."""

    def train_step(self, data):
        return super().train_step(data)


class OtherLogs(keras.Model):
    """One whose logs have other names, and are those of the last batch."""

    def train_step(self, data):
        return {"mine": super().train_step(data)["loss"]}


class Measures(keras.callbacks.Callback):
    """Evaluates, predicts, trains and resets metrics within the training, and records what that gives and changes."""

    def __init__(self, by, data):
        super().__init__()
        self.by, self.data = by, data
        self.seen, self.epoch, self.busy = [], 0, False

    def note(self, logs):
        self.seen.append([float(logs[name]) for name in sorted(logs)])

    def measure(self):
        self.note(self.by.evaluate(self.model, *self.data, batch_size=8, verbose=0, return_dict=True))
        self.note({"": np.square(self.by.predict(self.model, self.data[0], verbose=0)).sum()})

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        if epoch == 1:
            self.measure()

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == (0, 4):
            self.measure()

    def on_train_batch_end(self, batch, logs=None):
        self.note(logs)
        if self.busy:
            return
        if (self.epoch, batch) in ((0, 2), (2, 6)):  # 6 is the last one
            self.measure()
        if (self.epoch, batch) in ((0, 5), (1, 6), (2, 1), (3, 5)):
            on_batch = self.by.test_on_batch if self.epoch % 2 else self.by.train_on_batch
            self.note(on_batch(self.model, *self.data, return_dict=True))
        if (self.epoch, batch) == (3, 3):
            self.model.reset_metrics()

    def on_epoch_end(self, epoch, logs=None):
        self.note(logs)
        self.note(self.model.get_metrics_result())
        if epoch == 3 and not self.busy:
            self.busy = True
            self.by.fit(self.model, *self.data, batch_size=8, shuffle=False, verbose=0, callbacks=[self])


@pytest.mark.parametrize("kind", first(1, [keras.Model, OwnStep, OtherLogs]))
@pytest.mark.parametrize("replicas", first(0, [2, 1]))
def test_what_a_callback_measures_within_fit_counts_as_in_keras(connect, kind, replicas):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(72, 4)).astype("float32"), random.integers(0, 3, 72)

    def trained(by, scope):
        keras.utils.set_random_seed(1)
        with scope:
            inputs = keras.Input((4,))
            model = kind(inputs, keras.layers.Dense(3, "softmax")(inputs))
            options = dict(metrics=["accuracy"], run_eagerly=by is keras.Model)
            model.compile(keras.optimizers.SGD(0.3), "sparse_categorical_crossentropy", **options)
        callback = Measures(by, (x[50:], y[50:]))
        by.fit(model, x[:50], y[:50], batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=[callback])
        return [np.concatenate(callback.seen), np.concatenate([w.ravel() for w in model.get_weights()])]

    functions = tfdist.fit, tfdist.evaluate, tfdist.predict, on_batch.train_on_batch, on_batch.test_on_batch
    # A package of a command may stand for the function.
    options = {"distribution": connect(replicas), "check_agreement": "off"}
    by = {f.__name__.rpartition(".")[2]: functools.partial(f, **options) for f in functions}
    ours = trained(types.SimpleNamespace(**by), connect(replicas).scope())
    theirs = trained(keras.Model, connect(1).scope())
    for mine, of_keras in zip(ours, theirs):
        np.testing.assert_allclose(mine, of_keras, rtol=2e-5, atol=1e-6)
