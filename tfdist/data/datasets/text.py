"""Text files for language models: bytes as tokens, packed into windows without padding."""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.config import field_syntax
from tfdist.data.sources import Arrays, Records
from tfdist.data.splits import select
from tfdist.errors import UserError

VOCABULARY = 256
LENGTH = 256
"""Tokens of a window, unless told."""


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """Files one after the other, each with a 0 behind it, cut into windows.

    Window i has the bytes from i * length on, and one more: a window's targets are its bytes moved by one.
    """

    paths: tuple[str, ...]
    starts: np.ndarray
    """int64 [paths + 1]: where each file begins, and the end of all."""
    length: int

    @property
    def windows(self) -> int:
        return max(0, (int(self.starts[-1]) - 1) // self.length)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Reads windows by number: uint8 [n, length + 1]."""
        windows = np.zeros((len(rows), self.length + 1), np.uint8)
        for window, row in zip(windows, rows):
            begin = int(row) * self.length
            number = int(np.searchsorted(self.starts, begin, "right")) - 1
            done = 0
            while done < len(window):
                piece = self._piece(number, begin + done - int(self.starts[number]), len(window) - done)
                window[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
                # The 0 behind the file is there already.
                done, number = int(self.starts[number + 1]) - begin, number + 1
        return windows

    def _piece(self, number: int, offset: int, count: int) -> bytes:
        size = int(self.starts[number + 1] - self.starts[number]) - 1
        wanted = max(0, min(count, size - offset))
        with open(self.paths[number], "rb") as file:
            file.seek(offset)
            piece = file.read(wanted)
        if len(piece) < wanted:
            raise OSError(f"{self.paths[number]} has become shorter since the run began")
        return piece


def pack(paths: Sequence[str], length: int) -> Packed:
    """Packs files in this order; empty ones are left out."""
    sizes = [(path, os.path.getsize(path)) for path in paths]
    kept = [(path, size) for path, size in sizes if size]
    return Packed(tuple(p for p, _ in kept), np.cumsum([0, *[size + 1 for _, size in kept]]), length)


def pairs(windows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns tokens and the token after each, int32 [..., length], of windows uint8 [..., length + 1]."""
    tokens = tf.cast(windows, tf.int32)
    return tokens[..., :-1], tokens[..., 1:]


def files(path: str) -> dict[str, list[str]]:
    """Finds the files of each split, sorted by path.

    In a folder that has `train` as a folder or `train.txt`, each folder and each
    `.txt` is a split, and nothing else counts. Otherwise all files, of a folder with those in its folders
    but no hidden ones, are `train`.
    """
    path = os.path.expanduser(path)
    if not os.path.isdir(path):
        by_split = {"train": sorted(f for f in glob.glob(path, recursive=True) if os.path.isfile(f))}
    else:
        entries = sorted(os.path.join(path, name) for name in os.listdir(path) if not name.startswith("."))
        by_name: dict[str, list[str]] = {}
        for entry in entries:
            if os.path.isdir(entry) or entry.endswith(".txt"):  # a train.py is no split
                by_name.setdefault(os.path.basename(entry).removesuffix(".txt"), []).extend(_below(entry))
        by_split = by_name if "train" in by_name else {"train": [f for entry in entries for f in _below(entry)]}
    if not any(by_split.values()):
        raise UserError(f"data.name=text:{path} has no files: give a text file, a folder, or a pattern such as *.txt")
    return by_split


def _below(entry: str) -> list[str]:
    if os.path.isfile(entry) or not os.path.exists(entry):  # a link to nothing is not left out in silence
        return [entry]
    inside = (os.path.join(folder, name) for folder, _, names in os.walk(entry) for name in names)
    return sorted(
        f for f in inside if not any(part.startswith(".") for part in os.path.relpath(f, entry).split(os.sep))
    )


def load(path: str, splits: dict[str, str], memory: float, length: int = LENGTH) -> list[Arrays | Records]:
    """Returns the sources of `text:path`.

    Args:
      splits: those for training and evaluation, by the field that asks for each.
      memory: bytes that a split may take in memory; a larger one is read from the files when it is needed.
      length: tokens of a window.

    Raises:
      UserError: no files, one that cannot be read, or less text than one window.
    """
    field_syntax.check_whole("data.options: length", length)
    try:
        return _load(files(path), f"text:{path} in windows of {length} bytes", splits, memory, length)
    except OSError as error:
        where = f"{error.filename} cannot be read: {error.strerror}" if error.filename else error
        raise UserError(f"{where}: correct or remove it") from None


def _load(
    by_split: dict[str, list[str]], what: str, splits: dict[str, str], memory: float, length: int
) -> list[Arrays | Records]:
    packed = {name: pack(paths, length) for name, paths in by_split.items()}
    sizes = {name: p.windows for name, p in packed.items()}
    sources: list[Arrays | Records] = []
    for field, text in splits.items():
        parts = select(text, sizes, field, what)
        size = sum(len(rows) for _, rows in parts)
        if 8 * size * length <= memory:
            windows = np.concatenate([packed[name].read(rows) for name, rows in parts]).astype(np.int32)
            sources.append(Arrays((windows[:, :-1], windows[:, 1:])))
        else:
            sources.append(_records(size, [(packed[name], rows) for name, rows in parts], length))
    return sources


def _records(size: int, parts: list[tuple[Packed, np.ndarray]], length: int) -> Records:
    ends = np.cumsum([len(rows) for _, rows in parts])

    def read(numbers: np.ndarray) -> np.ndarray:
        tokens = np.empty((len(numbers), length + 1), np.uint8)
        part = np.searchsorted(ends, numbers, "right")
        for i, (packed, rows) in enumerate(parts):
            here = part == i
            tokens[here] = packed.read(rows[numbers[here] - (ends[i] - len(rows))])
        return tokens

    def windows(rows: tf.Tensor) -> tf.Tensor:
        tokens = tf.numpy_function(read, [rows], tf.uint8)
        return tf.ensure_shape(tokens, [None, length + 1])

    return Records(size, windows, lambda window, seed: pairs(window), name="window {}".format)
