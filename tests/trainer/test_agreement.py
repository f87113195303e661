"""Weights, history, evaluation and predictions are the same under every strategy, and those of Keras on one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import training_cases
from support.covering import first

import tfdist


@pytest.fixture(scope="module")
def reference(connect):
    """Each case on one device, run once."""
    return functools.cache(lambda case, precision: training_cases.outcome(case, connect(1), precision))


SHORT = [("", 2), ("float64", 3), ("", 3), ("float64", 2)]
"""What `make test` runs of every 24th case, in turn: its own precision ("") or float64, on so many replicas."""


def rows():
    """Yields each case in each precision on 2, 3, 4 and 8 replicas: one row for `make test`, all for `test-all`."""
    for turn, case in enumerate(training_cases.CASES):
        own, (precision, replicas) = case.precision, SHORT[turn // 24 % len(SHORT)]
        in_turn = turn % 24 == 0 and case.name != "metrics built late"  # whose tracing takes a minute
        short = {((case.double and precision) or own, replicas)} if in_turn else set()
        for precision in [own, "float64"] if case.double else [own]:
            # In float64 rounding hides nothing, so two numbers of replicas are proof enough.
            for replicas in (2, 3, 4, 8) if precision != "float64" else (2, 3):
                marks = [] if (precision, replicas) in short else [pytest.mark.whole]
                yield pytest.param(case, precision, replicas, id=f"{case}-{precision}-{replicas}", marks=marks)


TABLE = list(rows())


@pytest.mark.parametrize("case, precision, replicas", TABLE)
def test_mirrored_agrees_with_one_device(case, precision, replicas, reference, connect):
    got = training_cases.outcome(case, connect(replicas), precision)
    training_cases.assert_agrees(got, reference(case, precision), training_cases.TOLERANCE[precision])


@pytest.mark.parametrize(
    "case",
    # Every fourteenth case in `make test`.
    [
        pytest.param(c, id=str(c), marks=[pytest.mark.whole] * (i % 21 != 4))
        for i, c in enumerate(c for c in training_cases.CASES if c.keras)
    ],
)
def test_one_device_agrees_with_keras_fit(case, connect):
    """Keras is the independent answer: same data order, no accumulation, uneven tails included.

    Two of Keras' own inexactnesses are kept out: its optimizers mistake sparse
    gradients that repeat a row (see the test below), and its single losses of
    several outputs are means of batch means.
    """
    precision = case.precision
    ours = training_cases.outcome(case, connect(1), precision, shuffle=False)
    model = training_cases.build(case, connect(1), precision)
    apply = model.optimizer.apply
    model.optimizer.apply = lambda grads, variables: apply(
        [None if g is None else tf.convert_to_tensor(g) for g in grads], variables
    )
    x, y, weight = (*case.data(case.examples), None)[:3]
    options = dict(batch_size=case.batch, sample_weight=weight, verbose=0)
    history = model.fit(x, y, epochs=training_cases.EPOCHS, shuffle=False, **case.fit, **options)

    tolerance = max(training_cases.TOLERANCE[precision], 1e-6)
    assert training_cases.distance(ours[0], training_cases.weights(model)) < tolerance
    assert ours[1].keys() == history.history.keys()
    inexact = {m.name for m in model._compile_loss.metrics} if case.examples % case.batch else set()
    for name in history.history.keys() - inexact:
        np.testing.assert_allclose(
            ours[1][name], history.history[name], rtol=10 * tolerance, atol=tolerance, err_msg=name
        )
    for name, value in model.evaluate(x, y, return_dict=True, **options).items():
        if name in inexact:
            continue
        np.testing.assert_allclose(ours[2][name], value, rtol=10 * tolerance, atol=tolerance, err_msg=name)
    training_cases.all_same(
        ours[3], keras.tree.flatten(model.predict(x, verbose=0)), rtol=100 * tolerance, atol=10 * tolerance
    )


@pytest.mark.whole
def test_single_losses_add_up(reference):
    case = next(c for c in training_cases.CASES if c.name == "two outputs")
    history = reference(case, "float32")[1]
    total = 0.7 * np.array(history["kind_loss"]) + 2.0 * np.array(history["size_loss"])
    np.testing.assert_allclose(total, history["loss"], rtol=1e-6)


def test_keras_adam_mistakes_a_sparse_gradient_that_repeats_a_row():
    """It squares, and clips, the slices before it adds them up. tfdist adds first; should this fail, that is mended."""

    def after(densify, kind="Adam", **clip):
        variable = keras.Variable(np.ones((1, 1), "float32"))
        optimizer = getattr(keras.optimizers, kind)(0.1, **clip)
        optimizer.build([variable])
        for _ in range(2):
            grad = tf.IndexedSlices(tf.constant([[1.0], [-0.9]]), tf.constant([0, 0]), tf.constant([1, 1]))
            optimizer.apply([tf.convert_to_tensor(grad) if densify else grad], [variable])
        return float(variable.numpy()[0, 0])

    assert after(densify=True) == pytest.approx(0.8, abs=1e-3)
    assert after(densify=False) > 0.97
    for clip in {"clipnorm": 0.1}, {"global_clipnorm": 0.1}, {"clipvalue": 0.08}:
        assert after(True, "SGD", **clip) < after(False, "SGD", **clip) - 1e-3


@pytest.mark.whole
def test_keras_counts_an_update_that_it_did_not_make_where_data_ends_unforeseen(connect):
    """The end is noticed within the step, which may have counted itself; should the last line fail, this is mended.

    Adam's corrections and schedules are ahead from then on. tfdist trains as Keras does with a length that it knows.
    """
    x, y = training_cases.images(13)

    def trained(length_known, by_tfdist):
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).filter(lambda *batch: True)
        if length_known:
            data = data.apply(tf.data.experimental.assert_cardinality(4))
        keras.utils.set_random_seed(3)
        with connect(1).scope():
            model = training_cases.compiled(training_cases.dense())
        fit = tfdist.fit if by_tfdist else keras.Model.fit
        fit(model, data, epochs=2, verbose=0, **({"distribution": connect(1)} if by_tfdist else {}))
        return training_cases.weights(model), int(model.optimizer.iterations)

    known, ours = trained(True, False), trained(False, True)
    assert known[1] == ours[1] == 8
    assert training_cases.distance(ours[0], known[0]) < 1e-6
    assert trained(False, False)[1] > 8


@pytest.mark.parametrize("replicas", first(1, [2, 1]))
@pytest.mark.parametrize(
    "name", first(1, ["uneven tail", "accumulate", "masked sequences", "l2 regulariser", "two outputs"])
)
def test_xla_agrees(name, replicas, reference):
    case = next(c for c in training_cases.CASES if c.name == name)
    strategy = dict(strategy="mirrored", virtual_devices=replicas) if replicas > 1 else dict(strategy="default")
    got = training_cases.outcome(case, tfdist.connect(**strategy, jit="on"), "float64")
    assert training_cases.distance(got[0], reference(case, "float64")[0]) < 1e-12


@pytest.mark.whole
def test_the_comparison_can_fail(connect, reference, monkeypatch):
    """Gradients of the first replica alone must not agree; unsummed ones are noticed before, by other weights."""
    import dataclasses

    case = next(c for c in training_cases.CASES if c.name == "even")
    whole = connect(2)

    def of_first(tensors):
        first = tf.distribute.get_replica_context().replica_id_in_sync_group == 0
        return whole.all_sum([tf.where(first, tensor, tf.zeros_like(tensor)) for tensor in tensors])

    broken = dataclasses.replace(whole, all_sum=of_first)
    got = training_cases.outcome(case, broken, "float32")
    assert training_cases.distance(got[0], reference(case, "float32")[0]) > 1e-3
