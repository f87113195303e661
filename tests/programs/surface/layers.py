"""Layers with a state, a loss, a mask or a randomness of their own, and one of each common kind."""

import keras
import numpy as np
import tensorflow as tf

from programs.surface.program import (
    L,
    Program,
    classes,
    compiled,
    features,
    images,
    normal,
    rng,
    sequences,
    stack,
    tokens,
)

ops = keras.ops
MASKS = "Keras draws one mask per replica"
ACROSS = {"several": "replicas disagree on this model"}
UNSUMMED = {"several": "after an update: add it up over the replicas"}
UNEVEN = (61,)
"""Rows of what takes ten times as long to trace as the others: its first batches are even, the last is not."""
OF_A_REPLICA = {"several": "normalizes with the rows of its own replica"}


class Fading(L.Layer):
    """Passes on less from batch to batch, whatever is in them."""

    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="ones", trainable=False)
        self.calls = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def call(self, x, training=False):
        if training:
            self.factor.assign(self.factor * 0.9)
            self.calls.assign_add(1)
        return x * self.factor


def of_features(name, *make, **kwargs):
    """A program with layers between two Dense ones; each of `make` is called in scope."""
    return Program(
        f"layer {name}", lambda: stack((6,), L.Dense(6, activation="tanh"), *(m() for m in make)), classes, **kwargs
    )


def of_images(name, *make, **kwargs):
    return Program(f"layer {name}", lambda: stack((6, 6, 2), *(m() for m in make), L.Flatten()), images, **kwargs)


def of_sequences(name, *make, **kwargs):
    return Program(f"layer {name}", lambda: stack((5, 3), *(m() for m in make)), sequences, **kwargs)


def of_tokens(name, *make, **kwargs):
    return Program(
        f"layer {name}",
        lambda: stack((5,), L.Embedding(12, 4, mask_zero=True), *(m() for m in make), dtype="int32"),
        lambda n: (tokens(n), classes(n)[1]),
        **kwargs,
    )


def adapted(layer, data):
    layer.adapt(data)
    return layer


class Attends(L.Layer):
    """Attention of a sequence to itself."""

    def __init__(self, inner, times):
        super().__init__()
        self.inner, self.times = inner, times

    def call(self, x):
        return self.inner(*[x] * self.times) if self.times < 4 else self.inner([x, x])


class CountsExamples(L.Layer):
    """A state that each example adds to."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(ops.cast(ops.shape(x)[0], self.seen.dtype))
        return x


class CountsCalls(L.Layer):
    """A state that each update moves on, and that the output depends on."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1.0)
        return x / (1.0 + 0.1 * self.calls)


class CountsAllCalls(CountsCalls):
    """Counts its calls, in training or not; nothing is computed from that."""

    def call(self, x):
        self.calls.assign_add(1.0)
        return x


class SumOfSquares(L.Layer):
    """Its loss is a sum over the batch, and each replica has a part of that."""

    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


class RunningMaximum(L.Layer):
    """A state that is the largest value ever seen."""

    def build(self, shape):
        self.top = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="top")

    def call(self, x, training=False):
        if training:
            self.top.assign(ops.maximum(self.top, ops.max(ops.abs(x), 0)))
        return x


class CentersTheBatch(L.Layer):
    """Looks across the batch."""

    def call(self, x):
        return x - ops.mean(x, 0, keepdims=True)


class SharedTwice(keras.Model):
    """Uses a layer twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = L.Dense(6, activation="tanh"), L.Dense(5)

    def call(self, x):
        return self.outer(self.inner(self.inner(x)))


class BuiltInCall(keras.Model):
    """Makes its layers when it sees data, with arguments beside the input."""

    def build(self, shape):
        self.outer = L.Dense(5)
        self.bias = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x, training=False):
        return self.outer(x * self.bias)


def frozen_batch_norm():
    norm = L.BatchNormalization()
    norm.trainable = False
    return norm


def merging():
    x = keras.Input((6,))
    a, b = L.Dense(4, activation="tanh")(x), L.Dense(4, activation="sigmoid")(x)
    merged = [L.Add()([a, b]), L.Subtract()([a, b]), L.Multiply()([a, b]), L.Average()([a, b]), L.Dot(1)([a, b])]
    return compiled(keras.Model(x, L.Dense(5)(L.Concatenate()(merged))))


def nested():
    inner = keras.Sequential(
        [keras.Input((6,)), L.Dense(6, activation="tanh"), L.BatchNormalization(synchronized=True)]
    )
    x = keras.Input((6,))
    return compiled(keras.Model(x, L.Dense(5)(inner(L.Dense(6)(x)))))


def with_lora():
    model = stack((6,), L.Dense(6, activation="tanh"))
    model.layers[0].enable_lora(2)
    return compiled(model)


def lora_in_embedding():
    model = stack((5,), L.Embedding(12, 4), L.EinsumDense("btd,de->bte", (5, 4)), L.Flatten(), dtype="int32")
    model.layers[0].enable_lora(2)
    model.layers[1].enable_lora(2)
    return compiled(model)


NO_BROADCAST = {"multi_worker 2": "a variable of int8 cannot be created with multi_worker"}


def quantized(mode):
    model = stack((6,), L.Dense(6, activation="tanh"))
    model.quantize(mode)
    for layer in model.layers:
        layer.enable_lora(2)
    return compiled(model)


def text(n):
    words = np.array(["a red cat", "a blue dog", "the cat", "red", "dog the blue"])
    return tf.constant(words[rng().integers(0, 5, n)]), classes(n)[1]


def reads_text():
    vectorize = L.TextVectorization(output_sequence_length=4, vocabulary=["a", "red", "cat", "blue", "dog"])
    x = keras.Input((), dtype="string")
    h = L.GlobalAveragePooling1D()(L.Embedding(8, 4)(vectorize(x)))
    return compiled(keras.Model(x, L.Dense(5)(h)))


def looks_up():
    words, number = keras.Input((1,), dtype="string", name="word"), keras.Input((1,), name="number")
    ids = L.StringLookup(vocabulary=["red", "blue"], output_mode="one_hot")(words)
    bins = L.CategoryEncoding(4, output_mode="one_hot")(L.Discretization(bin_boundaries=[-1.0, 0.0, 1.0])(number))
    model = keras.Model([words, number], L.Dense(5)(L.Concatenate()([ids, bins])))
    return compiled(model)


def words_and_numbers(n):
    words = np.array(["red", "blue", "green"])[rng().integers(0, 3, (n, 1))]
    return [tf.constant(words), normal(n, 1)], classes(n)[1]


def hashes():
    x = keras.Input((2,), dtype="int32")
    looked_up = L.Embedding(8, 3)(L.IntegerLookup(vocabulary=[1, 2, 3])(x))
    hashed = L.Embedding(5, 3)(L.Hashing(5)(x))
    return compiled(keras.Model(x, L.Dense(5)(L.Flatten()(L.Concatenate()([looked_up, hashed])))))


def stateful(layer):
    model = keras.Sequential([keras.Input(batch_shape=(24, 5, 3)), layer, L.Dense(5)])
    return compiled(model)


PROGRAMS = [
    of_features("activity_regularizer", lambda: L.Dense(6, activity_regularizer=keras.regularizers.L2(0.1))),
    of_features("ActivityRegularization", lambda: L.ActivityRegularization(l2=0.1)),
    of_features("BatchNormalization", lambda: L.BatchNormalization(momentum=0.7), refused=OF_A_REPLICA),
    of_features("BatchNormalization synchronized", lambda: L.BatchNormalization(momentum=0.7, synchronized=True)),
    of_images("BatchNormalization of images", lambda: L.BatchNormalization(momentum=0.7, synchronized=True)),
    of_features("BatchNormalization frozen", frozen_batch_norm),
    of_features(
        "BatchNormalization and activity_regularizer",
        lambda: L.BatchNormalization(synchronized=True),
        lambda: L.ActivityRegularization(l2=0.1),
    ),
    of_tokens("BatchNormalization masked", lambda: L.BatchNormalization(synchronized=True), L.GlobalAveragePooling1D),
    of_features("LayerNormalization", L.LayerNormalization), of_features("RMSNormalization", L.RMSNormalization),
    of_features("GroupNormalization", lambda: L.GroupNormalization(2)),
    of_features("UnitNormalization", L.UnitNormalization),
    of_features("SpectralNormalization", lambda: L.SpectralNormalization(L.Dense(6))),
    # In the last batch there are replicas without a row.
    of_features("that keeps something by itself", lambda: L.SpectralNormalization(L.Dense(6)), Fading, rows=(49,)),
    Program("layer Normalization", lambda: stack((6,), adapted(L.Normalization(), features(50))), classes),
    of_features("Dropout of nothing", lambda: L.Dropout(0.0)),
    of_features("Dropout", lambda: L.Dropout(0.4, seed=3), unlike_one=MASKS),
    of_features("GaussianNoise", lambda: L.GaussianNoise(0.1, seed=3), unlike_one=MASKS),
    Program("layer Dense with LoRA", with_lora, classes),
    Program("layer Embedding with LoRA", lora_in_embedding, lambda n: (tokens(n), classes(n)[1])),
    Program("layer int8 with LoRA", lambda: quantized("int8"), classes, tolerance=1e-5, refused=NO_BROADCAST),
    Program("layer int4 with LoRA", lambda: quantized("int4"), classes, tolerance=1e-5, refused=NO_BROADCAST),
    of_tokens("Embedding", L.GlobalAveragePooling1D), of_tokens("LSTM masked", lambda: L.LSTM(4), rows=UNEVEN),
    of_tokens(
        "GRU masked, both ways",
        lambda: L.Bidirectional(L.GRU(3, return_sequences=True)),
        lambda: L.LSTM(4),
        rows=UNEVEN,
    ),
    of_sequences("Masking", lambda: L.Masking(0.0), lambda: L.SimpleRNN(4), rows=UNEVEN),
    of_sequences("RNN of stacked cells", lambda: L.RNN(L.StackedRNNCells([L.LSTMCell(3), L.GRUCell(4)])), rows=UNEVEN),
    of_sequences("TimeDistributed", lambda: L.TimeDistributed(L.Dense(3, activation="tanh")), L.Flatten),
    Program(
        "layer LSTM stateful",
        lambda: stateful(L.LSTM(4, stateful=True)),
        sequences,
        rows=(72,),
        refused={"several": "is stateful: it carries each row of a batch on to the next"},
    ),
    Program("layer GRU of a fixed batch", lambda: stateful(L.GRU(4)), sequences, rows=(72,)),
    of_sequences("Conv1D", lambda: L.Conv1D(4, 2, activation="tanh"), L.GlobalAveragePooling1D),
    of_sequences("SeparableConv1D", lambda: L.SeparableConv1D(4, 2), lambda: L.AveragePooling1D(2), L.Flatten),
    of_images("Conv2D", lambda: L.Conv2D(3, 3, activation="tanh"), lambda: L.AveragePooling2D(2)),
    of_images("DepthwiseConv2D", lambda: L.DepthwiseConv2D(3), lambda: L.Conv2DTranspose(2, 2)),
    of_images("Conv2D in groups", lambda: L.Conv2D(4, 3, groups=2), L.GlobalAveragePooling2D),
    of_images("MaxPooling2D", lambda: L.Conv2D(3, 3), lambda: L.MaxPooling2D(2), precision="float64"),
    of_images("shapes", lambda: L.ZeroPadding2D(1), lambda: L.Cropping2D(2), lambda: L.UpSampling2D(2)),
    of_images("Reshape", lambda: L.Reshape((12, 6)), lambda: L.Permute((2, 1)), lambda: L.Dense(3)),
    of_features("RepeatVector", lambda: L.RepeatVector(2), lambda: L.LSTM(3), rows=UNEVEN),
    of_sequences("MultiHeadAttention", lambda: Attends(L.MultiHeadAttention(2, 3), 2), L.GlobalAveragePooling1D),
    of_sequences("GroupQueryAttention", lambda: Attends(L.GroupQueryAttention(3, 4, 2), 2), L.Flatten),
    of_sequences("Attention", lambda: Attends(L.Attention(use_scale=True), 4), L.Flatten),
    of_sequences("AdditiveAttention", lambda: Attends(L.AdditiveAttention(), 4), L.Flatten),
    of_features("activations", lambda: L.PReLU(), L.ELU, L.Softmax, precision="float64"),
    of_features("ReLU", L.ReLU, L.LeakyReLU, precision="float64"),
    of_features("Lambda", lambda: L.Lambda(lambda x: x * x), L.Identity), Program("layer merging", merging, classes),
    Program("layer of a nested model", nested, classes),
    Program("layer used twice", lambda: compiled(SharedTwice()), classes),
    Program("layer made in build", lambda: compiled(BuiltInCall()), classes),
    of_features("that counts examples", CountsExamples, refused=UNSUMMED),
    of_features("that counts calls", CountsCalls),
    of_features("with a running maximum", RunningMaximum, refused=UNSUMMED),
    of_features("that looks across the batch", CentersTheBatch, refused=ACROSS),
    Program("layer TextVectorization", reads_text, text),
    Program("layer StringLookup and Discretization", looks_up, words_and_numbers),
    Program("layer Hashing", hashes, lambda n: (rng().integers(0, 6, (n, 2)).astype("int32"), classes(n)[1])),
    Program(
        "layer Rescaling",
        lambda: stack((6, 6, 2), L.Rescaling(1 / 255), L.CenterCrop(4, 4), L.Resizing(3, 3), L.Flatten()),
        lambda n: (rng().integers(0, 256, (n, 6, 6, 2)).astype("uint8"), classes(n)[1]),
    ),
    of_images("RandomFlip", lambda: L.RandomFlip(seed=3), unlike_one=MASKS),
    Program(
        "layer mixed precision in part",
        lambda: stack((6,), L.Dense(6, dtype="mixed_bfloat16")),
        classes,
        tolerance=1e-2,
    ),
    Program("layer ops of TensorFlow", lambda: stack((6,), L.Lambda(lambda x: tf.math.cumsum(x, axis=-1))), classes),
]  # fmt: skip
