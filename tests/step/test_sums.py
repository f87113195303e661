"""The mathematics of an update against NumPy: slices of any size, summed and divided once, are the whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.data.batch_layout import Layout, MicroBatch
from tfdist.keras_bridge import ema, keras_internals, optimizer_update
from tfdist.keras_bridge.loss import LossTerm, Objective, objectives
from tfdist.step.replica import StepSums

ALONE = tfdist.connect("default")
X, Y = np.random.default_rng(3).normal(size=(2, 11, 4)).astype("float32")
WEIGHTS = np.random.default_rng(4).uniform(0.5, 2, 11).astype("float32")
SLICES = [slice(0, 6), slice(6, 7), slice(7, 11)]


def rows_of(part):
    size = len(X[part])
    return MicroBatch((), size, len(X), len(SLICES), 0, None)


def summed(objective, y_pred, weights=None):
    """The sums of all slices."""
    total = None
    for part in SLICES:
        weight = None if weights is None else tf.constant(weights[part])
        terms = objective.terms(tf.constant(Y[part]), y_pred(part), weight, rows_of(part), len(X))
        sums = StepSums.of([], terms)
        total = sums if total is None else total.plus(sums.tensors())
    return total


def compiled(loss):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    model.compile("sgd", loss)
    return model


@pytest.mark.parametrize(
    "reduction, weighted, expected",
    [
        ("sum_over_batch_size", False, lambda e: e.mean()),
        ("sum_over_batch_size", True, lambda e: (e * WEIGHTS).sum() / len(X)),
        ("mean_with_sample_weight", True, lambda e: (e * WEIGHTS).sum() / WEIGHTS.sum()),
        ("sum", False, lambda e: e.sum()),
        ("sum", True, lambda e: (e * WEIGHTS).sum()),
    ],
)
def test_uneven_slices_add_up_to_the_loss_of_the_batch(reduction, weighted, expected):
    objective = Objective(compiled(keras.losses.MeanSquaredError(reduction=reduction)), ALONE)
    sums = summed(objective, lambda part: tf.constant(X[part]), WEIGHTS if weighted else None)
    each = ((X - Y) ** 2).mean(-1)
    np.testing.assert_allclose(sums.losses([])[0], expected(each), rtol=1e-6)
    known_beforehand = reduction != "mean_with_sample_weight"
    assert (sums.terms[0].denominator is None) == known_beforehand


def test_a_mask_has_a_denominator_of_its_own():
    mask = np.arange(11) % 3 > 0

    def outputs(part):
        y_pred = tf.constant(X[part])
        y_pred._keras_mask = tf.constant(mask[part])
        return y_pred

    sums = summed(Objective(compiled("mse"), ALONE), outputs)
    np.testing.assert_allclose(sums.losses([])[0], ((X - Y) ** 2).mean(-1)[mask].mean(), rtol=1e-6)


def test_gradients_are_divided_once_and_weighted_by_the_losses():
    """Of two losses with denominators of their own and one without, as sums over two slices."""
    a, b, c = ([np.float32([1, 2]), np.float32([3, 5])], [np.float32([7, 1]), np.float32([2, 2])], [None, np.ones(2)])

    def of_slice(i):
        terms = [
            LossTerm("known", 2.0, tf.constant(1.0 + i)),
            LossTerm("own", 3.0, tf.constant(4.0 + i), tf.constant(5.0 + i)),
            LossTerm("other", 0.5, tf.constant(8.0), tf.constant(2.0)),
        ]
        groups = [[a[i], None], [b[i], b[1 - i]], [None, np.float32([1, 1])]]
        assert len(objectives(terms)) == 3
        as_tensors = [[None if g is None else tf.constant(g) for g in group] for group in groups]
        return StepSums.of(as_tensors, terms)

    total = of_slice(0).plus(of_slice(1).tensors())
    first, second = total.gradients()
    np.testing.assert_allclose(first, a[0] + a[1] + 3 * (b[0] + b[1]) / 11, rtol=1e-6)
    np.testing.assert_allclose(second, 3 * (b[0] + b[1]) / 11 + 0.5 * 2 * c[1] / 4, rtol=1e-6)
    losses = [2 * 3 + 3 * 9 / 11 + 0.5 * 16 / 4 + 0.25, 3, 9 / 11, 4]
    np.testing.assert_allclose(total.losses([tf.constant(0.25)]), losses, rtol=1e-6)
    assert set(total.by_term()) == {"loss 'known'", "loss 'own'", "loss 'other'"}


def test_a_denominator_of_zero_gives_zero_and_not_nan():
    sums = StepSums.of([[tf.ones(2)]], [LossTerm("masked", 1.0, tf.zeros([]), tf.zeros([]))])
    assert sums.losses([]).numpy().tolist() == [0.0]
    assert sums.gradients()[0].numpy().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("count", [1, 5, 12, 23])
@pytest.mark.parametrize("replicas, accumulate", [(1, 1), (3, 1), (3, 4)])
@pytest.mark.parametrize("virtual", [False, True])
def test_replicas_share_all_rows_of_each_micro_batch(count, replicas, accumulate, virtual):
    layout = Layout(23, replicas, accumulate, virtual=virtual)
    rows = []
    for micro, expected in enumerate(np.array_split(np.arange(count), accumulate)):
        ranges = [layout.of_replica(tf.constant(count), micro, replica) for replica in range(replicas)]
        own = [np.arange(int(r.start), int(r.start) + int(r.size)) for r in ranges]
        assert [len(o) for o in own] == [len(o) for o in np.array_split(expected, replicas)]
        rows.append(np.concatenate(own))
        np.testing.assert_array_equal(rows[-1], expected)
    assert np.concatenate(rows).tolist() == list(range(count))


@pytest.mark.parametrize(
    "option, expected",
    [
        ({"clipnorm": 1.0}, lambda gs: [g / max(1.0, np.linalg.norm(g)) for g in gs]),
        ({"global_clipnorm": 2.0}, lambda gs: [g * 2.0 / np.linalg.norm(np.concatenate(gs)) for g in gs]),
        ({"clipvalue": 0.5}, lambda gs: [np.clip(g, -0.5, 0.5) for g in gs]),
        ({}, lambda gs: gs),
    ],
)
def test_clipping(option, expected):
    grads = [np.float32([3, -4]), np.float32([0.1, 0.2, 0.7])]
    clipped = optimizer_update.clip(
        keras.optimizers.SGD(**option), [tf.constant(grads[0]), None, tf.constant(grads[1])]
    )
    assert clipped[1] is None
    for got, want in zip([clipped[0], clipped[2]], expected(grads)):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def update(optimizer, grads, penalties=(None,)):
    """The weight after updates with these gradients, and the optimizer."""
    variable = keras.Variable(np.float32([1, -2]))
    optimizer.build([variable])
    owned = optimizer_update.OwnedOptimizer(optimizer, [variable])
    with owned.tracing():
        for grad in grads:
            owned.apply([tf.constant(grad)], list(penalties), [])
    return variable.numpy(), optimizer


GRADS = [np.float32([0.5, -1]), np.float32([2, 0.25]), np.float32([-1, 1])]


def test_sgd_with_momentum():
    weight, velocity = np.array([1.0, -2]), np.zeros(2)
    for grad in GRADS:
        velocity = 0.9 * velocity - 0.1 * grad
        weight = weight + velocity
    np.testing.assert_allclose(update(keras.optimizers.SGD(0.1, momentum=0.9), GRADS)[0], weight, rtol=1e-6)


def test_adam_with_decoupled_weight_decay():
    weight, m, v = np.array([1.0, -2]), np.zeros(2), np.zeros(2)
    for t, grad in enumerate(GRADS, 1):
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        weight = weight - 0.1 * 0.01 * weight
        weight = weight - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-7)
    np.testing.assert_allclose(update(keras.optimizers.AdamW(0.1, weight_decay=0.01), GRADS)[0], weight, rtol=1e-5)


def test_the_gradients_of_regularizers_are_added_before_clipping():
    weight, _ = update(keras.optimizers.SGD(1.0, clipvalue=0.5), GRADS[:1], [tf.constant([0.25, 0.75])])
    np.testing.assert_allclose(weight, [1 - 0.5, -2 + 0.25], rtol=1e-6)


def test_averages_of_weights_begin_with_the_first_update():
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.75)
    weights = [update(keras.optimizers.SGD(0.1), GRADS[:n])[0] for n in (1, 2, 3)]
    average = weights[0]
    for weight in weights[1:]:
        average = 0.75 * average + 0.25 * weight
    weight, optimizer = update(optimizer, GRADS)
    np.testing.assert_allclose(weight, weights[-1], rtol=1e-6)
    (variable,) = keras_internals.optimized_variables(optimizer)
    with ema.instead(optimizer, [variable]):
        np.testing.assert_allclose(variable.numpy(), average, rtol=1e-6)
    np.testing.assert_array_equal(variable.numpy(), weight)
