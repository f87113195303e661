"""What functions of a `tf.data.Dataset` draw from: variables, generators of Python's and NumPy's, random operations."""

import contextlib
import functools
import itertools
import random
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.config import user_functions

_READING = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"}  # that only read their variable
_PYTHON = {"PyFunc", "EagerPyFunc"}
_IN_MEMORY = {"_TensorDataset", "_TensorSliceDataset", "_RangeDataset"}
_GENERATORS = np.random.Generator, np.random.RandomState, random.Random
_GLOBAL = np.random.normal.__self__, random.random.__self__  # type: ignore[attr-defined]


def written(graph: tf.Graph, variables: list[tf.Variable]) -> list[tf.Variable]:
    """Returns which of these a graph may write: those that go to more than an operation that reads.

    All weights would be gigabytes to keep, for each replica.
    """
    of_handle = {id(v.handle): v for v in variables}
    captured = [(of_handle.get(id(outer)), inner) for outer, inner in graph.captures]
    return [v for v, inner in captured if v is not None and any(o.type not in _READING for o in inner.consumers())]


def _things(dataset: tf.data.Dataset, seen: set[int]) -> Iterator[Any]:
    """Yields the data sets of which one is made, and what functions of Python's that they run reach."""
    if id(dataset) in seen:  # the object whose methods are its functions may hold it
        return
    seen.add(id(dataset))
    yield dataset
    runs_python = lambda f: any(operation.type in _PYTHON for operation in _operations(f.function.graph))
    pending = list[Any](user_functions.reachable(f._func for f in dataset._functions() if runs_python(f)))
    while pending:
        thing = pending.pop()
        if isinstance(thing, tf.data.Dataset):
            yield from _things(thing, seen)
            continue
        yield thing
        if type(thing).__name__ == "_GeneratorState":
            pending += user_functions.reachable([thing._generator])
    for part in dataset._inputs():
        yield from _things(part, seen)


def drawn(dataset: tf.data.Dataset) -> list[Any]:
    """Returns the variables that functions of a data set write, such as a layer's seed, and the generators they use.

    Of Python's and NumPy's, the global ones if a function names `random`.
    """
    found = list[Any]()
    for thing in _things(dataset, set()):
        if isinstance(thing, tf.data.Dataset):
            graphs = [function.function.graph for function in thing._functions()]
            found += [variable for graph in graphs for variable in written(graph, list(graph.variables))]
            continue
        found += [each for each in (thing, getattr(thing, "__self__", None)) if isinstance(each, _GENERATORS)]
        code = getattr(thing, "__code__", None) if user_functions.is_own(thing) else None
        if code and any(name == "random" for _, name in user_functions.operations(code)):
            found += _GLOBAL
    return list({id(each): each for each in found}.values())


class _Counts:
    """What functions of Python's in a data set may set, such as the number of a pass over it."""

    def __init__(self, dataset: tf.data.Dataset):
        things = [*_things(dataset, set())]
        self._moves = any(hasattr(type(thing), "__next__") for thing in things)  # which would go on alone
        self._sizes = [(thing, len(thing)) for thing in things if isinstance(thing, dict | list)]
        self._before = [(owner, key, _entry(owner, key)) for owner, key in itertools.chain(*map(_entries, things))]

    def put_back(self) -> bool:
        """Sets it again, unless more than that has changed; returns whether any had changed."""
        changed = [(owner, key, old) for owner, key, old in self._before if _entry(owner, key) is not old]
        if self._moves or any(len(thing) != size for thing, size in self._sizes):
            return False
        for owner, key, old in changed:
            owner.__setitem__(key, old) if isinstance(owner, dict | list) else setattr(owner, key, old)
        return bool(changed)


def _entries(thing: Any) -> list[tuple[Any, Any]]:
    """Returns what something holds that may be set: entries of (dict or list, key), or attributes of (object, name)."""
    if isinstance(thing, dict | list):
        return [(thing, key) for key in (thing if isinstance(thing, dict) else range(min(len(thing), 100)))]
    if not isinstance(thing, types.FunctionType) or not user_functions.is_own(thing):
        kind = thing if isinstance(thing, type) else type(thing)
        own = user_functions.is_own(kind) or kind is types.SimpleNamespace
        return [(thing, name) for name in user_functions.attributes(thing) if own and name[:2] != "__"]
    names = {name for kind, name in user_functions.operations(thing.__code__) if kind == "LOAD_GLOBAL"}
    read: list[tuple[Any, Any]] = [(thing.__globals__, name) for name in names if name in thing.__globals__]
    read += [(cell, "cell_contents") for cell in thing.__closure__ or () if cell != types.CellType()]
    values = [_entry(*place) for place in read]
    return read + [e for v in values if not isinstance(v, types.FunctionType | types.ModuleType) for e in _entries(v)]


def _entry(owner: Any, key: Any) -> Any:
    """Returns what is there now; the object itself where it is gone."""
    try:
        owner = vars(owner) if isinstance(owner, type) else owner  # or each class method would be bound anew
        return owner[key] if isinstance(owner, dict | list | types.MappingProxyType) else getattr(owner, key)
    except (LookupError, AttributeError, ValueError):
        return owner


def begins_anew(dataset: tf.data.Dataset, files_stay: bool) -> bool:
    """Returns whether an iterator of a data set may give something else where it begins later.

    Random operations draw from their beginning again; and a callback may have changed variables, tables, files and what
    Python knows. `files_stay`: the data set reads what nothing writes meanwhile.
    """

    def moves(o: tf.Operation) -> bool:
        reads = o.op_def.is_stateful or "File" in o.type or any(t.dtype == tf.resource for t in o.inputs)
        return "seed2" in o.node_def.attr or o.type in _PYTHON or (reads and not files_stay)

    graphs = [function.function.graph for function in dataset._functions()]
    in_memory = files_stay or dataset._inputs() or type(dataset).__name__ in _IN_MEMORY
    parts = [begins_anew(part, files_stay) for part in dataset._inputs()]
    return not in_memory or any(parts) or any(map(moves, (o for graph in graphs for o in _operations(graph))))


def _operations(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the operations of a graph and of the functions within it, such as branches of `tf.cond`."""
    inner = [each.graph for each in graph._functions.values()]
    return [*graph.get_operations(), *(operation for each in inner for operation in _operations(each))]


@contextlib.contextmanager
def unmoved(dataset: tf.data.Dataset) -> Iterator[None]:
    """Restores what functions of a data set draw from: a look at a batch draws as much as is read ahead meanwhile."""
    before, counts = [_as_now(source) for source in drawn(dataset)], _Counts(dataset)
    try:
        yield
    finally:
        for put_back in before:
            put_back()
        if counts.put_back():
            COUNTING.add(dataset)


COUNTING = weakref.WeakSet[tf.data.Dataset]()
"""Those of which a look has been seen to count."""


def _as_now(source: Any) -> Callable[[], object]:
    """Returns a function that gives a variable or generator the state that it has now."""
    if isinstance(source, tf.Variable):
        return functools.partial(source.assign, source.numpy())
    if isinstance(source, np.random.Generator):
        return functools.partial(setattr, source.bit_generator, "state", source.bit_generator.state)
    if isinstance(source, random.Random):
        return functools.partial(source.setstate, source.getstate())
    return functools.partial(source.set_state, source.get_state())
