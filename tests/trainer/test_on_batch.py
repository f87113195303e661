"""`train_on_batch`, `test_on_batch` and `predict_on_batch` return what Keras returns on one device, call by call."""

import functools
import operator
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import training_cases
from support.covering import first
from support.training_cases import L, compiled, dense, images, rng, two_outputs_data

import tfdist
from tfdist.keras_bridge import keras_internals
from tfdist.trainer import on_batch


def ours(distribution, **options):
    """The three functions of a distribution."""
    options, names = {"distribution": distribution, **options}, ("train_on_batch", "test_on_batch", "predict_on_batch")
    return types.SimpleNamespace(**{name: functools.partial(getattr(on_batch, name), **options) for name in names})


class OwnSteps(keras.Model):
    def train_step(self, data):
        x, y, weight = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), weight)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, "twice": 2 * loss}

    def test_step(self, data):
        x, y, weight = data
        return {"half": self.compute_loss(x, y, self(x, training=False), weight) / 2}

    def predict_step(self, data):
        return 2 * self(data[0])


def own_steps():
    plain = dense()
    return compiled(OwnSteps(plain.inputs, plain.outputs), metrics=None)


def weighed():
    return compiled(
        dense(kernel_regularizer="l2"),
        weighted_metrics=["accuracy", keras.metrics.F1Score("macro", name="f1")],
        loss="mse",
    )


MODELS = {
    "dense": (lambda: compiled(dense()), images), "batch norm": (lambda: compiled(training_cases.batch_norm()), images),
    "two outputs": (training_cases.compile_two_outputs, two_outputs_data), "own steps": (own_steps, images),
    "weighed": (weighed, training_cases.one_hot),
}  # fmt: skip


def made(name, distribution):
    keras.utils.set_random_seed(3)
    with distribution.scope():
        return MODELS[name][0]()


def calls(name, by, model, sizes):
    """Makes calls of all kinds with batches of these sizes; returns what they return, and the weights at the end."""
    x, y = MODELS[name][1](sum(sizes))
    weights, seen, start = rng().uniform(0.1, 3, sum(sizes)).astype("float32"), [], 0
    for i, size in enumerate(sizes):
        rows = slice(start, start + size)
        start += size
        xs, ys = keras.tree.map_structure(operator.itemgetter(rows), (x, y))
        single = not isinstance(ys, dict)
        options = [{}, {"sample_weight": weights[rows]}, {"class_weight": {0: 3.0, 2: 0.2}}][i % 3 if single else 0]
        seen.append(by.train_on_batch(model, xs, ys, **options))
        options.pop("class_weight", None)
        seen.append(by.test_on_batch(model, xs, ys, return_dict=True, **options))
        seen.append(by.predict_on_batch(model, xs))
    return seen, model.get_weights()


@pytest.mark.covering(1)
@pytest.mark.parametrize("replicas", first(2, [2, 1, 3]))
@pytest.mark.parametrize("name", first(2, sorted(MODELS, key=lambda name: name != "own steps")))
def test_agrees_with_keras(name, replicas, connect):
    # Before, Keras averaged the losses of single outputs over batches, whatever their length.
    even = name == "batch norm" or (name == "two outputs" and not keras_internals.RESETS_ON_BATCH)
    sizes = [12] * 3 if even else [12, 12, 7, 12, 1, 12, 9] if name == "dense" else [12, 7, 1, 12]
    got = calls(name, ours(connect(replicas), check_agreement="off"), made(name, connect(replicas)), sizes)
    judge = made(name, connect(1))
    judge.run_eagerly = True  # Keras would trace each number of rows anew
    expected = calls(name, keras.Model, judge, sizes)
    if keras_internals.RESETS_ON_BATCH:  # before, numbers were arrays without dimensions
        assert keras.tree.map_structure(type, got) == keras.tree.map_structure(type, expected)
    training_cases.all_same(keras.tree.flatten(got), keras.tree.flatten(expected), rtol=1e-4, atol=1e-5)


def gan(distribution):
    keras.utils.set_random_seed(3)
    with distribution.scope():
        judge = keras.Sequential([keras.Input((6,)), L.Dense(8, "tanh"), L.Dense(1, "sigmoid")])
        judge.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return judge


def adversarial(by, distribution, pattern):
    """Trains a generator and its judge in turn; returns what the calls return, and the weights."""
    judge, seen, random = gan(distribution), [], np.random.RandomState(1)
    if pattern == "trained before":
        seen.append(by.train_on_batch(judge, random.randn(12, 6).astype("float32"), np.ones((12, 1))))
    with distribution.scope():
        makes = keras.Sequential([keras.Input((3,)), L.Dense(6, "tanh"), L.Dense(6)])
        judge.trainable = False
        noise = keras.Input((3,))
        both = keras.Model(noise, judge(makes(noise)))
        both.compile("adam", "binary_crossentropy")
    for _ in range(3):
        z, real = random.randn(6, 3).astype("float32"), random.randn(6, 6).astype("float32")
        x = np.concatenate([real, by.predict_on_batch(makes, z)])
        judge.trainable = pattern == "toggled"
        seen.append(by.train_on_batch(judge, x, np.repeat([[1.0], [0.0]], 6, 0)))
        judge.trainable = False
        seen.append(by.train_on_batch(both, z, np.ones((6, 1))))
    return seen, [*judge.get_weights(), *makes.get_weights()]


@pytest.mark.covering(1)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("pattern", ["toggled", "frozen", "trained before"])
def test_two_models_train_in_turn(pattern, replicas, connect):
    """Before Keras 3 the judge was trained although frozen; its first batch decides."""
    got = adversarial(ours(connect(replicas), check_agreement="off"), connect(replicas), pattern)
    expected = adversarial(keras.Model, connect(1), pattern)
    training_cases.all_same(keras.tree.flatten(got), keras.tree.flatten(expected), rtol=1e-4, atol=1e-5)


def test_what_is_trainable_changes_with_compile_alone(connect):
    by, model, (x, y) = ours(connect(2)), made("dense", connect(2)), images(12)
    by.train_on_batch(model, x, y)
    kept, model.layers[1].trainable = model.layers[1].get_weights(), False
    with pytest.raises(tfdist.UserError, match=r"updated other weights than this would, .*: after a change of what is"):
        by.train_on_batch(model, x[:8], y[:8])
    training_cases.all_same(kept, model.layers[1].get_weights())
    with connect(2).scope():
        compiled(model)
    by.train_on_batch(model, x[:8], y[:8])
    np.testing.assert_array_equal(model.layers[1].get_weights()[0], kept[0])


def test_older_keras_goes_on_from_call_to_call(connect, monkeypatch):
    monkeypatch.setattr(keras_internals, "RESETS_ON_BATCH", False)
    by, model, (x, y) = ours(connect(2)), made("dense", connect(2)), images(24)
    expected = made("dense", connect(1)).evaluate(x, y, verbose=0)
    by.test_on_batch(model, x[:5], y[:5])
    np.testing.assert_allclose(by.test_on_batch(model, x[5:], y[5:]), expected, rtol=1e-5)
    model.reset_metrics()
    np.testing.assert_allclose(by.test_on_batch(model, x, y), expected, rtol=1e-5)


def test_the_first_call_compares_one_replica_with_all(connect):
    x, y = images(12)
    with connect(2).scope():
        across = L.Lambda(lambda x: x - keras.ops.mean(x, 0))
        model = compiled(keras.Sequential([keras.Input((4, 4, 1)), L.Flatten(), L.Dense(5), across]))
    before = model.get_weights()
    with pytest.raises(tfdist.UserError, match="1 and 2 replicas disagree on this model: loss"):
        on_batch.train_on_batch(model, x, y, distribution=connect(2))
    training_cases.all_same(before, model.get_weights())


@pytest.mark.parametrize("call, message", [
    (lambda by, m, x, y: by.train_on_batch(m, x, y, y, {0: 2.0}), "sample_weight and class_weight both weigh"),
    (lambda by, m, x, y: by.train_on_batch(m, x, y[:3]), "one entry per example each, got lengths x 12, y 3"),
    (lambda by, m, x, y: by.test_on_batch(m, x[:0], y[:0]), "the data set is empty"),
    (lambda by, m, x, y: by.train_on_batch(dense(), x, y), "the model is not compiled"),
])  # fmt: skip
def test_what_cannot_be_used_is_refused(call, message, connect):
    with pytest.raises(tfdist.UserError, match=message):
        call(ours(connect(1)), made("dense", connect(1)), *images(12))


@pytest.mark.whole
def test_virtual_replicas_give_the_same_bits_on_any_number_of_replicas(connect):
    found = lambda n: calls("weighed", ours(connect(n), virtual_replicas=4), made("weighed", connect(n)), [12, 1])
    training_cases.all_same(keras.tree.flatten(found(1)), keras.tree.flatten(found(3)))
