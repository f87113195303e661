"""Sums over workers begin while the backward pass still runs, and updates while other sums are still under way.

It is the graph that is looked at, not the time: what an operation waits for.
"""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import sources
from tfdist.distributed import collectives
from tfdist.distributed.strategies import multi_worker
from tfdist.step import functions, step_calls

LAYERS, WIDTH = 3, 400


class Traced:
    """The function of a graph in which the sums are, and what each of its operations waits for."""

    def __init__(self, concrete):
        library = concrete.graph.as_graph_def().library.function
        (self.body,) = (f.node_def for f in library if any(n.op == "CollectiveReduceV2" for n in f.node_def))
        self._nodes = {node.name: node for node in self.body}

    def of(self, kind):
        """Names of the operations whose type begins so, as they were traced."""
        return [node.name for node in self.body if node.op.startswith(kind)]

    def given(self, name):
        """The operation whose output an operation is given first."""
        return self._nodes[name].input[0].partition(":")[0]

    def awaited(self, name):
        """Names of all operations before which this one does not begin."""
        found, open_names = set(), [name]
        while open_names:
            for given in self._nodes[open_names.pop()].input:
                given = given.removeprefix("^").partition(":")[0]
                if given in self._nodes and given not in found:
                    found.add(given)
                    open_names.append(given)
        return found


def traced(distribution, optimizer):
    """An update of a model on one of two workers, which never runs."""
    ring = multi_worker.Ring(2, "CPU:0")
    all_sum = lambda tensors: collectives.bucketed(tensors, ring.reduce, 0)
    distribution = dataclasses.replace(distribution, replicas=2, all_sum=all_sum)
    with distribution.scope():
        model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(WIDTH) for _ in range(LAYERS))])
        model.compile(optimizer(), "mse")
    data = np.zeros((8, 4), "float32"), np.zeros((8, WIDTH), "float32")
    source = sources.as_source(*data)
    layout = sources.layout_of(source, 4, distribution, 1, least=False)
    part = sources.read_epochs(source, layout, True, 0).next(0, 2)
    options = functions.TrainingOptions(full=part.full, norm=True)
    call = step_calls.step_of(model, distribution, source).compiled("train", layout, options)
    sums = tf.zeros([1], tf.float64)
    return Traced(call.get_concrete_function(part.feed, tf.constant(part.first), tf.constant(part.last), sums))


def test_a_sum_waits_for_its_own_tensor_alone(connect):
    update = traced(connect(1), lambda: keras.optimizers.Adam())
    sums = update.of("CollectiveReduceV2")
    assert len(sums) == 2 * LAYERS + 1  # that of the losses, then bias and kernel from the last layer to the first
    summed = {update.given(name) for name in sums}
    assert len(summed) == len(sums)
    for name in sums[:-1]:
        assert update.awaited(name) & (summed | set(sums)) == {update.given(name)}
    # The clock stands before the last of them: it tells when all gradients are there.
    assert update.awaited(sums[-1]) & (summed | set(sums)) == summed


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(lambda: keras.optimizers.Adam(), id="adam"),
        pytest.param(lambda: keras.optimizers.SGD(momentum=0.9), id="sgd"),
    ],
)
def test_an_update_waits_for_its_own_sum_and_for_the_backward_pass(optimizer, connect):
    update = traced(connect(1), optimizer)
    sums, updates = update.of("CollectiveReduceV2"), update.of("ResourceApply")
    assert len(updates) == 2 * LAYERS
    waits = [update.awaited(name) for name in updates]
    assert sorted(name for wait in waits for name in wait & set(sums)) == sorted(sums[1:])
    gradients = {update.given(name) for name in sums[1:-1]}
    assert all(wait >= gradients for wait in waits), "a weight that is still read would be copied"
