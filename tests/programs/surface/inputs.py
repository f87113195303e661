"""Inputs of every kind that arrays and tf.data have."""

import itertools

import keras
import numpy as np
import tensorflow as tf

from programs.surface.losses import of_two_heads, tagged_weighed, tagger, two_heads
from programs.surface.program import L, Program, classes, compiled, dense, features, normal, sparse, weighed


def given(name, data, build=None, fit=None, **kwargs):
    """A program around one kind of data."""
    fit = fit or (lambda folder: {})
    return Program(f"input {name}", build or (lambda: compiled(dense(), metrics=["accuracy"])), data, fit, **kwargs)


def two_inputs(kind):
    a, b = keras.Input((6,), name="a"), keras.Input((2,), name="b")
    inputs = {"dict": {"a": a, "b": b}, "list": [a, b], "nested": {"a": a, "more": [b]}}[kind]
    return compiled(keras.Model(inputs, L.Dense(5)(L.Concatenate()([a, b]))), metrics=["accuracy"])


def of_two_inputs(kind):
    def data(n):
        (a, y), b = classes(n), normal(n, 2, seed=2)
        return {"dict": {"a": a, "b": b}, "list": [a, b], "nested": {"a": a, "more": [b]}}[kind], y

    return data


class TakesDict(keras.Model):
    def __init__(self):
        super().__init__()
        self.outer = L.Dense(5)

    def call(self, x):
        return self.outer(keras.ops.concatenate([x["a"], x["b"]], -1))


class Reconstructs(keras.Model):
    """Needs no targets."""

    def __init__(self):
        super().__init__()
        self.outer = L.Dense(6)

    def call(self, x):
        out = self.outer(x)
        self.add_loss(keras.ops.mean(keras.ops.square(out - x)))
        return out


def without_targets():
    model = Reconstructs()
    model.compile(keras.optimizers.SGD(0.1))
    return model


def dataset(n, columns=classes, batch=24):
    return tf.data.Dataset.from_tensor_slices(columns(n)).batch(batch)


def of_unknown_length(n):
    return dataset(n).filter(lambda x, y: True)


def generated(n):
    x, y = classes(n)
    x, y = x.astype("float32"), y.astype("int64")

    def batches():
        for at in range(0, n, 24):
            yield x[at : at + 24], y[at : at + 24]

    spec = (tf.TensorSpec((None, 6), "float32"), tf.TensorSpec((None,), "int64"))
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


def of_unequal_batches(n):
    """The first batch is the largest, as tfdist asks; the others differ."""
    x, y = classes(n)
    cuts = [0, 24, 41, 51, n]
    parts = [(x[a:b], y[a:b]) for a, b in itertools.pairwise(cuts) if b > a]
    spec = (tf.TensorSpec((None, 6), "float32"), tf.TensorSpec((None,), "int64"))
    return tf.data.Dataset.from_generator(lambda: iter(parts), output_signature=spec)


def frame(n):
    x, y = classes(n)
    return tf.constant(x), tf.constant(y)


def column(n):
    x, y = classes(n)
    return x, y[:, None]


BALANCED = {"class_weight": {0: 3.0, 2: 0.2, 4: 1.5}}


def validated(**options):
    return lambda folder: {"validation_data": classes(31), **options}


PROGRAMS = [
    given("dict", of_two_inputs("dict"), lambda: two_inputs("dict")),
    given("list", of_two_inputs("list"), lambda: two_inputs("list")),
    given("nested", of_two_inputs("nested"), lambda: two_inputs("nested")),
    given("dict of a subclassed model", of_two_inputs("dict"), lambda: compiled(TakesDict())),
    given("tensors", frame),
    given("float64", lambda n: (features(n).astype("float64"), classes(n)[1].astype("float64"))),
    given("integers", lambda n: ((10 * features(n)).astype("int64"), classes(n)[1])),
    given("booleans", lambda n: (features(n) > 0, classes(n)[1])),
    given("half", lambda n: (features(n).astype("float16"), classes(n)[1].astype("uint8"))),
    given("a column of targets", column),
    given("weights", weighed(classes), lambda: compiled(dense(), weighted_metrics=["accuracy"])),
    given("weights of zero", lambda n: (*classes(n), (np.arange(n) % 3 > 0).astype("float32"))),
    given("integer weights", lambda n: (*classes(n), np.arange(n) % 3)),
    given("a column of weights", lambda n: (*classes(n), 0.5 + np.arange(n)[:, None] / n)),
    given("weights by token", tagged_weighed, lambda: tagger(weighted_metrics=["accuracy"])),
    given("class weights", classes, fit=lambda folder: BALANCED),
    given("class weights beside weights", weighed(classes), fit=lambda folder: BALANCED,
          unlike_keras="it refuses both at a time; tfdist multiplies them"),
    given(
        "class weights of one-hot rows",
        lambda n: (classes(n)[0], np.eye(5, dtype="float32")[classes(n)[1]]),
        lambda: compiled(dense(), keras.losses.CategoricalCrossentropy(from_logits=True)),
        lambda folder: BALANCED,
    ),
    given("two outputs, one weight", weighed(of_two_heads), lambda: two_heads(loss={"kind": sparse(), "size": "mse"}),
          inexact=("kind_loss", "size_loss")),
    given("validation", classes, fit=validated()),
    given("validation now and then", classes, fit=validated(validation_freq=2, validation_batch_size=7), epochs=3),
    given("validation in part", classes, fit=validated(validation_freq=[1, 3], validation_batch_size=10,
                                                       validation_steps=2), epochs=3),
    given("validation weighed", classes, fit=lambda folder: {"validation_data": weighed(classes)(31)}),
    given("validation of tf.data", classes, fit=lambda folder: {"validation_data": dataset(31)}),
    given("initial_epoch", classes, fit=lambda folder: {"initial_epoch": 1}, epochs=3),
    given("tail smaller than the replicas", classes, rows=(49, 25)),
    given("fewer rows than a batch", classes, rows=(5, 1)),
    given("batch that no number of replicas divides", classes, batch=25, rows=(61,)),
    given("tf.data", dataset),
    given("tf.data of dicts", lambda n: dataset(n, of_two_inputs("dict")), lambda: two_inputs("dict")),
    given("tf.data with weights", lambda n: dataset(n, weighed(classes))),
    given("tf.data without targets", lambda n: dataset(n).map(lambda x, y: x), without_targets),
    given("tf.data of unknown length", of_unknown_length),
    given("tf.data from a generator", generated),
    given("tf.data with unequal batches", of_unequal_batches),
    given("tf.data prefetched", lambda n: dataset(n).map(lambda x, y: (2 * x, y)).prefetch(2)),
    given("tf.data without the tail", lambda n: dataset(n).unbatch().batch(24, drop_remainder=True),
          unlike_keras="the step that finds the end of the data still counts 24 rows in its metrics"),
    given("tf.data, steps_per_epoch", dataset, fit=lambda folder: {"steps_per_epoch": 2}, epochs=1),
    given("tf.data with class weights", dataset, fit=lambda folder: BALANCED),
]  # fmt: skip
