"""Code of the user's own that asks a shape how many rows there are, as Keras lets it where all batches are alike."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.covering import first

import tfdist

RNG, BATCH = np.random.default_rng(0), 8
X, Y = RNG.normal(size=(16, 4)).astype("float32"), RNG.normal(size=(16, 1)).astype("float32")


class Plain(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)


class Knows(Plain):
    def call(self, x):
        return self.dense(x) if x.shape[0] else x[:, :1]  # which the check would find to be alike


class OfLibrary(Knows):
    call = types.FunctionType(Knows.call.__code__.replace(co_filename="/site-packages/layers.py"), globals())


class Computes(Plain):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return over_rows(y, y_pred)


class Steps(Plain):
    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = over_rows(y, self(x, training=True)) + tf.reduce_sum(tf.zeros((x.shape[0], 1)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"summed": loss}

    def test_step(self, data):
        return {"summed": over_rows(data[1], self(data[0]))}

    def predict_step(self, data):
        return self(data) + tf.zeros((data.shape[0], 1))


class SetsRate(Steps):
    def train_step(self, data):
        self.optimizer.learning_rate.assign(0.8 / data[0].shape[0])
        return super().train_step(data)


def over_rows(y, y_pred):
    return tf.reduce_sum(tf.square(y - y_pred)) / y.shape[0]


def compiled(kind):
    keras.utils.set_random_seed(0)
    model = kind()
    model.compile("sgd", over_rows if kind is Plain else "mse")
    return model


def numbers(kind):
    few, model = BATCH // 2, compiled(kind)
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).batch(few, drop_remainder=True)
    seen = [model.fit(X, Y, few, shuffle=False, verbose=0, validation_data=(X, Y), validation_batch_size=BATCH)]
    seen += [model.fit(rows, epochs=2, verbose=0), model.evaluate(X, Y, BATCH, verbose=0)]
    seen[:2] = [[history.history[name] for name in sorted(history.history)] for history in seen[:2]]
    if kind is not Steps:  # to which Keras gives three entries there
        seen += [model.train_on_batch(X[:few], Y[:few]), model.test_on_batch(X[:BATCH], Y[:BATCH])]
    return keras.tree.flatten([seen, model.predict(X[:3], 1, verbose=0), *model.get_weights()])


OTHERS = [(k, r) for k in (Plain, Knows, OfLibrary, Computes, Steps) for r in (1, 2, 3)]


@pytest.mark.parametrize("kind, replicas", first(2, dict.fromkeys([(Plain, 1), (OfLibrary, 2), *OTHERS])))
def test_it_knows_the_rows_of_a_replica(kind, replicas, connect):
    expected = numbers(kind)
    tfdist.patch_keras(connect(replicas))
    try:
        found = numbers(kind)
    finally:
        tfdist.unpatch_keras()
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-5, 1e-6)


def test_a_replica_with_as_many_rows_as_columns_adds_a_column_to_rows(connect):
    """Keras took it for a bias on two replicas, where it does not on one device: it trained to other weights."""

    def weights(fit, **options):
        keras.utils.set_random_seed(0)
        hidden = keras.layers.Dense(4)(x := keras.Input((4,)))
        model = keras.Model(x, keras.layers.Dense(1)(hidden + hidden[:, :1]))
        model.compile("sgd", "mse")
        fit(model, X, Y, batch_size=BATCH, shuffle=False, verbose=0, **options)
        return model.get_weights()

    with connect(2).scope():
        found = weights(tfdist.fit, distribution=connect(2))
    for ours, theirs in zip(found, weights(keras.Model.fit), strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-5, 1e-6)


@pytest.mark.parametrize("kind", (Plain, Knows))
def test_micro_batches_know_theirs(kind, connect):
    expected, model = compiled(kind), compiled(kind)
    expected.fit(X, Y, BATCH, shuffle=False, verbose=0)
    tfdist.fit(model, X, Y, batch_size=BATCH, accumulate=2, distribution=connect(1), shuffle=False, verbose=0)
    for ours, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-5, 1e-6)


def test_what_is_not_a_mean_over_rows_is_refused(connect):
    distribution = connect(2)
    with distribution.scope():
        model = compiled(SetsRate)
    with pytest.raises(tfdist.UserError, match=r"^1 and 2 replicas disagree on this model: .*learning_rate' differs"):
        tfdist.fit(model, X, Y, batch_size=BATCH, distribution=distribution, verbose=0)
