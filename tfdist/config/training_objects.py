"""Losses, metrics and callbacks as they are written in an experiment: names of Keras, or functions. No TensorFlow.

`EarlyStopping(patience=3), my.callbacks:make` names a class of Keras with arguments, and a function of one's own.
"""

import dataclasses
import re

from tfdist.config import KERAS_NAMES, Train, field_syntax
from tfdist.errors import UserError

LOSSES, METRICS, CALLBACKS = (tuple(KERAS_NAMES[kind]) for kind in ("losses", "metrics", "callbacks"))
ACCURACY = ("accuracy", "acc")  # Keras chooses what these mean by the shapes of targets and outputs
_SHORT = {
    "mse": "MeanSquaredError",
    "mae": "MeanAbsoluteError",
    "mape": "MeanAbsolutePercentageError",
    "msle": "MeanSquaredLogarithmicError",
    "bce": "BinaryCrossentropy",
    "kld": "KLDivergence",
}


@dataclasses.dataclass(frozen=True, slots=True)
class KerasObjectSpec:
    """One loss, metric or callback."""

    field: str  # the experiment's field, such as `train.loss`
    name: str  # as it was written, without its arguments
    kind: str  # the class of Keras, `accuracy`, or "" for `package.module:function`
    options: field_syntax.Options
    called: bool  # whether arguments were written, if only ()


def loss(train: Train) -> KerasObjectSpec | None:
    """Returns what `train.loss` asks for, None for the loss that fits the data."""
    specs = _all("train.loss", train.loss, LOSSES, ())
    if len(specs) > 1:
        what = f"train.loss={train.loss!r} names {len(specs)} losses"
        raise UserError(what, "give one, or a function that adds them")
    return specs[0] if specs else None


def metrics(train: Train) -> list[KerasObjectSpec]:
    """Returns what `train.metrics` asks for; none for those that fit the data."""
    return _all("train.metrics", train.metrics, METRICS, ACCURACY)


def callbacks(train: Train) -> list[KerasObjectSpec]:
    return _all("train.callbacks", train.callbacks, CALLBACKS, ())


def _all(field: str, text: str, classes: tuple[str, ...], more: tuple[str, ...]) -> list[KerasObjectSpec]:
    by_name = {name: name for name in (*classes, *more)}
    if field != "train.callbacks":  # losses and metrics have names in lower case, too, and some short ones
        by_name |= {_lower(name): name for name in classes}
        by_name |= {short: name for short, name in _SHORT.items() if name in classes}
    found = []
    for part in map(str.strip, field_syntax.divided(field, text, ",") if text.strip() else []):
        match = re.fullmatch(r"([\w.:]+)\s*(?:\((.*)\))?", part, re.DOTALL)
        if not match:
            what = f"{field}={text!r} is not understood"
            raise UserError(
                what, "write names of Keras or package.module:function, with (name=value) behind for options"
            )
        name, arguments = match[1], match[2]
        if name not in by_name and not field_syntax.is_reference(name):
            known = tuple(by_name) if field == "train.callbacks" else (*more, *map(_lower, classes))
            raise UserError(f"unknown {field} {name!r}{field_syntax.suggest(name, known)}, or package.module:function")
        options = field_syntax.options(f"the arguments of {name} in {field}", arguments or "")
        found.append(KerasObjectSpec(field, name, by_name.get(name, ""), options, arguments is not None))
    names = [one.name for one in found if one.field == "train.metrics"]
    for name in names:
        if names.count(name) > 1 and not all(one.options for one in found if one.name == name):
            raise UserError(f"{field}={text!r} gives {name} {names.count(name)} times", "give it once")
    return found


def _lower(name: str) -> str:
    """Returns the name in lower case that Keras gives a class."""
    return re.sub("([a-z])([A-Z])", r"\1_\2", re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)).lower()
