"""Files that appear whole or not at all: written under another name, brought to the disk, renamed. No TensorFlow."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(path: pathlib.Path, temporary: pathlib.Path | None = None) -> Iterator[pathlib.Path]:
    """Gives the block a path to write to, and puts what is there in the place of `path` when the block has ended.

    Whoever reads `path` finds the earlier file or all of the new one, even after the machine has lost its power. After
    an error in the block the earlier file is as it was, and nothing else is left.

    Args:
      path: the file to write or replace.
      temporary: where the block writes, on the same file system; a hidden name beside `path` if not given.

    Raises:
      OSError: the file cannot be synced or renamed.
    """
    temporary = temporary or path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def sync(path: pathlib.Path) -> None:
    """Brings a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
