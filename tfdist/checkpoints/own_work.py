"""Whether a run folder is the user's own work: only then is code called that it names. No TensorFlow.

`experiment.json` may name any function of any module, with arguments, so a folder of somebody else's could run
anything. Therefore a run that has functions of its own leaves a mark beside that file: a keyed digest of its bytes. The
key is random, made once on first use, and only the user can read it, so nobody else can make the mark. It says nothing
of the place: a folder may be moved, copied, and read on any host with the same home.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import pathlib
import secrets

from tfdist.checkpoints.run_folder import RunFolder, strict
from tfdist.config import Experiment, field_syntax, regular_file, training_objects
from tfdist.config.messages import logger
from tfdist.errors import UserError

EXPERIMENT = "experiment.json"
MARK = "experiment.mark"
_BYTES = 32


def functions(experiment: Experiment) -> dict[str, str]:
    """Returns what an experiment names that is neither tfdist's nor Keras', by field: all of it may be called."""
    train, names = experiment.train, {}
    name = experiment.data.name
    if ":" in name and field_syntax.files(name) is None:  # of TFDS, too: what stands before a colon names other code
        names["data.name"] = name
    for field, name in (("model.name", experiment.model.name), ("optimizer.name", experiment.optimizer.name)):
        if field_syntax.is_reference(name):
            names[field] = name
    for asked in (training_objects.loss(train), *training_objects.metrics(train), *training_objects.callbacks(train)):
        if asked is not None and not asked.kind:
            names.setdefault(asked.field, asked.name)
    return names


def write_experiment(folder: RunFolder, experiment: Experiment) -> None:
    """Writes `experiment.json`, and the mark if it names functions.

    Raises:
      TrainingError: the folder cannot be written, because the disk is full for example.
    """
    if not folder.writes:
        return
    text = json.dumps(strict(dataclasses.asdict(experiment)), indent=2) + "\n"
    folder.remove(MARK)
    if functions(experiment):
        try:
            folder.write_text(MARK, _digest(_key(make=True), text.encode()) + "\n")
        except _NoKeyError as error:
            logger.info(f"WARNING: {error}: tfdist.evaluate, predict and export will ask for --trust_code")
    folder.write_text(EXPERIMENT, text)


def check(
    path: pathlib.Path, content: bytes, owner: int, experiment: Experiment, changed: tuple[str, ...], name: str = ""
) -> None:
    """Makes sure that the functions that a run folder names may be called.

    Args:
      path: the folder.
      content: of its `experiment.json`.
      owner: user id of that file.
      experiment: what it says.
      changed: fields that have another value by now, given by the user, such as `data.name`.
      name: of the folder for a person, if not its path.

    Raises:
      UserError: it names one, and is not the user's own work.
    """
    named = {field: name for field, name in functions(experiment).items() if field not in changed}
    if not named:
        return
    why = _foreign(path, content, owner)
    if why:
        field, function = next(iter(named.items()))
        raise UserError(
            f"--workdir={name or path} has {field}={function!r}, a function that would be called, and {why}: "
            "give --trust_code if you know who made it"
        )


def _foreign(path: pathlib.Path, content: bytes, owner: int) -> str:
    """Returns why a folder is not the user's own work; nothing if it is."""
    if owner != os.geteuid():
        return f"{EXPERIMENT} belongs to another user (number {owner})"
    try:
        given = regular_file.content(path / MARK).decode("ascii").strip()
    except (OSError, ValueError):
        return f"there is no mark that you have made it ({MARK})"
    try:
        key = _key()
    except _NoKeyError as error:
        return str(error)
    if not hmac.compare_digest(given.encode(), _digest(key, content).encode()):
        return f"its mark ({MARK}) is not yours, or {EXPERIMENT} was changed"
    return ""


def _digest(key: bytes, content: bytes) -> str:
    return hmac.new(key, b"tfdist " + EXPERIMENT.encode() + b"\0" + content, hashlib.sha256).hexdigest()


# -- the key ------------------------------------------------------------------


class _NoKeyError(Exception):
    """There is no key that could be used: the reason, as a part of a sentence."""


def _key(make: bool = False) -> bytes:
    """Returns this user's key.

    Args:
      make: make it if there is none.

    Raises:
      _NoKeyError: there is none, or others can read it.
    """
    try:
        base = os.environ.get("XDG_CONFIG_HOME") or pathlib.Path.home() / ".config"
        path = pathlib.Path(base, "tfdist", "run_folder_key")
        if make and not path.exists():
            _make(path)
        with regular_file.opened(path) as file:
            about, key = os.fstat(file.fileno()), file.read(_BYTES + 1)
    except FileNotFoundError:
        raise _NoKeyError(f"there is no key to check its mark with ({path})") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise _NoKeyError(f"your key for marks cannot be used ({error})") from None
    if about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise _NoKeyError(f"your key for marks is open to others ({path}; chmod 600 makes it yours)")
    if len(key) != _BYTES:
        raise _NoKeyError(f"your key for marks is damaged ({path}; delete it for a new one)")
    return key


def _make(path: pathlib.Path) -> None:
    """Makes a random key, whole at once: another run may be doing the same, and one of both wins."""
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
