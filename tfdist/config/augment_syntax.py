"""Augmentation as it is written in an experiment: `flip, crop(4), mixup(0.2)`. Needs no TensorFlow."""

import ast
import dataclasses
from typing import NamedTuple

from tfdist.config.field_syntax import suggest
from tfdist.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class AugmentStep:
    """One operation and its arguments."""

    name: str
    arguments: tuple[float, ...]

    def __str__(self):
        return f"{self.name}({', '.join(f'{a:g}' for a in self.arguments)})" if self.arguments else self.name


class _Argument(NamedTuple):
    """Bounds of an argument of an operation."""

    name: str
    low: float
    high: float
    whole: bool = False
    above: bool = False  # `low` itself is not allowed


_KNOWN: dict[str, tuple[_Argument, ...]] = {
    "flip": (),
    "vertical_flip": (),
    "crop": (_Argument("padding", 1, 512, whole=True),),
    "resized_crop": (_Argument("smallest", 0, 1, above=True),),
    "color": (_Argument("strength", 0, 1, above=True),),
    "randaugment": (_Argument("layers", 1, 16, whole=True), _Argument("magnitude", 0, 10)),
    "erase": (_Argument("probability", 0, 1, above=True),),
    "mixup": (_Argument("alpha", 0, 100, above=True),),
    "cutmix": (_Argument("alpha", 0, 100, above=True),),
}
MIXING = ("mixup", "cutmix")


def steps(text: str, field: str = "data.augment") -> tuple[AugmentStep, ...]:
    """Returns the operations that `text` names, in its order."""
    try:
        parsed = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(parsed, ast.Call) or not isinstance(parsed.func, ast.Name) or parsed.keywords:
            raise ValueError
        operations = tuple(_step(node, field) for node in parsed.args)
    except (SyntaxError, ValueError):
        raise UserError(f"{field}={text!r} is not understood", "write it like flip, crop(4), mixup(0.2)") from None
    names = [step.name for step in operations]
    for name in ("resized_crop", *MIXING):
        if names.count(name) > 1:
            raise UserError(f"{field}={text!r} gives {name} {names.count(name)} times", "give it once")
    if "resized_crop" in names[1:]:
        raise UserError(f"{field}={text!r}: resized_crop decides the size, so write it first")
    return operations


def _step(node: ast.expr, field: str) -> AugmentStep:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.keywords:
        raise ValueError
    name, values = call.func.id, [ast.literal_eval(argument) for argument in call.args]
    if name in ("normalize", "normalise"):
        raise UserError(f"{field}: {name} is left to the model, which takes inputs as they are stored", "leave it out")
    if name not in _KNOWN:
        raise UserError(f"unknown operation {name!r} in {field}{suggest(name, tuple(_KNOWN))}")
    wanted = _KNOWN[name]
    written = f"{name}({', '.join(a.name for a in wanted)})" if wanted else name
    if len(values) != len(wanted):
        raise UserError(f"{field}: {name} has {len(values)} arguments", f"write {written}")
    for argument, value in zip(wanted, values):
        low, high = argument.low, argument.high
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or (argument.whole and not float(value).is_integer()):
            allowed = "a whole number" if argument.whole else "a number"
        elif not low <= value <= high or (argument.above and value == low):
            allowed = f"above {low:g} and at most {high:g}" if argument.above else f"from {low:g} to {high:g}"
        else:
            continue
        raise UserError(f"{field}: {argument.name} of {written} must be {allowed}, got {value!r}")
    return AugmentStep(name, tuple(float(v) for v in values))
