"""The check before the first update: it lets pass what is right, and names what is not."""

import contextlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from programs.surface.layers import CentersTheBatch, CountsAllCalls, CountsCalls, CountsExamples, SumOfSquares
from support import training_cases
from support.covering import first

import tfdist
from tfdist.keras_bridge import batch_norm, keras_internals
from tfdist.verification import equivalence_check

L = keras.layers


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(equivalence_check, "passed_folder", lambda: tmp_path)


def data(n=24):
    r = np.random.default_rng(0)
    return r.normal(size=(n, 6)).astype("float32"), r.normal(size=(n, 1)).astype("float32")


def trained(
    connect, *layers, replicas=2, model=keras.Model, loss="mse", choice="auto", metrics=(), by=tfdist.fit, **more
):
    keras.utils.set_random_seed(0)
    with connect(replicas).scope():
        x = keras.Input((6,))
        y = L.Dense(8, activation="tanh")(x)
        for layer in layers:
            y = layer()(y)
        built = model(x, L.Dense(1)(y))
        built.compile(keras.optimizers.SGD(0.01), loss, metrics=list(metrics))
    if by is keras.Model.fit:
        built.run_eagerly = True
        built.fit(*data(), batch_size=12, shuffle=False, verbose=0)
        return built
    options = dict(distribution=connect(replicas), batch_size=12, verbose=0, check_agreement=choice)
    tfdist.fit(built, *data(), shuffle=False, **options, **more)
    return built


class SumStep(keras.Model):
    """A step whose gradient is a sum over the batch."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(y - self(x, training=True)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class UpdatesByHand(keras.Model):
    """No optimizer sees the gradient, so nobody adds it up."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
        for variable, gradient in zip(self.trainable_variables, tape.gradient(loss, self.trainable_variables)):
            variable.assign_sub(0.1 * gradient)
        return {"loss": loss}


def mean_loss(y, outputs):
    return keras.losses.MeanSquaredError()(y, outputs) + 0.1 * keras.ops.mean(keras.ops.abs(outputs))


@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.whole)])
def test_a_model_that_is_the_same_says_so_and_is_remembered(connect, capsys, replicas):
    dropped = lambda: L.Dropout(0.5)
    trained(connect, dropped, L.LayerNormalization, replicas=replicas, metrics=["mae"])
    (before, line) = [line for line in capsys.readouterr().out.splitlines() if "check" in line]
    assert before == f"tfdist: checking whether 1 and {replicas} replicas agree on this model"
    assert line.startswith(f"tfdist: checked: 1 and {replicas} replicas agree on this model, loss ")
    trained(connect, dropped, L.LayerNormalization, replicas=replicas, metrics=["mae"])
    assert "checked" not in capsys.readouterr().out, "it has passed"
    trained(connect, dropped, replicas=replicas)
    assert "checked" in capsys.readouterr().out, "another model"
    trained(connect, dropped, replicas=replicas, choice="off")
    assert "checked" not in capsys.readouterr().out
    trained(connect, dropped, replicas=replicas, choice="on")
    assert "checked" in capsys.readouterr().out


FACTOR = 0.5


class ScalesByAGlobal(L.Layer):
    """The batch is looked at as soon as the factor is one."""

    def call(self, x):
        return FACTOR * x if FACTOR < 1 else x - keras.ops.mean(x, 0)


@pytest.mark.whole
def test_code_of_the_users_own_is_checked_each_time(connect, capsys, monkeypatch):
    """What it reads as a global, from a file or from the data could change, and a model that passed then did not."""
    for _ in range(2):
        trained(connect, ScalesByAGlobal)
        assert "checked" in capsys.readouterr().out
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 1.0)
    with pytest.raises(tfdist.UserError, match="looks at the other rows of a batch"):
        trained(connect, ScalesByAGlobal)


@pytest.mark.whole
def test_code_without_a_file_is_checked_each_time(connect, capsys):
    space = {"__name__": "notebook"}
    exec("def scale(x): return 0.5 * x", space)
    for _ in range(2):
        trained(connect, lambda: L.Activation(space["scale"]))
        assert "checked" in capsys.readouterr().out


@pytest.mark.parametrize(
    "layers, model, words",
    [
        ([L.BatchNormalization], keras.Model, r"layer 'batch_normalization.*' normalizes with the rows of its own"),
        ([SumOfSquares], keras.Model, r"add_loss differs by .*, which layer sum_of_squares.* gives: make it a mean"),
        ([], SumStep, r"what train_step of SumStep computes is not a mean over examples"),
        ([CountsExamples], keras.Model,
         r"the variable 'counts_examples.*/seen' differs by .* after an update: add it up over"),
        pytest.param(*([], UpdatesByHand,
                       r"the variable 'dense.*' differs by .* after an update: add it up over the replicas"),
                     marks=pytest.mark.whole),
    ],
)  # fmt: skip
def test_what_differs_is_named(connect, layers, model, words):
    with pytest.raises(tfdist.UserError, match=f"^1 and 2 replicas disagree on this model: .*{words}"):
        trained(connect, *layers, model=model)
    # Where each replica has weights of its own there is no result that could be accepted.
    apart = pytest.raises(tfdist.TrainingError, match="the replicas are no longer the same after the last update")
    with apart if model is UpdatesByHand else contextlib.nullcontext():
        trained(connect, *layers, model=model, choice="off")


class GrowsWithItsCalls(CountsCalls):
    """Has a loss whose weight grows with each call, as the annealing of a variational model has it."""

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1.0)
        self.add_loss(0.001 * self.calls.value * keras.ops.mean(keras.ops.square(x)))
        return x


@pytest.mark.parametrize(
    "layer, words",
    [
        (SumOfSquares, "add_loss differs by .*, which layer sum_of_squares.* gives: make it a mean over the examples"),
        pytest.param(CentersTheBatch, "loss 'dense.*' differs by .*, since layer 'centers", marks=pytest.mark.whole),
        pytest.param(GrowsWithItsCalls, "add_loss differs by", marks=pytest.mark.whole),
    ],
)
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.whole)])
def test_micro_batches_that_would_change_the_result_are_refused(connect, layer, words, replicas):
    both = "a batch and its 2 micro-batches" if replicas == 1 or layer is GrowsWithItsCalls else "1 and 2 replicas"
    with pytest.raises(tfdist.UserError, match=f"^{both} disagree on this model: .*{words}"):
        trained(connect, layer, replicas=replicas, accumulate=3)
    by_tfdist = trained(connect, layer, replicas=replicas, accumulate=3, choice="off").get_weights()
    judge = trained(connect, layer, replicas=1, by=keras.Model.fit).get_weights()
    assert max(np.abs(a - b).max() for a, b in zip(by_tfdist, judge)) > 1e-4, "refused for nothing"


def test_micro_batches_that_change_nothing_pass(connect, capsys):
    layers = [lambda: L.Dropout(0.0), CountsExamples, CountsAllCalls]
    by_tfdist = trained(connect, *layers, replicas=1, accumulate=3).get_weights()
    assert "checked: a batch and its 2 micro-batches agree on this model, loss " in capsys.readouterr().out
    judge = trained(connect, *layers, replicas=1, by=keras.Model.fit).get_weights()
    training_cases.all_same(by_tfdist[:2], judge[:2], rtol=1e-5, atol=1e-6)


@pytest.mark.whole
def test_micro_batches_normalize_by_themselves(connect, capsys):
    """As docs/sameness.md says; the rest of the model is checked, and that replicas agree on whole batches."""
    trained(connect, lambda: L.BatchNormalization(synchronized=True), replicas=2, accumulate=2)
    said = capsys.readouterr().out
    assert "checked: 1 and 2 replicas agree on this model" in said
    assert "checked: a batch and its 2 micro-batches agree on this model" in said


@pytest.mark.whole
def test_nothing_of_a_check_stays_in_the_model(connect):
    layers = [lambda: L.Dropout(0.3), lambda: L.BatchNormalization(synchronized=True)]
    for a, b in zip(
        trained(connect, *layers, choice="on").get_weights(),
        trained(connect, *layers, choice="off").get_weights(),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


class CountsInTensorFlow(L.Layer):
    """Keras knows nothing of its variables."""

    def build(self, shape):
        self.calls, self.others = tf.Variable(0.0, trainable=False), [tf.Variable(0.0, trainable=False)]

    def call(self, x):
        self.others[0].assign_add(1.0)
        return x * (1 + 0.01 * self.calls.assign_add(1.0))


@pytest.mark.parametrize("replicas", first(1, [2, 1]))
def test_variables_of_tensorflow_count_the_batches_of_the_training_alone(connect, replicas):
    model = trained(connect, CountsInTensorFlow, replicas=replicas, choice="on", epochs=2)
    layer = next(layer for layer in model.layers if isinstance(layer, CountsInTensorFlow))
    assert float(layer.calls.numpy()) == float(layer.others[0].numpy()) == 2 * -(-len(data()[0]) // 12)


class Holder:
    """Keras looks for variables in the attributes of a layer, not in what they hold."""


def counting(create, of_rows=False):
    """Returns a layer that counts its calls, or keeps a mean of the rows, in a variable that Keras does not track."""

    class Counts(L.Layer):
        def __init__(self):
            super().__init__()
            self.holder = holder

        def call(self, x, training=False):
            if not of_rows:
                holder.count.assign_add(1.0)
            elif training:
                holder.count.assign(keras.ops.mean(x))
            return x

    holder = Holder()
    holder.count = create()
    return Counts, lambda: float(keras.ops.convert_to_numpy(holder.count))


@pytest.fixture(params=first(1, [tf.Variable, keras.Variable]))
def create(request):
    return lambda: request.param(0.0, trainable=False, name="step")


def test_a_variable_outside_of_the_model_counts_the_batches_of_the_training_alone(connect, create):
    layer, count = counting(create)
    trained(connect, layer, replicas=1, epochs=2, validation_data=data())
    assert count() == 4 * -(-len(data()[0]) // 12)


def test_a_variable_outside_of_the_model_is_said_to_be_in_no_checkpoint(connect, create, tmp_path, capsys):
    trained(connect, counting(create)[0], replicas=1, checkpoints=tfdist.Checkpoints(tmp_path / "a"))
    trained(connect, CountsAllCalls, replicas=1, checkpoints=tfdist.Checkpoints(tmp_path / "b"))
    model, known = trained(connect, counting(create)[0], replicas=1), tfdist.Checkpoints(tmp_path / "c")
    tfdist.fit(model, *data(), 12, distribution=connect(1), verbose=0, checkpoints=known)  # which traces nothing
    assert capsys.readouterr().out.count("what no checkpoint holds (step") == 2


def test_a_variable_that_all_replicas_write_is_refused(connect, create):
    layer, count = counting(create)
    with pytest.raises(tfdist.UserError, match=r"step writes the variable 'step.*', which belongs to no layer"):
        trained(connect, layer)
    assert count() == 0
    with connect(2).scope():
        layer, count = counting(create)
    trained(connect, layer, epochs=2)
    assert count() == 2 * -(-len(data()[0]) // 12), "each replica has its own copy"


def test_a_variable_that_each_replica_writes_from_its_own_rows_is_refused(connect, create):
    with connect(2).scope():
        layer, _ = counting(create, of_rows=True)
    with pytest.raises(tfdist.UserError, match=r"disagree on this model: the variable 'step.*' differs by .*add it up"):
        trained(connect, layer)


class Annealed(keras.losses.Loss):
    """Weighs each batch more than the one before."""

    def __init__(self):
        super().__init__()
        self.batches = tf.Variable(0.0, trainable=False)

    def call(self, y, outputs):
        return self.batches.assign_add(1.0) * keras.ops.mean(keras.ops.square(y - outputs), -1)


@pytest.mark.parametrize("replicas", first(0, [2, 1]))
def test_a_loss_counts_the_batches_of_the_training_alone(connect, replicas):
    with connect(replicas).scope():
        loss = Annealed()
    trained(connect, replicas=replicas, loss=loss, choice="on", epochs=2)
    assert float(loss.batches.numpy()) == 2 * -(-len(data()[0]) // 12)


class WeightedStep(keras.Model):
    """Divides by the weights of its own rows, which shows only where these differ."""

    def train_step(self, batch):
        x, y, weight = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * tf.square(y - self(x, training=True))) / tf.reduce_sum(weight)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("batches", first(1, [False, True]))
def test_rows_are_from_all_over_the_data(connect, batches):
    """The first ones of sorted data are all alike."""
    with connect(2).scope():
        model = WeightedStep(x := keras.Input((6,)), L.Dense(1)(x))
        model.compile(keras.optimizers.SGD(0.01))
    x, y = data()
    weight = np.where(np.arange(len(x)) < 8, 1.0, np.linspace(0.1, 2.0, len(x))).astype("float32")[:, None]
    given = (tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(24),) if batches else (x, y)
    more = {} if batches else {"sample_weight": weight, "batch_size": 24}
    with pytest.raises(tfdist.UserError, match="disagree on this model: log 'loss' differs"):
        tfdist.fit(model, *given, distribution=connect(2), verbose=0, **more)


class KeepsLastRows(L.Layer):
    """A memory bank: random to nobody, but each pass finds another state."""

    def build(self, shape):
        self.bank = self.add_weight(shape=(8, shape[-1]), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        seen = x @ keras.ops.transpose(self.bank)
        if training:
            self.bank.assign(keras.ops.concatenate([self.bank, keras.ops.stop_gradient(x)])[-8:])
        return seen


def test_a_state_that_depends_on_the_order_of_rows_is_refused(connect):
    """It was taken for random numbers, and trained another model."""
    with pytest.raises(tfdist.UserError, match=r"the variable '.*' differs by .* after an update"):
        trained(connect, KeepsLastRows)


def test_layers_of_another_scope_are_refused(connect):
    """All replicas would write their weights, each its own update."""
    base = keras.Sequential([keras.Input((6,)), L.Dense(8)])
    for trainable in (False, True):
        base.trainable = trainable
        with connect(2).scope():
            model = keras.Sequential([base, L.Dense(1)])
            model.compile("sgd", "mse")
        refused = pytest.raises(tfdist.UserError, match=r"kernel' were created outside of the distribution's scope: cr")
        with refused if trainable else contextlib.nullcontext():
            tfdist.fit(model, *data(), distribution=connect(2), batch_size=12, verbose=0)


class CountsToTen(CountsExamples):
    """A state that a few examples change at the beginning alone."""

    def call(self, x, training=False):
        x = super().call(x, training)
        self.seen.assign(keras.ops.minimum(self.seen, 10.0))
        return x


RESUMED = [(CountsToTen, "the variable 'counts_to_ten"), (CentersTheBatch, "loss 'dense")]


@pytest.mark.parametrize("layer, words", first(1, RESUMED))
def test_a_resume_on_more_replicas_is_checked(layer, words, connect, tmp_path):
    """One replica had nothing to be compared with."""
    checkpoints = lambda: tfdist.Checkpoints(tmp_path, every="1000 steps")
    trained(connect, layer, replicas=1, checkpoints=checkpoints())
    with pytest.raises(tfdist.UserError, match=f"^1 and 2 replicas disagree on this model: {words}"):
        trained(connect, layer, epochs=2, checkpoints=checkpoints())


@pytest.mark.whole
@pytest.mark.parametrize("own", [[CountsAllCalls], []])
def test_a_checked_resume_ends_with_the_bits_of_one_that_was_not(connect, tmp_path, capsys, monkeypatch, own):
    if not own:  # of Keras' layers alone, nothing is traced
        monkeypatch.setattr(equivalence_check._Outcome, "of", None)
    layers = [lambda: L.Dropout(0.3), lambda: L.BatchNormalization(synchronized=True), *own]
    layers.append(lambda: L.SpectralNormalization(L.Dense(8)))  # which sets its weights itself
    ended = {}
    for choice in ("off", "auto"):
        checkpoints = lambda choice=choice: tfdist.Checkpoints(tmp_path / choice, every="1000 steps")
        trained(connect, *layers, replicas=1, checkpoints=checkpoints())
        capsys.readouterr()
        ended[choice] = trained(connect, *layers, epochs=3, choice=choice, checkpoints=checkpoints())
        assert ("checked: 1 and 2 replicas agree" in capsys.readouterr().out) == (choice == "auto")
    for a, b in zip(ended["auto"].variables, ended["off"].variables, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=a.path)
    for a, b in zip(ended["auto"].optimizer.variables, ended["off"].optimizer.variables, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=a.path)


def deep(synchronized, dropout=0.0, seed=0):
    """Rounding alone changes what it computes in float32 by 1e-3 and more, as MobileNetV2 at 64 x 64 does."""
    keras.utils.set_random_seed(seed)
    y = x = keras.Input((8, 8, 3))
    for filters in (8, 8):
        y = L.Conv2D(filters, 3, padding="same", use_bias=False)(y)
        y = L.Activation(lambda t: keras.ops.sin(500 * t))(L.BatchNormalization(synchronized=synchronized)(y))
    y = L.Dropout(dropout)(L.GlobalAveragePooling2D()(y))
    return keras.Model(x, L.Dense(4)(y))


def fitted(connect, make, replicas=2, **options):
    r = np.random.default_rng(0)
    x, y = r.normal(size=(32, 8, 8, 3)).astype("float32"), r.integers(0, 4, 32)
    with connect(replicas).scope():
        built = make()
        built.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tfdist.fit(built, x, y, batch_size=16, distribution=connect(replicas), verbose=0, check_agreement="on", **options)
    return built


def test_workers_go_on_to_float64_together(connect, monkeypatch):
    """One whose last bits are others would wait in a sum for those that had seen enough."""
    others, gather = iter([False, True]), type(connect(2).peers).gather

    def with_another(peers, label, value=None):
        found = gather(peers, label, value)
        return [*found, next(others)] if label == "whether replicas agree" else found

    monkeypatch.setattr(type(connect(2).peers), "gather", with_another)
    trained(connect)
    assert not list(others)


@pytest.mark.whole
def test_what_rounding_hides_is_seen_in_float64(connect, capsys):
    with pytest.raises(tfdist.UserError, match=r"disagree on this .*call tfdist.synchronize_batch_norm\(model\)"):
        fitted(connect, lambda: deep(False))
    fitted(connect, lambda: tfdist.synchronize_batch_norm(deep(False)))
    assert "checked: 1 and 2 replicas agree on this model" in capsys.readouterr().out


class Inference(L.Layer):
    """Calls a model as for inference, whatever itself is called for."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x, training=False)


@pytest.mark.parametrize("inference", first(0, [False, True]))
def test_batch_norm_is_refused_by_structure_where_numbers_cannot_tell(connect, capsys, inference):
    """A layer that is called with training=False keeps its statistics and is let pass."""

    def make():
        base, noise = deep(False), L.Lambda(lambda t: t + tf.random.normal(tf.shape(t)))
        return keras.Sequential([keras.Input((8, 8, 3)), Inference(base) if inference else base, noise])

    if inference:
        fitted(connect, make)
        assert "WARNING: not checked whether 1 and 2 replicas agree: the model draws random" in capsys.readouterr().out
        return
    with pytest.raises(tfdist.UserError, match=r"^1 and 2 replicas would train different models: layer 'batch_no"):
        fitted(connect, make)
    fitted(connect, make, replicas=1)


@pytest.mark.whole
def test_synchronized_batch_norm_of_a_nested_model_keeps_its_weights(connect):
    """And is as plain Keras on one device, also if it was trained before it was synchronized."""
    x, y = np.random.default_rng(1).normal(size=(32, 4, 4, 3)).astype("float32"), np.arange(32) % 4

    def make(seed=3):
        keras.utils.set_random_seed(seed)
        inner = keras.Sequential([keras.Input((4, 4, 3)), L.Conv2D(4, 3), L.BatchNormalization(), L.Activation("gelu")])
        built = keras.Sequential([keras.Input((4, 4, 3)), inner, L.TimeDistributed(L.BatchNormalization())])
        built.add(L.Flatten())
        built.add(L.Dense(4))
        built.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return built

    plain = make()
    plain.run_eagerly = True
    plain.fit(x, y, batch_size=16, shuffle=False, verbose=0, epochs=2)
    with connect(2).scope():
        ours = make()
        before = ours.get_weights()
        assert tfdist.synchronize_batch_norm(ours) is ours
    assert all(np.array_equal(a, b) for a, b in zip(before, ours.get_weights(), strict=True))
    options = dict(batch_size=16, shuffle=False, verbose=0, distribution=connect(2))
    tfdist.fit(ours, x, y, epochs=2, check_agreement="off", **options)
    training_cases.all_same(plain.get_weights(), ours.get_weights(), rtol=2e-4, atol=2e-5)
    for layer in keras_internals.batch_norms(ours):
        layer.synchronized = False
    with pytest.raises(tfdist.UserError, match="normalizes with the rows of its own replica"):
        tfdist.fit(ours, x, y, check_agreement="on", **options)


def test_only_models_can_be_synchronized():
    with pytest.raises(tfdist.UserError, match="takes a Keras model or layer, got list"):
        tfdist.synchronize_batch_norm([])


@contextlib.contextmanager
def nothing(*arguments):
    yield


BEFORE = [
    (keras_internals, "unscaled_losses", [], mean_loss),
    (keras_internals, "separate_losses", [SumOfSquares, lambda: L.BatchNormalization(synchronized=True)], "mse"),
    (batch_norm, "synchronized", [lambda: L.BatchNormalization(synchronized=True)], "mse"),
]


@pytest.mark.parametrize("module, name, layers, loss", first(1, BEFORE))
def test_what_was_wrong_before_is_caught(connect, monkeypatch, module, name, layers, loss):
    """Each of these takes away what puts Keras right for several replicas."""
    monkeypatch.setattr(module, name, nothing)
    replicas = 8 if name == "synchronized" else 2  # one of eight has no row of the seven
    with pytest.raises((tfdist.UserError, tfdist.TrainingError), match=r"disagree on this model|graph|scope"):
        trained(connect, *layers, loss=loss, replicas=replicas, choice="on")


def test_a_loss_that_divides_by_the_number_of_replicas_is_caught(connect):
    """As TensorFlow's tutorials write them, for a gradient that is summed."""

    def loss(y, outputs):
        return keras.ops.square(y - outputs) / tf.distribute.get_strategy().num_replicas_in_sync

    with pytest.raises(tfdist.UserError, match=r"loss 'dense.*' differs by 5e-01: use a loss with a value per example"):
        trained(connect, loss=loss)


class Similarities(keras.Model):
    """A matrix with a row and a column for each example, of which the right one is to be found."""

    def __init__(self):
        super().__init__()
        self.code = L.Dense(4)

    def call(self, x):
        codes = self.code(x)
        return keras.ops.matmul(codes, keras.ops.transpose(codes))


@pytest.mark.whole
def test_a_matrix_of_similarities_trains_in_whole_batches_alone(connect):
    x, y = data()[0], np.arange(24) % 12

    def found(fit, evaluate, scope, **options):
        keras.utils.set_random_seed(0)
        with scope:
            model = Similarities()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
        logs = fit(model, x, y, batch_size=12, epochs=2, shuffle=False, verbose=0, **options).history
        return logs | evaluate(model, x, y, batch_size=12, verbose=0, return_dict=True)

    theirs = found(keras.Model.fit, keras.Model.evaluate, connect(1).scope())
    assert found(tfdist.fit, tfdist.evaluate, connect(1).scope()) == pytest.approx(theirs, rel=1e-5)
    for replicas, options in (1, {"accumulate": 2}), (2, {"distribution": connect(2)}):
        with pytest.raises(tfdist.UserError, match=r"depends on how many rows a batch has.*: use strategy=default"):
            found(tfdist.fit, tfdist.evaluate, connect(replicas).scope(), **options)


class MixesHalves(L.Layer):
    """It needs an even number of rows."""

    def call(self, x):
        first, second = tf.split(x, 2)
        return tf.concat([first + second, second - first], 0)


class Seeded(L.Layer):
    """Its random numbers, of size zero, must not hide what else it does in training."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(0)

    def call(self, x, training=None):
        noise = 0 * keras.random.normal(keras.ops.shape(x), seed=self.seed)
        return x - keras.ops.mean(x, 0) + noise if training else x


@pytest.mark.parametrize("layer", first(1, [Seeded, MixesHalves]))
def test_what_cannot_be_computed_from_any_rows_or_in_inference_is_seen(connect, layer):
    with pytest.raises(tfdist.UserError, match="1 and 2 replicas disagree on this model"):
        trained(connect, layer)


def test_a_layer_with_a_seed_of_its_own_passes(connect, capsys):
    class Noisy(L.Layer):
        seed = keras.random.SeedGenerator(0)

        def call(self, x, training=None):
            kept = keras.random.dropout(x, 0.5, seed=self.seed)
            return kept + keras.random.uniform(keras.ops.shape(x), seed=self.seed) if training else x

    trained(connect, Noisy)
    assert "checked: 1 and 2" in capsys.readouterr().out


@pytest.mark.parametrize("kind", first(0, ["fit", "stream", "predict"]))
def test_blank_rows_and_zero_weights_show_nothing_and_are_not_remembered(connect, kind):
    distribution, (x, y) = connect(2), data()
    with distribution.scope():
        inputs = keras.Input((6,))
        h = L.Dense(6, kernel_initializer="zeros" if kind == "predict" else "ones")(inputs)
        model = keras.Model(inputs, L.Dense(1)(h - keras.ops.mean(h, 0)))
        model.compile("sgd", "mse")
    with pytest.raises(tfdist.UserError, match="disagree on this model"):
        if kind == "predict":
            tfdist.predict(model, x, distribution=distribution)
        elif kind == "stream":
            x[:12] = 0
            batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
            tfdist.fit(model, batches, distribution=distribution, verbose=0)
        else:
            tfdist.fit(model, np.zeros_like(x), y, batch_size=12, distribution=distribution, verbose=0)


def test_what_noise_would_spoil_is_checked_as_it_is(connect, capsys):
    distribution, (x, y) = connect(2), data()
    with distribution.scope():
        inputs = keras.Input((6,))
        model = keras.Model(inputs, L.Dense(1)(keras.ops.sqrt(1 - inputs**2)))
        model.compile("sgd", "mse")
    tfdist.fit(model, np.ones_like(x), y, batch_size=12, distribution=distribution, verbose=0)
    assert "checked: 1 and 2 replicas agree" in capsys.readouterr().out


@pytest.mark.whole
def test_blank_whole_numbers_are_checked_until_some_differ(connect):
    x, y = np.random.default_rng(0).integers(1, 9, (48, 4)), np.random.default_rng(1).normal(size=(48, 1))
    x[:12] = 0
    distribution = connect(2)
    with distribution.scope():
        inputs = keras.Input((4,), dtype="int32")
        h = keras.ops.mean(L.Embedding(9, 6)(inputs), 1)
        model = keras.Model(inputs, L.Dense(1)(h - keras.ops.mean(h, 0)))
        model.compile("sgd", "mse")
    with pytest.raises(tfdist.UserError, match=r"found after .* updates?: 1 and 2 replicas disagree"):
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
        tfdist.fit(model, batches, epochs=2, distribution=distribution, verbose=0)


def test_unknown_choice(connect):
    with pytest.raises(tfdist.UserError, match="unknown check_agreement 'of': did you mean 'off'"):
        trained(connect, choice="of")


@pytest.mark.whole
@pytest.mark.parametrize("name", ["loss of loss objects", "masked sequences", "batch norm, synchronized"])
def test_cases_that_are_right_pass(connect, capsys, name):
    """The table that compares strategies leaves the check out; here it sees some of it."""
    case = next(c for c in training_cases.CASES if c.name == name)
    training_cases.outcome(case, connect(3), case.precision, check_agreement="on")
    assert "3 replicas agree on this model" in capsys.readouterr().out
