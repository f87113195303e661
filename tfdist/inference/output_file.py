"""The `--output` file: written atomically, and never over another one without `--overwrite`. No TensorFlow."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import IO

from tfdist.errors import TrainingError, UserError

STDOUT = "-"


class OutputFile:
    """Writes text beside the final name (`-`: to stdout), and renames it at the end of a `with` that raised nothing."""

    def __init__(self, name: str, overwrite: bool = False, writes: bool = True):
        self._name, self._overwrite, self._writes = name, overwrite, writes
        self.path = pathlib.Path(name).expanduser()
        self._temporary = self.path.parent / f".{self.path.name}.{os.getpid()}"
        self._file: IO[str] | None = None

    def check(self) -> None:
        """Raises UserError if the file exists, or cannot be created."""
        if not self._writes:
            return
        if self._name == STDOUT:
            if sys.__stdout__ is None:
                raise UserError("--output=- is standard output, which is closed", "give the name of a file")
            return
        if self.path.is_dir():
            raise UserError(f"--output={self.path} is a folder", "give the name of a file")
        if self.path.exists() and not self.path.is_file():  # a device or a pipe, which no file must replace
            raise UserError(f"--output={self.path} is no ordinary file", "give another name, or - for standard output")
        if self.path.exists() and not self._overwrite:
            raise UserError(f"--output={self.path} is there already", "give --overwrite, or choose another name")
        if not os.access(self.path.parent, os.W_OK | os.X_OK):
            why = "cannot be written in" if self.path.parent.is_dir() else "is no folder"
            raise UserError(f"--output={self.path}: {self.path.parent} {why}", "choose another one, or make it first")

    def write(self, text: str) -> None:
        """Appends text; raises TrainingError if the disk is full, for example."""
        if not self._writes:
            return
        with self._failing():
            if self._file is None:
                stdout = sys.__stdout__ if self._name == STDOUT else None
                self._file = stdout or self._temporary.open("w", encoding="utf-8")
            self._file.write(text)

    def __enter__(self) -> "OutputFile":
        self.check()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._file is None:
            return
        if self._name == STDOUT:
            with self._failing():
                self._file.flush()
            return
        try:
            if kind is not None:
                with contextlib.suppress(OSError):
                    self._file.close()
                return
            with self._failing():
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                self.check()
                os.replace(self._temporary, self.path)
        finally:
            with contextlib.suppress(OSError):
                self._temporary.unlink()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Converts an error of the disk to one that names the flag."""
        try:
            yield
        except BrokenPipeError:
            raise  # handled by `command_line.main`
        except OSError as error:
            raise TrainingError(f"--output={self._name} cannot be written ({error.strerror or error})") from None
