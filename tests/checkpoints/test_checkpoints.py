"""Checkpoints on disk, and the exact way back from them, within one process."""

import contextlib
import dataclasses
import itertools
import pathlib
import random
import shutil
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import training_cases
from support.covering import first

import tfdist
from tfdist.checkpoints import files as files_lib
from tfdist.checkpoints import resume, training_run, training_state
from tfdist.checkpoints.manager import Checkpoints
from tfdist.config import Experiment, runtime_options
from tfdist.data.sources import Records
from tfdist.doctor import checkpoints as checkpoints_lib
from tfdist.errors import Interrupted, TrainingError, UserError
from tfdist.keras_bridge import setups
from tfdist.monitoring.recorder import fingerprint
from tfdist.train import __main__ as train_command
from tfdist.train import run as train_run

L = keras.layers
EPOCHS, BATCH, EXAMPLES = 4, 24, 120  # five updates per epoch


def model(distribution, norm=True, kernels=3):
    """All that has state: BatchNorm (each replica its own), dropout's generators, Adam's slots, an average, metrics."""
    keras.utils.set_random_seed(1)
    with distribution.scope():
        layers = [keras.Input((4, 4, 1)), L.Conv2D(kernels, 3), *([L.BatchNormalization()] if norm else [])]
        layers += [L.Activation("tanh"), L.Flatten(), *([L.Dropout(0.3)] if norm else []), L.Dense(5)]
        made = keras.Sequential(layers)
        metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")]
        adam = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)
        made.compile(adam, training_cases.sparse(), metrics=metrics)
    return made


def train(distribution, data=None, stop=None, made=None, **options):
    """Trains; returns the model and what can be compared of it, or None when it was stopped."""
    made = made or model(distribution)
    options = {"epochs": EPOCHS, "steps_per_call": 2, "verbose": 0, "distribution": distribution} | options
    options["validation_data"] = training_cases.images(31) if data is None else drawn(shuffled().take(2))
    data = training_cases.images(EXAMPLES) if data is None else data()
    data = {"x": data} | ({} if isinstance(data, tf.data.Dataset) else {"batch_size": BATCH})
    if stop is not None:
        options["should_stop"] = training_cases.StopAt(stop)
    options["callbacks"] = [keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, factor=0.5)]
    options["check_agreement"] = "off"  # each replica has statistics of its own, to be restored bit by bit
    try:
        history = tfdist.fit(made, **data, **options).history
    except Interrupted:
        return None
    return fingerprint(made)[0], history, [w.copy() for w in made.get_weights()]


def kept(tmp_path, **options):
    return tfdist.Checkpoints(tmp_path / "checkpoints", **({"every": "off"} | options))


def shuffled():
    x, y = training_cases.images(EXAMPLES)
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(50, seed=3).batch(BATCH)


def drawn(dataset):
    """Some of the batches, in an order and with noise that go on with each reading."""
    draws = np.random.default_rng(5)
    noise = lambda x: np.float32(x + 0.1 * draws.normal(size=x.shape))
    return dataset.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(noise, [x], tf.float32), x.shape), y))


def of_unknown_length():
    return shuffled().unbatch().filter(lambda x, y: True).batch(BATCH)


def by_number():
    """Read and made noisy in the moment that they are needed."""
    stored = tuple(tf.constant(column) for column in training_cases.images(EXAMPLES))
    noisy = lambda example, seed: (example[0] + 0.3 * tf.random.stateless_normal([4, 4, 1], seed), example[1])
    return Records(EXAMPLES, lambda rows: tuple(tf.gather(column, rows) for column in stored), noisy)


KINDS = itertools.product((shuffled, None, of_unknown_length, by_number), (1, 2, 3))


@pytest.mark.parametrize("data, replicas", first(1, KINDS))
def test_stopped_anywhere_and_resumed_ends_with_the_same_bits(replicas, data, connect, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "EXAMPLES", 109)  # the last update of an epoch is of 13 examples
    distribution = connect(replicas)
    whole = train(distribution, data)
    done, stops = None, 0
    while done is None:  # stopped again and again, after a few calls each time, in validations too
        stops += 1
        assert stops < 50
        checkpoints = kept(tmp_path, every="1000 steps")
        done = train(distribution, data, stop=2 + stops % 5, checkpoints=checkpoints)
    assert stops > 3
    assert done[0] == whole[0]
    assert done[1] == whole[1]


@pytest.mark.parametrize("draw", first(0, [keras.random.normal, tf.random.normal]))
def test_layers_that_draw_without_a_seed_of_their_own_draw_on_or_it_is_told(draw, connect, tmp_path, said):
    """Each checkpoint was without the state of Keras' own generator, and nothing told of TensorFlow's."""
    x = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)

    class Noise(keras.layers.Layer):
        def call(self, inputs, training=False):
            return inputs + draw(keras.ops.shape(inputs)) if training else inputs

    def run(stop=None, **options):
        keras.utils.clear_session()  # as a new process
        keras.utils.set_random_seed(1)
        model = training_cases.compiled(keras.Sequential([keras.Input((4,)), Noise(), L.Dense(5)]))
        options |= {} if stop is None else {"should_stop": training_cases.StopAt(stop)}
        try:
            return tfdist.fit(model, x, x[:, 0] > 0, 8, 4, 0, distribution=connect(1), **options).history
        except Interrupted:
            return None

    whole = run()
    assert run(stop=5, checkpoints=kept(tmp_path, every="1000 steps")) is None
    resumed = run(checkpoints=kept(tmp_path, every="1000 steps"))
    told = [line for line in said if "draws from, what no checkpoint holds (RandomStandardNormal)" in line]
    assert (resumed == whole, len(told)) == ((True, 0) if draw is keras.random.normal else (False, 2))


@pytest.mark.parametrize("layer", first(0, [L.SimpleRNN, L.LSTM]))
def test_what_recurrent_layers_carry_on_is_part_of_it(layer, connect, tmp_path):
    x = np.random.default_rng(0).normal(size=(24, 3, 4)).astype(np.float32)

    def run(**options):
        keras.utils.set_random_seed(1)
        with connect(1).scope():
            made = keras.Sequential([keras.Input((3, 4), batch_size=6), layer(3, stateful=True), L.Dense(2)])
            made.compile("sgd", "mse")
        options |= dict(batch_size=6, epochs=3, steps_per_call=1, shuffle=False, verbose=0, distribution=connect(1))
        with contextlib.suppress(Interrupted):
            tfdist.fit(made, x, x[:, 0, :2], **options)
        return [np.asarray(v).tolist() for v in (*made.weights, *made.layers[0].states)]

    run(should_stop=training_cases.StopAt(5), checkpoints=kept(tmp_path, every="1000 steps"))
    assert run(checkpoints=kept(tmp_path, every="1000 steps")) == run()


@pytest.mark.whole
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loss_scale_is_part_of_it(replicas, connect, tmp_path):
    distribution = connect(replicas)
    keras.config.set_dtype_policy("mixed_float16")

    def made():
        keras.utils.set_random_seed(1)
        with distribution.scope():
            scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))
            return training_cases.compiled(training_cases.dense(), scaled)

    whole = train(distribution, made=made())
    assert train(distribution, made=made(), stop=9, checkpoints=kept(tmp_path, every="1000 steps")) is None
    done = train(distribution, made=made(), checkpoints=kept(tmp_path, every="1000 steps"))
    assert done[:2] == whole[:2]


@pytest.mark.whole
@pytest.mark.parametrize("chain, calls", [((1, 2, 3, 1), 8), ((1, 4, 2, 3, 1, 8, 1, 2, 4, 1), 5)])
def test_on_other_replicas_it_goes_on_within_rounding(chain, calls, connect, tmp_path):
    """Stopped in mid-epoch and resumed on another number of replicas each time."""
    plain = lambda replicas: model(connect(replicas), norm=False)
    whole = train(connect(1), made=plain(1))
    done = None
    for replicas in chain:
        kept_ones = kept(tmp_path, every="1000 steps")
        done = train(connect(replicas), made=plain(replicas), stop=calls, checkpoints=kept_ones)
        if done:
            break
    assert done, "it never came to its end"
    training_cases.all_same(done[2], whole[2], rtol=1e-5, atol=1e-6)
    for name in whole[1]:
        assert done[1][name] == pytest.approx(whole[1][name], rel=1e-5)


@pytest.mark.whole
def test_another_accumulate_goes_on_within_rounding(connect, tmp_path):
    plain = lambda: model(connect(1), norm=False)
    whole = train(connect(1), made=plain())
    assert train(connect(1), made=plain(), stop=7, checkpoints=kept(tmp_path, every="1000 steps")) is None
    done = train(connect(1), made=plain(), accumulate=3, checkpoints=kept(tmp_path, every="1000 steps"))
    training_cases.all_same(done[2], whole[2], rtol=1e-5, atol=1e-6)


def test_taking_checkpoints_changes_nothing_and_keeps_the_newest_and_the_best(connect, tmp_path):
    whole = small(connect(1))
    checkpoints = kept(tmp_path, every="3 steps", keep=2, best="val_loss")
    done = small(connect(1), checkpoints=checkpoints)
    assert done[:2] == whole[:2]
    best = 5 * (1 + int(np.argmin(whole[1]["val_loss"])))
    assert best < 18
    left = [files_lib.update_of(p) for p in files_lib.newest_first(tmp_path / "checkpoints")]
    assert set(left) == {20, 18, best}
    assert not [p for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith(".")]
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "20"


@pytest.mark.whole
def test_the_best_epoch_is_one_that_was_validated(connect, tmp_path):
    done = small(connect(1), checkpoints=kept(tmp_path, every="9 epochs", best="max val_loss"), validation_freq=2)
    best = 10 * (1 + int(np.argmax(done[1]["val_loss"])))
    assert {files_lib.update_of(p) for p in files_lib.newest_first(tmp_path / "checkpoints")} >= {best}


@pytest.mark.whole
def test_the_best_value_of_another_metric_is_none_of_this_one(connect, tmp_path):
    small(connect(1), stop=6, checkpoints=kept(tmp_path, every="9 epochs", best="max val_loss"))
    checkpoints = kept(tmp_path, every="9 epochs", best="max val_accuracy")  # which is never as large
    done = small(connect(1), checkpoints=checkpoints)
    assert 5 < checkpoints.resumed_from < 10
    best = 5 * (2 + int(np.argmax(done[1]["val_accuracy"][1:])))
    assert {files_lib.update_of(p) for p in files_lib.newest_first(tmp_path / "checkpoints")} >= {best}


@pytest.mark.parametrize("chain", first(1, [[(2, 1), (1, None)], [(2, 1), (1, 4), (3, None)]]))
def test_a_metric_that_is_no_sum_goes_on_within_an_epoch_on_other_replicas(chain, connect, tmp_path):
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.most = self.add_weight(shape=(), initializer="zeros", name="most")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred)))

        def result(self):
            return self.most

    def made(distribution):
        new = without_average(distribution)
        with distribution.scope():
            new.compile(keras.optimizers.SGD(1e-3), training_cases.sparse(), metrics=[Largest()])
        return new

    whole = train(connect(1), made=made(connect(1)))
    resumed = []
    for replicas, stop in chain:
        checkpoints = kept(tmp_path, every="1000 steps")
        done = train(connect(replicas), made=made(connect(replicas)), stop=stop, checkpoints=checkpoints)
        resumed.append(checkpoints.resumed_from)
    assert all(update % 5 for update in resumed[1:]), resumed
    np.testing.assert_allclose(done[1]["largest"], whole[1]["largest"], rtol=1e-5)


@pytest.mark.whole
def test_a_resumed_early_stopping_keeps_its_patience_and_its_best_weights(connect, tmp_path):
    def stopping(made, stop=None, **options):
        early = keras.callbacks.EarlyStopping(monitor="loss", patience=2, min_delta=10, restore_best_weights=True)
        options |= {} if stop is None else {"should_stop": training_cases.StopAt(stop)}
        options |= dict(batch_size=BATCH, epochs=9, callbacks=[early], verbose=0, steps_per_call=5)
        with contextlib.suppress(Interrupted):
            return tfdist.fit(made, *training_cases.images(EXAMPLES), **options)

    whole = model(connect(1))
    assert len(stopping(whole).epoch) == 3
    assert stopping(model(connect(1)), 3, checkpoints=kept(tmp_path, every="1000 steps")) is None
    resumed = model(connect(1))
    history = stopping(resumed, checkpoints=kept(tmp_path, every="1000 steps"))
    assert history.epoch == [0, 1, 2]
    assert fingerprint(resumed) == fingerprint(whole)
    # and once more: it has ended
    assert stopping(model(connect(1)), checkpoints=kept(tmp_path, every="1000 steps")).epoch == [0, 1, 2]


@pytest.mark.whole
@pytest.mark.parametrize("append", [True, False])
def test_a_csv_logger_keeps_its_rows_through_a_resume(append, connect, tmp_path):
    """Of the rows it keeps those of the checkpoint: an epoch that is repeated is there once, and a header always."""

    def rows(name, epochs, stop=None, **options):
        log, data = keras.callbacks.CSVLogger(tmp_path / name, append=append), training_cases.images(EXAMPLES)
        options |= {} if stop is None else {"should_stop": training_cases.StopAt(stop)}
        with contextlib.suppress(Interrupted):
            tfdist.fit(without_average(connect(1)), *data, BATCH, epochs, 0, [log], **options)
        found = (tmp_path / name).read_bytes()
        if not stop:  # the same object in another fit, which empties the file or appends to it
            tfdist.fit(without_average(connect(1)), *data, BATCH, 1, 0, [log])
            found += (tmp_path / name).read_bytes()
        return found

    expected = rows("whole.csv", 3)
    assert expected.count(b"\r\n") == (9 if append else 6)
    rows("cut.csv", 3, stop=23, checkpoints=kept(tmp_path, every="1000 steps"))
    with (tmp_path / "cut.csv").open("a") as file:
        file.write("9,of an epoch that will be repeated\n")
    for _ in range(2):  # and once more: it has ended
        assert rows("cut.csv", 3, checkpoints=kept(tmp_path, every="1000 steps")) == expected


@pytest.mark.parametrize("every", first(0, ["7 steps", "1000 steps"]))
@pytest.mark.parametrize("data", first(1, [shuffled, of_unknown_length]))
def test_files_that_callbacks_have_written_after_the_last_checkpoint_do_not_count(
    data, every, connect, tmp_path, monkeypatch
):
    """A backup moved a training on whose checkpoints were older, or that had none yet, with other callbacks' states."""

    def run(name, dies=None, **options):
        def begins(self, epoch, logs=None):
            if epoch == dies:
                raise KeyError("killed")

        monkeypatch.setattr(keras.callbacks.CSVLogger, "on_epoch_begin", begins)
        made = without_average(connect(1))
        halves = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=9.0, factor=0.5)
        log = keras.callbacks.CSVLogger(tmp_path / f"{name}.csv", append=True)
        callbacks = [halves, keras.callbacks.BackupAndRestore(tmp_path / name), log]
        history = tfdist.fit(made, data(), epochs=6, verbose=0, callbacks=callbacks, **options)
        return history.epoch, fingerprint(made), (tmp_path / f"{name}.csv").read_text()

    for epoch in (2, 4):
        with pytest.raises(KeyError, match="killed"):
            run("cut", epoch, checkpoints=kept(tmp_path, every=every))
    assert run("cut", checkpoints=kept(tmp_path, every=every)) == run("whole")


@pytest.mark.whole
@pytest.mark.parametrize("best_only", [False, True])
def test_a_model_checkpoint_writes_the_same_files_after_a_resume_within_an_epoch(best_only, connect, tmp_path):
    def files(name, stop=None, **options):
        path = tmp_path / name / "{epoch} {batch}.weights.h5"
        every = 12 if best_only else 3  # Keras itself needs the end of an epoch to compare what is best
        saves = keras.callbacks.ModelCheckpoint(path, "loss", False, best_only, save_weights_only=True, save_freq=every)
        options |= {} if stop is None else {"should_stop": training_cases.StopAt(stop)}
        with contextlib.suppress(Interrupted):
            tfdist.fit(without_average(connect(1)), *training_cases.images(EXAMPLES), BATCH, 5, 0, [saves], **options)
        return sorted(file.name for file in path.parent.iterdir())

    expected = files("whole")
    assert len(expected) >= 2
    files("cut", stop=23, checkpoints=kept(tmp_path, every="1000 steps"))
    assert files("cut", checkpoints=kept(tmp_path, every="1000 steps")) == expected


@pytest.fixture(scope="module")
def two(connect, tmp_path_factory):
    """A folder with two checkpoints, of updates 10 and 20."""
    folder = tmp_path_factory.mktemp("two")
    train(connect(1), checkpoints=kept(folder, every="2 epochs"))
    found = files_lib.newest_first(folder / "checkpoints")
    assert [files_lib.update_of(p) for p in found] == [20, 10]
    return folder / "checkpoints"


def choose(folder, identity=None, **options):
    return resume.choose(folder, identity or {}, {}, True, **options)


def copy(two, tmp_path):
    return pathlib.Path(shutil.copytree(two, tmp_path / "copy"))


@pytest.mark.whole
def test_tensorflow_reads_the_tensors_without_tfdist(two):
    reader = tf.train.load_checkpoint(str(two / "20" / "tensors"))
    names = reader.get_variable_to_shape_map()
    assert [s for n, s in names.items() if n.startswith("shared/model/0000/")] == [[3, 3, 1, 3]]


def test_every_flipped_bit_and_every_truncation_is_noticed(two, tmp_path):
    folder, chance = copy(two, tmp_path), random.Random(0)
    files = sorted(p for p in (folder / "20").iterdir())
    assert {p.name for p in files} >= {"manifest.json", "state.json", "tensors.index", "tensors.data-00000-of-00001"}
    for path in files:
        whole = path.read_bytes()
        places = {0, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(60))}
        for place in places:
            damaged = bytearray(whole)
            damaged[place] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(files_lib.DamagedError):
                files_lib.verify(folder / "20")
        for length in {0, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(10))}:
            path.write_bytes(whole[:length])
            with pytest.raises(files_lib.DamagedError):
                files_lib.verify(folder / "20")
        path.unlink()
        with pytest.raises(files_lib.DamagedError):
            files_lib.verify(folder / "20")
        path.write_bytes(whole)
    files_lib.verify(folder / "20")


def test_the_newest_valid_one_is_used_and_the_damaged_one_set_aside(two, tmp_path, said):
    folder = copy(two, tmp_path)
    data = folder / "20" / "tensors.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-1])
    findings = checkpoints_lib.examine(folder)
    assert [(f.update, bool(f.problem), f.next) for f in findings] == [(20, True, False), (10, False, True)]
    assert choose(folder, read_only=True).path.name == "10"  # as a dry run
    assert [p.name for p in files_lib.newest_first(folder)] == ["20", "10"]
    said.clear()
    chosen = choose(folder)
    assert chosen.path.name == "10"
    assert "20 is not used: tensors.data-00000-of-00001 has" in said[0]
    assert said[1].endswith("is now unused-20")
    assert [p.name for p in files_lib.newest_first(folder)] == ["10"]


@pytest.mark.whole
def test_another_batch_is_refused_or_taken_between_epochs(connect, tmp_path, said):
    assert train(connect(1), stop=15, checkpoints=kept(tmp_path, every="2 epochs")) is None  # in the third epoch of 4
    data = lambda: tf.data.Dataset.from_tensor_slices(training_cases.images(EXAMPLES)).batch(12)
    with pytest.raises(UserError, match=r"another experiment .global batch is 24 there and 12 here"):
        train(connect(1), data, checkpoints=kept(tmp_path, every="2 epochs"))
    said.clear()
    options = dict(every="1 epoch", keep=9, changed=True)
    checkpoints = kept(tmp_path, **options)
    assert train(connect(1), data, checkpoints=checkpoints)
    assert any("is not used: it is from the middle of an epoch" in line for line in said)
    assert checkpoints.resumed_from == 20  # two epochs of ten updates
    assert files_lib.update_of(files_lib.newest_first(tmp_path / "checkpoints")[0]) == 40


def small(distribution, data=None, **options):
    """Trains a model that is soon traced, where only its data matter."""
    return train(distribution, data, made=without_average(distribution), **options)


def test_other_examples_are_refused(connect, tmp_path):
    """Another table under the same name trained to other weights, and nothing was said.

    With one example less there are as many updates, in another order: some would be left out and others seen twice.
    """
    assert small(connect(1), stop=2, checkpoints=kept(tmp_path, every="1 steps")) is None
    with pytest.raises(UserError, match=r"no valid checkpoint in .* is from the end of an epoch: leave out --res"):
        choose(tmp_path / "checkpoints", identity={"global batch": 5})
    with pytest.raises(UserError, match=r"experiment .number of examples is 120 there and 119 here"):
        small(connect(1), lambda: training_cases.images(EXAMPLES - 1), checkpoints=kept(tmp_path, every="1 steps"))
    x, y = training_cases.images(EXAMPLES)
    one = x.copy()
    one[57, 3, 3] += 1
    changed = {"checksum of targets": (x, np.roll(y, 7)), "an input": (x[::-1], y), "a sum over all inputs": (one, y)}
    for name, other in changed.items():
        with pytest.raises(UserError, match=rf"experiment .{name} is [-\d.e]+ there and [-\d.e]+ here[;)]"):
            small(connect(1), lambda other=other: other, checkpoints=kept(tmp_path, every="1 steps"))
    as_wider = lambda: (x.astype("float64"), y)  # the same numbers in another form
    assert small(connect(1), as_wider, checkpoints=kept(tmp_path, every="1 steps"))


@pytest.mark.whole
def test_other_inputs_that_are_read_by_number_are_refused(connect, tmp_path):
    """Labels alone were compared: noise in place of all images trained on."""
    assert small(connect(1), by_number, stop=2, checkpoints=kept(tmp_path, every="1 steps")) is None
    other = dataclasses.replace(by_number(), decode=lambda example, seed: (example[0] + 1, example[1]))
    with pytest.raises(UserError, match=r"experiment .a sum over all inputs of some rows is"):
        small(connect(1), lambda: other, checkpoints=kept(tmp_path, every="1 steps"))


@pytest.mark.whole
def test_another_model_is_refused(connect, tmp_path):
    train(connect(1), made=model(connect(1), norm=False), epochs=1, checkpoints=kept(tmp_path, every="1 epoch"))
    for changed, words in (False, r"another experiment \(the setup of the model"), (True, "model .*kernel is float32"):
        with pytest.raises(UserError, match=words):
            other = model(connect(1), norm=False, kernels=4)
            train(connect(1), made=other, checkpoints=kept(tmp_path, every="1 epoch", changed=changed))


def squared(a, b):
    return (a - b) ** 2


def apart(a, b):
    return abs(a - b)


class Times(L.Layer):
    """Multiplies by what it holds, which is no setting that Keras knows, and counts its calls."""

    def __init__(self, held):
        super().__init__()
        self.held = held() if callable(held) else held
        self.calls = 0.0

    def call(self, x):
        self.calls += 1.0
        return x * (self.held[0] if isinstance(self.held, list) else getattr(self.held, "factor", self.held))


class Weighs:
    """A setting that a loss reads of an object, of a class, or that a callback, regularizer or layer holds."""

    of_class = 1

    def __init__(self, factor, kind=None):
        self.kind, self.factor = kind or type(self), factor

    def __call__(self, weights):
        return self.factor * keras.ops.sum(weights**2)


def reads(factor, how):
    """Returns a loss with a factor which is not in its code."""
    weighs, kind = Weighs(factor), type("Kind", (Weighs,), {"of_class": factor})
    huber, teacher = keras.losses.Huber(factor), L.Dense(1, kernel_initializer=keras.initializers.Constant(factor))
    teacher.build((None, 1))
    return {
        "object": lambda a, b: weighs.factor * abs(a - b),
        "class": lambda a, b: kind.of_class * abs(a - b),
        "loss": lambda a, b: huber(a, b),
        "teacher": lambda a, b: (teacher(a) - teacher(b)) ** 2,
    }[how]


class Rates(keras.callbacks.Callback):
    """Has a setting in a whole number, and reads a clock."""

    def __init__(self, divisor):
        super().__init__()
        self._divisor, self.made_at = divisor, time.time()

    def on_train_begin(self, logs=None):
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.1 / self._divisor


class Repeats(L.Layer):
    """Holds a whole number and a word that are no arguments, and counts."""

    def __init__(self, times):
        super().__init__()
        self.repeats, self.word, self.calls = times(), ["sin", "cos"][times() > 3], 0

    def call(self, x):
        self.calls += 1
        return getattr(keras.ops, self.word)(x * self.repeats)


def setup(distribution, middle=lambda h: h, loss="mse", rate=0.1, shuffle=True, callbacks=(), **options):
    keras.utils.set_random_seed(1)
    with distribution.scope():
        x = keras.Input((3,))
        made = keras.Model(x, L.Dense(1)(middle(L.Dense(3, name="first")(x))))
        made.compile(keras.optimizers.SGD(rate, **options), loss)
    return made, shuffle, [callback() for callback in callbacks]


CHANGED_SETUPS = [
    ({}, {"loss": "mae"}), ({}, {"rate": 0.2}), ({}, {"clipnorm": 1.0}), ({}, {"shuffle": False}),
    ({"loss": squared}, {"loss": apart}), ({"middle": L.ReLU()}, {"middle": L.ELU()}),
    *(({"rate": kind(0.1, 9)}, {"rate": kind(0.2, 9)}) for kind in [keras.optimizers.schedules.CosineDecay]),
    ({"middle": lambda h: h * 2.0}, {"middle": lambda h: h * 5.0}),
    ({"middle": lambda h: keras.ops.sin(h)}, {"middle": lambda h: keras.ops.cos(h)}),
    ({"middle": lambda h: L.Subtract()([h, h * h])}, {"middle": lambda h: L.Subtract()([h * h, h])}),
    *(({"middle": lambda h, k=k: Times(k(2.0))(h)}, {"middle": lambda h, k=k: Times(k(5.0))(h)})
      for k in (float, np.float32, lambda v: [v], lambda v: lambda: tf.constant(v))),
    ({"middle": L.Lambda(lambda h: h * 2.0)}, {"middle": L.Lambda(lambda h: h * 5.0)}),
    ({"middle": L.Rescaling(np.array(2.0))}, {"middle": L.Rescaling(np.array(5.0))}),
    *(({"loss": reads(2, how)}, {"loss": reads(5, how)}) for how in ("object", "class", "loss", "teacher")),
    *(({"middle": lambda h, k=k: Repeats(lambda: k)(h)}, {"middle": lambda h, k=k: Repeats(lambda: k + 1)(h)})
      for k in (2, 3)),
    ({"middle": lambda h: Times(lambda: Weighs(2.0))(h)}, {"middle": lambda h: Times(lambda: Weighs(5.0))(h)}),
    *(({"middle": lambda h, k=k: L.Dense(3, kernel_regularizer=k(2))(h)},
       {"middle": lambda h, k=k: L.Dense(3, kernel_regularizer=k(5))(h)})
      for k in (Weighs, lambda v: lambda w: v * keras.ops.sum(w))),
    *(({"callbacks": [lambda k=k: k(2)]}, {"callbacks": [lambda k=k: k(5)]})
      for k in (Rates, lambda v: keras.callbacks.EarlyStopping("loss", patience=v),
                lambda v: keras.callbacks.ReduceLROnPlateau("loss", factor=1 / v),
                lambda v: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / v))),
    ({}, {"callbacks": [lambda: keras.callbacks.EarlyStopping("loss")]}),
]  # fmt: skip


@pytest.mark.parametrize("number", first(5, sorted(range(len(CHANGED_SETUPS)), key=lambda number: number % 2)))
def test_another_setup_is_told_from_the_same(connect, number):
    def told(made, shuffle, callbacks):
        return setups.of_training(made) | setups.of_callbacks(made, callbacks) | {"shuffle": shuffle}

    before, after = (setup(connect(1), **options) for options in CHANGED_SETUPS[number])
    first = told(*before)
    before[0](np.ones((2, 3)))  # what it counts is no setting
    assert told(*before) == first == told(*setup(connect(1), **CHANGED_SETUPS[number][0]))
    assert told(*after) != first


@pytest.mark.parametrize("number", first(1, sorted(range(len(CHANGED_SETUPS)), key=lambda number: number % 25)))
def test_another_setup_is_refused_and_the_same_goes_on(connect, tmp_path, number):
    """The folder's weights and history were taken for those of the new one."""
    x, used = np.random.default_rng(0).normal(size=(20, 3)).astype("float32"), connect(1 + number % 2)
    before, after = CHANGED_SETUPS[number]

    def fit(made, shuffle, callbacks, epochs):
        again = tfdist.Checkpoints(tmp_path, every="1 epoch")
        options = {"distribution": used, "verbose": 0, "shuffle": shuffle, "check_agreement": "off"}
        options |= {"checkpoints": again, "callbacks": callbacks}
        return tfdist.fit(made, x, x[:, :1], 10, epochs, **options).history["loss"]

    made = setup(used, **before)
    first = fit(*made, 1)
    assert fit(*setup(used, **before), 2)[:1] == first, "built anew"
    assert len(fit(*made, 3)) == 3, "the same object"
    words = r"another experiment \((the setup of|the learning rate|shuffle is).* give tfdist.Checkpoints another folder"
    with pytest.raises(UserError, match=words):
        fit(*setup(used, **after), 4)


def test_a_learning_rate_that_has_changed_is_the_new_one(connect, tmp_path):
    x, made = np.ones((8, 3), "float32"), None
    for epochs, rate in ((1, 0.1), (2, 0.2), (3, 0.2), (4, 0.3)):
        made = setup(connect(1), rate=rate)[0] if epochs < 4 else made
        made.optimizer.learning_rate = rate
        again = tfdist.Checkpoints(tmp_path, every="1 epoch", changed=epochs == 2)
        tfdist.fit(made, x, x[:, :1], epochs=epochs, distribution=connect(1), verbose=0, checkpoints=again)
        assert float(made.optimizer.learning_rate) == pytest.approx(rate) and again.saved


def test_options_are_checked_like_the_fields_of_an_experiment(tmp_path):
    with pytest.raises(UserError, match=r"checkpoint.every='often' is not understood: write 100 steps"):
        kept(tmp_path, every="often")


def test_epochs_of_unknown_length_cannot_be_counted(connect, tmp_path):
    with pytest.raises(UserError, match=r"checkpoint.every='1 epoch' with data of unknown length"):
        small(connect(1), of_unknown_length, checkpoints=kept(tmp_path, every="1 epoch"))


class Notes(keras.callbacks.Callback):
    """Puts values into the logs that are no numbers, which Keras' History keeps."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def on_epoch_end(self, epoch, logs=None):
        logs["note"] = self.value(epoch)


def noted(distribution, value, **options):
    made = without_average(distribution)
    options |= {"batch_size": BATCH, "epochs": 3, "verbose": 0, "callbacks": [Notes(value)], "check_agreement": "off"}
    return tfdist.fit(made, training_cases.images(EXAMPLES), distribution=distribution, **options).history


@pytest.mark.whole
def test_what_a_callback_puts_into_the_logs_is_in_the_history_after_a_resume(connect, tmp_path):
    """Text made a checkpoint fail with: could not convert string to float."""
    value = lambda epoch: ["a text", None, {"of": ["several", 2.5]}][epoch]
    assert noted(connect(1), value)["note"] == list(map(value, range(3)))
    with pytest.raises(Interrupted):
        noted(connect(1), value, should_stop=training_cases.StopAt(12), checkpoints=kept(tmp_path, every="1 steps"))
    assert noted(connect(1), value, checkpoints=kept(tmp_path))["note"] == list(map(value, range(3)))
    checkpoints = kept(tmp_path / "other", every="1 epoch")
    with pytest.raises(UserError, match=r"^a callback has put 'note' into the logs, a set, which no checkpoint can"):
        noted(connect(1), lambda epoch: {epoch}, checkpoints=checkpoints)


def test_the_state_of_a_callback_is_kept_as_it_was():
    """It is written beside later updates: a resumed callback had what it appended in them twice."""
    callback = Notes(None)
    callback.seen = []
    callback.get_state, callback.set_state = lambda: callback.seen, None
    states = training_run.capture_callbacks(keras.callbacks.CallbackList([callback]))
    callback.seen.append(1)
    assert states == {"Notes.0": []}


class Plain(keras.callbacks.Callback):
    """Has no state that a checkpoint could keep."""


@pytest.mark.whole
def test_what_callbacks_do_at_the_beginning_of_an_epoch_is_done_once(connect, tmp_path, said):
    """A rate was lowered twice in an epoch that was resumed, and an average of the weights trained on."""

    def trained(**options):
        rate = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.8 * rate)
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        average = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.9)
        made, options["callbacks"] = without_average(connect(1)), [rate, swap, Plain()]
        training_cases.compiled(made, average)
        options |= {"batch_size": BATCH, "epochs": EPOCHS, "steps_per_call": 1, "distribution": connect(1)}
        history = tfdist.fit(made, training_cases.images(EXAMPLES), verbose=0, **options).history
        return fingerprint(made)[0], history

    whole = trained()
    with pytest.raises(Interrupted):
        trained(should_stop=training_cases.StopAt(7), checkpoints=kept(tmp_path, every="1 epoch"))
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "earlier" / "checkpoints")
    shutil.rmtree(tmp_path / "earlier" / "checkpoints" / "7")
    for folder, update in (tmp_path, 7), (tmp_path / "earlier", 5):  # 5 is the end of an epoch
        said.clear()
        checkpoints = kept(folder, every="1000 steps")
        assert trained(checkpoints=checkpoints) == whole
        assert checkpoints.resumed_from == update
        anew = [line.partition(", no")[0] for line in said if "anew" in line]
        assert anew == ["WARNING: the callbacks Plain start anew"]


# -- a loss that is not finite ----------------------------------------------


def poisoned():
    """The example at row 30 has a NaN: once per epoch, in another batch each time."""
    x, y = training_cases.images(EXAMPLES)
    x[30] = np.nan
    return x, y


def without_average(distribution):
    keras.utils.set_random_seed(1)
    with distribution.scope():
        return training_cases.compiled(training_cases.dense(), keras.optimizers.SGD(0.1))


@pytest.mark.whole
def test_rollback_leaves_out_what_spoils_the_training(connect, tmp_path, said):
    made = without_average(connect(2))
    options = dict(batch_size=BATCH, epochs=2, verbose=0, distribution=connect(2), steps_per_call=1)
    options["check_agreement"] = "off"
    checkpoints = kept(tmp_path, every="2 steps")
    tfdist.fit(made, *poisoned(), checkpoints=checkpoints, on_nonfinite="rollback", **options)
    assert all(np.isfinite(w).all() for w in made.get_weights())
    back = [line for line in said if "back to update" in line]
    assert len(back) == 2 and "(2 of 3 times)" in back[1]
    with pytest.raises(TrainingError, match="the loss is nan since update"):
        tfdist.fit(
            without_average(connect(2)), *poisoned(), on_nonfinite="rollback", max_rollbacks=1,
            checkpoints=kept(tmp_path / "once", every="2 steps"), **options,
        )  # fmt: skip


def test_rollback_needs_checkpoints(connect):
    with pytest.raises(UserError, match="on_nonfinite='rollback' goes back to a checkpoint"):
        tfdist.fit(without_average(connect(1)), *poisoned(), on_nonfinite="rollback", verbose=0)
    with pytest.raises(UserError, match="unknown on_nonfinite 'rolback': did you mean 'rollback'"):
        tfdist.fit(without_average(connect(1)), *poisoned(), on_nonfinite="rolback", verbose=0)


# -- a disk that fails ------------------------------------------------------


def test_a_folder_that_cannot_be_written_does_not_stop_the_training(connect, tmp_path, said):
    checkpoints = kept(tmp_path, every="5 steps")

    def in_the_way(epoch, logs):
        if epoch == 2:
            checkpoints.wait()
            shutil.move(tmp_path / "checkpoints", tmp_path / "elsewhere")
            (tmp_path / "checkpoints").write_text("a file")

    breaks = [keras.callbacks.LambdaCallback(on_epoch_end=in_the_way)]
    options = dict(batch_size=BATCH, epochs=EPOCHS, steps_per_call=2, verbose=0, callbacks=breaks)
    made = without_average(connect(1))
    history = tfdist.fit(made, *training_cases.images(EXAMPLES), checkpoints=checkpoints, **options)
    assert len(history.history["loss"]) == EPOCHS
    assert "the checkpoint after update 20 could not be written" in checkpoints.failure
    checkpoints.finish()
    assert said[0].startswith("WARNING: the checkpoint after update 15 could not be written (")
    assert "training goes on, the one of update 10 is kept; free or repair" in said[0]
    assert said[1] == "WARNING: the last 2 checkpoints could not be written"  # which is not said of each of them
    files_lib.verify(tmp_path / "elsewhere" / "10")


def test_what_is_held_in_memory_is_written_by_a_thread_that_is_waited_for(tmp_path, monkeypatch, said):
    """The watch on other workers, which asks for it, is a daemon, and may ask in the middle of another checkpoint."""
    begun, gate, daemons = threading.Event(), threading.Event(), []
    original = training_state.write

    def write(prefix, tensors):
        daemons.append(threading.current_thread().daemon)
        begun.set()
        assert gate.wait(60)
        original(prefix, tensors)

    monkeypatch.setattr(training_state, "write", write)
    state = lambda update: {"position": {"update": update}, "best": {"update": None}, "experiment": {}}
    tensors = {"a": np.arange(3.0)}
    writer = Checkpoints(tmp_path, keep=3)
    writer.write_held()
    assert not begun.is_set()
    writer.start(state(5), tensors)
    assert begun.wait(60)
    writer.in_memory = resume.LoadedCheckpoint(tmp_path, state(7), tensors)
    watch = threading.Thread(target=writer.write_held, daemon=True)
    watch.start()
    watch.join()
    gate.set()
    writer.wait()
    assert [path.name for path in files_lib.newest_first(tmp_path)] == ["7", "5"] and daemons == [False, False]
    assert said == ["the state after update 7 was in memory and is saved, since a worker is lost"]
    assert writer.in_memory is None  # it is on the disk


def test_requeueing_that_cannot_be_done(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    asked = Experiment(), runtime_options.Environment(requeue=True)
    with pytest.raises(UserError, match="--requeue needs Slurm's scontrol, which is not on PATH"):
        train_command._check(*asked)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'Invalid job id specified' >&2; exit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    train_command._check(*asked)
    assert train_run.requeued("7") == "WARNING: job 7 is not requeued: Invalid job id specified"


def test_a_checkpoint_of_another_format(tmp_path, monkeypatch):
    path = files_lib.write(tmp_path, 3, {}, lambda prefix: pathlib.Path(prefix + ".x").write_text("x"))
    files_lib.verify(path)
    monkeypatch.setattr(files_lib, "FORMAT", 2)
    with pytest.raises(files_lib.DamagedError, match="it has format 1, and this tfdist reads 2"):
        files_lib.verify(path)
