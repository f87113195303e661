"""What a model was trained for: the experiment that its run folder holds."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any, TypeVar

from tfdist import config
from tfdist.checkpoints import integrity, own_work
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.config import local_files, user_functions, validation
from tfdist.errors import UserError
from tfdist.inference import trained_model
from tfdist.inference.trained_model import ModelRequest

T = TypeVar("T")


def read_experiment(asked: ModelRequest) -> config.Experiment:
    """Reads what the model was trained for, and makes the changes that were asked for.

    Raises:
      UserError: there is no such run or file, its experiment cannot be used, or it names functions and is not the
        user's own work.
    """
    path = asked.path
    if asked.model:
        if path.suffix != ".keras" or not path.is_file():
            why = "is a folder: give it as --workdir" if path.is_dir() else "is not a file that ends in .keras"
            raise UserError(f"--model={path} {why if path.exists() else 'does not exist'}")
        return asked.experiment
    experiment = _recorded(asked, path)
    for name, value in asked.changes.items():
        owner: Any = experiment
        *groups, field = name.split(".")[1:]
        for group in groups:
            owner = getattr(owner, group)
        setattr(owner, field, value)
    # The files that its training began with may be gone by now.
    experiment.model.weights = ""
    if experiment.model.name.endswith(config.FILE) and (path / trained_model.MODEL).is_file():
        # The layers come from this file, also where the weights are from a checkpoint.
        integrity.check_trusted(path, asked.name, [trained_model.MODEL])
        experiment.model.name = str(path / trained_model.MODEL)
    return validation.validate(experiment)


def _recorded(asked: ModelRequest, path: pathlib.Path) -> config.Experiment:
    """Reads the experiment of a run folder, whose functions may be called."""
    try:
        with local_files.opened(path / own_work.EXPERIMENT) as file:
            owner, content = os.fstat(file.fileno()).st_uid, file.read(local_files.MOST)
        fields = json.loads(content)
    except (OSError, ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise UserError(f"--workdir={asked.name} holds no run (no experiment.json that can be read): check the path")
    if not asked.checkpoint:  # which is compared with its own record
        integrity.check_trusted(path, asked.name)
    experiment = _made(config.Experiment, fields, str(path / own_work.EXPERIMENT))
    experiment.data.name = user_functions.as_now(experiment.data.name)
    if not asked.trust_code:
        changed = tuple(name.removeprefix("config.") for name in asked.changes)
        own_work.check(path, content, owner, experiment, changed, asked.name)
    return experiment


def other_data(asked: ModelRequest) -> bool:
    """Says whether a data set is asked for that is not the one of the run."""
    name = asked.changes.get("config.data.name")
    recorded = RunFolder(str(asked.path), writes=False).earlier() or {}
    return name is not None and (bool(asked.model) or name != recorded.get("data", {}).get("name"))


def experiment_from(fields: dict[str, object]) -> config.Experiment:
    """Returns the experiment whose `dataclasses.asdict` these fields are."""
    return _made(config.Experiment, fields, "the experiment")


def _made(kind: type[T], fields: dict[str, Any], what: str) -> T:
    """Returns a dataclass with these fields; those that are missing were not there yet and keep their defaults.

    Args:
      what: where the fields are from, for messages.
    """
    made = kind()
    for name, value in fields.items():
        name = config.current_name(name)
        if not hasattr(made, name):
            raise UserError(f"{what} has a field {name!r}, which this tfdist does not know: use the version of the run")
        inner = getattr(made, name)
        expected = dict if dataclasses.is_dataclass(inner) else str if isinstance(inner, str) else (int, float)
        possible = isinstance(value, expected)
        if not possible:
            raise UserError(f"{what} has {name}={value!r}, which it cannot have been written with: copy it back")
        setattr(made, name, _made(type(inner), value, what) if dataclasses.is_dataclass(inner) else value)
    return made
