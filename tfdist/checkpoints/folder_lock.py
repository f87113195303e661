"""Lock of a run folder: one run at a time, lent by the launcher to its workers. No TensorFlow."""

import contextlib
import fcntl
import os
import pathlib
import platform
import re
import time

from tfdist.cluster import env_vars
from tfdist.config import local_files
from tfdist.config.messages import logger
from tfdist.errors import TrainingError, UserError

LOCK = ".lock"
DYING_S = 3.0  # wait for a lock whose owner is dead: Linux ends the workers of a killed launcher, but not at once


class FolderLock:
    """An `flock` on `.lock`, which the system drops when the last process that holds it is gone.

    A POSIX record lock would not do: any code of the process that opens and closes the file, such as a callback that
    copies the folder, would drop it. `owner` is the content of the file; its first line is shown to users.
    """

    def __init__(self, folder: pathlib.Path, name: str, owner: bytes):
        self._path, self._name, self.owner = folder / LOCK, name, owner
        self.descriptor: int | None = None
        self.borrowed = False  # the launcher holds the lock, too, and still holds it when this worker has ended

    def acquire(self) -> None:
        """Takes the lock, unless this process has it or was lent it; UserError if another run has it."""
        if self.descriptor is not None:
            if self._is_current(self.descriptor):
                return
            os.close(self.descriptor)  # the folder was deleted
        self.descriptor = self._lent()
        self.borrowed = self.descriptor is not None
        if self.descriptor is not None:
            self.owner = os.pread(self.descriptor, 200, 0)
            return
        deadline = time.monotonic() + DYING_S
        try:
            while True:
                lock = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    owner = os.pread(lock, 200, 0)
                    os.close(lock)
                    if _is_dead(first_line(owner)) and time.monotonic() < deadline:
                        time.sleep(0.1)
                        continue
                    raise self.in_use(owner) from None
                if self._is_current(lock):
                    break
                os.close(lock)  # its last owner has just deleted it
            os.ftruncate(lock, 0)
            os.pwrite(lock, self.owner, 0)
            self.descriptor = lock
        except FileNotFoundError:
            raise UserError(f"--workdir={self._path.parent} is being deleted", "choose another folder") from None
        except OSError as error:
            logger.info(f"WARNING: {self._path.parent} cannot be locked ({error.strerror}): start no second run there")

    def _lent(self) -> int | None:
        """Returns the descriptor that the launcher lent this worker, if any.

        An unrelated run cannot forge it, as it could a process number in the environment.
        """
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
            return os.path.samestat(os.fstat(lock), self._path.stat())
        except OSError:
            return False

    def check_free(self) -> None:
        """Raises UserError if another run has the lock; changes nothing."""
        with contextlib.suppress(OSError), local_files.opened(self._path) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self.in_use(lock.read(200)) from None

    def restore(self) -> None:
        """Takes the lock again after the folder was deleted; TrainingError if another run has taken its place."""
        if self.descriptor is None or self._is_current(self.descriptor):
            return
        if self._path.exists():
            raise TrainingError(
                f"{self._path.parent} was deleted while this run went on, and another run has taken its place: "
                "give each a folder of its own"
            )
        self.acquire()

    def in_use(self, owner: bytes) -> UserError:
        """Returns the error for a folder that another run has; `owner` is the content of the lock's file."""
        name = first_line(owner) or "just starting"
        if _is_dead(name):  # Python's own forks close the lock; those of a C library do not
            what = f"--workdir={self._name} is locked by what a run that has ended ({name}) has left behind"
            fix = f"end that process (fuser {self._path} tells which), or choose another folder"
            return UserError(what, fix)
        return UserError(
            f"--workdir={self._name} is in use by another run ({name})", "wait for it, or choose another folder"
        )

    def forget(self) -> None:
        """Closes the descriptor in a forked child, which would else hold the lock after its parent has ended."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def release(self) -> None:
        """Releases the lock, unless the launcher still holds it."""
        if self.descriptor is not None and not self.borrowed and self._is_current(self.descriptor):
            with contextlib.suppress(OSError):
                self._path.unlink()
        self.forget()


def first_line(owner: bytes) -> str:
    """Returns the part of a lock's content that is shown to users."""
    line = owner.decode(errors="replace").partition("\n")[0].strip()
    return "".join(c for c in line if c.isprintable())[:100]


def _is_dead(owner: str) -> bool:
    """Tells whether the owner of a lock is a process of this host that has ended."""
    process = re.fullmatch(r"process (\d{1,9}) on (.*)", owner)
    here = process and process[2] == platform.node() and os.path.exists("/proc/self")  # /proc is not everywhere
    return bool(process and here and not os.path.exists(f"/proc/{process[1]}"))
