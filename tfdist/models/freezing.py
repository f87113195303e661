"""Freezes layers by patterns of their names."""

import difflib
import fnmatch
import math
from collections.abc import Iterator
from typing import NamedTuple

import keras

from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals

SHOWN = 8  # names of layers in a message


class _Named(NamedTuple):
    """A layer that owns weights."""

    layer: keras.Layer
    names: tuple[str, ...]  # its own name and those of the layers around it, from the inside out


def freeze(model: keras.Model, text: str) -> str:
    """Freezes layers of a built model, as `layer.trainable = False` does: BatchNorm then predicts.

    Returns a line on it. `text` has patterns of layer names such as `conv*, block1_*`, which also stand for what is
    inside of a layer. One with `!` before it takes out what it matches; if all have one, everything else is frozen.
    """
    patterns = [pattern.strip() for pattern in text.split(",")]
    layers = list(_with_weights(model, ()))
    for pattern in patterns:
        if not any(_matches(names, pattern.removeprefix("!")) for _, names in layers):
            raise UserError(f"model.freeze: {pattern!r} matches no layer with weights{_near(pattern, layers)}")
    wanted = [p for p in patterns if not p.startswith("!")] or ["*"]
    excepted = [p[1:] for p in patterns if p.startswith("!")]
    frozen = 0
    for layer, names in layers:
        if any(_matches(names, p) for p in wanted) and not any(_matches(names, p) for p in excepted):
            layer.trainable = False
            frozen += 1
    if not model.trainable_variables:
        what = f"model.freeze={text!r} leaves nothing to train"
        raise UserError(what, f"leave layers out, such as !{layers[-1].names[0]}")
    if not frozen:
        raise UserError(f"model.freeze={text!r} freezes nothing", "take out fewer layers")
    trained, total = (sum(math.prod(v.shape) for v in part) for part in (model.trainable_variables, model.weights))
    return f"frozen: {frozen} of {len(layers)} layers with weights; {trained:,} of {total:,} numbers train"


def _with_weights(layer: keras.Layer, names: tuple[str, ...]) -> Iterator[_Named]:
    for inner in keras_internals.flat_layers(layer, include_self=False, recursive=False):
        around = (inner.name, *names)
        if keras_internals.own_variables(inner):
            yield _Named(inner, around)
        yield from _with_weights(inner, around)


def _matches(names: tuple[str, ...], pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _near(pattern: str, layers: list[_Named]) -> str:
    """How the message of an unknown name ends; a network has too many layers to list them all."""
    names = list(dict.fromkeys(names[-1] for _, names in layers))
    inner = [name for _, around in layers for name in around]
    near = difflib.get_close_matches(pattern.strip("!*?"), inner, n=1)
    known = ", ".join(names[:SHOWN]) + (f", ... {names[-1]} ({len(names)} in all)" if len(names) > SHOWN else "")
    return f"{f': did you mean {near[0]!r}? Layers' if near else ': layers'} are {known}"
