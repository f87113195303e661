"""The run folder (`--workdir`): what a run leaves behind. No TensorFlow."""

import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import pathlib
import platform
import re
import weakref
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.checkpoints import files
from tfdist.checkpoints.folder_lock import LOCK, FolderLock
from tfdist.config import local_files
from tfdist.config.messages import logger
from tfdist.errors import TrainingError, UserError

if TYPE_CHECKING:
    import keras

LOGS = "logs"  # the launcher's files with each rank's output, which it appends to
RESULTS = ("result.json", "history.jsonl", "checkpoints")  # any shows that a run has measured or learned something
_WITHIN = "earlier"
# Errors of a folder that cannot be renamed while its files can: a container's volume is mounted there, for one.
_CANNOT_RENAME = (errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS)
_OPEN: "weakref.WeakSet[RunFolder]" = weakref.WeakSet()  # the folders of this process, which a forked child has not
# Files that are written once, at the beginning, and kept in memory: a deleted folder gets them again.
RESTORED = ("experiment.json", "experiment.mark", "environment.json", "data.json")


class RunFolder:
    """Creates and writes a `--workdir`. Every file appears whole or not at all.

    Args:
      writes: False for workers other than the chief, which leave nothing behind and log nothing.
      name: as the user writes it, if not `path`.
    """

    def __init__(self, path: str, writes: bool = True, name: str = ""):
        self.path = pathlib.Path(path)
        self.name = name or str(self.path)
        self.checkpoints = self.path / "checkpoints"
        self.storage, self.writes = files.DISK, writes
        self.lock = FolderLock(self.path, self.name, f"process {os.getpid()} on {platform.node()}\n".encode())
        self._unwritten: dict[str, list[str]] = {}  # lines that could not be written, by file
        self._restored: dict[str, bytes] = {}
        self.checksums: dict[str, dict[str, Any]] = {}  # of each file that this process wrote and later commands use
        _OPEN.add(self)

    def create(self) -> None:
        """Begins a run in the folder: `reserve`, for the worker that writes."""
        if self.writes:
            self.reserve()

    def reserve(self) -> None:
        """Makes the folder if it is missing, tries to write in it, and locks it for this run.

        It writes as a run does: a folder in the folder, as for a checkpoint, and a file in it that is written again.
        With a umask that takes the user's own rights away, only the second step fails.
        """
        probe = self.path / f".probe-{os.getpid()}"
        try:
            self._real.mkdir(parents=True, exist_ok=True)
            try:
                probe.mkdir()
                for _ in range(2):
                    (probe / "file").write_bytes(b"")
            finally:
                with contextlib.suppress(OSError):
                    (probe / "file").unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    probe.rmdir()
        except OSError as error:
            mask = os.umask(0o022)  # which only setting it tells
            os.umask(mask)
            fix = f"set umask 022 instead of {mask:03o}" if mask & 0o700 else "choose another folder"
            raise UserError(f"--workdir={self.path} cannot be written ({error.strerror})", fix) from None
        self.lock.acquire()

    def could_be_created(self) -> None:
        """Checks what `create` would check, and changes nothing."""
        existing = next(path for path in (self._real, *self._real.parents) if os.path.lexists(path))
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            why = os.strerror(errno.EACCES) if existing.is_dir() else f"{existing} is not a folder"
            raise UserError(f"--workdir={self.path} cannot be written ({why})", "choose another folder")
        self.lock.check_free()

    _real = property(lambda self: pathlib.Path(os.path.realpath(self.path)))
    """Returns the folder itself, where `path` is a symbolic link to it or to where it is going to be."""

    def lend(self) -> int | None:
        """Returns a descriptor that a worker inherits to hold the lock as well; None if there is no lock.

        A launcher that lends it to one chief after another leaves no gap between them, and the chief of a killed
        launcher holds it until it ends itself.
        """
        return None if self.lock.descriptor is None else os.dup(self.lock.descriptor)

    def release(self) -> None:
        """Releases the folder lock, unless the launcher still holds it."""
        self.lock.release()

    def forget(self) -> None:
        """Gives up the folder in a forked child: the run, its lock and its files are the parent's alone."""
        self.writes = False
        self.lock.forget()

    def push(self, patient: bool = True) -> None:
        """Uploads what was written, where the folder is in a bucket; `patient` tries again what fails, else not."""

    def earlier(self) -> dict[str, Any] | None:
        """Returns the experiment of the run that this folder holds; None if it holds none."""
        return local_files.read_object(self.path / "experiment.json")

    holds_run = property(lambda self: any((self.path / name).exists() for name in RESULTS))
    """Tells whether an earlier run has left any results."""

    completed = property(
        lambda self: (local_files.read_object(self.path / "result.json") or {}).get("status") == "completed"
    )
    """Tells whether the earlier run completed."""

    def set_aside(self) -> pathlib.Path | str | None:
        """Renames a folder that holds an earlier run, so that it is never overwritten; a link to it stays.

        A folder that cannot be renamed, since a disk is mounted there or its parent is read-only, keeps the earlier
        run in a folder within. Returns where the earlier run is now.
        """
        if not self.writes or not self.holds_run:
            return None
        real, fix = self._real, "choose another --workdir, or move the earlier run yourself"
        if not self.path.is_absolute() and pathlib.Path.cwd().is_relative_to(real):
            raise UserError(f"--workdir={self.path} holds an earlier run, and this command runs inside of it", fix)
        try:
            moved = unused(real)
            try:
                real.rename(moved)
            except OSError as error:
                if error.errno not in _CANNOT_RENAME:
                    raise
                return _move_within(real)
            real.mkdir()
        except OSError as error:
            what = f"the earlier run in --workdir={self.path} cannot be set aside ({error.strerror})"
            raise UserError(what, fix) from None
        if (moved / LOGS).exists():  # the launcher has just opened them for this run
            (moved / LOGS).rename(self.path / LOGS)
        with contextlib.suppress(FileNotFoundError):  # where it cannot be locked
            (moved / LOCK).rename(self.path / LOCK)  # the same file: the launcher may hold it, too
        beside = self.path.parent / moved.name  # as the user has written it
        return beside if beside.exists() and beside.samefile(moved) else moved

    def write(self, name: str, content: dict) -> None:
        """Writes one JSON file, as `write_text`."""
        self.write_text(name, json.dumps(strict(content), indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Writes one file, durably; TrainingError if the disk is full for example."""
        if not self.writes:
            return
        content = text.encode(errors="replace")  # file names in it need not be UTF-8
        with self._writing(name):
            self._put(name, content)
        if name in RESTORED:
            self._restored[name] = content
            self.checksums[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def _put(self, name: str, content: bytes) -> None:
        with local_files.replacing(self.path / name) as temporary:
            temporary.write_bytes(content)

    def append(self, name: str, line: dict) -> None:
        """Appends one line of JSON to a file; what cannot be written now is written with a later line."""
        if not self.writes:
            return
        failed, lines = bool(self._unwritten), self._unwritten.setdefault(name, [])
        lines.append(json.dumps(strict(line)) + "\n")
        try:
            self._restore()
            with io.BufferedWriter(local_files.opened_to_append(self.path / name)) as file:
                file.write("".join(lines).encode())
            del self._unwritten[name]
        except OSError as error:
            if not failed:
                logger.info(f"WARNING: {self.path / name} cannot be written ({error.strerror}): training goes on")

    def cut(self, name: str, keep: Callable[[dict], bool], recorded: Sequence[dict] = ()) -> list[dict]:
        """Keeps only some of a file's lines of JSON, and no damaged ones; a kill may have cut the last one off.

        If one of the lines that were `recorded` earlier is missing, all of them are written again.
        """
        path = self.path / name
        if not self.writes or not (recorded or path.exists()):
            return []
        with self._writing(name):
            text = local_files.content(path).decode(errors="replace") if path.exists() else ""
        *whole, last = text.split("\n")
        lines = [local_files.json_object(line) for line in [*whole, last, *self._unwritten.pop(name, [])]]
        damaged = sum(line is None for line in lines[: len(whole)])
        kept = [line for line in lines if line is not None and keep(line)]
        missing = sum(line not in kept for line in recorded)
        if missing:
            updates = lambda line: u if isinstance(u := line.get("updates"), (int, float)) else 0.0
            kept = sorted([*recorded, *(line for line in kept if line not in recorded)], key=updates)
            logger.info(f"WARNING: {path} is damaged: {missing} of its lines are written again from the checkpoint")
        elif damaged:
            logger.info(f"WARNING: {path} is damaged: {damaged} of its lines cannot be read and are left out")
        with self._writing(name), local_files.replacing(path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        return kept

    def remove(self, name: str) -> None:
        """Deletes a file, if it exists; TrainingError if it cannot be deleted."""
        self._restored.pop(name, None)
        self.checksums.pop(name, None)
        if self.writes and os.path.lexists(self.path / name):
            with self._writing(name):
                (self.path / name).unlink(missing_ok=True)

    def save_model(self, model: "keras.Model") -> None:
        """Writes `model.keras`, under another name first: Keras writes in place, and a kill would leave half."""
        if not self.writes:
            return
        dated = zipfile.ZipInfo.__init__
        with self._writing("model.keras"):
            path, temporary = self.path / "model.keras", self.path / f".model-{os.getpid()}.keras"  # Keras' suffix
            # Entries get the format's first date, and not the clock's: one before 1980, as of a board without a
            # battery, would make zipfile refuse them, after the whole training.
            undated = lambda entry, filename="NoName", date_time=None: dated(entry, filename)
            zipfile.ZipInfo.__init__ = undated  # type: ignore[method-assign]
            try:
                with local_files.replacing(path, temporary):
                    model.save(temporary)
                    checksum = files.checksum(temporary)
            finally:
                zipfile.ZipInfo.__init__ = dated  # type: ignore[method-assign]
            self.checksums[path.name] = checksum

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            self._restore()
            yield
        except OSError as error:
            kept = ""
            with contextlib.suppress(OSError):
                if any(files.is_name(path.name) for path in self.checkpoints.iterdir()):
                    kept = "; the existing checkpoints are kept"
            what = f"{self.path / name} cannot be written ({error.strerror or error}): free or repair that disk{kept}"
            raise TrainingError(what) from None

    def _restore(self) -> None:
        """Makes a folder that was deleted during the run again, with the files of the beginning.

        What was trained is worth more than an error. The lines of `history.jsonl` and the checkpoints are lost.
        TrainingError if another run has taken its place.
        """
        self._real.mkdir(parents=True, exist_ok=True)
        self.lock.restore()
        missing = [name for name in self._restored if not (self.path / name).exists()]
        for name in missing:
            self._put(name, self._restored[name])
        if missing and missing == list(self._restored):
            logger.info(
                f"WARNING: {self.path} was deleted while this run went on: {', '.join(missing)} are written again, "
                "what history.jsonl and checkpoints held is lost"
            )


os.register_at_fork(after_in_child=lambda: [*map(RunFolder.forget, list(_OPEN))])


def unused(path: pathlib.Path) -> pathlib.Path:
    """Returns the first of `path.1`, `path.2` and so on that does not exist, not even as a dangling link."""
    names = (path.with_name(f"{path.name}.{i}") for i in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def _move_within(real: pathlib.Path) -> pathlib.Path:
    """Moves a run into a folder within its own. `RESULTS` go last, so that an interrupted move is completed later."""
    moved = unused(real / _WITHIN)
    moved.mkdir()
    for name in sorted(os.listdir(real), key=lambda name: name in RESULTS):
        if name not in (LOGS, LOCK) and not re.fullmatch(rf"{_WITHIN}\.\d+", name):
            (real / name).rename(moved / name)
    return moved


def strict(value: object) -> Any:
    """Converts a value to what every JSON reader accepts: no NaN or infinity, no arrays."""
    if isinstance(value, dict):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    if isinstance(value, np.ndarray):
        return strict(value.tolist())
    if isinstance(value, (float, np.floating)):
        return float(value) if np.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
