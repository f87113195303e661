"""What `--workdir` keeps of each `model.fit` of a script, so that the same command continues after a kill."""

import ast
import collections
import contextlib
import copy
import datetime
import functools
import glob
import hashlib
import io
import itertools
import json
import os
import pathlib
import pickle
import random
import re
import shutil
import sys
import tempfile
import traceback
import types
import uuid
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import keras
import numpy as np

from tfdist.checkpoints import files, training_run
from tfdist.checkpoints.manager import Checkpoints
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.cluster import discovery
from tfdist.config import buckets, cpu_kernels, local_files, user_functions
from tfdist.config.messages import logger
from tfdist.config.runtime_options import ResumeOptions
from tfdist.config.user_functions import CODE
from tfdist.data import batches
from tfdist.distributed.distribution import Distribution
from tfdist.errors import Interrupted, TrainingError, UserError, one_line
from tfdist.keras_bridge import keras_internals, setups
from tfdist.keras_bridge.setups import digest, is_constant, of_object
from tfdist.monitoring import fit_report
from tfdist.trainer.worker_session import Signals

FITS = "fits"
RECORD = "call.json"
_STARTED_IN = os.getcwd()  # to which names of files in code are relative
PLACE, ROUND = "the place of the call", "the round of the loops around the call"
AROUND, UNTOLD = "the variables around the call", "whether a round is not told"
STARTING, CONTENT = "the starting state of the model", "the content of"
_NOT_OF_RESULT = "place", CODE, PLACE, ROUND, AROUND, UNTOLD, STARTING, setups.ENCLOSED
MOST_BYTES = 10 << 30  # of the states of finished calls; those before the newest that fit in are trained again
_SETTINGS = (
    *("batch_size", "epochs", "initial_epoch", "steps_per_epoch", "shuffle", "class_weight", "validation_split"),
    *("validation_steps", "validation_batch_size", "validation_freq"),
)


class KeptFits:
    """The calls of `fit` of a script, in their order, each with its checkpoints in `workdir/fits/NNNN`.

    A finished call returns at once with the state at its end, an interrupted one continues at its update. As a context
    it holds the lock of the folder.
    """

    def __init__(self, distribution: Distribution, options: ResumeOptions, every: str):
        if buckets.is_url(options.workdir):
            raise UserError(f"--workdir={options.workdir} is a bucket, which keeps no calls of fit", "use a folder")
        self._distribution, self._options, self._every = distribution, options, every
        self._folder = RunFolder(str(pathlib.Path(options.workdir).expanduser()), writes=distribution.is_chief)
        self._fits = self._folder.path / FITS
        self._report = fit_report.Report(self._folder)
        self._number = self._depth = 0
        self._written: list[str] = []  # what ModelCheckpoints of the calls write, in this start
        self._known = dict[int, tuple[dict[str, Any], Any, Any]]()  # facts of calls, and the random states around them
        self._stopped = False
        self._warned = False  # of state that cannot be kept
        self._trained_again = False  # whether a call of this start has, and so others may begin with other bits

    def __enter__(self) -> "KeptFits":
        self._folder.create()
        attempt, holds = discovery.find(os.environ).attempt, any(self._fits.glob("[0-9]*"))
        if self._options.resume == "require" and self._distribution.is_chief and not holds:
            raise UserError(f"--resume=require, and {self._folder.path} holds no call of fit", "check --workdir")
        # Workers that the launcher has started again continue, whatever the flag says.
        if self._options.resume == "never" and self._distribution.is_chief and holds and not attempt:
            logger.info(f"the earlier calls of fit are now in {files.set_aside(self._fits)}")
        if self._distribution.is_chief:
            self._fits.mkdir(exist_ok=True)
            user_functions.list_results((self._fits / "results").absolute())
        for path in sorted(self._fits.glob("[0-9]*")):
            if record := _read(path):
                self._known[int(path.name)] = record["facts"], record["begin"], record["end"]
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.release()

    def call(self, fit: Callable[..., Any], model: keras.Model, arguments: dict[str, Any]) -> Any:
        """Trains, or restores what an earlier start of the same script has trained."""
        if self._stopped:  # by a signal, which the script has caught
            raise SystemExit(143)
        if self._depth:  # within a callback of another call, which continues with that one
            return fit(model, **arguments)
        if arguments.get("checkpoints"):  # kept by the script itself
            return self._reported(fit, model, arguments)
        where, facts = self._distribution, _facts(model, arguments)
        facts["place"] = f"{where.device_kind} {cpu_kernels.in_use()} {where.name} {where.replicas}"
        told = [*self._next_number(facts), facts, uuid.uuid4().hex, _written(arguments)]
        number, ambiguous, facts, mark, written = where.peers.gather("a call of fit", told)[0]
        left_out, self._number = number - self._number - 1, number
        folder = self._fits / f"{self._number:04d}"
        before, own = self._recorded(folder, written), _not_kept(arguments)
        if before and ambiguous:
            why = "nothing tells it from others in its loop: count the rounds in a variable"
            self._start_anew(folder, before, f"call {number} of fit trains from its start, since {why}")
            before = None
        if own and not before and not self._warned:
            self._warned = True
            logger.info(f"WARNING: after a kill, calls of fit as this one train again from their start: {own}")
        for path in (path for path in _written(arguments) if self._written.count(path) == 1):
            what = f"call {self._number} of fit writes {path}, as an earlier one does"
            logger.info(f"WARNING: {what}, and may be refused after a kill: give each call a file of its own")
        self._written += _written(arguments)
        if before:
            # A line has told why they may be others: the script draws without a seed, or trained again with other bits.
            if self._trained_again or before["begin"] != _random_state():
                free = (STARTING, CONTENT, setups.ENCLOSED) if self._trained_again else STARTING
                facts |= {name: fact for name, fact in before["facts"].items() if name.startswith(free)}
            _check_same(self._number, facts, before["facts"], self._options.resume_changed)
            why = own or before["lost"]
            consumed = [name for name in ("x", "validation_data") if not _in_memory(arguments.get(name))]
            if not why and consumed and before["end"] is not None:  # later calls may go on with the same data
                why = f"{consumed[0]} is a {type(arguments[consumed[0]]).__name__}, whose next pass may be another"
            if why:
                line = f"call {self._number} of fit trains again from its start, with the same result: {why}"
                self._start_anew(folder, before, line)
            elif before["changed"] and not self._options.resume_changed:  # the script may load it next
                what = f"call {self._number} of fit wrote {before['changed']}, which has changed since"
                raise UserError(what, "give each call its own file and start anew, or use --resume_changed")
        new = {"facts": facts, "mark": mark, "continued": _continued(arguments), "written": written, "foreign": []}
        record = self._begin_random(folder, new, before) | {"facts": facts, "written": written, "foreign": []}
        # So that no checkpoint of another folder is taken for one of this call; records of 0.2.0 have no mark.
        of_call = {"call of fit": record["mark"]} if "mark" in record else {}
        changed = self._options.resume_changed
        kept = Checkpoints(folder, every=self._every, keep=2, changed=changed, experiment=of_call)

        def cannot_hold(names: set[str]) -> None:
            record["foreign"] = sorted({*record["foreign"], *names})
            self._write(folder, record)

        kept.cannot_hold = cannot_hold
        own_arguments = {"checkpoints": kept, "left_out": left_out}
        self._depth += 1
        try:
            with self._distribution.peers.seeing_signals(), Signals() as signals:
                history = self._reported(fit, model, arguments | own_arguments | {"should_stop": signals.reason})
        except Interrupted as stopped:
            again = own or record["foreign"]
            logger.info(f"{stopped}: the same command {'trains this call again' if again else 'continues from there'}")
            self._stopped = True
            raise SystemExit(143) from None
        finally:
            self._depth -= 1
        if record["end"] is not None:
            _set_random_state(record["end"])
        # A later call may write the same file, which the script has loaded between the two.
        self._write(folder, record | {"end": _random_state(), "files": _checksums(_written(arguments))})
        if where.is_chief:
            self._prune(folder)
        return history

    def _next_number(self, facts: Mapping[str, object]) -> tuple[int, bool]:
        """Returns the number of a call, and whether another call may have had it that the script has left out since.

        It is that of the recorded call at the same place, in the same round of the loops around it, or a new one.
        """
        later = [number for number in self._known if number > self._number]
        there = {number: {**facts, **theirs} for number, (theirs, *_) in self._known.items()}
        for number in later if not self._options.resume_changed else ():
            if any(there[number][name] != fact for name, fact in facts.items() if name.startswith(CODE)):
                return number, False  # to be refused
        lasting = [name for name in facts if not name.startswith(_NOT_OF_RESULT)]
        same = lambda number, *names: all(there[number][name] == facts[name] for name in names)
        placed = lambda n: same(n, PLACE, ROUND) if PLACE in self._known[n][0] else [n] == later[:1]  # of 0.2.0
        here = [*filter(placed, there)]
        # The same input comes to the same result; but a round that is told is not another one.
        exact = [
            n
            for n in here or (there if self._options.resume_changed or facts[UNTOLD] else ())
            if same(n, STARTING, *lasting) and self._known[n][1] == _random_state()
        ]
        # Else a script that has left out others may come here with another call than that which has been here.
        if not exact and (len(here) > 1 or (facts[UNTOLD] and any(self._known[number][2] for number in here))):
            here = [number for number in here if same(number, AROUND)]
            here = [number for number in here if len(here) == 1 or same(number, *lasting)]
        found = [number for number in exact or here if number > self._number]
        if later and not found:
            logger.info("the script makes a call of fit that is none of those recorded: it trains from its start")
        ambiguous = not exact and (len(here) > 1 or (facts[UNTOLD] == 2 and any(self._known[n][2] for n in here)))
        return (found or [max([self._number, *later]) + 1])[0], ambiguous and bool(found)

    def _start_anew(self, folder: pathlib.Path, before: Mapping[str, Any], why: str) -> None:
        logger.info(why)
        self._trained_again = True
        if self._distribution.is_chief:
            files.prune(folder, set())
            _put_back(before.get("continued", {}))

    def _reported(self, fit: Callable[..., Any], model: keras.Model, arguments: dict[str, Any]) -> Any:
        """Calls `fit` with the report as the last callback, whose name in checkpoints the script's own keep."""
        callbacks = arguments.get("callbacks")
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = copy.copy(callbacks)
            callbacks.callbacks = [*callbacks.callbacks, self._report]
            self._report.set_model(model)
        else:
            callbacks = [*_callbacks(arguments), self._report]
        try:
            return fit(model, **arguments | {"callbacks": callbacks})
        except BaseException as error:
            if self._distribution.is_chief:
                self._report.end_call("preempted" if isinstance(error, Interrupted) else "failed", one_line(error))
            raise

    def finish(self, code: int) -> None:
        """Ends the report of a script with this exit code."""
        if self._distribution.is_chief:
            self._report.end({0: "completed", 143: "preempted"}.get(code, "failed"), self._distribution)

    def _recorded(self, folder: pathlib.Path, written: list[str]) -> dict[str, Any] | None:
        """Returns the chief's record of a call, if there is one, on all workers.

        `written`: what its ModelCheckpoints write in this start; what they wrote under other names is copied there.
        """
        record = dict[str, Any]()
        if self._distribution.is_chief and (record := _read(folder)):
            known = record.get("files", {})
            changed = sorted(name for name, sha in _checksums(known).items() if sha != known[name])
            record["changed"] = ", ".join(changed[:3]) + ", ..." * (len(changed) > 3)
            gone = [name for name in known if not os.path.isfile(name)]
            record["lost"] = f"a ModelCheckpoint of it wrote {gone[0]}, which is gone" if gone else ""
            if names := record.get("foreign"):
                record["lost"] = f"its training step writes, or draws from, what no layer holds ({', '.join(names)})"
            for old, new in zip(record.get("written", ()), written):
                if os.path.isfile(old) and not os.path.exists(new):
                    os.makedirs(os.path.dirname(new) or ".", exist_ok=True)
                    shutil.copy2(old, new)
        return self._distribution.peers.gather(f"call {folder.name} of fit", record or None)[0]

    def _begin_random(self, folder: pathlib.Path, new: dict[str, Any], before: dict | None) -> dict[str, Any]:
        """Sets the global generators as they were when this call first began, and returns what is recorded of it."""
        now = _random_state()
        if before is None:
            before = new | {"begin": now, "end": None}
            self._write(folder, before)
        elif before["begin"] != now:
            logger.info(f"the script drew other random numbers before call {self._number} of fit: its data may differ")
            _set_random_state(before["begin"])
        return before

    def _write(self, folder: pathlib.Path, record: dict[str, Any]) -> None:
        """Writes the record of a call, or warns; the script may still save what it trains."""
        try:
            if self._distribution.is_chief:
                folder.mkdir(parents=True, exist_ok=True)
                self._folder.write_text(f"{FITS}/{folder.name}/{RECORD}", json.dumps(_sealed(record)))
                self._known[int(folder.name)] = record["facts"], record["begin"], record["end"]
        except (OSError, TrainingError) as error:
            why = one_line(error, 200)
            logger.info(f"WARNING: {why}: after a kill, call {self._number} of fit is made again")

    def _prune(self, folder: pathlib.Path) -> None:
        """Keeps the last checkpoint of a finished call, and of all of them the newest that fit into `MOST_BYTES`."""
        files.prune(folder, set(files.newest_first(folder)[:1]))
        size = 0
        for each in sorted(self._fits.glob("[0-9]*"), reverse=True):
            size += sum(f.stat().st_size for f in each.rglob("*") if f.is_file())
            if size > MOST_BYTES and each != folder:
                files.prune(each, set())


def _read(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the record of a call; empty if there was none."""
    record = local_files.read_object(folder / RECORD) or {}
    intact = record.get("sha256") in (None, _sealed(record)["sha256"]) and record.keys() >= {"facts", "begin", "end"}
    if not intact and ((folder / RECORD).exists() or files.newest_first(folder)):
        raise UserError(f"{folder / RECORD} is missing or damaged", "put it back, or use --resume=never")
    return record


def _sealed(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the record of a call with a checksum of its content; those of 0.2.0 have none."""
    content = {name: value for name, value in record.items() if name not in ("sha256", "changed", "lost")}
    return content | {"sha256": digest(json.dumps(content, sort_keys=True))}


# Names of what draws at random, as they are in the code of a data set.
_DRAWS = re.compile(r"rand\w*|rng|beta|choice|integers|\w*normal|permut\w*|uniform|shuffle|\w*exponential|poisson")


def _facts(model: keras.Model, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what must be the same when a call of `fit` is continued."""
    code = user_functions.loaded_files([*sys.modules])
    of_file = lambda path: digest(user_functions.syntax(path))
    facts: dict[str, Any] = {f"{CODE} {os.path.relpath(path)}": of_file(path) for path in code}
    facts |= user_functions.settings_read() | {"arguments": str(sys.argv[1:])}
    facts |= {name: str(arguments[name]) for name in _SETTINGS if arguments.get(name) is not None}
    facts |= setups.of_training(model)
    kept = [callback for callback in _callbacks(arguments) if not training_run.starts_anew(callback)]
    facts["the setup of the callbacks"] = digest([of_object(callback, (), model) for callback in kept])
    data = {name: arguments.get(name) for name in ("x", "y", "sample_weight", "validation_data")}
    facts |= {f"{CONTENT} {name}": digest(part) for name, part in data.items() if _in_memory(part)}
    facts |= _of_call(code)
    facts[STARTING] = digest(model.get_weights())
    if model.compiled:
        optimizer = keras_internals.inner_optimizer(model.optimizer)
        with contextlib.suppress(NotImplementedError):  # of a schedule of the script's own
            facts["optimizer"] = f"{type(optimizer).__name__} {optimizer.get_config() | {'name': ''}}"
    return facts


def _of_call(code: Container[pathlib.Path]) -> dict[str, Any]:
    """Returns what tells a call from others: where functions of these files are running, and with what variables."""
    places, rounds, around = list[tuple](), list[tuple[str, list]](), list[tuple[str, str]]()
    untold = 0  # 1 if a variable does not tell its round, 2 if none of a loop does
    for frame, line in traceback.walk_stack(None):
        path, running = pathlib.Path(_STARTED_IN, frame.f_code.co_filename).resolve(), frame.f_code
        if path not in code:
            continue
        values = {**frame.f_globals, **frame.f_locals}  # those of a comprehension are in a frame of its own
        loops = [(c, s) for a, b, c, s in _loops(path) if a <= line <= b and (not c or c & values.keys())]
        targets = {name for counting, _ in loops for name in counting}
        named = {*targets, *running.co_varnames[: running.co_argcount + running.co_kwonlyargcount]}
        others = {*running.co_freevars}.union(*(stored for _, stored in loops))
        others |= set() if places or running.co_name == "<module>" else {*frame.f_locals}  # of what calls fit
        places.append((running.co_name, *_called(path, running, frame.f_lasti)))
        told = {name: _told(values[name], name in targets) for name in sorted(named & values.keys())}
        rounds += told.items()
        untold = max(untold, not all(told.values()))
        for parts in ([values[name] for name in counting or stored if name in values] for counting, stored in loops):
            models = any(isinstance(part, _FOLLOWING_CALLS) for part in parts)
            tells = any(isinstance(a, _COUNTING if models else object) and not isinstance(a, _NO_VALUE) for a in parts)
            untold = max(untold, 0 if tells else 2)
        # A duration is no more the same in another start than the time.
        others = {name for name in others if not isinstance(values.get(name), float | datetime.datetime)}
        around += [(name, _pickled(values[name])) for name in sorted((named | others) & values.keys())]
    return {PLACE: digest(places), ROUND: digest(rounds), AROUND: digest(around), UNTOLD: untold}


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
def _loops(path: pathlib.Path) -> list[tuple[int, int, set[str], set[str]]]:
    """Returns the first and last line of each loop of a file, with what counts its rounds, and all that it sets."""
    found = []
    names = lambda *parts: {n.id for part in parts for n in ast.walk(part) if isinstance(n, ast.Name)}
    for node in ast.walk(user_functions.tree(path)):
        parts: list[ast.AST] = [part.target for part in getattr(node, "generators", ())]
        parts += [node.target] if isinstance(node, ast.For) else []
        parts += [n.target for n in ast.walk(node) if isinstance(n, ast.AugAssign)] * isinstance(node, ast.While)
        if (parts or isinstance(node, ast.While)) and isinstance(node, ast.stmt | ast.expr):
            stored: list[ast.AST] = [n for n in ast.walk(node) if isinstance(getattr(n, "ctx", None), ast.Store)]
            stored += [node.test] if isinstance(node, ast.While) else []
            found.append((node.lineno, node.end_lineno or 0, names(*parts), names(*stored)))
    return found


_FOLLOWING_CALLS = (
    *(keras.Layer, keras.callbacks.Callback, keras.Metric, keras.Optimizer, os.PathLike),
    *(random.Random, np.random.Generator, np.random.RandomState),
)
_COUNTING, _NO_VALUE = (int, str, os.PathLike), (types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
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
    odd = lambda a: str(a).startswith(tempfile.gettempdir()) or getattr(a, "dtype", np.dtype(int)).kind not in "biu"
    return [f"{a:.6g}" if isinstance(a, float) else a for a in told if not odd(a)]  # devices differ in the last bits


def _checksums(names: Iterable[str]) -> dict[str, str]:
    """Returns the checksums of those files that there are; a name may have places for the epoch and metrics."""
    paths = [path for name in names for path in glob.glob(re.sub(r"\{[^}]*\}", "*", glob.escape(name)))]
    return {path: files.checksum(pathlib.Path(path))["sha256"] for path in paths if os.path.isfile(path)}


def _callbacks(arguments: Mapping[str, Any]) -> list[keras.callbacks.Callback]:
    given = arguments.get("callbacks") or []
    return given.callbacks if isinstance(given, keras.callbacks.CallbackList) else keras.tree.flatten(given)


def _written(arguments: Mapping[str, Any]) -> list[str]:
    """Returns what ModelCheckpoints write."""
    return [str(path) for callback in _callbacks(arguments) if (path := getattr(callback, "filepath", ""))]


def _continued(arguments: Mapping[str, Any]) -> dict[str, int | None]:
    """Returns what callbacks go on with when they begin, files and folders, with their bytes; None of what is not."""
    names = [getattr(callback, "backup_dir", "") for callback in _callbacks(arguments)]
    rows = [c for c in _callbacks(arguments) if isinstance(c, keras.callbacks.CSVLogger)]
    names += [callback.filename for callback in rows if callback.append]
    return {str(name): os.path.getsize(name) if os.path.exists(name) else None for name in names if name}


def _put_back(continued: Mapping[str, int | None]) -> None:
    """Puts back what callbacks went on with when a call first began, which is to train again from its start."""
    for path, size in ((pathlib.Path(name), size) for name, size in continued.items()):
        if path.is_file():
            os.truncate(path, min(size or 0, path.stat().st_size))
        elif path.exists() and size is None:
            logger.info(f"{path}, which this call has written, is now {files.set_aside(path)}")
        elif path.exists():
            what = f"a call of fit that trains again from its start went on from {path}, which has changed since"
            raise UserError(what, "give each call a folder of its own, or use --resume=never")


def _not_kept(arguments: Mapping[str, Any]) -> str:
    """Returns why what a callback or the data has gathered cannot be restored, if so: it may be anywhere."""
    for data in map(arguments.get, ("x", "validation_data")):
        if isinstance(data, base := keras.utils.PyDataset):
            names = getattr(getattr(type(data).__getitem__, "__code__", None), "co_names", ())
            if type(data).on_epoch_end is not base.on_epoch_end or any(map(_DRAWS.fullmatch, names)):
                return f"{type(data).__name__} has an on_epoch_end, or draws at random, of which no checkpoint knows"
    if arguments.get("validation_steps") and not _in_memory(arguments.get("validation_data")):
        return "validation_steps reads a part of validation_data, whose order begins anew"
    if batches.share_order(arguments.get("x"), arguments.get("validation_data")):
        return "validation_data reads the shuffle() of x, whose order each reading moves on"
    odd = [type(callback).__name__ for callback in _callbacks(arguments) if training_run.starts_anew(callback)]
    return f"{odd[0]} is a callback of its own, without get_state and set_state" if odd else ""


def _in_memory(data: Any) -> bool:
    return all(hasattr(a, "__array__") or isinstance(a, int | float | str | None) for a in keras.tree.flatten(data))


def _check_same(number: int, here: Mapping[str, object], there: Mapping[str, object], changed: bool) -> None:
    """Refuses a call that is not what was recorded, or says with `changed` that it goes on all the same."""
    # What else has changed says more than that the code has; the setup of the model holds optimizer and loss.
    odd = [n for n in sorted({**there, **here}, key=lambda n: n.startswith("the ")) if there.get(n) != here.get(n)]
    # Modules are loaded when they are needed, which a call that is left out may not have done.
    odd = [name for name in odd if not name.startswith(CODE) or name in here.keys() & there.keys()]
    odd = [name for name in odd if name not in (PLACE, ROUND, AROUND, UNTOLD)]  # by which the call was found
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


def _random_state() -> list[Any]:
    """Returns the state of the global generators of Python, NumPy and Keras, as JSON can hold it."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return [[version, list(numbers), gauss], [name, np.asarray(keys).tolist(), *rest], keras_internals.random_state()]


def _set_random_state(state: list[Any]) -> None:
    (version, numbers, gauss), (name, keys, *rest), of_keras = state
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state((name, np.asarray(keys, np.uint32), *rest))
    keras_internals.set_random_state(of_keras)
