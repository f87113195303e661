"""Patches of Keras and TensorFlow while a step is traced.

`tf.custom_gradient` walks back through the graph to find the variables that the function has read. An all-reduce reads
none, and the walk leads through the whole model of the other replicas, anew for each synchronized BatchNorm and
direction: of MobileNet's first epoch on two replicas it was three quarters. And it enters the gradient into
TensorFlow's registry for good, with the tensors it closes over: the graph of each `fit` stayed in memory, 130 MB of
MobileNet's.

`tf.recompute_grad` computes wrongly what draws random numbers or counts: in the backward pass it does so a second time.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster.env_vars import HOLD
from tfdist.errors import UserError
from tfdist.keras_bridge import batch_norm, keras_internals, layer_state


@contextlib.contextmanager
def patched(model: keras.Model, replicas: int) -> Iterator[None]:
    """Lets Keras and TensorFlow trace a step for `replicas` replicas, over all workers, of which each is a part."""
    with (
        recomputation_refused(),
        inference_only(model) if os.environ.get(HOLD) else contextlib.nullcontext(),  # a run that only checks others
        without_gradient_registry(),
        keras_internals.unscaled_losses(),
        layer_state.separate_losses(model),
        batch_norm.synchronized(model, replicas),
    ):
        yield


_inside = threading.local()  # replicas are traced in threads that take turns within an all-reduce


@contextlib.contextmanager
def without_gradient_registry() -> Iterator[None]:
    """Lets all-reduces look for no variables while a step is traced; afterwards nothing keeps their gradients."""
    context = keras_internals.replica_context()
    all_reduce = context.all_reduce
    entered: list[str] = []

    def reduce(self: tf.distribute.ReplicaContext, *arguments: object, **options: object) -> object:
        before = getattr(_inside, "reduce", False)
        _inside.reduce = True
        try:
            return all_reduce(self, *arguments, **options)
        finally:
            _inside.reduce = before

    def search(theirs: Callable) -> Callable:
        return lambda input_ops, output_ops: [] if getattr(_inside, "reduce", False) else theirs(input_ops, output_ops)

    def entry(theirs: Callable) -> Callable:
        def name() -> str:
            new = theirs()
            if getattr(_inside, "reduce", False):
                entered.append(new)
            return new

        return name

    context.all_reduce = reduce
    try:
        with keras_internals.gradient_bookkeeping(search, entry):
            yield
    finally:
        context.all_reduce = all_reduce
        for name in entered:
            keras_internals.forget_gradient(name)


_RECOMPUTING = {"inner", "inner_recompute_grad"}
"""Functions of TensorFlow's module in which `tf.recompute_grad` calls what it was given."""
_MODULE = inspect.unwrap(tf.recompute_grad).__code__.co_filename


@contextlib.contextmanager
def recomputation_refused() -> Iterator[None]:
    """Raises, after a trace within it, if a layer has written a variable inside of `tf.recompute_grad`.

    A dropout layer that moves on its seed draws another mask for the gradient than for the loss, and BatchNormalization
    averages its statistics twice: wrong without an error.

    Raises:
      UserError: one has; it names the variable.
    """
    written: list[str] = []
    assign = keras.Variable.assign

    def noting(self: keras.Variable, value: Any) -> Any:
        if _recomputing():
            written.append(self.path)
        return assign(self, value)

    keras.Variable.assign = noting
    try:
        yield
    finally:
        keras.Variable.assign = assign
        if written:
            raise UserError(
                f"tf.recompute_grad is given a layer that writes {written[0]!r}: in the backward pass it would draw "
                "other random numbers, or count the batch twice; leave random layers and BatchNormalization out of it"
            )


def _recomputing() -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name in _RECOMPUTING and code.co_filename == _MODULE:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def inference_only(model: keras.Model, others: Iterable[keras.Layer] = ()) -> Iterator[None]:
    """Calls random layers, while a step is traced within it, as for inference: they pass on what they get.

    Args:
      others: layers that are called so, too.
    """
    layers = {layer: layer for layer in keras_internals.flat_layers(model) if keras_internals.is_random(layer)}
    layers |= {layer: layer for layer in others}
    with keras_internals.calls({layer: _inference(layer.call) for layer in layers}):
        yield


def _inference(call: Callable) -> Callable:
    return lambda *args, **kwargs: call(*args, **{**kwargs, "training": False})
