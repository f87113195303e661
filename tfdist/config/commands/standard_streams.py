"""Standard output and error: a run goes on without its words where they cannot be written, and holds back noise."""

import contextlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO, cast

from tfdist.errors import TrainingError

_lock = threading.Lock()
_kept_from: list[int] = []  # copies of the real one, while descriptor 2 is a temporary file; the first one counts


class _Stream:
    """A standard stream that is not the end of a program when it cannot be written, unless its output is `needed`.

    What the file could not take stays in its buffer as far as it fits, and is tried again with the next words.
    """

    def __init__(self, stream: IO[str], needed: bool):
        self._stream, self.needed = stream, needed
        self._told = False

    def write(self, text: str) -> int:
        """Writes text, as far as there is room."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        """Brings what was written to the file, as far as there is room."""
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def _failed(self, error: OSError) -> None:
        if self.needed and isinstance(error, BrokenPipeError):
            raise error  # `command_line.main` knows what that means
        why = "standard output cannot be written (" + (error.strerror or str(error)) + ")"
        if self.needed:
            raise TrainingError(f"{why}: free or repair that disk, or send it elsewhere") from None
        if not self._told and self is sys.stdout:
            self._told = True
            print(f"tfdist: WARNING: {why}: the run goes on without its words", file=sys.stderr, flush=True)


def fill() -> None:
    """Replaces closed standard streams by the null device; else the next file would get their number and output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  for as long as the process


@contextlib.contextmanager
def secured() -> Iterator[None]:
    """A context in which words that nobody can read do not end a command.

    Lines on standard error are never needed. What is printed on standard output is, until `dispensable` is called.
    """
    fill()
    streams = [sys.stdout, sys.stderr]
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # for names that its encoding has not
    sys.stdout, sys.stderr = cast("IO[str]", _Stream(sys.stdout, True)), cast("IO[str]", _Stream(sys.stderr, False))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for number, stream in enumerate(streams, 1):
            try:
                stream.flush()
            except (OSError, ValueError):  # Python would try again at exit, and end with code 120
                with contextlib.suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
                    stream.flush()


def dispensable() -> None:
    """Declares further output to be about the work, and not the work itself."""
    if isinstance(sys.stdout, _Stream):
        sys.stdout.needed = False


@contextlib.contextmanager
def held_back() -> Iterator[IO[bytes]]:
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


def write_error(line: str) -> None:
    """Writes to the real standard error, even within `held_back`: from a thread that is about to end the process."""
    with _lock:
        # The lock keeps the descriptor from being closed, and its number from leading elsewhere, in between.
        os.write(_kept_from[0] if _kept_from else 2, line.encode(errors="backslashreplace"))
