"""Tables for a model: columns standardised and numbered by what the training rows show.

An input is a dictionary: `numbers` float32 [n, columns], standardised, a missing
one being the mean; `categories` int32 [n, columns], places in the vocabulary,
0 for what no training row has. Whichever is empty is left out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tfdist.config import field_syntax
from tfdist.config.messages import logger
from tfdist.data.datasets.tabular import csv_reader, table_encoding, table_files
from tfdist.data.sources import order
from tfdist.data.spec import Column
from tfdist.data.splits import named, select
from tfdist.errors import UserError

FEW = 20
"""At most so many different whole numbers as targets are classes."""

TEXTS = 1000
"""More different texts than this, in more than half of the rows, are names and no category."""


@dataclasses.dataclass(frozen=True, slots=True)
class TableOptions:
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
    options: field_syntax.Options,
    splits: tuple[str, str],
    skip: bool = False,
    kind: str = "csv",
) -> Prepared:
    """Reads the tables of `csv:path`, or of `parquet:path`.

    Args:
      options: see `TableOptions`.
      splits: those for training and evaluation, such as `train[:80%]` and `train[80%:]`.
      skip: leave bad rows out, with a line that says which.
      kind: `csv` or `parquet`.

    Raises:
      UserError: no files, unknown columns or splits, bad rows, or targets that cannot be learned.
    """
    by_split = table_files.by_split(kind, path)
    reader = table_files.TableReader(kind, options)
    what = f"{kind}:{path}"
    names = reader.header(by_split["train"][0])
    chosen = _options(options, names, what)
    inputs = _inputs(chosen, names)
    kinds = dict.fromkeys(chosen.categories, "category")
    if chosen.classify is not None:
        kinds[chosen.target] = "category" if chosen.classify else "number"
    parts: dict[str, csv_reader.Table] = {}
    wanted = named(splits)
    # The file to train on first: it decides what the columns of the others are.
    for name in sorted(by_split, key=lambda name: (name != "train", name)):
        if name in wanted or name == "train":
            table = reader.read(by_split[name], [*inputs, chosen.target], kinds, skip)
            if table.skipped:
                logger.info(f"WARNING: left out: {csv_reader.described(table.skipped)}")
            table = table_encoding.leave_out_without(table, chosen.target, f"{name} of {what}", skip)
            kinds |= dict.fromkeys(table.numbers, "number") | dict.fromkeys(table.categories, "category")
            parts[name] = table
    sizes = {name: parts[name].size if name in parts else 0 for name in by_split}
    cut = lambda field, text: _cut(select(text, sizes, field, what), parts, chosen.in_order)
    train, evaluation = cut("data.train_split", splits[0]), cut("data.eval_split", splits[1])
    columns = tuple(_described(train, name) for name in inputs)
    target, classes = _target(train, chosen)
    made = [
        (table_encoding.encode(t, columns), table_encoding.encode_target(t, target, classes))
        for t in (train, evaluation)
    ]
    return Prepared(made[0], made[1], columns, target, classes, target.vocabulary if classes else ())


def _options(given: field_syntax.Options, names: list[str], what: str) -> TableOptions:
    columns = ", ".join(names)
    known = [field.name for field in dataclasses.fields(TableOptions)]
    for name in given:
        if name not in known:
            raise UserError(f"unknown {name!r} in data.options{field_syntax.suggest(name, tuple(known))}")
    if "target" not in given:
        raise UserError(f"{what} needs data.options=target=NAME, the column to predict, one of: {columns}")
    lists = ("use", "leave_out", "categories")
    values: dict[str, Any] = {k: _listed(k, v) if k in lists else v for k, v in given.items()}
    chosen = TableOptions(**values)
    for field in ("target", "use", "leave_out", "categories"):
        value = getattr(chosen, field)
        for name in (value,) if field == "target" else value:
            if name not in names:
                raise UserError(f"data.options: there is no column {name!r} for {field} in {what}: it has {columns}")
    for field, value in (("classify", chosen.classify), ("in_order", chosen.in_order)):
        if not isinstance(value, bool) and not (value is None and field == "classify"):
            raise UserError(f"data.options: {field} must be True or False, got {value!r}")
    return chosen


def _listed(field: str, value: object) -> tuple:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise UserError(f"data.options: {field} must be a column name or a list of them, got {value!r}")
    return tuple(names)


def _inputs(chosen: TableOptions, names: list[str]) -> list[str]:
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


def _cut(wanted: list[tuple[str, np.ndarray]], parts: dict[str, csv_reader.Table], in_order: bool) -> csv_reader.Table:
    pieces = []
    for name, rows in wanted:
        table = parts[name]
        pieces.append(table.taken(rows if in_order else order(0, 0, table.size)[rows]))
    return pieces[0] if len(pieces) == 1 else csv_reader.joined(pieces)


def _described(table: csv_reader.Table, name: str) -> Column:
    """Describes a column by what the training rows show of it."""
    if name in table.numbers:
        values = table.numbers[name]
        present = values[~np.isnan(values)]
        if not len(present):
            logger.info(
                f"WARNING: column {name!r} has no value in any training row, so nothing can be learned from it: "
                f"leave it out with data.options=leave_out={[name]}"
            )
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


def _target(table: csv_reader.Table, chosen: TableOptions) -> tuple[Column, int | None]:
    """Describes the target by what the training rows show; returns the number of classes too, if it is one."""
    name = chosen.target
    if name in table.numbers:
        values = table.numbers[name]
        different = np.unique(values[~np.isnan(values)])
        if chosen.classify is None and len(different) <= FEW and (different == np.round(different)).all():
            if (np.abs(different) >= table_encoding.EXACT).any():
                raise UserError(
                    f"target {name!r} has whole numbers of 2^53 or more, of which 64-bit floats merge some: set "
                    "classify=True in data.options if they are classes, or classify=False if they are numbers"
                )
            return Column(name, "category", vocabulary=tuple(f"{v:.0f}" for v in different)), len(different)
        return _described(table, name), None
    occur = [table.texts[name][i] for i in np.unique(table.categories[name])]
    return Column(name, "category", vocabulary=tuple(sorted(occur, key=table_encoding.by_value))), len(occur)
