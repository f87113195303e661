"""Code of the user's own is checked again on later batches and with later weights: what is rare is not in the first."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from support.covering import first

import tfdist
from tfdist.keras_bridge import loss, row_mixing
from tfdist.step import step_calls
from tfdist.trainer import on_batch
from tfdist.verification.equivalence_probe import EquivalenceProbe

L = keras.layers
BATCH = 8


def ignoring(y, y_pred):
    """A mean over the labeled rows, times their part: rows alone, as long as all have labels."""
    labeled = ops.cast(y[:, 0] >= 0, y_pred.dtype)
    return ops.square(y[:, 0] - y_pred[:, 0]) * labeled / ops.maximum(ops.mean(labeled), 1e-3)


class FreeBits(L.Layer):
    """Adds no loss below a threshold, that the mean of the batch passes late."""

    def call(self, x):
        self.add_loss(ops.maximum(ops.mean(ops.sum(ops.square(x), -1)), 0.01))
        return x


def data(late):
    x = np.random.RandomState(0).randn(10 * BATCH, 3).astype("float32")
    y = np.abs(x[:, :1])
    y[2 * BATCH :: 3] = -1 if late else 1
    return x, y


class Sequence(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self._x, self._y = x, y

    def __len__(self):
        return len(self._x) // BATCH

    def __getitem__(self, i):
        return self._x[i * BATCH : (i + 1) * BATCH], self._y[i * BATCH : (i + 1) * BATCH]


def forever(x, y):
    while True:
        yield from (Sequence(x, y)[i] for i in range(len(x) // BATCH))


FORMS = {
    "data set": lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH),
    "PyDataset": Sequence,
    "endless data set": lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat(),
    "of unknown length": lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).filter(lambda *_: True),
    "generator": forever,
}

IN_AN_EVALUATION = r"^found after \d+ batch(es)?: .* in an evaluation: loss 'ignoring' differs"


def compiled(connect, *layers, loss=ignoring, replicas=2, metrics=None):
    keras.utils.set_random_seed(0)
    with connect(replicas).scope():
        model = keras.Sequential([keras.Input((3,)), *(layer() for layer in layers), L.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), loss, metrics=metrics)
    return model


@pytest.mark.parametrize("form", first(1, FORMS))
def test_rows_of_later_batches(connect, form):
    fit = lambda late: tfdist.fit(
        compiled(connect), FORMS[form](*data(late)), epochs=2, steps_per_epoch=9, distribution=connect(2), verbose=0
    )
    with pytest.raises(tfdist.UserError, match=r"^found after [2-9] updates: .* loss 'ignoring' differs .*per example"):
        fit(late=True)
    assert len(fit(late=False).history["loss"]) == 2


@pytest.mark.whole
def test_rows_of_the_validation(connect):
    model = compiled(connect)
    with pytest.raises(tfdist.UserError, match=IN_AN_EVALUATION):
        validation = FORMS["data set"](*data(late=True))
        tfdist.fit(model, *data(late=False), BATCH, validation_data=validation, distribution=connect(2), verbose=0)


def test_rows_of_an_evaluation_of_other_data(connect):
    model = compiled(connect)
    tfdist.evaluate(model, *data(late=False), BATCH, distribution=connect(2), verbose=0)
    with pytest.raises(tfdist.UserError, match=IN_AN_EVALUATION):
        tfdist.evaluate(model, *data(late=True), BATCH, distribution=connect(2), verbose=0)


def test_batches_of_train_on_batch(connect):
    model, (x, y) = compiled(connect), data(late=True)
    with pytest.raises(tfdist.UserError, match=r"^found after 3 updates: "):
        for i in range(5):
            rows = slice(i * BATCH, (i + 1) * BATCH)
            on_batch.train_on_batch(model, x[rows], y[rows], distribution=connect(2))


def test_weights_of_later_updates(connect):
    """Where the mean is far from the threshold, and where it has passed it, halves of a batch agree with the whole."""
    model = compiled(connect, lambda: L.Dense(3, use_bias=False), FreeBits, loss="mse")
    model.optimizer.learning_rate = 0.2
    with pytest.raises(tfdist.UserError, match=r"^found after \d+ updates?: .*add_loss differs .* which layer"):
        tfdist.fit(model, *data(late=False), BATCH, epochs=20, distribution=connect(2), verbose=0)


def test_a_threshold_that_the_mean_is_far_from(connect):
    """Before the first update, since a single row may be below it."""
    with connect(2).scope():
        model = Floods(x := keras.Input((3,)), L.Dense(1)(x))
        model.compile("sgd")
    with pytest.raises(tfdist.UserError, match=r"^1 and 2 replicas disagree on this model: .*compute_loss of Floods"):
        tfdist.fit(model, *data(late=False), BATCH, distribution=connect(2), verbose=0)


class Floods(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.maximum(ops.mean(ops.square(y - y_pred)), 0.5)


class Counts(L.Layer):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def call(self, x):
        self.calls += 1
        return x * self.calls


class Skips(keras.Sequential):
    steps = 0

    def train_step(self, data):
        self.steps += 1  # replicas, of which each counts, do not all come to the sum of the gradients
        return super().train_step(data) if self.steps % 3 else {}


def test_a_count_in_python_that_runs_eagerly(connect):
    with connect(2).scope():
        models = compiled(connect, Counts, loss="mse"), Skips([keras.Input((3,)), L.Dense(1)])
    before = models[0].layers[0].calls
    for model in models:
        with connect(2).scope():
            model.compile("sgd", "mse", run_eagerly=True)
        with pytest.raises(tfdist.UserError, match=r"runs (Counts|Skips) once for each of 2 replicas, .* in Python"):
            tfdist.fit(model, *data(late=False), BATCH, distribution=connect(2), verbose=0)
    assert models[0].layers[0].calls <= before + 3  # those that build and classify


@pytest.mark.whole
def test_a_check_that_is_repeated_changes_nothing_and_keeps_no_model(connect):
    ended = {}
    for choice in ("off", "auto"):
        model = compiled(connect, lambda: L.Dropout(0.3, seed=1), lambda: L.BatchNormalization(synchronized=True))
        given = FORMS["data set"](*data(late=False))
        history = tfdist.fit(model, given, epochs=3, distribution=connect(2), check_agreement=choice, verbose=0)
        ended[choice] = [history.history, [array.tobytes() for array in model.get_weights()]]
    assert ended["off"] == ended["auto"]
    gone = weakref.ref(model)
    del model, history
    gc.collect()
    assert gone() is None


class FullOnly(L.Layer):
    def call(self, x):
        return x * ops.cast(ops.shape(x)[0] >= BATCH, x.dtype)


def test_code_that_asks_whether_a_batch_is_full(connect):
    """Each batch is a part of one on a replica: nothing was trained, and all numbers agreed on a row less."""
    x, y = data(late=False)
    with pytest.raises(tfdist.UserError, match=r"^found after 1 update: .* loss 'mse' differs"):
        tfdist.fit(compiled(connect, FullOnly, loss="mse"), x, y, BATCH, distribution=connect(2), verbose=0)
    with pytest.raises(tfdist.UserError, match=r"^found after 1 batch: .* in a prediction: output '?\w+'? differs"):
        tfdist.predict(compiled(connect, FullOnly, loss="mse"), x, BATCH, distribution=connect(2), verbose=0)


def test_a_check_for_which_one_worker_has_no_memory_is_left_out_by_all(connect, monkeypatch):
    """The others would wait for it in a sum."""
    peers, run, ran = type(connect(2).peers), EquivalenceProbe.run, []

    def with_another(peers, label, value=None, gather=peers.gather):
        found = gather(peers, label, value)
        return [*found, False] if label == "whether memory suffices to check" else found

    monkeypatch.setattr(peers, "gather", with_another)
    monkeypatch.setattr(EquivalenceProbe, "run", lambda probe, *a, **k: (ran.append(*a), run(probe, *a, **k))[1])
    model = compiled(connect)
    tfdist.fit(model, *data(late=False), BATCH, distribution=connect(2), verbose=0)
    assert ran[-1] and step_calls._STEPS[id(model)].step.most_rows < loss.SAMPLE_ROWS


@pytest.mark.whole
def test_r2_score_of_a_single_row(connect):
    """It is the quotient of two rounding errors, which replicas need not share; what it sums up they do."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(53, 3)), generator.normal(size=(53, 1))
    model = compiled(connect, lambda: L.Dense(3), FreeBits, loss="mae", metrics=["r2_score"])
    history = tfdist.fit(model, x, y, 13, distribution=connect(2), shuffle=False, verbose=0).history
    assert np.isfinite(history["r2_score"]).all()


class Capacity(L.Layer):
    """Experts of which each takes so many rows of a batch, more than a check takes before it."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def build(self, shape):
        self.expert = self.add_weight((shape[-1], shape[-1]))

    def call(self, x):
        chosen = ops.one_hot(ops.cast(x[:, 0] > 0, "int32"), 2)
        place = ops.sum(ops.cumsum(chosen, 0) * chosen, -1)
        return x + ops.matmul(x, self.expert) * ops.cast(place <= self.rows, x.dtype)[:, None]


LARGE = 256


def large(rows=2 * LARGE):
    x = np.random.RandomState(0).randn(rows, 3).astype("float32")
    x[LARGE // 3 :: LARGE] *= 9
    return x, x[:, :1] * 0.5


@pytest.mark.parametrize("rows", first(1, [80, 30]))
@pytest.mark.parametrize("kind", first(1, ["fit", "evaluate", "predict"]))
def test_a_capacity_of_rows_of_a_batch(connect, kind, rows):
    """30 rows show before the first batch, and were taken for rounding; 80 show on whole batches alone."""
    model, (x, y) = compiled(connect, lambda: Capacity(rows), loss="mse"), large()
    found = r"^(found after 1 (update|batch): )?1 and 2 replicas disagree .*, since layer 'capacity.*' looks at the"
    with pytest.raises(tfdist.UserError, match=found):
        getattr(tfdist, kind)(
            model, x, *([] if kind == "predict" else [y]), batch_size=LARGE, distribution=connect(2), verbose=0
        )


@pytest.mark.whole
def test_a_capacity_on_which_the_parts_of_a_sorted_batch_agree(connect):
    model, (x, y) = compiled(connect, lambda: Capacity(2), loss="mse"), large(64)
    x[:, 0] = np.abs(x[:, 0]) * np.where(np.arange(64) % 8 < 4, 1, -1)
    with pytest.raises(tfdist.UserError, match=r"disagree .*, since layer 'capacity.*' looks at the other rows"):
        tfdist.fit(model, x, y, batch_size=8, distribution=connect(2), verbose=0)


def limited(x):
    mean, deviation = ops.mean(x, 0, keepdims=True), ops.std(x, 0, keepdims=True)
    return ops.minimum(ops.maximum(x, mean - 3 * deviation), mean + 3 * deviation)


def replaced(x):
    mean, deviation = ops.mean(x, axis=0), ops.std(x, axis=0)
    return ops.where(ops.abs(x - mean) > 3 * deviation, mean, x)


@pytest.mark.parametrize("of_batch", [limited, pytest.param(replaced, marks=pytest.mark.whole)])
def test_operations_of_keras_that_look_at_other_rows_for_rare_ones(connect, of_batch):
    with connect(2).scope():
        model = keras.Model(x := keras.Input((3,)), L.Dense(1)(of_batch(x)))
        model.compile("sgd", "mse")
    with pytest.raises(tfdist.UserError, match=r"disagree on this model.*, since layer '(mean|std).*' looks at the"):
        tfdist.fit(model, *large(), LARGE, distribution=connect(2), verbose=0)


x, i = keras.Input((4, 6)), keras.Input((4,), dtype="int32")
ALONE = [
    lambda: ops.mean(x, -1), lambda: ops.reshape(x, (-1, 24)), lambda: ops.matmul(x, ops.transpose(x, (0, 2, 1))),
    lambda: ops.cumsum(x, 1), lambda: ops.top_k(x, 2)[0], lambda: ops.take(np.ones((9, 2)), i, axis=0), lambda: x[:, 0],
    lambda: ops.where(x > 3, x, 0.0), lambda: ops.split(x, 2, axis=1)[0], lambda: L.Softmax(axis=-1)(x),
    lambda: ops.reshape(x, (-1, 4, 3, 2)), lambda: ops.log(x), lambda: ops.one_hot(i, 5),
]  # fmt: skip
ACROSS = [
    lambda: ops.max(x), lambda: ops.cumsum(x, 0), lambda: ops.sort(x, 0), lambda: ops.flip(x, 0), lambda: x[::-1, :],
    lambda: ops.reshape(x, (-1, 6)), lambda: ops.reshape(x, (6, -1)), lambda: ops.einsum("nab,mab->nm", x, x),
    lambda: ops.isin(x, x * 2), lambda: L.Softmax(axis=-3)(x), lambda: ops.any(i > 0, 0, keepdims=True),
]  # fmt: skip


def test_which_operations_take_each_row_by_itself():
    mixes = lambda outputs: bool(row_mixing.operation(keras.Model([x, i], outputs())))
    assert not [number for number, outputs in enumerate(ALONE) if mixes(outputs)]
    assert not [number for number, outputs in enumerate(ACROSS) if not mixes(outputs)]
