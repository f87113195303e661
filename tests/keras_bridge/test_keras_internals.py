"""Keras' private parts that tfdist leans on. A failure here says which of them moved, and why it matters."""

import ast
import contextlib
import gc
import pathlib
import re
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import training_cases
from tensorflow.python.framework import config
from tensorflow.python.framework.func_graph import FuncGraph

import tfdist
from tfdist.data import sources
from tfdist.keras_bridge import keras_internals, layer_state, optimizer_update
from tfdist.step import step_calls

PACKAGE = pathlib.Path(tfdist.__file__).parent
INTERNALS = [PACKAGE / "keras_bridge" / "keras_internals.py"]
PRIVATE_OF_OTHERS = {
    "_exit",  # os
    "_generate_examples",  # which every builder of `datasets` implements, in data/datasets/huggingface.py
    "_get_function",  # TensorFlow's graph, in monitoring/flops.py
    "_functions",  # of a `tf.data.Dataset` and of TensorFlow's graph, in data/draws.py
    "_func",  # of one of these, the same
    "_generator",  # of `tf.data.Dataset.from_generator`, the same
    "_inputs",  # of a `tf.data.Dataset`, the same, and in data/batches.py
    "_reshuffle_each_iteration",  # the same
    "_initialize_local_devices",  # TensorFlow's strategy, in distributed/strategies/multi_worker.py
}


def private_names(path):
    """Private names of other objects than the module's own, with their lines: attributes, and their names as texts."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        name = None
        if isinstance(node, ast.Attribute):
            own = ast.unparse(node.value) in ("self", "cls", "super()")
            name = None if own else node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
        if name and re.fullmatch("_[a-z]\\w*", name) and name not in ("_replace", "_asdict"):  # public, of named tuples
            found.setdefault(name, node.lineno)
    return found


def test_private_names_of_keras_are_used_in_one_folder_only():
    """So that one folder shows what a new Keras may break."""
    of_keras = {name: line for path in INTERNALS for name, line in private_names(path).items()}
    assert "_compile_loss" in of_keras and "_last_batch_seen" in of_keras
    for path in PACKAGE.rglob("*.py"):
        if path in INTERNALS:
            continue
        tree = ast.parse(path.read_text())
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for name, line in private_names(path).items():
            where = f"{path.relative_to(PACKAGE)}:{line}: {name}"
            assert name not in of_keras, f"{where} belongs into keras_bridge/keras_internals"
            assert name not in attributes or name in PRIVATE_OF_OTHERS, f"{where} is private: of which object?"
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        assert not any(module.startswith("keras.src") for module in modules), path


def test_optimizers_reduce_through_the_method_that_is_replaced(connect):
    """K11: without the replacement an optimizer sums the reduced gradients once more, and weights differ."""
    distribution = connect(2)

    def weights_after_one_update(owned):
        with distribution.scope():
            variable = keras.Variable(1.0)
            optimizer = keras.optimizers.RMSprop(0.1)
            optimizer.build([variable])
        calls = []
        original = type(optimizer)._all_reduce_sum_gradients
        if not owned:
            optimizer._all_reduce_sum_gradients = lambda pairs: (calls.append(1), original(optimizer, pairs))[1]

        @tf.function
        def step():
            if owned:
                with optimizer_update.OwnedOptimizer(optimizer).tracing():
                    distribution.run(lambda: optimizer.apply([tf.constant(0.001)], [variable]), ())
            else:
                distribution.run(lambda: optimizer.apply([tf.constant(0.001)], [variable]), ())

        step()
        accumulated = float(optimizer.variables[2].numpy())
        return accumulated, calls

    summed, calls = weights_after_one_update(owned=False)
    once, _ = weights_after_one_update(owned=True)
    assert calls, "Keras no longer reduces through _all_reduce_sum_gradients"
    assert summed == pytest.approx(4 * once, rel=1e-4)  # the square of twice the gradient
    assert once == pytest.approx(0.1 * 0.001**2, rel=1e-4)


class Wrapping(keras.optimizers.Optimizer):
    """Hands its gradients on to another optimizer."""

    def __init__(self, inner):
        super().__init__(learning_rate=0.0)
        self.inner = inner

    def apply(self, grads, trainable_variables=None):
        self.inner.apply(grads, trainable_variables)


def test_optimizers_that_another_one_holds_do_not_reduce_either(connect):
    distribution = connect(2)
    with distribution.scope():
        variable, inner = keras.Variable(1.0), keras.optimizers.SGD(0.1)
        optimizer = Wrapping(inner)
        inner.build([variable])

    @tf.function
    def step():
        with optimizer_update.OwnedOptimizer(optimizer).tracing():
            distribution.run(lambda: optimizer.apply([tf.constant(1.0)], [variable]), ())

    step()
    assert float(variable.numpy()) == pytest.approx(0.9), "one gradient, not one for each replica"


def test_owned_leaves_the_optimizer_as_it_was():
    optimizer = keras.optimizers.Adam(use_ema=True)
    before = dict(vars(optimizer))
    with optimizer_update.OwnedOptimizer(optimizer).tracing():
        assert not optimizer.use_ema
    assert vars(optimizer) == before


def test_a_rate_of_ones_own_for_each_variable():
    """Else `lr_multipliers` would do nothing for optimizers that are not fused."""
    variables = [keras.Variable(1.0), keras.Variable(1.0)]
    optimizer = keras.optimizers.Lion(0.1, weight_decay=0.5)
    optimizer.build(variables)
    second = keras_internals.variable_key(optimizer, variables[1])
    factor = lambda v: 2.0 if keras_internals.variable_key(optimizer, v) == second else 1.0
    with keras_internals.scaled_rates(optimizer, factor):
        optimizer.apply([tf.constant(1.0)] * 2, variables)
    # Decay to 1 - rate x 0.5, then a step of the rate.
    assert [float(v.numpy()) for v in variables] == pytest.approx([0.95 - 0.1, 0.9 - 0.2])
    assert not {"update_step", "_apply_weight_decay", "_get_current_learning_rate"} & set(vars(optimizer))


def test_what_an_optimizer_knows_a_variable_by(connect):
    """Updates see a replica's copy: else all factors on the learning rate would be 1."""
    distribution = connect(2)
    with distribution.scope():
        variable, other = keras.Variable(1.0), keras.Variable(1.0)
        optimizer = keras.optimizers.SGD()
    key = keras_internals.variable_key(optimizer, variable)
    assert all(keras_internals.variable_key(optimizer, copy) == key for copy in variable.value.values)
    assert keras_internals.variable_key(optimizer, other) != key


def compiled_with_two_outputs():
    model = training_cases.compile_two_outputs()
    x, y = training_cases.two_outputs_data(4)
    model.evaluate(x, y, verbose=0)
    return model, x, y


def test_the_losses_of_a_compiled_model():
    """Else no loss could be taken apart into sums."""
    model, _, _ = compiled_with_two_outputs()
    entries = keras_internals.loss_entries(model)
    assert [e.name for e in entries] == ["kind", "size"]
    assert [e.loss_weights for e in entries] == [0.7, 2.0]
    assert all(isinstance(e.loss, keras.losses.Loss) for e in entries)
    assert [m.name for m in keras_internals.loss_metrics(model)] == ["loss", "kind_loss", "size_loss"]
    assert keras_internals.compiled_loss(training_cases.dense()) is None


def test_keras_matches_targets_outputs_and_losses():
    """Else a loss would be given the targets of another; and nothing of the recording may stay."""
    model, x, y = compiled_with_two_outputs()
    compiled, outputs = keras_internals.compiled_loss(model), model(x)
    losses = lambda: [entry.loss for entry in keras_internals.loss_entries(model)]
    before = losses()
    matched = keras_internals.matched_losses(compiled, y, outputs, None)
    assert [m.entry.name for m in matched] == ["kind", "size"]
    for one, name in zip(matched, ("kind", "size")):
        np.testing.assert_array_equal(one.y_true, y[name])
        np.testing.assert_array_equal(one.y_pred, outputs[name])
        assert one.sample_weight is None
    assert losses() == before
    assert [m.name for m in compiled.metrics] == ["kind_loss", "size_loss"]


def test_metrics_of_a_compiled_model():
    """Else metrics would be updated in many small operations, by filler too."""
    model, _, y = compiled_with_two_outputs()
    pairs = keras_internals.metric_arguments(model, y, y, None)
    assert [[m.name for m in pair.metrics] for pair in pairs] == [["accuracy"], ["mae"]]
    metric = pairs[0].metrics[0]
    assert type(metric).update_state is keras.metrics.MeanMetricWrapper.update_state
    assert keras_internals.averaged_function(metric) == (keras.metrics.sparse_categorical_accuracy, {})
    assert {metric.total.path, metric.count.path} == {v.path for v in metric.variables}


@pytest.mark.parametrize("make", [lambda: keras.optimizers.Adam(), lambda: keras.optimizers.AdamW(weight_decay=0.1)])
def test_slots_of_fused_optimizers(make):
    """Else the fused update would write its moments somewhere else than into what is saved."""
    optimizer, variable = make(), keras.Variable([1.0, 2.0])
    optimizer.build([variable])
    slots = next(zip(*keras_internals.adam_slots(optimizer)))
    assert {id(s) for s in slots} <= {id(v) for v in optimizer.variables} and slots[0] is not slots[1]
    assert optimizer.weight_decay is None or keras_internals.decays(optimizer, variable)


def test_what_does_not_decay():
    optimizer, variable = keras.optimizers.AdamW(weight_decay=0.1), keras.Variable([1.0])
    optimizer.exclude_from_weight_decay([variable])
    optimizer.build([variable])
    assert not keras_internals.decays(optimizer, variable)


def test_averages_of_the_weights():
    """Else `use_ema` would average nothing."""
    optimizer, variable = keras.optimizers.SGD(use_ema=True), keras.Variable([1.0, 2.0])
    optimizer.build([variable])
    (average,) = keras_internals.weight_averages(optimizer, [variable])
    assert average.shape == variable.shape and any(v is average for v in optimizer.variables)


def test_the_setting_of_the_learning_rate():
    """A resumed run keeps it, and a file that loads without tfdist has another schedule."""
    rate = keras_internals.rate_setting(keras.optimizers.SGD(0.5))
    assert isinstance(rate, keras.Variable) and float(rate.numpy()) == 0.5
    schedule = keras.optimizers.schedules.CosineDecay(0.5, 10)
    optimizer = keras.optimizers.SGD(schedule)
    assert keras_internals.rate_setting(optimizer) is schedule
    optimizer.learning_rate = other = keras.optimizers.schedules.CosineDecay(0.1, 10)
    assert keras_internals.rate_setting(optimizer) is other
    assert keras_internals.inner_optimizer(keras.optimizers.LossScaleOptimizer(optimizer)) is optimizer


def test_layers_within_layers():
    """Else freezing, layer rates and precision checks would leave some out."""
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="inside")], name="inner")
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.BatchNormalization(name="norm")])
    assert {"inner", "inside", "norm"} <= {layer.name for layer in keras_internals.flat_layers(model)}
    assert model in keras_internals.flat_layers(model)
    direct = keras_internals.flat_layers(model, include_self=False, recursive=False)
    assert "inside" not in {layer.name for layer in direct} and model not in direct
    norm = model.get_layer("norm")
    norm.trainable = False
    assert len(keras_internals.own_trainable_variables(norm)) == 2 and not norm.trainable_variables
    assert len(keras_internals.own_variables(norm)) == 4
    assert keras_internals.own_variables(inner) == []


def test_layers_compute_in_another_type_for_a_while():
    """Else a check that rounding hides would be repeated in float32."""
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.LayerNormalization(dtype="mixed_bfloat16")])
    x = np.random.default_rng(0).normal(size=(5, 3))
    before = model(x, training=False).dtype
    with keras_internals.computing_in(model, "float64"):
        assert model(x, training=True).dtype == tf.float64 and inner(x).dtype == tf.float64
        assert {v.dtype for v in model.weights} == {"float32"}
    assert model(x, training=False).dtype == before == tf.bfloat16 and inner(x).dtype == tf.float32


def test_the_metrics_of_a_layer_itself():
    """Else filler would be counted by a metric that a layer has, where it is not known of."""
    inner = keras.layers.Dense(2)
    inner.seen = keras.metrics.Sum(name="seen")
    model = keras.Sequential([keras.Input((3,)), inner])
    assert keras_internals.own_metrics(inner) == [inner.seen]
    assert inner.seen not in keras_internals.own_metrics(model)


def test_whether_a_model_takes_training():
    """Else dropout would stay off, or a model without the argument fail."""

    class Plain(keras.Model):
        def call(self, x):
            return x

    assert keras_internals.takes_training(training_cases.dense()) is True
    assert keras_internals.takes_training(Plain()) is False


def test_losses_that_users_call_keep_their_value(connect):
    """Else a loss function that calls a loss object would count once per replica too little."""
    distribution = connect(2)
    loss = keras.losses.MeanSquaredError()
    values = lambda: distribution.local(distribution.run(lambda: loss([[1.0]], [[3.0]]), ()))
    assert [float(v) for v in values()] == [2.0, 2.0], "Keras no longer divides: unscaled_losses can go"
    with keras_internals.unscaled_losses():
        assert [float(v) for v in values()] == [4.0, 4.0]
    assert [float(v) for v in values()] == [2.0, 2.0]


@pytest.mark.parametrize("name", ["F1Score", "FBetaScore", "R2Score", "AUC"])
def test_metrics_that_create_their_variables_late(name):
    """Else they would not be reset, and checkpoints be those of another model."""
    metric = getattr(keras.metrics, name)(**({"multi_label": True} if name == "AUC" else {}))
    y, outputs = tf.constant([[0.0, 1.0]]), tf.constant([[0.2, 0.9]])
    keras_internals.create_late_variables(metric, y, outputs)
    created = [id(v) for v in metric.variables]
    metric.update_state(y, outputs)
    assert created and [id(v) for v in metric.variables] == created
    if name == "R2Score":  # which takes one number per row, too
        keras_internals.create_late_variables(metric := keras.metrics.R2Score(), y[0], outputs[0][:, None])
        metric.update_state(y[0], outputs[0][:, None])
        assert float(metric.result()) == pytest.approx(0.9)


@pytest.mark.parametrize("kind", ["Adam", "Ftrl", "Lion", "Muon", "Nadam", "RMSprop", "SGD"])
def test_the_state_of_an_optimizer_is_whole_in_one_that_scales_losses(kind):
    """Else a resume would start Nadam's product of momenta anew."""
    alone, within = (getattr(keras.optimizers, kind)() for _ in range(2))
    scaling = keras.optimizers.LossScaleOptimizer(within)
    for optimizer in alone, scaling:
        optimizer.build([keras.Variable(np.ones((2, 2)))])
    added = 4  # counter, rate, steps and scale
    assert len(keras_internals.state(scaling)) == len(alone.variables) + added
    assert keras_internals.state(alone) == alone.variables


def test_the_epoch_that_a_backup_goes_back_to(tmp_path):
    model = training_cases.compiled(training_cases.dense())
    x, y = training_cases.images(8)
    callback = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    model.fit(x, y, epochs=3, verbose=0, callbacks=[callback])
    callback.set_model(model)
    callback.on_train_begin()
    assert keras_internals.restored_epoch(model) == 3
    assert keras_internals.restored_epoch(model) == 0


def test_methods_that_another_answers():
    """Else a callback's `model.predict` would end with an error on workers that share their variables."""
    one, other = training_cases.dense(), training_cases.dense()
    x, _ = training_cases.images(3)
    before = dict(vars(keras.Model))
    with keras_internals.measured_by(one, lambda *given: "e", lambda *given, **named: (given, named)):
        assert one.evaluate(x) == "e" and one.predict(x, verbose=0) == ((one, x), {"verbose": 0})
        assert other.predict(x, verbose=0).shape == keras.models.clone_model(one).predict(x, verbose=0).shape
        with keras_internals.measured_by(other, None, lambda *given: "o"):
            assert (other.predict(x), one.predict(x)) == ("o", ((one, x), {}))
        assert one.evaluate(x) == "e"
    assert dict(vars(keras.Model)) == before


def test_the_order_of_metrics():
    """Else `evaluate(return_dict=False)` would give other numbers than Keras' own in each place."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", metrics=["mae", "accuracy"])
    values = model.evaluate(np.ones((2, 2)), np.ones((2, 2)), verbose=0)
    logs = model.evaluate(np.ones((2, 2)), np.ones((2, 2)), verbose=0, return_dict=True)
    assert keras_internals.metrics_in_order(model, dict(sorted(logs.items()))) == values
    assert keras_internals.metrics_in_order(model, {"loss": 1.0}) == 1.0


def test_masks_travel_with_outputs():
    """Else padding would count in the loss."""
    x = keras.layers.Embedding(5, 2, mask_zero=True)(np.array([[1, 0]]))
    assert getattr(x, keras_internals.MASK).numpy().tolist() == [[True, False]]
    y = tf.zeros((1, 2, 3))
    assert not hasattr(y, keras_internals.MASK)
    setattr(y, keras_internals.MASK, tf.constant([[False, True]]))
    passed_on = keras.layers.Activation("tanh")(y)
    assert getattr(passed_on, keras_internals.MASK).numpy().tolist() == [[False, True]]


def test_which_layer_an_output_comes_from():
    """Else a model that ends with softmax would be trained on logits without a word."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Softmax()])
    assert keras_internals.producing_layer(model.outputs[0]) is model.layers[-1]


def test_inputs_as_a_model_takes_them():
    """Else an exported model would take a list where its user gives a dict."""
    inputs = {name: keras.Input((1,), name=name) for name in ("b", "a")}
    model = keras.Model(inputs, keras.layers.Add()(list(inputs.values())))
    structure = keras_internals.input_structure(model)
    assert {name: tensor.name for name, tensor in structure.items()} == {"a": "a", "b": "b"}
    assert keras_internals.input_structure(training_cases.dense()) is not None


def test_operations_that_must_be_deterministic(connect):
    """TensorFlow's own clock, which the steps read, ended every call then."""
    assert not keras_internals.is_deterministic()
    tf.config.experimental.enable_op_determinism()
    try:
        assert keras_internals.is_deterministic()
        with connect(2).scope():
            model = training_cases.compiled(training_cases.dense())
        tfdist.fit(model, training_cases.images(12), batch_size=4, verbose=0, distribution=connect(2))
        assert tfdist.evaluate(model, training_cases.images(12), distribution=connect(2))
    finally:
        config.disable_op_determinism()


def test_what_callbacks_keep_to_themselves(tmp_path):
    """A resumed ModelCheckpoint counts on, and a TensorBoard that profiles sees every update."""
    saves = vars(keras.callbacks.ModelCheckpoint(tmp_path / "a.keras"))
    assert [saves[name] for name in keras_internals.BATCHES_SEEN] == [0, None]
    assert vars(keras.callbacks.SwapEMAWeights())[keras_internals.EMA_IN_MODEL] is False
    assert not keras_internals.profiles_batches(keras.callbacks.TensorBoard(tmp_path, profile_batch=0))
    assert keras_internals.profiles_batches(keras.callbacks.TensorBoard(tmp_path, profile_batch=(2, 3)))


def test_variables_of_a_strategy_as_numbers(connect):
    """If TensorFlow's class gets these methods itself, `variables_as_numbers` can go."""
    with connect(2).scope():
        variable = keras.Variable(1.5)
    with pytest.raises(TypeError):
        float(variable)
    with keras_internals.variables_as_numbers(), keras_internals.variables_as_numbers():
        assert (float(variable), int(variable), float(variable.value)) == (1.5, 1, 1.5)
        assert np.array(variable.value) == keras.ops.convert_to_numpy(variable) == 1.5
    with pytest.raises(TypeError):
        int(variable)


def test_seeds_of_random_layers_have_a_name():
    """By it, each replica's random layers get a stream of their own."""
    random = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5)])
    assert [v.path.split("/")[-1] for v in random.non_trainable_variables] == ["seed_generator_state"]


def test_regularisers_come_last_in_losses():
    """What stands before them came from add_loss and is averaged over examples."""
    model = training_cases.dense(activity_regularizer="l2", kernel_regularizer="l1")
    model(np.ones((2, 4, 4, 1)))
    kernels = [v for v in model.trainable_variables if v.regularizer is not None]
    expected = [float(v.regularizer(v)) for v in kernels]
    assert [float(loss) for loss in model.losses[-len(kernels) :]] == pytest.approx(expected)
    assert len(model.losses) == 2 * len(kernels)


def test_the_promise_of_the_default_distribution(connect):
    """Its collectives are the identity, so the step asks nobody whether it is distributed."""
    distribution = connect(1)
    tensors = [tf.constant(1.0)]
    assert distribution.all_sum(tensors) is tensors
    assert distribution.local(7) == (7,)
    assert isinstance(distribution, tfdist.Distribution)


def test_a_tape_adds_up_gradients_in_one_order():
    """TensorFlow's `add_n` begins with a tensor whose memory it may reuse: now and then with another one."""

    def slope(ordered):
        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.sin(x) + tf.cos(x) + tf.exp(x)
            return tape.gradient(y, x)

        with keras_internals.sums_in_order() if ordered else contextlib.nullcontext():
            traced = tf.function(gradient, autograph=False).get_concrete_function(tf.TensorSpec([3]))
        return traced(tf.constant([0.1, 0.2, 0.3])).numpy(), [op.type for op in traced.graph.get_operations()]

    plain, theirs = slope(False)
    mine, ours = slope(True)
    assert mine == pytest.approx(plain, rel=1e-6)
    assert "AddN" in theirs and "AddN" not in ours


def test_which_resources_a_branch_or_a_loop_only_reads():
    """By it, shards refuse a weight that a pass changes within one."""
    read, written, call = tf.Variable(1.0), tf.Variable(1.0), tf.function(lambda: written.assign_add(1.0))

    def pass_(x):
        tf.cond(x > 0, lambda: written.assign(read), lambda: x)
        tf.while_loop(lambda i: i < 3, lambda i: (i + 1, written.assign_add(read))[:1], (0,))
        return call() + x

    graph = tf.function(pass_, autograph=False).get_concrete_function(tf.TensorSpec([])).graph
    of = {id(graph.capture(v.handle)): name for v, name in ((read, "read"), (written, "written"))}
    seen = []
    for op in graph.get_operations():
        only_read = keras_internals.only_read(op)
        if only_read is not None:
            seen.append((op.type, {of[id(t)]: i in only_read for i, t in enumerate(op.inputs) if id(t) in of}))
    both = {"read": True, "written": False}
    assert seen == [("If", both), ("While", both), ("StatefulPartitionedCall", {"written": False})]
    assert graph.variables and {id(v) for v in graph.variables} == {id(read), id(written)}


def test_an_all_reduce_in_a_forward_pass_is_traced_without_a_search(connect, monkeypatch):
    """TensorFlow looks for variables through the whole graph, for each layer: minutes, for a deep network."""
    from tensorflow.python.ops import op_selector

    distribution = connect(2)
    walks = []
    walk = op_selector.get_backward_walk_ops
    monkeypatch.setattr(op_selector, "get_backward_walk_ops", lambda *a, **k: (walks.append(1), walk(*a, **k))[1])

    def slopes(quick):
        def replica():
            x = tf.constant(3.0) * (tf.cast(distribution.replica_id(), tf.float32) + 1)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.square(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, x))
            return tape.gradient(y, x)

        @tf.function(autograph=False)
        def traced():
            with keras_internals.without_gradient_registry() if quick else contextlib.nullcontext():
                return distribution.local(distribution.run(replica, ()))

        walks.clear()
        return [float(slope) for slope in traced()], len(walks)

    plain, searched = slopes(quick=False)
    mine, unsearched = slopes(quick=True)
    assert mine == plain == [36.0, 36.0]  # of (x1 + x2) ** 2 on both replicas, summed
    assert searched and not unsearched


@pytest.mark.whole
def test_nothing_keeps_the_graphs_of_a_fit(connect):
    """TensorFlow enters the gradients of all-reduces into a registry for good, with the graph around them."""

    def graphs():
        for _ in range(2):  # a step is let go once its model has been collected
            gc.collect()
        return sum(isinstance(o, FuncGraph) for o in gc.get_objects())

    before = graphs()
    case = next(c for c in training_cases.CASES if c.name == "batch norm, synchronized")
    model = training_cases.build(case, connect(2), case.precision)
    tfdist.fit(model, case.data(48), distribution=connect(2), batch_size=24, epochs=1, verbose=0)
    assert graphs() > before
    there = weakref.ref(model)
    del model
    assert graphs() == before
    assert there() is None


def test_the_step_of_a_model_is_kept_beside_it(connect):
    """Another call uses it again, and nothing is hung on the model, where Keras' tracking would find it."""
    model, distribution = training_cases.compiled(training_cases.dense()), connect(1)
    before = set(vars(model))
    source = sources.as_source(*training_cases.images(24))
    step = step_calls.step_of(model, distribution, source)
    assert step_calls.step_of(model, distribution, source) is step
    assert {name for name in vars(model) if "tfdist" in name} == set() and before <= set(vars(model))
    model.compile("sgd", "mse")
    assert step_calls.step_of(model, distribution, source) is not step


def test_layers_are_named_alike_whenever_a_model_is_built():
    """Else `model.freeze` would find other names in the second model of a process."""
    from tfdist import config
    from tfdist.data.spec import Spec
    from tfdist.models import build as models

    def names():
        model = models.build(config.Experiment(), Spec((8, 8, 1), "uint8", 10, 16.0))
        return [layer.name for layer in model.layers]

    assert names() == names() and "conv2d" in names()


def test_a_function_within_another_is_told_from_a_branch():
    found = []

    @tf.function
    def outer(x):
        graph = tf.compat.v1.get_default_graph()
        look = lambda: (found.append(keras_internals.another_function(graph)), x)[1]
        return look() + tf.cond(x > 0, look, look) + tf.function(look, autograph=False)()

    outer(tf.constant(1.0))
    assert found == [False, False, False, True]


def test_writes_are_noted_with_what_was_there_before(connect):
    variable = tf.Variable(1.0)
    with connect(2).scope():
        mirrored = tf.Variable(0.0)
    with layer_state.noting_writes() as writes:
        variable.assign_add(2.0)
        variable.assign(5.0)
        tf.Variable(0.0).assign(1.0)
        connect(2).run(lambda: mirrored.assign_add(1.0), ())
    variable.assign(7.0)
    (one, before, threads), *copies = writes
    assert one is variable and before == 1.0 and len(threads) == 1
    assert [id(copy) for copy, *_ in copies] == [*map(id, mirrored.values)]
    assert len(copies[0].threads | copies[1].threads) == 2


def test_rows_draw_alike():
    """Of `keras.random`, as layers call it: with shapes that are known, or not, and no matter how often."""
    ones, seed = tf.ones([3, 50]), keras.random.SeedGenerator(1)
    draws = [
        lambda: keras.random.normal((3, 50), seed=seed),
        lambda: keras.random.uniform(tf.shape(ones), seed=seed),
        lambda: keras.random.randint((3, 50), 0, 9, seed=seed),
        lambda: keras.random.dropout(ones, 0.5, seed=seed),
    ]
    for draw in draws:
        with keras_internals.rows_draw_alike():
            first, second = np.asarray(draw()), np.asarray(tf.function(draw)())
            assert (first == first[:1]).all() and (first == second).all() and len(np.unique(first)) > 1
        assert (np.asarray(draw()) != first).any()
