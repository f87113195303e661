"""Proof that a run folder is the user's own work: only then is code called that it names. No TensorFlow.

`experiment.json` may name any function of any module, with arguments, so another user's folder could run anything.
Therefore a run with functions leaves a mark beside that file: a keyed digest of its bytes. The key is random, made on
first use, and only the user can read it. A folder may be moved, copied, and read on any host with the same home.
"""

import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import pathlib
import secrets

from tfdist.checkpoints.run_folder import RunFolder, strict
from tfdist.config import Experiment, field_syntax, local_files, training_objects
from tfdist.config.messages import logger
from tfdist.errors import UserError

EXPERIMENT = "experiment.json"
MARK = "experiment.mark"
_BYTES = 32


def functions(experiment: Experiment) -> dict[str, str]:
    """Returns by field the names in an experiment that are neither tfdist's nor Keras': all may be called."""
    train, names = experiment.train, {}
    name = experiment.data.name
    if ":" in name and field_syntax.files(name) is None:  # in TFDS, too, the part before a colon names other code
        names["data.name"] = name
    named = {"model.name": experiment.model.name, "optimizer.name": experiment.optimizer.name}
    names |= {field: name for field, name in named.items() if field_syntax.is_reference(name)}
    for spec in (training_objects.loss(train), *training_objects.metrics(train), *training_objects.callbacks(train)):
        if spec is not None and not spec.kind:
            names.setdefault(spec.field, spec.name)
    return names


def write_experiment(folder: RunFolder, experiment: Experiment) -> None:
    """Writes `experiment.json`, and the mark if it names functions; raises TrainingError if it cannot be written."""
    if not folder.writes:
        return
    text = json.dumps(strict(dataclasses.asdict(experiment)), indent=2) + "\n"
    folder.remove(MARK)
    if functions(experiment):
        try:
            folder.write_text(MARK, _digest(_key(create=True), text.encode()) + "\n")
        except _NoKeyError as error:
            logger.info(f"WARNING: {error}: tfdist.evaluate, predict and export will ask for --trust_code")
    folder.write_text(EXPERIMENT, text)


def check(
    path: pathlib.Path, content: bytes, owner: int, experiment: Experiment, changed: tuple[str, ...], name: str = ""
) -> None:
    """Refuses a run folder, `name` in messages, that names functions to call and is not the user's own work.

    `content` and `owner`, a user id, are of its `experiment.json`, from which `experiment` was parsed; `changed` are
    fields that the user has set to another value, such as `data.name`.
    """
    named = {field: name for field, name in functions(experiment).items() if field not in changed}
    why = _foreign(path, content, owner) if named else ""
    if why:
        field, function = next(iter(named.items()))
        what = f"--workdir={name or path} has {field}={function!r}, a function that would be called, and {why}"
        raise UserError(what, "give --trust_code if you know who made it")


def _foreign(path: pathlib.Path, content: bytes, owner: int) -> str:
    """Returns why a folder is not the user's own work; nothing if it is."""
    if owner != os.geteuid():
        return f"{EXPERIMENT} belongs to another user (number {owner})"
    try:
        mark = local_files.content(path / MARK).decode("ascii").strip()
    except (OSError, ValueError):
        return f"there is no mark that you have made it ({MARK})"
    try:
        valid = hmac.compare_digest(mark.encode(), _digest(_key(), content).encode())
    except _NoKeyError as error:
        return str(error)
    return "" if valid else f"its mark ({MARK}) is not yours, or {EXPERIMENT} was changed"


def _digest(key: bytes, content: bytes) -> str:
    return hmac.new(key, b"tfdist " + EXPERIMENT.encode() + b"\0" + content, hashlib.sha256).hexdigest()


class _NoKeyError(Exception):
    """There is no key that could be used: the reason, as a part of a sentence."""


def _key(create: bool = False) -> bytes:
    """Returns this user's key; raises _NoKeyError if there is none, or others can read it."""
    try:
        base = os.environ.get("XDG_CONFIG_HOME") or pathlib.Path.home() / ".config"
        path = pathlib.Path(base, "tfdist", "run_folder_key")
        if create and not path.exists():
            _create(path)
        with local_files.opened(path) as file:
            status, key = os.fstat(file.fileno()), file.read(_BYTES + 1)
    except FileNotFoundError:
        raise _NoKeyError(f"there is no key to check its mark with ({path})") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise _NoKeyError(f"your key for marks cannot be used ({error})") from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise _NoKeyError(f"your key for marks is open to others ({path}; chmod 600 makes it yours)")
    if len(key) != _BYTES:
        raise _NoKeyError(f"your key for marks is damaged ({path}; delete it for a new one)")
    return key


def _create(path: pathlib.Path) -> None:
    """Creates a random key atomically: another run may be doing the same, and one of both wins."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
