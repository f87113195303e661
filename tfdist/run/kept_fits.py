"""What `--workdir` keeps of each `model.fit` of a script, so that the same command continues after a kill."""

import copy
import glob
import json
import os
import pathlib
import random
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np

from tfdist.checkpoints import files, training_run
from tfdist.checkpoints.manager import Checkpoints
from tfdist.checkpoints.own_work import EXPERIMENT
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.cluster import discovery
from tfdist.config import buckets, cpu_kernels, local_files, user_functions
from tfdist.config.messages import logger
from tfdist.config.runtime_options import ResumeOptions
from tfdist.data import batches
from tfdist.distributed.distribution import Distribution
from tfdist.errors import Interrupted, TrainingError, UserError, one_line
from tfdist.keras_bridge import keras_internals, preconditions, setups
from tfdist.keras_bridge.setups import digest
from tfdist.monitoring import fit_report
from tfdist.run.call_identity import CONTENT, STARTING, Recorded, callbacks_of, check_same, facts_of, find, in_memory
from tfdist.trainer.worker_session import Signals

FITS = "fits"
RECORD = "call.json"
MOST_BYTES = 10 << 30  # of the states of finished calls; those before the newest that fit in are trained again


class KeptFits:
    """The calls of `fit` of a script, in their order, each with its checkpoints in `workdir/fits/NNNN`.

    A finished call returns at once with the state at its end, an interrupted one continues at its update. A context.
    """

    def __init__(self, distribution: Distribution, options: ResumeOptions, every: str, settings: Mapping[str, str]):
        if buckets.is_url(options.workdir):
            raise UserError(f"--workdir={options.workdir} is a bucket, which keeps no calls of fit", "use a folder")
        self._distribution, self._options, self._every = distribution, options, every
        self._settings = settings  # flags that change the result
        self._folder = RunFolder(str(pathlib.Path(options.workdir).expanduser()), writes=distribution.is_chief)
        self._fits = self._folder.path / FITS
        self._report = fit_report.Report(self._folder)
        self._number, self._depth, self._process = 0, 0, os.getpid()
        self._written: list[str] = []  # what ModelCheckpoints of the calls write, in this start
        self._known = dict[int, Recorded]()
        self._stopped = False
        self._warned = False  # of state that cannot be kept
        self._trained_again = False  # whether a call of this start has, and so others may begin with other bits

    def __enter__(self) -> "KeptFits":
        if self._distribution.is_chief and (self._folder.path / EXPERIMENT).exists():  # whose results it would replace
            what = f"--workdir={self._folder.path} holds a run of tfdist train"
            raise UserError(what, "give the script a folder of its own")
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
        folders = [path for path in self._fits.glob("[0-9]*") if path.name.isdigit()]
        for number, path in enumerate(sorted(folders, key=lambda path: int(path.name)), 1):
            if int(path.name) != number:  # a call that took its number would have another order of examples
                what = f"{self._fits} has call {int(path.name)} of fit, and call {number} is missing"
                raise UserError(what, "copy it back, or use --resume=never, which sets the others aside")
            if record := _read(path):
                self._known[int(path.name)] = Recorded(record["facts"], record["begin"], record["end"])
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.release()

    def call(self, fit: Callable[..., Any], model: keras.Model, arguments: dict[str, Any]) -> Any:
        """Trains, or restores what an earlier start of the same script has trained."""
        if os.getpid() != self._process:
            what = "fit is called in a process that the script has forked, whose calls --workdir does not keep"
            raise UserError(what, "leave out --workdir, or call fit in the script itself")
        if self._stopped:  # by a signal, which the script has caught
            raise SystemExit(143)
        if self._depth:  # within a callback of another call, which continues with that one
            return fit(model, **arguments)
        if arguments.get("checkpoints"):  # kept by the script itself
            return self._reported(fit, model, arguments)
        where, facts = self._distribution, facts_of(model, arguments) | dict(self._settings)
        facts["place"] = f"{where.device_kind} {cpu_kernels.in_use()} {where.name} {where.replicas}"
        found = find(self._known, self._number, facts, _random_state(), self._options.resume_changed)
        told = [*found, facts, uuid.uuid4().hex, _written(arguments)]
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
            check_same(self._number, facts, before["facts"], self._options.resume_changed)
            why = own or before["lost"]
            consumed = [name for name in ("x", "validation_data") if not in_memory(arguments.get(name))]
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
        rates = keras_internals.rate_variables(preconditions.optimizers(model)) if model.compiled else {}
        kept.facts = {f"{user_functions.RATE} {number}": f"{float(r.numpy()):.7g}" for number, r in rates.items()}

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
            callbacks = [*callbacks_of(arguments), self._report]
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
                self._known[int(folder.name)] = Recorded(record["facts"], record["begin"], record["end"])
        except (OSError, TrainingError) as error:
            why = one_line(error, 200)
            logger.info(f"WARNING: {why}: after a kill, call {self._number} of fit is made again")

    def _prune(self, folder: pathlib.Path) -> None:
        """Keeps the last checkpoint of a finished call, and of all of them the newest that fit into `MOST_BYTES`."""
        files.prune(folder, set(files.newest_first(folder)[:1]))
        size = 0
        for each in sorted((p for p in self._fits.glob("[0-9]*") if p.name.isdigit()), reverse=True):
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


def _checksums(names: Iterable[str]) -> dict[str, str]:
    """Returns the checksums of those files that there are; a name may have places for the epoch and metrics."""
    paths = [path for name in names for path in glob.glob(re.sub(r"\{[^}]*\}", "*", glob.escape(name)))]
    return {path: files.checksum(pathlib.Path(path))["sha256"] for path in paths if os.path.isfile(path)}


def _written(arguments: Mapping[str, Any]) -> list[str]:
    """Returns what ModelCheckpoints write."""
    return [str(path) for callback in callbacks_of(arguments) if (path := getattr(callback, "filepath", ""))]


def _continued(arguments: Mapping[str, Any]) -> dict[str, int | None]:
    """Returns what callbacks go on with when they begin, files and folders, with their bytes; None of what is not."""
    names = [getattr(callback, "backup_dir", "") for callback in callbacks_of(arguments)]
    rows = [c for c in callbacks_of(arguments) if isinstance(c, keras.callbacks.CSVLogger)]
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
    if arguments.get("validation_steps") and not in_memory(arguments.get("validation_data")):
        return "validation_steps reads a part of validation_data, whose order begins anew"
    if batches.share_order(arguments.get("x"), arguments.get("validation_data")):
        return "validation_data reads the shuffle() of x, whose order each reading moves on"
    odd = [type(callback).__name__ for callback in callbacks_of(arguments) if training_run.starts_anew(callback)]
    return f"{odd[0]} is a callback of its own, without get_state and set_state" if odd else ""


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
