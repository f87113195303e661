"""What replicas send each other: buckets, smaller types, one order, and the look at whether they are still the same."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import processes, shipped, training_cases
from support.covering import first

import tfdist
from tfdist.config import schedule as schedule_lib
from tfdist.config import validation
from tfdist.errors import TrainingError, UserError
from tfdist.models import optimizers
from tfdist.verification import replica_sync_check

CASE = next(c for c in training_cases.CASES if c.name == "uneven tail")


@pytest.mark.whole
@pytest.mark.parametrize("dtype, most", [pytest.param("bfloat16", 1e-2, marks=pytest.mark.whole), ("float16", 1e-3)])
def test_a_smaller_type_costs_some_agreement(dtype, most, connect):
    exact = training_cases.outcome(CASE, connect(1), "float32")[0]
    small = training_cases.outcome(CASE, connect(3), "float32", reduce_dtype=dtype)[0]
    assert 1e-6 < training_cases.distance(small, exact) < most
    alone = training_cases.outcome(CASE, connect(1), "float32", reduce_dtype=dtype)[0]
    np.testing.assert_array_equal(alone, exact, "one replica sends nothing")


def test_an_unknown_type(connect):
    with pytest.raises(UserError, match="unknown reduce_dtype 'int8'"):
        training_cases.outcome(CASE, connect(2), "float32", reduce_dtype="int8")


def test_replicas_that_have_come_apart_are_noticed(connect):
    distribution = connect(3)
    model = training_cases.build(CASE, distribution, "float32")
    check = replica_sync_check.ReplicaSyncCheck(distribution, every=10)
    check.check_if_due(model, 0)
    kernel = model.layers[-1].kernel
    copy = kernel.value.values[2]
    copy.assign(tf.tensor_scatter_nd_add(copy, [[0, 0]], [1e-6]))
    check.check_if_due(model, 9)  # not due yet
    with pytest.raises(TrainingError, match=f"after update 10: {kernel.path} differs on CPU:2 from CPU:0"):
        check.check_if_due(model, 10)


def test_a_swap_of_two_weights_is_noticed(connect):
    distribution = connect(2)
    model = training_cases.build(CASE, distribution, "float32")
    copy = model.layers[-1].kernel.value.values[1]
    copy.assign(tf.reverse(copy, [0]))
    with pytest.raises(TrainingError, match="differs on CPU:1 from CPU:0"):
        tfdist.fit(model, CASE.data(64), distribution=distribution, verbose=0)


@pytest.mark.whole
def test_optimizers_that_have_come_apart_are_noticed(connect):
    """A learning rate or a slot of one replica ends in other weights; a weight in a number that is a mixture."""
    distribution, (x, y) = connect(2), CASE.data(64)
    model = training_cases.build(CASE, distribution, "float32")
    options = dict(distribution=distribution, verbose=0, check_agreement="off")
    tfdist.fit(model, x, y, **options)
    for variable in (model.optimizer.learning_rate, model.optimizer.variables[-1], model.layers[-1].kernel):
        of_optimizer = variable is not model.layers[-1].kernel
        copy = variable.value.values[1]
        before = copy.numpy()
        copy.assign(before + 1e-3)
        with pytest.raises(TrainingError, match=f"after update 0: {variable.path} differs on CPU:1 from CPU:0"):
            tfdist.fit(model, x, y, **options)
        if of_optimizer:
            tfdist.evaluate(model, x, y, **options)
        else:
            for call, when in ((tfdist.evaluate, "an evaluation"), (tfdist.predict, "a prediction")):
                with pytest.raises(TrainingError, match=f"before {when}: {variable.path} differs on CPU:1"):
                    call(model, x, **options, **({"y": y} if call is tfdist.evaluate else {}))
        copy.assign(before)


class Changes(keras.callbacks.Callback):
    """Changes a weight on one replica."""

    def __init__(self, moment):
        super().__init__()
        setattr(self, moment, self.change)

    def change(self, *arguments, logs=None):
        copy = self.model.layers[-1].kernel.value.values[1]
        copy.assign(copy + 1.0)


@pytest.mark.parametrize(
    "moment, when", first(0, [("on_train_end", "at the end of fit"), ("on_epoch_end", "after the last update")])
)
def test_a_weight_that_a_callback_changes_on_one_replica_is_noticed_at_the_end(connect, moment, when, tmp_path):
    model = training_cases.build(CASE, connect(2), "float32")
    options = dict(distribution=connect(2), verbose=0, callbacks=[Changes(moment)], check_agreement="off")
    checkpoints = tfdist.Checkpoints(tmp_path, every="1000 steps")
    with pytest.raises(TrainingError, match=f"no longer the same {when}: {model.layers[-1].kernel.path} differs on"):
        tfdist.fit(model, *CASE.data(64), checkpoints=checkpoints, **options)
    assert bool(list(tmp_path.glob("[0-9]*"))) == (moment == "on_train_end")


@pytest.mark.parametrize(
    "rule, batch, factor", [("none", 256, 1.0), ("linear", 256, 8.0), ("sqrt", 128, 2.0), ("linear", 16, 0.5)]
)
def test_learning_rate_scales_with_the_batch(rule, batch, factor):
    experiment = shipped.digits()
    experiment.optimizer.scale_learning_rate, experiment.optimizer.base_batch = rule, 0 if rule == "none" else 32
    experiment.optimizer.learning_rate, experiment.train.batch_size = 0.1, batch
    made = schedule_lib.make(validation.validate(experiment), 1024, 2)
    assert made.rate == pytest.approx(0.1 * factor)
    assert (f"learning rate 0.1 scaled to {0.1 * factor:g}" in made.describe()) == (factor != 1.0)
    schedule = optimizers.rate(made)
    # Warm-up starts where the small batch trains, not above the goal.
    assert float(schedule(0)) == pytest.approx(0.1 if factor > 1 else 0.0)
    assert float(schedule(made.warmup)) == pytest.approx(0.1 * factor)
    assert isinstance(schedule, keras.optimizers.schedules.CosineDecay)


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


@pytest.mark.whole
def test_gradients_of_a_weighted_loss_and_of_regularizers_add_up_alike_on_all_replicas(tmp_path):
    """Grappler made one `add_n` of the three: the run failed at its end, with replicas that differed."""
    (tmp_path / "weighted.py").write_text(WEIGHTED)
    flags = "--virtual_devices=3 --config.data.name=weighted:data --config.model.name=weighted:model"
    fields = "--config.model.options= --config.optimizer.name=adam --config.train.batch_size=7 --config.train.epochs=3"
    command = [sys.executable, "-m", "tfdist.train", "--config=digits_mlp", "--workdir=run", *flags.split()]
    done = processes.run([*command, *fields.split()], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
