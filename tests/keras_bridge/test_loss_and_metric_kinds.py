"""Which metrics must see a whole batch is found out by trying them, before anything is trained."""

import contextlib
import dataclasses
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from programs.surface.metrics import Highest, Lowest
from support.covering import first

import tfdist
from tfdist.keras_bridge import loss as loss_lib
from tfdist.keras_bridge import metrics


@pytest.mark.parametrize("metric, outputs", [
    (Highest, 1.0),
    (Highest, -1.0),  # no row is above the zero with which it begins
    (Lowest, 1.0), (keras.metrics.MeanSquaredError, -1.0),
    (keras.metrics.Poisson, 1.0),  # of numbers below zero it is NaN
])  # fmt: skip
def test_a_metric_that_does_not_add_up_is_noticed(metric, outputs):
    y, y_pred = keras.ops.ones((8, 2)), keras.ops.full((8, 2), outputs)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", metrics=[metric()])
    metrics.create_variables(model, y, y_pred)
    metrics.classify(model, y, y_pred)
    found = [type(m) for m in metrics.whole_metrics(model)]
    assert found == ([metric] if metric in (Highest, Lowest) else [])


def test_workers_sum_all_that_metrics_have_counted_in_one_message(connect):
    here, messages = connect(2), []

    def all_sum(tensors):
        messages.append(len(tensors))
        return here.all_sum(tensors)

    # As if the replicas were workers; mirrored ones let TensorFlow sum, which is the independent answer.
    far = dataclasses.replace(here, all_sum=all_sum, peers=types.SimpleNamespace(size=2, rank=0))
    x, y = tf.random.stateless_normal((7, 3), [1, 2]), tf.constant([0, 1, 2, 0, 1, 1, 2])
    with here.scope():
        top = keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy", Highest(), top])
        metrics.create_variables(model, y, model(x))

    @tf.function(autograph=False)
    def update():
        here.run(of_replica, ())

    def of_replica():
        begin = 5 * here.replica_id()
        for metric in model.metrics[1].metrics:
            metric.update_state(y[begin : begin + 5], model(x[begin : begin + 5]))

    update()
    results = lambda distribution: tf.function(lambda: metrics.results(model, distribution), autograph=False)()
    found = [results(here), results(far)]
    assert messages[0] == messages[1] == 5 and len(messages) == 2  # one on each replica
    assert set(found[0]) == {"accuracy", "largest", "top"}
    for name in found[0]:
        tf.debugging.assert_near(found[0][name], found[1][name])
    tf.debugging.assert_equal(found[1]["top"], results(far)["top"])  # what was counted is still there


@pytest.mark.covering(0)
@pytest.mark.parametrize("dtype", first(2, ["float16", "uint8", "float32", "int64"]))
@pytest.mark.parametrize("replicas", [1, 2])
def test_accuracy_of_labels_of_every_type_is_that_of_keras(connect, replicas, dtype):
    """Labels of 2.4 stand for no class: Keras counts them as wrong."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 4)).astype("float32"), rng.integers(0, 3, 40) + 0.4 * (np.arange(40) % 2)
    with connect(replicas).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, kernel_initializer="orthogonal")])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=["accuracy", "sparse_categorical_accuracy"])
    alone = keras.models.clone_model(model)
    alone.set_weights(model.get_weights())
    alone.compile("sgd", loss, metrics=["accuracy", "sparse_categorical_accuracy"])
    options = {"distribution": connect(replicas), "verbose": 0, "check_agreement": "off"}
    mine = tfdist.evaluate(model, x, y.astype(dtype), **options)
    theirs = alone.evaluate(x, y.astype(dtype), return_dict=True, verbose=0)
    assert mine == pytest.approx(theirs, rel=1e-6)


def _drops_rows(y, y_pred):
    keep = y[:, 0] > -50
    return tf.reduce_mean(tf.square(tf.boolean_mask(y, keep) - tf.boolean_mask(y_pred, keep)), -1)


def _per_positive(y, y_pred):
    entropies = keras.ops.binary_crossentropy(keras.ops.cast(y > 0, "float32"), y_pred, from_logits=True)
    return keras.ops.sum(entropies, -1) / keras.ops.maximum(keras.ops.sum(keras.ops.cast(y > 0, "float32")), 1.0)


class ClassesSeen(keras.metrics.Metric):
    """The share of the classes that has occurred, which is a maximum and no sum."""

    def __init__(self, name="classes_seen"):
        super().__init__(name=name)
        self.seen = self.add_weight(shape=(30,), initializer="zeros", name="seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ones = keras.ops.one_hot(keras.ops.cast(keras.ops.reshape(y_true[:, 0], (-1,)), "int32") % 30, 30)
        self.seen.assign(keras.ops.maximum(self.seen, keras.ops.max(ones, 0)))

    def result(self):
        return keras.ops.mean(self.seen)


class OfTheFirst(keras.metrics.Mean):
    """The mean target of the first 100 examples, which seems to add up for fewer."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        rows = keras.ops.arange(keras.ops.shape(y_true)[0], dtype="float32") + self.count
        super().update_state(y_true[:, 0], sample_weight=keras.ops.cast(rows < 100, "float32"))


@pytest.mark.parametrize("replicas", first(0, [2, 1]))
@pytest.mark.parametrize("loss", first(1, [_drops_rows, _per_positive]))
def test_losses_that_depend_on_rare_rows_are_those_of_keras(connect, replicas, loss):
    """None of the rows with which losses are tried is rare: a few of 200 are unlabelled, or positive."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 4)).astype("float32"), np.arange(200, dtype="float32")[:, None] % 90 - 89
    rare = rng.choice(np.arange(3, 190), 12, False)
    y[rare] = -99 if loss is _drops_rows else 1
    results = []
    for trained_by in ("keras", "tfdist"):
        keras.utils.set_random_seed(0)
        with connect(replicas if trained_by == "tfdist" else 1).scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(1e-4), loss, metrics=[ClassesSeen(), OfTheFirst()])
        options = dict(batch_size=16, epochs=2, shuffle=False, verbose=0)
        if trained_by == "keras":
            history = model.fit(x, y, **options)
        else:
            history = tfdist.fit(model, x, y, distribution=connect(replicas), **options)
        read = {name: [float(value)] for name, value in model.get_metrics_result().items()}  # as a callback may
        results.append((history.history | {f"read {n}": v for n, v in read.items()}, model.get_weights()))
    (theirs, their_weights), (mine, my_weights) = results
    assert mine == pytest.approx({name: pytest.approx(values, rel=1e-5) for name, values in theirs.items()})
    for one, other in zip(my_weights, their_weights):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replicas", first(0, [1, 2]))
def test_a_weight_of_an_example_weighs_all_its_values(connect, replicas):
    """With as many rows on a replica as columns, Keras' broadcast would lay the weights along the columns."""
    random = np.random.default_rng(0)
    x, y, weight = random.normal(size=(10, 5, 5, 3)), random.integers(0, 3, (10, 5, 5)), random.uniform(size=10)
    distribution = connect(replicas)
    with distribution.scope():
        model = keras.Sequential([keras.Input((5, 5, 3)), keras.layers.Activation("softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
    loss = tfdist.evaluate(model, x, y, sample_weight=weight, batch_size=10, verbose=0, distribution=distribution)
    probabilities = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    values = -np.log(np.take_along_axis(probabilities, y[..., None], -1)[..., 0])
    assert loss["loss"] == pytest.approx((values.mean((1, 2)) * weight).mean(), rel=1e-5)


@pytest.mark.whole
def test_a_loss_with_many_values_takes_no_weight_per_example_on_several_replicas(connect):
    """The check before the first training has seen no weights."""
    x, distribution = np.random.default_rng(0).normal(size=(12, 3)), connect(2)
    with distribution.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
        model.compile("sgd", lambda y, prediction: keras.ops.abs(y - prediction))
    tfdist.fit(model, x, x, batch_size=6, verbose=0, distribution=distribution)
    with pytest.raises(tfdist.UserError, match=r"returns \[3\] values per example, and there is one weight for each"):
        tfdist.fit(model, x, x, batch_size=6, sample_weight=np.ones(12), verbose=0, distribution=distribution)


def test_a_weight_of_a_loss_is_as_precise_as_the_loss():
    assert loss_lib.LossTerm("a", 0.3, tf.zeros([])).weighted(tf.constant(7.0, tf.float64)).numpy() == 0.3 * 7.0


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_metric_that_is_updated_by_hand_counts_all(connect, replicas):
    """As after `predict`. TensorFlow gives each replica a part of a sum, and integers have no halves."""
    random = np.random.default_rng(0)
    y, y_pred = random.integers(0, 2, 61), random.integers(0, 2, 61)
    with connect(replicas).scope():
        metric = keras.metrics.MeanIoU(2, name="by_hand")  # others are told by the names that Keras numbers
        variable = keras.Variable(3.0)
    for begin in range(0, 61, 5):
        metric.update_state(y[begin : begin + 5], y_pred[begin : begin + 5])
    counts = np.asarray(keras.ops.convert_to_numpy(metric.total_cm))
    np.testing.assert_array_equal(counts, tf.math.confusion_matrix(y, y_pred, 2))
    with tf.GradientTape() as tape:  # nor has a weight a gradient there
        loss = keras.ops.square(variable)
    assert tape.gradient(loss, variable.value) == 6


class FirstRows(keras.metrics.Metric):
    """A mean over the first 1,000 examples, or until the sum is 40, as of a score that takes long."""

    def __init__(self, by_sum, **kwargs):
        super().__init__(**kwargs)
        self.sum, self.count, self.by_sum = self.add_variable((), "zeros"), self.add_variable((), "zeros"), by_sum

    def update_state(self, y, p, sample_weight=None):
        error = keras.ops.mean(keras.ops.abs(y - p), -1)
        left = keras.ops.where(self.sum < 40.0, 1e9, 0.0) if self.by_sum else 1000.0 - self.count
        taken = keras.ops.cast(keras.ops.cast(keras.ops.arange(keras.ops.shape(error)[0]), "float32") < left, "float32")
        self.sum.assign_add(keras.ops.sum(error * taken))
        self.count.assign_add(keras.ops.sum(taken))

    def result(self):
        return self.sum / keras.ops.maximum(self.count, 1.0)


class Ever(keras.metrics.Metric):
    """Whether any error was large."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.ever = self.add_variable((), "zeros", dtype="bool")

    def update_state(self, y, p, sample_weight=None):
        self.ever.assign(keras.ops.logical_or(self.ever, keras.ops.any(keras.ops.abs(y - p) > 9)))

    def result(self):
        return keras.ops.cast(self.ever, "float32")


@pytest.mark.parametrize(
    "make",
    first(0, [lambda: Ever(name="own"), *(lambda kind=k: FirstRows(kind, name="own") for k in (False, True))]),
    ids=["any", "rows", "sum"],
)
def test_a_metric_that_depends_on_what_it_has_counted(make, connect):
    r = np.random.default_rng(0)
    x = r.normal(size=(1300, 3)).astype("float32")
    y = (x[:, :1] * np.linspace(1, 5, 1300)[:, None]).astype("float32")

    def trained(fit, scope):
        keras.utils.set_random_seed(0)
        with scope:
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[make()])
        return fit(model, x, y, batch_size=100, shuffle=False, verbose=0).history

    distribution = connect(2)
    found = trained(lambda m, *a, **k: tfdist.fit(m, *a, distribution=distribution, **k), distribution.scope())
    expected = trained(lambda m, *a, **k: m.fit(*a, **k), contextlib.nullcontext())
    assert {k: pytest.approx(v, rel=1e-4) for k, v in expected.items()} == found


@pytest.mark.parametrize("batch", first(0, [15, 10]))
def test_weights_of_rows_beside_a_mask_of_steps(batch, connect):
    """On three replicas, a batch of 15 has as many rows on each as steps; Keras takes weights [n, 1] alone."""
    x = np.random.default_rng(2).normal(size=(30, 5, 4)).astype("float32")
    x[::3, 3:] = -9.0
    weights = np.linspace(0, 9, 30) % 2

    def measured(evaluate, weight, scope):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Masking(-9.0), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
        with scope:
            model = keras.Sequential([keras.Input((5, 4)), *layers])
            model.compile("sgd", "mse", weighted_metrics=[keras.metrics.MeanSquaredError(name="wm")])
        options = dict(sample_weight=weight, batch_size=batch, verbose=0)
        return evaluate(model, x, x.sum(-1, keepdims=True), **options)

    distribution = connect(3)
    options = {"distribution": distribution, "check_agreement": "off"}
    here = lambda *args, **given: tfdist.evaluate(*args, **given, **options)
    found = measured(here, weights, distribution.scope())
    expected = measured(
        lambda m, *a, **k: m.evaluate(*a, **k, return_dict=True), weights[:, None], contextlib.nullcontext()
    )
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.whole
def test_weights_of_rows_beside_a_mask_of_rows(connect):
    x = np.random.default_rng(2).normal(size=(30, 4)).astype("float32")
    x[::3] = -9.0
    weights = np.linspace(0, 9, 30) % 2

    def measured(evaluate, scope):
        keras.utils.set_random_seed(1)
        with scope:
            model = keras.Sequential([keras.Input((4,)), keras.layers.Masking(-9.0), keras.layers.Dense(1)])
            model.compile("sgd", "mse", weighted_metrics=[keras.metrics.MeanSquaredError(name="wm")])
        return evaluate(model, x, x.sum(-1, keepdims=True), sample_weight=weights, batch_size=10, verbose=0)

    theirs = lambda m, *args, **options: m.evaluate(*args, **options, return_dict=True)
    expected = measured(theirs, contextlib.nullcontext())
    for distribution in (connect(1), connect(2)):
        given = {"distribution": distribution, "check_agreement": "off"}
        here = lambda *args, given=given, **options: tfdist.evaluate(*args, **given, **options)
        assert measured(here, distribution.scope()) == pytest.approx(expected, rel=1e-5)
