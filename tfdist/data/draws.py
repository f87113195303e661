"""What functions of a `tf.data.Dataset` draw from: variables, generators of Python's and NumPy's, random operations."""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.config import user_functions

_READING = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"}  # that only read their variable
_PYTHON = {"PyFunc", "EagerPyFunc"}
_GENERATORS = np.random.Generator, np.random.RandomState, random.Random
_GLOBAL = np.random.normal.__self__, random.random.__self__  # type: ignore[attr-defined]


def written(graph: tf.Graph, variables: list[tf.Variable]) -> list[tf.Variable]:
    """Returns which of these a graph may write: those that go to more than an operation that reads.

    All weights would be gigabytes to keep, for each replica.
    """
    of_handle = {id(v.handle): v for v in variables}
    captured = [(of_handle.get(id(outer)), inner) for outer, inner in graph.captures]
    return [v for v, inner in captured if v is not None and any(o.type not in _READING for o in inner.consumers())]


def drawn(dataset: tf.data.Dataset, seen: set[int]) -> list[Any]:
    """Returns the variables that functions of a data set write, such as a layer's seed, and the generators they use."""
    if id(dataset) in seen:  # the object whose methods are its functions may hold it
        return []
    seen.add(id(dataset))
    found = list[Any]()
    for function in dataset._functions():
        graph = function.function.graph
        found += written(graph, list(graph.variables))
        if any(operation.type in _PYTHON for operation in _operations(graph)):
            found += _generators(function._func, seen)
    found += [each for part in dataset._inputs() for each in drawn(part, seen)]
    return list({id(each): each for each in found}.values())


def _generators(function: object, seen: set[int]) -> list[Any]:
    """Returns the generators of Python's and NumPy's that a function reaches; the global ones if it names `random`."""
    found = list[Any]()
    for thing in list[Any](user_functions.reachable([function])):
        found += [each for each in (thing, getattr(thing, "__self__", None)) if isinstance(each, _GENERATORS)]
        found += _generators(thing._generator, seen) if type(thing).__name__ == "_GeneratorState" else []
        found += drawn(thing, seen) if isinstance(thing, tf.data.Dataset) else []
        code = getattr(thing, "__code__", None) if user_functions.is_own(thing) else None
        if code and any(name == "random" for _, name in user_functions.operations(code)):
            found += _GLOBAL
    return found


def begins_anew(dataset: tf.data.Dataset) -> bool:
    """Returns whether it matters when an iterator of a data set begins.

    Random operations draw from their beginning again, and Python or a callback may have set a variable in between.
    """
    graphs = [function.function.graph for function in dataset._functions()]
    moves = lambda o: "seed2" in o.node_def.attr or o.type in _PYTHON
    found = any(graph.variables or any(map(moves, _operations(graph))) for graph in graphs)
    return found or any(map(begins_anew, dataset._inputs()))


def _operations(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the operations of a graph and of the functions within it, such as branches of `tf.cond`."""
    inner = [each.graph for each in graph._functions.values()]
    return [*graph.get_operations(), *(operation for each in inner for operation in _operations(each))]


@contextlib.contextmanager
def unmoved(dataset: tf.data.Dataset) -> Iterator[None]:
    """Restores what functions of a data set draw from: a look at a batch draws as much as is read ahead meanwhile."""
    before = [_as_now(source) for source in drawn(dataset, set())]
    try:
        yield
    finally:
        for put_back in before:
            put_back()


def _as_now(source: Any) -> Callable[[], object]:
    """Returns a function that gives a variable or generator the state that it has now."""
    if isinstance(source, tf.Variable):
        return functools.partial(source.assign, source.numpy())
    if isinstance(source, np.random.Generator):
        return functools.partial(setattr, source.bit_generator, "state", source.bit_generator.state)
    if isinstance(source, random.Random):
        return functools.partial(source.setstate, source.getstate())
    return functools.partial(source.set_state, source.get_state())
