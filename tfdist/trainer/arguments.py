"""What `fit`, `evaluate` and `predict` take, as Keras' own do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import keras

from tfdist.config.messages import logger
from tfdist.data import sources
from tfdist.errors import UserError

Data: TypeAlias = Any
"""Arrays, a tuple of them, a `tf.data.Dataset`, what `python_batches` reads, or a source of `tfdist.data.sources`."""
Callbacks: TypeAlias = Sequence[keras.callbacks.Callback] | keras.callbacks.CallbackList | None


def renamed(x: Data, dataset: Data) -> Data:
    """Returns the data, which was called `dataset` before it was called `x`, as Keras calls it."""
    if x is not None and dataset is not None:
        raise UserError("dataset is the former name of x: give one of them")
    return dataset if x is None else x


def epochs_at_most(epochs: int) -> int:
    """Returns the number of epochs, or that which `keras.config.set_max_epochs` or `KERAS_MAX_EPOCHS` allows."""
    return _at_most(epochs, keras.config.max_epochs(), "epochs") or 0


def steps_at_most(steps: int | None) -> int | None:
    """Returns the batches of an epoch or a measurement, or how many `keras.config.set_max_steps_per_epoch` allows."""
    return _at_most(steps, keras.config.max_steps_per_epoch(), "steps")


def _at_most(asked: int | None, most: int | None, what: str) -> int | None:
    if not most or (asked and asked <= most):
        return asked
    logger.info(f"WARNING: at most {most} {what}, since keras.config says so")
    return most


def inputs(model: keras.Model, x: Data) -> sources.Source:
    """Returns what `predict` predicts from.

    A tuple of arrays is the inputs of a model, as in Keras; but of one with a single input, which Keras would refuse,
    it is (x, y[, weight]), as `fit` takes it.
    """
    if not isinstance(x, tuple):
        return sources.as_source(x)
    known = getattr(model, "inputs", None)
    return sources.as_source(x if known is not None and len(known) == 1 else (x,))
