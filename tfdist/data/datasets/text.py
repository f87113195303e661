"""Text for language models: bytes as tokens, of files in windows without padding, or of Python's standard library."""

import dataclasses
import os
import pathlib
import sysconfig
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.config import field_syntax
from tfdist.data.datasets.examples import Parts, cut_splits, matching, unreadable
from tfdist.data.loaded import Loaded
from tfdist.data.sources import Arrays, Records, crc
from tfdist.data.spec import Spec
from tfdist.errors import UserError

VOCABULARY = 256
LENGTH = 256  # tokens of a window, unless told


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """Files one after the other, each with a 0 behind it, cut into windows.

    Window i has the bytes from i * length on, and one more: a window's targets are its bytes moved by one.
    """

    paths: tuple[str, ...]
    starts: np.ndarray  # int64 [paths + 1]: where each file begins, and the end of all
    length: int

    windows = property(lambda self: max(0, (int(self.starts[-1]) - 1) // self.length))

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Reads windows by number: uint8 [n, length + 1]."""
        windows = np.zeros((len(rows), self.length + 1), np.uint8)
        for window, row in zip(windows, rows):
            begin = int(row) * self.length
            number, done = int(np.searchsorted(self.starts, begin, "right")) - 1, 0
            while done < len(window):
                piece = self._piece(number, begin + done - int(self.starts[number]), len(window) - done)
                window[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
                # The 0 behind the file is there already.
                done, number = int(self.starts[number + 1]) - begin, number + 1
        return windows

    def _piece(self, number: int, offset: int, count: int) -> bytes:
        size = int(self.starts[number + 1] - self.starts[number]) - 1
        length = max(0, min(count, size - offset))
        with open(self.paths[number], "rb") as file:
            file.seek(offset)
            piece = file.read(length)
        if len(piece) < length:
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

    In a folder that has `train` as a folder or `train.txt`, each folder and each `.txt` is a split, and nothing else
    counts. Otherwise all files, of a folder with those in its folders but no hidden ones, are `train`.
    """
    path = os.path.expanduser(path)
    if not os.path.isdir(path):
        by_split = {"train": matching(path)}
    else:
        entries = sorted(os.path.join(path, name) for name in os.listdir(path) if not name.startswith("."))
        by_name: dict[str, list[str]] = {}
        for entry in entries:
            if os.path.isdir(entry) or entry.endswith(".txt"):  # a train.py is no split
                by_name.setdefault(os.path.basename(entry).removesuffix(".txt"), []).extend(_below(entry))
        by_split = by_name if "train" in by_name else {"train": [f for entry in entries for f in _below(entry)]}
    if not any(by_split.values()):
        raise UserError(f"data.name=text:{path} has no files", "give a text file, a folder, or a pattern such as *.txt")
    return by_split


def _below(entry: str) -> list[str]:
    if os.path.isfile(entry) or not os.path.exists(entry):  # a link to nothing is not left out in silence
        return [entry]
    walk = os.walk(entry, onerror=lambda error: unreadable(error.filename))
    inside = (os.path.join(folder, name) for folder, _, names in walk for name in names)
    return sorted(
        f for f in inside if not any(part.startswith(".") for part in os.path.relpath(f, entry).split(os.sep))
    )


def load(path: str, splits: dict[str, str], memory: float, length: int = LENGTH) -> Loaded:
    """Loads `text:path` in windows of `length` tokens; a split of more than `memory` bytes stays in its files."""
    field_syntax.check_whole("data.options: length", length)
    sources: list[Arrays | Records] = []
    try:
        packed = {name: pack(paths, length) for name, paths in files(path).items()}
        sizes = {name: p.windows for name, p in packed.items()}
        for selected in cut_splits(splits, packed, sizes, f"text:{path} in windows of {length} bytes"):
            parts = Parts(selected)
            if 8 * len(parts) * length <= memory:
                windows = np.concatenate([files.read(rows) for files, rows in selected]).astype(np.int32)
                sources.append(Arrays((windows[:, :-1], windows[:, 1:])))
            else:
                read = parts.reader(Packed.read, np.uint8, (length + 1,))
                whole, of = [np.memmap(p, mode="r") for files, _ in selected for p in files.paths], "window {}".format
                known: dict[str, object] = {}
                if sum(map(len, whole)) <= 1 << 30:
                    known["checksum of all files"] = crc(whole)
                sources.append(Records(len(parts), read, lambda w, seed: pairs(w), name=of, stored=known.copy))
    except OSError as error:
        where = f"{error.filename} cannot be read: {error.strerror}" if error.filename else error
        raise UserError(where, "correct or remove it") from None
    spec = Spec((length,), "int32", VOCABULARY, VOCABULARY - 1.0)
    return Loaded(sources[0], sources[1], sources[0].size, spec)


MODULES = pathlib.Path(__file__).with_name("stdlib_modules.txt").read_text().split()


def stdlib_text(length: int = 64, examples: int = 4096) -> dict:
    """Makes sequences of bytes, each with the byte that follows every byte: by split, x and y int32 [n, length].

    `length`: bytes per sequence; `examples`: training sequences; a tenth as many are held out, of other modules.
    """
    field_syntax.check_whole("data.options: length", length)
    field_syntax.check_whole("data.options: examples", examples)
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    # Some have become packages in later versions of Python.
    paths = [path for m in MODULES for path in (root / f"{m}.py", root / m / "__init__.py") if path.is_file()]
    split = {
        "train": ([p for i, p in enumerate(paths) if i % 10], examples),
        "test": (paths[::10], max(1, examples // 10)),
    }
    made = {}
    for name, (files, limit) in split.items():
        whole = pack(list(map(str, files)), length)
        windows = whole.read(np.arange(min(limit, whole.windows))).astype(np.int32)
        made[name] = windows[:, :-1], windows[:, 1:]
    return made
