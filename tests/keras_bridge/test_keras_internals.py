"""Keras' private parts that tfdist leans on, where no training shows soon that one of them has moved."""

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
from tfdist.keras_bridge import keras_internals

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


def test_losses_that_users_call_keep_their_value(connect):
    """Else a loss function that calls a loss object would count once per replica too little."""
    distribution = connect(2)
    loss = keras.losses.MeanSquaredError()
    values = lambda: distribution.local(distribution.run(lambda: loss([[1.0]], [[3.0]]), ()))
    assert [float(v) for v in values()] == [2.0, 2.0], "Keras no longer divides: unscaled_losses can go"
    with keras_internals.unscaled_losses():
        assert [float(v) for v in values()] == [4.0, 4.0]
    assert [float(v) for v in values()] == [2.0, 2.0]


def test_a_column_is_added_to_rows():
    a, column = np.arange(9.0).reshape(3, 3), np.arange(3.0)[:, None]
    assert not np.array_equal(keras.ops.add(a, column), a + column), "Keras does: rows_are_no_bias can go"
    with keras_internals.rows_are_no_bias():
        for b in (column, column[:, 0], column.T, 2.0, column.astype("int32")):
            np.testing.assert_array_equal(keras.ops.add(a, b), a + b)


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


@pytest.mark.whole
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


def test_seeds_of_random_layers_have_a_name():
    """By it, each replica's random layers get a stream of their own."""
    random = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5)])
    assert [v.path.split("/")[-1] for v in random.non_trainable_variables] == ["seed_generator_state"]


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


def test_layers_are_named_alike_whenever_a_model_is_built():
    """Else `model.freeze` would find other names in the second model of a process."""
    from tfdist import config
    from tfdist.data.spec import Spec
    from tfdist.models import build as models

    def names():
        model = models.build(config.Experiment(), Spec((8, 8, 1), "uint8", 10, 16.0))
        return [layer.name for layer in model.layers]

    assert names() == names() and "conv2d" in names()


def test_loops_are_differentiated_as_under_a_tape_that_is_not_persistent():
    x = tf.Variable(2.0)

    @tf.function(autograph=False)
    def gradients(nested):
        of_user = tf.GradientTape() if nested else contextlib.nullcontext()
        with tf.GradientTape(persistent=True) as tape, keras_internals.recording(tape), of_user as inner:
            _, y = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * x), [0, x.value()])
            z = inner.gradient(y, x) if nested else 3 * y
        return [tape.gradient(value, x) for value in ((z,) if nested else (y, z))]

    with keras_internals.plain_gradients():
        assert [float(g) for g in gradients(False)] == [32, 96]
        assert [float(g) for g in gradients(True)] == [48], "of a tape of the user's own"
    functions = gradients.get_concrete_function(False).graph.as_graph_def().library.function
    assert not any("cflow_gradient_wrapper" in f.signature.name for f in functions), "plain_gradients does nothing"
