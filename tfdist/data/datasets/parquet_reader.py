"""Reads Parquet files into columns, as `csv_reader` does CSV; types tell numbers from categories."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tfdist.data.datasets import csv_reader
from tfdist.data.datasets.csv_reader import Table
from tfdist.errors import UserError, one_line

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

T = TypeVar("T")


def header(path: str) -> list[str]:
    """Returns the column names of a file, without an index that pandas has written beside the columns."""
    names = [n for n in _opened(path, lambda file: file.schema_arrow.names) if not n.startswith("__index_level_")]
    csv_reader.check_names(path, names)
    return names


def read(paths: Sequence[str], columns: Iterable[str], kinds: dict[str, str], skip: bool | None = False) -> Table:
    """Reads these columns of all files.

    Args:
      kinds: `number` or `category` of the columns for which it is known; of the others the type of the column decides.
      skip: leave out rows whose numbers float32 does not hold; None where that cannot be asked for.
    """
    first, builder, count = header(paths[0]), csv_reader.TableBuilder(columns, kinds), 0
    for path in paths:
        csv_reader.check_alike(path, header(path), paths[0], first)
        table = _opened(path, lambda file: file.read(columns=builder.columns))
        bad: dict[int, str] = {}
        chunk = {}
        for name in builder.columns:
            values = table.column(name).combine_chunks()
            if builder.kinds.setdefault(name, _kind(path, name, values.type)) == "number":
                chunk[name], wrong = _numbers(path, name, values)
                for i in wrong:
                    bad.setdefault(i, f"{path} row {i + 1} has {values[i].as_py()!r} for a number in column {name!r}")
            else:
                chunk[name] = builder.numbered(name, _texts(path, name, values))
        builder.add(chunk, bad, count + np.arange(table.num_rows))
        count += table.num_rows
    return builder.table(f"{paths[0]} has no rows", skip)


def _opened(path: str, use: "Callable[[ParquetFile], T]") -> T:
    """Returns what `use` gets from a file."""
    from pyarrow import parquet

    try:
        return use(parquet.ParquetFile(path, page_checksum_verification=True))
    except Exception as error:  # Arrow has errors of its own, some of them those of Python
        why = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error, 150).rstrip(".")
        raise UserError(f"{path} cannot be read: {why}", "give a Parquet file") from None


def _kind(path: str, name: str, kind: "pa.DataType") -> str:
    """Returns whether a column of this type is of numbers or of categories."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if any(of(kind) for of in (types.is_string, types.is_large_string, types.is_string_view, types.is_boolean)):
        return "category"
    if types.is_null(kind):  # of which nothing is known: as in CSV, a column without values is of numbers
        return "number"
    what = f"column {name!r} of {path} is {kind}, neither numbers nor texts"
    raise UserError(what, f"leave it out with data.options=leave_out={[name]}")


def _plain(values: "pa.Array") -> "pa.Array":
    return values.dictionary_decode() if hasattr(values, "dictionary_decode") else values


def _numbers(path: str, name: str, values: "pa.Array") -> tuple[np.ndarray, list[int]]:
    """Returns the values, NaN where there is none that can be used, and where they are no numbers of float32."""
    import pyarrow as pa

    values = _plain(values)
    if _kind(path, name, values.type) == "category" and not pa.types.is_boolean(values.type):
        floats, wrong, huge = csv_reader.numbers(_texts(path, name, values))
        return floats, sorted([*wrong, *huge])
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())
    floats = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
    wrong = np.flatnonzero(np.abs(floats) > csv_reader.LARGEST).tolist()
    floats[wrong] = np.nan
    return floats, wrong


def _texts(path: str, name: str, values: "pa.Array") -> list[str]:
    """Returns the texts of a column, stripped; "" where there is none, and integers without a point."""
    values = _plain(values)
    _kind(path, name, values.type)

    def text(value: object) -> str:
        if isinstance(value, float):  # a column of integers with gaps has become one of floats somewhere
            return "" if np.isnan(value) else str(int(value)) if value.is_integer() else str(value)
        return "" if value is None else str(value).strip()

    return [text(value) for value in values.to_pylist()]
