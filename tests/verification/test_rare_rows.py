"""Models that compute something across a batch in rare rows only are refused on replicas before the first update."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from support.covering import first

import tfdist

L = keras.layers


class Clips(keras.Model):
    in_graph = False

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        derived = tf.gradients if self.in_graph else tape.gradient
        gradients, _ = tf.clip_by_global_norm(derived(loss, [v.value for v in self.trainable_variables]), 500.0)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


class Masks(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        kept = ops.cast(y[:, 0] > -50, "float32")
        return ops.sum(kept * ops.mean(ops.square(y - y_pred), -1)) / ops.maximum(ops.sum(kept), 1.0)


class AddsForFew(L.Layer):
    def call(self, x):
        few = ops.cast(x[:, 0] > 8, "float32")
        self.add_loss(ops.sum(few * ops.sum(ops.square(x), -1)) / ops.maximum(ops.sum(few), 1.0))
        return x


class ScalesByMaximum(L.Layer):
    def build(self, shape):
        self.most = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x, training=False):
        if training:
            self.most.assign(ops.maximum(self.most, ops.max(x)))
        return x / ops.convert_to_tensor(self.most)


PROGRAMS = {
    "clip in a graph": (type("InGraph", (Clips,), {"in_graph": True}), (), "train_step of InGraph changes gradients"),
    "clip": (Clips, (), "train_step of Clips changes gradients by their size, as a clip does"),
    "masked loss": (Masks, (), "compute_loss of Masks computes is not a mean over examples"),
    "add_loss": (keras.Model, (AddsForFew,), "add_loss differs by .* make it a mean over the examples"),
    "maximum": (keras.Model, (ScalesByMaximum,), "the variable '.*' differs by"),
}


def data():
    random = np.random.RandomState(0)
    x, y = random.rand(400, 4).astype("float32"), random.randn(400, 2).astype("float32")
    rare = random.choice(400, 30, replace=False)
    x[rare] *= 20
    y[rare] = -99
    return x, y


@pytest.mark.parametrize("program", first(3, sorted(PROGRAMS, reverse=True)))
def test_what_rare_rows_would_change_is_refused(connect, program):
    model_class, layers, message = PROGRAMS[program]
    x, y = data()
    if "clip" in program:  # none of these rows makes a gradient that large
        x, y = x / 20, np.maximum(y, -1)
    keras.utils.set_random_seed(0)
    with connect(2).scope():
        inputs = keras.Input((4,))
        outputs = inputs
        for layer in layers:
            outputs = layer()(outputs)
        model = model_class(inputs, L.Dense(2)(outputs))
        model.compile(keras.optimizers.SGD(0.01), "mse")
    with pytest.raises(tfdist.UserError, match=message):
        tfdist.fit(model, x, y, batch_size=16, distribution=connect(2), verbose=0)
