"""Predictions as rows of a file: classes, names and probabilities. NumPy only."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Iterator

import numpy as np

from tfdist.checkpoints.run_folder import strict
from tfdist.data.structures import Structure
from tfdist.errors import UserError
from tfdist.monitoring import confusion

CSV, JSON_LINES = ".csv", ".jsonl"


@dataclasses.dataclass(frozen=True, slots=True)
class OutputReader:
    """Converts outputs of a model to rows.

    Args:
      classes: number of classes, or None where the outputs are no scores of classes.
      names: of the classes, if they have any.
      from_logits: scores are logits; None to decide by the first batch.
      scores: include all scores of an example.
      example: returns the name of an example by its number, such as a path, if they have names.
    """

    classes: int | None
    names: tuple[str, ...] = ()
    from_logits: bool | None = None
    scores: bool = False
    example: Callable[[int], str] | None = None

    def settled(self, outputs: Structure) -> OutputReader:
        """Returns a reader for outputs such as these of the first batch; raises UserError if scores are missing."""
        by_class = self.classes is not None and isinstance(outputs, np.ndarray) and outputs.ndim >= 2
        classes = self.classes if by_class and outputs.shape[-1] == self.classes else None
        if classes is None and self.scores:
            raise UserError("--scores is for the scores of classes, and this model gives none", "leave it out")
        logits = self.from_logits
        if classes is not None and logits is None:
            logits = not confusion.look_like_probabilities(outputs.reshape(-1, classes))
        return dataclasses.replace(self, classes=classes, from_logits=logits)

    def rows(self, outputs: Structure, targets: Structure, first: int) -> Iterator[dict[str, object]]:
        """Yields one row per example of a batch.

        Args:
          outputs: arrays [n, ...], for classes of shape [n, classes] or, for sequences, [n, length, classes].
          targets: arrays [n, ...] likewise, or () for none.
          first: number of the first example.
        """
        columns = {**self._answers(outputs), **(_leaves("target", self._labels(targets)) if len(targets) else {})}
        for i in range(len(next(iter(columns.values())))):
            row: dict[str, object] = {"number": first + i}
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
        logs = confusion.log_probabilities(np.where(finite[:, None], flat, 0), bool(self.from_logits))
        sure = np.where(finite, np.exp(logs.max(1)), np.nan).astype(np.float32)
        shape = outputs.shape[:-1]
        # Scores that are not finite are of no class.
        columns = {"prediction": _each(best.reshape(shape), lambda k: None if k < 0 else k)}
        if self.names:
            columns["name"] = _each(best.reshape(shape), lambda k: self.names[k] if 0 <= k < len(self.names) else None)
        columns["probability"] = _plain(sure.reshape(shape))
        if self.scores:
            columns["scores"] = _plain(outputs)
        return columns

    def _labels(self, targets: Structure) -> Structure:
        """Returns class numbers, where targets are one-hot rows of them."""
        one_hot = self.classes is not None and isinstance(targets, np.ndarray) and targets.shape[-1:] == (self.classes,)
        return targets.argmax(-1) if one_hot and targets.ndim > 1 else targets


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
    flat: dict[str, object] = {}
    for name, value in row.items():
        if not isinstance(value, list):
            flat[name] = value
        elif any(isinstance(inner, list) for inner in value):
            raise UserError(
                f"{name!r} is a table for each example, and a line of CSV holds none", "write a .jsonl file"
            )
        elif len(value) == 1:
            flat[name] = value[0]
        else:
            flat |= {f"{name}_{i}": inner for i, inner in enumerate(value)}
    return flat


def _leaves(name: str, structure: Structure) -> dict[str, list]:
    """Returns the columns of a structure of arrays, named by their place in it."""
    if isinstance(structure, dict):
        pairs = [(f"{name}_{key}", inner) for key, inner in structure.items()]
    elif isinstance(structure, (list, tuple)):
        pairs = [(f"{name}_{i}", inner) for i, inner in enumerate(structure)]
    else:
        return {name: _plain(structure)}
    return {key: values for label, inner in pairs for key, values in _leaves(label, inner).items()}


def _plain(array: np.ndarray) -> list:
    """Returns nested lists of Python numbers; a float has as many digits as its type holds, and no more."""
    array = np.asarray(array)
    if array.dtype == np.float64 or (array.dtype.kind != "f" and array.dtype.name != "bfloat16"):
        return array.tolist()
    shortest = array.astype(np.float32).reshape(-1).astype(str)
    return _shaped([float(text) for text in shortest], array.shape)


def _each(numbers: np.ndarray, name: Callable[[int], object]) -> list:
    """Returns nested lists of `name` of each number."""
    return _shaped([name(int(k)) for k in numbers.reshape(-1)], numbers.shape)


def _shaped(values: list, shape: tuple[int, ...]) -> list:
    """Returns the values of a flat list as nested ones."""
    for side in reversed(shape[1:]):
        values = [values[i : i + side] for i in range(0, len(values), side)] if side else [[]] * len(values)
    return values
