"""Tiny experiments that together touch every part of an update. Add a row, and every strategy must agree on it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.data import sources
from tfdist.train.early_stopping import Patience

L = keras.layers


class StopAt:
    """`should_stop` that says so after a number of calls."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self):
        self.left -= 1
        return "asked to" if self.left < 0 else ""


def rng():
    return np.random.default_rng(7)


def images(n, classes=5):
    r = rng()
    return r.normal(size=(n, 4, 4, 1)).astype("float32"), r.integers(0, classes, n)


def dense(**layer):
    return keras.Sequential(
        [keras.Input((4, 4, 1)), L.Flatten(), L.Dense(12, activation="tanh", **layer), L.Dense(5, **layer)]
    )


def sparse(**kwargs):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


def compiled(model, optimizer=None, loss=None, **kwargs):
    kwargs.setdefault("metrics", ["accuracy"])
    model.compile(optimizer or keras.optimizers.Adam(1e-2), loss or sparse(), **kwargs)
    return model


def sequences(n):
    """Token sequences of uneven length; 0 is padding."""
    r = rng()
    x = r.integers(1, 20, (n, 7))
    x[np.arange(7)[None] >= r.integers(1, 8, n)[:, None]] = 0
    return x.astype("int32"), r.integers(0, 6, (n, 7))


def tagger(loss=None, **kwargs):
    """A mask that reaches the loss, and an embedding, whose gradient is sparse."""
    tokens = keras.Input((7,), dtype="int32")
    x = L.Embedding(20, 8, mask_zero=True)(tokens)
    model = keras.Model(tokens, L.Dense(6)(L.Dense(8, activation="tanh")(x)))
    return compiled(model, loss=loss, **kwargs)


def two_outputs():
    image, extra = keras.Input((4, 4, 1), name="image"), keras.Input((3,), name="extra")
    x = L.Concatenate()([L.Flatten()(image), extra])
    x = L.Dense(8, activation="tanh")(x)
    return keras.Model(
        {"image": image, "extra": extra}, {"kind": L.Dense(5, name="kind")(x), "size": L.Dense(1, name="size")(x)}
    )


def compile_two_outputs():
    model = two_outputs()
    model.compile(
        keras.optimizers.Adam(1e-2),
        {"kind": sparse(), "size": "mse"},
        loss_weights={"kind": 0.7, "size": 2.0},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    return model


def two_outputs_data(n):
    r = rng()
    x = {"image": images(n)[0], "extra": r.normal(size=(n, 3)).astype("float32")}
    return x, {"kind": images(n)[1], "size": r.normal(size=(n, 1)).astype("float32")}


def masked_and_plain():
    """One loss with a denominator of its own beside one with a known denominator, and a regulariser."""
    tokens = keras.Input((7,), dtype="int32")
    x = L.Embedding(20, 8, mask_zero=True)(tokens)
    tags = L.Dense(6, name="tags", kernel_regularizer="l2")(x)
    whole = L.Dense(1, name="whole")(L.GlobalAveragePooling1D()(x))
    model = keras.Model(tokens, [tags, whole])
    model.compile(keras.optimizers.Adam(1e-2), [sparse(), "mse"], loss_weights=[1.0, 0.3])
    return model


class Subclassed(keras.Model):
    """Built on its first batch, with a weight that no gradient reaches."""

    def __init__(self):
        super().__init__()
        self.first, self.last = L.Dense(8, activation="tanh"), L.Dense(5)
        self.flatten = L.Flatten()

    def build(self, shape):
        self.unused = self.add_weight(shape=(3,), name="unused")
        super().build(shape)

    def call(self, x, training=False):
        return self.last(self.first(self.flatten(x)))


def batch_norm():
    return keras.Sequential(
        [
            keras.Input((4, 4, 1)),
            L.Conv2D(3, 3, use_bias=False),
            L.BatchNormalization(synchronized=True, momentum=0.7),
            L.Activation("tanh"),
            L.Flatten(),
            L.Dense(5),
        ]
    )


def late_metrics():
    """Metrics that create their variables at their first update."""
    return [
        keras.metrics.F1Score(average="macro", name="f1"),
        keras.metrics.R2Score(name="r2"),
        keras.metrics.AUC(multi_label=True, from_logits=True, name="areas"),
    ]


def one_hot(n):
    x, y = images(n)
    return x, np.eye(5, dtype="float64")[y]


def accumulating():
    """Batches that an optimizer of Keras' adds up itself; the last of three epochs of three ends half-way."""
    options = dict(global_clipnorm=0.05, use_ema=True, ema_momentum=0.8, gradient_accumulation_steps=2)
    return compiled(dense(), keras.optimizers.AdamW(1e-2, weight_decay=0.1, **options))


def of_loss_objects(y, outputs):
    """A loss that calls losses of Keras, which divide by the number of replicas for Keras' own fit."""
    return sparse()(y, outputs) + 0.3 * keras.losses.MeanSquaredError()(keras.ops.one_hot(y, 5), outputs)


class Endpoint(L.Layer):
    """The last layer of the official endpoint example: it takes the targets as inputs, and adds the loss itself."""

    def call(self, inputs):
        targets, logits = inputs
        self.add_loss(sparse()(targets, logits))
        return logits


def endpoint():
    image, targets = keras.Input((4, 4, 1), name="image"), keras.Input((), dtype="int32", name="targets")
    logits = L.Dense(5)(L.Dense(12, activation="tanh")(L.Flatten()(image)))
    model = keras.Model({"image": image, "targets": targets}, Endpoint()([targets, logits]))
    model.compile(keras.optimizers.Adam(1e-2))
    return model


def labelled(n):
    x, y = images(n)
    return ({"image": x, "targets": y.astype("int32")},)


@dataclasses.dataclass(frozen=True, eq=False)  # hashable by identity, for caches
class Case:
    """One row: `model()` is called in scope and returns a compiled model."""

    name: str
    model: Callable[[], Any]
    data: Callable[[int], tuple] = images
    examples: int = 61
    batch: int = 24
    accumulate: int = 1
    precision: str = "float32"
    fit: dict = dataclasses.field(default_factory=dict)
    keras: bool = True
    """Keras' own fit on one device gives the same result."""
    double: bool = True
    """Can be run in float64."""

    def __str__(self):
        return self.name


def weighted(n):
    x, y = images(n)
    return x, y, rng().uniform(0.1, 3.0, n).astype("float32")


def token_weighted(n):
    x, y = sequences(n)
    return x, y, rng().uniform(0.1, 3.0, (n, 7)).astype("float32")


def pictures(n):
    """Images that are read by number and augmented: noise that depends on the example and the epoch."""
    x, y = images(n)
    stored = (tf.constant(x), tf.constant(y))

    def decode(example, seed):
        noise = tf.random.stateless_normal([4, 4, 1], seed)
        return tf.cast(example[0] + 0.3 * noise, keras.config.floatx()), tf.one_hot(example[1], 5)

    def mix(columns, partners, seeds):
        share = tf.map_fn(lambda seed: tf.random.stateless_uniform([], seed), seeds, fn_output_signature=tf.float32)

        def mixed(a, b):
            weight = tf.cast(tf.reshape(share, [-1] + [1] * (a.shape.rank - 1)), a.dtype)
            return weight * a + (1 - weight) * b

        return tuple(mixed(a, b) for a, b in zip(columns, partners))

    read = lambda rows: tuple(tf.gather(column, rows) for column in stored)
    return sources.Records(n, read, decode, mix)


O = keras.optimizers  # noqa: E741

BY_LAYER = {"lr_multipliers": {"bias": 3.0}, "layer_decay": 0.5}

CASES = [
    Case("even", lambda: compiled(dense()), examples=72),
    Case("uneven tail", lambda: compiled(dense())),
    Case("tail smaller than the replicas", lambda: compiled(dense()), examples=49),
    Case("batch that no replica count divides", lambda: compiled(dense()), examples=60, batch=25),
    Case("clip global norm", lambda: compiled(dense(), O.Adam(1e-2, global_clipnorm=0.05))),
    Case("clip norm", lambda: compiled(dense(), O.SGD(0.1, momentum=0.9, clipnorm=0.05))),
    Case("clip value", lambda: compiled(dense(), O.SGD(0.1, momentum=0.9, nesterov=True, clipvalue=0.01))),
    Case("accumulate", lambda: compiled(dense()), accumulate=3),
    Case("accumulate and clip", lambda: compiled(dense(), O.SGD(0.5, global_clipnorm=0.1)), accumulate=3),
    Case("sample weights", lambda: compiled(dense(), weighted_metrics=["accuracy"]), weighted),
    Case(
        "mean by sample weight", lambda: compiled(dense(), loss=sparse(reduction="mean_with_sample_weight")), weighted
    ),
    Case("sum", lambda: compiled(dense(), O.SGD(1e-3), sparse(reduction="sum"))),
    Case("class weights", lambda: compiled(dense()), fit={"class_weight": {0: 3.0, 2: 0.2}}),
    # The loss falls, so the first evaluation stays the best.
    Case(
        "stopped early",
        lambda: compiled(dense()),
        fit={
            "class_weight": {0: 3.0, 2: 0.2},
            "validation_data": images(31),
            "callbacks": [Patience("max val_loss", 1)],
        },
        keras=False,
    ),
    Case("masked sequences", lambda: tagger(), sequences),
    Case("masked, accumulated", lambda: tagger(), sequences, accumulate=3),
    Case("token weights", lambda: tagger(sparse(reduction="mean_with_sample_weight")), token_weighted),
    Case("two outputs", compile_two_outputs, two_outputs_data),
    Case(
        "masked and plain", masked_and_plain, lambda n: (sequences(n)[0], [sequences(n)[1], rng().normal(size=(n, 1))])
    ),
    Case("l2 regulariser", lambda: compiled(dense(kernel_regularizer=keras.regularizers.L2(0.01)))),
    Case("l2, accumulated", lambda: compiled(dense(kernel_regularizer="l2")), accumulate=3),
    Case("activity regulariser", lambda: compiled(dense(activity_regularizer="l2")), examples=72),
    Case("AdamW", lambda: compiled(dense(), O.AdamW(1e-2, weight_decay=0.1))),
    Case("weights averaged", lambda: compiled(dense(), O.Adam(1e-2, use_ema=True, ema_momentum=0.8))),
    Case(
        "average measured, accumulated, clipped",
        lambda: compiled(dense(), O.Adam(1e-2, use_ema=True, ema_momentum=0.8, global_clipnorm=0.05)),
        accumulate=3,
        fit={"evaluate_ema": True, "validation_data": images(31)},
        keras=False,
    ),
    Case(
        "averages written over",
        lambda: compiled(dense(), O.Adam(1e-2, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4)),
    ),
    Case("Nadam", lambda: compiled(dense(), O.Nadam(1e-2, use_ema=True, ema_momentum=0.8))),
    Case("RMSprop with a schedule", lambda: compiled(dense(), O.RMSprop(O.schedules.CosineDecay(1e-2, 9)))),
    Case("rates by layer", lambda: compiled(dense(), O.AdamW(1e-2, weight_decay=0.1)), fit=BY_LAYER, keras=False),
    Case(
        "rates by layer, Nadam, clipped",
        lambda: compiled(dense(), O.Nadam(1e-2, weight_decay=0.1, global_clipnorm=0.05)),
        accumulate=2,
        fit=BY_LAYER,
        keras=False,
    ),
    Case(
        "rates by layer, float16",
        lambda: compiled(dense(), O.SGD(0.05, weight_decay=0.1)),
        precision="mixed_float16",
        double=False,
        fit=BY_LAYER,
        keras=False,
    ),
    Case("constraint", lambda: compiled(dense(kernel_constraint=keras.constraints.MaxNorm(0.5)))),
    Case("subclassed", lambda: compiled(Subclassed())),
    Case("batch norm, synchronized", lambda: compiled(batch_norm()), examples=72),
    # The micro-batches must divide evenly, or filler has a part in their statistics.
    Case("batch norm, accumulated", lambda: compiled(batch_norm()), examples=96, batch=48, accumulate=2, keras=False),
    Case("loss scale factor", lambda: compiled(dense(), O.Adagrad(0.05, loss_scale_factor=100.0))),
    Case("accumulated by the optimizer", accumulating),
    Case("metrics built late", lambda: compiled(dense(), loss="mse", metrics=late_metrics()), one_hot),
    Case("loss of loss objects", lambda: compiled(dense(), loss=of_loss_objects)),
    # Filler has a part in what layers add, so the batches must divide evenly.
    Case("add_loss of a loss object", endpoint, labelled, 72, double=False, keras=False),
    Case(
        "function as loss",
        lambda: compiled(dense(), loss=lambda y, p: keras.ops.mean((p - keras.ops.one_hot(y, 5)) ** 2)),
    ),
    Case("records, mixed", lambda: compiled(dense(), loss="mse"), pictures, keras=False),
    Case("records, mixed and accumulated", lambda: compiled(dense(), loss="mse"), pictures, accumulate=3, keras=False),
    Case("bfloat16", lambda: compiled(dense(), O.SGD(0.05)), precision="mixed_bfloat16", double=False),
    Case("float16", lambda: compiled(dense(), O.SGD(0.05)), precision="mixed_float16", double=False),
]

EPOCHS = 3
TOLERANCE = {"float32": 1e-6, "float64": 1e-12, "mixed_bfloat16": 1e-2, "mixed_float16": 1e-3}


def build(case, distribution, precision):
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)
    keras.utils.set_random_seed(3)
    with distribution.scope():
        return case.model()


def weights(model):
    return np.concatenate([np.ravel(w).astype("float64") for w in model.get_weights()])


def all_same(some, others, **tolerance):
    """Fails unless these arrays are the same one by one, but for a tolerance as NumPy has it."""
    for one, other in zip(some, others, strict=True):
        np.testing.assert_allclose(one, other, **(tolerance or {"rtol": 0}))


def distance(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def outcome(case, distribution, precision, **fit):
    """(weights, history, evaluation, predictions) of a training of a few epochs."""
    model = build(case, distribution, precision)
    given = case.data(case.examples)
    history = tfdist.fit(
        model,
        given,
        distribution=distribution,
        batch_size=case.batch,
        epochs=EPOCHS,
        verbose=0,
        accumulate=case.accumulate,
        # The check has tests of its own, and costs as much as the rest.
        **{"check_agreement": "off", **case.fit, **fit},
    )
    here = dict(distribution=distribution, batch_size=case.batch, check_agreement="off")
    evaluation = tfdist.evaluate(model, given, **here)
    inputs = given[0] if isinstance(given, tuple) else given
    outputs = keras.tree.flatten(tfdist.predict(model, inputs, **here))
    return weights(model), history.history, evaluation, outputs


def assert_agrees(got, expected, tolerance):
    """Two outcomes are the same to rounding."""
    assert distance(got[0], expected[0]) < tolerance
    assert got[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        np.testing.assert_allclose(got[1][name], values, rtol=10 * tolerance, atol=tolerance, err_msg=name)
    for name, value in expected[2].items():
        np.testing.assert_allclose(got[2][name], value, rtol=10 * tolerance, atol=tolerance, err_msg=name)
    for a, b in zip(got[3], expected[3], strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=100 * tolerance, atol=10 * tolerance)


def own_loop():
    """Losses of a loop over GradientTape in which nothing is tfdist's, and all workers compute the same."""
    keras.utils.set_random_seed(3)
    model, optimizer, (x, y) = keras.Sequential([L.Flatten(), L.Dense(5)]), keras.optimizers.SGD(0.1), images(24)
    losses = []
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        losses.append(float(loss))
    return losses
