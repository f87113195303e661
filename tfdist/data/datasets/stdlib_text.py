"""The source text of Python's own standard library, as sequences of bytes for a language model."""

from __future__ import annotations

import pathlib
import sysconfig

import numpy as np

from tfdist.config import field_syntax
from tfdist.data.datasets import text

_NAMES = (
    "argparse ast base64 bisect calendar cmd code codecs collections/__init__ configparser contextlib copy csv "
    "dataclasses datetime decimal difflib dis doctest enum fileinput fnmatch fractions ftplib functools getopt "
    "glob gzip hashlib heapq hmac html/parser http/client inspect io json/decoder json/encoder locale "
    "logging/__init__ mailbox mimetypes numbers operator optparse os pathlib pdb pickle pkgutil platform "
    "pprint profile queue random re reprlib sched selectors shelve shlex shutil smtplib socket socketserver "
    "statistics string subprocess tarfile tempfile textwrap threading timeit tokenize trace traceback types "
    "typing unittest/case urllib/parse uuid weakref "
)
MODULES = _NAMES.split()


def load(length: int = 64, examples: int = 4096, packed: bool = False) -> dict:
    """Makes sequences of bytes, each with the byte that follows every byte.

    Args:
      length: bytes per sequence.
      examples: training sequences; a tenth as many are held out, of other modules.
      packed: for language models: all text without padding and weights, x and y
        int32 [n, length], at most `examples` (see text.py). Otherwise whole
        lines, padded with 0.

    Returns:
      By split (`train`, `test`): x and y int32 [n, length], weight float32
      [n, length]: 1 for a byte, half for white space at the beginning of a line
      (easy to guess and a quarter of all text), 0 for padding.
    """
    field_syntax.check_whole("data.options: length", length)
    field_syntax.check_whole("data.options: examples", examples)
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    paths = [p for m in MODULES if (p := _path(root, m)).is_file()]
    if packed:
        return {
            "train": _packed([p for i, p in enumerate(paths) if i % 10], length, examples),
            "test": _packed(paths[::10], length, max(1, examples // 10)),
        }
    texts = [p.read_bytes() for p in paths]
    held_out = texts[::10]
    kept = [t for i, t in enumerate(texts) if i % 10]
    return {"train": _sequences(kept, length, examples), "test": _sequences(held_out, length, max(1, examples // 10))}


def _packed(paths: list[pathlib.Path], length: int, limit: int) -> tuple:
    whole = text.pack([str(p) for p in paths], length)
    windows = whole.read(np.arange(min(limit, whole.windows))).astype(np.int32)
    return windows[:, :-1], windows[:, 1:]


def _path(root: pathlib.Path, module: str) -> pathlib.Path:
    """Finds the file of a module; some became packages in later versions of Python."""
    path = root / f"{module}.py"
    return path if path.is_file() else root / module / "__init__.py"


def _sequences(texts: list[bytes], length: int, limit: int) -> tuple:
    """Returns the first `limit` sequences, taken from all texts in turn, as x, y and weight."""
    streams = [_cut(text, length) for text in texts]
    pieces: list[bytes] = []
    while len(pieces) < limit and streams:
        for stream in list(streams):
            piece = next(stream, None)
            if piece is None:
                streams.remove(stream)
            elif len(pieces) < limit:
                pieces.append(piece)
    x = np.zeros((len(pieces), length), np.int32)
    y = np.zeros_like(x)
    weight = np.zeros(x.shape, np.float32)
    for row, piece in enumerate(pieces):
        codes = np.frombuffer(piece, np.uint8)
        n = len(codes) - 1
        x[row, :n], y[row, :n] = codes[:-1], codes[1:]
        weight[row, :n] = np.where(_indent(piece)[1:], 0.5, 1.0)
    return x, y, weight


def _cut(text: bytes, length: int):
    """Cuts pieces of 2 to `length` + 1 bytes, which begin and, where they can, end with a line."""
    piece = b""
    for line in text.splitlines(keepends=True):
        if len(piece) > 1 and len(piece) + len(line) > length + 1:
            yield piece
            piece = b""
        piece += line[: length + 1 - len(piece)]
        if len(piece) > length:
            yield piece
            piece = b""
    if len(piece) > 1:
        yield piece


def _indent(piece: bytes) -> np.ndarray:
    marks = [
        c == " " and not line[:i].strip()
        for line in piece.decode("latin-1").splitlines(keepends=True)
        for i, c in enumerate(line)
    ]
    return np.array(marks, bool)
