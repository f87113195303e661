"""Memory that runs out in the middle of a run: smaller micro-batches, the same global batch, the same result."""

import json
import os
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import REPOSITORY
from support import memory_hungry_model, processes, training_cases
from support.covering import first

import tfdist
from tfdist.checkpoints import resume
from tfdist.errors import TrainingError
from tfdist.verification import equivalence_check

BATCH = 24
SUPPORT = str(REPOSITORY / "tests" / "support")


def model(distribution, most, after=0):
    keras.utils.set_random_seed(1)
    with distribution.scope():
        layers = [keras.Input((4, 4, 1)), memory_hungry_model.Greedy(most, after), keras.layers.Flatten()]
        layers += [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(5)]
        return training_cases.compiled(
            keras.Sequential(layers), keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)
        )


class Watch(tfdist.Callback):
    takes_many_updates = True

    def __init__(self):
        super().__init__()
        self.accumulate = []

    def on_accumulate(self, accumulate):
        self.accumulate.append(accumulate)


def train(distribution, made, tmp_path=None, data=None, **options):
    """(model, history, accumulate that was come to)."""
    watch = Watch()
    checkpoints = None
    if tmp_path:
        checkpoints = tfdist.Checkpoints(tmp_path / "checkpoints", every="2 steps")
    options = dict(batch_size=BATCH, epochs=3, steps_per_call=2, verbose=0, distribution=distribution) | options
    data = training_cases.images(61) if data is None else data
    history = tfdist.fit(
        made,
        *data,
        callbacks=[watch, keras.callbacks.ReduceLROnPlateau("loss", patience=1)],
        validation_data=training_cases.images(31),
        checkpoints=checkpoints,
        **options,
    )
    return made, history.history, watch.accumulate


def trainable(model):
    return np.concatenate([np.ravel(w) for w in model.trainable_variables])


@pytest.mark.faults
@pytest.mark.parametrize("after, replicas, most", [(0, 1, 6), (0, 3, 4), (5, 1, 6), (5, 3, 4)])
def test_it_goes_on_with_smaller_micro_batches_and_the_same_result(
    after, replicas, most, connect, tmp_path, said, monkeypatch
):
    """At the first update, for which there is no checkpoint yet, and in the middle of the second epoch."""
    distribution = connect(replicas)
    failed, run = [], equivalence_check.EquivalenceProbe.run

    def tried(*args, **kwargs):
        try:
            return run(*args, **kwargs)
        except tf.errors.ResourceExhaustedError:
            failed.append(args)
            raise

    monkeypatch.setattr(equivalence_check.EquivalenceProbe, "run", tried)
    expected, history, _ = train(distribution, model(distribution, 10**6), accumulate=BATCH // (most * replicas))
    made, found, accumulate = train(distribution, model(distribution, most, after), tmp_path)
    assert accumulate == ([2, 4] if replicas == 1 else [2])
    # At most each size that failed in the training, too: TensorFlow waits 10 s before it gives up.
    assert after == 0 or len(failed) <= 2
    assert training_cases.distance(trainable(made), trainable(expected)) < 1e-6
    for name, values in history.items():
        assert found[name] == pytest.approx(values, rel=1e-5), name
    warnings = [line for line in said if line.startswith("WARNING")]
    assert len(warnings) == len(accumulate)
    micro, start = BATCH // replicas, 0 if after == 0 else 4
    assert warnings[0].startswith("WARNING: out of memory (") and warnings[0].endswith(
        f", at {micro} examples at a time: from update {start} on again, at {micro // 2} (train.accumulate=2), "
        f"with the same result"
    )


@pytest.mark.parametrize(
    "options, message",
    first(0, [
        (dict(batch_size=None, data=(tf.data.Dataset.from_tensor_slices(training_cases.images(61)).batch(BATCH),)),
         r"at 24 examples at a time: train.accumulate=2 needs less of it and changes nothing else"),
        (dict(), r"out of memory \(.*allocating tensor.*, at 24 examples at a time: train.accumulate=2"),
        (dict(accumulate=24, most=0), r"at 1 example at a time, the fewest there can be: use a smaller model or more"),
    ]),
)  # fmt: skip
def test_where_it_cannot_go_on_it_says_what_helps(options, message, connect, tmp_path, request):
    made = model(connect(1), options.pop("most", 6))
    folder = None if not options else tmp_path
    with pytest.raises(TrainingError, match=message):
        train(connect(1), made, folder, **options)


@pytest.mark.whole
def test_measuring_that_runs_out_of_memory(connect):
    class Always(keras.layers.Layer):
        def call(self, x):
            # Of values that nobody knows before: constant folding would try to make the tensor, for a minute.
            rows = tf.math.count_nonzero(tf.math.is_finite(x[:, 0]))
            return x + tf.fill([tf.where(rows > 1, tf.constant(2**46, tf.int64), 1)], 0.0)[0]

    made = training_cases.compiled(
        keras.Sequential([keras.Input((4, 4, 1)), keras.layers.Flatten(), Always(), keras.layers.Dense(5)])
    )
    with pytest.raises(TrainingError, match=r"out of memory .*: measure with a smaller batch \(eval.batch_size\)"):
        tfdist.evaluate(made, *training_cases.images(31))


FLAGS = [
    "--config.model.name=memory_hungry_model:model", "--config.train.epochs=2", "--config.data.name=synthetic",
    "--notensorboard", "--config.data.options=examples=160, shape=(4, 4, 1), classes=5", "--config.train.batch_size=32",
    "--workdir=out", "--config.optimizer.warmup=0%", "--config.train.steps_per_call=1",
]  # fmt: skip


def result(tmp_path):
    return json.loads((tmp_path / "out" / "result.json").read_text())


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory, tfds_dir):
    """The run with as many micro-batches from the beginning."""
    folder = tmp_path_factory.mktemp("by_hand")
    env = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"} | {
        "PYTHONPATH": f"{SUPPORT}{os.pathsep}{REPOSITORY}"
    }
    flags = [*FLAGS, "--config.model.options=most=1000", "--config.train.accumulate=4"]
    done = processes.run(
        [sys.executable, "-m", "tfdist.train", *flags], cwd=folder, env=env, timeout=200, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return result(folder)


def same(found, expected):
    assert found["status"] == "completed"
    assert (found["updates"], found["global_batch"], found["accumulate"]) == (10, 32, expected["accumulate"])
    for name in ("loss", "val_loss"):
        assert found["history"][name] == pytest.approx(expected["history"][name], rel=1e-5)


@pytest.mark.whole
def test_a_run_of_one_process_goes_on_by_itself(run, tmp_path, by_hand):
    done = run("tfdist.train", *FLAGS, "--config.model.options=most=16, after=6", path=SUPPORT)
    assert done.returncode == 0, done.stderr
    same(result(tmp_path), by_hand | {"accumulate": 2})
    assert "(train.accumulate=2), with the same result" in done.stdout
    assert json.loads((tmp_path / "out" / resume.ACCUMULATE).read_text()) == {"accumulate": 2}


@pytest.mark.faults
def test_several_processes_end_and_the_next_attempt_takes_it_up(run, tmp_path, by_hand):
    """16 examples per worker: micro-batches of 16, then 8, each by a launcher's restart; then by hand."""
    flags = [*FLAGS, "--config.model.options=most=8, after=2", "--config.checkpoint.every=1 steps", "--threads=1"]
    first = run("tfdist.launch", "--nproc_per_node=2", "--", *flags, path=SUPPORT)
    assert first.returncode == 1, first.stderr
    assert (
        "out of memory (" in first.stderr
        and ", at 16 examples at a time: train.accumulate=2 needs less" in first.stderr
    )
    assert result(tmp_path)["status"] == "failed"
    assert json.loads((tmp_path / "out" / resume.ACCUMULATE).read_text()) == {"accumulate": 2}
    second = run("tfdist.launch", "--nproc_per_node=2", "--", *flags, path=SUPPORT)
    assert second.returncode == 0, second.stderr
    assert "tfdist: train.accumulate=2 instead of 1: the run before ran out of memory" in second.stdout
    found = result(tmp_path)
    assert found["resumed_from"] >= 1
    same(found, by_hand | {"accumulate": 2})


@pytest.mark.faults
def test_the_launcher_starts_it_again_by_itself(run, tmp_path, by_hand):
    flags = [*FLAGS, "--config.model.options=most=4", "--threads=1"]
    done = run("tfdist.launch", "--nproc_per_node=2", "--max_restarts=2", "--", *flags, path=SUPPORT)
    assert done.returncode == 0, done.stderr
    found = result(tmp_path)
    assert found["restarts"] == 2
    same(found, by_hand)
