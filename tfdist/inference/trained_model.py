"""A trained model: its experiment and its weights, from a run folder or a `.keras` file.

A run's model is built again from its code and gets the weights, so that no file determines which code runs; a `.keras`
file alone is loaded by Keras, in its safe mode. Nothing in the run folder is changed or locked: the run may go on.
"""

import contextlib
import dataclasses
import os
import pathlib
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from tfdist import config
from tfdist.checkpoints import files, integrity, own_work, resume
from tfdist.checkpoints.bucket_folder import BucketFolder
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.cluster.peers import differing_facts
from tfdist.config import buckets, field_syntax, local_files, user_functions, validation
from tfdist.errors import UserError, one_line

if TYPE_CHECKING:
    import keras

T = TypeVar("T")
MODEL = "model.keras"
LATEST, BEST = "latest", "best"
CHANGEABLE = ("config.data.", "config.eval.batch_size")  # may change after the training


@dataclasses.dataclass(frozen=True, slots=True)
class ModelRequest:
    """The model that the flags name, see `check`; nothing has been read yet."""

    workdir: str  # a run folder, or empty
    model: str  # a `.keras` file, or empty
    checkpoint: str  # `latest`, `best` or an update of the run; empty for its `model.keras`
    experiment: config.Experiment  # replaces a run's where there is only a file
    changes: Mapping[str, Any]  # fields of the experiment by name, such as `config.data.eval_split`
    trust_code: bool = False  # call functions that the run folder names though it is not the user's own work
    copy: RunFolder | None = None  # of a run folder in a bucket, on this machine

    path = property(lambda self: self.copy.path if self.copy else pathlib.Path(self.workdir or self.model).expanduser())
    """Returns the path of the run folder or the file on this machine."""
    name = property(lambda self: self.copy.name if self.copy else str(self.path))
    """Returns the run folder or the file as the user writes it."""

    def shown(self, path: pathlib.Path) -> str:
        """Returns a path in the run folder as the user writes it."""
        return f"{self.name}/{path.relative_to(self.path)}"

    storage = property(lambda self: self.copy.storage if self.copy else files.DISK)
    """Returns what stands behind the checkpoints."""

    def here(self) -> "ModelRequest":
        """Returns the same request with a local copy of a run folder in a bucket; raises UserError if unreadable."""
        if not buckets.is_url(self.workdir):
            return self
        folder = BucketFolder(self.workdir, writes=False)
        folder.create()
        folder.need(MODEL)
        return dataclasses.replace(self, copy=folder)


def check(request: ModelRequest, from_file: bool = False) -> None:
    """Checks a request without access to the disk; `from_file` tells that --config is given."""
    workdir, model, checkpoint = request.workdir, request.model, request.checkpoint
    if bool(workdir) == bool(model):
        both = "--workdir and --model name two models" if model else "neither --workdir nor --model says which model"
        raise UserError(both, "give a run folder such as --workdir=runs/digits, or --model=path.keras")
    buckets.check("--workdir", workdir)
    field_syntax.check_local("--model", model)
    if model and checkpoint:
        raise UserError(f"--checkpoint={checkpoint} is for runs", "give their --workdir instead of --model")
    if model and request.trust_code:
        raise UserError(f"--trust_code is for runs, of --model={model} no code is called", "leave it out")
    if checkpoint not in ("", LATEST, BEST) and not (checkpoint.isascii() and checkpoint.isdigit()):
        raise UserError(f"--checkpoint={checkpoint} is not understood", "use latest, best, or the number of an update")
    if workdir and from_file:
        raise UserError("the experiment of --workdir is in the run folder", "leave out --config, and set single fields")
    for name in request.changes:
        if not name.startswith(CHANGEABLE):
            what = f"--{name} changes nothing once a model is trained"
            raise UserError(what, "leave it out (--config.data.* and --config.eval.batch_size can be set)")
    validation.validate(request.experiment)


def read_experiment(request: ModelRequest) -> config.Experiment:
    """Reads the experiment that the model was trained with, and applies the request's changes."""
    path = request.path
    if request.model:
        if path.suffix != ".keras" or not path.is_file():
            why = "is a folder: give it as --workdir" if path.is_dir() else "is not a file that ends in .keras"
            raise UserError(f"--model={path} {why if path.exists() else 'does not exist'}")
        return request.experiment
    experiment = _recorded(request, path)
    config.set_fields(experiment, {name.removeprefix("config."): value for name, value in request.changes.items()})
    # The files that its training began with may no longer exist.
    experiment.model.weights = ""
    if experiment.model.name.endswith(config.FILE) and (path / MODEL).is_file():
        # The layers come from this file, also where the weights are from a checkpoint.
        integrity.check_trusted(path, request.name, [MODEL])
        experiment.model.name = str(path / MODEL)
    return validation.validate(experiment)


def _recorded(request: ModelRequest, path: pathlib.Path) -> config.Experiment:
    """Reads the experiment of a run folder, and checks that its functions may be called."""
    fields = None
    with contextlib.suppress(OSError), local_files.opened(path / own_work.EXPERIMENT) as file:
        owner, content = os.fstat(file.fileno()).st_uid, file.read(local_files.MOST)
        fields = local_files.json_object(content)
    if fields is None:
        what = f"--workdir={request.name} holds no run (no experiment.json that can be read)"
        raise UserError(what, "check the path")
    if not request.checkpoint:  # which is compared with its own record
        integrity.check_trusted(path, request.name)
    experiment = experiment_from(fields, str(path / own_work.EXPERIMENT))
    experiment.data.name = user_functions.as_now(experiment.data.name)
    if not request.trust_code:
        changed = tuple(name.removeprefix("config.") for name in request.changes)
        own_work.check(path, content, owner, experiment, changed, request.name)
    return experiment


def other_data(request: ModelRequest) -> bool:
    """Tells whether the request names another data set than that of the run."""
    name = request.changes.get("config.data.name")
    recorded = RunFolder(str(request.path), writes=False).earlier() or {}
    return name is not None and (bool(request.model) or name != recorded.get("data", {}).get("name"))


def experiment_from(fields: dict[str, Any], what: str = "the experiment") -> config.Experiment:
    """Returns the experiment from its `dataclasses.asdict`; missing fields of earlier versions get their defaults."""
    return _filled(config.Experiment(), fields, what)


def _filled(instance: T, fields: dict[str, Any], what: str) -> T:
    for name, value in fields.items():
        name = config.current_name(name)
        if not hasattr(instance, name):
            why = f"{what} has a field {name!r}, which this tfdist does not know"
            raise UserError(why, "use the version of the run")
        default = getattr(instance, name)
        nested = dataclasses.is_dataclass(default)
        if not isinstance(value, dict if nested else str if isinstance(default, str) else (int, float)):
            raise UserError(f"{what} has {name}={value!r}, which it cannot have been written with", "copy it back")
        setattr(instance, name, _filled(type(default)(), value, what) if isinstance(value, dict) else value)
    return instance


def load(path: pathlib.Path) -> "keras.Model":
    """Loads a `.keras` file of Keras' own and registered layers: safe mode runs no code in it."""
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
            f"--model={path} cannot be loaded ({one_line(error, 200)}): it must be a whole .keras file of registered "
            "layers; for a run with code of its own, give its --workdir"
        ) from error


Weights: TypeAlias = tuple[str, list[np.ndarray]]  # file or checkpoint, and arrays in the order of `model.weights`


def read_weights(requested: ModelRequest, experiment: config.Experiment, build: Callable[[], "keras.Model"]) -> Weights:
    """Reads the weights of a run for the model that `build` makes, and checks that they are as it has written them."""
    import tensorflow as tf

    # A separate model on the host leaves the strategy's variables alone, which are assigned on all workers.
    with tf.device("CPU:0"):
        plain = build()
        if requested.checkpoint:
            return _from_checkpoint(requested, experiment, plain)
        described = local_files.read_object(requested.path / "environment.json") or {}
        _check_code(requested, experiment, plain, described.get("code", {}))
        return _from_file(requested, plain)


def _from_file(requested: ModelRequest, plain: "keras.Model") -> Weights:
    """Reads `model.keras`, with which the run has ended."""
    from tfdist.monitoring import recorder

    path = requested.path / MODEL
    if not path.is_file():
        some = files.newest_first(requested.path / "checkpoints")
        fix = "use its newest checkpoint with --checkpoint=latest" if some else "it has no checkpoint either: train it"
        raise UserError(f"{requested.name} has no {MODEL} yet", fix)
    result = local_files.read_object(requested.path / integrity.RESULT) or {}
    expected, listed = str(result.get("weights_sha256", "")), MODEL in result.get("files", {})
    if not expected:
        what = f"{requested.name}/result.json has no checksum of {MODEL}, so the run has not completed"
        raise UserError(what, f"use --checkpoint=latest, or --model={requested.shown(path)} for that file as it is")
    shown = requested.shown(path)
    if listed:
        integrity.check_trusted(requested.path, requested.name, [MODEL])
    try:  # to its end: HDF5's reader of damaged bytes ends the process by a signal
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        why = f"{broken} in it" if broken else ""
    except Exception as error:  # of zip's reader, of zlib, or of the file
        why = one_line(error, 200)
    if why:
        raise UserError(f"{shown} is damaged ({why})", "use --checkpoint=latest, or train again")
    try:
        with _optimizer_left_out():
            plain.load_weights(path)
    except Exception as error:  # Keras' and those of zip and HDF5 readers
        what = f"{shown} does not fit the model that {plain.name!r} is now ({one_line(error, 200)})"
        raise UserError(what, f"bring back the code that it was trained with, or use --model={shown}") from error
    if not listed and recorder.fingerprint(plain)[0] != expected:  # Keras merges LoRA's weights in a file
        what = f"{shown} has other weights than result.json (weights_sha256): it is of another run, or damaged"
        raise UserError(what, "use --checkpoint=latest, or train again")
    return shown, list(plain.get_weights())


def _check_code(asked: ModelRequest, experiment: config.Experiment, plain: "keras.Model", known: Mapping) -> None:
    """Refuses functions of the user's, or what they make of the data, that are others than those of the training."""
    from tfdist.keras_bridge import setups

    differing = lambda here: [name for name, *_ in differing_facts(known, here)]
    code = user_functions.code_digests(own_work.functions(experiment).values())
    changed = differing(code) or differing(setups.of_model(plain))
    if changed and not asked.trust_code:
        what = f"{', '.join(changed)} has changed since {asked.name} was trained, so the model may be another"
        raise UserError(what, f"bring it back, give --model={asked.shown(asked.path / MODEL)}, or --trust_code")


def _from_checkpoint(requested: ModelRequest, experiment: config.Experiment, plain: "keras.Model") -> Weights:
    """Reads the weights of a checkpoint, as the run would have ended with them."""
    from tfdist.checkpoints import training_state

    folder = requested.path / "checkpoints"
    paths = files.newest_first(folder)
    if not paths:
        what = f"there is no checkpoint in {requested.shown(folder)}"
        raise UserError(what, "leave out --checkpoint, or check --workdir")
    if requested.checkpoint != LATEST:
        if requested.checkpoint != BEST:
            update: int | None = int(requested.checkpoint)
        elif experiment.checkpoint.best:  # which the newest one records
            newest = resume.load(paths[0], requested.storage)
            if newest is None:
                what = f"{requested.shown(paths[0])}, which tells the best checkpoint, is damaged"
                raise UserError(what, "choose another one by its update")
            update = newest.state["best"]["update"]
        else:
            raise UserError("--checkpoint=best, and the run has not recorded it (checkpoint.best)", "use latest")
        chosen = [path for path in paths if files.update_of(path) == update]
        if not chosen:
            updates = ", ".join(str(files.update_of(path)) for path in reversed(paths))
            what = f"--checkpoint={requested.checkpoint} is not there: the updates that have one are {updates}"
            raise UserError(what)
        paths = chosen
    for path in paths:
        content = resume.load(path, requested.storage)
        if content is not None:
            # A finished run has a copy of its own, with other weights, which `result.json` tells the checksum of.
            name = experiment.model.name
            outside = name if name.endswith(config.FILE) and pathlib.Path(name) != requested.path / MODEL else ""
            integrity.check_state(requested.path, content.state, requested.shown(path), outside)
            _check_code(requested, experiment, plain, content.state.get("facts", {}))
            averaged = experiment.optimizer.ema_momentum > 0
            return requested.shown(path), training_state.weights(plain, content.tensors, averaged)
    what = f"none of the checkpoints that --checkpoint={requested.checkpoint} means is valid"
    raise UserError(what, "choose another")


@contextlib.contextmanager
def _optimizer_left_out() -> Iterator[None]:
    """Suppresses Keras' warning about another optimizer: nothing is going to be updated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
        yield
