"""Holds back what is printed to standard error, except the last lines of a process. No TensorFlow."""

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

_lock = threading.Lock()
_kept_from: list[int] = []  # copies of the real one, while descriptor 2 is a temporary file; the first one counts


@contextlib.contextmanager
def kept() -> Iterator[IO[bytes]]:
    """Redirects standard error to a temporary file, which it yields.

    TensorFlow's C++ side prints a dozen lines on import, whatever the log level, irrelevant to training on a CPU.
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
    """Writes to the real standard error, even within `kept`: from a thread that is about to end the process."""
    with _lock:
        # The lock keeps the descriptor from being closed, and its number from leading elsewhere, in between.
        os.write(_kept_from[0] if _kept_from else 2, line.encode(errors="backslashreplace"))
