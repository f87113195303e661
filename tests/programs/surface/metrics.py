"""Metrics of every kind."""

import keras
import numpy as np

from programs.surface.losses import of_two_heads, tagged, tagged_weighed, two_heads
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
    weighed,
)

metrics, ops = keras.metrics, keras.ops


def measured(name, make, data, loss="mse", activation=None, units=5, weighted=False, **kwargs):
    """A program around metrics; `make` is called in scope and returns a list."""
    where = "weighted_metrics" if weighted else "metrics"
    return Program(
        f"metrics {name}",
        lambda: compiled(dense(units, activation), loss, **{where: make()}),
        weighed(data) if weighted else data,
        **kwargs,
    )


def of_probabilities():
    return [
        metrics.BinaryAccuracy(), metrics.BinaryCrossentropy(), metrics.AUC(num_thresholds=20),
        metrics.AUC(num_thresholds=20, curve="PR", name="pr"), metrics.Precision(),
        metrics.Recall(thresholds=[0.3, 0.6]), metrics.TruePositives(), metrics.TrueNegatives(),
        metrics.FalsePositives(), metrics.FalseNegatives(), metrics.PrecisionAtRecall(0.5, 20),
        metrics.RecallAtPrecision(0.5, 20), metrics.SensitivityAtSpecificity(0.5, 20),
        metrics.SpecificityAtSensitivity(0.5, 20), metrics.BinaryIoU([0, 1], threshold=0.5),
    ]  # fmt: skip


def of_class_numbers():
    return [
        metrics.SparseCategoricalAccuracy(), metrics.SparseCategoricalCrossentropy(from_logits=True),
        metrics.SparseTopKCategoricalAccuracy(2), metrics.IoU(5, [0, 2], sparse_y_pred=False),
        metrics.MeanIoU(5, sparse_y_pred=False), "accuracy",
    ]  # fmt: skip


def of_one_hot_classes():
    return [
        metrics.CategoricalAccuracy(), metrics.CategoricalCrossentropy(), metrics.TopKCategoricalAccuracy(2),
        metrics.OneHotIoU(5, [1, 3]), metrics.OneHotMeanIoU(5), metrics.F1Score(average="weighted"),
        metrics.FBetaScore(beta=2.0, average="micro"), metrics.F1Score(name="f1_by_class"), metrics.CategoricalHinge(),
        "accuracy",
    ]  # fmt: skip


def of_numbers():
    return [
        metrics.MeanAbsoluteError(), metrics.MeanSquaredError(), metrics.RootMeanSquaredError(), metrics.LogCoshError(),
        metrics.CosineSimilarity(), metrics.R2Score(), metrics.R2Score(class_aggregation=None, name="r2_by_output"),
        metrics.MeanMetricWrapper(lambda y, p: ops.max(ops.abs(y - p), -1), name="farthest"),
    ]  # fmt: skip


def of_positive_numbers():
    return [
        metrics.MeanSquaredLogarithmicError(), metrics.MeanAbsolutePercentageError(), metrics.Poisson(),
        metrics.KLDivergence(),
    ]  # fmt: skip


def scalar(y, p):
    return ops.mean(ops.abs(y - p))


def largest_error(y, p):
    return ops.max(ops.abs(y - p))


def by_example(y, p):
    return ops.mean(ops.abs(y - p), -1)


class Largest(metrics.Metric):
    """A metric whose state does not add up."""

    def __init__(self, name="largest", **kwargs):
        super().__init__(name=name, **kwargs)
        self.value = self.add_weight(initializer="zeros", name="value")

    def update_state(self, y, p, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.cast(ops.max(ops.abs(y - p)), self.dtype)))

    def result(self):
        return self.value


class OverEpochs(metrics.MeanSquaredError):
    """A metric that is never reset."""

    def reset_state(self):
        pass


class Fading(metrics.MeanSquaredError):
    """A metric in which each epoch counts half of the next."""

    def reset_state(self):
        self.total.assign(self.total / 2)
        self.count.assign(self.count / 2)


class Highest(Largest):
    """The largest output above zero."""

    def update_state(self, y, p, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.cast(ops.max(p), self.dtype)))


class Lowest(metrics.Metric):
    """The smallest output of all, which begins as infinity."""

    def __init__(self, name="lowest", **kwargs):
        super().__init__(name=name, **kwargs)
        self.value = self.add_weight(initializer=keras.initializers.Constant(float("inf")), name="value")

    def update_state(self, y, p, sample_weight=None):
        self.value.assign(ops.minimum(self.value, ops.cast(ops.min(p), self.dtype)))

    def result(self):
        return self.value


def of_zeros():
    zeros = L.Dense(5, kernel_initializer="zeros")
    return compiled(keras.Sequential([keras.Input((6,)), zeros]), "mse", metrics=[Highest()])


def of_rising_outputs():
    """Outputs that are what goes in, which training hardly changes."""
    model = keras.Sequential([keras.Input((1,)), L.Dense(1, use_bias=False, kernel_initializer="ones")])
    return compiled(model, "mse", keras.optimizers.SGD(1e-3), metrics=[Highest(), Lowest()])


def rising(n):
    """Numbers of which only the last third is above zero."""
    x = np.linspace(-2.0, 1.0, n, dtype="float32")[:, None]
    return x, x


class Batches(metrics.Metric):
    """Counts its updates, not examples."""

    def __init__(self, name="batches", **kwargs):
        super().__init__(name=name, **kwargs)
        self.count = self.add_weight(initializer="zeros", name="count")

    def update_state(self, y, p, sample_weight=None):
        self.count.assign_add(1.0)

    def result(self):
        return self.count


class MeanOfBatches(metrics.Mean):
    """A mean of one number per update."""

    def update_state(self, y, p, sample_weight=None):
        super().update_state(ops.sqrt(ops.mean(ops.square(y - p))))


class Counted(metrics.Metric):
    """A metric of one's own that adds up."""

    def __init__(self, name="counted", **kwargs):
        super().__init__(name=name, **kwargs)
        self.near = self.add_weight(initializer="zeros", name="near")
        self.all = self.add_weight(initializer="zeros", name="all")

    def update_state(self, y, p, sample_weight=None):
        near = ops.cast(ops.mean(ops.abs(y - p), -1) < 0.8, self.dtype)
        weight = ops.ones_like(near) if sample_weight is None else ops.cast(sample_weight, self.dtype)
        self.near.assign_add(ops.sum(near * weight))
        self.all.assign_add(ops.sum(weight))

    def result(self):
        return {"near": self.near / self.all, "of": self.all}


class Late(Counted):
    """Makes its variables when it sees data."""

    def __init__(self, name="late", **kwargs):
        metrics.Metric.__init__(self, name=name, **kwargs)
        self.near = None

    def update_state(self, y, p, sample_weight=None):
        if self.near is None:
            self.near = self.add_weight(initializer="zeros", name="near")
            self.all = self.add_weight(initializer="zeros", name="all")
        super().update_state(y, p, sample_weight)


class Watched(L.Layer):
    """Owns a metric and updates it in call."""

    def __init__(self, make, **kwargs):
        super().__init__(**kwargs)
        self.metric = make()

    def call(self, x):
        self.metric.update_state(ops.mean(ops.abs(x), -1))
        return x


def watched(make):
    return compiled(keras.Sequential([keras.Input((6,)), L.Dense(6, activation="tanh"), Watched(make), L.Dense(5)]))


class Rounding(keras.Model):
    """Predicts integers, whose gradient is that of what it rounds."""

    def __init__(self):
        super().__init__()
        self.outer = L.Dense(1)

    def call(self, x):
        out = self.outer(x)
        return out + ops.stop_gradient(ops.round(out) - out)


class OwnsMetric(keras.Model):
    """A model that keeps a metric of its own beside the compiled ones."""

    def __init__(self):
        super().__init__()
        self.outer, self.size = L.Dense(5), metrics.Mean(name="size")

    def call(self, x):
        out = self.outer(x)
        self.size.update_state(ops.abs(out))
        return out


class OwnComputeMetrics(keras.Model):
    def __init__(self):
        super().__init__()
        self.outer = L.Dense(5)

    def call(self, x):
        return self.outer(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "constant": 3.0}


def tagger(**kwargs):
    model = keras.Sequential([keras.Input((5,), dtype="int32"), L.Embedding(12, 4, mask_zero=True), L.Dense(5)])
    return compiled(model, **kwargs)


def pictures(n):
    return features(n), rng().integers(0, 3, (n, 2, 2))


def segmenter():
    model = keras.Sequential([keras.Input((6,)), L.Dense(12), L.Reshape((2, 2, 3))])
    return compiled(model, metrics=[metrics.MeanIoU(3, sparse_y_pred=False), "accuracy"])


def columns(n):
    """One output, whose correlation is of the whole data set."""
    return features(n), normal(n, 1, seed=12)


def small_integers(n):
    return features(n), rng().integers(-1, 2, (n, 1)).astype("float32")


PROGRAMS = [
    measured("of probabilities", of_probabilities, binary, "binary_crossentropy", "sigmoid", 1),
    measured("of probabilities, weighted", of_probabilities, binary, "binary_crossentropy", "sigmoid", 1, True),
    measured(
        "areas by label",
        lambda: [metrics.AUC(10, multi_label=True, num_labels=5), metrics.AUC(10, multi_label=True, name="late")],
        several_hot,
        "binary_crossentropy",
        "sigmoid",
    ),
    measured("of class numbers", of_class_numbers, classes, sparse()),
    measured("of class numbers, weighted", of_class_numbers, classes, sparse(), weighted=True),
    measured("of one-hot classes", of_one_hot_classes, one_hot, "categorical_crossentropy", "softmax"),
    measured(
        "of one-hot classes, weighted", lambda: of_one_hot_classes()[:7], one_hot, "mse", "softmax", weighted=True
    ),
    measured("of numbers", lambda: of_numbers(), numbers),
    measured("of numbers, weighted", lambda: of_numbers(), numbers, weighted=True),
    measured("of positive numbers", of_positive_numbers, shares, "mse", "softmax"),
    measured("of signs", lambda: [metrics.Hinge(), metrics.SquaredHinge()], signs, "squared_hinge"),
    Program("metrics Accuracy", lambda: compiled(Rounding(), "mse", metrics=[metrics.Accuracy()]), small_integers),
    measured(
        "correlations", lambda: [metrics.PearsonCorrelation(), metrics.ConcordanceCorrelation()], columns, units=1
    ),
    measured("function by example", lambda: [by_example], numbers),
    measured("function of one number", lambda: [scalar], numbers),
    measured("function of one number, a maximum", lambda: [largest_error], numbers),
    measured("loss objects", lambda: [keras.losses.Huber(0.3), keras.losses.CosineSimilarity()], numbers),
    measured("functions of keras", lambda: [keras.losses.log_cosh, keras.metrics.mean_absolute_error], numbers),
    measured("a maximum", lambda: [Largest()], numbers),
    measured("that keep their state", lambda: [OverEpochs(name="over"), Fading(name="fading")], numbers),
    # The rows that metrics are tried on have no output above zero.
    Program("metrics a maximum that begins at zero", of_rising_outputs, rising),
    Program("metrics a maximum of outputs that begin at zero", of_zeros, numbers),
    measured("a count of updates", lambda: [Batches()], numbers),
    measured("a mean over updates", lambda: [MeanOfBatches(name="rmse")], numbers),
    measured("own update_state", lambda: [Counted()], numbers),
    measured("own update_state, weighted", lambda: [Counted()], numbers, weighted=True),
    measured("built late", lambda: [metrics.F1Score(average="macro", threshold=0.5), metrics.R2Score()], several_hot),
    # Several replicas of one process make its variables in threads.
    measured(
        "of one's own, built late",
        lambda: [Late()],
        numbers,
        refused=dict.fromkeys(("mirrored 2", "mirrored 3"), "metric 'of' differs"),
    ),
    measured("in float64", lambda: [metrics.MeanSquaredError(dtype="float64")], numbers),
    measured("both kinds", lambda: ["mae", metrics.R2Score()], numbers, weighted=True),
    Program("metrics Mean of a layer", lambda: watched(lambda: metrics.Mean(name="size")), classes),
    Program("metrics Sum of a layer", lambda: watched(lambda: metrics.Sum(name="size")), classes),
    Program("metrics of a model", lambda: compiled(OwnsMetric(), metrics=["accuracy"]), classes),
    Program("metrics masked", lambda: tagger(metrics=["accuracy"]), tagged),
    Program("metrics masked and weighted", lambda: tagger(weighted_metrics=["accuracy"]), tagged_weighed),
    Program("metrics of pictures", segmenter, pictures),
    Program(
        "metrics by output",
        lambda: two_heads(
            loss={"kind": sparse(), "size": "mse"}, metrics={"kind": ["accuracy"], "size": ["mae", metrics.R2Score()]}
        ),
        of_two_heads,
        inexact=("kind_loss", "size_loss"),
    ),
    Program("metrics own compute_metrics", lambda: compiled(OwnComputeMetrics(), "mse", metrics=["mae"]), numbers),
]
