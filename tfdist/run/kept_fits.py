"""What `--workdir` keeps of each `model.fit` of a script, so that the same command continues after a kill."""

from __future__ import annotations

import json
import os
import pathlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from tfdist.checkpoints import files
from tfdist.checkpoints.manager import Checkpoints
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.cluster import discovery
from tfdist.config import buckets
from tfdist.config.messages import logger
from tfdist.config.runtime_options import ResumeOptions
from tfdist.distributed.distribution import Distribution
from tfdist.errors import Interrupted, UserError
from tfdist.keras_bridge import keras_internals
from tfdist.trainer.worker_session import Signals

FITS = "fits"
RECORD = "call.json"
MOST_BYTES = 10 << 30  # of the states of finished calls; those before the newest that fit in are trained again
_SETTINGS = (
    "batch_size",
    "epochs",
    "initial_epoch",
    "steps_per_epoch",
    "shuffle",
    "class_weight",
    "validation_split",
    "validation_steps",
    "validation_batch_size",
    "validation_freq",
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
        self._number = 0
        self._depth = 0

    def __enter__(self) -> KeptFits:
        self._folder.create()
        attempt, holds = discovery.find(os.environ).attempt, self._fits.exists()
        if self._options.resume == "require" and self._distribution.is_chief and not holds:
            raise UserError(f"--resume=require, and {self._folder.path} holds no call of fit", "check --workdir")
        # Workers that the launcher has started again continue, whatever the flag says.
        if self._options.resume == "never" and self._distribution.is_chief and holds and not attempt:
            logger.info(f"the earlier calls of fit are now in {files.set_aside(self._fits)}")
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.release()

    def call(self, fit: Callable[..., Any], model: keras.Model, arguments: dict[str, Any]) -> Any:
        """Trains, or restores what an earlier start of the same script has trained."""
        # Within a callback of another call, which continues with that one; or kept by the script itself.
        if self._depth or arguments.get("checkpoints"):
            return fit(model, **arguments)
        self._number += 1
        folder = self._fits / f"{self._number:04d}"
        facts = _facts(model, arguments)
        before = self._recorded(folder)
        if before and not self._options.resume_changed:
            _check_same(self._number, facts, before["facts"])
        self._begin_random(folder, facts, before)
        changed = self._options.resume_changed
        kept = Checkpoints(folder, every=self._every, keep=2, resume="auto", changed=changed)
        self._depth += 1
        try:
            with self._distribution.peers.seeing_signals(), Signals() as signals:
                history = fit(model, **arguments, checkpoints=kept, should_stop=signals.reason)
        except Interrupted as stopped:
            logger.info(f"{stopped}: the same command continues from there")
            raise SystemExit(143) from None
        finally:
            self._depth -= 1
        self._end_random(folder, facts, before)
        if self._distribution.is_chief:
            self._prune(folder)
        return history

    def finish(self) -> None:
        """Warns of recorded calls that the script no longer makes."""
        folders = sorted(self._fits.glob("[0-9]*")) if self._distribution.is_chief else []
        gone = [path.name for path in folders if int(path.name) > self._number]
        if gone:
            logger.info(
                f"WARNING: {self._fits} holds call {', '.join(gone)} of fit, which the script no longer makes: what it "
                "trained is not used"
            )

    def _recorded(self, folder: pathlib.Path) -> dict[str, Any] | None:
        """Returns the chief's record of a call, if there is one, on all workers."""
        record = files.read_object(folder / RECORD) if self._distribution.is_chief else None
        return self._distribution.peers.gather(f"call {folder.name} of fit", record)[0]

    def _begin_random(self, folder: pathlib.Path, facts: dict[str, str], before: dict[str, Any] | None) -> None:
        """Sets the global generators as they were when this call first began."""
        now = _random_state()
        if before is None:
            self._write(folder, {"facts": facts, "begin": now, "end": None})
        elif before["begin"] != now:
            logger.info(
                f"the script has drawn other random numbers before call {self._number} of fit than when it first "
                "began: what it made of them may differ"
            )
            _set_random_state(before["begin"])

    def _end_random(self, folder: pathlib.Path, facts: dict[str, str], before: dict[str, Any] | None) -> None:
        """Sets them as they were when the call ended, or records that."""
        if before is not None and before["end"] is not None:
            _set_random_state(before["end"])
        else:
            begin = before["begin"] if before else (files.read_object(folder / RECORD) or {}).get("begin")
            self._write(folder, {"facts": facts, "begin": begin, "end": _random_state()})

    def _write(self, folder: pathlib.Path, record: dict[str, Any]) -> None:
        if self._distribution.is_chief:
            folder.mkdir(parents=True, exist_ok=True)
            self._folder.write_text(f"{FITS}/{folder.name}/{RECORD}", json.dumps(record))

    def _prune(self, folder: pathlib.Path) -> None:
        """Keeps the last checkpoint of a finished call, and of all of them the newest that fit into `MOST_BYTES`."""
        files.prune(folder, set(files.newest_first(folder)[:1]))
        size = 0
        for each in sorted(self._fits.glob("[0-9]*"), reverse=True):
            size += sum(f.stat().st_size for f in each.rglob("*") if f.is_file())
            if size > MOST_BYTES and each != folder:
                files.prune(each, set())


def _facts(model: keras.Model, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns what must be the same when a call of `fit` is continued."""
    facts = {name: str(arguments[name]) for name in _SETTINGS if arguments.get(name) is not None}
    facts["model"] = type(model).__name__
    facts["weights"] = str([tuple(variable.shape) for variable in model.variables])
    if model.compiled:
        facts["loss"] = str(keras.tree.map_structure(_name, model.loss))
        optimizer = keras_internals.inner_optimizer(model.optimizer)
        settings = {k: v for k, v in optimizer.get_config().items() if isinstance(v, str | int | float | None)}
        facts["optimizer"] = f"{type(optimizer).__name__} {settings | {'name': '', 'learning_rate': ''}}"
    return facts


def _name(thing: object) -> str:
    return thing if isinstance(thing, str) else str(getattr(thing, "name", getattr(thing, "__name__", thing)))


def _check_same(number: int, here: Mapping[str, str], there: Mapping[str, str]) -> None:
    for name in {**there, **here}:
        if there.get(name) != here.get(name):
            raise UserError(
                f"call {number} of fit cannot continue: {name} was {there.get(name, 'not given')} and is "
                f"{here.get(name, 'not given')}",
                "undo the change, choose another --workdir, or --resume=never, which sets the earlier calls aside",
            )


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
