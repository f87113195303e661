"""tfdist.fit, evaluate and predict take what Keras' own take: by name, by position, and from each kind of data."""

import inspect
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import refusals, training_cases
from support.covering import first

import tfdist
from tfdist.data import sources
from tfdist.errors import Interrupted

L = keras.layers
X = np.random.default_rng(0).normal(size=(44, 3))
Y = np.random.default_rng(1).integers(0, 3, 44)
W = np.random.default_rng(2).uniform(0.5, 2, 44)
BATCH, BATCHES = 8, 6


def made(distribution):
    keras.utils.set_random_seed(1)
    with distribution.scope():
        model = keras.Sequential([keras.Input((3,)), L.Dense(4, "tanh"), L.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


def assert_same(mine, theirs):
    """Two models with their histories are the same to rounding."""
    (one, history), (two, expected) = mine, theirs
    assert training_cases.distance(training_cases.weights(one), training_cases.weights(two)) < 1e-6
    assert history.epoch == expected.epoch and history.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


def trained(fit, connect, replicas=1, **options):
    """(model, history) of Keras' own fit on one device, or of tfdist's on so many replicas."""
    distribution = connect(replicas)
    model = made(distribution)
    if fit is keras.Model.fit:
        model.run_eagerly = True  # the same numbers, and nothing to trace
        return model, model.fit(**options, verbose=0)
    return model, fit(model, **options, verbose=0, distribution=distribution)


# -- names ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict"])
def test_arguments_are_those_of_keras_in_its_order(name):
    """A failure says that Keras has a new argument: take it, or refuse it in one line."""
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    theirs = inspect.signature(getattr(keras.Model, name)).parameters.values()
    mine = inspect.signature(getattr(tfdist, name)).parameters.values()
    named = [p.name for p in mine if p.kind is positional]
    assert named == ["model", *(p.name for p in theirs if p.kind is positional and p.name != "self")]
    defaults = {p.name: p.default for p in mine if p.kind is positional}
    other = {"x": None} if name == "predict" else {"return_dict": True} if name == "evaluate" else {}
    for p in theirs:
        if p.kind is positional and p.name != "self":
            assert defaults[p.name] == other.get(p.name, p.default), p.name


def test_arguments_by_position(connect):
    split = (X, Y, BATCH, 3, 0, None, 0.25, None, False, {0: 2.0}, None, 1, 5, 1, 4, 2)
    names = [n for n in inspect.signature(tfdist.fit).parameters if n != "model"]
    assert names.index("validation_freq") == len(split) - 1
    one, two = made(connect(1)), made(connect(1))
    assert_same((one, tfdist.fit(one, *split)), (two, two.fit(*split)))
    assert tfdist.evaluate(one, X, Y, BATCH, 0, W, 2, None, False) == pytest.approx(
        two.evaluate(X, Y, BATCH, 0, W, 2, None, False), rel=1e-5
    )
    np.testing.assert_allclose(tfdist.predict(one, X, BATCH, 0, 2), two.predict(X, BATCH, 0, 2), rtol=1e-5, atol=1e-6)


def test_no_data(connect):
    model = made(connect(1))
    for call in (tfdist.fit, tfdist.evaluate, tfdist.predict):
        with refusals.refused(r"no data given \(got None\)"):
            call(model)


@pytest.mark.parametrize("metrics", [[], ["accuracy", "sparse_categorical_crossentropy"]])
def test_evaluate_returns_a_dict_or_what_keras_returns(metrics, connect):
    model = made(connect(1))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=metrics)
    expected = model.evaluate(X, Y, verbose=0)
    values = tfdist.evaluate(model, X, Y, verbose=0, return_dict=False)
    assert isinstance(values, list) == bool(metrics)
    assert values == pytest.approx(expected, rel=1e-5)
    names = tfdist.evaluate(model, X, Y, verbose=0)
    assert list(names.values()) == (values if metrics else [values])


class Seen(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __getattribute__(self, name):
        if name.startswith(("on_test", "on_predict")):
            return lambda *args, **kwargs: self.seen.append(name)
        return super().__getattribute__(name)


def test_verbose_and_callbacks_of_evaluate_and_predict(connect, capsys):
    model = made(connect(1))
    mine, theirs = Seen(), Seen()
    tfdist.predict(model, X, batch_size=BATCH, callbacks=[mine])
    tfdist.evaluate(model, X, Y, batch_size=BATCH, callbacks=[mine])
    assert capsys.readouterr().out.count("/step") >= 2, "a progress bar of each"
    model.predict(X, batch_size=BATCH, callbacks=[theirs], verbose=0)
    model.evaluate(X, Y, batch_size=BATCH, callbacks=[theirs], verbose=0)
    assert mine.seen == theirs.seen
    tfdist.predict(model, X, verbose=0)
    tfdist.evaluate(model, X, Y, verbose=0)
    assert not capsys.readouterr().out


class Stop(keras.callbacks.Callback):
    """Ends an evaluation or a prediction after its third batch."""

    def on_test_batch_end(self, batch, logs=None):
        self.model.stop_evaluating = batch == 2

    def on_predict_batch_end(self, batch, logs=None):
        self.model.stop_predicting = batch == 2


@pytest.mark.parametrize("replicas", first(0, [1, 2]))
def test_callbacks_end_an_evaluation_and_a_prediction(replicas, connect):
    """Of data without an end, too."""
    model, plain = made(connect(replicas)), made(connect(1))
    for _ in range(2):  # the second begins anew
        evaluated = tfdist.evaluate(model, generator(), callbacks=[Stop()], verbose=0, distribution=connect(replicas))
        assert evaluated["loss"] == pytest.approx(plain.evaluate(generator(), callbacks=[Stop()], verbose=0)[0])
    rows = tfdist.predict(model, generator(), callbacks=[Stop()], verbose=0, distribution=connect(replicas))
    np.testing.assert_allclose(rows, plain.predict(generator(), callbacks=[Stop()], verbose=0), rtol=1e-5, atol=1e-6)
    options = dict(x=X, y=Y, validation_data=(X, Y), batch_size=BATCH, epochs=2, shuffle=False, callbacks=[Stop()])
    assert_same(trained(tfdist.fit, connect, replicas, **options), trained(keras.Model.fit, connect, **options))


# -- arguments --------------------------------------------------------------


@pytest.mark.whole
def test_limits_of_the_session_as_in_keras(connect, said):
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(3)
    try:
        options = dict(x=X, y=Y, batch_size=BATCH, epochs=4, shuffle=False, validation_data=(X, Y))
        mine = trained(tfdist.fit, connect, **options)
        assert any("at most 2 epochs, since keras.config says so" in line for line in said)
        assert_same(mine, trained(keras.Model.fit, connect, **options))
        assert len(tfdist.predict(mine[0], X, batch_size=BATCH, verbose=0)) == 3 * BATCH
        whole = tfdist.evaluate(mine[0], X, Y, batch_size=BATCH, verbose=0)["loss"]
        assert whole == pytest.approx(mine[0].evaluate(X, Y, batch_size=BATCH, verbose=0)[0], rel=1e-5)
        few = options | dict(epochs=1, steps_per_epoch=2)
        assert_same(trained(tfdist.fit, connect, **few), trained(keras.Model.fit, connect, **few))
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)


@pytest.mark.whole
@pytest.mark.parametrize("replicas", [2, pytest.param(1, marks=pytest.mark.whole)])
def test_validation_split_takes_the_last_examples_before_shuffling(replicas, connect):
    options = dict(batch_size=BATCH, epochs=2, shuffle=False, validation_split=0.3)
    mine = trained(tfdist.fit, connect, replicas, x={"a": X}["a"], y=Y, sample_weight=W, **options)
    assert_same(mine, trained(keras.Model.fit, connect, x=X, y=Y, sample_weight=W, **options))
    shuffled = trained(tfdist.fit, connect, x=X, y=Y, **(options | {"shuffle": True, "epochs": 1}))
    last = X[int(44 * 0.7) :], Y[int(44 * 0.7) :]
    loss = tfdist.evaluate(shuffled[0], *last, verbose=0)["loss"]
    assert shuffled[1].history["val_loss"][0] == pytest.approx(loss, rel=1e-5)


def test_steps_decide_the_batch_size_of_arrays_as_in_keras(connect):
    options = dict(x=X, y=Y, steps_per_epoch=4, epochs=2, shuffle=False, validation_data=[X, Y], validation_steps=5)
    assert_same(trained(tfdist.fit, connect, **options), trained(keras.Model.fit, connect, **options))
    model = made(connect(1))
    assert tfdist.predict(model, X, steps=4, verbose=0).shape == model.predict(X, steps=4, verbose=0).shape
    assert tfdist.predict(model, X, batch_size=4, steps=4, verbose=0).shape == (16, 3)


@pytest.mark.parametrize("options, message", [
    (dict(validation_split=0.2, validation_data=(X, Y)), "validation_split and validation_data both say"),
    (dict(validation_split=1.0), r"validation_split=1.0 leaves nothing of 44 examples on one side"),
    (dict(validation_split=0.001, x=X[:1], y=Y[:1]), "validation_split=0.001 leaves nothing of 1 examples"),
    (dict(validation_steps=2), "validation_steps says how to validate, without data: give validation_data"),
    (dict(validation_freq=2), "validation_freq says how to validate, without data"),
    (dict(validation_batch_size=2), "validation_batch_size says how to validate, without data"),
    (dict(shuffle="batch"), "shuffle must be True or False, got 'batch'"),
])  # fmt: skip
def test_arguments_that_would_change_nothing(options, message, connect):
    with pytest.raises(tfdist.UserError, match=message):
        tfdist.fit(made(connect(1)), **(dict(x=X, y=Y, verbose=0) | options))


def test_a_split_of_what_has_no_last_examples(connect):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    with pytest.raises(tfdist.UserError, match="validation_split takes the last examples of arrays"):
        tfdist.fit(made(connect(1)), data, validation_split=0.5)
    with pytest.raises(tfdist.UserError, match="steps must be at least 1, got 0"):
        tfdist.evaluate(made(connect(1)), X, Y, steps=0)


# -- data -------------------------------------------------------------------


class Sequence(keras.utils.PyDataset):
    """The examples, in an order that `on_epoch_end` changes, unless they lie `still`."""

    def __init__(self, steps=BATCHES, still=False, **options):
        super().__init__(**options)
        self.steps, self.still, self.calls, self.made = steps, still, [], []
        self.rng, self.rows = np.random.default_rng(3), np.arange(44)

    @property
    def num_batches(self):
        return self.steps

    def __getitem__(self, number):
        self.made.append(number)
        rows = self.rows[BATCH * (number % BATCHES) :][:BATCH]
        return X[rows], Y[rows], W[rows]

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")
        if not self.still:
            self.rng.shuffle(self.rows)


class Shrinking(Sequence):
    def on_epoch_end(self):
        self.steps -= 1


def generator(batches=None):
    for number in itertools.count() if batches is None else range(batches):
        rows = np.arange(BATCH * number, BATCH * number + BATCH) % 44
        yield X[rows], Y[rows]


def frames():
    pandas = pytest.importorskip("pandas")
    return dict(x=pandas.DataFrame(X, columns=list("abc")), y=pandas.Series(Y), sample_weight=pandas.Series(W))


def polars_frames():
    polars = pytest.importorskip("polars")
    return dict(x=polars.DataFrame(X, schema=list("abc")), y=polars.Series(Y))


def grain_data(loader=False):
    grain = pytest.importorskip("grain")
    rows = [(x, y) for x, y in zip(X, Y)]
    if not loader:
        return dict(x=grain.MapDataset.source(rows).seed(0).shuffle().batch(BATCH))
    sampler = grain.samplers.IndexSampler(44, shuffle=True, seed=0, num_epochs=1)
    return dict(x=grain.DataLoader(data_source=rows, sampler=sampler, operations=[grain.transforms.Batch(BATCH)]))


def torch_data():
    data = pytest.importorskip("torch").utils.data
    return dict(x=data.DataLoader([(x.astype("float32"), y) for x, y in zip(X, Y)], batch_size=BATCH))


DATA = {
    "arrays": (lambda: dict(x=X, y=Y, sample_weight=W), dict(batch_size=BATCH, epochs=2)),
    "tensors": (lambda: dict(x=tf.constant(X), y=tf.constant(Y)), dict(batch_size=BATCH, epochs=2)),
    "pandas": (frames, dict(batch_size=BATCH, epochs=2)), "polars": (polars_frames, dict(batch_size=BATCH, epochs=2)),
    "a data set": (lambda: dict(x=tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)), dict(epochs=2)),
    "of unknown length": (
        lambda: dict(x=tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: True).batch(BATCH)),
        dict(epochs=3, steps_per_epoch=2),
    ),
    "a sequence": (lambda: dict(x=Sequence()), dict(epochs=3)),
    # These lie still, since Keras has read ahead in them when it calls `on_epoch_end`.
    "part by part": (lambda: dict(x=Sequence(still=True)), dict(epochs=3, steps_per_epoch=2)),
    "without end": (lambda: dict(x=Sequence(None, still=True)), dict(epochs=3, steps_per_epoch=4)),
    "threads": (lambda: dict(x=Sequence(workers=3, max_queue_size=2)), dict(epochs=3)),
    "processes": (lambda: dict(x=Sequence(workers=2, use_multiprocessing=True)), dict(epochs=2)),
    "a generator": (lambda: dict(x=generator(BATCHES)), {}),
    "a generator without end": (lambda: dict(x=generator()), dict(epochs=3, steps_per_epoch=4)),
    "Grain": (grain_data, dict(epochs=2)), "Grain's loader": (lambda: grain_data(loader=True), dict(epochs=2)),
    "torch": (torch_data, dict(epochs=2)),
}  # fmt: skip

SHORT = {("arrays", 1), ("a data set", 2), ("a sequence", 1), ("a generator", 2), ("pandas", 1)}
"""Kinds on one device and on two replicas: in `make test` the most frequent ones in turn."""
KINDS = sorted(itertools.product(DATA, (1, 2)), key=lambda cell: cell not in SHORT)


@pytest.mark.parametrize("kind, replicas", first(len(SHORT), KINDS))
def test_each_kind_of_data_as_in_keras(kind, replicas, connect):
    give, options = DATA[kind]
    mine = trained(tfdist.fit, connect, replicas, **give(), shuffle=False, check_agreement="off", **options)
    theirs = trained(keras.Model.fit, connect, **give(), shuffle=False, **options)
    assert_same(mine, theirs)
    model, here = theirs[0], dict(distribution=connect(replicas), verbose=0, check_agreement="off")
    some = {k: v for k, v in options.items() if k == "batch_size"} | {"steps": 4}
    values = tfdist.evaluate(mine[0], **give(), **some, **here)
    assert values == pytest.approx(model.evaluate(**give(), **some, verbose=0, return_dict=True), rel=1e-5)
    outputs = tfdist.predict(mine[0], give()["x"], **some, **here)
    np.testing.assert_allclose(outputs, model.predict(give()["x"], **some, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.whole
def test_a_sequence_is_told_of_epochs_as_by_keras(connect):
    def calls(name, **options):
        data, other = Sequence(), Sequence()
        model = made(connect(1))
        own = getattr(model, name) if name in ("fit", "evaluate", "predict") else None
        own(data, verbose=0, **options)
        getattr(tfdist, name)(model, other, verbose=0, **options)
        assert data.calls == other.calls and data.calls
        return data

    calls("fit", epochs=2, shuffle=False)
    calls("fit", epochs=3, steps_per_epoch=2, shuffle=False)
    calls("fit", epochs=3, callbacks=[keras.callbacks.EarlyStopping("loss", patience=0, min_delta=100)])
    calls("evaluate")
    calls("predict")
    mine, theirs = Sequence(), Sequence()
    tfdist.fit(made(connect(1)), X, Y, epochs=2, validation_data=mine, verbose=0)
    made(connect(1)).fit(X, Y, epochs=2, validation_data=theirs, verbose=0)
    assert mine.calls == theirs.calls


class Numbers(keras.utils.PyDataset):
    """Each batch is its number."""

    def __init__(self, size, **options):
        super().__init__(**options)
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, number):
        return np.full((2, 1), number, "float32"), np.zeros((2, 1))


class Inputs(keras.layers.Layer):
    """Hands on its input, and notes it."""

    def __init__(self):
        super().__init__()
        self.log = []
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x, training=False):
        if training:
            tf.py_function(lambda v: self.log.append(int(v[0, 0])), [x], [])
        return x * self.scale


def order_of(connect, **options):
    layer = Inputs()
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    tfdist.fit(model, Numbers(5), distribution=connect(1), steps_per_call=1, verbose=0, **options)
    return layer.log


def test_shuffle_changes_the_order_of_the_batches_of_a_sequence(connect):
    assert order_of(connect, epochs=2, shuffle=False) == [*range(5), *range(5)]
    one = order_of(connect, epochs=2, seed=1)
    assert one == [*sources.order(1, 0, 5), *sources.order(1, 1, 5)] and one == order_of(connect, epochs=2, seed=1)


def interrupt(updates, model, data, **options):
    """Ends a training after so many updates."""
    done = []
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs=None: done.append(1))
    with pytest.raises(Interrupted):
        tfdist.fit(model, data, callbacks=[callback], should_stop=lambda: "enough" * (len(done) == updates), **options)


@pytest.mark.parametrize("steps", [6, *(pytest.param(n, marks=pytest.mark.whole) for n in (1, 4, 9))])
def test_a_sequence_goes_on_at_the_very_batch(steps, connect, tmp_path):
    """And what `on_epoch_end` changes is as if nothing had happened."""
    options = dict(distribution=connect(1), epochs=3, verbose=0, steps_per_call=1)
    whole = made(connect(1))
    expected = tfdist.fit(whole, Sequence(), **options)
    interrupt(steps, made(connect(1)), Sequence(), checkpoints=tfdist.Checkpoints(tmp_path), **options)
    model, data = made(connect(1)), Sequence()
    history = tfdist.fit(model, data, checkpoints=tfdist.Checkpoints(tmp_path), **options)
    assert_same((model, history), (whole, expected))
    assert len(data.made) <= 2 + 3 * BATCHES - steps, "two to know their shapes, and none to skip it"


def test_a_generator_goes_on_with_a_warning(connect, tmp_path, said):
    options = dict(distribution=connect(1), epochs=3, steps_per_epoch=4, verbose=0, steps_per_call=1)
    whole = made(connect(1))
    expected = tfdist.fit(whole, generator(), **options)
    interrupt(6, made(connect(1)), generator(), checkpoints=tfdist.Checkpoints(tmp_path), **options)
    assert not any("generator" in line for line in said)
    model = made(connect(1))
    history = tfdist.fit(model, generator(), checkpoints=tfdist.Checkpoints(tmp_path), **options)
    assert "WARNING: a generator has no index: its first 6 batches are read and left out" in "\n".join(said)
    assert_same((model, history), (whole, expected))


@pytest.mark.parametrize("options, message", [
    (dict(x=generator(BATCHES), epochs=2), "a generator can be read once, and there are 2 epochs: give steps_per"),
    (dict(x=generator(), steps_per_epoch=2, on_nonfinite="rollback"), "goes back, and a generator cannot"),
    (dict(x=X, y=Y, epochs=2, validation_data=generator(2)), "read once, and several epochs validate with it"),
    (dict(x=generator(0)), "the data set is empty"),
    (dict(x=(b for b in [(X[:2], Y[:2], W[:2], W[:2])])), r"a batch is \(x,\), .*, got 4 entries: nest the inputs"),
    (dict(x=(b for b in [(X[:2], None, W[:2])])), "sample weights without targets have nothing to weigh"),
    (dict(x=(b for b in [(X[0], Y[0])])), "cannot train on int64"),
    (dict(x=(b for b in [(X[:2], Y[:2]), (X[:2, 0], Y[:2])])), "the first two batches of the generator are not al"),
    (dict(x=generator(), y=Y), "targets and weights belong into the data set itself when it is a generator"),
    (dict(x=generator(), batch_size=5), "batch_size=5 does not fit a data set of batches of 8"),
    (dict(x=generator(5), epochs=3, steps_per_epoch=5), "the data set ended before the first update of epoch 2"),
    (dict(x=X, y=Y, batch_size="8"), "batch_size must be an integer, got '8'"),
    (dict(x=Sequence(0)), "the data set is empty"),
    (dict(x=Shrinking(3), epochs=2), "Shrinking has 2 batches now and had 3 before: give it as many in all epochs"),
    (dict(x=Sequence(None)), "the data set never ends: give steps_per_epoch"),
    (dict(x=Sequence(max_queue_size=0)), "max_queue_size of Sequence must be at least 1, got 0"),
    (dict(x=keras.utils.PyDataset()), "PyDataset has no length"),
    (dict(x=tf.ragged.constant([[1.0], [2.0, 3.0]]), y=Y[:2]), "a RaggedTensor cannot be batched evenly: make it"),
    (dict(x=(b for b in [(tf.ragged.constant([[1.0]]), Y[:1])])), "a RaggedTensor cannot be batched evenly"),
    (dict(x=tf.sparse.from_dense(X), y=Y), "a SparseTensor cannot be batched evenly"),
    (dict(x=iter([(X, Y)])), "cannot train on list_iterator"),
    (dict(x=X, y=Y, class_weight={"a": 1.0}), "must map class numbers, .* got 'a': 1.0: replace names by the num"),
    (dict(x=X, y=Y, class_weight={-1: 1.0}), "must map class numbers, from 0 on"),
    (dict(x=X, y=Y, class_weight={0: "1"}), "to weights, got 0: '1'"),
    (dict(x=X, y=np.eye(3)[Y][:, None], class_weight={0: 2.0}), r"and the targets have shape \[n, 1, 3\]"),
    (dict(x=X, y=np.stack([Y, Y], 1), class_weight={0: 2.0}), r"class_weight takes one class .* shape \[n, 2\]"),
    (dict(x=X, y=Y, class_weight=[1.0, 2.0, 3.0]), "class_weight must be a dict, got list"),
    (dict(x=Y.astype(str), y=Y), "does not fit the model's inputs .Cast string to float is not supported.: change"),
    (dict(x=X, y=Y.astype(str)), "targets have the shapes .., its outputs .3,. .Cast string to float is not sup"),
    (dict(x=X[:, :2], y=Y), "expected axis -1 of input shape to have value 3, .* with shape .None, 2..: change"),
    (dict(x=X, y=Y, validation_data=(X[:, :2], Y)), "expected axis -1 of input shape to have value 3, .*: change"),
    (dict(x=X.reshape(22, 2, 3), y=Y[:22]), "Expected shape .None, 3., but .* incompatible shape .None, 2, 3..: "),
    (dict(x={"a": X, "b": X}, y=Y), "the data does not fit the model's inputs .The structure of `inputs` do"),
])  # fmt: skip
def test_data_that_cannot_be_used(options, message, connect):
    with refusals.refused(message):
        tfdist.fit(made(connect(1)), **(dict(verbose=0) | options))


def test_metrics_in_the_place_of_loss_weights(connect):
    model = made(connect(1))
    with connect(1).scope():
        model.compile("sgd", "mse", ["mae"])
    with refusals.refused(r"third argument of compile\(\), must be numbers, got \['mae'\]: give metrics by name"):
        tfdist.fit(model, X, Y)


def test_a_class_without_a_weight_keeps_1():
    """Also one that a loss ignores."""
    source = sources.weigh_classes(sources.as_source(X[:3], np.array([-1, 0, 5])), {0.0: 2.0})
    assert source.first_rows(3)[2].tolist() == [1, 2, 1]


def test_data_that_ends_within_an_epoch_is_reported(connect, said):
    history = tfdist.fit(made(connect(1)), generator(6), epochs=2, steps_per_epoch=4, verbose=0)
    assert said == ["WARNING: the data ended after 2 updates of epoch 2, not 4"] and len(history.epoch) == 2


def test_no_batch_of_a_generator_is_lost(connect):
    with connect(1).scope():
        model = keras.Sequential([keras.Input((1,)), L.Rescaling(2.0)])
        model.compile(loss="mse")
    numbers = lambda: (np.full((1, 1), i, "float32") for i in range(5))
    assert tfdist.predict(model, numbers(), verbose=0).ravel().tolist() == [0, 2, 4, 6, 8]
    pairs = ((x, np.zeros((1, 1))) for x in numbers())
    assert tfdist.evaluate(model, pairs, verbose=0)["loss"] == pytest.approx(24.0)


def test_batches_of_variable_length_and_class_weights(connect):
    """Keras refuses class weights for generators, so its own data set of the same batches is the judge."""

    def batches():
        for length in (3, 5, 4):
            yield np.full((4, length), length, "int32"), np.arange(4) % 2

    def model():
        keras.utils.set_random_seed(1)
        net = keras.Sequential([keras.Input((None,)), L.Embedding(8, 3), L.GlobalAveragePooling1D(), L.Dense(2)])
        net.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return net

    spec = tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None], tf.int64)
    judge, mine = model(), model()
    weights = {0: 3.0, 1: 0.5}
    expected = judge.fit(
        tf.data.Dataset.from_generator(batches, output_signature=spec), class_weight=weights, verbose=0
    )
    assert_same((mine, tfdist.fit(mine, batches(), class_weight=weights, verbose=0)), (judge, expected))


@pytest.mark.parametrize("replicas", [2, pytest.param(1, marks=pytest.mark.whole)])
def test_predict_takes_nested_inputs_as_keras(replicas, connect):
    with connect(replicas).scope():
        a, b = keras.Input((3,), name="a"), keras.Input((1,), name="b")
        two = keras.Model([a, b], {"sum": L.Add()([a, b]), "a": L.Rescaling(2.0)(a)})
        one = keras.Sequential([keras.Input((3,)), L.Rescaling(2.0)])
    x, y = X.astype("float32"), Y[:, None].astype("float32")
    options = dict(distribution=connect(replicas), verbose=0, batch_size=BATCH)
    for inputs in ([x, y], (x, y), {"a": x, "b": y}):
        outputs = tfdist.predict(two, inputs, **options)
        np.testing.assert_allclose(outputs["sum"], x + y, rtol=1e-6)
        np.testing.assert_allclose(outputs["a"], 2 * x, rtol=1e-6)
    by_batch = (((x[i : i + 8], y[i : i + 8]),) for i in range(0, 44, 8))
    np.testing.assert_allclose(tfdist.predict(two, by_batch, **options | {"batch_size": None})["sum"], x + y, rtol=1e-6)
    for inputs in (x, (x,), [x], (x, y)):
        np.testing.assert_allclose(tfdist.predict(one, inputs, **options), 2 * x, rtol=1e-6)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize("kind", first(1, ["a sequence", "a generator without end"]))
def test_models_with_their_own_step_read_python_batches(kind, connect):
    def model():
        keras.utils.set_random_seed(1)
        own = OwnStep([keras.Input((3,)), L.Dense(3)])
        own.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return own

    give, options = DATA[kind]
    mine, theirs = model(), model()
    theirs.run_eagerly = True
    history = tfdist.fit(mine, **give(), shuffle=False, verbose=0, **options)
    assert_same((mine, history), (theirs, theirs.fit(**give(), shuffle=False, verbose=0, **options)))


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.whole)])
def test_a_model_that_only_trains_by_its_own_step_is_measured_with_several_losses(replicas, connect):
    """Each evaluation ended in an error of TensorFlow's."""
    with connect(replicas).scope():
        model = OwnStep([keras.Input((3,)), L.Dense(3), L.Lambda(lambda x: {"a": x, "b": x[:, :1]})])
        model.compile("sgd", {"a": "mse", "b": "mae"}, loss_weights={"a": 0.3, "b": 2.0})
    x, y = training_cases.rng().normal(size=(11, 3)), {"a": np.ones([11, 3]), "b": np.ones([11, 1])}
    tfdist.fit(model, x, y, batch_size=4, verbose=0, distribution=connect(replicas))
    ours, outputs = tfdist.evaluate(model, x, y, batch_size=4, verbose=0, distribution=connect(replicas)), model(x)
    a, b = np.mean(np.square(1 - outputs["a"])), np.mean(np.abs(1 - outputs["b"]))
    np.testing.assert_allclose([ours["loss"], ours["a_loss"], ours["b_loss"]], [0.3 * a + 2 * b, a, b], rtol=1e-5)


def test_a_worker_among_others_is_not_forked():
    assert "would fork a worker" in sources.as_source(Sequence(workers=2, use_multiprocessing=True)).reader.alone
    assert not sources.as_source(Sequence(workers=2)).reader.alone


def test_the_arrays_of_a_sequence_stay_as_they_are(connect):
    """TensorFlow takes arrays at addresses that suit it without a copy, and computed in place in them."""

    def aligned(columns):
        memory = np.zeros(24 * columns + 16, "float32")
        begin = -memory.ctypes.data // 4 % 16
        array = memory[begin : begin + 24 * columns].reshape(24, columns)
        array[:] = np.random.default_rng(columns).normal(size=array.shape)
        return array

    class Rows(keras.utils.PyDataset):
        def __len__(self):
            return 5

        def __getitem__(self, i):
            return x[5 * i : 5 * i + 5], y[5 * i : 5 * i + 5]

    x, y = aligned(16), aligned(16)
    before = x.copy(), y.copy()
    with connect(3).scope():
        model = keras.Sequential([keras.Input((16,)), L.Dense(16)])
        model.compile("sgd", "log_cosh")
    tfdist.fit(model, Rows(), epochs=3, distribution=connect(3), verbose=0)
    np.testing.assert_array_equal(x, before[0])
    np.testing.assert_array_equal(y, before[1])
