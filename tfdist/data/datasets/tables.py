"""Tables for a model: columns standardized and numbered by what the training rows show.

An input is a dictionary: `numbers` float32 [n, columns], standardized, a missing one being the mean; `categories`
int32, places in the vocabulary, 0 for what no training row has. Whichever is empty is left out.
"""

import dataclasses
import functools
import glob
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist.config.field_syntax import Options
from tfdist.config.messages import logger
from tfdist.data.datasets import csv_reader, parquet_reader
from tfdist.data.datasets.csv_reader import Table
from tfdist.data.datasets.examples import check_options, first_few, matching, select_split, split_names
from tfdist.data.loaded import Loaded
from tfdist.data.sources import Arrays, crc, order
from tfdist.data.spec import Column, Spec
from tfdist.errors import UserError

EXACT = 2.0**53  # from here on, integers are merged by 64-bit floats, in which tables hold them
FEW = 20  # targets of at most this many different integers are classes
TEXTS = 1000  # more different texts than this, in more than half of the rows, are names and no category
ENDINGS = {"csv": ("csv", "csv.gz"), "parquet": ("parquet",)}  # endings of file names, by kind
_PIECE = re.compile(r"-\d+-of-\d+$")


def files_by_split(kind: str, path: str) -> dict[str, list[str]]:
    """Finds the files of each split, of a `kind` of `ENDINGS`.

    These are `train.csv` and `test.csv` of a folder, or `train-00000-of-00002.parquet`; else all are `train`.
    """
    endings, path = ENDINGS[kind], os.path.expanduser(path)
    if os.path.isdir(path):
        paths = sorted(f for end in endings for f in matching(os.path.join(glob.escape(path), f"*.{end}")))
        stems = {f: next(f.removesuffix(f".{e}") for e in reversed(endings) if f.endswith(f".{e}")) for f in paths}
        named: dict[str, list[str]] = {}
        for file, stem in stems.items():
            named.setdefault(_PIECE.sub("", os.path.basename(stem)), []).append(file)
        if "train" in named:
            for stem in {stem for stem in stems.values() if list(stems.values()).count(stem) > 1}:
                raise UserError(f"{stem}.csv is there as .csv and as .csv.gz", "remove one of them")
            return named
    else:
        paths = [path] if os.path.isfile(path) else matching(path)
    if not paths:
        word = {"csv": "CSV", "parquet": "Parquet"}[kind]
        what = f"data.name={kind}:{path} has no files"
        raise UserError(what, f"give a {word} file, a folder of *.{endings[0]} files, or a pattern")
    return {"train": paths}


def _readers(kind: str, options: Options) -> tuple[Callable[..., list[str]], Callable[..., Table]]:
    """Returns `header` and `read` of `csv_reader` or `parquet_reader`, by one of `ENDINGS`."""
    if kind == "parquet":
        if "delimiter" in options:
            raise UserError("data.options: delimiter is for CSV, and data.name begins with parquet", "leave it out")
        return parquet_reader.header, parquet_reader.read
    delimiter = options.get("delimiter", ",")
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n':
        raise UserError(f"data.options: delimiter must be one character, and no quote, got {delimiter!r}")
    return tuple(functools.partial(f, delimiter=delimiter) for f in (csv_reader.header, csv_reader.read))  # type: ignore[return-value]


def encode(table: Table, columns: tuple[Column, ...]) -> dict[str, np.ndarray]:
    """Returns the rows of a table as a model's inputs, by the statistics in `columns`."""
    numbers = [
        np.nan_to_num((table.numbers[c.name] - c.mean) / c.std, nan=0.0).astype(np.float32)
        for c in columns
        if c.kind == "number"
    ]
    grouped = [c for c in columns if c.kind == "category"]
    categories = [table.places(c.name, c.vocabulary, first=1).astype(np.int32) for c in grouped]
    for column, places in zip(grouped, categories):
        if table.size > 1 and not places.any():
            what = f"no row has a value of column {column.name!r} that a training row has"
            logger.info(f"WARNING: {what}, but such as {table.texts[column.name][0]!r}: all count as unknown")
    inputs: dict[str, list[np.ndarray]] = {"numbers": numbers, "categories": categories}
    return {name: np.stack(values, 1) for name, values in inputs.items() if values}


def encode_target(table: Table, target: Column, classes: int | None) -> np.ndarray:
    """Returns the targets: float32 [n], or int32 [n] where they are classes, which all must be of training rows."""
    name = target.name
    if classes is None:
        return table.numbers[name].astype(np.float32)
    if name in table.numbers:
        values = table.numbers[name]
        known = np.array([float(text) for text in target.vocabulary])
        places = np.minimum(np.searchsorted(known, values), len(known) - 1)
        unknown = [f"{value:g}" for value in values[known[places] != values]]
    else:
        places = table.places(name, target.vocabulary, first=0)
        unknown = [table.texts[name][i] for i in table.categories[name][places < 0]]
    if unknown:
        raise UserError(
            f"{len(unknown):,} rows have a target {name!r} that no training row has, such as {unknown[0]!r}",
            "choose other splits, remove these rows, or set classify=False in data.options if it is not a class",
        )
    return places.astype(np.int32)


def leave_out_without(table: Table, name: str, what: str, skip: bool) -> Table:
    """Returns `table`, `what` to a person, without the rows that have no target `name`; refuses them unless `skip`."""
    if name in table.numbers:
        missing = np.isnan(table.numbers[name])
    else:
        missing = np.array([not text for text in table.texts[name]], bool)[table.categories[name]]
    if not missing.any():
        return table
    if not skip:
        problem = f"{int(missing.sum()):,} rows in {what} have no target {name!r}"
        raise UserError(problem, "fill it in, or leave such rows out with data.on_error=skip")
    logger.info(f"WARNING: left out: {int(missing.sum()):,} rows in {what} that have no target {name!r}")
    return table.taken(np.flatnonzero(~missing))


def by_value(text: str) -> tuple:
    """Sorts numbers by value, before texts."""
    try:
        return 0, csv_reader.number(text), text
    except ValueError:
        return 1, 0.0, text


@dataclasses.dataclass(frozen=True, slots=True)
class TableOptions:
    """`data.options` of a table.

    Args:
      target: name of the column to predict.
      delimiter: between fields.
      use: names of the columns that are inputs; empty for all but the target.
      leave_out: names of columns that are not.
      categories: names of columns that hold numbers and are categories.
      classify: whether the target is a class. None: it is when it has texts or at most `FEW` different integers.
      in_order: slice the rows, and train on them, in the file's order. Otherwise they are mixed before (always alike),
        since files are often sorted; those to evaluate are in the file's order again.
    """

    target: str
    delimiter: str = ","
    use: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    classify: bool | None = None
    in_order: bool = False


def prepare(
    path: str,
    options: Options,
    splits: tuple[str, str],
    skip: bool = False,
    kind: str = "csv",
    like: Spec | None = None,
) -> Loaded:
    """Loads `csv:path` or, by `kind`, `parquet:path`, see `TableOptions`; `skip` leaves bad rows out, with a line.

    A model that was trained on another table, described by `like`, gets this one in that table's encoding.
    """
    by_split = files_by_split(kind, path)
    read_header, read = _readers(kind, options)
    what, names = f"{kind}:{path}", read_header(by_split["train"][0])
    chosen = _options(options, names, what)
    inputs, kinds = _inputs(chosen, names), dict.fromkeys(chosen.categories, "category")
    if chosen.classify is not None:
        kinds[chosen.target] = "category" if chosen.classify else "number"
    known = like.target if like else None
    if known and (known.name != chosen.target or chosen.classify not in (None, known.kind == "category")):
        known = None  # the model learns to predict something else from the same inputs
    if like:
        if sorted(inputs) != sorted(c.name for c in like.columns):
            had = ", ".join(c.name for c in like.columns)
            raise UserError(f"{what} has the inputs {', '.join(inputs)}, and the model was trained on {had}")
        inputs = [c.name for c in like.columns]
        kinds |= _kinds(like.columns, known, options)
    parts: dict[str, csv_reader.Table] = {}
    # The file to train on first: it decides what the columns of the others are.
    for name in sorted(by_split, key=lambda name: (name != "train", name)):
        if name in split_names(splits) or name == "train":
            table = read(by_split[name], [*inputs, chosen.target], kinds, skip=skip)
            if table.skipped:
                logger.info(f"WARNING: left out: {first_few(table.skipped, csv_reader.BAD_ROWS)}")
            table = leave_out_without(table, chosen.target, f"{name} of {what}", skip)
            kinds |= dict.fromkeys(table.numbers, "number") | dict.fromkeys(table.categories, "category")
            parts[name] = table
    sizes = {name: parts[name].size if name in parts else 0 for name in by_split}

    def cut(field: str, text: str) -> Table:
        pieces = []
        for name, rows in select_split(text, sizes, field, what):
            if not chosen.in_order:
                rows = order(0, 0, parts[name].size)[rows]
            # Predictions are joined with the file row by row, so they must be in its order.
            pieces.append(parts[name].taken(np.sort(rows) if field == "data.eval_split" else rows))
        return pieces[0] if len(pieces) == 1 else csv_reader.joined(pieces)

    train, evaluation = cut("data.train_split", splits[0]), cut("data.eval_split", splits[1])
    columns = like.columns if like else tuple(_described(train, name) for name in inputs)
    target, classes = (known, len(known.vocabulary) or None) if known else _target(train, chosen)
    encoded = lambda table: (encode(table, columns), encode_target(table, target, classes))
    made = [Arrays(encoded(table), crc(list(table.numbers.values()))) for table in (train, evaluation)]
    classified = target.vocabulary if classes else ()
    spec = Spec((len(columns),), "float32", classes, 1.0, classified, columns, target)
    return Loaded(made[0], made[1], made[0].size, spec, evaluation.rows)


def _options(given: Options, names: list[str], what: str) -> TableOptions:
    columns = ", ".join(names)
    check_options(given, [field.name for field in dataclasses.fields(TableOptions)])
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
        what = "a column without a name, often the number of the row, would be an input"
        raise UserError(what, "leave it out with data.options=\"leave_out=['']\", or name it")
    if not inputs:
        what = f"data.options leaves no column to predict {chosen.target!r} from: there are {', '.join(names)}"
        raise UserError(what)
    return inputs


def _described(table: csv_reader.Table, name: str) -> Column:
    """Describes a column by what the training rows show of it."""
    if name in table.numbers:
        values = table.numbers[name]
        present = values[~np.isnan(values)]
        if not len(present) or present.min() == present.max():
            what = f"the value {present[0]:g} in all training rows" if len(present) else "no value in any training row"
            logger.info(
                f"WARNING: column {name!r} has {what}, so nothing can be learned from it: "
                f"leave it out with data.options=leave_out={[name]}"
            )
            # By rounding, their deviation would be 1e-17 and another value 1e16.
            return Column(name, "number", float(present[:1].sum()))
        return Column(name, "number", float(present.mean()), float(present.std()) or 1.0)
    occur = np.unique(table.categories[name])
    if len(occur) > TEXTS and len(occur) > table.size / 2:
        raise UserError(
            f"column {name!r} has {len(occur):,} different texts in {table.size:,} training rows, "
            "more than a category has",
            f"leave it out with data.options=leave_out={[name]}",
        )
    return Column(name, "category", vocabulary=tuple(sorted(table.texts[name][i] for i in occur)))


def _target(table: csv_reader.Table, chosen: TableOptions) -> tuple[Column, int | None]:
    """Describes the target by what the training rows show; returns the number of classes too, if it is one."""
    name = chosen.target
    if name in table.numbers:
        values = table.numbers[name]
        different = np.unique(values[~np.isnan(values)])
        if chosen.classify is None and len(different) <= FEW and (different == np.round(different)).all():
            if (np.abs(different) >= EXACT).any():
                raise UserError(
                    f"target {name!r} has integers of 2^53 or more, of which 64-bit floats merge some",
                    "set classify=True in data.options if they are classes, or classify=False if they are numbers",
                )
            return Column(name, "category", vocabulary=tuple(f"{v:.0f}" for v in different)), len(different)
        return _described(table, name), None
    occur = [table.texts[name][i] for i in np.unique(table.categories[name])]
    return Column(name, "category", vocabulary=tuple(sorted(occur, key=by_value))), len(occur)


def read_rows(
    path: str,
    columns: tuple[Column, ...],
    target: Column | None,
    options: Options,
    skip: bool | None = False,
    kind: str = "csv",
) -> tuple:
    """Reads new rows of a file of this `kind`, in its order, as (x, y) to evaluate on; (x,) where `target` is None.

    Args:
      options: those that the model was trained with.
      skip: see `csv_reader.read`.
    """
    kinds = _kinds(columns, target, options)
    # The training's may have been CSV.
    given = options if kind == "csv" else {name: value for name, value in options.items() if name != "delimiter"}
    path = os.path.expanduser(path)
    read_header, read = _readers(kind, given)
    names = read_header(path)
    missing = [name for name in kinds if name not in names]
    if missing:
        raise UserError(f"{path} lacks the columns {', '.join(missing)} that the model was trained on")
    table = read([path], kinds, kinds, skip=skip)
    if target is None:
        return (encode(table, columns),)
    if table.skipped:
        logger.info(f"WARNING: left out: {first_few(table.skipped, csv_reader.BAD_ROWS)}")
    table = leave_out_without(table, target.name, path, bool(skip))
    if not table.size:
        raise UserError(f"{path} has no rows with a target {target.name!r}: there is nothing to evaluate on")
    return encode(table, columns), encode_target(table, target, len(target.vocabulary) or None)


def _kinds(columns: tuple[Column, ...], target: Column | None, options: Options) -> dict[str, str]:
    """Returns what to read the columns as, and the target, so that both are as in the training with these `options`."""
    kinds = {c.name: c.kind for c in columns}
    if target is None:
        return kinds
    numbers = target.kind == "number"
    if not numbers and not options.get("classify"):  # few integers were read as numbers, and "1.0" is a 1
        values = [(text, by_value(text)[1]) for text in target.vocabulary]
        numbers = all(abs(value) < EXACT and text == f"{value:.0f}" for text, value in values)
    return kinds | {target.name: "number" if numbers else "category"}
