"""What a model computes that has no place where all shapes are static and nothing but numbers is known, as on a TPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfdist.data.structures import Structure
from tfdist.errors import UserError
from tfdist.models import keras_internals

_OF_SIZE = re.compile(
    r"Where|Unique.*|DynamicPartition|NonMaxSuppression.*|ListDiff|Ragged.*|Sparse(Feature)?Cross(V2|Hashed)?"
)
"""Operations whose result has a shape that depends on the data."""
_OF_HOST = re.compile(
    r"(Eager)?PyFunc(Stateless)?|Print(V2)?|LookupTable.*|Timestamp|String.*|Decode(Jpeg|Png|Image).*"
)
"""Operations that only the host has."""


def check(model: keras.Model, forward: Callable[[Structure], Structure], x: Structure) -> None:
    """Refuses a model that takes text, asks Python or the host, or whose shapes depend on the data.

    Args:
      model: whose layers are named.
      forward: calls it.
      x: inputs of a few rows.

    Raises:
      UserError: naming the layer.
    """
    specs = keras.tree.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), x)
    graph = tf.function(forward, autograph=False).get_concrete_function(specs).graph
    bodies = {f.signature.name: f for f in graph.as_graph_def().library.function}
    inputs = {id(tensor.op) for tensor in graph.inputs}
    names = {layer.name for layer in keras_internals.flat_layers(model, include_self=False)}
    for operation in graph.get_operations():
        if id(operation) in inputs:
            continue  # who takes it is said, and not where it comes from
        tensors = [*operation.inputs, *operation.outputs]
        if any(tensor.dtype == tf.string for tensor in tensors):
            _refuse(operation.name, names, "takes text", "encode it as numbers in the data set")
        for kind in (operation.type, *_called(operation.node_def, bodies)):
            if _OF_HOST.fullmatch(kind):
                _refuse(operation.name, names, f"needs the host ({kind})", "move it into the data set")
            if _OF_SIZE.fullmatch(kind):
                what = f"gives shapes that depend on the data ({kind})"
                _refuse(operation.name, names, what, "pad to one shape and mask")


def _refuse(operation: str, layers: set[str], what: str, advice: str) -> None:
    parts = [re.sub(r"_\d+$", "", part) if part not in layers else part for part in operation.split("/")]
    name = next((part for part in reversed(parts) if part in layers), "")
    whose = f"layer {name!r}" if name else "the model"
    raise UserError(f"{whose} {what}, and replicas compute with numbers in static shapes here: {advice}")


def _called(node: tf.compat.v1.NodeDef, bodies: dict) -> Iterator[str]:
    """Yields the types of the operations in the branches, loops and functions that a node calls."""
    waiting, seen = [node], set()
    while waiting:
        for value in waiting.pop().attr.values():
            for name in (value.func.name, *(function.name for function in value.list.func)):
                if name in bodies and name not in seen:
                    seen.add(name)
                    waiting += bodies[name].node_def
                    yield from (inner.op for inner in bodies[name].node_def)
