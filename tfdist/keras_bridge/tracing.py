"""Patches of Keras and TensorFlow while a step is traced."""

from __future__ import annotations

import contextlib
import inspect
import os
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
        keras_internals.without_gradient_registry(),
        keras_internals.unscaled_losses(),
        layer_state.separate_losses(model),
        batch_norm.synchronized(model, replicas),
    ):
        yield


_RECOMPUTING = {"inner", "inner_recompute_grad"}
"""Functions of TensorFlow's module in which `tf.recompute_grad` calls what it was given."""
_MODULE = inspect.unwrap(tf.recompute_grad).__code__.co_filename


@contextlib.contextmanager
def recomputation_refused() -> Iterator[None]:
    """Raises, after a trace within it, if a layer has written a variable inside of `tf.recompute_grad`.

    That computes everything a second time in the backward pass: a dropout layer that moves on its seed draws another
    mask for the gradient than for the loss, and BatchNormalization averages its statistics twice, without an error.
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


def inference_only(model: keras.Model, others: Iterable[keras.Layer] = ()) -> contextlib.AbstractContextManager[None]:
    """Calls random layers, and `others`, while a step is traced within it, as for inference: they pass on inputs."""
    layers = {id(layer): layer for layer in [*keras_internals.random_layers(model), *others]}
    return keras_internals.replaced("call", [(layer, _inference(layer.call)) for layer in layers.values()])


def _inference(call: Callable) -> Callable:
    return lambda *args, **kwargs: call(*args, **{**kwargs, "training": False})
