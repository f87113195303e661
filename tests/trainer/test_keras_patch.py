"""`patch_keras`: what a script does with Keras alone comes out as with Keras alone, on any number of replicas."""

import contextlib
import dataclasses
import functools
import gc
import importlib
import weakref
from concurrent import futures

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.covering import first
from support.training_cases import all_same

import tfdist
from tfdist.distributed import connect as connect_lib
from tfdist.trainer import keras_patch

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(45, 6)).astype("float32"), RNG.integers(0, 3, 45)


class Scores(keras.callbacks.Callback):
    """Measures the model in the middle of its training, as scripts do."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(self.model.evaluate(X[:15], Y[:15], verbose=0))


class Tuned(keras.Sequential):
    """A task of its own, as those of KerasHub."""

    def fit(self, x=None, y=None, **options):
        return super().fit(x * 2.0, y, **options)


def compiled(run_eagerly=False):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    with tf.distribute.get_strategy().scope():
        model = Tuned([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(),
                       keras.layers.Dense(3)])  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = keras.optimizers.Adam(0.01, clipnorm=0.5)
    model.compile(adam, loss, metrics=["accuracy"], run_eagerly=run_eagerly)
    return model


def trained():
    model = compiled()
    model.fit(X, Y, shuffle=False, verbose=0, batch_size=45)
    return model.get_weights()


def script(run_eagerly=False):
    """Returns the numbers that a script sees."""
    model = compiled(run_eagerly)
    loss = model.loss
    scores = Scores()
    weights = np.linspace(0, 1, 45)
    options = dict(epochs=2, shuffle=False, verbose=0, batch_size=15, sample_weight=weights, callbacks=[scores])
    history = model.fit(X, Y, validation_data=(X[:15], Y[:15]), **options)
    rate = float(model.optimizer.learning_rate)
    named = model.evaluate(X, Y, verbose=0, return_dict=True), model.test_on_batch(X, Y, return_dict=True)
    outputs = model(X[:7])
    losses = [float(loss(Y[:7], outputs)), float(model.compute_loss(X[:7], Y[:7], outputs))]
    last = model.fit(X, Y, shuffle=False, verbose=0)
    return [
        *(history.history[name] for name in sorted(history.history)),
        last.history["loss"],
        scores.seen,
        losses,
        *map(list, map(dict.values, named)),  # in the order of Keras
        model.evaluate(X, Y, verbose=0),
        [model.evaluate(X, Y, verbose=0, return_dict=True)["loss"], rate],
        model.predict(X, verbose=0),
        *model.get_weights(),
    ]


@pytest.fixture
def patched(connect):
    def install(replicas, peers=None, **options):
        distribution = dataclasses.replace(connect(replicas), peers=peers) if peers else connect(replicas)
        keras_patch.install(keras_patch.KerasPatch(distribution, **options))
        return distribution

    yield install
    tfdist.unpatch_keras()


@pytest.mark.parametrize("replicas", [2, *(pytest.param(n, marks=pytest.mark.whole) for n in (1, 3))])
def test_a_script_sees_the_numbers_of_one_device(replicas, patched):
    expected = script(run_eagerly=True)  # the same numbers, and nothing to trace
    patched(replicas)
    all_same(script(), expected, rtol=2e-5, atol=2e-6)


class OwnSteps(keras.Model):
    """Logs its metrics as Keras' guide writes it: the compiled ones are one metric with several results."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=outputs)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.measured(y, outputs, loss)

    def test_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        outputs = self(x, training=False)
        return self.measured(y, outputs, self.compute_loss(x=x, y=y, y_pred=outputs))

    def measured(self, y, outputs, loss):
        for metric in self.metrics:
            metric.update_state(loss) if "loss" in metric.name else metric.update_state(y, outputs)
        return {metric.name: metric.result() for metric in self.metrics}


@pytest.mark.parametrize("replicas", first(1, [1, 2]))
def test_results_of_compiled_metrics_that_own_steps_log_have_names_of_their_own(replicas, patched):
    def logs():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6,))
        model = OwnSteps(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        options = dict(shuffle=False, verbose=0, batch_size=15, validation_data=(X[:30], Y[:30]))
        history = model.fit(X, Y, validation_batch_size=15, **options).history
        named = [model.evaluate(X, Y, 15, 0, return_dict=True), model.train_on_batch(X, Y, return_dict=True)]
        return {k: v[0] for k, v in history.items()}, dict(zip("ab", model.evaluate(X, Y, 15, 0))), *named

    expected = logs()
    patched(replicas)
    for ours, theirs in zip(logs(), expected):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert set(expected[0]) == {"loss", "mae", "val_loss", "val_mae"}


class Unbuilt(keras.Model):
    """Creates its weights when its step is first run, and counts how often Python goes through that."""

    measured = OwnSteps.measured

    def __init__(self):
        super().__init__()
        self.hidden, self.last, self.runs = keras.layers.Dense(8), keras.layers.Dense(3), 0

    def call(self, x):
        outputs = self.last(self.hidden(x))
        return {"scores": outputs, "sums": keras.ops.sum(outputs, -1)}

    def train_step(self, data):
        self.runs += 1
        return OwnSteps.train_step(self, data)


def test_a_step_that_creates_the_weights_is_traced_twice_however_often_fit_is_called(patched):
    """And what `call` returns by name, `predict` does."""

    def numbers():
        keras.utils.set_random_seed(1)
        model = Unbuilt()
        loss = {"scores": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "sums": "mse"}
        model.compile(keras.optimizers.SGD(0.1), loss, metrics={"scores": "accuracy"})
        targets = {"scores": Y, "sums": X[:, 0]}
        logs = [model.fit(X, targets, 15, verbose=0, shuffle=False).history["loss"] for _ in range(3)]
        runs.append(model.runs)
        return {"losses": logs, **model.predict(X, verbose=0)}

    runs = []
    expected = numbers()
    patched(1)
    found = numbers()
    assert found.keys() == expected.keys() == {"losses", "scores", "sums"}
    all_same(found.values(), expected.values(), rtol=1e-5, atol=1e-6)
    assert runs[1] == 2


def test_options_of_tfdist_are_taken_and_misspelled_ones_refused(patched, tmp_path):
    patched(1)
    model = keras.Sequential([keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    model.fit(X, X[:, :3], verbose=0, checkpoints=tfdist.Checkpoints(tmp_path))
    assert any(tmp_path.iterdir())
    with pytest.raises(tfdist.UserError, match=r"no option 'epoch': did you mean 'epochs'\?"):
        model.fit(X, Y, epoch=3)


@pytest.mark.whole
def test_batch_norm_is_left_with_a_warning(patched, said):
    patched(2, sync_batch_norm=False)
    assert trained() and any("WARNING: sync_batch_norm is off" in line for line in said)


def test_strategies_of_a_script_are_the_running_one(patched, said):
    own = tf.distribute.MirroredStrategy
    running = patched(2).strategy
    made = tf.distribute.MirroredStrategy(["CPU:0"])
    assert made is tf.distribute.MultiWorkerMirroredStrategy() is tf.distribute.get_strategy() is running
    assert tf.distribute.OneDeviceStrategy("CPU:0") is tf.distribute.experimental.CentralStorageStrategy() is running
    assert isinstance(made, tf.distribute.MirroredStrategy) and "is the running strategy" in said[-1]
    for module in (tf.compat.v1, importlib.import_module("tensorflow.compat.v1")):  # TensorBoard exchanges them
        module.reset_default_graph()  # as keras.utils.clear_session() does
        assert tf.distribute.get_strategy() is running
    with made.scope():
        keras.utils.clear_session()
    tfdist.unpatch_keras()
    assert tf.distribute.MirroredStrategy is own and tf.distribute.get_strategy() is not running


@pytest.mark.whole
def test_devices_that_a_script_sets_up_are_those_that_are_there(patched, said):
    patched(2)
    tf.config.set_visible_devices([], "CPU")
    tf.config.threading.set_intra_op_parallelism_threads(64)
    tf.config.experimental.set_memory_growth(tf.config.list_physical_devices("CPU")[0], True)
    assert len([line for line in said if "changes nothing: the devices have been set up" in line]) == 3
    assert trained()


@pytest.mark.whole
def test_a_saved_model_of_the_script_is_called_and_trained_upon(patched, tmp_path):
    patched(2)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.export(tmp_path, verbose=False)
    loaded = keras.layers.TFSMLayer(tmp_path, call_endpoint="serve", trainable=False)
    above = keras.Sequential([keras.Input((6,)), loaded, keras.layers.Dense(1, kernel_initializer="zeros")])
    above.compile("sgd", "mse")
    above.fit(X, Y, batch_size=45, verbose=0)
    gradient = -2 * np.mean(np.asarray(model(X)) * Y[:, None], 0)
    np.testing.assert_allclose(above.get_weights()[-2][:, 0], -0.01 * gradient, rtol=1e-5)
    ways = tf.saved_model.load, tf.compat.v1.saved_model.load_v2, tf.compat.v2.saved_model.load
    served = [load(tmp_path) for load in ways]
    for outputs in *(each.serve(X) for each in served), keras.Sequential([loaded]).predict(X, verbose=0):
        np.testing.assert_allclose(outputs, model(X), rtol=1e-6)


def test_a_folder_that_several_workers_remove_is_gone(tmp_path):
    """As by KerasTuner's `overwrite`, whose workers meet before."""
    for number in range(300):
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder" / str(number)).touch()
    remove = keras_patch.removing_together(tf.io.gfile.rmtree)
    with futures.ThreadPoolExecutor(4) as pool:
        assert [*pool.map(remove, [str(tmp_path / "folder")] * 4)] == [None] * 4
    assert not (tmp_path / "folder").exists()


def test_calls_of_fit_see_the_examples_in_different_orders(patched):
    seen = []

    class Orders(keras.layers.Layer):
        def call(self, inputs):
            tf.py_function(lambda rows: seen.append(rows.numpy()[:, 0].tolist()), [inputs], [])
            return inputs

    patched(1)
    for seed in (5, 5, 6):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([Orders(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        seen.clear()
        for _ in range(2):
            model.fit(X, Y, verbose=0, batch_size=45)
        first, second = (rows for rows in seen if len(rows) == 45)
        assert sorted(first) == sorted(second) and first != second


@pytest.mark.parametrize("replicas, force", [(1, False), pytest.param(2, True, marks=pytest.mark.whole)])
def test_functions_that_are_made_anew_see_what_has_changed(replicas, force, patched):
    """`make_train_function(force=True)` and its like had no effect: changed layers computed as before."""

    def made(run_eagerly=False):
        def numbers():
            of_batch = model.test_on_batch(X, Y), model.predict_on_batch(X), model.train_on_batch(X, Y)
            measured, predicted = model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)
            history = model.fit(X, Y, batch_size=15, shuffle=False, verbose=0).history
            return [*of_batch, measured, predicted, history["loss"]]

        model = compiled(run_eagerly)
        numbers()
        for activation in (keras.activations.tanh, keras.activations.sigmoid):
            model.layers[0].activation = activation
            for kind in ("train", "test", "predict"):
                setattr(model, f"{kind}_function", None)
                getattr(model, f"make_{kind}_function")(force=True) if force else None
            found = numbers()
        return found

    keras.utils.set_random_seed(3)
    expected = made(run_eagerly=True)
    patched(replicas)
    keras.utils.set_random_seed(3)
    for ours, theirs in zip(made(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_no_model_is_kept(patched):
    patched(1)
    for call in ("fit", "test_on_batch"):
        model = compiled()
        getattr(model, call)(X, Y)
        known = weakref.ref(model)
        del model
        gc.collect()
        assert known() is None


def test_the_check_is_left_out_on_request(patched, said):
    patched(2, check_agreement="off")
    trained()
    assert said and not any("checking" in line for line in said)


class Annealed(keras.Model):
    """Reads a number that a callback changes before each batch."""

    def __init__(self):
        super().__init__()
        self.dense, self.weight = keras.layers.Dense(1, kernel_initializer="ones"), 0.0

    def call(self, x):
        return self.dense(x) + self.weight


class OfItsOwn(Annealed):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize("kind, replicas", [(Annealed, 2), (OfItsOwn, 1)])
def test_code_of_the_user_s_is_traced_once_as_in_keras(kind, replicas, patched):
    """The last batch, which is shorter, had a function of its own, with what numbers were when it was first met."""

    def weights():
        model = kind()
        model.compile("sgd", "mse")
        change = lambda batch, logs: setattr(model, "weight", model.weight + 0.1)
        callback = keras.callbacks.LambdaCallback(on_train_batch_begin=change)
        model.fit(X[:10], Y[:10], 4, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
        return model.get_weights()

    expected = weights()
    patched(replicas)
    for ours, theirs in zip(weights(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.whole
def test_the_latest_connection_is_patched_in(monkeypatch, connect, said):
    try:
        tfdist.patch_keras(connect(2))
        two = trained()
        assert any("synchronized over the replicas (layers: 1)" in line for line in said)
        monkeypatch.setattr(connect_lib, "_CONNECTED", {})  # as in a process that has not connected it yet
        assert tfdist.connect("default").strategy is not tf.distribute.get_strategy()
        tfdist.patch_keras()
        assert tf.distribute.get_strategy().num_replicas_in_sync == 1
        all_same(trained(), two, rtol=2e-5, atol=2e-6)
    finally:
        tfdist.unpatch_keras()


def test_what_another_library_has_replaced_is_not_replaced_again(connect, monkeypatch):
    monkeypatch.setattr(keras.Model, "fit", lambda model, *args: "logged", raising=False)
    with pytest.raises(tfdist.UserError, match=r"keras.Model.fit has been replaced by .*: call tfdist.patch_keras\("):
        tfdist.patch_keras(connect(1))


class PredictsInAThread(keras.callbacks.Callback):
    def on_predict_begin(self, logs=None):
        with futures.ThreadPoolExecutor(1) as pool:
            self.answer = pool.submit(self.predict, self.model, np.ones((4, 6)), verbose=0).result()


@pytest.mark.parametrize("world", first(1, ["patched replicas", "replicas", "one device"]))
def test_threads_that_call_at_once_are_refused_on_several_replicas(patched, connect, world):
    """Workers were said to have other data, and a replica trained on what the check of another thread had changed."""
    if world != "replicas":
        patched(1 if world == "one device" else 2)
    distribution = connect(2)
    with distribution.scope() if world == "replicas" else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    callback = PredictsInAThread()
    callback.predict = keras.Model.predict
    if world == "one device":
        np.testing.assert_array_equal(model.predict(np.ones((4, 6)), callbacks=[callback], verbose=0), callback.answer)
        return
    direct = functools.partial(tfdist.predict, distribution=distribution)
    callback.predict = predict = direct if world == "replicas" else keras.Model.predict
    with pytest.raises(tfdist.UserError, match="threads of the script call models at once"):
        predict(model, np.ones((4, 6)), callbacks=[callback], verbose=0)


def test_patching_twice_changes_nothing(connect):
    theirs = keras.Model.fit
    distribution = connect(1)
    tfdist.patch_keras(distribution)
    once = keras.Model.fit
    tfdist.patch_keras(distribution)
    assert keras.Model.fit is once is not theirs
    tfdist.unpatch_keras()
    tfdist.unpatch_keras()
    assert keras.Model.fit is theirs
