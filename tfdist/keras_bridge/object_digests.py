"""Digests of objects: their settings, and what those of the user's do and hold, alike in each process.

What follows the process, the time or the calls is left out, or an unchanged script could not be resumed.
"""

import contextlib
import functools
import hashlib
import inspect
import json
import re
import time
import types
import weakref
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.config import user_functions
from tfdist.keras_bridge import keras_internals

_IDLE = {"seed", "verbose", "filepath", "filename", "log_dir", "backup_dir"}  # drawn, told by the time, or for show
_OF_PROCESS = ("seed", "synchronized", "code")
"""Settings that are drawn, that follow the number of replicas, or that have numbers of lines, as a Lambda's code."""
OF_MODEL = ("name", "layers", "input_layers", "output_layers", "dtype", "vocabulary", "build_config", "trainable")
"""Settings of layers that follow the process, or that are those of other layers."""
_SEEN: dict[int, tuple[weakref.ref, str]] = {}  # objects of the user's by their ids, with their digests
_BEGUN = time.monotonic()
_OPEN = set[int]()  # ids of the objects whose digests are being taken
_DRAWN = re.compile("seed|replica|path|time")  # within names of what follows the process
_WITH_STATE = keras.Layer, keras.callbacks.Callback, keras.optimizers.Optimizer, keras.Metric
_SETTINGS = keras.Loss, keras.Regularizer, keras.constraints.Constraint, keras.optimizers.schedules.LearningRateSchedule


def of_object(part: Any, left_out: Iterable[str] = OF_MODEL) -> str:
    """Returns a digest of an object's settings, and of what it does and holds if it is the user's.

    Of the user's it is that of the first time that it is seen, since calls and callbacks change what it holds.
    """
    is_own = user_functions.is_own(part if inspect.isfunction(part) else type(part))
    if is_own and (known := _SEEN.get(id(part))) and known[0]() is part:
        return known[1]
    if id(part) in _OPEN:  # it holds itself
        return ""
    _OPEN.add(id(part))
    made = digest([text(each, left_out) for each in (part, *_held(part, is_own))])
    _OPEN.discard(id(part))
    if is_own and type(part).__weakrefoffset__:
        _SEEN[id(part)] = weakref.ref(part), made
    return made


def _held(part: Any, is_own: bool) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Returns what an object holds and its classes do, without what follows the process or the calls."""
    if inspect.isfunction(part):
        return {}, []
    held, of_classes = attributes(part), user_functions.own_attributes(part)
    changing, containers = user_functions.stored(value for name, value in of_classes if name != "__init__")
    named = lambda name: name not in changing and not name.startswith("__") and not _DRAWN.search(name)
    if not is_own and isinstance(part, _WITH_STATE):
        held = {name: value for name, value in held.items() if name == "function" or _is_object(value)}  # of a Lambda
    elif is_own:  # hooks of callbacks set what they hold before it is seen first
        changes = changing if isinstance(part, keras.callbacks.Callback) else ()
        held = {n: v for n, v in held.items() if n not in changes and not isinstance(v, containers)}
        held = {n: v for n, v in held.items() if _is_constant(v, named(n))}
    changing, containers = user_functions.stored(value for _, value in of_classes)
    kept = [(n, v) for n, v in of_classes if n not in changing and not isinstance(v, containers)]
    return held, [(n, v) for n, v in kept if _is_constant(v, named(n))]


def attributes(part: object) -> dict[str, Any]:
    """Returns the attributes of an object but those of any model, of which some lead to others, and of any callback."""
    return {name: value for name, value in getattr(part, "__dict__", {}).items() if name not in _usual()}


@functools.cache
def _usual() -> set[str]:
    return {*vars(keras.Model(name="usual")), *vars(keras.callbacks.Callback())}


def _is_constant(value: Any, counts: bool = False) -> bool:
    """Returns whether a value is no symbol, time, path or address; nor a count or word, unless with `counts`."""
    if isinstance(value, list | tuple | dict):
        return all(_is_constant(v, counts) for v in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, int | float):
        since_start = _BEGUN - 10 < value <= time.monotonic() and value != round(value, 4)
        if since_start or abs(value - time.time()) < 1e7:
            return False
    if isinstance(value, int | str):
        return counts and (abs(value) < 1 << 32 if isinstance(value, int) else value.isalpha())
    is_eager = isinstance(value, tf.Tensor) and hasattr(value, "numpy")
    constants = float, np.ndarray, np.floating, tf.lookup.StaticHashTable, property, staticmethod
    return is_eager or isinstance(value, constants) or inspect.isfunction(inspect.unwrap(value)) or _is_object(value)


def _is_object(value: object) -> bool:
    """Returns whether a value is an object of the user's own, or a loss, regularizer or such of Keras'."""
    if isinstance(value, (*_WITH_STATE, keras.Variable, type, types.FunctionType, types.ModuleType)):
        return False
    return user_functions.is_users_object(value) or isinstance(value, _SETTINGS)


def _compiled_code(code: types.CodeType) -> list:
    """Returns what code does, without the numbers of its lines."""
    parts = [_compiled_code(c) if inspect.iscode(c) else c for c in code.co_consts]
    return [code.co_code.hex(), code.co_names, [c if isinstance(c, list | frozenset) else repr(c) for c in parts]]


def digest(data: Any) -> str:
    """Returns a digest of arrays, which may be larger than the memory, or of text."""
    digest = hashlib.sha256()
    for leaf in keras.tree.flatten(data):
        digest.update(f"{getattr(leaf, 'shape', '')} {getattr(leaf, 'dtype', '')}".encode())
        column = leaf if len(getattr(leaf, "shape", ())) else [leaf]
        rows = max(1, (1 << 24) // max(1, np.asarray(column[:1]).nbytes))
        for part in (np.asarray(column[i : i + rows]) for i in range(0, len(column), rows)):
            digest.update(repr(part.tolist()).encode() if part.dtype.kind in "OU" else part.tobytes())
    return digest.hexdigest()[:16]


def text(thing: Any, left_out: Iterable[str] = ()) -> str:
    """Returns what is known of the setup of an object, without entries of these names."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without(part) for name, part in value.items() if name not in {*_OF_PROCESS, *left_out}}
        return [without(part) for part in value] if isinstance(value, list) else value

    with contextlib.suppress(Exception):  # of what refers to itself
        return json.dumps(without(json.loads(json.dumps(thing, default=_setup, skipkeys=True))))
    return ""


def _setup(thing: Any) -> object:
    """Returns what a function does and reads, or what an object was made with, as far as it tells."""
    thing = thing.fget if isinstance(thing, property) else inspect.unwrap(thing)
    if isinstance(thing, type) or (inspect.isfunction(thing) and not user_functions.is_own(thing)):
        return f"{thing.__module__}.{thing.__qualname__}"
    if hasattr(thing, "__array__"):  # the numbers of a weight are no setting: training changes them
        return str(thing.shape) if isinstance(thing, keras.Variable) else digest(thing)
    if isinstance(thing, tf.lookup.StaticHashTable):
        return [digest(column) for column in thing.export()]
    if isinstance(thing, set | frozenset):
        return sorted(map(repr, thing))
    if isinstance(thing, functools.partial):
        return [thing.func, thing.args, thing.keywords]
    if inspect.ismethod(thing):
        return [thing.__func__, {n: v for n, v in vars(thing.__self__).items() if isinstance(v, str | int | float)}]
    if inspect.isfunction(thing):
        values = user_functions.values_read(thing) | {"body": _compiled_code(thing.__code__)}
        own = lambda value: inspect.isfunction(value) and value is not thing and user_functions.is_own(value)
        told = lambda value: not callable(value) or own(value) or isinstance(value, keras.Layer) or _is_object(value)
        changing, containers = user_functions.stored([thing])  # what it counts or collects follows the calls
        kept = {name: value for name, value in values.items() if name.split(".")[-1] not in changing and told(value)}
        return {name: value for name, value in kept.items() if not isinstance(value, containers)}
    made: dict[str, Any] = {"": type(thing).__name__}
    if isinstance(thing, keras.Layer) and id(thing) not in _OPEN:  # enclosed by a function
        made["layers"] = [of_object(layer) for layer in keras_internals.flat_layers(thing, recursive=False)]
    elif _is_object(thing):
        made["held"] = of_object(thing)
        if not isinstance(thing, _SETTINGS):  # else there are arguments and a configuration, too
            return made
    with contextlib.suppress(Exception):
        names = inspect.signature(type(thing)).parameters
        made |= {name: getattr(thing, name, None) for name in names if name not in _IDLE}
        if "min_delta" in made:  # whose sign Keras changes in the first fit of a callback
            made["min_delta"] = abs(made["min_delta"])
    with contextlib.suppress(Exception):
        made["config"] = thing.get_config()
    return made
