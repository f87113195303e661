"""Code of the user's own is checked again on later batches and with later weights: what is rare is not in the first."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfdist
from tfdist.trainer import on_batch

L = keras.layers
BATCH = 8


def ignoring(y, y_pred):
    """A mean over the labeled rows, times their part: rows alone, as long as all have labels."""
    labeled = ops.cast(y[:, 0] >= 0, y_pred.dtype)
    return ops.square(y[:, 0] - y_pred[:, 0]) * labeled / ops.maximum(ops.mean(labeled), 1e-3)


class FreeBits(L.Layer):
    """Adds no loss below a threshold, that the mean of the batch passes late."""

    def call(self, x):
        self.add_loss(ops.maximum(ops.mean(ops.sum(ops.square(x), -1)), 0.01))
        return x


def data(late):
    x = np.random.RandomState(0).randn(10 * BATCH, 3).astype("float32")
    y = np.abs(x[:, :1])
    y[2 * BATCH :: 3] = -1 if late else 1
    return x, y


class Sequence(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self._x, self._y = x, y

    def __len__(self):
        return len(self._x) // BATCH

    def __getitem__(self, i):
        return self._x[i * BATCH : (i + 1) * BATCH], self._y[i * BATCH : (i + 1) * BATCH]


def forever(x, y):
    while True:
        yield from (Sequence(x, y)[i] for i in range(len(x) // BATCH))


FORMS = {
    "data set": lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH),
    "endless data set": lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat(),
    "of unknown length": lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).filter(lambda *_: True),
    "generator": forever,
    "PyDataset": Sequence,
}


LIKE_OTHERS = "endless data set", "of unknown length"
IN_AN_EVALUATION = r"^found after \d+ batches: .* in an evaluation: loss 'ignoring' differs"


def compiled(connect, *layers, loss=ignoring, replicas=2):
    keras.utils.set_random_seed(0)
    with connect(replicas).scope():
        model = keras.Sequential([keras.Input((3,)), *(layer() for layer in layers), L.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), loss)
    return model


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.whole] * (form in LIKE_OTHERS)) for form in FORMS]
)
def test_rows_of_later_batches(connect, form):
    fit = lambda late: tfdist.fit(
        compiled(connect), FORMS[form](*data(late)), epochs=2, steps_per_epoch=9, distribution=connect(2), verbose=0
    )
    with pytest.raises(tfdist.UserError, match=r"^found after [2-9] updates: .* loss 'ignoring' differs .*per example"):
        fit(late=True)
    assert len(fit(late=False).history["loss"]) == 2


def test_rows_of_the_validation(connect):
    model = compiled(connect)
    with pytest.raises(tfdist.UserError, match=IN_AN_EVALUATION):
        validation = FORMS["data set"](*data(late=True))
        tfdist.fit(model, *data(late=False), BATCH, validation_data=validation, distribution=connect(2), verbose=0)


def test_rows_of_an_evaluation_of_other_data(connect):
    model = compiled(connect)
    tfdist.evaluate(model, *data(late=False), BATCH, distribution=connect(2), verbose=0)
    with pytest.raises(tfdist.UserError, match=IN_AN_EVALUATION):
        tfdist.evaluate(model, *data(late=True), BATCH, distribution=connect(2), verbose=0)


def test_batches_of_train_on_batch(connect):
    model, (x, y) = compiled(connect), data(late=True)
    with pytest.raises(tfdist.UserError, match=r"^found after 3 updates: "):
        for i in range(5):
            rows = slice(i * BATCH, (i + 1) * BATCH)
            on_batch.train_on_batch(model, x[rows], y[rows], distribution=connect(2))


def test_weights_of_later_updates(connect):
    """Where the mean is far from the threshold, and where it has passed it, halves of a batch agree with the whole."""
    model = compiled(connect, lambda: L.Dense(3, use_bias=False), FreeBits, loss="mse")
    model.optimizer.learning_rate = 0.2
    with pytest.raises(
        tfdist.UserError, match=r"^found after \d+ updates: .*add_loss differs .* which layer free_bits"
    ):
        tfdist.fit(model, *data(late=False), BATCH, epochs=20, distribution=connect(2), verbose=0)


def test_a_threshold_that_the_mean_is_far_from(connect):
    """Before the first update, since a single row may be below it."""
    with connect(2).scope():
        model = Floods(x := keras.Input((3,)), L.Dense(1)(x))
        model.compile("sgd")
    with pytest.raises(tfdist.UserError, match=r"^1 and 2 replicas disagree on this model: .*compute_loss of Floods"):
        tfdist.fit(model, *data(late=False), BATCH, distribution=connect(2), verbose=0)


class Floods(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.maximum(ops.mean(ops.square(y - y_pred)), 0.5)


class Counts(L.Layer):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def call(self, x):
        self.calls += 1
        return x * self.calls


def test_a_count_in_python_that_runs_eagerly(connect):
    model = compiled(connect, Counts, loss="mse")
    with connect(2).scope():
        model.compile("sgd", "mse", run_eagerly=True)
    before = model.layers[0].calls
    with pytest.raises(
        tfdist.UserError, match=r"runs Counts once for each of 2 replicas, .* counts in Python \(calls\)"
    ):
        tfdist.fit(model, *data(late=False), BATCH, distribution=connect(2), verbose=0)
    assert model.layers[0].calls <= before + 3  # those that build and classify


def test_a_check_that_is_repeated_changes_nothing_and_keeps_no_model(connect):
    ended = {}
    for choice in ("off", "auto"):
        model = compiled(connect, lambda: L.Dropout(0.3, seed=1), lambda: L.BatchNormalization(synchronized=True))
        given = FORMS["data set"](*data(late=False))
        history = tfdist.fit(model, given, epochs=3, distribution=connect(2), check_agreement=choice, verbose=0)
        ended[choice] = [history.history, [array.tobytes() for array in model.get_weights()]]
    assert ended["off"] == ended["auto"]
    gone = weakref.ref(model)
    del model, history
    gc.collect()
    assert gone() is None
