"""Private names of Keras' layers and models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import keras
import tensorflow as tf
from keras.src.utils import naming

from tfdist.data.structures import Structure
from tfdist.keras_bridge.keras_internals.replacing import replaced


def flat_layers(layer: keras.Layer, include_self: bool = True, recursive: bool = True) -> list[keras.Layer]:
    """Returns the layers within a layer or model; `model.layers` leaves out those inside of layers."""
    return list(layer._flatten_layers(include_self, recursive))


def own_trainable_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the weights that a layer has itself and trains unless it is frozen.

    `layer.trainable_variables` also has those of layers inside it, and none at all of a frozen layer.
    """
    return list(layer._trainable_variables)


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the weights that a layer has itself; `layer.weights` also has those of the layers inside it."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def own_metrics(layer: keras.Layer) -> list[keras.Metric]:
    """Returns the metrics that a layer has itself; `layer.metrics` also has those of the layers inside it."""
    return list(layer._metrics)


def takes_training(model: keras.Model) -> bool:
    """Returns whether the model's `call` has an argument `training`; Keras has read the signature, wrappers and all."""
    return bool(model._call_has_training_arg)


def fixed_batch(model: keras.Model) -> int | None:
    """Returns the batch size that a model was made for, or None; a model that is no graph of layers has no inputs."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    return inputs[0].shape[0] if inputs else None


def input_structure(model: keras.Model) -> Structure:
    """Returns the inputs nested as the model takes them, where Keras' own exporters look; `model.inputs` is flat."""
    return getattr(model, "_inputs_struct", model.inputs[0])


def producing_layer(tensor: keras.KerasTensor) -> object:
    """Returns the layer or operation that a symbolic tensor comes from; in public, only layers know their outputs."""
    return tensor._keras_history.operation


def is_seed(variable: keras.Variable) -> bool:
    """Returns whether a variable is the state of a random generator, which only its path tells."""
    return "seed_generator" in variable.path


@contextlib.contextmanager
def added_losses(model: keras.Model, make: Callable[[], object]) -> Iterator[None]:
    """Replaces, within it, the list in which each layer collects its `add_loss`; nothing public says where to.

    Args:
      make: makes an empty one, with `extend`, `clear` and slices.
    """
    layers = flat_layers(model)
    theirs = [layer._losses for layer in layers]
    for layer in layers:
        vars(layer)["_losses"] = make()
    try:
        yield
    finally:
        for layer, losses in zip(layers, theirs):
            losses.clear()
            vars(layer)["_losses"] = losses


def adding_losses(model: keras.Model) -> list[str]:
    """Returns the names of the layers that have added losses in the last call; in public there is only one list."""
    return [layer.name for layer in flat_layers(model) if len(layer._losses)]


def is_random(layer: keras.Layer) -> bool:
    """Returns whether a layer draws random numbers in training alone; only its attributes and signature tell."""
    seeded = any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values())
    return seeded and bool(layer._call_has_training_arg)


def calls(by_layer: Mapping[keras.Layer, Callable]) -> AbstractContextManager[None]:
    """Gives layers another `call`, within it."""
    return replaced("call", by_layer)


def batch_moments(by_layer: Mapping[keras.layers.BatchNormalization, Callable]) -> AbstractContextManager[None]:
    """Replaces, within it, what computes mean and variance of (inputs, mask) in each of these layers.

    Keras has no option for how they are summed over replicas.
    """
    return replaced("_moments", by_layer)


def remat_mode(layer: keras.Layer) -> str:
    """Returns the mode of the `keras.RematScope` in which a layer was created, empty for none; only a record says."""
    return getattr(getattr(layer, "_remat_mode", None), "mode", None) or ""


@contextlib.contextmanager
def computing_in(model: keras.Model, dtype: str) -> Iterator[None]:
    """Lets all layers, within it, compute in a type, and leaves their variables as they are.

    A policy has a public name for float16 and bfloat16 on float32 variables only.
    """
    layers = flat_layers(model)
    theirs = [vars(layer)["_dtype_policy"] for layer in layers]
    for layer in layers:
        policy = keras.DTypePolicy("float32")
        policy._compute_dtype, policy._variable_dtype = dtype, layer.variable_dtype
        vars(layer)["_dtype_policy"] = policy
    try:
        yield
    finally:
        for layer, policy in zip(layers, theirs):
            vars(layer)["_dtype_policy"] = policy


def reset_layer_names() -> None:
    """Lets Keras number layers from the start; the public `clear_session` would also delete the state of others."""
    naming.reset_uids()


def mask_of(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the mask that a layer has attached to its output, or None; Keras hands it on as an attribute only."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: tf.Tensor, mask: tf.Tensor) -> None:
    """Attaches a mask to a tensor that tfdist has sliced or brought out of XLA, which loses it."""
    tensor._keras_mask = mask
