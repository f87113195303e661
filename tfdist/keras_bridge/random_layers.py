"""Layers that draw random numbers in training, held still: what is left is the same on any number of replicas."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator

import keras

from tfdist.cluster.env_vars import HOLD
from tfdist.keras_bridge import keras_internals


@contextlib.contextmanager
def held(model: keras.Model, others: Iterable[keras.Layer] = ()) -> Iterator[None]:
    """Calls random layers, while a step is traced within it, as for inference: they pass on what they get.

    Args:
      others: layers that are called so, too.
    """
    layers = {layer: layer for layer in keras_internals.flat_layers(model) if keras_internals.is_random(layer)}
    layers |= {layer: layer for layer in others}
    with keras_internals.calls({layer: _inference(layer.call) for layer in layers}):
        yield


def as_the_environment_says(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Holds random layers of a run that only checks others."""
    return held(model) if os.environ.get(HOLD) else contextlib.nullcontext()


def _inference(call: Callable) -> Callable:
    return lambda *args, **kwargs: call(*args, **{**kwargs, "training": False})
