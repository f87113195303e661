"""What decides about a model besides its weights, as digests: compared on a resume, and in the memory of checks."""

import platform
import weakref
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import __version__
from tfdist.config import cpu_kernels, user_functions
from tfdist.config.user_functions import SETUP
from tfdist.data.spec import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.keras_bridge import keras_internals, preconditions, row_mixing
from tfdist.keras_bridge.object_digests import OF_MODEL, attributes, digest, of_object, text

ENCLOSED = f"{SETUP} with the weights of other models that it uses"
_VERSIONS = f" (Keras {keras.__version__}, Python {platform.python_version()})"
_FIRST: dict[int, tuple[weakref.ref, list[float]]] = {}  # enclosed weights by their ids
_STEERING = (
    *(keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler),
    keras.callbacks.SwapEMAWeights,
)
_WRAPPERS = keras.layers.TFSMLayer, keras.layers.JaxLayer, keras.layers.FlaxLayer, keras.layers.TorchModuleWrapper
"""Layers of Keras' that compute what somebody else has written."""


def of_model(model: keras.Model) -> dict[str, Any]:
    """Returns by name a digest of what a model computes with besides its weights.

    Such are settings and vocabularies of its layers, the operations between them, and what layers of the user's do and
    hold. The name differs between versions of Keras, which add settings, and of Python, which compile otherwise.
    """
    parts = [repr(keras_internals.vocabularies(model)), text(_graph(model), OF_MODEL)]
    layers = keras_internals.flat_layers(model)
    parts += [f"{layer.compute_dtype} {of_object(layer, model=model)}" for layer in layers]
    return {f"{SETUP}{_VERSIONS}": digest(parts)} | _enclosed(model, layers, ENCLOSED)


def of_losses(model: keras.Model) -> dict[str, Any]:
    """Returns by name a digest of the losses and metrics of a model."""
    given = [model.loss, *keras_internals.compiled_with(model)] if model.compiled else []
    made = digest([of_object(part, model=model) for part in keras.tree.flatten(given)])
    return {f"{SETUP} for its loss{_VERSIONS}": made} | _enclosed(model, given, f"{ENCLOSED} in its loss")


def _enclosed(model: keras.Model, roots: list, name: str) -> dict[str, Any]:
    """Returns by name numbers of the weights that objects reach beside those of the model, such as a teacher's."""
    known = {id(weight) for weight in model.variables}
    parts = [value for root in roots for value in (attributes(root), user_functions.own_attributes(root))]
    found = user_functions.reachable([*parts, *roots], (keras.Layer, keras.KerasTensor))
    layers = [thing for thing in found if isinstance(thing, keras.Layer)]
    weights = {id(w): w for layer in layers for w in layer.weights if id(w) not in known}
    for key, weight in weights.items():  # as it is first seen: a callback may average into a teacher
        if key not in _FIRST or _FIRST[key][0]() is not weight:
            value = np.asarray(keras.ops.convert_to_numpy(weight), np.float64)
            _FIRST[key] = weakref.ref(weight), [float(value.mean()), float(value.std())] if value.size else []
    return {name: sorted(number for key in weights for number in _FIRST[key][1])}


def of_callbacks(model: keras.Model, callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, str]:
    """Returns by name digests of callbacks that change a training: of Keras' together, of the user's by their class."""
    own = [c for c in callbacks if user_functions.is_own(type(c)) or isinstance(c, keras.callbacks.LambdaCallback)]
    of_keras = [callback for callback in callbacks if isinstance(callback, _STEERING) and callback not in own]
    facts = {f"{SETUP} for Keras' callbacks{_VERSIONS}": digest(list(map(of_object, of_keras)))}
    for callback in own:
        name = f"{SETUP} for its callback {type(callback).__name__}{_VERSIONS}"
        facts[name] = digest([facts.get(name, ""), of_object(callback, model=model)])
    return facts


def of_training(model: keras.Model) -> dict[str, Any]:
    """Returns by name digests of a model, what it was compiled with, and its optimizers.

    A learning rate that is a number counts before the first update alone, as callbacks set it in a training.
    """
    facts = of_model(model) | of_losses(model)
    updating = [one for optimizer in preconditions.optimizers(model) for one in keras_internals.updating(optimizer)]
    for number, optimizer in enumerate(updating, 1):
        rate = keras_internals.rate_setting(optimizer)
        is_number = isinstance(rate, keras.Variable)
        parts = [
            of_object(optimizer, (*OF_MODEL, "learning_rate"), model),
            "" if is_number else of_object(rate, model=model),
        ]
        facts[f"{SETUP} for optimizer {number}{_VERSIONS}"] = digest(parts)
        if is_number and not int(keras_internals.counter(optimizer).numpy()):
            facts[f"the learning rate of optimizer {number}"] = f"{float(keras.ops.convert_to_numpy(rate)):.7g}"
    return facts


def _graph(model: keras.Model) -> list:
    """Returns the operations of the graphs of layers with their arguments: of tensors, the operation they come from."""
    places = {id(tensor): f"input {i}" for i, tensor in enumerate(getattr(model, "inputs", None) or [])}
    place = lambda value: places.get(id(value), "input") if isinstance(value, keras.KerasTensor) else value
    found = []
    for number, node in enumerate(keras_internals.nodes(model)):
        given = keras.tree.map_structure(place, [*node.arguments.args, node.arguments.kwargs])
        own = "" if isinstance(node.operation, keras.Layer) else node.operation  # layers are described elsewhere
        found.append([type(node.operation).__name__, own, given])
        places |= {id(tensor): f"{number}.{i}" for i, tensor in enumerate(node.output_tensors)}
    return [*found, [place(tensor) for tensor in getattr(model, "outputs", None) or []]]


def fingerprint(model: keras.Model, distribution: Distribution, rows: Structure, kind: str, comparison: str) -> str:
    """Returns a digest of all that decides whether replicas agree on a model: its settings and the versions.

    Only a training depends on optimizers, and a prediction not even on losses. It is empty if some of the code is the
    user's own, and the model is to be checked each time: globals, files and data may decide what that computes.
    """
    if may_be_rare(model, kind):
        return ""
    parts = [tf.__version__, __version__, distribution.name, str(distribution.replicas), distribution.jit]
    parts += [kind, comparison, cpu_kernels.in_use(), *(f"{t.shape} {t.dtype}" for t in keras.tree.flatten(rows))]
    parts += [f"{v.shape} {v.dtype} {v.trainable}" for v in model.variables]
    parts += [f"{layer.trainable} {getattr(layer, 'synchronized', '')}" for layer in keras_internals.flat_layers(model)]
    compiled = {"train": of_training, "test": of_losses}.get(kind, of_model)(model)
    return digest([*parts, *(of_model(model) | compiled).values()])


def runs_own(model: keras.Model, kind: str) -> bool:
    """Returns whether some of the code of a computation is not Keras'."""
    methods = {"train": preconditions.TRAINING, "test": preconditions.EVALUATION, "predict": preconditions.PREDICTION}
    layers = keras_internals.flat_layers(model)
    own = preconditions.replaced(model, methods[kind]) or any(isinstance(layer, _WRAPPERS) for layer in layers)
    compiled = [*preconditions.optimizers(model)] if kind == "train" else []
    compiled += keras_internals.compiled_with(model) if kind != "predict" else []
    return bool(own) or user_functions.runs_own([*layers, *compiled])


def may_be_rare(model: keras.Model, kind: str) -> bool:
    """Returns whether a computation may look across a batch for rare rows or later weights only."""
    return runs_own(model, kind) or bool(row_mixing.operation(model))
