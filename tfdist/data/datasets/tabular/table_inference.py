"""New rows of a table, for a model that was trained on others: what is predicted and evaluated on."""

from __future__ import annotations

import os

import numpy as np

from tfdist.config.field_syntax import Options
from tfdist.config.messages import logger
from tfdist.data.datasets.tabular import csv_reader, table_encoding, table_files
from tfdist.data.spec import Column
from tfdist.errors import UserError


def read_inputs(path: str, columns: tuple[Column, ...], options: Options, kind: str = "csv") -> dict[str, np.ndarray]:
    """Reads new rows as a model's inputs, in the order of the file, to predict on them.

    Args:
      options: see `tables.TableOptions`; only the delimiter matters here.
      kind: `csv` or `parquet`.

    Raises:
      UserError: columns that are missing, or bad rows.
    """
    kinds = {c.name: c.kind for c in columns}
    return table_encoding.encode(_read_known(path, kinds, options, None, kind), columns)


def read_rows(
    path: str,
    columns: tuple[Column, ...],
    target: Column,
    options: Options,
    skip: bool = False,
    kind: str = "csv",
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Reads new rows with their targets, to evaluate on them.

    Args:
      options: those that the model was trained with, see `tables.TableOptions`.
      skip: leave bad rows out, with a line that says which.
      kind: `csv` or `parquet`.
    """
    numbers = target.kind == "number"
    if not numbers and not options.get("classify"):  # few whole numbers were read as numbers, and "1.0" is a 1
        numbers = all(map(table_encoding.is_found_by_value, target.vocabulary))
    kinds = {c.name: c.kind for c in columns} | {target.name: "number" if numbers else "category"}
    table = _read_known(path, kinds, options, skip, kind)
    if table.skipped:
        logger.info(f"WARNING: left out: {csv_reader.described(table.skipped)}")
    table = table_encoding.leave_out_without(table, target.name, path, skip)
    if not table.size:
        raise UserError(f"{path} has no rows with a target {target.name!r}: there is nothing to evaluate on")
    classes = len(target.vocabulary) if target.kind == "category" else None
    return table_encoding.encode(table, columns), table_encoding.encode_target(table, target, classes)


def _read_known(path: str, kinds: dict[str, str], options: Options, skip: bool | None, kind: str) -> csv_reader.Table:
    """Reads the columns of `kinds` of a file of this kind."""
    given = options if kind == "csv" else {name: value for name, value in options.items() if name != "delimiter"}
    path, reader = os.path.expanduser(path), table_files.TableReader(kind, given)  # the training's may have been CSV
    names = reader.header(path)
    missing = [name for name in kinds if name not in names]
    if missing:
        raise UserError(f"{path} lacks the columns {', '.join(missing)} that the model was trained on")
    return reader.read([path], kinds, kinds, skip)
