"""A temporary folder that is removed when the process that made it ends."""

from __future__ import annotations

import atexit
import os
import pathlib
import shutil
import tempfile


def make() -> pathlib.Path:
    """Makes a folder that goes with this process."""
    folder, process = pathlib.Path(tempfile.mkdtemp(prefix="tfdist-")), os.getpid()

    def remove() -> None:
        if os.getpid() == process:  # a forked child that ends by sys.exit has inherited this, and the folder is not its
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
