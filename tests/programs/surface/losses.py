"""Losses of every kind."""

import keras
import numpy as np

from programs.surface.layers import SumOfSquares
from programs.surface.program import (
    L,
    Program,
    binary,
    classes,
    compiled,
    dense,
    features,
    normal,
    numbers,
    one_hot,
    rng,
    several_hot,
    shares,
    signs,
    sparse,
    tokens,
    weighed,
)

losses, ops = keras.losses, keras.ops


def loss(name, make, data, activation=None, units=5, **kwargs):
    """A program around one loss; `make` is called in scope."""
    return Program(
        f"loss {name}",
        lambda: compiled(dense(units, activation), make(), metrics=["mae"] if data is numbers else None),
        data,
        **kwargs,
    )


def ctc():
    """Labels of two characters from five steps; class 0 is the blank."""
    model = keras.Sequential([keras.Input((5, 3)), L.Dense(6, "tanh"), L.Dense(4)])
    return compiled(model, losses.CTC())


def paths(n):
    return normal(n, 5, 3), rng().integers(1, 4, (n, 2))


def masks_of_pictures(n):
    return features(n), rng().integers(0, 2, (n, 2, 2, 1)).astype("float32")


def segmenter(make):
    return compiled(
        keras.Sequential([keras.Input((6,)), L.Dense(4, activation="sigmoid"), L.Reshape((2, 2, 1))]), make()
    )


def circle():
    embedding = [L.Dense(4), L.UnitNormalization()]
    return compiled(keras.Sequential([keras.Input((6,)), *embedding]), losses.Circle(gamma=4.0))


def squares(y, p):
    return ops.mean(ops.square(p - y), -1)


def one_number(y, p):
    return ops.mean(ops.square(p - y))


def total(y, p):
    """A sum over the batch; twice the rows are twice the loss."""
    return 0.01 * ops.sum(ops.square(p - y))


def of_loss_objects(y, p):
    return losses.MeanSquaredError()(y, p) + 0.5 * losses.Huber(delta=0.3)(y, p)


def of_loss_functions(y, p):
    return losses.mean_squared_error(y, p) + 0.5 * losses.log_cosh(y, p)


def hardest(y, p):
    """Needs some rows, as in online hard example mining."""
    return ops.mean(ops.top_k(ops.mean(ops.square(y - p), -1), 6)[0])


def across_the_batch(y, p):
    """Correlation over the batch, which is not a mean over examples."""
    y, p = y - ops.mean(y, 0), p - ops.mean(p, 0)
    return 1 - ops.sum(y * p) / ops.sqrt(ops.sum(y * y) * ops.sum(p * p))


def in_batch_negatives(y, p):
    """Each example against all others of the batch: one value per example, but not of that example alone."""
    logits = ops.matmul(p, ops.transpose(p))
    return ops.logsumexp(logits, -1) - ops.sum(y * p, -1)


class Pinball(losses.Loss):
    def __init__(self, quantile, **kwargs):
        super().__init__(**kwargs)
        self.quantile = quantile

    def call(self, y, p):
        return ops.mean(ops.maximum(self.quantile * (y - p), (self.quantile - 1) * (y - p)), -1)


class OwnCall(losses.Loss):
    """Overrides what reduces."""

    def __call__(self, y, p, sample_weight=None):
        return ops.mean(ops.square(y - p))


def two_heads(outputs="dict", **compile_options):
    x = keras.Input((6,), name="x")
    h = L.Dense(6, activation="tanh")(x)
    kind, size = L.Dense(5, name="kind")(h), L.Dense(1, name="size")(h)
    model = keras.Model(x, {"kind": kind, "size": size} if outputs == "dict" else [kind, size])
    model.compile(keras.optimizers.SGD(0.1), **compile_options)
    return model


def of_two_heads(n):
    x, y = classes(n)
    return x, {"kind": y, "size": normal(n, 1, seed=3)}


def of_two_heads_listed(n):
    x, y = of_two_heads(n)
    return x, [y["kind"], y["size"]]


def of_two_heads_weighed(n):
    weights = {"kind": rng(5).uniform(0.2, 3, n), "size": rng(6).uniform(0.2, 3, n)}
    return *of_two_heads(n), weights


def tagger(loss=None, activation=None, **kwargs):
    layers = [keras.Input((5,), dtype="int32"), L.Embedding(12, 4, mask_zero=True), L.Dense(5, activation)]
    return compiled(keras.Sequential(layers), loss, **kwargs)


def tagged(n):
    return tokens(n), rng(4).integers(0, 5, (n, 5))


def tagged_weighed(n):
    return *tagged(n), rng(5).uniform(0.2, 3.0, (n, 5)).astype("float32")


def some_ignored(n):
    x, y = classes(n)
    return x, np.where(np.arange(n) % 4 == 0, -1, y)


class AddsMean(L.Layer):
    """An add_loss that is a mean over examples."""

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


class AddsOfWeights(L.Layer):
    """An add_loss that no example has a part in."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        self.add_loss(0.1 * ops.sum(ops.square(self.scale)))
        return x * self.scale


class AddsInModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = L.Dense(6, activation="tanh"), L.Dense(5)

    def call(self, x):
        h = self.inner(x)
        self.add_loss(0.05 * ops.mean(ops.abs(h)))
        return self.outer(h)


class Autoencoder(keras.Model):
    """Has no compiled loss at all."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = L.Dense(3, activation="tanh"), L.Dense(6)

    def call(self, x):
        out = self.outer(self.inner(x))
        self.add_loss(ops.mean(ops.square(out - x)))
        return out


def adding(layer):
    return compiled(keras.Sequential([keras.Input((6,)), L.Dense(6, activation="tanh"), layer, L.Dense(5)]))


class OwnComputeLoss(keras.Model):
    """Weighs two terms by itself."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = L.Dense(6, activation="tanh"), L.Dense(5)

    def call(self, x):
        return self.outer(self.inner(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred)) + 0.1 * ops.mean(ops.abs(y_pred))


class ExtendedComputeLoss(OwnComputeLoss):
    """Adds to what compile() was given."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        given = keras.Model.compute_loss(self, x, y, y_pred, sample_weight)
        return given + 0.1 * ops.mean(ops.abs(y_pred))


def without_loss(model):
    model.compile(keras.optimizers.SGD(0.1))
    return model


PROGRAMS = [
    loss("BinaryCrossentropy", lambda: losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1), several_hot),
    loss("BinaryFocalCrossentropy", lambda: losses.BinaryFocalCrossentropy(from_logits=True,
                                                                           apply_class_balancing=True), several_hot),
    Program("loss CTC", ctc, paths),
    loss("CategoricalCrossentropy", lambda: losses.CategoricalCrossentropy(True, label_smoothing=0.1), one_hot),
    loss("CategoricalFocalCrossentropy", lambda: losses.CategoricalFocalCrossentropy(from_logits=True), one_hot),
    loss("CategoricalGeneralizedCrossEntropy", lambda: losses.CategoricalGeneralizedCrossEntropy(), classes, "softmax"),
    loss("CategoricalHinge", lambda: losses.CategoricalHinge(), one_hot, precision="float64"),
    Program("loss Circle", circle, classes),
    loss("CosineSimilarity", lambda: losses.CosineSimilarity(), numbers),
    Program("loss Dice", lambda: segmenter(losses.Dice), masks_of_pictures),
    Program("loss Dice by example", lambda: segmenter(lambda: losses.Dice(axis=(1, 2, 3))), masks_of_pictures),
    loss("Hinge", lambda: losses.Hinge(), signs, precision="float64"),
    loss("Huber", lambda: losses.Huber(0.5), numbers),
    loss("KLDivergence", lambda: losses.KLDivergence(), shares, "softmax"),
    loss("LogCosh", lambda: losses.LogCosh(), numbers),
    loss("MeanAbsoluteError", lambda: losses.MeanAbsoluteError(), numbers, precision="float64"),
    loss("MeanAbsolutePercentageError", lambda: losses.MeanAbsolutePercentageError(), shares, precision="float64"),
    loss("MeanSquaredError", lambda: losses.MeanSquaredError(), numbers),
    loss("MeanSquaredLogarithmicError", lambda: losses.MeanSquaredLogarithmicError(), shares, "softplus"),
    loss("Poisson", lambda: losses.Poisson(), shares, "softplus"),
    loss("SparseCategoricalCrossentropy", lambda: sparse(), classes),
    loss("SquaredHinge", lambda: losses.SquaredHinge(), signs),
    Program("loss Tversky", lambda: segmenter(lambda: losses.Tversky(0.3, 0.7)), masks_of_pictures),
    loss("that ignores a class", lambda: sparse(ignore_class=-1), some_ignored),
    loss("by name", lambda: "kl_divergence", shares, "softmax"),
    loss("crossentropy by name", lambda: "crossentropy", one_hot, "softmax"),
    loss("summed", lambda: losses.MeanSquaredError(reduction="sum"), numbers, tolerance=2e-6),
    loss("mean by weight", lambda: losses.Huber(reduction="mean_with_sample_weight"), weighed(numbers)),
    loss("summed with weights", lambda: losses.LogCosh(reduction="sum"), weighed(numbers)),
    loss("not reduced", lambda: losses.MeanSquaredError(reduction=None), numbers, unlike_keras="it refuses",
         refused={"default": "leaves nothing to minimize", "several": "leaves nothing to minimize"}),
    loss("in float64", lambda: losses.MeanSquaredError(dtype="float64"), numbers),
    loss("function by example", lambda: squares, weighed(numbers)),
    loss("function of one number", lambda: one_number, numbers),
    loss("function that sums", lambda: total, numbers),
    loss("function of loss objects", lambda: of_loss_objects, numbers),
    loss("function of loss functions", lambda: of_loss_functions, weighed(numbers)),
    loss("function across the batch", lambda: across_the_batch, numbers),
    loss("function of the hardest rows", lambda: hardest, numbers),
    loss("function with negatives of the batch", lambda: in_batch_negatives, numbers),
    loss("own class", lambda: Pinball(0.8, name="pinball"), weighed(numbers), precision="float64"),
    loss("own __call__", lambda: OwnCall(), numbers),
    loss("a single logit", lambda: losses.BinaryCrossentropy(from_logits=True), weighed(binary), units=1),
    Program("loss two outputs", lambda: two_heads(loss={"kind": sparse(), "size": "mse"}, loss_weights={"kind": 0.7,
                                                                                                        "size": 2.0}),
            of_two_heads, inexact=("kind_loss", "size_loss")),
    Program("loss two outputs listed", lambda: two_heads("list", loss=[sparse(), "huber"], loss_weights=[0.7, 2.0],
                                                         metrics=[["accuracy"], ["mae"]]), of_two_heads_listed,
            inexact=("kind_loss", "size_loss")),
    Program("loss two outputs with weights of their own", lambda: two_heads(loss={"kind": sparse(), "size": "mse"},
                                                                            weighted_metrics={"kind": ["accuracy"],
                                                                                              "size": []}),
            of_two_heads_weighed, inexact=("kind_loss", "size_loss")),
    Program("loss one output of two", lambda: two_heads(loss={"kind": sparse(), "size": None}), of_two_heads),
    Program("loss masked", tagger, tagged),
    Program("loss masked and summed", lambda: tagger(sparse(reduction="sum")), tagged),
    Program("loss masked with weights by token", tagger, tagged_weighed),
    Program("loss masked in a function", lambda: tagger(losses.sparse_categorical_crossentropy, "softmax"), tagged),
    Program("loss added by a layer", lambda: adding(AddsMean()), classes),
    Program("loss added by a layer as a sum", lambda: adding(SumOfSquares()), classes,
            refused={"several": "make it a mean over the examples"}),
    Program("loss added by a layer of weights", lambda: adding(AddsOfWeights()), classes),
    Program("loss added by a model", lambda: compiled(AddsInModel()), classes),
    Program("loss only added", lambda: without_loss(Autoencoder()), lambda n: (features(n),)),
    Program("loss only of regularizers", lambda: without_loss(dense(kernel_regularizer="l2")), lambda n: (features(n),
                                                                                                          )),
    Program("loss own compute_loss", lambda: without_loss(OwnComputeLoss()), numbers),
    Program("loss extended compute_loss", lambda: compiled(ExtendedComputeLoss(), "mse"), numbers),
]  # fmt: skip
