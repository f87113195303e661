"""A device that computes other bits is found, and named; of those that compute the same, nothing is said."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.covering import first

import tfdist
from tfdist.errors import TrainingError
from tfdist.verification import replica_sync_check

L = keras.layers


class Broken(L.Layer):
    """The lowest bit of what one replica computes is another, from some update on: hardware that breaks."""

    def __init__(self, replica, update):
        super().__init__()
        self.replica, self.update = replica, update

    def build(self, _):
        self.updates = self.add_weight((), "zeros", "int64", trainable=False)

    def call(self, x, training=False):
        context = tf.distribute.get_replica_context()
        here = tf.equal(context.replica_id_in_sync_group if context else -1, self.replica)
        broken = here & (self.updates >= self.update)
        if training:
            self.updates.assign(self.updates + 1)
        return x * (1 + tf.where(broken, np.float32(2**-23), 0.0))


def fit(connect, replicas, *layers, **options):
    distribution = connect(replicas)
    keras.utils.set_random_seed(0)
    with distribution.scope():
        model = keras.Sequential([keras.Input((5,)), L.Dense(8, "tanh"), *layers, L.Dense(2)])
        model.compile("adam", "mse")
    x = np.random.RandomState(0).randn(32, 5)
    options = {"check_agreement": "off", "virtual_replicas": 4, "audit": 2, "steps_per_call": 1} | options
    tfdist.fit(model, x, x[:, :2], 8, epochs=3, distribution=distribution, verbose=0, **options)
    return [w.tobytes() for w in model.get_weights()]


def test_a_device_that_breaks_is_named(connect):
    with pytest.raises(TrainingError, match=r"^audit after update 8: CPU:1 found another gradient than CPU:0, from"):
        fit(connect, 3, Broken(1, 25))  # of the virtual replicas that it counts, four in each update


@pytest.mark.whole
def test_of_two_it_cannot_be_told(connect):
    with pytest.raises(TrainingError, match=r"CPU:1 found another .* than CPU:0, and it cannot be told which is ri"):
        fit(connect, 2, Broken(0, 0))


@pytest.mark.parametrize("replicas", first(0, [2, 1, 3]))
def test_no_false_alarm_and_the_same_bits(connect, replicas, monkeypatch):
    made, digests = [], replica_sync_check._digests
    monkeypatch.setattr(replica_sync_check, "_digests", lambda result: made.append(digests(result)) or made[-1])
    layers = lambda: (L.Dropout(0.4, seed=1), L.BatchNormalization())
    assert fit(connect, replicas, *layers(), audit=5) == fit(connect, replicas, *layers(), audit=0)
    assert [len(each) for each in made] == [replicas] * 4  # alone and together, after updates 5 and 10 of 12


@pytest.mark.whole
def test_both_ways_are_compiled():
    """By XLA, too, the bits of one compiled function are those of another only if both are."""
    fit(lambda _: tfdist.connect("default", jit="on"), 1, audit=5)


def test_it_needs_virtual_replicas(connect):
    with pytest.raises(tfdist.UserError, match=r"^audit=2 compares the bits of virtual replicas, .*: give"):
        fit(connect, 2, virtual_replicas=0)
