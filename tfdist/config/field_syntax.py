"""Texts in an experiment's fields, and what they mean: each complaint is a line that names the field."""

import ast
import dataclasses
import difflib
import itertools
import math
import re
from typing import Any, NamedTuple, TypeAlias

from tfdist.config import FILES, SCHEDULES, Optimizer
from tfdist.errors import UserError

Options: TypeAlias = dict[str, Any]  # arguments: numbers, texts, truth values, tuples or lists of them

LARGEST = 10**12  # no count of an experiment is larger; TensorFlow's numbers of 64 bits hold the products of two
MOST_PATHS = 10**6  # upper bound on the paths that braces in a pattern expand to
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_REFERENCE = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


def options(field: str, text: str) -> Options:
    """Returns the keyword arguments in `text`, Python literals or bare words: `units=64, activation=relu`."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        names = [k.arg for k in call.keywords]
        if None in names or len(set(names)) < len(names):  # **names, or a name twice, of which one would be ignored
            raise ValueError
        given = {
            str(k.arg): k.value.id if isinstance(k.value, ast.Name) else ast.literal_eval(k.value)
            for k in call.keywords
        }
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise UserError(f"{field}={text!r} is not understood", "write name=value, name=value, each name once") from None
    for name, value in given.items():
        _check_finite(f"{name} in {field}", value)
    return given


def _check_finite(name: str, value: object) -> None:
    """Raises UserError where a literal such as 1e400 is infinite, or integers are beyond those of TensorFlow."""
    if isinstance(value, (list, tuple, set)):
        for part in value:
            _check_finite(name, part)
    elif isinstance(value, dict):
        _check_finite(name, [*value.keys(), *value.values()])
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name} must be a finite number, got {value}")


def divided(field: str, text: str, separator: str) -> list[str]:
    """Splits a text at separators that are not between quotes or brackets."""
    parts, closing, quote = [""], [], ""
    for c in text:
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c in _BRACKETS:
            closing.append(_BRACKETS[c])
        elif closing and c == closing[-1]:
            closing.pop()
        elif c == separator and not closing:
            parts.append("")
            continue
        parts[-1] += c
    if quote or closing:
        raise UserError(f"{field}: {quote or closing[-1]} is missing in {text!r}")
    return parts


def image_size(text: str) -> tuple[int, int] | None:
    """Returns height and width in `data.image_size`; None if it is empty."""
    if not text:
        return None
    sides = re.fullmatch(r"([1-9]\d{0,3})(?:x([1-9]\d{0,3}))?", text)
    if not sides:
        raise UserError(f"data.image_size={text!r} is not understood", "write 224, or height x width such as 192x256")
    return int(sides[1]), int(sides[2] or sides[1])


def assignments(field: str, text: str) -> dict[str, str]:
    """Parses `name=value, name=value`, whose values are any words: `boundaries=30% 60%, factor=0.1`."""
    values: dict[str, str] = {}
    for part in text.split(",") if text.strip() else []:
        name, equals, value = (word.strip() for word in part.rpartition("="))
        if not (name and equals and value) or name in values:
            raise UserError(f"{field}={text!r} is not understood", "write name=value, name=value, each name once")
        values[name] = value
    return values


def float_or_nan(text: str) -> float:
    """Returns the number in `text`, NaN where there is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def number(field: str, text: str) -> float:
    """Returns the finite number in `text`."""
    value = float_or_nan(text)
    if not math.isfinite(value):
        raise UserError(f"{field} must be a number, got {text!r}")
    return value


def check_whole(name: str, value: object) -> None:
    """Raises UserError unless `value` is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name} must be an integer of at least 1, got {value!r}")


def _numbers(field: str, text: str) -> dict[str, float]:
    return {name: number(f"{name} in {field}", value) for name, value in assignments(field, text).items()}


def layer_rates(optimizer: Optimizer) -> dict[str, float]:
    """Returns `optimizer.layer_rates` as factors by pattern."""
    field = "optimizer.layer_rates"
    factors = _numbers(field, optimizer.layer_rates)
    for name, value in factors.items():
        if value <= 0:
            raise UserError(f"{name} in {field} must be positive, got {value:g}", "freeze layers with model.freeze")
    return factors


def class_weights(text: str) -> dict[str, float]:
    """Returns `train.class_weight` as weights by class number or name; empty for `balanced`."""
    field = "train.class_weight"
    if text == "balanced":
        return {}
    weights = _numbers(field, text)
    for name, value in weights.items():
        if value < 0:
            raise UserError(f"{name} in {field} must not be negative, got {value:g}")
    return weights


def schedule_options(optimizer: Optimizer) -> Options:
    """Parses `optimizer.schedule_options` into numbers `end` and `factor` and texts `boundaries` and `every`."""
    field = "optimizer.schedule_options"
    given: dict[str, Any] = dict(assignments(field, optimizer.schedule_options))
    known = SCHEDULES[optimizer.schedule]
    for name in given:
        if name not in known:
            raise UserError(
                f"unknown {name!r} in {field}={optimizer.schedule_options!r}: "
                f"{optimizer.schedule} knows {', '.join(known) or 'none'}"
            )
    for name in ("end", "factor"):
        if name in given:
            given[name] = number(f"{name} in {field}", given[name])
            if not 0 <= given[name] < 1 or (given[name] == 0 and optimizer.schedule not in ("cosine", "linear")):
                raise UserError(f"{name} in {field} must be a share of the rate below 1, got {given[name]:g}")
    if optimizer.schedule == "step" and "boundaries" not in given:
        raise UserError(f"optimizer.schedule=step needs {field}, such as 'boundaries=30% 60% 80%, factor=0.1'")
    if ("factor" in given) != ("every" in given) and optimizer.schedule == "exponential":
        raise UserError(f"{field}={optimizer.schedule_options!r} is half of it", "write factor=0.94, every=2 epochs")
    if "end" in given and "factor" in given:
        raise UserError(f"{field}={optimizer.schedule_options!r} says it twice", "give end, or factor and every")
    return given


def files(name: str) -> tuple[str, str] | None:
    """Returns one of `FILES` and the path or pattern behind it, or None where `data.name` is something else."""
    kind, colon, path = name.partition(":")
    return (kind, path) if colon and kind in FILES else None


def expanded(field: str, pattern: str) -> list[str]:
    """Returns the paths that the braces of a pattern stand for: `{000..009}`, `{a,b}`; without any, itself."""
    choices: list[list[str]] = []
    for piece in re.split(r"(\{[^{}]*\})", pattern):
        inner = piece[1:-1] if piece.startswith("{") and piece.endswith("}") else None
        numbers = re.fullmatch(r"(\d{1,12})\.\.(\d{1,12})", inner or "", re.ASCII)
        if numbers and int(numbers[1]) <= int(numbers[2]) < int(numbers[1]) + MOST_PATHS:
            # As in a shell, zeros in front say how many digits all of them have.
            padded = any(len(number) > 1 and number.startswith("0") for number in numbers.groups())
            width = max(map(len, numbers.groups())) if padded else 0
            choices.append([f"{number:0{width}}" for number in range(int(numbers[1]), int(numbers[2]) + 1)])
        elif inner is not None and "," in inner:
            choices.append(inner.split(","))
        elif inner is None and not {"{", "}"} & set(piece):
            choices.append([piece])
        else:
            raise UserError(f"{field}: the braces in {pattern!r} are not understood", "write {000..009} or {a,b}")
    count = math.prod(map(len, choices))
    if count > MOST_PATHS:
        what = f"{field}: {pattern!r} stands for {count:,} files, more than {MOST_PATHS:,}"
        raise UserError(what, "write * for them")
    return ["".join(parts) for parts in itertools.product(*choices)]


def check_local(field: str, path: str, also: tuple[str, ...] = ()) -> None:
    """Raises UserError where a path is a URL, of which file systems would make a folder `gs:`; `also` names others."""
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", path)
    if scheme:
        known = "".join(f", {name}://" for name in also)
        what = f"{field}={path} is a URL ({scheme[1]}:), and only paths on this machine{known} are supported"
        raise UserError(what, "mount it, or copy it here and give its path")


def is_reference(name: str) -> bool:
    """Returns whether `name` is written as `package.module:function`."""
    return bool(_REFERENCE.match(name))


def suggest(value: str, known: tuple[str, ...]) -> str:
    """Returns `: did you mean 'x'? Known: ...`, the way every message about an unknown name ends."""
    names = {name.lower(): name for name in known}
    near = [names[name] for name in difflib.get_close_matches(value.lower(), names, n=1)]
    listed = ", ".join(known[:40]) + ", ..." * (len(known) > 40)
    return (f": did you mean {near[0]!r}? Known" if near else ": known") + f" are {listed}"


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


_AUGMENTATIONS: dict[str, tuple[_Argument, ...]] = {
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


def augment_steps(text: str, field: str = "data.augment") -> tuple[AugmentStep, ...]:
    """Returns the operations that `text` names, in its order."""
    try:
        parsed = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(parsed, ast.Call) or not isinstance(parsed.func, ast.Name) or parsed.keywords:
            raise ValueError
        operations = tuple(_augment_step(node, field) for node in parsed.args)
    except (SyntaxError, ValueError):
        raise UserError(f"{field}={text!r} is not understood", "write it like flip, crop(4), mixup(0.2)") from None
    names = [step.name for step in operations]
    for name in ("resized_crop", *MIXING):
        if names.count(name) > 1:
            raise UserError(f"{field}={text!r} gives {name} {names.count(name)} times", "give it once")
    if "resized_crop" in names[1:]:
        raise UserError(f"{field}={text!r}: resized_crop decides the size, so write it first")
    return operations


def _augment_step(node: ast.expr, field: str) -> AugmentStep:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.keywords:
        raise ValueError
    name, values = call.func.id, [ast.literal_eval(argument) for argument in call.args]
    if name not in _AUGMENTATIONS:
        raise UserError(f"unknown operation {name!r} in {field}{suggest(name, tuple(_AUGMENTATIONS))}")
    wanted = _AUGMENTATIONS[name]
    written = f"{name}({', '.join(a.name for a in wanted)})" if wanted else name
    if len(values) != len(wanted):
        raise UserError(f"{field}: {name} has {len(values)} arguments", f"write {written}")
    for argument, value in zip(wanted, values):
        low, high = argument.low, argument.high
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or (argument.whole and not float(value).is_integer()):
            allowed = "an integer" if argument.whole else "a number"
        elif not low <= value <= high or (argument.above and value == low):
            allowed = f"above {low:g} and at most {high:g}" if argument.above else f"from {low:g} to {high:g}"
        else:
            continue
        raise UserError(f"{field}: {argument.name} of {written} must be {allowed}, got {value!r}")
    return AugmentStep(name, tuple(float(v) for v in values))
