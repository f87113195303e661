"""tfdist.fit, evaluate and predict do what Keras users expect of them."""

import contextlib
import dataclasses
import functools
import inspect
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from programs.surface.layers import CountsAllCalls
from support import training_cases
from support.covering import first

import tfdist
from tfdist.checkpoints import files
from tfdist.errors import Interrupted
from tfdist.keras_bridge import preconditions
from tfdist.trainer.callbacks import needs_every_batch
from tfdist.trainer.plan import FitOptions

L = keras.layers


def small(distribution, optimizer=None, **kwargs):
    keras.utils.set_random_seed(0)
    with distribution.scope():
        if optimizer is not None:  # made anew: what was created outside the scope is refused
            kwargs["optimizer"] = type(optimizer).from_config(optimizer.get_config())
        return training_cases.compiled(training_cases.dense(), **kwargs)


def fit(model, distribution, n=48, **kwargs):
    x, y = training_cases.images(n)
    options = dict(distribution=distribution, batch_size=8, epochs=3, verbose=0, check_agreement="off") | kwargs
    return tfdist.fit(model, x, y, **options)


# -- callbacks --------------------------------------------------------------


class Spy(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_begin(self, logs=None):
        self.seen.append("train")

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(f"epoch {epoch}")

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(f"batch {batch}")

    def on_test_begin(self, logs=None):
        self.seen.append("test")

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append("/".join(sorted(logs)))

    def on_train_end(self, logs=None):
        self.seen.append("end")


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.whole)])
def test_callbacks_are_called_as_by_keras(replicas, connect):
    distribution, x, y = connect(replicas), *training_cases.images(20)
    ours, theirs = Spy(), Spy()
    fit(small(distribution), distribution, n=20, epochs=2, callbacks=[ours], validation_data=(x, y))
    small(connect(1)).fit(x, y, batch_size=8, epochs=2, validation_data=(x, y), callbacks=[theirs], verbose=0)
    assert ours.seen == theirs.seen


class Numbers(keras.callbacks.Callback):
    """Reads and sets variables in the ways that people do."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        optimizer, kernel = self.model.optimizer, self.model.trainable_variables[0]
        self.seen += [float(optimizer.learning_rate), int(optimizer.iterations), float(optimizer.learning_rate.value)]
        self.seen += [round(float(keras.ops.convert_to_tensor(optimizer.learning_rate)), 3), np.asarray(kernel).shape]
        self.seen += [np.asarray(kernel, "float64").dtype, np.array(optimizer.learning_rate, copy=True).shape]
        if epoch == 0:
            optimizer.learning_rate = 0.25
        else:
            optimizer.learning_rate.assign(float(optimizer.learning_rate) / 2)


@pytest.mark.parametrize("replicas", first(0, [2, 1]))
def test_variables_are_numbers_as_in_keras(replicas, connect):
    ours, theirs = Numbers(), Numbers()
    with connect(replicas).scope():  # else they are plain variables
        model = small(connect(replicas), optimizer=keras.optimizers.SGD(1.0))
    fit(model, connect(replicas), callbacks=[ours], shuffle=False)
    one = small(connect(1), optimizer=keras.optimizers.SGD(1.0))
    x, y = training_cases.images(48)
    one.fit(x, y, batch_size=8, epochs=3, shuffle=False, callbacks=[theirs], verbose=0)
    assert ours.seen == theirs.seen
    training_cases.all_same(model.get_weights(), one.get_weights(), rtol=1e-4, atol=1e-6)


class OnChief(tfdist.Callback):
    chief_only = True

    def limit_call(self, update):
        return 3


def test_a_callback_for_the_chief_alone_cannot_limit_calls(connect):
    with pytest.raises(tfdist.UserError, match="OnChief has chief_only=True and its own limit_call, which must be the"):
        fit(small(connect(1)), connect(1), callbacks=[OnChief()])


@pytest.mark.whole
def test_a_file_within_an_epoch_has_averaged_statistics(connect, tmp_path):
    """BatchNorm that is not synchronized has other statistics on each replica until they are averaged."""
    distribution = connect(2)
    keras.utils.set_random_seed(0)
    with distribution.scope():
        model = keras.Sequential([keras.Input((4, 4, 1)), L.Flatten(), L.BatchNormalization(), L.Dense(5)])
        training_cases.compiled(model)
    seen = []
    means = lambda: [copy.numpy() for copy in model.layers[1].moving_mean.value.values]
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(means()))
    file = tmp_path / "update.keras"
    callbacks = [look, keras.callbacks.ModelCheckpoint(file, save_freq=6)]
    fit(model, distribution, epochs=1, callbacks=callbacks, check_agreement="off")
    assert len(seen) == 6
    np.testing.assert_array_equal(seen[-1][0], seen[-1][1])
    np.testing.assert_array_equal(keras.saving.load_model(file).layers[1].moving_mean.numpy(), seen[-1][0])


def test_a_loss_that_is_not_finite(connect):
    model = small(connect(1))
    x, y = training_cases.images(48)
    x[3] = np.nan
    with pytest.raises(tfdist.TrainingError, match=r"the loss is nan since update \d+ \(epoch 1\): try a lower"):
        tfdist.fit(model, x, y, batch_size=8, verbose=0)
    history = tfdist.fit(model, x, y, batch_size=8, epochs=5, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()])
    assert history.epoch == [0], "Keras' callback ends the training in its own way"


def test_hooks_patched_into_keras_look_at_batches(monkeypatch):
    monkeypatch.setattr(keras.callbacks.Callback, "on_train_batch_end", lambda self, batch, logs=None: None)
    assert needs_every_batch(keras.callbacks.EarlyStopping())


class Hooked(tfdist.Callback):
    """Notes what it is told, and wants calls of three updates at most."""

    takes_many_updates = True
    wants_gradient_norm = True

    def __init__(self):
        super().__init__()
        self.calls, self.told = [], []

    def limit_call(self, update):
        return 3

    def on_call(self, call):
        self.calls.append(call)

    def on_train_batch_end(self, batch, logs=None):
        self.told.append(batch)

    def on_checkpoint(self, update):
        self.told.append(f"checkpoint {update}")

    def on_rollback(self, update, skipped):
        self.told.append(f"rollback {update} {skipped}")


@pytest.mark.whole
def test_hooks_of_a_callback_are_called(connect, tmp_path):
    hooked = Hooked()
    checkpoints = tfdist.Checkpoints(tmp_path, every="4 steps")
    fit(small(connect(2)), connect(2), epochs=1, callbacks=[hooked], checkpoints=checkpoints, steps_per_call=100)
    assert [call.updates for call in hooked.calls] == [3, 1, 2]
    assert [call.examples for call in hooked.calls] == [24, 8, 16]
    assert all(call.gradient_norm > 0 for call in hooked.calls)
    assert hooked.told == [2, 3, "checkpoint 4", 5, "checkpoint 6"]


def test_a_rollback_is_told_to_callbacks(connect, tmp_path):
    x, y = training_cases.images(48)
    x[8 * 3 + 1] = np.inf
    hooked = Hooked()
    checkpoints = tfdist.Checkpoints(tmp_path, every="2 steps")
    options = dict(batch_size=8, shuffle=False, verbose=0, steps_per_call=1, checkpoints=checkpoints)
    tfdist.fit(small(connect(1)), x, y, callbacks=[hooked], on_nonfinite="rollback", **options)
    assert "rollback 2 [2, 3]" in hooked.told


@pytest.mark.whole
def test_hooks_are_those_of_the_base_class(connect):
    """A method of the same name on a plain Keras callback is its own affair."""

    class Plain(keras.callbacks.Callback):
        takes_many_updates = True
        calls = 0

        def on_call(self, call):
            self.calls += 1

    plain = Plain()
    fit(small(connect(1)), connect(1), callbacks=[plain])
    assert plain.calls == 0
    small(connect(1)).fit(*training_cases.images(8), callbacks=[Hooked()], verbose=0)  # and Keras' own fit takes ours


def stopped_after(calls):
    left = iter([""] * calls)
    return lambda: next(left, "asked to")


@pytest.mark.whole
def test_a_callback_keeps_its_state_over_a_resume(connect, tmp_path):
    """With methods of its own, as attributes, as what is known of its Keras class, and without the base class."""

    class Own(tfdist.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1

        def get_state(self):
            return {"seen": self.seen}

    class Stopping(tfdist.Callback, keras.callbacks.EarlyStopping):
        pass

    class Plain(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1

        def get_state(self):
            return {"so far": self.seen}

        def set_state(self, state):
            self.seen = state["so far"]

    made = lambda: [Own(), Stopping("loss", min_delta=10, patience=9), Plain(), tfdist.Callback()]
    first, second = made(), made()
    options = dict(steps_per_call=1)
    with pytest.raises(Interrupted):
        stopping = {"checkpoints": tfdist.Checkpoints(tmp_path, every="1000 steps"), "should_stop": stopped_after(9)}
        fit(small(connect(1)), connect(1), callbacks=first, **stopping, **options)
    done = first[0].seen
    assert 6 < done < 18
    kept = files.read_state(files.newest_first(tmp_path)[0])["callbacks"]
    assert kept["Own.0"] == {"seen": done} and kept["Plain.0"] == {"so far": done}
    assert kept["Stopping.0"]["best_epoch"] == 0 and "Callback.0" not in kept
    fit(small(connect(1)), connect(1), callbacks=second, checkpoints=tfdist.Checkpoints(tmp_path), **options)
    assert second[0].seen == second[2].seen == 18
    assert second[1].wait == 2 and second[1].best_epoch == 0


def test_options_have_the_defaults_of_fit():
    given = inspect.signature(tfdist.fit).parameters
    for field in dataclasses.fields(FitOptions):
        if field.name != "distribution":
            assert field.default == given[field.name].default, field.name
    apart = {"model", "x", "y", "sample_weight", "class_weight", "validation_split"}
    assert set(given) - apart == {field.name for field in dataclasses.fields(FitOptions)}


def test_a_callback_that_stops_in_mid_epoch(connect):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 2

    model = small(connect(1))
    fit(model, connect(1), callbacks=[Stop()])
    assert int(model.optimizer.iterations.numpy()) == 3


# -- arguments --------------------------------------------------------------


def test_steps_end_the_training_before_its_epochs(connect):
    model = small(connect(1))
    assert fit(model, connect(1), epochs=9, steps=8).epoch == [0, 1]
    assert int(model.optimizer.iterations.numpy()) == 8


def test_initial_epoch_continues_the_order(connect):
    whole, parts = small(connect(1)), small(connect(1))
    fit(whole, connect(1), epochs=4)
    fit(parts, connect(1), epochs=2)
    fit(parts, connect(1), epochs=4, initial_epoch=2)
    training_cases.all_same(whole.get_weights(), parts.get_weights())


@pytest.mark.parametrize("steps_per_call", first(0, [2, 1, 100]))
def test_updates_per_call_change_nothing(steps_per_call, connect):
    with contextlib.ExitStack() as stack:  # sums of float32 are often exact, whatever their order
        stack.callback(keras.config.set_floatx, keras.config.floatx())
        keras.config.set_floatx("float64")
        a, b = small(connect(2)), small(connect(2))
    data = training_cases.images(229)
    histories = [fit(a, connect(2), n=245, validation_data=data)]
    histories += [fit(b, connect(2), n=245, validation_data=data, steps_per_call=steps_per_call)]
    training_cases.all_same(a.get_weights(), b.get_weights())
    assert histories[0].history == histories[1].history, "to the last bit"


@pytest.mark.parametrize("kwargs, message", [
    (dict(batch_size=1), "batch_size=1 is smaller than 2 replicas: use at least 2"),
    (dict(batch_size=5, accumulate=3), "batch_size=5 is smaller than 2 replicas x 3 micro-batches: use at least 6"),
    (dict(batch_size=-1), "batch_size must be at least 1, got -1"),
    (dict(accumulate=0), "accumulate must be at least 1, got 0"),
    (dict(steps_per_call=0), "steps_per_call must be 'auto' or an integer of at least 1, got 0"),
])  # fmt: skip
def test_arguments_that_cannot_be(kwargs, message, connect):
    with pytest.raises(tfdist.UserError, match=message):
        fit(small(connect(2)), connect(2), **kwargs)


def test_labels_out_of_range_are_named(connect):
    x, y = training_cases.images(48)
    y[7] = 5
    with pytest.raises(tfdist.UserError, match=r"label 5 of example 7 is out of range for an output with 5 classes"):
        tfdist.fit(small(connect(1)), x, y, verbose=0)
    with pytest.raises(tfdist.UserError, match="Received a label value of 5 which is outside the valid range of"):
        tfdist.fit(small(connect(1)), tf.data.Dataset.from_tensor_slices((x, y)).batch(8), verbose=0)


class Noisy(keras.Model):
    """Draws in a step of its own."""

    def train_step(self, data):
        x, y = data
        return super().train_step((x + keras.random.normal(keras.ops.shape(x)), y))


@pytest.mark.parametrize("where", first(1, ["layer", "shuffle", "step"]))
def test_a_draw_without_a_seed_is_told_where_each_replica_would_make_a_generator(connect, where):
    """Keras' generator belongs to a thread, and each replica is traced in one of its own: a page of TensorFlow's."""
    draw = keras.random.shuffle if where == "shuffle" else lambda x: x + keras.random.normal(keras.ops.shape(x))
    with connect(2).scope():
        inputs = keras.Input((4,))
        noise = L.Lambda(lambda x, training=None: draw(x) if training and where != "step" else x)
        model_class = Noisy if where == "step" else keras.Model
        model = training_cases.compiled(model_class(inputs, L.Dense(5)(noise(inputs))))
    with pytest.raises(tfdist.UserError, match=r"^(tf.function|seed_generator_state).*: give keras.random a seed="):
        tfdist.fit(model, np.ones((16, 4)), np.zeros(16), 8, verbose=0, distribution=connect(2), check_agreement="off")


class Annealed(L.Layer):
    """Counts its calls, whether it trains or not, and weighs a penalty by them."""

    def build(self, shape):
        self.calls = self.add_weight(initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        self.add_loss(self.calls * keras.ops.mean(x**2))
        return x


@pytest.mark.parametrize("replicas", first(0, [2, 1]))
def test_building_a_model_is_no_call_of_it(connect, replicas):
    x, ended = np.random.default_rng(0).normal(size=(16, 4)), []
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    for fit in keras.Model.fit, functools.partial(tfdist.fit, distribution=connect(replicas)):
        keras.utils.set_random_seed(0)
        with connect(replicas).scope() if fit is not keras.Model.fit else contextlib.nullcontext():
            model = keras.Sequential([L.Dense(4), Annealed(), L.Dense(1)])
            model.compile("sgd", "mse")
        fit(model, x, x[:, :1], 8, shuffle=False, verbose=0)
        ended.append(model.get_weights())
    training_cases.all_same(*ended, rtol=1e-12)


class Asking(L.Layer):
    """Computes in the type of the policy that the script has set, and by a function that only a scope knows."""

    def call(self, x):
        kind = keras.config.dtype_policy().compute_dtype
        return keras.ops.cast(keras.saving.get_registered_object("mine")(keras.ops.cast(x, kind)), x.dtype)


@pytest.mark.whole
def test_the_threads_of_replicas_have_the_settings_of_the_script(connect):
    """Keras keeps them for each thread: layers that asked computed in float32 on replicas, and nothing said so."""
    x, ended = np.random.default_rng(0).normal(size=(16, 4)), []
    keras.config.set_dtype_policy("float64")
    of_tfdist = functools.partial(tfdist.fit, distribution=connect(2))
    for fit, scope in (keras.Model.fit, contextlib.nullcontext()), (of_tfdist, connect(2).scope()):
        keras.utils.set_random_seed(0)
        with keras.saving.custom_object_scope({"mine": lambda x: keras.ops.tanh(x + 1e-9)}):
            with scope:
                model = keras.Sequential([keras.Input((4,)), L.Dense(4), Asking(), L.Dense(1)])
                model.compile("sgd", "mse")
            fit(model, x, x[:, :1], 8, shuffle=False, verbose=0)
        ended.append(model.get_weights())
    training_cases.all_same(*ended, rtol=1e-13)


def test_a_model_of_another_scope_is_refused(connect):
    with pytest.raises(
        tfdist.UserError,
        match="the model was created under MirroredStrategy and is used with the distribution 'default'",
    ):
        fit(small(connect(2)), connect(1))


def test_a_model_that_is_not_compiled(connect):
    with pytest.raises(tfdist.UserError, match="the model is not compiled"):
        fit(training_cases.dense(), connect(1))


@pytest.mark.parametrize("replicas", first(0, [1, 2]))
def test_steps_per_execution_says_how_often_callbacks_are_called(replicas, connect):
    """Once for so many batches, and for what is left of an epoch; in an evaluation, too."""
    distribution, begun, ended = connect(replicas), [], []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: begun.append(batch),
        on_train_batch_end=lambda batch, logs: ended.append(batch),
    )
    look.on_test_batch_begin = lambda batch, logs=None: begun.append(-batch)
    model = small(distribution, steps_per_execution=3)
    x, y = training_cases.images(40)
    fit(model, distribution, n=40, epochs=2, callbacks=[look], shuffle=False)
    assert (begun, ended) == ([0, 3] * 2, [2, 4] * 2)
    plain = small(connect(1))
    plain.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    assert training_cases.distance(training_cases.weights(model), training_cases.weights(plain)) < 1e-6
    tfdist.evaluate(model, x, y, batch_size=8, callbacks=[look], verbose=0, distribution=distribution)
    assert begun[4:] == [0, -3]


class Looking(keras.layers.Layer):
    """Notes what Python sees of its inputs."""

    def __init__(self):
        super().__init__()
        self.sums = []

    def call(self, inputs):
        if isinstance(inputs, tf.Tensor) and hasattr(inputs, "numpy"):
            self.sums.append(float(tf.reduce_sum(inputs).numpy()))
        return inputs


@pytest.mark.parametrize("replicas", first(0, [1, 2]))
def test_a_model_that_runs_eagerly(replicas, connect):
    """Its Python code is run for each batch, on numbers, and trains as compiled."""
    distribution, weights = connect(replicas), {}
    x, y = training_cases.images(20)
    for eagerly in (False, True):
        with distribution.scope():
            keras.utils.set_random_seed(0)
            look = Looking()
            model = keras.Sequential([keras.Input((4, 4, 1)), look, L.Flatten(), L.Dense(5)])
            training_cases.compiled(model, run_eagerly=eagerly)
        options = dict(distribution=distribution, verbose=0, check_agreement="off")
        tfdist.fit(model, x, y, batch_size=8, shuffle=False, **options)
        weights[eagerly] = training_cases.weights(model)
        look.sums.clear()
        tfdist.evaluate(model, x, y, batch_size=20, **options)
        tfdist.predict(model, x, batch_size=20, **options)
        assert len(look.sums) == 2 * replicas * eagerly
        assert sum(look.sums) == pytest.approx(2 * x.sum() * eagerly, rel=1e-4)
    assert training_cases.distance(weights[True], weights[False]) < 1e-6


@pytest.mark.parametrize("replicas", first(0, [2, 1]))
def test_layers_see_the_batches_of_the_user_alone(replicas, connect):
    """As for Keras; what looks at shapes or checks the model before the training is undone."""
    x, y = training_cases.images(24)
    counts = []
    for distribution, method in ((connect(replicas), tfdist.fit), (connect(1), keras.Model.fit)):
        with distribution.scope():
            layer = CountsAllCalls()
            model = keras.Sequential([keras.Input((4, 4, 1)), layer, L.Flatten(), L.Dense(5)])
            training_cases.compiled(model)
        options = {} if method is keras.Model.fit else {"distribution": distribution}
        method(model, x, y, batch_size=8, epochs=2, verbose=0, **options)
        counts.append(float(layer.calls.numpy()))
    assert counts == [6.0, 6.0]


def test_a_model_that_runs_eagerly_on_several_workers_is_refused(connect):
    distribution = dataclasses.replace(connect(1), peers=types.SimpleNamespace(size=2))
    with pytest.raises(tfdist.UserError, match="run_eagerly=True, which is for looking at one process"):
        preconditions.model_fits(training_cases.compiled(training_cases.dense(), run_eagerly=True), distribution, 1)


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.calls = L.Dense(5), 0

    def call(self, x):
        return self.dense(keras.ops.reshape(x, (-1, 16)))

    def train_step(self, data):
        self.calls += 1
        return super().train_step(data)


def test_an_activity_regularizer_that_depends_on_the_batch(connect, monkeypatch):
    """Keras divides its value by the batch size since the beginning of 2026."""
    made = training_cases.dense(activity_regularizer="l1")
    made(np.ones((4, 4, 4, 1)))
    once = [float(loss) for loss in made.losses]
    made(np.ones((2, 4, 4, 1)))
    assert preconditions.activity_is_a_mean() is (once == pytest.approx([float(loss) for loss in made.losses]))
    monkeypatch.setattr(preconditions, "activity_is_a_mean", lambda: False)
    with connect(2).scope():
        model = training_cases.compiled(training_cases.dense(activity_regularizer="l1"))
    with pytest.raises(tfdist.UserError, match=r"activity_regularizer, which Keras 3.* sums up .*: upgrade Keras"):
        fit(model, connect(2))
    model = training_cases.compiled(training_cases.dense(activity_regularizer="l1"))
    with pytest.raises(tfdist.UserError, match="has an activity_regularizer"):
        fit(model, connect(1), accumulate=2)
    fit(model, connect(1))


def test_a_model_with_its_own_train_step(connect):
    model = training_cases.compiled(OwnStep())
    history = fit(model, connect(1), steps=16)
    assert model.calls and len(history.epoch) == 3
    for options in (dict(accumulate=2), dict(lr_multipliers={"dense": 2.0}), dict(reduce_dtype="float16")):
        with pytest.raises(tfdist.UserError, match="cannot be used with a model that has its own train_step: leave it"):
            fit(model, connect(1), **options)


def test_a_loss_that_cannot_be_summed(connect):
    model = small(connect(1), loss=keras.losses.MeanSquaredError(reduction=None), metrics=[])
    with pytest.raises(tfdist.UserError, match="has reduction=None, which leaves nothing to minimize"):
        fit(model, connect(1))


def test_targets_that_do_not_fit(connect):
    with connect(1).scope():
        model = training_cases.compile_two_outputs()
    x, _ = training_cases.two_outputs_data(8)
    message = r"loss does not fit the model's outputs: an example's targets have the shapes {'colour': \(\)}, its"
    with pytest.raises(tfdist.UserError, match=message):
        tfdist.fit(model, x, {"colour": np.zeros(8)}, verbose=0)
    with pytest.raises(tfdist.UserError, match="there are no targets: give fit or evaluate y"):
        tfdist.fit(model, x, verbose=0)


def test_one_loss_for_two_outputs_of_different_widths(connect):
    """Keras packs them into one tensor, and ends in TensorFlow's own words."""
    x = keras.Input((6,))
    with connect(1).scope():
        model = keras.Model(x, (keras.layers.Dense(2)(x), keras.layers.Dense(3)(x)))
        model.compile("sgd", ["mse"])
    with pytest.raises(tfdist.UserError, match=r"the shapes \[\(2,\), \(3,\)\], its outputs \(\(2,\), \(3,\)\)"):
        tfdist.fit(model, np.zeros((8, 6)), [np.zeros((8, 2)), np.zeros((8, 3))], verbose=0)


@pytest.mark.parametrize("kind", ["optimizer", "callback"])
def test_what_horovod_wraps_around_keras_is_refused(kind, connect):
    """It makes a class of its own module of an optimizer, and is of before Keras 3: TypeError, AttributeError."""
    base = keras.optimizers.SGD if kind == "optimizer" else keras.callbacks.Callback
    theirs = type("Wrapped", (base,), {"__module__": "horovod._keras"})()
    model = training_cases.compiled(training_cases.dense(), theirs if kind == "optimizer" else "sgd")
    callbacks = [theirs] if kind == "callback" else []
    with pytest.raises(tfdist.UserError, match=f"^{kind} 'Wrapped' is Horovod's own, and what it does tfdist does"):
        tfdist.fit(model, *training_cases.images(8), callbacks=callbacks, distribution=connect(1), verbose=0)


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer")
def test_averages_of_an_optimizer_within_another_are_refused(connect):
    with connect(1).scope():
        inner = keras.optimizers.SGD(0.1, name="inner", use_ema=True)
        model = training_cases.compiled(training_cases.dense(), keras.optimizers.MultiOptimizer(lambda variable: inner))
    message = "optimizer 'inner' within a 'multi_optimizer.*' has use_ema=True: leave it out"
    with pytest.raises(tfdist.UserError, match=message):
        fit(model, connect(1))


def test_an_optimizer_that_was_built_for_other_weights(connect):
    with connect(1).scope():
        model = training_cases.dense()
        model.layers[1].trainable = False
        fit(training_cases.compiled(model), connect(1))
        model.layers[1].trainable = True
        training_cases.compiled(model, model.optimizer)
    with pytest.raises(tfdist.UserError, match=r"'adam.*' was built for other weights, .*: give compile\(\) a new one"):
        fit(model, connect(1))


def test_a_loss_that_reaches_no_weight(connect):
    inputs = keras.Input((4, 4, 1))
    model = keras.Model(inputs, keras.ops.stop_gradient(L.Dense(5)(L.Flatten()(inputs))))
    with pytest.raises(tfdist.UserError, match="no trainable variable has a gradient"):
        fit(training_cases.compiled(model), connect(1))


@pytest.mark.parametrize("replicas", first(0, [1, 2]))
def test_a_model_without_trainable_weights(replicas, connect, said):
    """Keras warns, measures and goes on."""
    ours, theirs = small(connect(replicas)), small(connect(1))
    for model in (ours, theirs):
        model.trainable = False
        with model.distribute_strategy.scope():
            training_cases.compiled(model)
    got = fit(ours, connect(replicas), epochs=1).history["loss"]
    assert any("the model has no trainable weights" in line for line in said)
    x, y = training_cases.images(48)
    assert got == pytest.approx(theirs.fit(x, y, batch_size=8, verbose=0).history["loss"], rel=1e-5)
    assert float(ours.optimizer.iterations.numpy()) == float(theirs.optimizer.iterations.numpy()) == 0


@pytest.mark.whole
def test_a_metric_that_returns_a_python_number(connect):
    def one(y_true, y_pred):
        return 1.0

    model = small(connect(1), metrics=[one])
    x, y = training_cases.images(48)
    assert tfdist.evaluate(model, x, y, verbose=0)["one"] == model.evaluate(x, y, verbose=0)[1] == 1.0


def test_connect_refuses_what_it_does_not_know(connect):
    with pytest.raises(tfdist.UserError, match="has no option 'gpus': known are strategy, devices, virtual_devices, "):
        tfdist.connect("default", gpus=2)
    with pytest.raises(tfdist.UserError, match=r"^virtual_devices=9 comes too late, TensorFlow has already started"):
        tfdist.connect("mirrored", virtual_devices=9)
    with pytest.raises(tfdist.UserError, match=r"^strategy=mirrored needs at least 2 devices"):
        tfdist.connect("mirrored", virtual_devices=1)


@pytest.mark.whole
def test_xla_and_synchronized_batch_norm(connect):
    """Only a choice of the user's own is an error; `auto` steps back."""
    for jit, replicas in (("on", 1), ("auto", 2), ("auto", 1)):
        distribution = dataclasses.replace(connect(replicas), jit=jit)
        with distribution.scope():
            model = training_cases.compiled(training_cases.batch_norm())
        fit(model, distribution, epochs=1)
    distribution = dataclasses.replace(connect(2), jit="on")
    with distribution.scope():
        model = training_cases.compiled(training_cases.batch_norm())
    with pytest.raises(tfdist.UserError, match=r"^jit=on cannot compile synchronized BatchNorm over several replicas"):
        fit(model, distribution)
    for replicas in (1, 2):
        compiled = dataclasses.replace(connect(replicas), jit="on")
        model = small(compiled, loss=lambda y, p: keras.ops.mean(p))
        if replicas == 1:
            fit(model, compiled, n=45)
        else:
            with pytest.raises(tfdist.UserError, match="looks across the batch, which jit=on cannot exchange between"):
                fit(model, compiled, n=45)


def test_what_xla_cannot_compile_is_one_line(connect):
    class Host(L.Layer):
        def call(self, x):
            y = tf.numpy_function(lambda v: v, [x], x.dtype)
            return tf.ensure_shape(y, x.shape)

    distribution = dataclasses.replace(connect(1), jit="on")
    with distribution.scope():
        model = training_cases.compiled(keras.Sequential([keras.Input((4, 4, 1)), Host(), L.Flatten(), L.Dense(10)]))
    with pytest.raises(tfdist.UserError, match=r"unsupported operations .* on XLA_CPU_JIT: PyFunc: use jit=off, with"):
        fit(model, distribution)


def test_padding_in_float64_on_a_gpu_is_refused(connect):
    """TensorFlow gave the embedding of padding gradients up to 1e300 there: a fake, since no GPU is here."""
    lstm = L.LSTM(3, dtype="float64")
    model = keras.Sequential([keras.Input((5,)), L.Embedding(9, 2, mask_zero=True, dtype="float64"), lstm, L.Dense(10)])
    training_cases.compiled(model)
    gpu = dataclasses.replace(connect(1), devices=("GPU:0",))
    preconditions.model_fits(model, gpu, 1)
    lstm.supports_jit = False  # as Keras does where it sees a GPU
    with pytest.raises(tfdist.UserError, match=r"computes in float64 by cuDNN, .*: create it with use_cudnn=False"):
        preconditions.model_fits(model, gpu, 1)
    preconditions.model_fits(model, connect(1), 1)
    lstm.use_cudnn = False
    preconditions.model_fits(model, gpu, 1)


# -- precision --------------------------------------------------------------


@pytest.mark.parametrize("optimizer", first(0, [keras.optimizers.SGD, keras.optimizers.RMSprop]))
def test_an_overflow_on_any_replica_skips_the_update_on_all(optimizer, connect):
    """Facts K4: Keras looks at replica 0 only and wrote -inf into the weights of replica 1."""
    distribution = connect(2)
    keras.config.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(0)
    with distribution.scope():
        model = keras.Sequential([keras.Input((4,)), L.Dense(1)])
        model.compile(optimizer(0.01), "mse")
    before = model.get_weights()
    x = np.ones((8, 4), "float32")
    x[6] = 6e4  # on replica 1; the square of its output is no float16
    options = dict(distribution=distribution, shuffle=False, verbose=0, check_agreement="off")
    tfdist.fit(model, x, np.zeros((8, 1)), batch_size=8, **options)
    scale = model.optimizer.dynamic_scale
    assert float(scale.numpy()) == model.optimizer.initial_scale / 2
    training_cases.all_same(before, model.get_weights())
    tfdist.fit(model, x[:6], np.zeros((6, 1)), batch_size=6, **options)
    assert (before[0] != model.get_weights()[0]).any() and np.isfinite(model.get_weights()[0]).all()
    for copies in (v.value.values for v in model.trainable_variables):
        np.testing.assert_array_equal(copies[0].numpy(), copies[1].numpy())


# -- models -----------------------------------------------------------------


@pytest.mark.whole
def test_batch_norm_statistics_are_averaged(connect):
    """Facts K7: Keras saves those of replica 0."""
    distribution = connect(2)
    with distribution.scope():
        model = keras.Sequential([keras.Input((1,)), L.BatchNormalization(momentum=0.0), L.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.array([[1.0], [1.0], [5.0], [5.0]])
    options = dict(batch_size=4, shuffle=False, verbose=0, check_agreement="off")
    tfdist.fit(model, x, x, distribution=distribution, **options)
    assert model.layers[0].moving_mean.numpy() == pytest.approx([3.0])


@pytest.mark.whole
def test_compiling_anew_starts_anew(connect):
    model = small(connect(1), optimizer=keras.optimizers.SGD(0.1))
    fit(model, connect(1))
    training_cases.compiled(model, keras.optimizers.SGD(0.0), metrics=[])
    before = model.get_weights()
    history = fit(model, connect(1))
    assert set(history.history) == {"loss"}
    training_cases.all_same(before, model.get_weights())


@pytest.mark.whole
def test_layers_frozen_after_a_fit_stay_as_they_are(connect):
    model = small(connect(2))
    fit(model, connect(2))
    model.layers[1].trainable = False
    model.compile("sgd", training_cases.sparse())
    with pytest.raises(tfdist.UserError, match=r"optimizer .* was created outside of the distribution's scope"):
        fit(model, connect(2))
    with connect(2).scope():
        model.compile("sgd", training_cases.sparse())
    before = model.layers[1].get_weights()
    fit(model, connect(2))
    np.testing.assert_array_equal(before[0], model.layers[1].get_weights()[0])


@pytest.mark.whole
def test_backup_and_restore_goes_on_where_it_does_in_keras(tmp_path):
    """Keras' callback tells only `fit` at which epoch; else finished epochs would be trained again."""

    class Failure(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("power cut")

    def twice(fit, folder):
        for more in ([Failure()], []):
            keras.utils.set_random_seed(3)
            model = training_cases.compiled(training_cases.dense())
            callbacks = [keras.callbacks.BackupAndRestore(folder), *more]
            with pytest.raises(RuntimeError) if more else contextlib.nullcontext():
                history = fit(model, callbacks)
        return training_cases.weights(model), history

    x, y = training_cases.images(61)
    options = dict(batch_size=24, epochs=4, shuffle=False, verbose=0)
    theirs, expected = twice(lambda m, c: m.fit(x, y, callbacks=c, **options), tmp_path / "keras")
    ours, history = twice(lambda m, c: tfdist.fit(m, x, y, callbacks=c, **options), tmp_path / "tfdist")
    assert training_cases.distance(ours, theirs) < 1e-6
    assert history.epoch == expected.epoch == [2, 3]


@pytest.mark.whole
def test_arrays_of_another_float_are_cast_as_keras_does():
    """float64, NumPy's own type, would not multiply with a model's float32 constants."""

    class Scaled(keras.layers.Layer):
        def call(self, inputs):
            return inputs * tf.constant([1.0, 2.0, 3.0])

    def trained(fit):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((3,)), Scaled(autocast=False), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        fit(model)
        return training_cases.weights(model)

    x = np.random.default_rng(0).normal(size=(32, 3))
    y = x.sum(1, keepdims=True).astype("float16")
    options = dict(batch_size=8, shuffle=False, verbose=0)
    ours = trained(lambda model: tfdist.fit(model, x, y, **options))
    assert training_cases.distance(ours, trained(lambda model: model.fit(x, y, **options))) < 1e-6


@pytest.mark.whole
def test_a_late_metric_that_hands_on_other_shapes():
    """F1 of class numbers, as people write it."""

    class SparseF1(keras.metrics.F1Score):
        def update_state(self, y, outputs, sample_weight=None):
            super().update_state(keras.ops.one_hot(y, 5), outputs, sample_weight)

    def trained(fit):
        keras.utils.set_random_seed(3)
        model = training_cases.compiled(training_cases.dense(), metrics=[SparseF1(average="macro", name="f1")])
        return fit(model).history["f1"]

    x, y = training_cases.images(61)
    options = dict(batch_size=24, epochs=3, shuffle=False, verbose=0)
    ours = trained(lambda model: tfdist.fit(model, x, y, **options))
    np.testing.assert_allclose(ours, trained(lambda model: model.fit(x, y, **options)), rtol=1e-5)


def simple(distribution=None):
    keras.utils.set_random_seed(0)
    with distribution.scope() if distribution else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    return model


class Replicas(tfdist.Callback):
    """Notes on how many replicas there are while it trains."""

    def on_train_batch_begin(self, batch, logs=None):
        self.seen = self.model.distribute_strategy.num_replicas_in_sync


@pytest.mark.parametrize("measured", first(0, [False, True]))
def test_the_connected_distribution_is_used_where_none_is_given(measured, said):
    """It trained on one of the devices that were connected, without a word."""
    x, y = np.random.default_rng(0).normal(size=(10, 4)).astype("float32"), np.ones((10, 1), "float32")
    two, _ = (tfdist.connect("mirrored", virtual_devices=n) for n in (2, 3))
    model, plain, noted = simple(two), simple(), Replicas()
    tfdist.fit(model, x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[noted], check_agreement="on")
    assert noted.seen == 2, "the one under which the model was created, though another is the latest"
    assert any("1 and 2 replicas agree" in line for line in said)
    plain.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    training_cases.all_same(model.get_weights(), plain.get_weights(), rtol=1e-5)
    if measured:
        found, expected = tfdist.evaluate(model, x, y, verbose=0)["mae"], plain.evaluate(x, y, verbose=0)[1]
        assert found == pytest.approx(expected, 1e-5)
        np.testing.assert_allclose(tfdist.predict(model, x, verbose=0), plain.predict(x, verbose=0), rtol=1e-5)
    refused = r"created under \w*DefaultDistributionStrategy and is used with the distribution 'mirrored': create it"
    for call in (tfdist.fit, tfdist.evaluate):
        with pytest.raises(tfdist.UserError, match=refused):
            call(simple(), x, y, verbose=0)
    with pytest.raises(tfdist.UserError, match=refused):
        tfdist.predict(simple(), x, verbose=0)
    if measured:
        tfdist.fit(simple(), x, y, verbose=0, distribution=tfdist.connect("default"))


def test_devices_that_keras_would_choose_are_refused(connect):
    x, model = np.ones((8, 4), "float32"), simple()
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]))
    try:
        for call in (tfdist.fit, tfdist.evaluate):
            with pytest.raises(tfdist.UserError, match=r"^keras.distribution.set_distribution\(DataParallel\) has no"):
                call(model, x, x[:, :1], verbose=0)
    finally:
        keras.distribution.set_distribution(None)
    tfdist.fit(model, x, x[:, :1], verbose=0)
