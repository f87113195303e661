"""The check before an evaluation or a prediction; what is right is what Keras computes on one device."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from programs.surface.layers import CentersTheBatch, CountsExamples
from support.covering import first

import tfdist
from tfdist.step import step_calls
from tfdist.verification import equivalence_check

L, ops = keras.layers, keras.ops
X = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
Y = np.random.default_rng(1).normal(size=(24, 1)).astype("float32")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(equivalence_check, "passed_folder", lambda: tmp_path)


def made(distribution, *layers, model=keras.Model, loss="mse", compiled=True):
    keras.utils.set_random_seed(0)
    with distribution.scope():
        x = keras.Input((6,))
        y = L.Dense(4, activation="tanh")(x)
        for layer in layers:
            y = layer()(y)
        built = model(x, L.Dense(1)(y))
        if compiled:
            built.compile(keras.optimizers.SGD(0.01), loss, metrics=None if model is SumStep else ["mae"])
    return built


def evaluated(distribution, *layers, choice="auto", shards=0, **of_model):
    model = made(distribution, *layers, **of_model)
    options = dict(distribution=distribution, batch_size=8, verbose=0, virtual_replicas=shards)
    return tfdist.evaluate(model, X, Y, check_agreement=choice, **options)


def predicted(distribution, *layers, choice="auto", shards=0, **of_model):
    model = made(distribution, *layers, **of_model)
    options = dict(distribution=distribution, batch_size=8, verbose=0, virtual_replicas=shards)
    return tfdist.predict(model, X, check_agreement=choice, **options)


def whole(*values):
    return pytest.param(*values, marks=pytest.mark.whole)


class CentersUnlessItTrains(L.Layer):
    def call(self, x, training=False):
        return x if training else x - ops.mean(x, 0, keepdims=True)


def centers_unless_it_trains(x, training=False):
    return x if training else x - ops.mean(x, axis=0)


class Ranks(L.Layer):
    def call(self, x):
        return x + ops.cast(ops.argsort(ops.argsort(x, 0), 0), x.dtype)


class AddsUp(L.Layer):
    """Gives each row the sum of those before it."""

    def call(self, x):
        return ops.cumsum(x, 0)


class KeepsTheLargest(L.Layer):
    """Has a metric that is no sum over parts of a batch."""

    def build(self, shape):
        self.largest = Largest(name="largest")

    def call(self, x):
        self.largest.update_state(x)
        return x


class Largest(keras.metrics.Metric):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, values, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(values)))

    def result(self):
        return self.value + 0.0


class DividesBySumsOfBatches(keras.metrics.Mean):
    """Adds up only where no row has a weight."""

    def update_state(self, y, outputs, sample_weight=None):
        if sample_weight is not None:
            sample_weight = sample_weight / ops.sum(sample_weight)
        super().update_state(ops.abs(y - outputs), sample_weight)


class SumsItsLoss(L.Layer):
    def call(self, x):
        self.add_loss(ops.sum(ops.square(x)))
        return x


class SumStep(keras.Model):
    def test_step(self, batch):
        x, y = batch
        return {"total": ops.sum(ops.square(y - self(x, training=False)))}


class CentersPredictions(keras.Model):
    def predict_step(self, x):
        y = self(x, training=False)
        return y - ops.mean(y, 0, keepdims=True)


# -- what is right ------------------------------------------------------------


@pytest.mark.parametrize("measured", [whole(evaluated), whole(predicted)])
def test_a_model_that_is_the_same_says_so_once(connect, said, measured):
    measured(connect(2), L.LayerNormalization)
    assert [line for line in said if line.startswith("checked: 1 and 2 replicas agree on ")], said
    said.clear()
    measured(connect(2), L.LayerNormalization)
    measured(connect(2), L.LayerNormalization, choice="off")
    assert not said, "it has passed"
    measured(connect(2), L.LayerNormalization, choice="on")
    measured(connect(2), L.LayerNormalization, L.ReLU)
    assert len(said) == 2
    measured(connect(1), CentersTheBatch)
    assert len(said) == 2, "one replica has nothing to agree with"


# -- what is not --------------------------------------------------------------

ADDS_UP = AddsUp, {}, r"since layer 'adds_up.*' looks at the other rows of a batch"
OF_BOTH = [
    whole(CentersTheBatch, {},
          r"since layer 'centers.*' looks at the other rows of a batch: change that, use strategy=default"),
    whole(Ranks, {}, r"since layer 'ranks.*' looks at the other rows"),
    whole(CentersUnlessItTrains, {}, r"since layer 'centers_unless_it_trains.*' looks at the other rows"),
    whole(lambda: L.Softmax(axis=0), {}, r"since layer 'softmax.*' looks at the other rows"),
]  # fmt: skip
OF_MEASURES = [
    *OF_BOTH,
    whole(*ADDS_UP),
    (KeepsTheLargest, {}, r"metric 'largest' differs by .*: leave it out, use strategy=default, or accept it"),
    whole(SumsItsLoss, {},
          r"add_loss differs by .*, which layer sums_its_loss.* gives: make it a mean over the examples"),
    whole(L.ReLU, {"model": SumStep},
          r"log 'total' differs by .*: what test_step of SumStep gives is not a mean over examples"),
]  # fmt: skip
OF_PREDICTIONS = [
    *OF_BOTH,
    ADDS_UP,
    whole(
        L.ReLU, {"model": CentersPredictions}, r"predict_step of CentersPredictions looks at the other rows of a batch;"
    ),
    (CentersTheBatch, {"compiled": False}, r"output 'dense.*' differs by .*, since layer 'centers"),
]


@pytest.mark.parametrize("layer, of_model, words", OF_MEASURES)
def test_an_evaluation_that_would_differ_is_refused(connect, layer, of_model, words):
    with pytest.raises(tfdist.UserError, match=f"^1 and 2 replicas disagree on this model in an evaluation: .*{words}"):
        evaluated(connect(2), layer, **of_model)
    got = evaluated(connect(2), layer, choice="off", **of_model)
    expected = made(connect(1), layer, **of_model).evaluate(X, Y, 8, verbose=0, return_dict=True)
    assert any(abs(got[name] - expected[name]) > 1e-3 * abs(expected[name]) for name in expected), "refused for nothing"


@pytest.mark.parametrize("layer, of_model, words", OF_PREDICTIONS)
def test_a_prediction_that_would_differ_is_refused(connect, layer, of_model, words):
    with pytest.raises(tfdist.UserError, match=f"^1 and 2 replicas disagree on this model in a prediction: .*{words}"):
        predicted(connect(2), layer, **of_model)
    got = predicted(connect(2), layer, choice="off", **of_model)
    expected = made(connect(1), layer, **of_model).predict(X, 8, verbose=0)
    assert np.abs(got - expected).max() > 1e-3, "refused for nothing"


@pytest.mark.parametrize("layer", first(1, [CentersUnlessItTrains, lambda: L.Lambda(centers_unless_it_trains)]))
def test_what_a_training_does_not_show_is_checked_before_it(connect, said, layer):
    """Its layers are told that they train; its validation is not."""
    model = made(connect(2), layer)
    here = dict(distribution=connect(2), batch_size=8, verbose=0)
    with pytest.raises(tfdist.UserError, match="disagree on this model in an evaluation"):
        tfdist.fit(model, X, Y, validation_data=(X, Y), **here)
    tfdist.fit(model, X, Y, **here)
    with pytest.raises(tfdist.UserError, match="disagree on this model in an evaluation"):
        tfdist.evaluate(model, X, Y, **here)
    with pytest.raises(tfdist.UserError, match="disagree on this model in a prediction"):
        tfdist.predict(model, X, **here)


@pytest.mark.parametrize("measured", [evaluated, whole(predicted)])
def test_shards_are_checked_on_one_device(connect, said, measured):
    with pytest.raises(tfdist.UserError, match=r"^a batch and its 3 virtual .* disagree .*: change that, leave"):
        measured(connect(1), CentersTheBatch, shards=3)
    measured(connect(1), L.ReLU, shards=3)
    assert said[-1].startswith("checked: a batch and its 3 virtual replicas agree on ")


def test_random_models_cannot_be_checked(connect, said):
    evaluated(connect(2), lambda: L.Lambda(lambda t: t + tf.random.normal(tf.shape(t))))
    assert said[-1].startswith("WARNING: not checked whether 1 and 2 replicas agree: the model draws random numbers")


def test_outputs_of_all_types_are_compared(connect, said):
    """Some are no numbers, and of some it is meant that they are not finite."""

    def several(distribution, layer):
        with distribution.scope():
            x = keras.Input((6,))
            z = layer()(x)
            masked = L.Lambda(lambda t: ops.where(t > 0, t, -np.inf))(z)
            text = L.Lambda(lambda t: tf.strings.as_string(t[:, 0], precision=2), output_shape=())(z)
            whole = L.Lambda(lambda t: ops.cast(t * 100, "int32"))(z)
            return keras.Model(x, {"masked": masked, "whole": whole, "half": ops.cast(z, "bfloat16")}), text

    model, _ = several(connect(2), L.Identity)
    outputs = tfdist.predict(model, X, distribution=connect(2), verbose=0, check_agreement="on")
    assert said[-1].startswith("checked: 1 and 2 replicas agree on predicting with this model, outputs 0e+00")
    np.testing.assert_array_equal(outputs["whole"], several(connect(1), L.Identity)[0].predict(X, verbose=0)["whole"])
    with pytest.raises(tfdist.UserError, match="since layer 'centers"):
        tfdist.predict(several(connect(2), CentersTheBatch)[0], X, distribution=connect(2), verbose=0)


# -- without a trace ----------------------------------------------------------


class DrawsAndCounts(L.Layer):
    """Changes whatever a call can change."""

    def build(self, shape):
        self.seeds = keras.random.SeedGenerator(3)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x):
        self.calls.assign_add(1.0)
        drawn = tf.numpy_function(lambda: np.float32(np.random.rand() + random.random()), [], tf.float32)
        return x + 0.0 * (keras.random.uniform((), seed=self.seeds) + tf.ensure_shape(drawn, []))


@pytest.mark.parametrize("name", first(1, ["predict", "evaluate"]))
def test_nothing_of_a_check_stays_anywhere(connect, monkeypatch, name):
    outcomes, measured = [], getattr(tfdist, name)
    for choice in ("on", "off"):
        model = made(connect(2), DrawsAndCounts, CountsExamples, KeepsTheLargest)
        given = (X, Y) if name == "evaluate" else (X,)
        here = dict(distribution=connect(2), batch_size=8, verbose=0)
        if name == "evaluate":
            monkeypatch.setattr(step_calls, "run", lambda *a, **k: pytest.fail("a batch before the check"))
            with pytest.raises(BaseException, match="disagree" if choice == "on" else "a batch before the check"):
                measured(model, *given, check_agreement=choice, **here)
            monkeypatch.undo()
        measured(model, *given, check_agreement=choice if name == "predict" else "off", **here)
        copies = [c.numpy() for v in model.variables for c in getattr(v.value, "values", (v.value,))]
        metrics = [c.numpy() for v in model.metrics_variables for c in getattr(v.value, "values", (v.value,))]
        outcomes.append([*copies, *metrics, np.random.rand(), random.random()])
    for one, other in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(one, other)


ROWS = {  # outputs whose rows are not those of the batch
    "two each": lambda h: keras.ops.reshape(h, (-1, 2)),
    "two each, beside others": lambda h: {"h": h, "boxes": keras.ops.reshape(h, (-1, 2))},
    "the same for all": lambda h: {"h": h, "c": keras.ops.ones((3,))},
    "a number": lambda h: {"h": h, "s": keras.ops.sum(keras.ops.ones((2,)))},
    "one column for each row": lambda h: keras.ops.matmul(h, keras.ops.transpose(h)),
    "of pairs": lambda h: keras.ops.reshape(keras.ops.flip(keras.ops.reshape(h, (-1, 2, 4)), 1), (-1, 4)),
}


@pytest.mark.parametrize("replicas", first(1, [2, 1]))
@pytest.mark.parametrize("rows", first(3, ROWS))
def test_outputs_with_other_rows_are_those_of_keras_or_refused(connect, rows, replicas):
    with connect(replicas).scope():
        x = keras.Input((6,))
        model = keras.Model(x, keras.layers.Lambda(ROWS[rows])(keras.layers.Dense(4)(x)))
    options = dict(batch_size=8, verbose=0)
    data = np.random.default_rng(0).normal(size=(40 if rows.startswith("one") else 36, 6))
    if replicas > 1:
        with pytest.raises(tfdist.UserError, match=r"^1 and 2 replicas disagree on this model in a prediction"):
            tfdist.predict(model, data, distribution=connect(replicas), **options)
        return
    mine, theirs = tfdist.predict(model, data, distribution=connect(1), **options), model.predict(data, **options)
    keras.tree.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), mine, theirs)


@pytest.mark.parametrize("weights_in", first(1, ["evaluate", "fit", "validation"]))
def test_a_model_that_passed_without_weights_is_checked_again_with_them(connect, weights_in):
    x, w = np.random.default_rng(0).normal(size=(24, 1)), np.arange(1.0, 25)
    distribution = connect(2)
    with distribution.scope():
        model = keras.Sequential([keras.Input((1,)), L.Dense(1)])
        model.compile("sgd", "mse", weighted_metrics=[DividesBySumsOfBatches(name="weighted")])
    options = {"distribution": distribution, "batch_size": 8}
    if weights_in != "validation":
        tfdist.fit(model, x, x, **options)
    calls = {
        "evaluate": lambda: tfdist.evaluate(model, x, x, sample_weight=w, **options),
        "fit": lambda: tfdist.fit(model, x, x, sample_weight=w, **options),
        "validation": lambda: tfdist.fit(model, x, x, validation_data=(x, x, w), **options),
    }
    with pytest.raises(tfdist.UserError, match="metric 'weighted' differs by"):
        calls[weights_in]()


class TakesTwo(keras.Model):
    """Has a train_step that knows of no weights, which its validation has."""

    def train_step(self, data):
        x, y = data
        return super().train_step((x, y))


@pytest.mark.whole
def test_weights_of_the_validation_are_not_given_to_the_training(connect):
    x, distribution = np.random.default_rng(0).normal(size=(24, 1)), connect(2)
    with distribution.scope():
        inputs = keras.Input((1,))
        model = TakesTwo(inputs, L.Dense(1)(inputs))
        model.compile("sgd", "mse", weighted_metrics=["mae"])
    data = (x, x, np.arange(1.0, 25))
    history = tfdist.fit(model, x, x, batch_size=8, validation_data=data, distribution=distribution).history
    assert history["val_mae"][0] > 0
