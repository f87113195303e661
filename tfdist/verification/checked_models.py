"""Which models have passed the check, in the user's cache by a digest of all that decides about it."""

import hashlib
import pathlib
import types

import keras
import tensorflow as tf

from tfdist.config import cpu_kernels, local_files, user_functions
from tfdist.data.spec import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.keras_bridge import keras_internals, preconditions, row_mixing
from tfdist.verification.equivalence_probe import Comparison

_WRAPPERS = keras.layers.TFSMLayer, keras.layers.JaxLayer, keras.layers.FlaxLayer, keras.layers.TorchModuleWrapper
"""Layers of Keras' that compute what somebody else has written."""


def fingerprint(model: keras.Model, distribution: Distribution, rows: Structure, comparison: Comparison) -> str:
    """Returns a digest of all that decides whether replicas agree on a model: its settings and the versions.

    Only a training depends on optimizers, and a prediction not even on losses. It is empty if some of the code is the
    user's own, and the model is to be checked each time: globals, files and data may decide what that computes.
    """
    import tfdist

    kind = comparison.kind
    if may_be_rare(model, kind):
        return ""
    layers, compiled = keras_internals.flat_layers(model), _compiled(model, kind)
    parts: list[str] = [tf.__version__, keras.__version__, tfdist.__version__, distribution.name]
    parts += [str(distribution.replicas), kind, str(comparison), distribution.jit, cpu_kernels.in_use()]
    parts += [f"{tuple(t.shape)} {t.dtype}" for t in keras.tree.flatten(rows)]
    try:
        for layer in layers:
            parts += _description(layer)
        parts += [f"{v.name} {v.shape} {v.dtype} {v.trainable}" for v in model.variables]
        for used in compiled:
            parts += _description(used)
    except (TypeError, ValueError, NotImplementedError):
        return ""
    text = "\n".join(parts)
    # Keras numbers the layers of a process: the same model has other names each time that it is built.
    optimizers = preconditions.optimizers(model) if kind == "train" else []
    for number, name in enumerate(dict.fromkeys(thing.name for thing in [*layers, *optimizers])):
        text = text.replace(repr(name), f"#{number}")
    return hashlib.sha256(text.encode()).hexdigest()


def _compiled(model: keras.Model, kind: str) -> list:
    """Returns what `compile` was given that decides about a computation."""
    optimizers = preconditions.optimizers(model) if kind == "train" else []
    return [*optimizers, *(keras_internals.compiled_with(model) if kind != "predict" else [])]


def runs_own(model: keras.Model, kind: str) -> bool:
    """Returns whether some of the code of a computation is not Keras'."""
    methods = {"train": preconditions.TRAINING, "test": preconditions.EVALUATION, "predict": preconditions.PREDICTION}
    layers = keras_internals.flat_layers(model)
    own = preconditions.replaced(model, methods[kind]) or any(isinstance(layer, _WRAPPERS) for layer in layers)
    return bool(own) or user_functions.runs_own([*layers, *_compiled(model, kind)])


def may_be_rare(model: keras.Model, kind: str) -> bool:
    """Returns whether a computation may look across a batch for rare rows or later weights only."""
    return runs_own(model, kind) or bool(row_mixing.operation(model))


def folder() -> pathlib.Path:
    return local_files.cache("checked")


def _description(thing: object) -> list[str]:
    """Returns the settings of an object of Keras'."""
    if isinstance(thing, str | int | float | bool | None):
        return [repr(thing)]
    if isinstance(thing, dict):
        return [part for key, value in thing.items() for part in (repr(key), *_description(value))]
    if isinstance(thing, list | tuple):
        return [part for value in thing for part in _description(value)]
    kind = thing if isinstance(thing, type | types.FunctionType) else type(thing)
    parts = [f"{kind.__module__}.{kind.__qualname__}"]
    if not isinstance(thing, type) and hasattr(thing, "get_config"):
        parts.append(repr(thing.get_config()))
    return parts
