"""The same numbers are added up in the same order, whoever else reads them at that moment."""

import sys

import numpy as np
import pytest
import tensorflow as tf
from support import processes

from tfdist.distributed.collectives import sum_in_order


def summed(distribution, read):
    """The sum over all replicas, where the caller reads what the replicas in `read` give as well."""
    values = tf.constant(np.random.default_rng(0).normal(size=(distribution.replicas, 1000)), tf.float32)

    @tf.function
    def call(values):
        def one():
            own = tf.tanh(values[distribution.replica_id()])
            return distribution.all_sum([own])[0], own

        totals, own = (distribution.local(part) for part in distribution.run(one, ()))
        return totals, [own[i] for i in read]

    totals, _ = call(values)
    for total in totals[1:]:
        np.testing.assert_array_equal(total, totals[0])
    return totals[0].numpy(), tf.tanh(values).numpy()


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("read", [(), (0, 1), (1,)])
def test_replicas_are_added_up_from_first_to_last(replicas, read, connect):
    total, parts = summed(connect(replicas), read)
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("add, order", [(sum_in_order, (0, 1, 2)), (tf.add_n, (2, 1, 0))])
def test_only_ours_keeps_its_order(add, order):
    """`tf.add_n` begins with the memory that it may reuse: if this changes, `sum_in_order` can go."""
    values = [tf.constant(v, tf.float32) for v in np.random.default_rng(0).normal(size=(3, 1000))]

    @tf.function
    def call(values):
        parts = [tf.tanh(v) for v in values]
        return add(parts), parts[:2]

    one, two, three = (tf.tanh(values[i]).numpy() for i in order)
    np.testing.assert_array_equal(call(values)[0], one + two + three)


WEIGHTED = """
import keras
import numpy as np


def data(split):
    random = np.random.default_rng(len(split))
    return random.normal(size=(15, 5)).astype("float32"), random.integers(0, 3, 15), random.uniform(0.1, 2, 15)


def model(spec):
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense(6, "tanh", kernel_regularizer="l2", activity_regularizer=keras.regularizers.L2(0.003))
    return keras.Sequential([keras.Input((5,)), dense, keras.layers.Dense(3)])
"""


def test_gradients_of_a_weighted_loss_and_of_regularizers_add_up_alike_on_all_replicas(tmp_path):
    """Grappler made one `add_n` of the three: the run failed at its end, with replicas that differed."""
    (tmp_path / "weighted.py").write_text(WEIGHTED)
    flags = "--virtual_devices=3 --config.data.name=weighted:data --config.model.name=weighted:model"
    fields = "--config.model.options= --config.optimizer.name=adam --config.train.batch_size=7 --config.train.epochs=3"
    command = [sys.executable, "-m", "tfdist.train", "--config=digits_mlp", "--workdir=run", *flags.split()]
    done = processes.run([*command, *fields.split()], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
