"""Refuses what `tf.recompute_grad` computes wrongly: in the backward pass, a layer draws and counts a second time."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UserError

_RECOMPUTING = {"inner", "inner_recompute_grad"}
"""Functions of TensorFlow's module in which `tf.recompute_grad` calls what it was given."""
_MODULE = inspect.unwrap(tf.recompute_grad).__code__.co_filename


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Raises, after a trace within it, if a layer has written a variable inside of `tf.recompute_grad`.

    A dropout layer that moves on its seed draws another mask for the gradient than for the loss, and BatchNormalization
    averages its statistics twice: wrong without an error.

    Raises:
      UserError: one has; it names the variable.
    """
    written: list[str] = []
    assign = keras.Variable.assign

    def noting(self: keras.Variable, value: Any) -> Any:
        if _recomputing():
            written.append(self.path)
        return assign(self, value)

    keras.Variable.assign = noting
    try:
        yield
    finally:
        keras.Variable.assign = assign
        if written:
            raise UserError(
                f"tf.recompute_grad is given a layer that writes {written[0]!r}: in the backward pass it would draw "
                "other random numbers, or count the batch twice; leave random layers and BatchNormalization out of it"
            )


def _recomputing() -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name in _RECOMPUTING and code.co_filename == _MODULE:
            return True
        frame = frame.f_back
    return False
