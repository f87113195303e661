"""Targets and weights of arrays: which are classes, in the form that a model of tfdist wants."""

from __future__ import annotations

from typing import NamedTuple

import keras
import numpy as np

from tfdist.config import field_syntax
from tfdist.data.sources import check_labels
from tfdist.errors import UserError

MOST = 1000
"""Classes that there may be more of than examples."""


class Targets(NamedTuple):
    """Targets of both splits, int32 where they are classes and of Keras' float type otherwise."""

    train: np.ndarray
    eval: np.ndarray
    classes: int | None


def targets(train: np.ndarray, evaluation: np.ndarray, options: field_syntax.Options, floats: str) -> Targets:
    """Returns the targets, with the number of classes where they are whole numbers.

    Args:
      train: of the training split, [n, ...].
      evaluation: of the other one.
      options: `classify=False` where whole numbers are no classes, `classes=N` where not all of them occur.
      floats: Keras' float type.

    Raises:
      UserError: labels out of range, or options that contradict the targets.
    """
    classify, given = options.get("classify"), options.get("classes")
    if not (classify is None or isinstance(classify, bool)):
        raise UserError(f"data.options: classify must be True or False, got {classify!r}")
    whole = train.dtype.kind in "iub" and evaluation.dtype.kind in "iub"
    if (classify or given is not None) and (not whole or classify is False):
        asked = "classify=True" if classify else f"classes={given}"
        raise UserError(f"data.options: {asked} is for targets that are whole numbers, and these are no classes")
    if not whole or classify is False:
        if not (np.isfinite(train).all() and np.isfinite(evaluation).all()):
            raise UserError("some targets are NaN or infinite: leave out those examples, or correct them")
        return Targets(train.astype(floats), evaluation.astype(floats), None)
    if given is not None:
        field_syntax.check_whole("data.options: classes", given)
    one_each = [y.reshape(len(y)) if y.ndim == 2 and y.shape[1] == 1 else y for y in (train, evaluation)]
    classes = int(given) if isinstance(given, int) else int(train.max()) + 1
    if given is None and classes > max(MOST, len(train)):
        raise UserError(
            f"targets are whole numbers up to {classes - 1:,}, more classes than examples: "
            "set classify=False in data.options if they are numbers, or classes=N"
        )
    for y in one_each:
        check_labels(y, classes, "the data set")
    return Targets(one_each[0].astype(np.int32), one_each[1].astype(np.int32), classes)


def weights(values: np.ndarray, what: str) -> np.ndarray:
    """Returns sample weights in Keras' float type.

    Args:
      values: as they are stored, [n, ...].
      what: names the data set to a person.

    Raises:
      UserError: one is negative, which would make a loss grow, NaN or infinite.
    """
    with np.errstate(over="ignore"):  # is infinite then
        found = values.astype(keras.config.floatx())
    wrong = found[~((found >= 0) & (found < np.inf))]
    if wrong.size:
        raise UserError(
            f"{what} has the weight {float(wrong[0]):g}: give finite ones of 0 or more, and 0 to leave an example out"
        )
    return found
