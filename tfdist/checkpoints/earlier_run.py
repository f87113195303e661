"""How a run that a folder holds makes room for another one. No TensorFlow."""

from __future__ import annotations

import errno
import itertools
import os
import pathlib
import re
from collections.abc import Collection

RESULTS = ("result.json", "history.jsonl", "checkpoints")
"""What tells that a run has measured or learnt something in a folder."""
_WITHIN = "earlier"
_FIXED = (errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS)
"""Why a folder cannot be renamed while files in it can be: a container's volume is mounted there, for one."""


def move(real: pathlib.Path, stay: Collection[str]) -> pathlib.Path:
    """Renames a folder and makes it anew; one that cannot be renamed keeps its run in a folder within.

    Args:
      real: the folder itself, no link to it.
      stay: names that are not part of the run; they stay where the run is kept within.

    Returns:
      Where the run is now.

    Raises:
      OSError: neither can be done.
    """
    moved = _free(real)
    try:
        real.rename(moved)
    except OSError as error:
        if error.errno not in _FIXED:
            raise
        return _move_within(real, stay)
    real.mkdir()
    return moved


def _free(path: pathlib.Path) -> pathlib.Path:
    """Returns the first of `path.1`, `path.2` and so on that is not there, nor a link without a target."""
    names = (path.with_name(f"{path.name}.{i}") for i in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def _move_within(real: pathlib.Path, stay: Collection[str]) -> pathlib.Path:
    """Moves all of a run into a folder within. What tells of a run goes last, so that an end in between is mended."""
    moved = _free(real / _WITHIN)
    moved.mkdir()
    for name in sorted(os.listdir(real), key=lambda name: name in RESULTS):
        if name not in stay and not re.fullmatch(rf"{_WITHIN}\.\d+", name):
            (real / name).rename(moved / name)
    return moved
