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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfdist import config
from tfdist.checkpoints import files
from tfdist.checkpoints.files import DamagedError
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.config import validation
from tfdist.errors import UserError, one_line

MODEL = "model.keras"
LATEST, BEST = "latest", "best"
CHANGEABLE = ("config.data.", "config.eval.batch_size")
"""Fields of the experiment that may be others after the training."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """Which model, as the flags say; nothing has been read yet.

    Args:
      workdir: a run folder, or nothing.
      model: a `.keras` file, or nothing.
      checkpoint: `latest`, `best` or an update of the run; nothing for its `model.keras`.
      experiment: what stands in for a run's where there is only a file.
      changes: fields of the experiment by name, such as `config.data.eval_split`.
    """

    workdir: str
    model: str
    checkpoint: str
    experiment: config.Experiment
    changes: Mapping[str, Any]

    @property
    def path(self) -> pathlib.Path:
        """Of the run folder or the file."""
        return pathlib.Path(self.workdir or self.model).expanduser()


def wanted(
    workdir: str, model: str, checkpoint: str, experiment: Any, given: Mapping[str, Any], file_given: bool
) -> Wanted:
    """Checks what can be known without looking.

    Args:
      experiment: with what was given on the command line in it.
      given: the fields that were.
      file_given: an experiment's file was.

    Raises:
      UserError: the flags do not go together.
    """
    if bool(workdir) == bool(model):
        both = "--workdir and --model name two models" if model else "neither --workdir nor --model says which model"
        raise UserError(f"{both}: give a run folder such as --workdir=runs/digits, or --model=path.keras")
    if model and checkpoint:
        raise UserError(f"--checkpoint={checkpoint} is for runs: give their --workdir instead of --model")
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
    return Wanted(workdir, model, checkpoint, validation.validate(experiment), dict(given))


def experiment(wanted: Wanted) -> config.Experiment:
    """What the model was trained for, with the changes that were asked for.

    Raises:
      UserError: there is no such run or file, or its experiment cannot be used.
    """
    path = wanted.path
    if wanted.model:
        if path.suffix != ".keras" or not path.is_file():
            why = "is a folder: give it as --workdir" if path.is_dir() else "is not a file that ends in .keras"
            raise UserError(f"--model={path} {why if path.exists() else 'does not exist'}")
        return wanted.experiment
    fields = RunFolder(str(path), writes=False).earlier()
    if not isinstance(fields, dict):
        raise UserError(f"--workdir={path} holds no run (no experiment.json that can be read): check the path")
    found = _made(config.Experiment, fields, str(path / "experiment.json"))
    for name, value in wanted.changes.items():
        owner: Any = found
        *groups, field = name.split(".")[1:]
        for group in groups:
            owner = getattr(owner, group)
        setattr(owner, field, value)
    # The files that its training began with may be gone by now.
    found.model.weights = ""
    if found.model.name.endswith(config.FILE) and (path / MODEL).is_file():
        found.model.name = str(path / MODEL)
    return validation.validate(found)


def other_data(wanted: Wanted) -> bool:
    """Whether a data set is asked for that is not the one of the run."""
    name = wanted.changes.get("config.data.name")
    recorded = RunFolder(str(wanted.path), writes=False).earlier() or {}
    return name is not None and (bool(wanted.model) or name != recorded.get("data", {}).get("name"))


def same(told: dict[str, Any]) -> config.Experiment:
    """An experiment from its fields, `dataclasses.asdict`."""
    return _made(config.Experiment, told, "the experiment")


def _made(kind: Any, fields: dict[str, Any], what: str) -> Any:
    """A dataclass from its fields; those that are missing were not there yet and keep their defaults."""
    made = kind()
    for name, value in fields.items():
        if not hasattr(made, name):
            raise UserError(f"{what} has a field {name!r}, which this tfdist does not know: use the version of the run")
        inner = getattr(made, name)
        kind = dict if dataclasses.is_dataclass(inner) else str if isinstance(inner, str) else (int, float)
        if not isinstance(value, kind):
            raise UserError(f"{what} has {name}={value!r}, which it cannot have been written with: copy it back")
        setattr(made, name, _made(type(inner), value, what) if dataclasses.is_dataclass(inner) else value)
    return made


def load(path: pathlib.Path) -> Any:
    """A model from a `.keras` file, of Keras' own layers and registered ones: safe mode runs no code out of it.

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

    source: pathlib.Path
    arrays: list[Any]
    """In the order of `model.weights`."""


def weights(
    wanted: Wanted, experiment: config.Experiment, build: Callable[[], Any], say: Callable[[str], None]
) -> Weights:
    """Reads the weights of a run, and makes sure that they are the ones that it has written.

    Args:
      build: makes the model anew, with any weights.
      say: shows a line to a person.

    Raises:
      UserError: there are none, they are damaged, or they are of another model.
    """
    import tensorflow as tf

    # A model of its own, on the host: it leaves the strategy's variables alone, which are assigned on all workers.
    with tf.device("CPU:0"):
        plain = build()
        if wanted.checkpoint:
            return _of_checkpoint(wanted, experiment, plain, say)
        return _of_file(wanted, plain)


def _of_file(wanted: Wanted, plain: Any) -> Weights:
    from tfdist.monitoring import recorder

    path = wanted.path / MODEL
    if not path.is_file():
        there = files.found(wanted.path / "checkpoints")
        hint = (
            "use its newest checkpoint with --checkpoint=latest" if there else "it has no checkpoint either: train it"
        )
        raise UserError(f"{wanted.path} has no {MODEL} yet: {hint}")
    try:
        result = json.loads((wanted.path / "result.json").read_bytes())
        expected = str(result["weights_sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        expected = ""
    if not expected:
        raise UserError(
            f"{wanted.path}{'/'}result.json does not tell the checksum of {MODEL}, so the run has not ended well: "
            f"use --checkpoint=latest, or --model={path} for that file as it is"
        )
    try:
        with _optimizer_left_out():
            plain.load_weights(path)
    except Exception as error:  # Keras' and those of zip and HDF5 readers
        raise UserError(
            f"{path} does not fit the model that {plain.name!r} is now ({line(error)}): "
            f"bring back the code that it was trained with, or use --model={path}"
        ) from error
    if recorder.fingerprint(plain)[0] != expected:
        raise UserError(
            f"{path} has other weights than result.json tells (weights_sha256): it is of another run, or damaged: "
            "use --checkpoint=latest, or train again"
        )
    return Weights(path, list(plain.get_weights()))


def _of_checkpoint(wanted: Wanted, experiment: config.Experiment, plain: Any, say: Callable[[str], None]) -> Weights:
    """The weights at a checkpoint, as the run would have ended with them there."""
    from tfdist.checkpoints import training_state

    folder = wanted.path / "checkpoints"
    try:
        paths = files.found(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror}): correct its permissions") from None
    if not paths:
        raise UserError(f"there is no checkpoint in {folder}: leave out --checkpoint, or check --workdir")
    if wanted.checkpoint not in (LATEST, BEST):
        paths = [path for path in paths if files.update_of(path) == int(wanted.checkpoint)] or _no_such(
            wanted.checkpoint, paths
        )
    if wanted.checkpoint == BEST:
        paths = _best(paths, experiment, say)
    for path in paths:
        found = _read(path, say)
        if found is not None:
            return Weights(path, training_state.weights(plain, found[1], experiment.optimizer.ema_momentum > 0))
    raise UserError(f"none of the checkpoints that --checkpoint={wanted.checkpoint} means is valid: choose another")


def _best(paths: list, experiment: config.Experiment, say: Callable[[str], None]) -> list:
    if not experiment.checkpoint.best:
        raise UserError("--checkpoint=best, and the run has not looked for it (checkpoint.best): use latest")
    newest = next((found for path in paths if (found := _read(path, say))), None)
    update = newest[0]["best"]["update"] if newest else None
    return [path for path in paths if files.update_of(path) == update] or _no_such(BEST, paths)


def _no_such(name: str, paths: list) -> Any:
    there = ", ".join(str(files.update_of(path)) for path in reversed(paths))
    raise UserError(f"--checkpoint={name} is not there: the updates that have one are {there}")


def _read(path: pathlib.Path, say: Callable[[str], None]) -> tuple[dict, dict] | None:
    """State and tensors of a checkpoint, if every byte of it is right; a run that goes on may delete it meanwhile."""
    import tensorflow as tf

    from tfdist.checkpoints import training_state

    try:
        files.verify(path)
        return files.read_state(path), training_state.read(str(path / files.TENSORS))
    except (DamagedError, tf.errors.OpError, IndexError, ValueError, OSError) as error:
        say(f"WARNING: checkpoint {path} is not used: {line(error)}")
        return None


@contextlib.contextmanager
def _optimizer_left_out() -> Iterator[None]:
    """Without Keras' warning that an optimizer is another one: nothing is going to be updated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
        yield


def line(error: BaseException) -> str:
    """What an error of another library says, in one line."""
    return one_line(error, 200) or type(error).__name__
