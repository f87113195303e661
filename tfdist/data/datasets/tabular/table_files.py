"""The files of a table: which there are of each split, and what reads them."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence

from tfdist.config import field_syntax
from tfdist.data.datasets.tabular import csv_reader, parquet_reader
from tfdist.data.datasets.tabular.csv_reader import Table
from tfdist.errors import UserError

ENDINGS = {"csv": ("csv", "csv.gz"), "parquet": ("parquet",)}
"""How the names of files end, by kind."""
_PIECE = re.compile(r"-\d+-of-\d+$")


def by_split(kind: str, path: str) -> dict[str, list[str]]:
    """Finds the files of each split.

    These are `train.csv` and `test.csv` of a folder, or `train-00000-of-00002.parquet`; else all that the folder or
    pattern has are `train`.

    Args:
      kind: one of `ENDINGS`.
      path: a file, a folder or a pattern.
    """
    endings, path = ENDINGS[kind], os.path.expanduser(path)
    if os.path.isdir(path):
        paths = sorted(f for end in endings for f in glob.glob(os.path.join(glob.escape(path), f"*.{end}")))
        stems = {f: next(f.removesuffix(f".{e}") for e in reversed(endings) if f.endswith(f".{e}")) for f in paths}
        named: dict[str, list[str]] = {}
        for file, stem in stems.items():
            named.setdefault(_PIECE.sub("", os.path.basename(stem)), []).append(file)
        if "train" in named:
            for stem in {stem for stem in stems.values() if list(stems.values()).count(stem) > 1}:
                raise UserError(f"{stem}.csv is there as .csv and as .csv.gz: remove one of them")
            return named
    else:
        paths = [path] if os.path.isfile(path) else sorted(f for f in glob.glob(path) if os.path.isfile(f))
    if not paths:
        word = {"csv": "CSV", "parquet": "Parquet"}[kind]
        raise UserError(
            f"data.name={kind}:{path} has no files: give a {word} file, a folder of *.{endings[0]} files, or a pattern"
        )
    return {"train": paths}


class TableReader:
    """What reads the files of a table.

    Args:
      kind: one of `ENDINGS`.
      options: `data.options`, of which a delimiter matters here.
    """

    def __init__(self, kind: str, options: field_syntax.Options):
        if kind != "csv" and "delimiter" in options:
            raise UserError(f"data.options: delimiter is for CSV, and data.name begins with {kind}: leave it out")
        self._kind, self._delimiter = kind, _delimiter(options)

    def header(self, path: str) -> list[str]:
        """Returns the column names of a file."""
        return csv_reader.header(path, self._delimiter) if self._kind == "csv" else parquet_reader.header(path)

    def read(self, paths: Sequence[str], columns: Iterable[str], kinds: dict[str, str], skip: bool | None) -> Table:
        """Reads these columns of all files, see `csv_reader.read`."""
        if self._kind == "csv":
            return csv_reader.read(paths, columns, kinds, self._delimiter, skip)
        return parquet_reader.read(paths, columns, kinds, skip)


def _delimiter(options: field_syntax.Options) -> str:
    delimiter = options.get("delimiter", ",")
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n':
        raise UserError(f"data.options: delimiter must be one character, and no quote, got {delimiter!r}")
    return delimiter
