"""What decides about a model besides its weights, as digests: compared on a resume, and in the memory of checks.

Digests are of an object's settings, and of what those of the user's do and hold. What follows the process, the time or
the calls is left out, or an unchanged script could not be resumed.
"""

import contextlib
import functools
import hashlib
import inspect
import platform
import re
import time
import types
import weakref
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import __version__
from tfdist.config import cpu_kernels, user_functions
from tfdist.config.user_functions import RATE, SETUP
from tfdist.data.spec import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.keras_bridge import keras_internals, preconditions, row_mixing

ENCLOSED = f"{SETUP} with the weights of other models that it uses"
_VERSIONS = f" (Keras {keras.__version__}, Python {platform.python_version()})"
_WEIGHTS: dict[int, tuple[weakref.ref, list[float]]] = {}  # enclosed weights by their ids
_STEERING = (
    *(keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler),
    keras.callbacks.SwapEMAWeights,
)
_WRAPPERS = keras.layers.TFSMLayer, keras.layers.JaxLayer, keras.layers.FlaxLayer, keras.layers.TorchModuleWrapper
"""Layers of Keras' that compute what somebody else has written."""
_OF_PROCESS = {"seed", "synchronized", "code", "verbose", "filepath", "filename", "log_dir", "backup_dir"}
"""Settings that are drawn, told by the replicas or the time, that have numbers of lines (a Lambda's), or for show."""
OF_MODEL = ("name", "layers", "input_layers", "output_layers", "dtype", "vocabulary", "build_config", "trainable")
"""Settings of layers that follow the process, or that are those of other layers."""
_SEEN = weakref.WeakKeyDictionary[keras.Model, dict[int, tuple[weakref.ref, str]]]()  # by ids, with their digests
_BEGUN = time.monotonic()
_TOLD = dict[int, tuple[Any, str]]()  # objects by their ids, with digests, empty of those whose is being taken
_DRAWN = re.compile("seed|replica|(^|_)u?id$")  # within names of what follows the process
_ID = re.compile(r"[/\\]|\d\d[-:]\d\d|\d{5}|[0-9a-f]{12}")  # in a path, a time, or what is drawn
_FILLED: dict[int, tuple[Any, int, str]] = {}  # containers that functions read by their ids, with lengths and digests
_WITH_STATE = keras.Layer, keras.callbacks.Callback, keras.optimizers.Optimizer, keras.Metric
_SETTINGS = keras.Loss, keras.Regularizer, keras.constraints.Constraint, keras.optimizers.schedules.LearningRateSchedule


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
        if key not in _WEIGHTS or _WEIGHTS[key][0]() is not weight:
            value = np.asarray(keras.ops.convert_to_numpy(weight), np.float64)
            _WEIGHTS[key] = weakref.ref(weight), [float(value.mean()), float(value.std())] if value.size else []
    return {name: sorted(number for key in weights for number in _WEIGHTS[key][1])}


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
        if isinstance(rate, keras.Variable) and not int(keras_internals.counter(optimizer).numpy()):
            facts[f"{RATE} {number}"] = f"{float(rate.numpy()):.7g}"
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
    parts = [tf.__version__, keras.__version__, __version__]
    parts += [distribution.name, str(distribution.replicas), distribution.jit, kind, comparison]
    parts += [cpu_kernels.in_use(), *(f"{t.shape} {t.dtype}" for t in keras.tree.flatten(rows))]
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


def of_object(part: Any, left_out: Iterable[str] = OF_MODEL, model: keras.Model | None = None) -> str:
    """Returns a digest of an object's settings, and of what it does and holds if it is the user's.

    Of the user's it is that of the first time that it is seen with a `model`, since calls change what it holds.
    """
    is_own = user_functions.is_own(part if inspect.isfunction(part) else type(part))
    seen = {} if model is None else _SEEN.setdefault(model, {})
    if is_own and (known := seen.get(id(part))) and known[0]() is part:
        return known[1]
    if id(part) in _TOLD:  # objects that know each other have ever more paths
        return _TOLD[id(part)][1]
    is_first = not _TOLD
    made = ""
    _TOLD[id(part)] = part, made
    try:
        with contextlib.suppress(Exception):  # of attributes that cannot be read
            made = digest([text(each, left_out) for each in (part, *_held(part, is_own))])
            _TOLD[id(part)] = part, made
    finally:
        if is_first:
            _TOLD.clear()
    if is_own and type(part).__weakrefoffset__:
        seen[id(part)] = weakref.ref(part), made
    return made


def _held(part: Any, is_own: bool) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Returns what an object holds and its classes do, without what follows the process or the calls."""
    if inspect.isfunction(part):
        return {}, []
    # Python makes a class that has none an empty one as soon as somebody asks.
    of_classes = [item for item in user_functions.own_attributes(part) if item[0] != "__annotations__"]
    held = user_functions.attributes_read(attributes(part), (value for _, value in of_classes))
    changing, containers = user_functions.stored(value for name, value in of_classes if name != "__init__")
    named = lambda name: name not in changing and not name.startswith("__") and not _DRAWN.search(name)
    if not is_own and isinstance(part, _WITH_STATE):
        held = {name: value for name, value in held.items() if name == "function" or _is_object(value)}  # of a Lambda
    elif is_own:
        # Callbacks keep what they show, which may be drawn.
        containers += (np.ndarray, tf.Tensor) if isinstance(part, keras.callbacks.Callback) else ()
        stored = lambda *names: user_functions.stored(v for n, v in of_classes if n in names)[0]
        passing = stored("call") - stored("__init__", "build")  # such as the seconds that a call took
        lasting = lambda n, v: not isinstance(v, containers) and n not in passing
        held = {n: v for n, v in held.items() if lasting(n, v) and is_constant(v, named(n))}
    changing, containers = user_functions.stored(value for _, value in of_classes)
    kept = [(n, v) for n, v in of_classes if n not in changing and not isinstance(v, containers)]
    return held, [(n, v) for n, v in kept if is_constant(v, named(n))]


def attributes(part: object) -> dict[str, Any]:
    """Returns the attributes of an object but those that Keras' classes store, of which some lead to other models."""
    usual = _stored_by_keras(type(part).__mro__) if isinstance(part, _WITH_STATE) else ()
    return {name: value for name, value in user_functions.attributes(part).items() if name not in usual}


@functools.cache
def _stored_by_keras(kinds: tuple[type, ...]) -> set[str]:
    return user_functions.stored(v for kind in kinds if not user_functions.is_own(kind) for v in vars(kind).values())[0]


def is_constant(value: Any, counts: bool = False) -> bool:
    """Returns whether a value is no symbol, time, path or address; nor a count or text, unless with `counts`."""
    if isinstance(value, list | tuple | dict):
        return all(is_constant(v, counts) for v in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, int | float):
        since_start = _BEGUN - 10 < value <= time.monotonic() and value != round(value, 4)
        if since_start or abs(value - time.time()) < 1e7:
            return False
    if isinstance(value, int | str | bytes | None):
        return counts and (abs(value) < 1 << 32 if isinstance(value, int) else not _ID.search(str(value)))
    is_eager = isinstance(value, tf.Tensor) and hasattr(value, "numpy")
    constants = float, np.ndarray, np.floating, tf.lookup.StaticHashTable, property, staticmethod
    is_function = inspect.isfunction(user_functions.unwrapped(value))
    return is_eager or is_function or isinstance(value, constants) or _is_object(value)


def _is_object(value: object) -> bool:
    """Returns whether a value is an object of the user's own, or a loss, regularizer or such of Keras'."""
    if isinstance(value, (*_WITH_STATE, keras.Variable, type, types.FunctionType, types.ModuleType)):
        return False
    return user_functions.is_users_object(value) or isinstance(value, (*_SETTINGS, types.SimpleNamespace))


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
    """Returns what is known of the setup of an object, without settings of these names."""
    return repr(_told(thing, {*_OF_PROCESS, *left_out}, {}))


def _told(thing: Any, left_out: set[str], seen: dict[int, tuple[int, Any]]) -> Any:
    """Returns text, numbers and lists of them for an object; `seen` are those that have been told, by their ids."""
    if thing is None or isinstance(thing, str | bytes | int | float | complex | range | slice):
        return re.sub(r"_\d+(?![A-Za-z0-9])", "", thing) if isinstance(thing, str) else thing  # Keras counts names
    tell = lambda part: _told(part, left_out, seen)
    if isinstance(thing, dict):
        return [(tell(key), tell(part)) for key, part in thing.items()]
    if isinstance(thing, list | tuple):
        return list(map(tell, thing))
    if isinstance(thing, set | frozenset):
        return sorted(repr(tell(part)) for part in thing)
    if id(thing) in seen:
        return f"number {seen[id(thing)][0]}"
    seen[id(thing)] = len(seen), thing  # which keeps it, or another could take the id
    try:
        return tell(_setup(thing, left_out))
    except Exception:  # of what has no value, as a symbolic tensor
        return type(thing).__name__


def _setup(thing: Any, left_out: set[str]) -> object:
    """Returns what a function does and reads, or what an object was made with, as far as it tells."""
    thing = thing.fget if isinstance(thing, property) else user_functions.unwrapped(thing)
    if isinstance(thing, type) or (inspect.isfunction(thing) and not user_functions.is_own(thing)):
        name = f"{thing.__module__}.{thing.__qualname__}"
        return [name, _held(thing, True)[1]] if isinstance(thing, type) and _is_read(thing) else name
    if hasattr(thing, "__array__"):  # the numbers of a weight are no setting: training changes them
        return str(thing.shape) if isinstance(thing, keras.Variable) else digest(thing)
    if isinstance(thing, tf.lookup.StaticHashTable):
        return [digest(column) for column in thing.export()]
    if isinstance(thing, functools.partial):
        return [thing.func, thing.args, thing.keywords]
    if inspect.ismethod(thing):
        held = {n: v for n, v in vars(thing.__self__).items() if isinstance(v, str | int | float)}
        return [thing.__func__, of_object(thing.__self__) if _is_object(thing.__self__) else held]
    if inspect.isfunction(thing):
        values = user_functions.values_read(thing) | {"body": _compiled_code(thing.__code__)}
        changing, containers = user_functions.stored([thing])  # what it counts or collects follows the calls
        told = {n: v for n, v in values.items() if n.split(".")[-1] not in changing and not isinstance(v, containers)}
        filled = lambda name, value: isinstance(value, list | dict | set) and name != "body"
        return {name: _first(v) if filled(name, v) else v for name, v in told.items() if _is_read(v)}
    made: dict[str, Any] = {"": type(thing).__name__}
    if isinstance(thing, keras.Layer) and id(thing) not in _TOLD:  # enclosed by a function
        made["layers"] = [of_object(layer) for layer in keras_internals.flat_layers(thing, recursive=False)]
    elif _is_object(thing):
        made["held"] = of_object(thing)
        if not isinstance(thing, _SETTINGS):  # else there are arguments and a configuration, too
            return made
    with contextlib.suppress(Exception):
        names = inspect.signature(type(thing)).parameters
        given = {name: getattr(thing, name, None) for name in names if name not in left_out}
        made |= {name: v for name, v in given.items() if not isinstance(v, str) or is_constant(v, True)}
        if "min_delta" in made:  # whose sign Keras changes in the first fit of a callback
            made["min_delta"] = abs(made["min_delta"])
    with contextlib.suppress(Exception):
        made["config"] = _without(thing.get_config(), left_out)
    return made


def _first(container: Any) -> str:
    """Returns a digest of what a container holds, or held when it was first seen if calls have added to it since."""
    known = _FILLED.get(id(container))  # which keeps it, or another could take the id
    if known is None or len(container) == known[1]:  # settings may be changed in place
        known = _FILLED[id(container)] = container, len(container), digest(text(container))
    return known[2]


def _without(settings: Any, names: set[str]) -> Any:
    if isinstance(settings, dict):
        return {name: _without(part, names) for name, part in settings.items() if name not in names}
    return [_without(part, names) for part in settings] if isinstance(settings, list | tuple) else settings


def _is_read(value: Any) -> bool:
    """Returns whether a value that a function reads is told: libraries' functions are known by their versions."""
    if isinstance(value, type):
        return user_functions.is_own(value) and user_functions.has_settings(value)
    if inspect.isfunction(function := user_functions.unwrapped(value)):
        return user_functions.is_own(function)
    if isinstance(value, int | float | str | bytes):
        return is_constant(value, True)
    whose = value.__self__ if inspect.ismethod(value) else value
    return not callable(value) or isinstance(value, keras.Layer | functools.partial) or _is_object(whose)
