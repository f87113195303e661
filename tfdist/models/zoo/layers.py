"""What the architectures share: scaled inputs, logits, stochastic depth, and what they refuse."""

import inspect
from collections.abc import Callable
from typing import Any

import keras

from tfdist.data.spec import Spec
from tfdist.errors import UserError

PIXEL = 255.0  # largest value of a pixel


def check_options(function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Refuses values that an architecture cannot be built with; Keras would show pages, or build something else.

    The annotations of its arguments say what is right: floats are probabilities, integers count something, from 1
    on, or from 0 on where that is the default or the argument is a `depth`.
    """
    for name, argument in inspect.signature(function).parameters.items():
        if name not in options:
            continue
        value = options[name]
        least = 0 if name == "depth" or argument.default == 0 else 1
        count = f"an integer, {least} or more"
        match inspect.formatannotation(argument.annotation):
            case "bool":
                fits, wanted = isinstance(value, bool), "True or False"
            case "float":
                fits, wanted = _is_number(value, (int, float)) and 0 <= value < 1, "in [0, 1)"
            case "int":
                fits, wanted = _is_number(value, int) and value >= least, count
            case "tuple[int, ...]":
                fits = isinstance(value, (tuple, list)) and all(_is_number(v, int) and v >= 1 for v in value)
                wanted = "integers such as (16, 32)"
            case _:
                continue
        if not fits:
            raise UserError(f"model.options: {name} of {function.__name__} must be {wanted}, got {value!r}")


def _is_number(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def unit(spec: Spec) -> float:
    """Returns the factor that brings integers, and pixels that are floats, to [0, 1]; 1 for other floats."""
    whole = spec.dtype.startswith(("int", "uint"))
    return 1.0 / spec.maximum if whole or spec.maximum == PIXEL else 1.0


def scaled(spec: Spec, centred: bool = False) -> keras.Layer:
    """Makes a layer that brings inputs to [0, 1], or to [-1, 1] if `centred`; see `unit`."""
    factor = unit(spec)
    return keras.layers.Rescaling(2.0 * factor, offset=-1.0) if centred else keras.layers.Rescaling(factor)


def logits(spec: Spec) -> keras.Layer:
    """Makes the last layer of a classifier, `head`."""
    if spec.classes is None:
        what = "this model classifies, and the targets are not integers"
        raise UserError(what, "use model.name=package.module:function")
    return output(spec.classes)


def output(units: int) -> keras.Layer:
    """Makes a linear layer `head` of full precision: in half precision the loss would lose most of its digits."""
    return keras.layers.Dense(units, dtype=full_precision(), name="head")


def full_precision() -> str | None:
    """Returns the type of layers that must not be in half precision; None for the usual one."""
    return None if keras.config.floatx() == "float64" else "float32"


def dropped(x: keras.KerasTensor, rate: float, name: str) -> keras.KerasTensor:
    """Drops numbers of `x` with probability `rate` while training; without a layer where that is 0."""
    return keras.layers.Dropout(rate, name=name)(x) if rate else x


def stochastic_depth(x: keras.KerasTensor, rate: float, name: str) -> keras.KerasTensor:
    """Leaves out `x` [n, ...], a branch beside a shortcut, for each example with probability `rate` while training.

    "Deep Networks with Stochastic Depth" (Huang et al., 2016), per example and not per batch: Keras' Dropout with one
    draw per example. What is kept is divided by 1 - rate, so that predicting needs no factor.
    """
    if not rate:
        return x
    return keras.layers.Dropout(rate, noise_shape=(None, *[1] * (len(x.shape) - 1)), name=name)(x)


def depth_rates(last: float, blocks: int) -> list[float]:
    """Returns rates of `blocks` blocks that grow linearly to `last` (Huang et al., 2016, equation 4)."""
    return [last * (block + 1) / blocks for block in range(blocks)]


def attention(
    heads: int, width: int, dropout: float, initializer: keras.Initializer | str, name: str
) -> keras.layers.MultiHeadAttention:
    """Makes attention without biases: that of the keys has no effect, and Adam would move it by rounding alone."""
    return keras.layers.MultiHeadAttention(
        heads, width // heads, dropout=dropout, use_bias=False, kernel_initializer=initializer, name=name
    )


def divides(width: int, heads: int) -> None:
    """Refuses a width that the heads cannot share."""
    if width % heads:
        raise UserError(f"model.options: width={width} is not a multiple of heads={heads}")


def needs_image(name: str, spec: Spec, smallest: int = 1) -> None:
    """Refuses what is no image, or has fewer pixels per side than poolings leave something of."""
    if len(spec.shape) != 3:
        what = f"model.name={name!r} needs images [height, width, channels], the data has shape {list(spec.shape)}"
        raise UserError(what)
    if min(spec.shape[:2]) < smallest:
        raise UserError(
            f"model.name={name!r} needs images of at least {smallest}x{smallest} with these options, the data has "
            f"{spec.shape[0]}x{spec.shape[1]}",
            f"set data.image_size={smallest} or more",
        )
