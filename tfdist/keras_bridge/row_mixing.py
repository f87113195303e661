"""Finds the operations of a graph of Keras layers that may compute something across the rows of a batch.

What is made of operations that take each row by itself does so, too. Any other may show for rare rows only, as the
limit of a `minimum` that follows from the whole batch: a check of a few rows does not prove anything then.
"""

import contextlib
import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_bridge import keras_internals

_ROWS, _SOME = 6, [5, 0, 3]  # in another order, since a cumulative sum of the first rows needs no others
_TRIALS = 3  # on other numbers, of which some are equal, zero or negative
_SMALL = 8  # the size that stands for larger ones, if an operation takes it, and for those that the graph leaves open
_KNOWN: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # by node


def operation(model: keras.Model) -> str:
    """Returns the name of the first operation of a model that may mix rows; an empty string if there is none.

    An operation of Keras is tried alone, on random numbers, where what it mixes cannot hide.
    """
    for node in keras_internals.nodes(model):
        if node not in _KNOWN:
            _KNOWN[node] = _mixes(node)
        if _KNOWN[node]:
            return node.operation.name
    return ""


def _mixes(node: Any) -> bool:
    given = node.input_tensors
    if isinstance(node.operation, keras.Layer):  # which takes rows alone, unless it is told to go along them
        axes = keras.tree.flatten([vars(node.operation).get(name) for name in ("axis", "axes")])
        return any(isinstance(axis, int) and axis % max(1, len(given[0].shape)) == 0 for axis in axes)
    if any(spec.shape[:1] != (None,) or spec.sparse for spec in given):  # no rows of a batch, as what mixes them gives
        return True
    for most in (_SMALL, None):
        random = np.random.default_rng(0)
        with contextlib.suppress(Exception), tf.device("CPU:0"):  # whatever does not fit other sizes and numbers
            if all(_takes_rows_alone(node, most, random) for _ in range(_TRIALS)):
                return False
    return True


def _takes_rows_alone(node: Any, most: int | None, random: np.random.Generator) -> bool:
    values = {id(spec): _numbers(spec, most, random) for spec in node.input_tensors}

    def computed(rows: list[int]) -> list[np.ndarray]:
        args, kwargs = node.arguments.fill_in({key: tf.gather(value, rows) for key, value in values.items()})
        return [np.asarray(leaf) for leaf in keras.tree.flatten(node.operation.call(*args, **kwargs))]

    for whole, some in zip(computed([*range(_ROWS)]), computed(_SOME), strict=True):
        if whole.shape[:1] != (_ROWS,) or whole[_SOME].shape != some.shape:
            return False
        size = np.max(np.abs(some), initial=0.0, where=np.isfinite(some)) if some.dtype.kind in "fc" else 0.0
        if not np.allclose(whole[_SOME], some, 1e-4, 1e-4 * size, equal_nan=True):
            return False
    return True


def _numbers(spec: keras.KerasTensor, most: int | None, random: np.random.Generator) -> tf.Tensor:
    dtype, shape = tf.as_dtype(spec.dtype), [_ROWS, *(min(n or _SMALL, most or n or _SMALL) for n in spec.shape[1:])]
    drawn = random.normal(size=10007).round(1) if dtype.is_floating else random.integers(0, 2, 10007)
    return tf.cast(np.resize(drawn, shape), dtype)  # a prime number, and so no two rows are alike
