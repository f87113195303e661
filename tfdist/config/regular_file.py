"""Files of a folder that somebody else may have made: nothing but files, and none that fills the memory.

A pipe of that name would be waited for without end, as would a device, and a file may claim to be as long as all disks
of the world while it takes no room on any.
"""

from __future__ import annotations

import errno
import io
import os
import pathlib
import stat

_AT_ONCE = os.O_NONBLOCK | os.O_CLOEXEC
MOST = 1 << 28
"""Bytes that are read into memory; the longest history of a run has a hundredth of it."""


def opened(path: pathlib.Path) -> io.FileIO:
    """Opens a file for reading, unbuffered.

    Raises:
      OSError: there is none, it cannot be read, or it is a pipe, a device or a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | _AT_ONCE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return io.FileIO(descriptor, "rb")


def opened_to_append(path: pathlib.Path) -> io.FileIO:
    """Opens a file for writing after what it has, unbuffered, and makes it if it is missing.

    Raises:
      OSError: it cannot be written, or it is a pipe or a folder.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _AT_ONCE, 0o666)
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "a pipe", str(path))
    return io.FileIO(descriptor, "ab")


def content(path: pathlib.Path) -> bytes:
    """Returns all bytes of a file.

    Raises:
      OSError: as `opened`, or it has more than `MOST` bytes.
    """
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > MOST:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG).lower(), str(path))
        return file.readall()
