"""Which recorded call of `fit` a call is, in a script that has started again and may leave out what it has finished."""

import ast
import collections
import contextlib
import datetime
import functools
import hashlib
import io
import itertools
import os
import pathlib
import pickle
import random
import re
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from tfdist.checkpoints import training_run
from tfdist.config import user_functions
from tfdist.config.messages import logger
from tfdist.config.user_functions import CODE
from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals, setups
from tfdist.keras_bridge.setups import digest, is_constant, of_object

_STARTED_IN = os.getcwd()  # to which names of files in code are relative
PLACE, ROUND = "the place of the call", "the round of the loops around the call"
AROUND, UNTOLD = "the variables around the call", "whether a round is not told"
LOOPS = "the round of the loops without arguments that they go through"
STARTING, CONTENT, FROZEN = "the starting state of the model", "the content of", "frozen layers"
_TELLING = PLACE, ROUND, LOOPS, AROUND, UNTOLD
_NOT_OF_RESULT = "place", CODE, *_TELLING, STARTING, setups.ENCLOSED
_SETTINGS = (
    *("batch_size", "epochs", "initial_epoch", "steps_per_epoch", "shuffle", "class_weight", "validation_split"),
    *("validation_steps", "validation_batch_size", "validation_freq"),
)


class Recorded(NamedTuple):
    """A call of `fit` of this start of the script, or of an earlier one."""

    facts: dict[str, Any]
    begin: Any  # state of the random generators when it began
    end: Any  # the same when it ended; None if it has not


def facts_of(model: keras.Model, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what must be the same when a call of `fit` is continued."""
    code = user_functions.loaded_files([*sys.modules])
    of_file = lambda path: digest(user_functions.syntax(path))
    facts: dict[str, Any] = {f"{CODE} {os.path.relpath(path)}": of_file(path) for path in code}
    facts |= user_functions.settings_read() | {"arguments": str(sys.argv[1:])}
    facts |= {name: str(arguments[name]) for name in _SETTINGS if arguments.get(name) is not None}
    facts |= setups.of_training(model)
    kept = [callback for callback in callbacks_of(arguments) if not training_run.starts_anew(callback)]
    facts["the setup of the callbacks"] = digest([of_object(callback, (), model) for callback in kept])
    data = {name: arguments.get(name) for name in ("x", "y", "sample_weight", "validation_data")}
    facts |= {f"{CONTENT} {name}": digest(part) for name, part in data.items() if in_memory(part)}
    facts |= _of_call(code)
    facts[STARTING] = digest(model.get_weights())
    layers = keras_internals.flat_layers(model, False)
    facts[FROZEN] = str([i for i, layer in enumerate(layers) if not layer.trainable])
    if model.compiled:
        optimizer = keras_internals.inner_optimizer(model.optimizer)
        with contextlib.suppress(NotImplementedError):  # of a schedule of the script's own
            facts["optimizer"] = f"{type(optimizer).__name__} {optimizer.get_config() | {'name': ''}}"
    return facts


def find(
    known: Mapping[int, Recorded], last: int, facts: Mapping[str, Any], random_state: list[Any], changed: bool
) -> tuple[int, bool]:
    """Returns the number of a call, and whether another call may have had it that the script has left out since.

    It is that of the recorded call at the same place, in the same round of the loops around it; where nothing tells
    the round, or the script has changed, that of the same input, which comes to the same result; else a new one.

    Args:
      known: the recorded calls by their numbers, which count from 1; `last` is that of the call before.
      random_state: of the global generators, as it was recorded.
    """
    later = [number for number in known if number > last]
    there = {number: {**facts, **recorded.facts} for number, recorded in known.items()}
    for number in later if not changed else ():
        if any(there[number][name] != fact for name, fact in facts.items() if name.startswith(CODE)):
            return number, False  # to be refused
    lasting = [name for name in facts if not name.startswith(_NOT_OF_RESULT)]
    same = lambda number, *names: all(there[number][name] == facts[name] for name in names)
    placed = lambda n: same(n, PLACE, ROUND) if PLACE in known[n].facts else [n] == later[:1]  # of 0.2.0
    here = [*filter(placed, known)]
    # A round that is told, and not recorded, is another one, whatever else is the same: a digest does not hold all.
    # An argument of its loop may say where the script begins this time (`def run(first): for k in range(first, 5)`).
    alike = [n for n in known if facts[LOOPS] and PLACE in known[n].facts and same(n, PLACE, LOOPS)]
    candidates = here or (known if changed or facts[UNTOLD] else alike)
    exact = [n for n in candidates if same(n, STARTING, *lasting) and known[n].begin == random_state]
    # Else a script that has left out others may come here with another call than that which has been here.
    if not exact and (len(here) > 1 or (facts[UNTOLD] and any(known[number].end for number in here))):
        here = [number for number in here if same(number, AROUND)]
        here = [number for number in here if len(here) == 1 or same(number, *lasting)]
    found = [number for number in exact or here if number > last]
    if later and not found:
        logger.info("the script makes a call of fit that is none of those recorded: it trains from its start")
    ambiguous = not exact and (len(here) > 1 or (facts[UNTOLD] == 2 and any(known[n].end for n in here)))
    return (found or [max([last, *later]) + 1])[0], ambiguous and bool(found)


def check_same(number: int, here: Mapping[str, object], there: Mapping[str, object], changed: bool) -> None:
    """Refuses a call that is not what was recorded, or says with `changed` that it goes on all the same."""
    # What else has changed says more than that the code has; the setup of the model holds optimizer and loss.
    odd = [n for n in sorted({**there, **here}, key=lambda n: n.startswith("the ")) if there.get(n) != here.get(n)]
    # Modules are loaded when they are needed, which a call that is left out may not have done, and a rate tells nothing
    # of an optimizer that has made updates.
    odd = [
        name for name in odd if not name.startswith((CODE, user_functions.RATE)) or name in here.keys() & there.keys()
    ]
    odd = [name for name in odd if name not in _TELLING]  # by which the call was found
    odd = [name for name in odd if name in there or not name.startswith((FROZEN, "--"))]  # not so in 0.2.0
    if here["place"] != there.get("place"):  # where other devices may have computed them, to rounding
        odd = [name for name in odd if not name.startswith(("place", CONTENT, STARTING, setups.ENCLOSED))]
    if not odd:
        return
    what = f"{odd[0]} was {there.get(odd[0], 'not given')} and is {here.get(odd[0], 'not given')}"
    what = f"{odd[0]} has changed" if odd[0].startswith("the ") else what
    if not changed:
        ways = "choose another --workdir, --resume=never, which sets the earlier calls aside, or --resume_changed"
        raise UserError(f"call {number} of fit cannot continue: {what}", f"undo the change, {ways}")
    logger.info(f"WARNING: call {number} of fit continues though {what}")


def callbacks_of(arguments: Mapping[str, Any]) -> list[keras.callbacks.Callback]:
    given = arguments.get("callbacks") or []
    return given.callbacks if isinstance(given, keras.callbacks.CallbackList) else keras.tree.flatten(given)


def in_memory(data: Any) -> bool:
    return all(hasattr(a, "__array__") or isinstance(a, int | float | str | None) for a in keras.tree.flatten(data))


def _of_call(code: Container[pathlib.Path]) -> dict[str, Any]:
    """Returns what tells a call from others: where functions of these files are running, and with what variables."""
    places, rounds, around = list[tuple](), list[tuple[str, list]](), list[tuple[str, str]]()
    of_loops, is_looped = list[tuple[str, list]](), False
    untold = 0  # 1 if a variable does not tell its round, 2 if none of a loop does
    for frame, line in traceback.walk_stack(None):
        path, running = pathlib.Path(_STARTED_IN, frame.f_code.co_filename).resolve(), frame.f_code
        if path not in code:
            continue
        values = {**frame.f_globals, **frame.f_locals}  # those of a comprehension are in a frame of its own
        around_call = [(c, s, o) for a, b, c, s, o in _loops(path) if a <= line <= b and (not c or c & values.keys())]
        loops = [(counting, stored) for counting, stored, _ in around_call]
        targets = {name for counting, _ in loops for name in counting}
        through = {name for *_, over in around_call for name in over} - targets
        named = {*targets, *running.co_varnames[: running.co_argcount + running.co_kwonlyargcount]}
        others = {*running.co_freevars}.union(*(stored for _, stored in loops))
        others |= set() if places or running.co_name == "<module>" else {*frame.f_locals}  # of what calls fit
        places.append((running.co_name, *_called(path, running, frame.f_lasti)))
        told = {name: _told(values[name], name in targets) for name in sorted(named & values.keys())}
        rounds += told.items()
        of_loops += [(name, numbers) for name, numbers in told.items() if name not in through]
        is_looped |= any(told[name] for name in targets & told.keys())
        untold = max(untold, not all(told.values()))
        for parts in ([values[name] for name in counting or stored if name in values] for counting, stored in loops):
            models = any(isinstance(part, _FOLLOWING_CALLS) for part in parts)
            tells = any(isinstance(a, _COUNTING if models else object) and not isinstance(a, _NO_VALUE) for a in parts)
            untold = max(untold, 0 if tells else 2)
        # A duration is no more the same in another start than the time.
        others = {name for name in others if not isinstance(values.get(name), float | datetime.datetime)}
        around += [(name, _pickled(values[name])) for name in sorted((named | others) & values.keys())]
    looped = digest(of_loops) if is_looped else ""
    return {PLACE: digest(places), ROUND: digest(rounds), LOOPS: looped, AROUND: digest(around), UNTOLD: untold}


def _called(path: pathlib.Path, running: types.CodeType, offset: int) -> tuple:
    """Returns what is called there, which of the file's calls of that it is, and of how many; until 3.10 the offset."""
    if sys.version_info >= (3, 11):
        position = next(itertools.islice(running.co_positions(), offset // 2, None))
        if (text := _calls(path).get(position)) is not None:
            alike = [place for place, other in _calls(path).items() if other == text]
            return text, alike.index(position), len(alike)
    return (offset,)


@functools.cache
def _calls(path: pathlib.Path) -> dict[tuple, str]:
    """Returns the function of each call of a file, by the first and last line and column of the call."""
    calls = [node for node in ast.walk(user_functions.tree(path)) if isinstance(node, ast.Call)]
    place = lambda n: (n.lineno, n.end_lineno, n.col_offset, n.end_col_offset)
    return {place(node): ast.unparse(node.func) for node in sorted(calls, key=place)}


@functools.cache
def _loops(path: pathlib.Path) -> list[tuple[int, int, set[str], set[str], set[str]]]:
    """Returns first and last line of each loop of a file, what counts its rounds, what it sets, and goes through."""
    found = []
    names = lambda *parts: {n.id for part in parts for n in ast.walk(part) if isinstance(n, ast.Name)}
    for node in ast.walk(user_functions.tree(path)):
        parts: list[ast.AST] = [part.target for part in getattr(node, "generators", ())]
        parts += [node.target] if isinstance(node, ast.For) else []
        parts += [n.target for n in ast.walk(node) if isinstance(n, ast.AugAssign)] * isinstance(node, ast.While)
        if (parts or isinstance(node, ast.While)) and isinstance(node, ast.stmt | ast.expr):
            stored: list[ast.AST] = [n for n in ast.walk(node) if isinstance(getattr(n, "ctx", None), ast.Store)]
            stored += [node.test] if isinstance(node, ast.While) else []
            over = [part.iter for part in (node, *getattr(node, "generators", ())) if hasattr(part, "iter")]
            found.append((node.lineno, node.end_lineno or 0, names(*parts), names(*stored), names(*over)))
    return found


_FOLLOWING_CALLS = (
    *(keras.Layer, keras.callbacks.Callback, keras.Metric, keras.Optimizer, os.PathLike),
    *(random.Random, np.random.Generator, np.random.RandomState),
)
_COUNTING, _NO_VALUE = (int, str, os.PathLike), (types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_DATES = {time.strftime(f, time.localtime(time.time() - ago)) for ago in (0, 86400) for f in (
    "%Y%m%d", "%Y-%m-%d", "%Y_%m_%d", "%d-%m-%Y", "%d%m%Y", "%y%m%d", "%b%d",
)}  # fmt: skip
_TIME = re.compile(rf"({'|'.join(map(re.escape, _DATES))})([-_T .]?\d\d[-_:.h]?\d\d([-_:.m]?\d\d(\.\d+)?)?)?")
"""A time near the start of this process, as in names of folders; also yesterday's, on which it may have begun."""
_MOST_TOLD = 100_000  # numbers of an array, or entries of a container
_CONTAINERS = list, tuple, set, frozenset, collections.deque
_PICKLED = {*sys.stdlib_module_names, "numpy", "pandas"}  # what other libraries do for that may last, or change things


class _Pickler(pickle.Pickler):
    """Writes values as far as they are the same in each start of a script; nobody loads that."""

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, float):
            return f"{value:.6g}" * is_constant(value, True)
        if isinstance(value, str | int):
            return None if is_constant(value, True) else type(value).__name__
        if isinstance(value, np.ndarray):
            return digest(value if value.size < _MOST_TOLD else value[:: len(value) // 1000 + 1])
        return "" if isinstance(value, (*_CONTAINERS, dict, bytes)) and len(value) > _MOST_TOLD else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | types.FunctionType):
            return NotImplemented if value is str else (str, (value.__qualname__, of_object(value)))
        kind = type(value)
        name = str, (kind.__qualname__,)
        if isinstance(value, _FOLLOWING_CALLS):
            return name
        if user_functions.is_users_object(value):
            content = [*(value.items() if isinstance(value, dict) else value if isinstance(value, _CONTAINERS) else ())]
            return *name, [user_functions.attributes(value), content]
        with contextlib.suppress(Exception):  # of a lock, a generator or the like
            if kind.__module__.split(".")[0] in _PICKLED:
                value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
                return NotImplemented
        return name


def _pickled(value: Any) -> str:
    with contextlib.suppress(Exception), io.BytesIO() as file:  # Exception: of code of the user's, or too deep
        _Pickler(file).dump(value)
        return hashlib.sha256(file.getvalue()).hexdigest()[:16]
    return ""


def _told(value: Any, in_loop: bool) -> list:
    """Returns numbers and text of a variable, without times; of one in a loop also paths, and arrays of integers."""
    if user_functions.is_users_object(value):  # such as `self`, which may gather anything
        value = user_functions.attributes(value) if in_loop else ()
    leaves = [leaf.item() if isinstance(leaf, np.generic) else leaf for leaf in keras.tree.flatten(value)]
    leaves = [os.fspath(leaf) if isinstance(leaf, os.PathLike) else leaf for leaf in leaves]
    any_kind = (str, np.ndarray) if in_loop else ()
    told = [a for a in leaves if isinstance(a, any_kind) or (isinstance(a, str | int | float) and is_constant(a, True))]
    undated = lambda a: _TIME.sub("", a) if isinstance(a, str) else a
    told = [undated(a) for a in told if not (isinstance(a, str) and a and not undated(a))]  # no time alone
    odd = lambda a: str(a).startswith(tempfile.gettempdir()) or getattr(a, "dtype", np.dtype(int)).kind not in "biu"
    return [f"{a:.6g}" if isinstance(a, float) else a for a in told if not odd(a)]  # devices differ in the last bits
