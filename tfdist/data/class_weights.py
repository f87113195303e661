"""`train.class_weight`: how much the examples of each class weigh."""

import numpy as np
import tensorflow as tf

from tfdist.config import field_syntax
from tfdist.config.messages import logger
from tfdist.data.loaded import Loaded
from tfdist.errors import UserError


def resolve(text: str, data: Loaded) -> dict[int, float] | None:
    """Returns the weight of each class, for `fit`, and logs them; None for no weights.

    The text is `balanced`, or weights by class number or name: `0=3.0, 2=0.2`. Targets are class numbers [n] or [n, 1].
    """
    if not text:
        return None
    classes, names = data.spec.classes, data.spec.names
    y = (*data.train.specs, None)[1]
    one_each = y is not None and not tf.nest.is_nested(y) and tf.as_dtype(y.dtype).is_integer
    if classes is None or not one_each or tuple(y.shape[1:]) not in ((), (1,)):
        raise UserError(f"train.class_weight={text!r} is for data with one class per example", "leave it out")
    weights = balanced(data.train.class_counts(classes)) if text == "balanced" else _parsed(text, classes, names)
    logger.info(f"class weights: {describe(weights, names)}")
    return weights


def _parsed(text: str, classes: int, names: tuple[str, ...]) -> dict[int, float]:
    weights = {}
    for name, value in field_syntax.class_weights(text).items():
        number = names.index(name) if name in names else int(name) if name.isdecimal() else -1
        if not 0 <= number < classes:
            known = names or tuple(map(str, range(classes)))
            raise UserError(f"unknown class {name!r} in train.class_weight{field_syntax.suggest(name, known)}")
        weights[number] = value
    if all(weights.get(number) == 0 for number in range(classes)):
        raise UserError(f"train.class_weight={text!r} gives every class the weight 0", "leave some to be learned")
    return weights


def balanced(counts: np.ndarray) -> dict[int, float]:
    """Returns n / (classes x examples of the class), scikit-learn's `balanced`: all classes weigh the same together."""
    present = np.flatnonzero(counts)
    return {int(c): float(counts.sum() / (len(present) * counts[c])) for c in present}


def describe(weights: dict[int, float], names: tuple[str, ...]) -> str:
    """Returns the weights in a line: where there are many, the heaviest and the lightest."""
    label = lambda c: names[c] if c < len(names) else str(c)
    shown = sorted(weights, key=lambda c: -weights[c]) if len(weights) > 10 else list(weights)
    words = [f"{label(c)} {weights[c]:.3g}" for c in shown]
    return ", ".join(words if len(words) <= 10 else [*words[:5], "...", *words[-4:]])
