"""Reads CSV files into columns: numbers and texts told apart, bad rows named by their line."""

import _csv
import csv
import dataclasses
import gc
import gzip
import io
import itertools
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import TextIO

import numpy as np

from tfdist.data.datasets.examples import first_few
from tfdist.errors import UserError

MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "?"))  # missing numbers, in any case; of a category, ""
NUMBERS = 0.95  # share of a column's values that must be numbers, or it is a category; the rest are bad rows
_COMMAS = re.compile(r"[-+]?(\d+(,\d{3})*(\.\d+)?|\d+(\.\d{3})*(,\d+)?)(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)
LARGEST = float(np.finfo(np.float32).max)  # more than this would be infinite as a target
_CHUNK = 20_000
BAD_ROWS = "more bad rows"


@dataclasses.dataclass(slots=True)
class Table:
    """Rows of files with one header, in their order."""

    numbers: dict[str, np.ndarray]  # columns of numbers by name: float64 [rows], NaN where missing
    categories: dict[str, np.ndarray]  # columns of categories by name: int32 [rows], places in `texts`
    texts: dict[str, list[str]]  # the texts that occur in each column of `categories`, stripped
    rows: np.ndarray  # which rows of all files these are, from 0: bad ones and those taken out count, too
    skipped: list[str]  # bad rows that were left out: where, and what is wrong

    def taken(self, rows: np.ndarray) -> "Table":
        """Returns a table of these rows, in this order."""
        numbers = {name: values[rows] for name, values in self.numbers.items()}
        categories = {name: values[rows] for name, values in self.categories.items()}
        return dataclasses.replace(self, numbers=numbers, categories=categories, rows=self.rows[rows])

    size = property(lambda self: len(self.rows))

    def places(self, name: str, vocabulary: tuple[str, ...], first: int) -> np.ndarray:
        """Returns each row's place in the vocabulary, plus `first`; one less than `first` where it is not there.

        Of an input, "70.0" is there where "70" is: libraries write integers so beside missing ones.
        """
        places = {text: i + first for i, text in enumerate(vocabulary)}
        spelled = [(text, text.removesuffix(".0"), f"{text}.0")[: 3 if first else 1] for text in self.texts[name]]
        known = [next((places[text] for text in texts if text in places), first - 1) for texts in spelled]
        return np.array(known, np.int64)[self.categories[name]]


class TableBuilder:
    """Adds up the columns of a table, chunk by chunk; whoever adds chunks completes `kinds`."""

    def __init__(self, columns: Iterable[str], kinds: dict[str, str]):
        self.columns, self.kinds = list(columns), dict(kinds)
        self.bad: list[str] = []  # bad rows so far: where, and what is wrong
        self._parts: dict[str, list[np.ndarray]] = {name: [] for name in self.columns}
        self._places: dict[str, dict[str, int]] = {name: {} for name in self.columns}
        self._rows: list[np.ndarray] = [np.arange(0)]

    def numbered(self, name: str, texts: Iterable[str]) -> np.ndarray:
        """Returns the places of stripped texts in a column's `texts`, int32 [rows]."""
        places = self._places[name]
        return np.array([places.setdefault(text, len(places)) for text in texts], np.int32)

    def add(self, chunk: dict[str, np.ndarray], bad: dict[int, str], rows: np.ndarray) -> None:
        """Adds these rows of all files by column; those in `bad` are left out, each with what is wrong."""
        keep = np.ones(len(rows), bool)
        keep[list(bad)] = False
        self.bad += [bad[i] for i in sorted(bad)]
        self._rows.append(rows[keep])
        for name, part in chunk.items():
            self._parts[name].append(part[keep])

    def table(self, empty: str, skip: bool | None) -> Table:
        """Returns the table; `empty` says what is wrong with one without rows, and see `read` for `skip`."""
        if self.bad and not skip:
            instead = "" if skip is None else ", or leave such rows out with data.on_error=skip"
            raise UserError(first_few(self.bad, BAD_ROWS), f"correct the file{instead}")
        rows = np.concatenate(self._rows)
        if not len(rows):
            raise UserError(empty + " that can be used" * bool(self.bad))
        kind = lambda kind: [name for name in self.columns if self.kinds[name] == kind]
        joined = {name: np.concatenate(parts) for name, parts in self._parts.items()}
        return Table(
            {name: joined[name] for name in kind("number")},
            {name: joined[name] for name in kind("category")},
            {name: list(self._places[name]) for name in kind("category")},
            rows,
            self.bad,
        )


def check_names(path: str, names: list[str]) -> None:
    """Refuses a name that two columns have."""
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path} has two columns named {name!r}", "rename one of them")


def check_alike(path: str, names: list[str], first_path: str, first: list[str]) -> None:
    """Refuses files that have other columns than the first one."""
    if sorted(names) != sorted(first):
        other = ", ".join(sorted(set(names) ^ set(first)))
        raise UserError(f"{path} has other columns than {first_path} ({other})", "give files of one table")


def joined(tables: list[Table]) -> Table:
    """Returns a table of all rows, those of one table after those of the other."""
    numbers = {name: np.concatenate([t.numbers[name] for t in tables]) for name in tables[0].numbers}
    texts = {name: sorted({text for t in tables for text in t.texts[name]}) for name in tables[0].texts}
    categories = {
        name: np.concatenate([t.places(name, tuple(known), first=0) for t in tables]) for name, known in texts.items()
    }
    rows = np.concatenate([t.rows for t in tables])
    return dataclasses.replace(tables[0], numbers=numbers, categories=categories, texts=texts, rows=rows)


def header(path: str, delimiter: str = ",") -> list[str]:
    """Returns the column names of a file."""
    with _open(path) as file:
        rows, wrong = _taken(path, csv.reader(file, delimiter=delimiter, strict=True), 1)
    if wrong:
        raise UserError(f"{path} line 1 {wrong}", "correct the file")
    names = [name.strip() for name in (rows or [[]])[0]]
    if "\0" in "".join(names):
        raise UserError(f"{path} has a NUL in its header", "give CSV in UTF-8")
    if not any(names):
        raise UserError(f"{path} has no header: its first line must name the columns")
    check_names(path, names)
    return names


def read(
    paths: Sequence[str], columns: Iterable[str], kinds: dict[str, str], delimiter: str = ",", skip: bool | None = False
) -> Table:
    """Reads these columns of all files.

    Args:
      kinds: `number` or `category` of the columns for which it is known; of the others it is found out: a column is of
        numbers when `NUMBERS` of its values are.
      skip: leave out bad rows (another number of fields than the header; no number of float32 in a column of numbers;
        wrong quotes) instead of refusing them; None where that cannot be asked for.
    """
    columns, given, kinds = list(columns), set(kinds), dict(kinds)
    collecting = gc.isenabled()
    gc.disable()  # it looks through all of TensorFlow again and again while lists are made: a third of the time
    try:
        reader = _Reader(columns, kinds, delimiter)
        while texts := reader.read(paths):
            kinds |= dict.fromkeys(texts, "category")
            reader = _Reader(columns, kinds, delimiter)
        table = reader.table(f"{paths[0]} has no rows below its header", skip)
    finally:
        if collecting:
            gc.enable()
    for name in table.categories.keys() - given:
        present = [text for text in table.texts[name] if text.lower() not in MISSING]
        if all(map(_COMMAS.fullmatch, present)) and (odd := [text for text in present if "," in text]):
            what = f"column {name!r} of {paths[0]} has {odd[0]!r}, which would be the name of a category"
            fix = f"write numbers with a decimal point and nothing else, or set categories={[name]} in data.options"
            raise UserError(what, fix)
    return table


class _Reader(TableBuilder):
    """One pass over files of a table."""

    def __init__(self, columns: list[str], kinds: dict[str, str], delimiter: str):
        super().__init__(columns, kinds)
        self._given, self._delimiter = kinds, delimiter
        self._wrong = dict.fromkeys(columns, 0)
        self._present = dict.fromkeys(columns, 0)
        self._count = 0  # rows of the files so far

    def read(self, paths: Sequence[str]) -> list[str]:
        """Reads all files; returns the columns that began with numbers and are categories after all."""
        first = header(paths[0], self._delimiter)
        for path in paths:
            names = header(path, self._delimiter)
            check_alike(path, names, paths[0], first)
            with _open(path) as file:
                # Python's usual parser would make one text of all from a wrong quote up to the next one.
                reader = csv.reader(file, delimiter=self._delimiter, strict=True)
                next(reader)
                self._read_file(path, reader, names)
        found = [name for name in self.columns if name not in self._given]
        return [name for name in found if self._wrong[name] > (1 - NUMBERS) * self._present[name]]

    def _read_file(self, path: str, reader: _csv.Reader, names: list[str]) -> None:
        where = [names.index(name) for name in self.columns]
        while True:
            line = reader.line_num
            rows, wrong = _taken(path, reader, _CHUNK)
            if not rows and not wrong:
                return
            lines = _lines([*rows, []] if wrong else rows, line, reader.line_num)
            end, lines = lines[-1], lines[: len(rows)]
            numbers = self._count + np.cumsum([0, *map(bool, rows)])  # a blank line is no row
            self._count = int(numbers[-1]) + bool(wrong)
            numbers = numbers[:-1]
            if set(map(len, rows)) != {len(names)}:
                for row, number in zip(rows, lines):
                    if row and len(row) != len(names):
                        self.bad.append(f"{path} line {number} has {len(row)} fields and the header {len(names)}")
                kept = [i for i, row in enumerate(rows) if len(row) == len(names)]
                rows, lines, numbers = [rows[i] for i in kept], [lines[i] for i in kept], numbers[kept]
            if rows:
                values = list(zip(*rows))
                self._add_texts(path, {name: values[i] for name, i in zip(self.columns, where)}, lines, numbers)
            if wrong:
                self.bad.append(f"{path} line {end} {wrong}")

    def _add_texts(self, path: str, values: dict[str, tuple[str, ...]], lines: Sequence[int], rows: np.ndarray) -> None:
        """Adds a chunk of rows; those are left out that have no number where there should be one."""
        bad: dict[int, str] = {}
        chunk = {}
        for name, column in values.items():
            if self.kinds.get(name) != "category":
                chunk[name], wrong, huge = numbers(column)
                present = len(column) - int(np.isnan(chunk[name]).sum()) + len(wrong) + len(huge)
                self.kinds.setdefault(name, "category" if len(wrong) > (1 - NUMBERS) * present else "number")
            if self.kinds[name] == "category":
                if "\0" in "".join(column):
                    for i in (i for i, text in enumerate(column) if "\0" in text):
                        bad.setdefault(i, f"{path} line {lines[i]} has {column[i]!r}, with a NUL, in column {name!r}")
                chunk[name] = self.numbered(name, map(str.strip, column))
                continue
            self._wrong[name] += len(wrong)
            self._present[name] += present
            for i in (*wrong, *huge):
                bad.setdefault(i, f"{path} line {lines[i]} has {column[i]!r} for a number in column {name!r}")
        self.add(chunk, bad, rows)


def _open(path: str) -> TextIO:
    try:
        if path.endswith(".gz"):
            return io.TextIOWrapper(gzip.open(path), encoding="utf-8-sig", newline="")
        return open(path, encoding="utf-8-sig", newline="")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _taken(path: str, reader: _csv.Reader, count: int) -> tuple[list[list[str]], str]:
    """Returns rows up to one with wrong quotes, and what is wrong with that; the parser goes on with the next line."""
    rows: list[list[str]] = []
    try:
        for row in itertools.islice(reader, count):
            rows.append(row)  # those before an error are kept
    except (csv.Error, UnicodeDecodeError, EOFError, OSError, zlib.error) as error:
        if isinstance(error, csv.Error) and "unexpected end of data" in str(error):
            return rows, "has a quote that does not end, and all below belongs to it"
        if isinstance(error, csv.Error) and "expected after" in str(error):
            return rows, f"has characters behind a closing quote, in line {reader.line_num}"
        raise UserError(f"{path} cannot be read after line {reader.line_num}: {error}", "give CSV in UTF-8") from None
    return rows, ""


def _lines(rows: list[list[str]], before: int, last: int) -> Sequence[int]:
    """Returns the line on which each row begins; a quoted field may have several."""
    if last - before == len(rows):
        return range(before + 1, last + 1)
    lengths = [1 + sum(value.count("\n") for value in row) for row in rows]
    return (before + 1 + np.cumsum([0, *lengths[:-1]])).tolist()


def number(text: str) -> float:
    """Returns the number that a text is: Python alone would take 1_0 for 10, and digits of any script."""
    if "_" in text or not text.strip().isascii():
        raise ValueError(f"{text!r} is not a number")
    return float(text)


def numbers(column: Sequence[str]) -> tuple[np.ndarray, list[int], list[int]]:
    """Returns the values, NaN where there is none that can be used, and the places of two kinds of bad ones.

    The first are texts that are neither a number nor missing. The others are infinite, or would be in float32: they are
    numbers, so they do not make a category of their column.
    """
    wrong, together = [], "".join(column)
    usual = together.isascii() and "_" not in together
    try:
        values = np.fromiter(map(float if usual else number, column), np.float64, len(column))
    except ValueError:
        values = np.full(len(column), math.nan)
        for i, text in enumerate(column):
            try:
                values[i] = number(text)
            except ValueError:
                if text.strip().lower() not in MISSING:
                    wrong.append(i)
    huge = np.flatnonzero(np.abs(values) > LARGEST).tolist()
    values[huge] = math.nan
    return values, wrong, huge
