"""`train.loss`, `train.metrics` and `train.callbacks`: names of Keras and functions, as plain Keras takes them."""

import dataclasses
import functools
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.covering import first

import tfdist
from tfdist import config
from tfdist.config import training_objects
from tfdist.data.loaded import Loaded
from tfdist.data.sources import Arrays
from tfdist.data.spec import Spec
from tfdist.errors import UserError
from tfdist.models import build as models
from tfdist.models import objective

L = keras.layers
X = np.random.default_rng(5).normal(size=(40, 6)).astype("float32")
Y = (np.arange(40) % 4).astype("int32")
SPEC = Spec((6,), "float32", 4, 1.0)
HERE = "test_objective"  # as pytest imports it, so functions of this file can be named


def focal(y, outputs):
    """A loss of one's own, on class numbers."""
    scores = tf.nn.log_softmax(outputs)
    right = tf.gather(scores, tf.cast(tf.reshape(y, [-1]), tf.int32), batch_dims=1)
    return -((1 - tf.exp(right)) ** 2) * right


def distance(y, outputs):
    return tf.reduce_mean(tf.abs(outputs), -1)


class Weighed(keras.losses.Loss):
    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor

    def call(self, y, outputs):
        return self.factor * focal(y, outputs)


def watchers():
    return [keras.callbacks.TerminateOnNaN(), keras.callbacks.EarlyStopping("loss", patience=2)]


def experiment(**train):
    train = {"label_smoothing": 0.0, **train}
    return config.Experiment(model=config.Model(name="mine"), train=config.Train(**train))


def model_of(units=4, activation=None):
    keras.utils.set_random_seed(2)
    return keras.Sequential([keras.Input((6,)), L.Dense(8, activation="tanh"), L.Dense(units, activation=activation)])


def loaded(x=X, y=Y, spec=SPEC):
    return Loaded(Arrays((x, y)), Arrays((x, y)), len(x), spec)


def one_hot(y):
    return np.eye(4, dtype="float32")[y]


C = keras.losses


@pytest.mark.parametrize(
    "train, loss, metrics, rows",
    first(4, [
        ({"loss": f"{HERE}:focal", "metrics": f"{HERE}:distance, acc"}, focal, lambda: [distance, "acc"], False),
        ({"metrics": "accuracy,top_k_categorical_accuracy"}, C.CategoricalCrossentropy(from_logits=True),
         lambda: ["accuracy", "top_k_categorical_accuracy"], True),
        ({"metrics": "SparseTopKCategoricalAccuracy(k=2, name=top)"}, C.SparseCategoricalCrossentropy(from_logits=True),
         lambda: [keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top")], False),
        ({"loss": "categorical_focal_crossentropy(gamma=3.0)"},
         C.CategoricalFocalCrossentropy(gamma=3.0, from_logits=True), lambda: ["accuracy"], True),
        ({"loss": "categorical_crossentropy", "label_smoothing": 0.2},
         C.CategoricalCrossentropy(from_logits=True, label_smoothing=0.2), lambda: ["accuracy"], True),
        ({"loss": "mse", "metrics": "mae, categorical_crossentropy"}, "mse",
         lambda: ["mae", keras.metrics.CategoricalCrossentropy(from_logits=True)], True),
        ({"loss": f"{HERE}:Weighed(factor=2.0)"}, Weighed(2.0), lambda: ["accuracy"], False),
        ({"loss": f"{HERE}:Weighed"}, Weighed(), lambda: ["accuracy"], False),
    ]),
    ids=lambda v: " ".join(map(str, v.values())) if isinstance(v, dict) else "",
)  # fmt: skip
@pytest.mark.parametrize("replicas, weights", first(1, [(2, np.arange(len(X)) % 4 / 2), (1, None), (2, None)]))
def test_a_model_is_trained_and_measured_as_by_keras(train, loss, metrics, rows, replicas, weights, connect):
    asked, distribution = experiment(**train), connect(replicas)
    given = loaded() if weights is None else Loaded(*[Arrays((X, Y, weights))] * 2, len(X), SPEC)
    with distribution.scope():
        model = model_of()
        data = models.compiled(model, keras.optimizers.SGD(0.1), asked, given)
    here = dict(distribution=distribution, check_agreement="off")
    history = tfdist.fit(model, data.train, batch_size=8, epochs=2, shuffle=False, verbose=0, **here)
    plain = model_of()
    plain.compile(keras.optimizers.SGD(0.1), loss, **{"metrics" if weights is None else "weighted_metrics": metrics()})
    plain.run_eagerly = True
    options = dict(batch_size=8, epochs=2, shuffle=False, verbose=0, sample_weight=weights)
    theirs = plain.fit(X, one_hot(Y) if rows else Y, **options)
    assert history.history.keys() == theirs.history.keys()
    for name, values in theirs.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5, err_msg=name)


def test_probabilities_are_no_logits():
    model = model_of(activation="softmax")
    data = models.compiled(model, keras.optimizers.SGD(), experiment(loss="categorical_crossentropy"), loaded())
    assert model.loss.from_logits is False and data.train.targets.shape == (40, 4)
    model = model_of(activation="softmax")
    asked = experiment(loss="categorical_crossentropy(from_logits=True)")
    models.compiled(model, keras.optimizers.SGD(), asked, loaded())
    assert model.loss.from_logits is True, "what was written counts"


def test_a_single_score_takes_class_numbers():
    spec, model = dataclasses.replace(SPEC, classes=2), model_of(units=1)
    asked = experiment(loss="binary_crossentropy", metrics="BinaryAccuracy(threshold=0.0)")
    data = models.compiled(model, keras.optimizers.SGD(), asked, loaded(y=Y % 2, spec=spec))
    assert model.loss.from_logits and data.train.targets.shape == (40,)


def test_numbers_may_have_another_loss():
    spec, model = dataclasses.replace(SPEC, classes=None), model_of(units=1)
    asked = experiment(loss="Huber(delta=2.0)", metrics="root_mean_squared_error")
    models.compiled(model, keras.optimizers.SGD(), asked, loaded(y=X[:, 0], spec=spec))
    assert float(model.loss([[0.0]], [[5.0]])) == float(keras.losses.Huber(delta=2.0)([[0.0]], [[5.0]])) == 8.0


@pytest.mark.parametrize(
    "train, message",
    [
        ({"loss": f"{HERE}:focl"}, f"train.loss='{HERE}:focl': module {HERE} has no function 'focl'"),
        ({"loss": "nothing.here:focal"}, "train.loss='nothing.here:focal' cannot be imported: "),
        ({"loss": "huber(delta=1, size=3)"}, "huber in train.loss: .*Huber takes no such arguments: "),
        ({"loss": "huber(reduction='all')"}, "train.loss: huber cannot be made: Invalid value for argument"),
        ({"loss": f"{HERE}:focal", "label_smoothing": 0.1}, "train.label_smoothing=0.1 does not go with train.loss="),
        ({"metrics": "sparse_categorical_accuracy", "label_smoothing": 0.1},
         "train.metrics: sparse_categorical_accuracy takes class numbers, and the loss rows of 0 and 1"),
        ({"loss": "sparse_categorical_crossentropy", "metrics": "TopKCategoricalAccuracy"},
         "train.metrics: TopKCategoricalAccuracy takes rows of 0 and 1, and the loss class numbers"),
        ({"callbacks": f"{HERE}:experiment"}, f"train.callbacks: {HERE}:experiment must return Keras callbacks, got "),
        ({"callbacks": "CSVLogger"}, "CSVLogger in train.callbacks: .*CSVLogger takes no such arguments: missing"),
    ],
    ids=lambda v: " ".join(map(str, v.values())) if isinstance(v, dict) else "",
)  # fmt: skip
def test_what_cannot_be_used_is_refused_in_one_line(train, message):
    with pytest.raises(UserError, match=message) as raised:
        models.compiled(model_of(), keras.optimizers.SGD(), experiment(**train), loaded())
        objective.callbacks(experiment(**train), keras.optimizers.SGD())
    assert "\n" not in str(raised.value)


def test_a_model_that_compiles_itself_has_its_own():
    model = model_of()
    model.compile(loss="mse")
    with pytest.raises(UserError, match=r"train.metrics='mae', and model.name='mine' compiles the model itself"):
        models.compiled(model, keras.optimizers.SGD(), experiment(metrics="mae"), loaded())


def test_a_callback_beside_a_schedule():
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10))
    message = "train.callbacks: ReduceLROnPlateau sets the learning rate, which has a schedule or a warm-up: leave"
    with pytest.raises(UserError, match=message):
        objective.callbacks(experiment(callbacks="ReduceLROnPlateau(patience=1)"), optimizer)


class Opaque(keras.Model):
    """Without a get_config of its arguments."""

    def __init__(self, spec):
        super().__init__()
        self.head = keras.layers.Dense(spec.classes)


def test_a_model_that_could_not_be_saved():
    half = functools.partial(keras.ops.leaky_relu, negative_slope=0.5)
    for model, why in (
        (keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, half)]), "Cannot serialize object functools.part"),
        (Opaque(loaded().spec), "Object Opaque was created by passing non-serializable argument values in"),
    ):
        model.compile("sgd", "mse")
        with pytest.raises(UserError, match=rf"model.name='it' cannot be saved \({why}.*get_config\(\)") as raised:
            models.check_can_be_saved(model, "it")
        assert "\n" not in str(raised.value)


def test_what_keras_would_write_otherwise_than_it_was_trained_is_told(caplog):
    """`evaluate`, `predict` and `export` had another model than the training had measured, without a word."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    model.layers[0].enable_lora(2)
    models.check_can_be_saved(model, "it")
    assert not caplog.messages
    model.layers[0].quantize("int8")
    model.compile("sgd", "mse")
    models.check_can_be_saved(model, "it")
    assert "Keras rounds the weights of LoRA into quantized kernels" in caplog.text


def test_callbacks_are_made_anew():
    asked = experiment(callbacks=f"EarlyStopping(patience=3, monitor='val_loss'), {HERE}:watchers")
    first, terminate, early = objective.callbacks(asked, keras.optimizers.SGD())
    assert isinstance(first, keras.callbacks.EarlyStopping) and (first.patience, first.monitor) == (3, "val_loss")
    assert isinstance(terminate, keras.callbacks.TerminateOnNaN) and early.patience == 2
    assert objective.callbacks(asked, keras.optimizers.SGD())[0] is not first
    assert objective.callbacks(experiment(), keras.optimizers.SGD()) == []


def test_the_names_are_those_of_keras():
    """A misspelt name is to be known before Keras is imported; so the names are written down."""
    for known, module in ((training_objects.LOSSES, keras.losses), (training_objects.METRICS, keras.metrics)):
        for name in known:
            assert isinstance(getattr(module, name), type), name
            lower = training_objects.loss if module is keras.losses else training_objects.metrics
            short = keras.src.utils.naming.to_snake_case(name)
            asked = lower(config.Train(loss=short, metrics=short))
            assert (asked if module is keras.losses else asked[0]).kind == name
    for name in training_objects.CALLBACKS:
        assert issubclass(getattr(keras.callbacks, name), keras.callbacks.Callback)
    assert HERE in sys.modules
