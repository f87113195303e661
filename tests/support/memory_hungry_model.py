"""A model that has not the memory for many examples at a time, for the tests that need one."""

import keras
import tensorflow as tf


class Greedy(keras.layers.Layer):
    """Asks for 256 TiB when it sees more rows than `most` in training, after it was called `after` times."""

    def __init__(self, most, after=0, **kwargs):
        super().__init__(**kwargs)
        self.most, self.after = most, after

    def build(self, shape):
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls")

    def call(self, x, training=False):
        if not training:
            return x
        self.calls.assign(self.calls + 1)
        much = (tf.shape(x)[0] > self.most) & (tf.convert_to_tensor(self.calls) > self.after)
        size = tf.where(much, tf.constant(2**46, tf.int64), tf.constant(1, tf.int64))
        return x + tf.fill([size], 0.0)[0]


def model(spec, most, after=0):
    layers = [keras.Input(spec.shape), Greedy(most, after), keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Dense(spec.classes)])
