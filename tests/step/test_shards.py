"""`shards`: weights, history and predictions are the same bits on any number of replicas."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from programs.surface.layers import CentersTheBatch, CountsExamples, SumOfSquares
from support import sharded_cases, training_cases
from support.covering import first
from support.sharded_cases import SHARDS
from support.training_cases import L

import tfdist
from tfdist.checkpoints import resume
from tfdist.distributed.distribution import Distribution
from tfdist.errors import Interrupted
from tfdist.step import step_calls, virtual_replicas
from tfdist.step.exact_sum import ExactSum

REPLICAS = (1, 2, 3, 4, 8)
SHORT = {"together": (3,)}
"""What `make test` runs, and on how many replicas beside one device."""
X, Y = training_cases.images(48)


@pytest.fixture(scope="module")
def alone(connect):
    """Each case on one device, run once."""
    return functools.cache(lambda case: sharded_cases.bits(case, connect(1)))


def cells():
    """Yields each case on 2, 3, 4 and 8 replicas; those of the agreement table on a number that divides, and on one
    that does not, since their parts are all among the others.
    """
    for case in sharded_cases.CASES:
        for replicas in REPLICAS[1:] if case in sharded_cases.OWN else (3, 8):
            marks = [] if replicas in SHORT.get(case.name, ()) else [pytest.mark.whole]
            yield pytest.param(case, replicas, id=f"{case}-{replicas}", marks=marks)


@pytest.mark.parametrize("case, replicas", cells())
def test_the_same_bits_on_any_number_of_replicas(case, replicas, alone, connect):
    assert sharded_cases.bits(case, connect(replicas)) == alone(case)


def judged():
    for case in sharded_cases.CASES:
        if case not in sharded_cases.RANDOM:
            yield pytest.param(case, id=case.name, marks=[pytest.mark.whole] * (case.name != "masked and plain"))


@pytest.mark.parametrize("case", judged())
def test_shards_agree_with_the_plain_step(case, connect):
    """To rounding; test_agreement.py compares that one with Keras' own fit."""
    model, history, evaluation, outputs = sharded_cases.trained(case, connect(1))
    expected = training_cases.outcome(case, connect(1), case.precision)
    got = training_cases.weights(model), history, evaluation, outputs
    training_cases.assert_agrees(got, expected, training_cases.TOLERANCE[case.precision])


def test_batch_norm_is_that_of_keras_on_each_shard(connect):
    """One update, computed by Keras slice by slice: the gradient of the mean loss, and the mean of the statistics."""

    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), L.BatchNormalization(momentum=0.5), L.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    rng = np.random.default_rng(0)
    x, y = rng.normal(3, 2, size=(14, 3)).astype("float32"), rng.normal(size=(14, 2)).astype("float32")
    model, judge = build(), build()
    tfdist.fit(model, x, y, batch_size=14, virtual_replicas=4, shuffle=False, verbose=0, distribution=connect(1))
    start = [v.numpy() for v in judge.non_trainable_variables]
    gradients, statistics = [], []
    for rows in np.array_split(np.arange(14), 4):
        for variable, value in zip(judge.non_trainable_variables, start):
            variable.assign(value)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(judge(x[rows], training=True) - y[rows])) / (14 * 2)
        gradients.append(tape.gradient(loss, [v.value for v in judge.trainable_variables]))
        statistics.append([v.numpy() for v in judge.non_trainable_variables])
    for got, before, parts in zip(model.trainable_variables, judge.trainable_variables, zip(*gradients)):
        np.testing.assert_allclose(got.numpy(), before.numpy() - 0.1 * sum(parts), rtol=1e-5, atol=1e-6)
    for got, parts in zip(model.non_trainable_variables, zip(*statistics)):
        np.testing.assert_allclose(got.numpy(), np.mean(parts, 0), rtol=1e-5)


def test_each_shard_of_each_batch_has_masks_of_its_own(connect):
    keras.utils.set_random_seed(1)
    always = sharded_cases.Always()
    model = keras.Sequential([keras.Input((40,)), always])
    ones = np.ones((32, 40), "float32")
    predict = lambda: tfdist.predict(model, ones, batch_size=16, virtual_replicas=4, verbose=0, distribution=connect(1))
    masks, again = predict(), predict()
    assert len({row.tobytes() for row in masks} | {row.tobytes() for row in again}) == 64
    always.generator.state.assign([4, 0])
    np.testing.assert_array_equal(predict(), masks)


@pytest.mark.whole
def test_shards_resume_to_the_same_bits_on_another_number_of_replicas(connect, tmp_path, alone, said, monkeypatch):
    """In the middle of an epoch; and a line says what would make other bits elsewhere."""
    case = next(c for c in sharded_cases.CASES if c.name == "together")
    checkpoints = lambda: tfdist.Checkpoints(tmp_path, every="1000 steps")
    reasons = iter([""] * 4 + ["enough"] * 9)
    stopped = {"should_stop": lambda: next(reasons), "steps_per_call": 1, "checkpoints": checkpoints()}
    with pytest.raises(Interrupted):
        sharded_cases.trained(case, connect(3), **stopped)
    facts = connect(2).arithmetic()
    monkeypatch.setattr(Distribution, "arithmetic", lambda self: {**facts, "threads per replica": "4"})
    assert sharded_cases.bits(case, connect(2), checkpoints=checkpoints()) == alone(case)
    assert any("not be bit-identical from here on: threads per replica 1 there and 4 here" in line for line in said)


def test_micro_batches_belong_to_the_experiment_where_there_are_shards():
    there = {"config.train.virtual_replicas": "8", "config.train.accumulate": "1"}
    assert resume.differences({**there, "config.train.accumulate": "2"}, there) == [
        "config.train.accumulate is 1 there and 2 here"
    ]
    plain = {"config.train.virtual_replicas": "0", "config.train.accumulate": "1"}
    assert resume.differences({**plain, "config.train.accumulate": "2"}, plain) == []


def total(terms, number=None):
    """The sum of lists of tensors by `ExactSum`."""
    number = number or len(terms)
    exact = ExactSum([tf.constant(t) for t in terms[0]], number)
    packed = [exact.term([tf.constant(t) for t in term]) for term in terms]
    arrays = []
    for i, like in enumerate(packed[0][0]):
        array = tf.TensorArray(like.dtype, len(terms), element_shape=like.shape)
        for k, (kept, _, _) in enumerate(packed):
            array = array.write(k, kept[i])
        arrays.append(array)
    tops = [functools.reduce(tf.maximum, parts) for parts in zip(*(tops for _, tops, _ in packed))]
    whole = functools.reduce(tf.add, [whole for _, _, whole in packed])
    sums = exact.total(tfdist.connect("default"), arrays, tops, whole, len(terms))
    return [s.numpy() for s in sums]


def test_exact_sums_depend_on_no_order_and_are_right():
    rng = np.random.default_rng(5)

    def tensor(shape, dtype):
        return (rng.normal(size=shape) * 10.0 ** rng.uniform(-9, 3, shape)).astype(dtype)

    def term():
        floats = [tensor((7, 3), "float32"), tensor((), "float32"), tensor((200, 100), "float32")]
        return [*floats, tensor((5,), "float64"), tensor((4,), "float16"), rng.integers(0, 2**40, 3), np.zeros(2, "f4")]

    terms = [term() for _ in range(11)]
    sums = total(terms)
    for i, got in enumerate(sums):
        values = np.stack([t[i] for t in terms]).astype(np.longdouble)
        unit = np.finfo(got.dtype).eps / 2 if got.dtype.kind == "f" else 0
        allowed = unit * np.abs(values.sum(0)) + 11 * np.abs(values).max() * 2.0**-57
        assert (np.abs(got.astype(np.longdouble) - values.sum(0)) <= allowed).all()
    forward = functools.reduce(np.add, [t[2] for t in terms])
    assert not np.array_equal(forward, functools.reduce(np.add, [t[2] for t in terms[::-1]])), "plain sums would do"
    for order in (terms[::-1], [terms[i] for i in rng.permutation(11)]):
        for got, expected in zip(total(order), sums):
            assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_in_its_tensor(bad):
    large = np.ones((200, 100), "float32")
    spoilt = large.copy()
    spoilt[3, 4] = bad
    one, two = [large, np.float32([1, 2])], [spoilt, np.float32([3, 4])]
    got = total([one, two])
    assert np.isnan(got[0]).all() and got[1].tolist() == [4.0, 6.0]
    got = total([[np.float32([bad, 1.0]), np.float32(2.0)], [np.float32([1.0, 1.0]), np.float32(2.0)]])
    assert np.isnan(got[0]).all() and got[1] == 4.0


def test_the_ends_of_the_range_of_floats():
    tiny, huge = np.finfo("float32").tiny, np.finfo("float32").max
    got = total([[np.float32([tiny, 0.0]), np.float32([huge / 4, 0.0])]] * 3)
    assert got[0].tolist() == [3 * tiny, 0.0]
    np.testing.assert_allclose(got[1], [0.75 * huge, 0.0], rtol=1e-7)
    assert np.isposinf(total([[np.float32([huge])]] * 3)[0][0])


def in_floats(self, distribution, kept, tops, whole, number):
    """Adds up in floats, each replica its own and then what arrives."""
    ones = [
        kind.scale(tf.fill([len(kind.small) + len(kind.large)], float(kind.layout.bias)), 1)[1] for kind in self._kinds
    ]
    sums = [tf.reduce_sum(array.stack(), 0) for array in kept]
    return self._unpacked(distribution.all_sum([*sums, whole]), ones)


def by_replica(self, *arguments, begun=virtual_replicas.VirtualState.__init__):
    """Seeds that depend on the replica."""
    begun(self, *arguments)
    replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.uint32)
    self._streams = [tf.bitwise.bitwise_xor(stream, replica) for stream in self._streams]


@pytest.mark.whole
@pytest.mark.parametrize(
    "owner, name, mutant", [(ExactSum, "total", in_floats), (virtual_replicas.VirtualState, "__init__", by_replica)]
)
def test_a_mutant_is_noticed(owner, name, mutant, connect, monkeypatch):
    case = next(c for c in sharded_cases.CASES if c.name == "dropout")
    monkeypatch.setattr(owner, name, mutant)
    assert sharded_cases.bits(case, connect(1))["weights"] != sharded_cases.bits(case, connect(3))["weights"]


def dense(distribution, **options):
    with distribution.scope():
        return training_cases.compiled(training_cases.dense(), **options)


class OfTensorFlow(L.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


class Unseeded(L.Layer):
    def call(self, x):
        return x + keras.random.normal((1,))


class UnseededNowAndThen(L.Layer):
    """Draws within a branch, whose operations are in a graph of their own."""

    def call(self, x):
        return tf.cond(tf.reduce_mean(x) > 0, lambda: x + keras.random.normal((1,)), lambda: x)


class ShrinksWeights(L.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return tf.while_loop(lambda i: i < 1, lambda i: (i + 1, self.factor.assign(self.factor * 0.9))[:1], (0,)) and x


class SamplesNegatives(L.Layer):
    """As word2vec does."""

    def call(self, x):
        drawn = tf.random.log_uniform_candidate_sampler(tf.zeros((1, 1), tf.int64), 1, 4, False, 50)
        return x + tf.cast(drawn.sampled_candidates[0], x.dtype)


class DrawsByPython(L.Layer):
    """Its numbers depend on what the process has drawn before, and on which replica comes first."""

    def call(self, x):
        drawn = tf.numpy_function(lambda: np.float32(np.random.rand()), [], tf.float32)
        return x + tf.ensure_shape(drawn, [])


class AsksPython(L.Layer):
    def call(self, x):
        return tf.ensure_shape(tf.py_function(lambda x: x, [x], tf.float32), x.shape)


class ComputesByPython(L.Layer):
    def call(self, x):
        return x + tf.ensure_shape(tf.numpy_function(lambda: np.float32(1), [], tf.float32, stateful=False), [])


class Switch(L.Layer):
    def build(self, shape):
        self.on = self.add_weight(shape=(), dtype="bool", initializer="zeros", trainable=False)

    def call(self, x):
        return x


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


def with_layer(layer):
    return lambda: training_cases.compiled(keras.Sequential([keras.Input((4, 4, 1)), L.Flatten(), layer(), L.Dense(5)]))


def own_step():
    image = keras.Input((4, 4, 1))
    return training_cases.compiled(OwnStep(image, L.Dense(5)(L.Flatten()(image))))


class CountsUpdates(L.Layer):
    """In integers, as for a weight that grows during the training."""

    def build(self, shape):
        self.updates = self.add_weight(shape=(), initializer="zeros", trainable=False, name="updates", dtype="int32")

    def call(self, x, training=False):
        if training:
            self.updates.assign_add(1)
        return x


class Highest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="highest")
        self.value = self.add_weight(initializer="zeros", name="value")

    def update_state(self, x):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(x)))

    def result(self):
        return self.value


class Watches(L.Layer):
    def __init__(self):
        super().__init__()
        self.highest = Highest()

    def call(self, x):
        self.highest.update_state(x)
        return x


@pytest.mark.parametrize(
    "layer, message",
    first(2, [
        (CountsExamples, "the variable '.*/seen' differs by .* after an update, since virtual replicas average the f"),
        (Watches, "metric 'highest' differs by .*: leave it out"),
        (CountsUpdates, "the variable '.*/updates' differs by .* after an update"),
        (SumOfSquares, "add_loss differs by .* layer sum_of_squares.* gives: make"),
        (CentersTheBatch, "loss '.*' differs by .*, since layer 'centers"),
    ]),
)  # fmt: skip
@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.whole)])
def test_what_is_another_in_shards_than_in_the_whole_batch_is_refused(layer, message, replicas, connect):
    """Without a word, it would be another number than without shards, if the same on any number of devices."""
    with connect(replicas).scope():
        model = with_layer(layer)()
    given = {"batch_size": 24, "virtual_replicas": 4, "verbose": 0, "distribution": connect(replicas)}
    with pytest.raises(tfdist.UserError, match=f"^a batch and its 4 virtual replicas disagree .*: .*{message}"):
        tfdist.fit(model, X, Y, **given)


def test_what_is_the_same_in_shards_says_so(connect, said):
    """BatchNorm and Dropout, which are not, are left out of the comparison."""
    layers = [L.Flatten(), L.Dense(6), L.BatchNormalization(), L.Dropout(0.5), L.Dense(5)]
    model = training_cases.compiled(keras.Sequential([keras.Input((4, 4, 1)), *layers]))
    tfdist.fit(model, X, Y, batch_size=24, virtual_replicas=4, verbose=0, distribution=connect(1), check_agreement="on")
    assert any(line.startswith("checked: a batch and its 4 virtual replicas agree on this model") for line in said)


class Smoothed(keras.metrics.Metric):
    """A share of the examples that begins with something."""

    def __init__(self, **kwargs):
        super().__init__(name="smoothed", **kwargs)
        self.right = self.add_weight(initializer=keras.initializers.Constant(0.1), name="right")
        self.all = self.add_weight(initializer=keras.initializers.Constant(1), name="all", dtype="int32")

    def update_state(self, y, outputs, sample_weight=None):
        right = keras.ops.equal(keras.ops.argmax(outputs, -1), keras.ops.cast(y, "int64"))
        self.right.assign_add(keras.ops.sum(keras.ops.cast(right, "float32")))
        self.all.assign_add(keras.ops.shape(y)[0])

    def reset_state(self):
        self.right.assign(0.1)
        self.all.assign(1)

    def result(self):
        return self.right / keras.ops.cast(self.all, "float32")


def smoothed(connect, replicas, shards):
    keras.utils.set_random_seed(1)
    with connect(replicas).scope():
        model = training_cases.compiled(training_cases.dense(), metrics=[Smoothed()])
    given = {"batch_size": 20, "virtual_replicas": shards, "verbose": 0, "distribution": connect(replicas)}
    return tfdist.fit(model, X, Y, shuffle=False, **given).history["smoothed"]


@pytest.mark.whole
def test_metrics_that_begin_with_other_than_zero(connect):
    """Each replica had a part of that: those of an integer 1 are 0."""
    keras.utils.set_random_seed(1)
    judge = training_cases.compiled(training_cases.dense(), metrics=[Smoothed()])
    expected = judge.fit(X, Y, batch_size=20, shuffle=False, verbose=0).history["smoothed"]
    assert smoothed(connect, 2, 0) == pytest.approx(expected, rel=1e-6)
    assert smoothed(connect, 2, 3) == smoothed(connect, 1, 3) == pytest.approx(expected, rel=1e-6)


def largest(y, outputs):
    return keras.ops.max(outputs)


@pytest.mark.parametrize("model, replicas, options, message", [
    (training_cases.dense, 8, {"virtual_replicas": 4}, "virtual_replicas=4 must be an integer, and at least the 8"),
    (training_cases.dense, 1, {"virtual_replicas": -1}, "virtual_replicas=-1 must be an integer"),
    (training_cases.dense, 1, {"virtual_replicas": 2.0}, "virtual_replicas=2.0 must be an integer"),
    (training_cases.dense, 1, {"batch_size": 5}, "batch_size=5 is smaller than 8 virtual replicas: use at least 8"),
    (training_cases.dense, 1, {"reduce_dtype": "float16"}, "reduce_dtype cannot be used with virtual_replicas"),
    (training_cases.batch_norm, 1, {}, "synchronized=True needs the rows of all replicas at once"),
    (own_step, 1, {}, "has its own train_step"),
    (with_layer(OfTensorFlow), 1, {}, "by TensorFlow's RandomStandardNormal, which depend on the device"),
    (with_layer(Unseeded), 1, {}, "changes a variable that is not state of a layer"),
    (with_layer(UnseededNowAndThen), 1, {}, "changes a variable that is no|disagree on this model"),
    (with_layer(ShrinksWeights), 1, {}, "changes a variable that is not state of a layer"),
    (with_layer(SamplesNegatives), 1, {}, "by TensorFlow's LogUniformCandidateSampler, which depend on the dev"),
    (with_layer(DrawsByPython), 1, {}, r"the model calls Python \(PyFunc\), whose random numbers and counts would"),
    (with_layer(AsksPython), 1, {}, r"the model calls Python \(EagerPyFunc\)"),
    (with_layer(Switch), 1, {}, "virtual replicas cannot add up .*switch.*, which is bool"),
])  # fmt: skip
def test_what_shards_refuse(model, replicas, options, message, connect):
    with connect(replicas).scope():
        made = model()
        if not made.compiled:
            training_cases.compiled(made)
    with pytest.raises(tfdist.UserError, match=message):
        given = {"batch_size": 24, "virtual_replicas": SHARDS, **options}
        tfdist.fit(made, X, Y, distribution=connect(replicas), verbose=0, **given)


@pytest.mark.whole
def test_python_that_says_it_has_no_state_is_the_same_in_shards(connect):
    weights = []
    for replicas in (1, 3):
        keras.utils.set_random_seed(1)
        with connect(replicas).scope():
            model = with_layer(ComputesByPython)()
        tfdist.fit(model, X, Y, batch_size=24, virtual_replicas=4, verbose=0, distribution=connect(replicas))
        weights.append(training_cases.weights(model))
    np.testing.assert_array_equal(*weights)


@pytest.mark.parametrize("compiled, message", [
    ({"loss": keras.losses.Dice()}, "looks across the batch, which virtual_replicas=8 takes apart"),
    ({"loss": "mse", "metrics": [largest]}, "not add up over parts of a batch, which virtual_replicas=8 takes apart"),
    ({"run_eagerly": True}, "virtual_replicas are compiled, and the model has run_eagerly=True"),
])  # fmt: skip
def test_what_shards_refuse_to_compute(compiled, message, connect):
    model = dense(connect(1), **compiled)
    with pytest.raises(tfdist.UserError, match=message):
        y = Y if "loss" not in compiled else np.eye(5, dtype="float32")[Y]
        tfdist.fit(model, X, y, batch_size=24, virtual_replicas=SHARDS, verbose=0, distribution=connect(1))


def test_no_smaller_micro_batches_for_want_of_memory(connect, monkeypatch):
    def run(*arguments):
        raise step_calls.OutOfMemory("out of memory in update 1")

    model = dense(connect(1))
    monkeypatch.setattr(step_calls, "run", run)
    with pytest.raises(step_calls.OutOfMemory, match="in update 1: use more virtual_replicas, which are smaller"):
        tfdist.fit(model, X, Y, batch_size=24, virtual_replicas=8, verbose=0, distribution=connect(1))


def test_stateful_layers_and_static_shapes_are_refused(connect):
    model = keras.Sequential([keras.Input((4, 4), batch_size=24), L.LSTM(3, stateful=True), L.Dense(5)])
    training_cases.compiled(model)
    with pytest.raises(tfdist.UserError, match="is stateful"):
        tfdist.fit(model, X[..., 0], Y, batch_size=24, virtual_replicas=2, verbose=0, distribution=connect(1))
    static = dataclasses.replace(connect(1), static_shapes=True)
    with pytest.raises(tfdist.UserError, match="virtual_replicas cannot be used with strategy=default"):
        tfdist.predict(dense(connect(1)), X, virtual_replicas=2, verbose=0, distribution=static)


@pytest.mark.parametrize("rows", [1, 2])
def test_predictions_go_on_from_the_state_before(connect, rows):
    """Until `reset_state`, as plain NumPy does; a new trial of the model's outputs set it to zeros."""
    x = np.random.default_rng(0).normal(size=(4, 3, 4)).astype(np.float32)
    with connect(1).scope():
        model = keras.Sequential([keras.Input((3, 4), batch_size=rows), keras.layers.SimpleRNN(3, stateful=True)])
    kernel, recurrent, bias = model.get_weights()
    state = np.zeros([rows, 3])
    for times in range(4):
        if times == 3:
            model.layers[0].reset_state()
            state[:] = 0
        expected = []
        for batch in np.split(x, 4 // rows):
            for t in range(3):
                state = np.tanh(batch[:, t] @ kernel + bias + state @ recurrent)
            expected.append(state)
        predicted = tfdist.predict(model, x, batch_size=rows, verbose=0, distribution=connect(1))
        np.testing.assert_allclose(predicted, np.concatenate(expected), atol=1e-5)
    if rows == 2:
        with pytest.raises(tfdist.UserError, match="carry on 2 rows: give full batches"):
            tfdist.predict(model, x[:3], batch_size=2, verbose=0, distribution=connect(1))
    with connect(2).scope():
        model = keras.Sequential([keras.Input((3, 4), batch_size=2), keras.layers.SimpleRNN(3, stateful=True)])
    with pytest.raises(tfdist.UserError, match="is stateful"):
        tfdist.predict(model, x, batch_size=2, verbose=0, distribution=connect(2))
