"""Data as `fit`, `evaluate` and `predict` accept it, as a source."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data import python_batches
from tfdist.data.arrays import Arrays
from tfdist.data.batches import Batches
from tfdist.data.protocol import Source, one_hot, order, weigh_classes
from tfdist.data.records import Records
from tfdist.data.structures import Structure
from tfdist.errors import UserError

__all__ = ["Arrays", "Batches", "Records", "Source", "as_source", "check_labels", "one_hot", "order", "weigh_classes"]


def as_source(data: Any, y: Structure = None, weight: Structure = None) -> Source:
    """Returns what `fit`, `evaluate` and `predict` accept, as a source.

    Args:
      data: a source, a `tf.data.Dataset` of global batches, arrays or a
        structure of arrays, or a tuple (x, y) or (x, y, weight) if `y` is None.
      y: targets when `data` is arrays.
      weight: sample weights when `data` is arrays.

    Raises:
      UserError: lengths that differ, no examples, or an unknown type.
    """
    source = _batched(data)
    if source is not None:
        if y is not None or weight is not None:
            raise UserError(f"targets and weights belong into the data set itself when it is a {type(data).__name__}")
        return source
    whole = isinstance(data, tuple) and y is None and weight is None and 1 <= len(data) <= 3
    columns = python_batches.without_missing(data if whole else (data, y, weight))
    return Arrays(keras.tree.map_structure(_column, columns))


def _batched(data: object) -> Source | None:
    """Returns `data` as a source if it holds its targets itself, else None."""
    if isinstance(data, Source):
        return data
    if isinstance(data, tf.data.Dataset):
        return Batches(data)
    reader = python_batches.reader(data)
    return None if reader is None else Batches(reader.dataset(), reader=reader)


def _column(value: object) -> np.ndarray:
    array, floats = python_batches.array(value), keras.config.floatx()
    # As Keras does: else float64, NumPy's own type, would meet the float32 of a model's own constants.
    return array.astype(floats) if array.dtype.kind == "f" and array.dtype != floats else array


def check_labels(y: np.ndarray, classes: int, what: str) -> None:
    """Raises UserError when an integer target is not in [0, classes).

    A GPU would train on NaN instead of failing.
    """
    y = np.asarray(y)
    wrong = np.flatnonzero((y.reshape(-1) < 0) | (y.reshape(-1) >= classes))
    if wrong.size:
        value = y.reshape(-1)[wrong[0]]
        example = wrong[0] // max(1, y[0].size)
        raise UserError(
            f"label {value} of example {example} is out of range for {what} with {classes} classes "
            f"(0 to {classes - 1}); {wrong.size} such label{'s' * (wrong.size > 1)}: "
            "correct the labels or the model's last layer"
        )
