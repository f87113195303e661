"""Checkpoints on disk: written atomically, and read only when every byte is as it was written. No TensorFlow.

A checkpoint is a folder `<update>` with the tensors in TensorFlow's own format (`tensors.index`, `tensors.data-*`:
`tf.train.load_checkpoint("<update>/tensors")` reads them), `state.json` for all that is no tensor, and `manifest.json`
with the size and SHA-256 of each file and that of the experiment. It is written under another name, synced to the disk
and renamed; then the file `latest` names it, for users: tfdist lists the folders.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.checkpoints import state_shape
from tfdist.config import local_files
from tfdist.errors import UserError

FORMAT = 1
TENSORS = "tensors"  # prefix of TensorFlow's files
STATE = "state.json"
MANIFEST = "manifest.json"
LATEST = "latest"
_NAME = re.compile(r"(\d{1,18})(?:\.(\d{1,9}))?$")
_UNFINISHED = re.compile(r"\.\d+\.\d+$")


class DamagedError(Exception):
    """A checkpoint is not as it was written: the reason, in a few words."""


class Disk:
    """Storage of a folder of checkpoints on a file system, with nothing behind it. The base class of all storage."""

    def begin(self) -> None:
        """Lists in the folder which checkpoints exist, before anything is read."""

    def shown(self, path: pathlib.Path) -> str:
        """Returns a path below the folder as a user would write it."""
        return str(path)

    def publish(self, written: pathlib.Path, name: str) -> None:
        """Makes a checkpoint outlive this machine, before it gets its name; OSError if that is not possible."""

    def fetch(self, path: pathlib.Path) -> None:
        """Brings all files of a checkpoint into its folder; raises UserError if they cannot be read."""

    def prune(self, keep: set[str]) -> None:
        """Deletes all checkpoints but those of these names."""

    def set_aside(self, path: pathlib.Path, moved: pathlib.Path) -> None:
        """Renames a checkpoint, which has been renamed in the folder; raises UserError if that is not possible."""


DISK = Disk()


def newest_first(folder: pathlib.Path) -> list[pathlib.Path]:
    """Lists all checkpoints in a folder, valid or not, the newest first; raises UserError if it cannot be read."""
    try:
        return _listed(folder)
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"{folder} cannot be read ({why})", "correct its permissions, or move it away") from None


def _listed(folder: pathlib.Path) -> list[pathlib.Path]:
    try:
        paths = [path for path in folder.iterdir() if _NAME.match(path.name) and path.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(paths, key=_age, reverse=True)


def _age(path: pathlib.Path) -> tuple[int, int]:
    match = _NAME.match(path.name)
    assert match, path
    return int(match[1]), int(match[2] or 0)


def update_of(path: pathlib.Path) -> int:
    """Returns the update after which a checkpoint was taken."""
    return _age(path)[0]


def is_name(name: str) -> bool:
    """Tells whether a folder of this name is a checkpoint."""
    return bool(_NAME.match(name))


def verify(path: pathlib.Path) -> int:
    """Reads every byte of a checkpoint; returns its size. Raises DamagedError if anything is not as it was written."""
    checksums = _manifest(path)
    for name, expected in checksums.items():
        check(path / name, expected)
    return sum(expected["bytes"] for expected in checksums.values())


def check(file: pathlib.Path, expected: Mapping[str, Any]) -> None:
    """Reads every byte of a file; raises DamagedError if its `checksum` is not the expected one."""
    try:
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise DamagedError(f"{file.name} has {size} bytes instead of {expected['bytes']}")
        digest = _sha256(file)
    except OSError as error:
        raise DamagedError(f"{file.name}: {(error.strerror or str(error)).lower()}") from None
    if digest != expected["sha256"]:
        raise DamagedError(f"{file.name} has changed: its checksum is wrong")


def checksum(file: pathlib.Path) -> dict[str, Any]:
    """Returns the size and the SHA-256 of a file."""
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def read_state(path: pathlib.Path) -> dict:
    """Returns the `state` that `write` wrote; verify the checkpoint first. Raises DamagedError if it is invalid."""
    try:
        state = json.loads(local_files.content(path / STATE))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{STATE} cannot be read ({error})") from None
    if problem := state_shape.error_in(state):
        raise DamagedError(f"{STATE} is not what a run writes: {problem}")
    if update_of(path) != state["position"]["update"]:
        raise DamagedError(f"{STATE} is of update {state['position']['update']}, and the folder is called {path.name}")
    return state


def _manifest(path: pathlib.Path) -> dict[str, dict]:
    try:
        raw = local_files.content(path / MANIFEST)
    except OSError as error:
        raise DamagedError(f"{MANIFEST}: {(error.strerror or str(error)).lower()}") from None
    try:
        manifest = json.loads(raw)
        files, number, experiment = manifest["files"], manifest["format"], manifest["experiment"]
        # Written again from its content, it must be the same bytes: that finds a change anywhere in it.
        intact = raw == _manifest_bytes(files, experiment, number) and all(map(is_described, files.items()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise DamagedError(f"{MANIFEST} has changed: its checksum is wrong")
    if number != FORMAT:
        raise DamagedError(f"it has format {number}, and this tfdist reads {FORMAT}")
    return files


def is_described(file: tuple[str, object]) -> bool:
    """Tells whether a name is of a file in the folder itself, and its value what `checksum` returns."""
    name, value = file
    valid = isinstance(value, dict) and isinstance(value.get("bytes"), int) and isinstance(value.get("sha256"), str)
    return valid and is_inside(name)


def is_inside(name: object) -> bool:
    """Tells whether a name is that of a file in the folder itself."""
    return isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..")


def _manifest_bytes(files: dict, experiment: str, number: int = FORMAT) -> bytes:
    content = {"format": number, "experiment": experiment, "files": files}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps(content | {"sha256": digest}, sort_keys=True, indent=1) + "\n").encode()


def write(
    folder: pathlib.Path,
    update: int,
    state: dict,
    tensors: Callable[[str], object],
    publish: Callable[[pathlib.Path, str], None] = lambda written, name: None,
) -> pathlib.Path:
    """Writes one checkpoint, durably; OSError if the disk is full for example, and earlier ones are unchanged.

    Args:
      folder: where checkpoints are; made if missing.
      update: updates made so far.
      state: anything that JSON can hold (with NaN and infinity); the manifest takes the hash of its `experiment`.
      tensors: called with the prefix of the files that it writes.
      publish: called with the folder of the files and its final name, before it gets that.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{update}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        tensors(str(temporary / TENSORS))
        (temporary / STATE).write_text(json.dumps(state), encoding="utf-8")
        written = sorted(path for path in temporary.iterdir() if path.is_file())
        files = {path.name: checksum(path) for path in written}
        experiment = hashlib.sha256(json.dumps(state.get("experiment"), sort_keys=True).encode()).hexdigest()
        (temporary / MANIFEST).write_bytes(_manifest_bytes(files, experiment))
        for path in [*written, temporary / MANIFEST, temporary]:
            local_files.sync(path)
        # An existing one stays until it is pruned: replacing it would leave a moment with none.
        same = [path for path in _listed(folder) if update_of(path) == update]
        final = folder / (f"{update}.{_age(same[0])[1] + 1}" if same else str(update))
        publish(temporary, final.name)
        temporary.rename(final)
        local_files.sync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    with local_files.replacing(folder / LATEST, folder / f".{LATEST}") as pointer:
        pointer.write_text(final.name + "\n")
    return final


def prune(folder: pathlib.Path, keep: set[pathlib.Path]) -> None:
    """Deletes all checkpoints but those to keep, and what an interrupted writer has left."""
    with contextlib.suppress(OSError):
        for path in _listed(folder):
            if path not in keep:
                # The manifest first: half of a deleted checkpoint must not look like one.
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)
        for path in folder.iterdir():
            if _UNFINISHED.match(path.name):
                shutil.rmtree(path, ignore_errors=True)


def set_aside(path: pathlib.Path) -> pathlib.Path:
    """Renames a checkpoint that is not to be resumed from, so that it no longer counts as one."""
    names = (path.with_name(f"unused-{path.name}{f'-{number}' if number else ''}") for number in range(10_000))
    return path.rename(next(name for name in names if not name.exists()))


def _sha256(path: pathlib.Path) -> str:
    digest, block = hashlib.sha256(), memoryview(bytearray(1 << 20))
    with local_files.opened(path) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def is_being_written(folder: pathlib.Path) -> bool:
    """Tells whether a folder has a checkpoint without its final name."""
    try:
        return any(_UNFINISHED.match(path.name) for path in folder.iterdir())
    except OSError:
        return False
