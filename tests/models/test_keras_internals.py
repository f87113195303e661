"""Keras' private parts that tfdist leans on. A failure here says which of them moved, and why it matters."""

import contextlib
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import training_cases
from tensorflow.python.framework.func_graph import FuncGraph

import tfdist
from tfdist.engine.step import optimizer_update


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
                with optimizer_update.owned(optimizer):
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


def test_owned_leaves_the_optimizer_as_it_was():
    optimizer = keras.optimizers.Adam(use_ema=True)
    before = dict(vars(optimizer))
    with optimizer_update.owned(optimizer):
        assert not optimizer.use_ema
    assert vars(optimizer) == before


def test_the_loss_of_a_compiled_model_is_a_list_of_losses_by_path():
    model = training_cases.compile_two_outputs()
    x, y = training_cases.two_outputs_data(4)
    model.evaluate(x, y, verbose=0)
    entries = model._compile_loss._flat_losses
    assert [e.name for e in entries] == ["kind", "size"]
    assert [e.loss_weights for e in entries] == [0.7, 2.0]
    assert all(isinstance(e.loss, keras.losses.Loss) for e in entries)
    assert entries[0]._replace(loss=None).path == ("kind",)
    assert [m.name for m in model._compile_loss._metrics] == ["kind_loss", "size_loss"]


def test_metrics_of_a_compiled_model():
    model = training_cases.compile_two_outputs()
    x, y = training_cases.two_outputs_data(4)
    model.evaluate(x, y, verbose=0)
    compiled = model._compile_metrics
    assert [[m.name for m in group.metrics] for group in compiled._flat_metrics] == [["accuracy"], ["mae"]]
    assert len(compiled._flatten_y(y)) == 2
    metric = compiled._flat_metrics[0].metrics[0]
    assert type(metric).update_state is keras.metrics.MeanMetricWrapper.update_state
    assert metric._fn is keras.metrics.sparse_categorical_accuracy
    assert {metric.total.path, metric.count.path} == {v.path for v in metric.variables}


@pytest.mark.parametrize("make", [lambda: keras.optimizers.Adam(), lambda: keras.optimizers.AdamW(weight_decay=0.1)])
def test_slots_of_fused_optimizers(make):
    optimizer, variable = make(), keras.Variable([1.0, 2.0])
    optimizer.build([variable])
    slots = [*optimizer._momentums, *optimizer._velocities]
    assert len(slots) == 2
    assert {id(s) for s in slots} <= {id(v) for v in optimizer.variables}
    assert optimizer.weight_decay is None or optimizer._use_weight_decay(variable)


def test_the_rest_of_what_is_borrowed():
    model = training_cases.dense()
    assert isinstance(model._call_has_training_arg, bool)
    assert [type(layer).__name__ for layer in model._flatten_layers()][-1] == "Dense"
    x = keras.layers.Embedding(5, 2, mask_zero=True)(np.array([[1, 0]]))
    assert x._keras_mask.numpy().tolist() == [[True, False]]
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


def test_an_all_reduce_in_a_forward_pass_is_traced_without_a_search(connect, monkeypatch):
    """TensorFlow looks for variables through the whole graph, for each layer: minutes, for a deep network."""
    from tensorflow.python.ops import op_selector

    from tfdist.engine.step import trace_patches

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
            with trace_patches.quick() if quick else contextlib.nullcontext():
                return distribution.local(distribution.run(replica, ()))

        walks.clear()
        return [float(slope) for slope in traced()], len(walks)

    plain, searched = slopes(quick=False)
    mine, unsearched = slopes(quick=True)
    assert mine == plain == [36.0, 36.0]  # of (x1 + x2) ** 2 on both replicas, summed
    assert searched and not unsearched


def test_nothing_keeps_the_graphs_of_a_fit(connect):
    """TensorFlow enters the gradients of all-reduces into a registry for good, with the graph around them."""
    graphs = lambda: (gc.collect(), sum(isinstance(o, FuncGraph) for o in gc.get_objects()))[1]
    before = graphs()
    case = next(c for c in training_cases.CASES if c.name == "batch norm, synchronized")
    model = training_cases.build(case, connect(2), case.precision)
    tfdist.fit(model, case.data(48), distribution=connect(2), batch_size=24, epochs=1, verbose=0)
    assert graphs() > before
    del model
    assert graphs() == before


def test_layers_are_named_alike_whenever_a_model_is_built():
    """Else `model.freeze` would find other names in the second model of a process."""
    from tfdist import config
    from tfdist.data.spec import Spec
    from tfdist.models import build as models

    def names():
        model = models.build(config.Experiment(), Spec((8, 8, 1), "uint8", 10, 16.0))
        return [layer.name for layer in model.layers]

    assert names() == names() and "conv2d" in names()
