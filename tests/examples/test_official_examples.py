"""The official examples train as with Keras' own fit, with only `connect`, `scope` and `fit` changed."""

import itertools

import pytest
from programs.examples import EXAMPLES
from programs.surface import program as programs
from support import worlds

pytestmark = pytest.mark.whole
SEVERAL = "mirrored 2"
IN_WORLDS = ("transfer learning, BatchNorm kept frozen", "several workers")


def cells():
    """Yields each example with each number of rows on one device and on two replicas."""
    for example in EXAMPLES:
        for rows, strategy in itertools.product(example.rows, (programs.ONE, SEVERAL)):
            if strategy == programs.ONE or not example.unlike_one:
                yield pytest.param(example, rows, strategy, id=f"{example}@{rows}-{strategy}")


@pytest.fixture(scope="module")
def by_keras(connect, tmp_path_factory):
    """What an example ends with by Keras on one device, each run once."""
    known = {}

    def get(example, rows):
        if (example, rows) not in known:
            known[example, rows] = programs.by_keras(example, rows, connect(1), tmp_path_factory.mktemp("example"))
        return known[example, rows]

    return get


@pytest.mark.parametrize("example, rows, strategy", cells())
def test_examples_train_as_with_keras(example, rows, strategy, by_keras, connect, tmp_path):
    got = programs.by_tfdist(example, rows, connect(1 if strategy == programs.ONE else 2), tmp_path)
    if refusal := example.refusal(strategy):
        assert isinstance(got, str) and refusal in got and "\n" not in got
    else:
        programs.assert_agrees(got, by_keras(example, rows), example)


@pytest.mark.whole
def test_examples_train_as_with_keras_on_two_workers(by_keras, tmp_path):
    examples = [example for example in EXAMPLES if example.name in IN_WORLDS]
    names = [f"{example}@{example.rows[-1]}" for example in examples]
    for outcomes in worlds.outcomes(tmp_path, "multi_worker", 2, "program", names):
        for example, name in zip(examples, names, strict=True):
            programs.assert_agrees(outcomes[name], by_keras(example, example.rows[-1]), example)
