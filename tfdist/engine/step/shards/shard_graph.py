"""What the graph of a shard may not have in it, since it would make a shard depend on the device that computes it."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from tfdist.errors import UserError
from tfdist.models import keras_internals

RANDOM = (
    "AllCandidateSampler",
    "FixedUnigramCandidateSampler",
    "FractionalAvgPool",
    "FractionalMaxPool",
    "LearnedUnigramCandidateSampler",
    "LogUniformCandidateSampler",
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomCrop",
    "RandomGamma",
    "RandomPoisson",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "RngReadAndSkip",
    "RngSkip",
    "SampleDistortedBoundingBox",
    "SampleDistortedBoundingBoxV2",
    "StatefulRandomBinomial",
    "StatefulStandardNormal",
    "StatefulStandardNormalV2",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "StatefulUniformFullInt",
    "StatefulUniformInt",
    "ThreadUnsafeUnigramCandidateSampler",
    "TruncatedNormal",
    "UniformCandidateSampler",
)
"""Operations whose numbers depend on what a device has drawn before."""
PYTHON = ("EagerPyFunc", "PyFunc")
"""Operations that call Python, which may draw numbers and keep a state that no graph shows; `PyFuncStateless` promises
that it does not."""
_WRITES = ("Assign", "ResourceScatter")
"""How the names of operations begin that change a variable."""


def check(graph: tf.Graph, own: set[int]) -> None:
    """Refuses what would make a shard depend on the device that computes it, or on what that has computed before.

    Args:
      graph: of a shard.
      own: ids of the tensors in it that are variables which `ShardState` takes care of.

    Raises:
      UserError: naming what it is.
    """
    functions = graph.as_graph_def().library.function
    kinds = {op.type for op in graph.get_operations()} | {node.op for f in functions for node in f.node_def}
    for kind in sorted(kinds.intersection(RANDOM)):
        raise UserError(
            f"the model draws random numbers by TensorFlow's {kind}, which depend on the device: draw them by "
            "keras.random with a keras.random.SeedGenerator that is an attribute of the layer, or leave shards out"
        )
    for kind in sorted(kinds.intersection(PYTHON)):
        raise UserError(
            f"the model calls Python ({kind}), whose random numbers and counts would depend on the device: use "
            "tf.numpy_function(..., stateful=False) if it has none, or leave shards out"
        )
    if any(id(variable) not in own for variable in _written(graph)):
        raise UserError(
            "a forward pass changes a variable that is no state of a layer or metric (a trained weight, or that of "
            "a keras.random call without a seed), which cannot be added up over shards: make it a weight with "
            "trainable=False, give the call a SeedGenerator of the layer, or leave shards out"
        )


def _written(graph: tf.Graph) -> Iterator[tf.Tensor]:
    """Yields the variables that are changed in a graph, or in a branch, a loop or a function that it calls."""
    handles = {id(variable.handle) for variable in graph.variables}
    variables = {id(inner) for outer, inner in graph.captures if id(outer) in handles}
    for op in graph.get_operations():
        if op.type.startswith(_WRITES):
            yield op.inputs[0]
            continue
        only_read = keras_internals.only_read(op)
        if only_read is not None:  # which may have tables among its resources, too
            yield from (t for i, t in enumerate(op.inputs) if id(t) in variables and i not in only_read)
