"""The run folder (`--workdir`): what a run leaves behind. No TensorFlow."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import pathlib
import platform
import re
import time
import weakref
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.checkpoints import earlier_run, files
from tfdist.checkpoints.storage import DISK, Disk
from tfdist.cluster import env_vars
from tfdist.config import atomic_file, regular_file
from tfdist.config.messages import logger
from tfdist.errors import TrainingError, UserError

if TYPE_CHECKING:
    import keras

LOCK = ".lock"
LOGS = "logs"
"""What the launcher keeps of each rank's output; it adds to what is there."""
DYING_S = 3.0
"""How long to wait for a lock whose owner is dead: Linux ends the workers of a killed launcher, but not at once."""
_OPEN: weakref.WeakSet[RunFolder] = weakref.WeakSet()
"""The folders of this process, which a child that it forks does not have."""
KEPT = ("experiment.json", "experiment.mark", "environment.json", "data.json")
"""Files that a run writes once, at its beginning, and holds in memory: a folder that is deleted gets them again."""


class RunFolder:
    """Creates and writes a `--workdir`. Every file appears whole or not at all.

    Args:
      path: the folder.
      writes: False for workers other than the chief, which leave nothing behind and say nothing.
    """

    def __init__(self, path: str, writes: bool = True):
        self.path = pathlib.Path(path)
        self.name = str(self.path)
        """As a person writes it."""
        self.checkpoints = self.path / "checkpoints"
        self.storage: Disk = DISK
        """What stands behind the folder of the checkpoints."""
        self._writes = writes
        self._lock: int | None = None
        self._borrowed = False
        """The launcher of this worker holds the lock, too, and goes on holding it when this worker is gone."""
        self._owner = f"process {os.getpid()} on {platform.node()}\n".encode()
        """What the file of the lock tells others of its owner; the first line is for a person."""
        self._waiting: dict[str, list[str]] = {}
        """Lines that could not be written, by file."""
        self._kept: dict[str, str] = {}
        self._checksums: dict[str, dict[str, Any]] = {}
        _OPEN.add(self)

    def forget(self) -> None:
        """Gives up the folder in a forked child: the run, its lock and its files are the parent's alone.

        A child that kept the descriptor would hold the lock for as long as it lives, after its parent is gone. `flock`
        stays all the same: a POSIX record lock is not inherited, but any code of the process that opens and closes the
        file, such as a callback that copies the folder, would drop it without a word.
        """
        self._writes = False
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def create(self) -> None:
        """Begins a run in the folder: `reserve`, for the worker that writes.

        Raises:
          UserError: the folder cannot be made or written, or another run has it.
        """
        if self._writes:
            self.reserve()

    def reserve(self) -> None:
        """Makes the folder if it is missing, tries to write in it, and takes it for this run alone.

        Raises:
          UserError: the folder cannot be made or written, or another run has it.
        """
        try:
            self._real.mkdir(parents=True, exist_ok=True)
            self._probe()
        except OSError as error:
            mask = _umask()
            repair = f"set umask 022 instead of {mask:03o}" if mask & 0o700 else "choose another folder"
            raise UserError(f"--workdir={self.path} cannot be written ({error.strerror}): {repair}") from None
        self._take()

    def _probe(self) -> None:
        """Writes as a run does: a folder in the folder, as for a checkpoint, and a file in it that is written again.

        With a umask that takes its own rights from the user, only the second step fails.
        """
        folder = self.path / f".probe-{os.getpid()}"
        try:
            folder.mkdir()
            for _ in range(2):
                (folder / "file").write_bytes(b"")
        finally:
            with contextlib.suppress(OSError):
                (folder / "file").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()

    def could_be_created(self) -> None:
        """Checks what `create` would, and leaves everything as it is.

        Raises:
          UserError: the folder could not be made or written, or another run has it.
        """
        there = next(path for path in (self._real, *self._real.parents) if os.path.lexists(path))
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = os.strerror(errno.EACCES) if there.is_dir() else f"{there} is no folder"
            raise UserError(f"--workdir={self.path} cannot be written ({why}): choose another folder")
        with contextlib.suppress(OSError), regular_file.opened(self.path / LOCK) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._in_use(lock.read(200)) from None

    @property
    def _real(self) -> pathlib.Path:
        """Returns the folder itself, where `path` is a symbolic link to it or to where it is going to be."""
        return pathlib.Path(os.path.realpath(self.path))

    def _in_use(self, owner: bytes) -> UserError:
        name = _first_line(owner) or "just starting"
        left = _left_behind(name, self.path / LOCK)
        if left:
            return UserError(
                f"--workdir={self.name} is locked by process {left}, which a run that is gone ({name}) has left "
                "behind: end that process, or choose another folder"
            )
        return UserError(
            f"--workdir={self.name} is in use by another run ({name}): wait for it, or choose another folder"
        )

    def lend(self) -> int | None:
        """Returns a descriptor that a worker inherits to hold the lock as well; None if there is no lock.

        The system drops the lock when the last process that holds it is gone: a launcher that lends it to one chief
        after another leaves no gap between them, and the chief of one that was killed holds it until it ends itself.
        An unrelated run cannot pretend to hold it, as it could with a process number or a word in the environment.
        """
        return None if self._lock is None else os.dup(self._lock)

    def _take(self) -> None:
        """Locks the folder, unless this process has done so or was lent the lock.

        The system drops the lock when this process is gone, however it ended.
        """
        path = self.path / LOCK
        if self._lock is not None:
            if self._is_current(self._lock):
                return
            os.close(self._lock)  # the folder was deleted
        self._lock = self._lent()
        self._borrowed = self._lock is not None
        if self._lock is not None:
            self._owner = os.pread(self._lock, 200, 0)
            return
        until = time.monotonic() + DYING_S
        try:
            while True:
                lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    owner = os.pread(lock, 200, 0)
                    os.close(lock)
                    if _gone(_first_line(owner)) and time.monotonic() < until:
                        time.sleep(0.1)
                        continue
                    raise self._in_use(owner) from None
                if self._is_current(lock):
                    break
                os.close(lock)  # its last owner has just deleted it
            os.ftruncate(lock, 0)
            os.pwrite(lock, self._owner, 0)
            self._lock = lock
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise UserError(f"--workdir={self.path} is being deleted by somebody: choose another folder") from None
            logger.info(f"WARNING: {self.path} cannot be locked ({error.strerror}): start no second run there")

    def _lent(self) -> int | None:
        """Returns the descriptor by which the launcher of this worker has lent it the lock; None if it has not."""
        number = os.environ.pop(env_vars.FOLDER_LOCK, "")  # what this process starts has no such descriptor
        if not re.fullmatch(r"\d{1,9}", number, re.ASCII):
            return None
        lock = int(number)
        with contextlib.suppress(OSError):
            if self._is_current(lock):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if another one has it
                os.set_inheritable(lock, False)
                return lock
        return None

    def _is_current(self, lock: int) -> bool:
        """Tells whether a descriptor is of the file by which others now find the folder locked."""
        try:
            return os.path.samestat(os.fstat(lock), (self.path / LOCK).stat())
        except OSError:
            return False

    def release(self) -> None:
        """Lets others have the folder, unless the launcher still holds it."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                if not self._borrowed and self._is_current(self._lock):
                    (self.path / LOCK).unlink()
            os.close(self._lock)
            self._lock = None

    def earlier(self) -> dict[str, Any] | None:
        """Returns the experiment of the run that this folder holds; None if it holds none."""
        try:
            fields = json.loads(regular_file.content(self.path / "experiment.json"))
        except (OSError, ValueError, RecursionError):
            return None
        return fields if isinstance(fields, dict) else None

    @property
    def holds_run(self) -> bool:
        """Tells whether an earlier run has left anything that was measured or learnt."""
        return any((self.path / name).exists() for name in earlier_run.RESULTS)

    @property
    def completed(self) -> bool:
        """Tells whether the earlier run came to its end."""
        try:
            return json.loads(regular_file.content(self.path / "result.json"))["status"] == "completed"
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False

    def set_aside(self) -> pathlib.Path | str | None:
        """Renames a folder that holds an earlier run, so that it is never written over; a link to it stays.

        A folder that cannot be renamed, since a disk is mounted there or the one above may not be written in, keeps
        the earlier run in a folder of its own within.

        Returns:
          Where the earlier run went, or None.

        Raises:
          UserError: it cannot be moved.
        """
        if not self._writes or not self.holds_run:
            return None
        real = self._real
        hint = "choose another --workdir, or move the earlier run yourself"
        if not self.path.is_absolute() and pathlib.Path.cwd().is_relative_to(real):
            raise UserError(f"--workdir={self.path} holds an earlier run, and this command runs inside of it: {hint}")
        try:
            moved = earlier_run.move(real, stay=(LOGS, LOCK))
        except OSError as error:
            raise UserError(
                f"the earlier run in --workdir={self.path} cannot be set aside ({error.strerror}): {hint}"
            ) from None
        if moved.parent == real:
            return moved
        if (moved / LOGS).exists():  # the launcher has just opened them for this run
            (moved / LOGS).rename(self.path / LOGS)
        with contextlib.suppress(FileNotFoundError):  # where it cannot be locked
            (moved / LOCK).rename(self.path / LOCK)  # the same file: the launcher may hold it, too
        beside = self.path.parent / moved.name  # as a person has written it
        return beside if beside.exists() and beside.samefile(moved) else moved

    @property
    def checksums(self) -> dict[str, dict[str, Any]]:
        """Returns the size and SHA-256 of each file that this process wrote and later commands use."""
        return dict(self._checksums)

    @property
    def writes(self) -> bool:
        """Tells whether this worker writes anything: one that does not can spare itself the making of it."""
        return self._writes

    def write(self, name: str, content: dict) -> None:
        """Writes one JSON file, durably.

        Raises:
          TrainingError: the file cannot be written, because the disk is full for example.
        """
        self.write_text(name, json.dumps(strict(content), indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Writes one file, durably.

        Raises:
          TrainingError: the file cannot be written, because the disk is full for example.
        """
        if not self._writes:
            return
        with self._writing(name):
            self._put(name, text)
        if name in KEPT:
            self._kept[name] = text
            self._checksums[name] = files.checksum_of(_bytes(text))

    def _put(self, name: str, text: str) -> None:
        with atomic_file.replacing(self.path / name) as temporary:
            temporary.write_bytes(_bytes(text))

    def append(self, name: str, line: dict) -> None:
        """Adds one line of JSON to a file; what cannot be written now is written with a later one.

        Raises:
          TrainingError: somebody has deleted the folder, and another run has taken its place.
        """
        if not self._writes:
            return
        failed = bool(self._waiting)
        waiting = self._waiting.setdefault(name, [])
        waiting.append(json.dumps(strict(line)) + "\n")
        try:
            self._make_whole()
            with io.BufferedWriter(regular_file.opened_to_append(self.path / name)) as file:
                file.write("".join(waiting).encode())
            del self._waiting[name]
        except OSError as error:
            if not failed:
                logger.info(f"WARNING: {self.path / name} cannot be written ({error.strerror}): training goes on")

    def cut(self, name: str, keep: Callable[[dict], bool], known: Sequence[dict] = ()) -> list[dict]:
        """Drops lines from a file of JSON lines, and those that are damaged; a kill may have cut the last one off.

        Args:
          keep: tells whether a line stays.
          known: lines that have been there; if one is missing, all of them are written again.

        Returns:
          The lines that are there now.
        """
        path = self.path / name
        if not self._writes or not (known or path.exists()):
            return []
        with self._writing(name):
            text = regular_file.content(path).decode(errors="replace") if path.exists() else ""
        *whole, last = text.split("\n")
        damaged = sum(_line(line) is None for line in whole)
        read = map(_line, [*whole, last, *self._waiting.pop(name, [])])
        kept = [line for line in read if line is not None and keep(line)]
        missing = sum(line not in kept for line in known)
        if missing:
            kept = sorted([*known, *(line for line in kept if line not in known)], key=_updates)
            logger.info(f"WARNING: {path} is damaged: {missing} of its lines are written again from the checkpoint")
        elif damaged:
            logger.info(f"WARNING: {path} is damaged: {damaged} of its lines cannot be read and are left out")
        with self._writing(name), atomic_file.replacing(path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        return kept

    def remove(self, name: str) -> None:
        """Deletes a file, if it is there.

        Raises:
          TrainingError: it cannot be deleted.
        """
        self._kept.pop(name, None)
        self._checksums.pop(name, None)
        if self.writes and os.path.lexists(self.path / name):
            with self._writing(name):
                (self.path / name).unlink(missing_ok=True)

    def save_model(self, model: keras.Model) -> None:
        """Writes `model.keras`, under another name first: Keras writes in place, and a kill would leave half.

        Raises:
          TrainingError: the file cannot be written, because the disk is full for example.
        """
        if not self._writes:
            return
        with self._writing("model.keras"):
            path, temporary = self.path / "model.keras", self.path / f".model-{os.getpid()}.keras"  # as Keras wants it
            with atomic_file.replacing(path, temporary), _without_dates():
                model.save(temporary)
                checksum = files.checksum(temporary)
            self._checksums[path.name] = checksum

    def push(self, patient: bool = True) -> None:
        """Makes what was written outlive this machine, where the folder is elsewhere.

        Args:
          patient: try again what fails.

        Raises:
          TrainingError: that is not possible.
        """

    def _has_checkpoints(self) -> bool:
        try:
            return any(files.is_name(path.name) for path in self.checkpoints.iterdir())
        except OSError:
            return False

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            self._make_whole()
            yield
        except OSError as error:
            raise TrainingError(
                f"{self.path / name} cannot be written ({error.strerror or error}): free or repair that disk"
                f"{'; the checkpoints that are there stay' if self._has_checkpoints() else ''}"
            ) from None

    def _make_whole(self) -> None:
        """Makes a folder that somebody has deleted meanwhile again, with the files that were written at the beginning.

        What was trained is worth more than an error. The lines of `history.jsonl` and the checkpoints are gone.

        Raises:
          TrainingError: another run has taken its place.
        """
        self._real.mkdir(parents=True, exist_ok=True)
        if self._lock is not None:
            try:
                if not os.path.samestat(os.fstat(self._lock), (self.path / LOCK).stat()):
                    raise TrainingError(
                        f"{self.path} was deleted while this run went on, and another one has taken its place: "
                        "give each a folder of its own"
                    )
            except FileNotFoundError:
                self._take()
        missing = [name for name in self._kept if not (self.path / name).exists()]
        for name in missing:
            self._put(name, self._kept[name])
        if missing and missing == list(self._kept):
            logger.info(
                f"WARNING: {self.path} was deleted while this run went on: {', '.join(missing)} are written again, "
                "what history.jsonl and checkpoints held is lost"
            )


def _line(text: str) -> dict[str, Any] | None:
    """Returns the object of a JSON line; None if there is none."""
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(text)
        return content if isinstance(content, dict) else None
    return None


def _updates(line: dict[str, Any]) -> float:
    updates = line.get("updates")
    return updates if isinstance(updates, (int, float)) else 0.0


def _bytes(text: str) -> bytes:
    """Returns a text as it is written: file names in it need not be UTF-8."""
    return text.encode(errors="replace")


def _umask() -> int:
    """Returns the umask, which only setting it tells."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def _without_dates() -> Iterator[None]:
    """Gives new entries of ZIP files the format's first date instead of the clock's.

    A clock before 1980, as of a board without a battery, would make zipfile refuse them: after the whole training.
    """
    dated = zipfile.ZipInfo.__init__

    def undated(self: zipfile.ZipInfo, filename: str = "NoName", date_time: object = None) -> None:
        dated(self, filename)

    zipfile.ZipInfo.__init__ = undated  # type: ignore[method-assign]
    try:
        yield
    finally:
        zipfile.ZipInfo.__init__ = dated  # type: ignore[method-assign]


def _forget_in_child() -> None:
    for folder in list(_OPEN):
        folder.forget()


os.register_at_fork(after_in_child=_forget_in_child)


def _first_line(owner: bytes) -> str:
    return owner.decode(errors="replace").partition("\n")[0].strip()


def _gone(owner: str) -> bool:
    """Tells whether the owner of a lock is a process of this host that is dead."""
    found = re.fullmatch(r"process (\d{1,9}) on (.*)", owner)
    return bool(
        found
        and found[2] == platform.node()
        and os.path.exists("/proc/self")  # /proc is not everywhere
        and not os.path.exists(f"/proc/{found[1]}")
    )


def _left_behind(owner: str, lock: pathlib.Path) -> int:
    """Returns a process of this host that has the lock of an owner that is dead; 0 if there is none.

    Python's own forks give the lock up; those of a C library do not.
    """
    if not _gone(owner):
        return 0
    with contextlib.suppress(OSError):
        wanted, others = lock.stat(), (name for name in os.listdir("/proc") if name.isdigit())
        return next((int(pid) for pid in others if int(pid) != os.getpid() and _has_open(pid, wanted)), 0)
    return 0


def _has_open(pid: str, wanted: os.stat_result) -> bool:
    with contextlib.suppress(OSError):  # it is another user's, or has just ended
        for descriptor in pathlib.Path("/proc", pid, "fd").iterdir():
            with contextlib.suppress(OSError):
                if os.path.samestat(descriptor.stat(), wanted):
                    return True
    return False


def strict(value: object) -> Any:
    """Makes of a value what every reader of JSON takes: there is no NaN or Infinity in it, and there are no arrays."""
    if isinstance(value, dict):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    if isinstance(value, np.ndarray):
        return strict(value.tolist())
    if isinstance(value, (float, np.floating)):
        return float(value) if np.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
