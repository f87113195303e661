"""A model that has been trained: which one, what it was trained for, and its weights, from a run folder or a file.

A run's model is built again from its code and given the weights, so that nothing in a file decides what is run; a
`.keras` file alone is loaded by Keras, in its safe mode. Nothing in the run folder is changed or locked, so that a run
may be looked at while it goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from tfdist import config
from tfdist.checkpoints import files, integrity, resume
from tfdist.checkpoints.bucket_folder import BucketFolder
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.checkpoints.storage import DISK, Disk
from tfdist.config import buckets, field_syntax, local_files, validation
from tfdist.errors import UserError, one_line

if TYPE_CHECKING:
    import keras

MODEL = "model.keras"
LATEST, BEST = "latest", "best"
CHANGEABLE = ("config.data.", "config.eval.batch_size")
"""Fields of the experiment that may be others after the training."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelRequest:
    """Which model, as the flags say; nothing has been read yet.

    Args:
      workdir: a run folder, or nothing.
      model: a `.keras` file, or nothing.
      checkpoint: `latest`, `best` or an update of the run; nothing for its `model.keras`.
      experiment: what stands in for a run's where there is only a file.
      changes: fields of the experiment by name, such as `config.data.eval_split`.
      trust_code: whether functions that the run folder names are called though it is not the user's own work.
      copy: of a run folder in a bucket, on this machine.
    """

    workdir: str
    model: str
    checkpoint: str
    experiment: config.Experiment
    changes: Mapping[str, Any]
    trust_code: bool = False
    copy: RunFolder | None = None

    @property
    def path(self) -> pathlib.Path:
        """Path of the run folder or the file on this machine."""
        return self.copy.path if self.copy else pathlib.Path(self.workdir or self.model).expanduser()

    @property
    def name(self) -> str:
        """Returns the run folder or the file as a person writes it."""
        return self.copy.name if self.copy else str(self.path)

    def shown(self, path: pathlib.Path) -> str:
        """Returns a path in the run folder as a person writes it."""
        return f"{self.name}/{path.relative_to(self.path)}"

    @property
    def storage(self) -> Disk:
        """Returns what stands behind the checkpoints."""
        return self.copy.storage if self.copy else DISK

    def here(self) -> ModelRequest:
        """Returns the same request, with a copy of a run folder that is in a bucket.

        Raises:
          UserError: it cannot be read.
        """
        if not buckets.is_url(self.workdir):
            return self
        folder = BucketFolder(self.workdir, writes=False)
        folder.create()
        folder.need(MODEL)
        return dataclasses.replace(self, copy=folder)


def request(
    workdir: str,
    model: str,
    checkpoint: str,
    experiment: config.Experiment,
    given: Mapping[str, object],
    file_given: bool,
    trust_code: bool = False,
) -> ModelRequest:
    """Returns the request of these flags, and checks what can be known without looking at the disk.

    Args:
      workdir: `--workdir`, or nothing.
      model: `--model`, or nothing.
      checkpoint: `--checkpoint`, or nothing.
      experiment: that of the command line.
      given: its fields that were given there, by name.
      file_given: whether a file of an experiment was given.
      trust_code: `--trust_code`.

    Raises:
      UserError: the flags do not go together.
    """
    if bool(workdir) == bool(model):
        both = "--workdir and --model name two models" if model else "neither --workdir nor --model says which model"
        raise UserError(f"{both}: give a run folder such as --workdir=runs/digits, or --model=path.keras")
    buckets.check("--workdir", workdir)
    field_syntax.check_local("--model", model)
    if model and checkpoint:
        raise UserError(f"--checkpoint={checkpoint} is for runs: give their --workdir instead of --model")
    if model and trust_code:
        raise UserError(f"--trust_code is for runs, of --model={model} no code is called: leave it out")
    if checkpoint not in ("", LATEST, BEST) and not (checkpoint.isascii() and checkpoint.isdigit()):
        raise UserError(f"--checkpoint={checkpoint} is not understood: use latest, best, or the number of an update")
    if workdir and file_given:
        raise UserError("the experiment of --workdir is in the run folder: leave out --config, and set single fields")
    for name in given:
        if not name.startswith(CHANGEABLE):
            raise UserError(
                f"--{name} changes nothing once a model is trained: leave it out "
                f"(--config.data.* and --config.eval.batch_size can be set)"
            )
    return ModelRequest(workdir, model, checkpoint, validation.validate(experiment), dict(given), trust_code)


def load(path: pathlib.Path) -> keras.Model:
    """Loads a `.keras` file of Keras' own layers and registered ones: safe mode runs no code out of it.

    Raises:
      UserError: it cannot be read, or needs code that is not registered.
    """
    import keras

    try:
        with _optimizer_left_out():
            model = keras.saving.load_model(path, safe_mode=True)
            if any(v.dtype == "float64" for v in model.weights) and keras.config.floatx() != "float64":
                keras.config.set_floatx("float64")  # its loss and metrics are made with it
                model = keras.saving.load_model(path, safe_mode=True)
        return model
    except Exception as error:  # Keras' and those of zip and HDF5 readers
        raise UserError(
            f"--model={path} cannot be loaded ({line(error)}): it must be a whole .keras file of registered layers; "
            "for a run with code of its own, give its --workdir"
        ) from error


# -- weights ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """What to put into the model, on the chief."""

    source: str
    """Where they are from, for a person."""
    arrays: list[np.ndarray]
    """In the order of `model.weights`."""


def read_weights(asked: ModelRequest, experiment: config.Experiment, build: Callable[[], keras.Model]) -> Weights:
    """Reads the weights of a run, and makes sure that they are the ones that it has written.

    Args:
      build: makes the model anew, with any weights.

    Raises:
      UserError: there are none, they are damaged, or they are of another model.
    """
    import tensorflow as tf

    # A model of its own, on the host: it leaves the strategy's variables alone, which are assigned on all workers.
    with tf.device("CPU:0"):
        plain = build()
        if asked.checkpoint:
            return _from_checkpoint(asked, experiment, plain)
        return _from_file(asked, plain)


def _from_file(asked: ModelRequest, plain: keras.Model) -> Weights:
    """Reads `model.keras`, with which the run has ended."""
    from tfdist.monitoring import recorder

    path = asked.path / MODEL
    if not path.is_file():
        checkpoints = files.found(asked.path / "checkpoints")
        hint = (
            "use its newest checkpoint with --checkpoint=latest"
            if checkpoints
            else "it has no checkpoint either: train it"
        )
        raise UserError(f"{asked.name} has no {MODEL} yet: {hint}")
    try:
        result = json.loads(local_files.content(asked.path / "result.json"))
        expected = str(result["weights_sha256"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        expected = ""
    if not expected:
        raise UserError(
            f"{asked.name}{'/'}result.json does not tell the checksum of {MODEL}, so the run has not ended well: "
            f"use --checkpoint=latest, or --model={asked.shown(path)} for that file as it is"
        )
    _check_archive(path, asked.shown(path))
    try:
        with _optimizer_left_out():
            plain.load_weights(path)
    except Exception as error:  # Keras' and those of zip and HDF5 readers
        raise UserError(
            f"{asked.shown(path)} does not fit the model that {plain.name!r} is now ({line(error)}): "
            f"bring back the code that it was trained with, or use --model={asked.shown(path)}"
        ) from error
    if recorder.fingerprint(plain)[0] != expected:
        raise UserError(
            f"{asked.shown(path)} has other weights than result.json tells (weights_sha256): it is of another run, or "
            "damaged: use --checkpoint=latest, or train again"
        )
    return Weights(asked.shown(path), list(plain.get_weights()))


def _check_archive(path: pathlib.Path, shown: str) -> None:
    """Reads a file of Keras to its end: HDF5's reader, in the midst of damaged bytes, ends the process by a signal.

    Raises:
      UserError: it is damaged, or no such file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        why = f"{broken} in it" if broken else ""
    except Exception as error:  # of zip's reader, of zlib, or of the file
        why = line(error)
    if why:
        raise UserError(f"{shown} is damaged ({why}): use --checkpoint=latest, or train again")


def _from_checkpoint(asked: ModelRequest, experiment: config.Experiment, plain: keras.Model) -> Weights:
    """Reads the weights at a checkpoint, as the run would have ended with them there."""
    from tfdist.checkpoints import training_state

    folder = asked.path / "checkpoints"
    paths = files.found(folder)
    if not paths:
        raise UserError(f"there is no checkpoint in {asked.shown(folder)}: leave out --checkpoint, or check --workdir")
    if asked.checkpoint == BEST:
        paths = _at(_best_update(paths, experiment, asked.storage), BEST, paths)
    elif asked.checkpoint != LATEST:
        paths = _at(int(asked.checkpoint), asked.checkpoint, paths)
    for path in paths:
        content = resume.load(path, asked.storage)
        if content is not None:
            # A finished run has a copy of its own, with other weights, which `result.json` tells the checksum of.
            name = experiment.model.name
            outside = name if name.endswith(config.FILE) and pathlib.Path(name) != asked.path / MODEL else ""
            integrity.check_state(asked.path, content.state, asked.shown(path), outside)
            averaged = experiment.optimizer.ema_momentum > 0
            return Weights(asked.shown(path), training_state.weights(plain, content.tensors, averaged))
    raise UserError(f"none of the checkpoints that --checkpoint={asked.checkpoint} means is valid: choose another")


def _best_update(paths: list[pathlib.Path], experiment: config.Experiment, storage: Disk) -> int | None:
    """Returns the update of the best checkpoint, as the newest valid one knows it."""
    if not experiment.checkpoint.best:
        raise UserError("--checkpoint=best, and the run has not looked for it (checkpoint.best): use latest")
    newest = next((content for path in paths if (content := resume.load(path, storage))), None)
    return newest.state["best"]["update"] if newest else None


def _at(update: int | None, name: str, paths: list[pathlib.Path]) -> list[pathlib.Path]:
    """Returns the checkpoints of an update, which `--checkpoint` calls by this name.

    Raises:
      UserError: there is none.
    """
    return [path for path in paths if files.update_of(path) == update] or _no_such(name, paths)


def _no_such(name: str, paths: list[pathlib.Path]) -> NoReturn:
    updates = ", ".join(str(files.update_of(path)) for path in reversed(paths))
    raise UserError(f"--checkpoint={name} is not there: the updates that have one are {updates}")


@contextlib.contextmanager
def _optimizer_left_out() -> Iterator[None]:
    """Keeps Keras from warning that an optimizer is another one: nothing is going to be updated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
        yield


def line(error: BaseException) -> str:
    """Returns what an error of another library says, in one line."""
    return one_line(error, 200) or type(error).__name__
