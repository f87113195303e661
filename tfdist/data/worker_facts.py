"""What the data of all workers must have in common, since each takes its own rows of it."""

from __future__ import annotations

import math
import zlib

import keras
import numpy as np

from tfdist.data.batch_layout import unpack
from tfdist.data.sources import Arrays, Batches, Records, Source, targets_of

_LOOKED_AT = 2**16
"""Examples, about, whose targets are compared bit by bit."""
_NUMBERS = 256
"""Of inputs, targets and weights each, which are compared to rounding."""


def facts(source: Source) -> dict[str, object]:
    """Returns what the data of all workers must have in common, as JSON.

    A few numbers of arrays are lists, for which rounding counts as no difference: machines prepare them with other
    instructions.
    """
    if isinstance(source, Batches):
        return {"kind": "batches", "batches": source.batches, "elements": str(source.dataset.element_spec)}
    # By number or in memory is the same data; that depends on how much memory there is.
    common: dict[str, object] = {"kind": "examples", "examples": source.size}
    if isinstance(source, Records):
        return common if source.labels is None else common | {"checksum of labels": _checksum(source.labels)}
    elements = keras.tree.map_structure(lambda a: f"{a.shape[1:]} {a.dtype}", source.columns)
    targets = [y for y in keras.tree.flatten(targets_of(source)) if isinstance(y, np.ndarray) and y.dtype.kind in "iub"]
    return common | {"elements": str(elements), "checksum of targets": _checksum(*targets)} | _numbers(source)


def _checksum(*columns: np.ndarray) -> int:
    checksum = 0
    for column in columns:
        some = column[:: max(1, len(column) // _LOOKED_AT)]
        checksum = zlib.crc32(some.astype("<i8").tobytes(), checksum)
    return checksum


def _numbers(source: Arrays) -> dict[str, object]:
    """Returns some numbers of each part of the data, evenly spread over it."""
    found: dict[str, object] = {}
    for name, part in zip(("an input", "a target", "a weight"), unpack(source.columns)):
        columns = [column for column in keras.tree.flatten(part) if column is not None]
        each = max(1, _NUMBERS // max(1, len(columns)))
        found[name] = [number for column in columns[:_NUMBERS] for number in _of_column(column, each)]
    return found


def _of_column(column: np.ndarray, count: int) -> list[float | str]:
    width = math.prod(column.shape[1:])
    places = np.unique(np.linspace(0, len(column) * width - 1, count).astype(np.int64)) if width else ()
    values = [np.asarray(column[place // width]).reshape(-1)[place % width] for place in places]
    return [float(v) if np.issubdtype(np.asarray(v).dtype, np.number) else str(v)[:40] for v in values]
