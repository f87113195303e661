"""Predictions as rows of a file: classes, names and probabilities; and the `--output` file itself. No TensorFlow."""

import contextlib
import csv
import dataclasses
import io
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

import numpy as np

from tfdist.checkpoints.run_folder import strict
from tfdist.config import local_files
from tfdist.data.spec import Structure
from tfdist.errors import TrainingError, UserError

T = TypeVar("T")

CSV, JSON_LINES = ".csv", ".jsonl"


@dataclasses.dataclass(frozen=True, slots=True)
class OutputReader:
    """Converts outputs of a model to rows."""

    classes: int | None  # None where the outputs are no scores of classes
    names: tuple[str, ...] = ()  # of the classes, if they have any
    from_logits: bool | None = None  # scores are logits; None to decide by the first batch
    scores: bool = False  # include all scores of an example
    example: Callable[[int], str] | None = None  # returns the name of an example by its place, such as a path
    numbers: np.ndarray | None = None  # of the examples, where they are not their places

    def settled(self, outputs: Structure) -> "OutputReader":
        """Returns a reader for outputs such as these of the first batch; raises UserError if scores are missing."""
        by_class = self.classes is not None and isinstance(outputs, np.ndarray) and outputs.ndim >= 2
        classes = self.classes if by_class and outputs.shape[-1] == self.classes else None
        if classes is None and self.scores:
            raise UserError("--scores is for the scores of classes, and this model gives none", "leave it out")
        logits = self.from_logits
        if classes is not None and logits is None:
            logits = not look_like_probabilities(outputs.reshape(-1, classes))
        return dataclasses.replace(self, classes=classes, from_logits=logits)

    def rows(self, outputs: Structure, targets: Structure, first: int) -> Iterator[dict[str, object]]:
        """Yields one row per example of a batch, whose places begin with `first`.

        Outputs are arrays [n, ...], of classes [n, classes], for sequences [n, length, classes]; targets too, or ().
        """
        columns = self._answers(outputs)
        if len(targets):
            # By the whole shape: a sequence may have as many steps as there are classes.
            one_hot = self.classes is not None and isinstance(targets, np.ndarray) and targets.shape == outputs.shape
            columns |= _leaves("target", targets.argmax(-1) if one_hot else targets)
        for i in range(len(next(iter(columns.values())))):
            row: dict[str, object] = {"number": first + i if self.numbers is None else int(self.numbers[first + i])}
            if self.example:
                row["example"] = self.example(first + i)
            yield row | {name: values[i] for name, values in columns.items()}

    def _answers(self, outputs: Structure) -> dict[str, list]:
        """Returns the columns of the outputs, with one entry per example."""
        if self.classes is None:
            return _leaves("output", outputs)
        flat = np.asarray(outputs, np.float64).reshape(-1, self.classes)
        finite = np.asarray(np.isfinite(flat).all(1))
        best = np.where(finite, flat.argmax(1), -1)
        scores = np.where(finite[:, None], flat, 0)
        # Beside the largest of logits, whose exponentials may be infinite; probabilities may all be 0.
        parts = np.exp(scores - scores.max(1, keepdims=True)) if self.from_logits else np.clip(scores, 1e-300, None)
        sure = np.where(finite, parts.max(1) / parts.sum(1), np.nan).astype(np.float32)
        shape = outputs.shape[:-1]
        # Scores that are not finite are of no class.
        columns = {"prediction": _each(best.reshape(shape), lambda k: None if k < 0 else k)}
        if self.names:
            columns["name"] = _each(best.reshape(shape), lambda k: self.names[k] if 0 <= k < len(self.names) else None)
        columns["probability"] = _plain(sure.reshape(shape))
        if self.scores:
            columns["scores"] = _plain(outputs)
        return columns


class Lines:
    """Rows as text, CSV or JSON lines."""

    def __init__(self, kind: str):
        self._kind = kind
        self._header: list[str] = []

    def text(self, rows: Iterator[dict[str, object]]) -> str:
        """Returns the next lines, the header of a table before the first ones."""
        if self._kind == JSON_LINES:
            return "".join(json.dumps(strict(row)) + "\n" for row in rows)
        into = io.StringIO()
        writer = csv.writer(into, lineterminator="\n")
        for row in rows:
            flat = _flat(row)
            if not self._header:
                self._header = list(flat)
                writer.writerow(self._header)
            writer.writerow(flat.values())
        return into.getvalue()


def _flat(row: dict[str, object]) -> dict[str, object]:
    """Returns a row whose lists are columns of their own: `scores_0`, `scores_1`."""
    flat: list[tuple[str, object]] = []
    for name, value in row.items():
        if not isinstance(value, list):
            flat.append((name, value))
        elif any(isinstance(inner, list) for inner in value):
            what = f"{name!r} is a table for each example, and a line of CSV holds none"
            raise UserError(what, "write a .jsonl file")
        elif len(value) == 1:
            flat.append((name, value[0]))
        else:
            flat += [(f"{name}_{i}", inner) for i, inner in enumerate(value)]
    return _by_name(flat)


def _by_name(columns: list[tuple[str, T]]) -> dict[str, T]:
    named = dict(columns)
    if len(named) < len(columns):
        names = [name for name, _ in columns]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"two outputs of the model make a column {twice!r}", "rename one of them")
    return named


def _leaves(name: str, structure: Structure) -> dict[str, list]:
    """Returns the columns of a structure of arrays, named by their place in it."""
    if isinstance(structure, dict):
        pairs = [(f"{name}_{key}", inner) for key, inner in structure.items()]
    elif isinstance(structure, (list, tuple)):
        pairs = [(f"{name}_{i}", inner) for i, inner in enumerate(structure)]
    else:
        return {name: _plain(structure)}
    return _by_name([leaf for label, inner in pairs for leaf in _leaves(label, inner).items()])


def _plain(array: np.ndarray) -> list:
    """Returns nested lists of Python numbers; a float has as many digits as its type holds, and no more."""
    array = np.asarray(array)
    if array.dtype == np.float64 or (array.dtype.kind != "f" and array.dtype.name != "bfloat16"):
        return array.tolist()
    shortest = array.astype(np.float32).reshape(-1).astype(str)
    return np.array([float(text) for text in shortest], object).reshape(array.shape).tolist()


def _each(numbers: np.ndarray, name: Callable[[int], object]) -> list:
    """Returns nested lists of `name` of each number."""
    return np.array([name(int(k)) for k in numbers.reshape(-1)], object).reshape(numbers.shape).tolist()


def look_like_probabilities(scores: np.ndarray) -> bool:
    """Tells whether each row is a distribution, where the loss does not specify it."""
    finite = scores[np.isfinite(scores).all(1)]
    return bool(len(finite)) and bool((finite >= 0).all()) and bool(np.allclose(finite.sum(1), 1, atol=1e-2))


STDOUT = "-"


class OutputFile:
    """Writes text beside the final name (`-`: to stdout), and renames it at the end of a `with` that raised nothing."""

    def __init__(self, name: str, overwrite: bool = False, writes: bool = True):
        self._name, self._overwrite, self._writes = name, overwrite, writes
        self.path = pathlib.Path(name).expanduser()
        self._file: IO[str] | None = None
        self._ending = contextlib.ExitStack()

    def check(self) -> None:
        """Raises UserError if the file exists, or cannot be created."""
        if not self._writes:
            return
        if self._name == STDOUT:
            if sys.__stdout__ is None:
                raise UserError("--output=- is standard output, which is closed", "give the name of a file")
            return
        if self.path.exists() and not self.path.is_file():  # a folder, or a device or pipe, which no file must replace
            what = f"--output={self.path} is not a regular file"
            raise UserError(what, "give another name, or - for standard output")
        if self.path.exists() and not self._overwrite:
            raise UserError(f"--output={self.path} is there already", "give --overwrite, or choose another name")
        if not os.access(self.path.parent, os.W_OK | os.X_OK):
            what = f"--output={self.path}: {self.path.parent} cannot be written in"
            raise UserError(what, "choose another one, or make it first")

    def write(self, text: str) -> None:
        """Appends text; raises TrainingError if the disk is full, for example."""
        if not self._writes:
            return
        with self._failing():
            if self._file is None:
                self._file = self._ending.enter_context(self._opened())
            self._file.write(text)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[IO[str]]:
        if self._name == STDOUT and sys.__stdout__:
            try:
                yield sys.__stdout__
            finally:
                sys.__stdout__.flush()
            return
        with local_files.replacing(self.path) as temporary:
            with temporary.open("w", encoding="utf-8") as file:
                yield file
            self.check()

    def __enter__(self) -> "OutputFile":
        self.check()
        return self

    def __exit__(self, *failure: Any) -> None:
        with self._failing():
            self._ending.__exit__(*failure)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Converts an error of the disk to one that names the flag."""
        try:
            yield
        except BrokenPipeError:
            raise  # handled by `command_line.main`
        except OSError as error:
            raise TrainingError(f"--output={self._name} cannot be written ({error.strerror or error})") from None
