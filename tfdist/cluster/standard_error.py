"""Keeps back what is printed to standard error for a while, but not the last words of a process. No TensorFlow."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

_lock = threading.Lock()
_kept_from: list[int] = []
"""Where standard error led before, while descriptor 2 leads to a temporary file; the first one counts."""


@contextlib.contextmanager
def kept() -> Iterator[IO[bytes]]:
    """Keeps back what is printed to standard error, in the file that it gives.

    TensorFlow's C++ side prints a dozen lines when it is imported, whatever the
    log level, of which none matters to somebody who trains on a CPU.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        with _lock:
            before = os.dup(2)
            os.dup2(file.fileno(), 2)
            _kept_from.append(before)
        try:
            yield file
        finally:
            with _lock:
                os.dup2(before, 2)
                _kept_from.remove(before)
                os.close(before)


def write(line: str) -> None:
    """Writes to standard error at once, even while `kept` is on: from a thread that is about to end the process."""
    with _lock:
        # The lock keeps the descriptor from being closed, and its number from leading elsewhere, in between.
        os.write(_kept_from[0] if _kept_from else 2, line.encode(errors="backslashreplace"))
