"""Files on this machine's disks: written whole or not at all, read only if they are files, locked. No TensorFlow."""

import atexit
import contextlib
import errno
import fcntl
import io
import json
import os
import pathlib
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from tfdist.config.messages import logger
from tfdist.errors import UserError

# In a folder that somebody else has made, a pipe or a device would be waited for without end, and a file may claim to
# be as long as all disks of the world while it takes no room on any.
_AT_ONCE = os.O_NONBLOCK | os.O_CLOEXEC
MOST = 1 << 28  # bytes that are read into memory; the longest history of a run has a hundredth of it


@contextlib.contextmanager
def replacing(path: pathlib.Path, temporary: pathlib.Path | None = None) -> Iterator[pathlib.Path]:
    """Gives the block a path to write to, and replaces `path` by that file when the block has ended.

    Readers find the earlier file or all of the new one, even after a power failure. After an error in the block the
    earlier file is as it was, and nothing else is left. A `temporary` must be on the same file system.
    """
    temporary = temporary or path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def cache(*below: str) -> pathlib.Path:
    """Returns a folder below tfdist's own in the user's cache, which need not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(base, "tfdist", *below)


def sync(path: pathlib.Path) -> None:
    """Writes a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def opened(path: str | pathlib.Path) -> io.FileIO:
    """Opens a file for reading, unbuffered; OSError also for a pipe, a device or a folder."""
    descriptor = os.open(path, os.O_RDONLY | _AT_ONCE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return io.FileIO(descriptor, "rb")


def opened_to_append(path: pathlib.Path) -> io.FileIO:
    """Opens or creates a file for appending, unbuffered; OSError also for a pipe."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _AT_ONCE, 0o666)
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "a pipe", str(path))
    return io.FileIO(descriptor, "ab")


def content(path: pathlib.Path) -> bytes:
    """Returns all bytes of a file; OSError as `opened`, and for more than `MOST` bytes."""
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > MOST:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG).lower(), str(path))
        return file.readall()


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """Returns the object that JSON represents; None if it does not."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        return value if isinstance(value, dict) else None
    return None


def read_object(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns the object in a file of JSON; None if there is none that can be read."""
    with contextlib.suppress(OSError):
        return json_object(content(path))
    return None


@contextlib.contextmanager
def locked(path: pathlib.Path, who: str, limit: float) -> Iterator[None]:
    """Holds a lock on a file, which the kernel drops if this process dies; waits `limit` s for `who` holds it."""
    with path.open("w") as file:
        until, announced = time.monotonic() + limit, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise UserError(f"{who} holds {path} for {limit:g} s", "end it and run again") from None
            if not announced:
                announced = True
                logger.info(f"{who} is running: waiting for it")
            time.sleep(0.2)
        yield


def temporary_folder() -> pathlib.Path:
    """Creates a folder that is removed when this process ends."""
    folder, process = pathlib.Path(tempfile.mkdtemp(prefix="tfdist-")), os.getpid()

    def remove() -> None:
        if os.getpid() == process:  # a forked child that ends by sys.exit has inherited this, and the folder is not its
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
