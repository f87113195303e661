"""What the architectures share: scaled inputs, logits, stochastic depth, and what they refuse."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.datasets.catalog import Spec
from tfdist.errors import UserError

PIXEL = 255.0
"""Largest value of a pixel."""


def unit(spec: Spec) -> float:
    """What brings inputs to [0, 1]: of whole numbers, and of pixels that are floats; other floats are taken as such."""
    whole = spec.dtype.startswith(("int", "uint"))
    return 1.0 / spec.maximum if whole or spec.maximum == PIXEL else 1.0


def scaled(spec: Spec, centred: bool = False) -> Any:
    """Inputs to [0, 1], or to [-1, 1] if `centred`; see `unit`."""
    factor = unit(spec)
    return keras.layers.Rescaling(2.0 * factor, offset=-1.0) if centred else keras.layers.Rescaling(factor)


def logits(spec: Spec) -> Any:
    """The last layer, `head`."""
    if spec.classes is None:
        raise UserError(
            "this model classifies, and the targets are not whole numbers: use model.name=package.module:function"
        )
    return output(spec.classes)


def output(units: int) -> Any:
    """A linear layer `head` of full precision: in half precision the loss would lose most of its digits."""
    return keras.layers.Dense(units, dtype=full_precision(), name="head")


def full_precision() -> str | None:
    """Type of layers that must not be in half precision; None for the usual one."""
    return None if keras.config.floatx() == "float64" else "float32"


def stochastic_depth(x: Any, rate: float, name: str) -> Any:
    """Leaves out `x` [n, ...], a branch beside a shortcut, for each example with probability `rate` while training.

    "Deep Networks with Stochastic Depth" (Huang et al., 2016), per example and
    not per batch. What is kept is divided by 1 - rate, so that predicting needs
    no factor. It is Keras' Dropout with one draw per example, whose seeds every
    replica has of its own.
    """
    if not rate:
        return x
    return keras.layers.Dropout(rate, noise_shape=(None, *[1] * (len(x.shape) - 1)), name=name)(x)


def depth_rates(last: float, blocks: int) -> list[float]:
    """Rates of `blocks` blocks that grow linearly to `last` (Huang et al., 2016, equation 4)."""
    if not 0 <= last < 1:
        raise UserError(f"model.options: stochastic_depth must be in [0, 1), got {last}")
    return [last * (block + 1) / blocks for block in range(blocks)]


def attention(heads: int, width: int, dropout: float, initializer: Any, name: str) -> Any:
    """Attention without biases: that of the keys has no effect, and Adam would move it by rounding alone."""
    return keras.layers.MultiHeadAttention(
        heads, width // heads, dropout=dropout, use_bias=False, kernel_initializer=initializer, name=name
    )


def needs_image(name: str, spec: Spec) -> None:
    if len(spec.shape) != 3:
        raise UserError(
            f"model.name={name!r} needs images [height, width, channels], the data has shape {list(spec.shape)}"
        )


def needs_sequence(name: str, spec: Spec) -> None:
    if len(spec.shape) != 1:
        raise UserError(f"model.name={name!r} needs sequences, the data has shape {list(spec.shape)}")
    if not spec.dtype.startswith(("int", "uint")):
        raise UserError(f"model.name={name!r} needs sequences of whole numbers, the data has {spec.dtype}")
