"""A model that has not the memory for many examples at a time, for the tests that need one."""

import os
import signal

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


class Fatal(Greedy):
    """Ends its process as the kernel does when memory runs out."""

    def act(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def call(self, x, training=False):
        def looked_at(rows):
            if rows > self.most:
                self.act()
            return rows

        rows = tf.shape(x)[0]
        same = tf.ensure_shape(tf.py_function(looked_at, [rows], tf.int32), []) - rows
        return x + tf.cast(same, x.dtype)


class Stuck(Fatal):
    """Never comes back when it sees more rows than `most`."""

    def act(self):
        signal.pause()


class Faulty(Greedy):
    """Has a mistake in it."""

    def call(self, x, training=False):
        raise ValueError("a mistake")


def model(spec, most, after=0, kind="Greedy"):
    layers = [keras.Input(spec.shape), globals()[kind](most, after), keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Dense(spec.classes)])
