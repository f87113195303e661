"""Private names of TensorFlow where it meets Keras: strategies, and its bookkeeping of gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf
from tensorflow.python.distribute.distribute_lib import ReplicaContextBase, StrategyBase
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.framework import ops
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import custom_gradient, gen_math_ops

from tfdist.keras_bridge.keras_internals.replacing import PATCHED


@contextlib.contextmanager
def one_replica_in_sync() -> Iterator[None]:
    """Lets strategies say, within it, that they have one replica: to Keras' losses, and to losses that ask for it.

    They say so in a replica only; a TPU's counts, outside of them, for how many it traces.
    """
    with PATCHED:
        theirs = StrategyBase.num_replicas_in_sync
        StrategyBase.num_replicas_in_sync = property(
            lambda strategy: theirs.fget(strategy) if tf.distribute.in_cross_replica_context() else 1
        )
        try:
            yield
        finally:
            StrategyBase.num_replicas_in_sync = theirs


@contextlib.contextmanager
def variables_as_numbers() -> Iterator[None]:
    """Lets `float(optimizer.learning_rate)` and `int(optimizer.iterations)` work, within it, under every strategy.

    Keras hands both to TensorFlow's variable, and that of a strategy has neither method, though the plain one has. So a
    callback that works on one device would end the training on two. Nothing public is between the two: the methods are
    added to TensorFlow's class.
    """

    def number(kind: type) -> Callable[[tf.Variable], object]:
        return lambda variable: kind(variable.numpy())

    added = [kind for kind in (float, int) if f"__{kind.__name__}__" not in vars(DistributedVariable)]
    for kind in added:
        setattr(DistributedVariable, f"__{kind.__name__}__", number(kind))
    try:
        yield
    finally:
        for kind in added:
            delattr(DistributedVariable, f"__{kind.__name__}__")


@contextlib.contextmanager
def gradient_bookkeeping(
    search: Callable[[Callable], Callable], entry: Callable[[Callable], Callable]
) -> Iterator[None]:
    """Replaces, within it, two functions of `tf.custom_gradient`, which has no option for either.

    Args:
      search: makes of TensorFlow's search for the variables that a function has read another one.
      entry: makes of what names a gradient's entry in TensorFlow's registry another one.
    """
    theirs = custom_gradient._get_dependent_variables, custom_gradient.generate_name
    custom_gradient._get_dependent_variables, custom_gradient.generate_name = search(theirs[0]), entry(theirs[1])
    try:
        yield
    finally:
        custom_gradient._get_dependent_variables, custom_gradient.generate_name = theirs


@contextlib.contextmanager
def sums_in_order() -> Iterator[None]:
    """Lets TensorFlow add up three tensors and more, within it, always from first to last.

    A gradient tape adds up with `add_n` what flows back into a tensor that is used several times, and has no option for
    how. That operation begins with whichever tensor's memory it may reuse, which is a matter of time.
    """

    def add_n(inputs: list[tf.Tensor], name: str | None = None) -> tf.Tensor:
        if len(inputs) < 3 or not (inputs[0].dtype.is_floating or inputs[0].dtype.is_integer):
            return theirs(inputs, name=name)
        return tf.reduce_sum(tf.stack(inputs), 0, name=name)

    with PATCHED:
        theirs = gen_math_ops.add_n
        gen_math_ops.add_n = add_n
        try:
            yield
        finally:
            gen_math_ops.add_n = theirs


def replica_context() -> type[tf.distribute.ReplicaContext]:
    """Returns the class with TensorFlow's `all_reduce`; the public `ReplicaContext` only inherits it."""
    return ReplicaContextBase


def forget_gradient(name: str) -> None:
    """Takes a gradient out of TensorFlow's registry, which in public only grows, and keeps the graphs of all."""
    ops.gradient_registry._registry.pop(name, None)


def only_read(op: tf.Operation) -> list[int] | None:
    """Returns the places of the resources that a branch, a loop or a call of a function leaves as they are.

    TensorFlow notes it for what must run in order. None of other operations; nothing public says what is changed in a
    function that another one calls.
    """
    try:
        return list(op.get_attr("_read_only_resource_inputs"))
    except ValueError:
        return None


def another_function(graph: tf.Graph) -> bool:
    """Returns whether what is being traced is a tf.function within that of `graph`, and not a branch or loop of it.

    Nothing public tells these apart.
    """
    now = tf.compat.v1.get_default_graph()
    return now is not graph and type(now) is FuncGraph
