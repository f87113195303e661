"""The step as a TPU wants it, run by CPUs: static shapes, rows that the host gathers, filler that counts nowhere."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import training_cases
from support.training_cases import L

import tfdist
from tfdist.step.replica import Replica


@pytest.fixture(scope="module")
def static(connect):
    """Distributions by number of replicas, whose step is that of a TPU."""
    return functools.cache(lambda replicas: dataclasses.replace(connect(replicas), static_shapes=True))


@pytest.fixture(scope="module")
def reference(connect):
    """Each case on one device, run once; test_agreement.py compares that with Keras' own fit."""
    return functools.cache(lambda case, precision: training_cases.outcome(case, connect(1), precision))


SHORT = {"uneven tail": 3}
"""What `make test` runs, and on how many replicas."""
UNEVEN = [
    training_cases.Case("batch norm, uneven", lambda: training_cases.compiled(training_cases.batch_norm())),
    training_cases.Case("activity regulariser, uneven",
                        lambda: training_cases.compiled(training_cases.dense(activity_regularizer="l2"))),
    training_cases.Case("add_loss, uneven", training_cases.endpoint, training_cases.labelled, double=False,
                        keras=False),
]  # fmt: skip
"""Where filler would have a part in statistics, and in what layers add."""


def rows():
    for case in [*training_cases.CASES, *UNEVEN]:
        for replicas in (1, 2, 3, 8):
            marks = [] if SHORT.get(case.name) == replicas else [pytest.mark.whole]
            yield pytest.param(case, replicas, id=f"{case}-{replicas}", marks=marks)


@pytest.mark.parametrize("case, replicas", rows())
def test_static_shapes_agree_with_one_device(case, replicas, reference, static):
    precision = "float64" if case.double else case.precision
    got = training_cases.outcome(case, static(replicas), precision)
    training_cases.assert_agrees(got, reference(case, precision), training_cases.TOLERANCE[precision])


@pytest.mark.whole
def test_data_sets_of_batches(static, connect):
    """A tf.data.Dataset whose length nobody knows, with a short batch in the middle and at the end."""

    def outcome(distribution):
        model = training_cases.build(next(iter(training_cases.CASES)), distribution, "float64")
        x, y = training_cases.images(40)
        parts = [slice(0, 12), slice(12, 17), slice(17, 29), slice(29, 40)]
        data = tf.data.Dataset.from_generator(
            lambda: ((x[p], y[p]) for p in parts),
            output_signature=(tf.TensorSpec([None, 4, 4, 1], tf.float32), tf.TensorSpec([None], tf.int64)),
        )
        history = tfdist.fit(model, data, distribution=distribution, epochs=2, verbose=0, check_agreement="off")
        measured = tfdist.evaluate(model, data, distribution=distribution, verbose=0)
        predicted = tfdist.predict(model, data, distribution=distribution, verbose=0)
        return training_cases.weights(model), history.history, measured, [predicted]

    training_cases.assert_agrees(outcome(static(3)), outcome(connect(1)), 1e-12)


@pytest.mark.whole
def test_shapes_that_change_are_refused(static):
    case = next(c for c in training_cases.CASES if c.name == "masked sequences")
    model = training_cases.build(case, static(2), "float32")
    data = tf.data.Dataset.from_generator(
        lambda: ((np.ones((4, n), "int32"), np.ones((4, n), "int32")) for n in (7, 5)),
        output_signature=(tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None, None], tf.int32)),
    )
    with pytest.raises(tfdist.UserError, match=r"gives examples of shapes \[\[5\], \[5\]\] after \[\[7\], \[7\]\]"):
        tfdist.fit(model, data, distribution=static(2), verbose=0, check_agreement="off")


@pytest.mark.whole
def test_the_check_of_one_and_all_replicas(static, said):
    case = next(c for c in training_cases.CASES if c.name == "even")
    model = training_cases.build(case, static(3), "float32")
    tfdist.fit(model, *case.data(24), distribution=static(3), batch_size=24, verbose=0, check_agreement="on")
    assert any(line.startswith("checked: 1 and 3 replicas agree on this model") for line in said)


class Counting(L.Layer):
    """Has a metric of its own."""

    def __init__(self):
        super().__init__(name="counting")
        self.seen = keras.metrics.Sum(name="seen")

    def call(self, x):
        self.seen.update_state(keras.ops.ones(keras.ops.shape(x)[0]))
        return x


class Own(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


def mixed(*layers, batch_norm=True):
    first = [L.BatchNormalization(synchronized=True, name="together")] if batch_norm else []
    return keras.Sequential([keras.Input((4, 4, 1)), L.Flatten(), *first, *layers, L.Dense(5)])


def own():
    model = mixed(batch_norm=False)
    return Own(model.inputs, model.outputs)


def across(y, outputs):
    """A loss that returns one number, and no mean over examples."""
    return keras.ops.max((outputs - keras.ops.one_hot(y, 5)) ** 2)


@pytest.mark.parametrize(
    "model, loss, message",
    [
        (lambda: mixed(L.BatchNormalization(name="alone")), None, "layer 'alone' normalizes with"),
        (lambda: mixed(Counting()), None, "layer 'counting' has a metric"),
        (lambda: mixed(L.Dense(4, activity_regularizer="l2")), None, r"layer '\w+' calls add_loss or has an"),
        (lambda: mixed(L.ActivityRegularization(0.1), batch_norm=False), across, r"' calls add_loss or has an"),
        (own, None, "Own has its own train_step, which would see rows that are filled up"),
    ],
    ids=["normalizes alone", "metric", "add_loss", "add_loss beside a loss across", "own step"],
)  # fmt: skip
def test_what_would_count_filler_is_refused(model, loss, message, static):
    with static(2).scope():
        model = training_cases.compiled(model(), loss=loss)
    x, y = training_cases.images(14)  # of the tail alone
    with pytest.raises(tfdist.UserError, match=message) as raised:
        tfdist.fit(model, x, y, distribution=static(2), batch_size=11, verbose=0, check_agreement="off")
    assert not model.optimizer.iterations.numpy()  # known before the first update
    assert "make the batch size and the examples of an epoch divisible by" in str(raised.value)


def text():
    words = keras.Input((), dtype="string", name="words")
    numbers = L.Hashing(20, name="hashing")(words)
    return keras.Model(words, L.Dense(5)(L.Embedding(20, 4)(numbers)))


class Positive(L.Layer):
    def call(self, x):
        return tf.zeros_like(x) + tf.reduce_sum(tf.boolean_mask(x, x > 0))


class Asking(L.Layer):
    def call(self, x):
        value = tf.numpy_function(np.negative, [x], tf.float32)
        return tf.ensure_shape(value, x.shape)


@pytest.mark.parametrize("model, x, message", [
    (text, tf.constant(["a", "b"] * 6), "layer 'hashing' takes text, and replicas compute with numbers in static"),
    (lambda: mixed(Positive(name="positive")), None,
     r"layer 'positive' gives shapes that depend on the data \(Where\)"),
    (lambda: mixed(Asking(name="asking")), None, r"layer 'asking' needs the host \(PyFunc\)"),
], ids=["text", "shapes", "Python"])  # fmt: skip
def test_what_static_shapes_cannot_do_is_refused_by_the_layers_name(model, x, message, static):
    with static(2).scope():
        model = training_cases.compiled(model())
    images, y = training_cases.images(12)
    with pytest.raises(tfdist.UserError, match=message):
        tfdist.fit(model, images if x is None else x, y, distribution=static(2), batch_size=12, verbose=0)


@pytest.mark.whole
def test_a_loss_that_looks_across_the_batch(static, connect):
    """The replicas exchange their rows, targets of int64 among them, of a batch that does not divide evenly."""
    case = training_cases.Case(
        "across", lambda: training_cases.compiled(training_cases.dense(), loss=across), examples=13, batch=8
    )
    got, expected = (training_cases.outcome(case, d, "float64") for d in (static(3), connect(1)))
    training_cases.assert_agrees(got, expected, 1e-12)


def relative(y, outputs):
    """A value per token that depends on those of all others."""
    values = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
    return values + 0.1 * keras.ops.max(values)


@pytest.mark.whole
@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.whole)])
def test_a_masked_loss_that_looks_across_the_batch(replicas, static, connect):
    """Masks travel as int32, which MirroredStrategy refuses to sum beside anything, with static shapes and without."""
    case = training_cases.Case(
        "masked, across", lambda: training_cases.tagger(loss=relative), training_cases.sequences, examples=13, batch=8
    )
    expected = training_cases.outcome(case, connect(1), "float64")
    for distribution in (static(replicas), connect(replicas)):
        training_cases.assert_agrees(training_cases.outcome(case, distribution, "float64"), expected, 1e-12)


@pytest.mark.whole
def test_the_comparison_can_fail(static, reference, monkeypatch):
    """Filler that counts must not agree."""
    case = next(c for c in training_cases.CASES if c.name == "uneven tail")
    taken = Replica.micro_batch
    counting = lambda rows: rows._replace(size=rows.max_size, row_mask=None, padded=False)
    monkeypatch.setattr(Replica, "micro_batch", lambda *a, **k: counting(taken(*a, **k)))
    got = training_cases.outcome(case, static(3), "float64")
    assert training_cases.distance(got[0], reference(case, "float64")[0]) > 1e-6
