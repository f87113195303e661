"""Tables for a model: columns standardised and numbered by what the training rows show.

An input is a dictionary: `numbers` float32 [n, columns], standardised, a missing
one being the mean; `categories` int32 [n, columns], places in the vocabulary,
0 for what no training row has. Whichever is empty is left out.
"""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist import fields
from tfdist.data import order
from tfdist.datasets import csv_files
from tfdist.datasets.columns import Column
from tfdist.errors import UserError
from tfdist.splits import select

FEW = 20
"""At most so many different whole numbers as targets are classes."""

TEXTS = 1000
"""More different texts than this, in more than half of the rows, are names and no category."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """`data.options` of a table.

    Args:
      target: name of the column to predict.
      delimiter: between fields.
      use: names of the columns that are inputs; empty for all but the target.
      leave_out: names of columns that are not.
      categories: names of columns that hold numbers and are categories.
      classify: whether the target is a class. None finds it out: it is when it
        has texts or at most `FEW` different whole numbers.
      in_order: leave the rows in the file's order. Otherwise they are mixed
        (always alike) before splits are cut, since files are often sorted.
    """

    target: str
    delimiter: str = ","
    use: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    classify: bool | None = None
    in_order: bool = False


def files(path: str) -> dict[str, list[str]]:
    """Files by split: `train.csv` and `test.csv` of a folder; else all that the folder or pattern has, as `train`."""
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        found = sorted(f for end in ("csv", "csv.gz") for f in glob.glob(os.path.join(glob.escape(path), f"*.{end}")))
        by_name = {os.path.basename(f).removesuffix(".gz").removesuffix(".csv"): [f] for f in found}
        if "train" in by_name:
            if len(by_name) < len(found):
                twice = next(f for f in found if [f] not in by_name.values())
                raise UserError(f"{twice} is there as .csv and as .csv.gz: remove one of them")
            return by_name
    else:
        found = [path] if os.path.isfile(path) else sorted(f for f in glob.glob(path) if os.path.isfile(f))
    if not found:
        raise UserError(f"data.name=csv:{path} has no files: give a CSV file, a folder of *.csv files, or a pattern")
    return {"train": found}


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """Both splits as arrays, and what a model must know."""

    train: tuple[dict[str, np.ndarray], np.ndarray]
    eval: tuple[dict[str, np.ndarray], np.ndarray]
    columns: tuple[Column, ...]
    target: Column
    classes: int | None
    names: tuple[str, ...]


def prepare(
    path: str,
    options: dict[str, Any],
    splits: tuple[str, str],
    skip: bool = False,
    say: Callable[[str], None] = print,
) -> Prepared:
    """Reads the tables of `csv:path`.

    Args:
      options: see `Options`.
      splits: of training and evaluation, such as `train[:80%]` and `train[80%:]`.
      skip: leave bad rows out, with a line that says which.
      say: shows a line to a person.

    Raises:
      UserError: no files, unknown columns or splits, bad rows, or targets that cannot be learned.
    """
    by_split = files(path)
    delimiter = _delimiter(options)
    names = csv_files.header(by_split["train"][0], delimiter)
    chosen = _options(options, names, path)
    inputs = _inputs(chosen, names)
    kinds = dict.fromkeys(chosen.categories, "category")
    if chosen.classify is not None:
        kinds[chosen.target] = "category" if chosen.classify else "number"
    parts: dict[str, csv_files.Table] = {}
    named = {part.split("[")[0].strip() for text in splits for part in text.split("+")}
    # The file to train on first: it decides what the columns of the others are.
    for name in sorted(by_split, key=lambda name: (name != "train", name)):
        if name in named or name == "train":
            table = csv_files.read(by_split[name], [*inputs, chosen.target], kinds, chosen.delimiter, skip)
            if table.skipped:
                say(f"WARNING: left out: {csv_files.described(table.skipped)}")
            table = _with_target(table, chosen.target, f"{name} of csv:{path}", skip, say)
            kinds |= dict.fromkeys(table.numbers, "number") | dict.fromkeys(table.categories, "category")
            parts[name] = table
    sizes = {name: parts[name].size if name in parts else 0 for name in by_split}
    cut = lambda field, text: _cut(select(text, sizes, field, f"csv:{path}"), parts, chosen.in_order)
    train, evaluation = cut("data.train_split", splits[0]), cut("data.eval_split", splits[1])
    columns = tuple(_described(train, name) for name in inputs)
    target, classes = _target(train, chosen)
    made = [(encode(t, columns), _targets(t, target, classes)) for t in (train, evaluation)]
    return Prepared(made[0], made[1], columns, target, classes, target.vocabulary if classes else ())


def encode(table: csv_files.Table, columns: tuple[Column, ...]) -> dict[str, np.ndarray]:
    """Rows of a table as a model's inputs, by the statistics in `columns`."""
    numbers = [
        np.nan_to_num((table.numbers[c.name] - c.mean) / c.std, nan=0.0).astype(np.float32)
        for c in columns
        if c.kind == "number"
    ]
    categories = [
        _places(table, c.name, c.vocabulary, first=1).astype(np.int32) for c in columns if c.kind == "category"
    ]
    inputs: dict[str, list[np.ndarray]] = {"numbers": numbers, "categories": categories}
    return {name: np.stack(values, 1) for name, values in inputs.items() if values}


def read_inputs(path: str, columns: tuple[Column, ...], options: dict[str, Any]) -> dict[str, np.ndarray]:
    """New rows as a model's inputs, in the order of the file: what is predicted on.

    Args:
      options: see `Options`; only the delimiter matters here.

    Raises:
      UserError: columns that are missing, or bad rows.
    """
    kinds = {c.name: c.kind for c in columns}
    return encode(_read_known(path, kinds, options, skip=None), columns)


def read_rows(
    path: str,
    columns: tuple[Column, ...],
    target: Column,
    options: dict[str, Any],
    skip: bool = False,
    say: Callable[[str], None] = print,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Likewise, with targets: what is evaluated on.

    Args:
      options: that the model was trained with, see `Options`.
      skip: leave bad rows out, with a line that says which.
      say: shows a line to a person.
    """
    numbers = target.kind == "number"
    if not numbers and not options.get("classify"):  # few whole numbers were read as numbers, and "1.0" is a 1
        numbers = all(_natural(text)[0] == 0 for text in target.vocabulary)
    kinds = {c.name: c.kind for c in columns} | {target.name: "number" if numbers else "category"}
    table = _read_known(path, kinds, options, skip)
    if table.skipped:
        say(f"WARNING: left out: {csv_files.described(table.skipped)}")
    table = _with_target(table, target.name, path, skip, say)
    if not table.size:
        raise UserError(f"{path} has no rows with a target {target.name!r}: there is nothing to evaluate on")
    classes = len(target.vocabulary) if target.kind == "category" else None
    return encode(table, columns), _targets(table, target, classes)


def _read_known(path: str, kinds: dict[str, str], options: dict[str, Any], skip: bool | None) -> csv_files.Table:
    path, delimiter = os.path.expanduser(path), _delimiter(options)
    names = csv_files.header(path, delimiter)
    missing = [name for name in kinds if name not in names]
    if missing:
        raise UserError(f"{path} lacks the columns {', '.join(missing)} that the model was trained on")
    return csv_files.read([path], kinds, kinds, delimiter, skip)


def _delimiter(options: dict[str, Any]) -> str:
    delimiter = options.get("delimiter", ",")
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n':
        raise UserError(f"data.options: delimiter must be one character, and no quote, got {delimiter!r}")
    return delimiter


def _options(given: dict[str, Any], names: list[str], path: str) -> Options:
    columns = ", ".join(names)
    known = [field.name for field in dataclasses.fields(Options)]
    for name in given:
        if name not in known:
            raise UserError(f"unknown {name!r} in data.options{fields.suggest(name, tuple(known))}")
    if "target" not in given:
        raise UserError(f"csv:{path} needs data.options=target=NAME, the column to predict, one of: {columns}")
    lists = ("use", "leave_out", "categories")
    values: dict[str, Any] = {k: _listed(k, v) if k in lists else v for k, v in given.items()}
    chosen = Options(**values)
    for field in ("target", "use", "leave_out", "categories"):
        value = getattr(chosen, field)
        for name in (value,) if field == "target" else value:
            if name not in names:
                raise UserError(f"data.options: there is no column {name!r} for {field} in {path}: it has {columns}")
    for field, value in (("classify", chosen.classify), ("in_order", chosen.in_order)):
        if not isinstance(value, bool) and not (value is None and field == "classify"):
            raise UserError(f"data.options: {field} must be True or False, got {value!r}")
    return chosen


def _listed(field: str, value: Any) -> tuple:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise UserError(f"data.options: {field} must be a column name or a list of them, got {value!r}")
    return tuple(names)


def _inputs(chosen: Options, names: list[str]) -> list[str]:
    inputs = [n for n in names if n not in (chosen.target, *chosen.leave_out) and (not chosen.use or n in chosen.use)]
    if "" in inputs and "" not in chosen.use:
        raise UserError(
            "a column without a name, often the number of the row, would be an input: "
            "leave it out with data.options=\"leave_out=['']\", or name it"
        )
    if not inputs:
        raise UserError(
            f"data.options leaves no column to predict {chosen.target!r} from: there are {', '.join(names)}"
        )
    return inputs


def _cut(wanted: list[tuple[str, np.ndarray]], parts: dict[str, csv_files.Table], in_order: bool) -> csv_files.Table:
    found = []
    for name, rows in wanted:
        table = parts[name]
        found.append(_taken(table, rows if in_order else order(0, 0, table.size)[rows]))
    return found[0] if len(found) == 1 else _joined(found)


def _joined(tables: list[csv_files.Table]) -> csv_files.Table:
    numbers = {name: np.concatenate([t.numbers[name] for t in tables]) for name in tables[0].numbers}
    texts = {name: sorted({text for t in tables for text in t.texts[name]}) for name in tables[0].texts}
    categories = {
        name: np.concatenate([_places(t, name, tuple(known), first=0) for t in tables]) for name, known in texts.items()
    }
    return dataclasses.replace(
        tables[0], numbers=numbers, categories=categories, texts=texts, size=sum(t.size for t in tables)
    )


def _described(table: csv_files.Table, name: str) -> Column:
    """What the training rows show of a column."""
    if name in table.numbers:
        values = table.numbers[name]
        present = values[~np.isnan(values)]
        if not len(present):
            return Column(name, "number")
        if present.min() == present.max():  # by rounding, their deviation would be 1e-17 and another value 1e16
            return Column(name, "number", float(present[0]))
        return Column(name, "number", float(present.mean()), float(present.std()) or 1.0)
    occur = np.unique(table.categories[name])
    if len(occur) > TEXTS and len(occur) > table.size / 2:
        raise UserError(
            f"column {name!r} has {len(occur):,} different texts in {table.size:,} training rows, "
            f"more than a category has: leave it out with data.options=leave_out={[name]}"
        )
    return Column(name, "category", vocabulary=tuple(sorted(table.texts[name][i] for i in occur)))


def _target(table: csv_files.Table, chosen: Options) -> tuple[Column, int | None]:
    """The target as the training rows show it, and the number of classes if it is one."""
    name = chosen.target
    if name in table.numbers:
        values = table.numbers[name]
        different = np.unique(values[~np.isnan(values)])
        if chosen.classify is None and len(different) <= FEW and (different == np.round(different)).all():
            return Column(name, "category", vocabulary=tuple(f"{v:.0f}" for v in different)), len(different)
        return _described(table, name), None
    occur = [table.texts[name][i] for i in np.unique(table.categories[name])]
    return Column(name, "category", vocabulary=tuple(sorted(occur, key=_natural))), len(occur)


def _natural(text: str) -> tuple:
    """Sorts numbers by value, before texts."""
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text


def _targets(table: csv_files.Table, target: Column, classes: int | None) -> np.ndarray:
    """float32 [n], or int32 [n] where they are classes."""
    name = target.name
    if classes is None:
        return table.numbers[name].astype(np.float32)
    if name in table.numbers:
        values = table.numbers[name]
        known = np.array([float(text) for text in target.vocabulary])
        places = np.minimum(np.searchsorted(known, values), len(known) - 1)
        unknown = [f"{value:g}" for value in values[known[places] != values]]
    else:
        places = _places(table, name, target.vocabulary, first=0)
        unknown = [table.texts[name][i] for i in table.categories[name][places < 0]]
    if unknown:
        raise UserError(
            f"{len(unknown):,} rows have a target {name!r} that no training row has, such as {unknown[0]!r}: choose "
            "other splits, leave them out of the file, or set classify=False in data.options if it is no class"
        )
    return places.astype(np.int32)


def _with_target(
    table: csv_files.Table, name: str, what: str, skip: bool, say: Callable[[str], None]
) -> csv_files.Table:
    if name in table.numbers:
        missing = np.isnan(table.numbers[name])
    else:
        missing = np.array([not text for text in table.texts[name]], bool)[table.categories[name]]
    if not missing.any():
        return table
    if not skip:
        raise UserError(
            f"{int(missing.sum()):,} rows in {what} have no target {name!r}: "
            "fill it in, or leave such rows out with data.broken=skip"
        )
    say(f"WARNING: left out: {int(missing.sum()):,} rows in {what} that have no target {name!r}")
    return _taken(table, np.flatnonzero(~missing))


def _taken(table: csv_files.Table, rows: Any) -> csv_files.Table:
    numbers = {name: values[rows] for name, values in table.numbers.items()}
    categories = {name: values[rows] for name, values in table.categories.items()}
    size = len(next(iter((*numbers.values(), *categories.values()))))
    return dataclasses.replace(table, numbers=numbers, categories=categories, size=size)


def _places(table: csv_files.Table, name: str, vocabulary: tuple[str, ...], first: int) -> np.ndarray:
    """Each row's place in the vocabulary, plus `first`; one less than `first` where it is not there."""
    places = {text: i + first for i, text in enumerate(vocabulary)}
    of_text = np.array([places.get(text, first - 1) for text in table.texts[name]], np.int64)
    return of_text[table.categories[name]]
