"""What users replace in a model or an optimizer by a method of their own is as in Keras, or refused in one line."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.covering import first
from support.training_cases import all_same

import tfdist

L = keras.layers
FIT = dict(batch_size=4, epochs=2, shuffle=False, verbose=0)


def data():
    r = np.random.default_rng(0)
    return r.normal(size=(13, 6)).astype("float32"), r.normal(size=(13, 2)).astype("float32")


def made(distribution, optimizer="sgd", model=keras.Model, metrics=("mae",)):
    keras.utils.set_random_seed(0)
    with distribution.scope():
        x = keras.Input((6,))
        built = model(x, L.Dense(2)(L.Dense(4, activation="tanh")(x)))
        built.compile(optimizer() if callable(optimizer) else optimizer, "mse", metrics=list(metrics) or None)
    return built


def fit(model, distribution):
    return tfdist.fit(model, *data(), distribution=distribution, **FIT).history


class Doubles(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(2.0 * g, v) for g, v in grads_and_vars])


LOGS = lambda theirs: lambda *given: {**theirs(*given), "one": tf.constant(1.0)}
TRIPLES = lambda theirs: lambda *given, **options: 3.0 * theirs(*given, **options)
FASTER = lambda theirs: lambda *given: theirs(*given[:-1], 3.0 * given[-1])
SIGNS = lambda theirs: lambda *given: theirs(*given[:-2], [tf.sign(g) for g in given[-2]], given[-1])

REPLACED = [
    # Those of one cell show in different logs, outputs or weights: each must have been called.
    {"model.train_step": LOGS, "model.test_step": LOGS, "model.predict_step": TRIPLES},
    {"keras.Model.compute_loss": TRIPLES},
    {"model.compute_loss": TRIPLES, "model.optimizer.update_step": FASTER}, {"model.optimizer.apply": SIGNS},
    {"keras.Model.train_step": LOGS}, {"keras.optimizers.SGD.apply": SIGNS},
]  # fmt: skip


@pytest.mark.parametrize("replaced", first(1, REPLACED), ids=" and ".join)
def test_methods_set_on_an_object_or_patched_into_keras(connect, replaced):
    results = []
    for of, options in (keras.Model, {}), (tfdist, {"distribution": connect(2), "check_agreement": "off"}):
        model = made(options.get("distribution", connect(1)), metrics=())
        with pytest.MonkeyPatch.context() as patch:
            for path, make in replaced.items():
                root, *between, name = path.split(".")
                owner = functools.reduce(getattr, between, {"model": model, "keras": keras}[root])
                patch.setattr(owner, name, make(getattr(owner, name)))
            logs = of.fit(model, *data(), **FIT, **options).history, of.evaluate(model, *data(), verbose=0, **options)
            outputs = of.predict(model, data()[0], verbose=0, **options)
        results.append(keras.tree.flatten([logs, outputs, model.get_weights()]))
    all_same(*results, rtol=1e-5, atol=1e-6)


class TrainsTheLast(keras.Model):
    trainable_weights = property(lambda self: self.layers[-1].trainable_weights)


class BuildsLate(keras.Model):
    def __init__(self, x, y):
        super().__init__()
        self.nets = [keras.Sequential([L.Dense(4), L.Dense(2)]), keras.Sequential([L.Dense(2)])]

    def train_step(self, data):
        pairs = []
        for net in self.nets:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(data[1] - net(data[0])))
            nested = [layer.trainable_weights for layer in net.layers]
            pairs += zip(keras.tree.flatten(tape.gradient(loss, nested)), keras.tree.flatten(nested))
        self.optimizer.apply_gradients(pairs)
        return {"loss": loss}


BY_THEMSELVES = [(Doubles, keras.Model), ("sgd", BuildsLate), ("sgd", TrainsTheLast)]


@pytest.mark.parametrize("optimizer, kind", first(1, BY_THEMSELVES))
def test_subclasses_that_update_by_themselves(connect, caplog, optimizer, kind):
    model, judge = (made(connect(replicas), optimizer, kind, ()) for replicas in (2, 1))
    np.testing.assert_allclose(fit(model, connect(2))["loss"], judge.fit(*data(), **FIT).history["loss"], rtol=1e-5)
    all_same(model.get_weights(), judge.get_weights(), rtol=1e-5, atol=1e-6)
    assert "no trainable weights" not in caplog.text


class Ends(keras.optimizers.Adam):
    def finalize_variable_values(self, var_list):
        super().finalize_variable_values(var_list)


class Scales(keras.optimizers.Adam):
    def scale_loss(self, loss):
        return 2.0 * loss


replaced = lambda: (o := keras.optimizers.SGD(), setattr(o, "apply", SIGNS(o.apply)))[0]


class KeepsMetrics(keras.Model):
    def reset_metrics(self):
        pass


class MakesItsOwn(keras.Model):
    def make_train_function(self, force=False):
        super().make_train_function(force)


class Logs(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {"size": keras.ops.mean(y_pred)}


@pytest.mark.parametrize(
    "optimizer, model, words",
    first(3, [
        (Ends, keras.Model, "^optimizer Ends has its own finalize_variable_values, which tfdist does not call: leave"),
        (Ends, Logs, "^optimizer Ends has its own finalize_variable_values, which tfdist does not call: leave it out"),
        (Scales, keras.Model, "^optimizer Scales has its own scale_loss, which tfdist does not call: leave it out"),
        ("sgd", KeepsMetrics, "^KeepsMetrics has its own reset_metrics, which tfdist does not call: leave it out"),
        (replaced, Logs, "^Logs has its own compute_metrics, and apply of optimizer 'sgd.*' is replaced: override"),
        ("sgd", MakesItsOwn, "^MakesItsOwn has its own make_train_function, which tfdist does not call: leave it out"),
    ]),
)  # fmt: skip
def test_what_would_not_be_called_is_refused(connect, optimizer, model, words):
    with pytest.raises(tfdist.UserError, match=words):
        fit(made(connect(1), optimizer, model), connect(1))


class AddsUp(keras.Model):
    def get_metrics_result(self):
        logs = super().get_metrics_result()
        return {**logs, "sum": logs["loss"] + logs["mae"]}


class LogsTwice(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "twice": 2.0 * logs["loss"]}


@pytest.mark.parametrize("kind, name", first(0, [(AddsUp, "sum"), (LogsTwice, "twice")]))
def test_logs_that_are_computed_from_metrics(connect, kind, name):
    """On several replicas each would compute them from its own part of a metric: 2.82 and not 2.98 in one example."""
    history = fit(made(connect(1), model=kind), connect(1))
    judge = made(connect(1), model=kind).fit(*data(), **FIT).history
    assert history.keys() == judge.keys()
    for log, values in judge.items():
        np.testing.assert_allclose(history[log], values, rtol=1e-5, err_msg=log)
    words = (
        f"^train_step of {kind.__name__} logs '{name}', which it computes from the result of a metric, of which a rep"
    )
    with pytest.raises(tfdist.UserError, match=words):
        fit(made(connect(2), model=kind), connect(2))


@pytest.mark.whole
def test_weights_frozen_between_two_trainings(connect):
    """Keras goes on to train them, until the model is compiled again."""
    model = made(connect(1))
    fit(model, connect(1))
    model.layers[1].trainable = False
    words = r"^the training before has updated other weights than this would, such as dense.*/kernel: after a change"
    with pytest.raises(tfdist.UserError, match=words):
        fit(model, connect(1))
    model.evaluate(*data(), verbose=0)
    tfdist.evaluate(model, *data(), distribution=connect(1), verbose=0)
    with pytest.raises(tfdist.UserError, match=words):
        fit(model, connect(1))
    before = model.layers[1].kernel.numpy()
    model.compile("sgd", "mse")
    fit(model, connect(1))
    np.testing.assert_array_equal(model.layers[1].kernel, before)


class Decorated(keras.Model):
    """As TensorFlow's guides write a step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="tracked")

    @tf.function
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class DecoratedWithin(keras.Model):
    @tf.function
    def update(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return loss

    def train_step(self, data):
        return {"loss": self.update(*data)}


@pytest.mark.parametrize("replicas", first(0, [1, 2]))
def test_a_step_that_is_a_tf_function(connect, replicas):
    model = made(connect(replicas), model=Decorated, metrics=())
    history = fit(model, connect(replicas))
    judge = made(connect(1), model=Decorated, metrics=())
    np.testing.assert_allclose(history["loss"], judge.fit(*data(), **FIT).history["loss"], rtol=1e-5)
    all_same(model.get_weights(), judge.get_weights(), rtol=1e-5, atol=1e-6)


class DecoratedLoop(keras.Model):
    @tf.function
    def train_step(self, data):
        loss = tf.reduce_mean(self(data[0]))
        while loss > 1e6:
            loss = 0.5 * loss
        return {"loss": loss}


@pytest.mark.parametrize("model, words", [
    (DecoratedWithin, r"^train_step calls optimizer 'sgd.*' in a tf\.function of its own, in which .*[^\n]* compiled$"),
    (DecoratedLoop, r"^train_step of DecoratedLoop is a tf\.function in which Python branches or loops by tensors: "),
])  # fmt: skip
def test_a_tf_function_that_cannot_be_part_of_the_step(connect, model, words):
    with pytest.raises(tfdist.UserError, match=words):
        fit(made(connect(1), model=model), connect(1))


class AppliesNowAndThen(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)

        def apply():
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return 0

        tf.cond(loss > 0.1, apply, lambda: 0)
        return {"loss": loss}


def test_gradients_that_are_applied_in_a_branch(connect):
    """TensorFlow says in eight lines that `merge_call` was called while defining a new graph."""
    with pytest.raises(tfdist.UserError, match=r"^train_step of AppliesNowAndThen applies gradients, .*: do it"):
        fit(made(connect(2), model=AppliesNowAndThen), connect(2))


class OutsideOfTheTape(keras.Model):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            pass
        loss = keras.ops.mean(self(data[0]))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


@pytest.mark.whole
def test_a_loss_outside_of_the_tape_is_told_as_by_keras(connect):
    """Of nothing TensorFlow cannot make a sum over replicas, which it did not say."""
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        fit(made(connect(2), model=OutsideOfTheTape), connect(2))


class AppliesNothing(keras.Model):
    def train_step(self, data):
        self.optimizer.apply([], [])
        return {"loss": keras.ops.mean(self(data[0]))}


@pytest.mark.whole
def test_no_gradients_of_no_variables_change_nothing_as_with_keras(connect):
    model = made(connect(2), model=AppliesNothing)
    before = model.get_weights()
    fit(model, connect(2))
    all_same(model.get_weights(), before, rtol=0, atol=0)


def test_weights_of_one_output_alone(connect):
    distribution = connect(1)
    with distribution.scope():
        x = keras.Input((6,))
        model = keras.Model(x, [L.Dense(2)(x), L.Dense(2)(x)])
        model.compile("sgd", ["mse", "mae"])
    x, y = data()
    with pytest.raises(tfdist.UserError, match=r"^the sample weights of an output are None: give ones, an array of"):
        tfdist.fit(model, x, [y, y], sample_weight=[np.ones(13), None], distribution=distribution, **FIT)
