"""Rows of a table as a model's inputs and targets, by what the training rows showed of each column."""

from __future__ import annotations

import numpy as np

from tfdist.config.messages import logger
from tfdist.data.datasets.tabular import csv_reader
from tfdist.data.datasets.tabular.csv_reader import Table
from tfdist.data.spec import Column
from tfdist.errors import UserError

EXACT = 2.0**53
"""From here on, whole numbers are merged by 64-bit floats, in which tables hold them."""


def encode(table: Table, columns: tuple[Column, ...]) -> dict[str, np.ndarray]:
    """Returns the rows of a table as a model's inputs, by the statistics in `columns`."""
    numbers = [
        np.nan_to_num((table.numbers[c.name] - c.mean) / c.std, nan=0.0).astype(np.float32)
        for c in columns
        if c.kind == "number"
    ]
    categories = [table.places(c.name, c.vocabulary, first=1).astype(np.int32) for c in columns if c.kind == "category"]
    inputs: dict[str, list[np.ndarray]] = {"numbers": numbers, "categories": categories}
    return {name: np.stack(values, 1) for name, values in inputs.items() if values}


def encode_target(table: Table, target: Column, classes: int | None) -> np.ndarray:
    """Returns the targets: float32 [n], or int32 [n] where they are classes.

    Raises:
      UserError: a class that no training row has.
    """
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
            f"{len(unknown):,} rows have a target {name!r} that no training row has, such as {unknown[0]!r}: choose "
            "other splits, leave them out of the file, or set classify=False in data.options if it is no class"
        )
    return places.astype(np.int32)


def leave_out_without(table: Table, name: str, what: str, skip: bool) -> Table:
    """Returns `table` without the rows that have no target `name`.

    Args:
      what: names the table to a person.
      skip: leave them out with a line that says so; otherwise they are an error.
    """
    if name in table.numbers:
        missing = np.isnan(table.numbers[name])
    else:
        missing = np.array([not text for text in table.texts[name]], bool)[table.categories[name]]
    if not missing.any():
        return table
    if not skip:
        raise UserError(
            f"{int(missing.sum()):,} rows in {what} have no target {name!r}: "
            "fill it in, or leave such rows out with data.on_error=skip"
        )
    logger.info(f"WARNING: left out: {int(missing.sum()):,} rows in {what} that have no target {name!r}")
    return table.taken(np.flatnonzero(~missing))


def by_value(text: str) -> tuple:
    """Sorts numbers by value, before texts."""
    try:
        return 0, csv_reader.number(text), text
    except ValueError:
        return 1, 0.0, text


def is_found_by_value(text: str) -> bool:
    """Returns whether a class is a whole number as `tables` writes it, which no other class equals in value."""
    _, value, _ = by_value(text)
    return abs(value) < EXACT and text == f"{value:.0f}"
