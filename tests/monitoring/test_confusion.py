"""Confusion and worst examples, against counting by hand."""

import contextlib
import math
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.sources import Arrays, Batches
from tfdist.data.spec import Spec
from tfdist.monitoring import confusion, error_analysis

L = keras.layers


def softmax(row):
    raised = [math.exp(v - max(row)) for v in row]
    return [v / sum(raised) for v in raised]


def made(n=300, classes=5):
    rng = np.random.default_rng(3)
    y = rng.integers(0, classes, n)
    return y, rng.normal(size=(n, classes)) + 2.0 * np.eye(classes)[y]


def by_hand(labels, scores, classes):
    """(confusion, losses) one example at a time."""
    counts, losses = [[0] * classes for _ in range(classes)], []
    for label, row in zip(labels, scores):
        best = max(range(classes), key=lambda c: row[c])
        counts[label][best] += 1
        losses.append(-math.log(softmax(row)[label]))
    return counts, losses


@pytest.mark.parametrize("probabilities", [False, True])
def test_counts_and_worst_examples(probabilities):
    y, scores = made()
    given = np.array([softmax(row) for row in scores]) if probabilities else scores
    found = confusion.Findings(5, from_logits=not probabilities, most=7)
    for i in range(0, 300, 64):  # in pieces, whose borders must not show
        found.add(y[i : i + 64], given[i : i + 64], np.full([64, 2, 2, 1], i)[: len(y[i : i + 64])])
    counts, losses = by_hand(y, scores, 5)
    assert found.confusion().tolist() == counts
    assert found.accuracy == sum(counts[i][i] for i in range(5)) / 300
    rows = sorted(range(300), key=lambda i: -losses[i])[:7]
    assert [e.row for e in found.worst] == rows
    assert [e.loss for e in found.worst] == pytest.approx([losses[i] for i in rows])
    first = found.worst[0]
    assert (first.label, first.prediction) == (y[rows[0]], scores[rows[0]].argmax())
    assert first.probability == pytest.approx(max(softmax(scores[rows[0]])))
    assert first.pixels[0, 0, 0] == rows[0] // 64 * 64, "an image of another example"
    wrong = {(i, j): counts[i][j] for i in range(5) for j in range(5) if i != j and counts[i][j]}
    assert {(a, b): n for a, b, n in found.mistakes(99)} == wrong
    assert [n for *_, n in found.mistakes(3)] == sorted(wrong.values(), reverse=True)[:3]


def test_what_cannot_be_counted_is_left_out_and_said():
    y, scores = made(6)
    scores[1, 2], y[4] = np.nan, 9
    found = confusion.Findings(5, from_logits=True)
    found.add(y, scores)
    assert (len(found.labels), found.left_out) == (4, 2)
    assert sorted(e.row for e in found.worst) == [0, 2, 3, 5]
    nothing = confusion.Findings(5, from_logits=True)
    assert nothing.accuracy == 0 and not nothing.confusion().any() and nothing.mistakes(3) == []


def test_scores_that_are_probabilities_are_seen():
    _, scores = made()
    assert not confusion.look_like_probabilities(scores)
    assert confusion.look_like_probabilities(np.array([softmax(row) for row in scores]))
    assert confusion.look_like_probabilities(np.array([[np.nan, 1], [0.25, 0.75]]))


SPEC = Spec((4, 4, 1), "float32", 5, 1.0, ("a", "b", "c", "d", "e"))


@pytest.fixture(scope="module")
def classifier(connect):
    """A model on two replicas, and data that do not divide evenly."""
    keras.utils.set_random_seed(1)
    with connect(2).scope():
        model = keras.Sequential([keras.Input((4, 4, 1)), L.Flatten(), L.Dense(5)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(101, 4, 4, 1)).astype("float32"), rng.integers(0, 5, 101)
    kernel, bias = (w.astype("float64") for w in model.get_weights())
    return model, x, y, x.reshape(101, 16).astype("float64") @ kernel + bias


def negative(x, y):
    return -x, y


def sources(x, y):
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(25)
    return {
        "arrays": Arrays((x, y)),
        "one-hot": Arrays((x, np.eye(5, dtype="uint8")[y])),
        "weights": Arrays((x, y[:, None], np.ones(101, "float32"))),
        "batches": Batches(dataset),
        "decoded": Batches(dataset.map(negative), negative),
    }


@pytest.mark.parametrize("kind", ["arrays", "one-hot", "weights", "batches", "decoded"])
@pytest.mark.parametrize("limit", [10_000, 50])
def test_predictions_of_a_model(kind, limit, classifier, connect):
    model, x, y, scores = classifier
    found = error_analysis.of_run(model, sources(x, y)[kind], SPEC, connect(2), 32, limit=limit)
    n = min(limit, 101)
    counts, losses = by_hand(y[:n], scores[:n], 5)
    assert found.confusion().tolist() == counts
    assert found.worst[0].row == max(range(n), key=lambda i: losses[i])
    assert found.worst[0].loss == pytest.approx(max(losses), rel=1e-4)
    assert found.partial == (limit == 50) and found.name(2) == "c"
    shown = tf.io.decode_png(found.worst[0].png).numpy()
    image = x[found.worst[0].row]
    assert shown.shape == (4, 4, 1)
    assert shown == pytest.approx(255 * (image - image.min()) / (image.max() - image.min()), abs=0.6)


def test_no_findings_where_there_are_no_classes(classifier, connect):
    model, x, y, _ = classifier
    one = connect(2)
    assert error_analysis.of_run(model, Arrays((x, y)), Spec((4, 4, 1), "float32", None, 1.0), one) is None
    assert error_analysis.of_run(model, Arrays((x, y)), Spec((4, 4, 1), "float32", 7, 1.0), one) is None
    sequences = np.zeros([101, 3], "int32")
    assert error_analysis.of_run(model, Arrays((x, sequences)), SPEC, one) is None


def test_no_findings_where_the_order_changes(classifier, connect):
    """The outputs of one pass and the targets of another would make a confusion of their own."""
    model, x, y, _ = classifier
    shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(101, reshuffle_each_iteration=True).batch(25)
    assert error_analysis.of_run(model, Batches(shuffled), SPEC, connect(2)) is None
    steady = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(101, 1, reshuffle_each_iteration=False).batch(25)
    assert error_analysis.of_run(model, Batches(steady), SPEC, connect(2)) is not None


@pytest.mark.parametrize("owner, broken", [(Arrays, "head"), (error_analysis, "_findings")])
def test_no_run_fails_for_it(owner, broken, classifier, connect, monkeypatch, said):
    model, x, y, _ = classifier
    monkeypatch.setattr(owner, broken, lambda *_: 1 / 0)
    assert error_analysis.of_run(model, Arrays((x, y)), SPEC, connect(2)) is None
    assert said == ["WARNING: no analysis of mistakes: ZeroDivisionError: division by zero"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_cannot_predict_lets_no_other_wait(workers, classifier, monkeypatch):
    model, x, y, _ = classifier
    monkeypatch.setattr(error_analysis.evaluation, "predict", lambda *_, **__: 1 / 0)
    peers = types.SimpleNamespace(gather=lambda label, value: [value])
    some = types.SimpleNamespace(workers=workers, peers=peers)
    with contextlib.nullcontext() if workers == 1 else pytest.raises(ZeroDivisionError):
        assert error_analysis.of_run(model, Arrays((x, y)), SPEC, some) is None


def test_pictures_are_small_and_of_the_right_brightness():
    spec = Spec((300, 150, 3), "uint8", 5, 200.0)
    large = np.full([300, 150, 3], 100, "uint8")
    shown = tf.io.decode_png(error_analysis.png(large, spec)).numpy()
    assert shown.shape == (96, 48, 3) and set(shown.reshape(-1)) == {128}
    odd = np.full([4, 4, 1], np.nan, "float32")
    assert tf.io.decode_png(error_analysis.png(odd, SPEC)).shape == (4, 4, 1)
