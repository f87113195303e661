"""What a compiled loss makes of a batch, found out by trying it: a value per example, their mean, or more than that."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.structures import Structure
from tfdist.keras_bridge.keras_internals import MatchedLoss

ROWS = 8
"""Rows that a loss or a metric is tried on."""


class Kind(enum.Enum):
    """How the value of a loss for a batch comes about."""

    ROWS = "a value per example, which depends on that example alone"
    MEAN = "one number, the mean of what it is for each example"
    ACROSS = "a number, or values, that depend on the other examples too"


def arguments(matched: MatchedLoss) -> tuple[Structure, Structure]:
    """Returns targets and outputs as `keras.losses.Loss.__call__` hands them to `call`."""
    to_tensor = lambda t: keras.ops.convert_to_tensor(t, dtype=matched.entry.loss.dtype)
    both = matched.y_true, matched.y_pred
    return tuple(keras.tree.map_structure(to_tensor, values) for values in both)


def look(matched: MatchedLoss) -> Kind:
    """Tries a loss on a few rows together and one by one, with other outputs too.

    Args:
      matched: with targets and outputs of `ROWS` rows.
    """
    loss = matched.entry.loss
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return Kind.ACROSS
    y_true, y_pred = arguments(matched)
    kinds = {_of(loss, y_true, prediction) for prediction in variants(y_pred)}
    with contextlib.suppress(ValueError, TypeError, tf.errors.OpError):
        kinds.add(_of(loss, y_true, negated(y_pred)))
    if Kind.ACROSS in kinds or len(kinds) > 1:
        return Kind.ACROSS
    return kinds.pop()


def _of(loss: keras.Loss, y_true: Structure, y_pred: Structure) -> Kind:
    whole = tf.convert_to_tensor(loss.call(y_true, y_pred))
    if not _same(whole, tf.convert_to_tensor(loss.call(y_true, y_pred)), loss.dtype):
        return Kind.ROWS if whole.shape.rank else Kind.MEAN  # it draws random numbers: nothing can be told
    try:
        single = [
            tf.convert_to_tensor(loss.call(*keras.tree.map_structure(lambda t, i=i: t[i : i + 1], (y_true, y_pred))))
            for i in range(ROWS)
        ]
    except (ValueError, TypeError, IndexError, tf.errors.OpError):
        return Kind.ACROSS  # it wants more than one example
    if whole.shape.rank == 0:
        return Kind.MEAN if _same(whole, tf.reduce_mean(tf.stack(single), 0), loss.dtype) else Kind.ACROSS
    if whole.shape[0] != ROWS or any(value.shape[:1] != [1] for value in single):
        return Kind.ACROSS
    return Kind.ROWS if _same(whole, tf.concat(single, 0), loss.dtype) else Kind.ACROSS


def _same(one: tf.Tensor, other: tf.Tensor, dtype: str) -> bool:
    if one.shape != other.shape:
        return False
    rounding = 1e-4 if dtype in ("float32", "float64") else 3e-2
    return np.allclose(tf.cast(one, tf.float64), tf.cast(other, tf.float64), rounding, rounding, equal_nan=True)


def variants(y_pred: Structure) -> list[Structure]:
    """Returns outputs as they are, in another order, and with differences: a new model may give all rows alike."""
    return [y_pred, _changed(y_pred, lambda t: tf.reverse(t, [0])), _changed(y_pred, _spread)]


def negated(y_pred: Structure) -> Structure:
    """Returns outputs of another sign, which a model need not be able to give.

    Where all are below zero, a maximum that begins there seems to add up.
    """
    return _changed(y_pred, lambda t: -_spread(t))


def _changed(y_pred: Structure, change: Callable[[tf.Tensor], tf.Tensor]) -> Structure:
    return keras.tree.map_structure(lambda t: change(t) if t.dtype.is_floating else t, y_pred)


def _spread(t: tf.Tensor) -> tf.Tensor:
    factors = tf.constant(np.random.default_rng(0).uniform(0.5, 1.0, [ROWS]))
    return t * tf.cast(tf.reshape(factors, [-1, *[1] * (t.shape.rank - 1)]), t.dtype)
