"""The search space that `--over` defines: fields with values or ranges. No TensorFlow, and no Optuna."""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdist import config
from tfdist.config import field_syntax, validation
from tfdist.errors import UserError

MOST = 1000
"""Experiments in a grid."""
_LONGEST = 120
"""Characters in the name of a run's folder."""
_FORM = "write it like optimizer.learning_rate=log:1e-4:1e-1; train.batch_size=32,64"
_RANGE = re.compile(r"(log|uniform):([^:,]+):([^:,]+)")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """All numbers between two, which are of the field's type."""

    low: Any
    high: Any
    log: bool
    """Whether to sample them uniformly in the logarithm."""


Space = Mapping[str, "Sequence[object] | Range"]
"""Values, or a range, by field."""


@dataclasses.dataclass(frozen=True, slots=True)
class Combination:
    """The values of one experiment of a sweep, by field such as `train.batch_size`."""

    values: Mapping[str, object]

    @property
    def name(self) -> str:
        """Returns the name for people."""
        return ", ".join(f"{field}={value}" for field, value in self.values.items())

    @property
    def folder(self) -> str:
        """Returns the name of its folder, which depends on its values alone."""
        plain = re.sub(r"[^\w.+=-]+", "-", "_".join(f"{field}={value}" for field, value in self.values.items()))
        if plain == self.name.replace(", ", "_") and len(plain) <= _LONGEST:
            return plain
        return f"{plain[:_LONGEST]}-{hashlib.blake2b(self.name.encode(), digest_size=4).hexdigest()}"

    def flags(self) -> list[str]:
        """Returns the flags of `tfdist.train` that set its values."""
        return [f"--config.{field}={value}" for field, value in self.values.items()]

    def experiment(self, base: config.Experiment) -> config.Experiment:
        """Returns a copy of an experiment with its values."""
        made = copy.deepcopy(base)
        for name, value in self.values.items():
            *groups, last = name.split(".")
            setattr(functools.reduce(getattr, groups, made), last, value)
        return made


def parse(text: str, base: config.Experiment) -> dict[str, list[object] | Range]:
    """Returns the values or the range of each field, with its type.

    Args:
      text: `--over`: fields separated by semicolons, values by commas; a comma or semicolon between quotes or brackets
        belongs to the value. `log:LOW:HIGH` and `uniform:LOW:HIGH` are ranges, of numbers alone.
      base: the experiment of which fields are changed.

    Raises:
      UserError: it is not understood, a field does not exist, or a value is not of its type.
    """
    fields: dict[str, list[object] | Range] = {}
    for part in filter(None, (part.strip() for part in _divided(text, ";"))):
        name, equals, values = part.partition("=")
        name = name.strip().removeprefix("config.")
        if not equals:
            raise UserError(f"--over={text!r} is not understood at {part!r}: {_FORM}")
        if name in fields:
            raise UserError(f"--over names {name} twice: give all its values together")
        if name == "name":
            raise UserError(
                "--over=name=... says only what runs are called: leave it out, each has a folder of its own"
            )
        default = _field(name, base)
        if (match := _RANGE.fullmatch(values.strip())) and type(default) in (int, float):
            low, high = (_value(name, end, default) for end in match.groups()[1:])
            fields[name] = _range(name, values.strip(), Range(low, high, match[1] == "log"))
            continue
        choices = [_value(name, value.strip(), default) for value in _divided(values, ",")]
        for value in choices:
            if choices.count(value) > 1:
                raise UserError(f"--over gives {name} the value {value!r} twice: give each once")
        fields[name] = choices
    if not fields:
        raise UserError(f"--over says which fields to change, and is empty: {_FORM}")
    return fields


def grid(space: Space) -> list[Combination]:
    """Returns all combinations, the last field changing first.

    Raises:
      UserError: there are too many, or a field has a range.
    """
    for name, values in space.items():
        if isinstance(values, Range):
            raise UserError(f"--over={name}=... gives a range, which has no grid: say how many runs with --trials=20")
    made = [Combination(dict(zip(space, values))) for values in itertools.islice(_corners(space), MOST + 1)]
    if len(made) > MOST:
        raise UserError(
            f"--over asks for more than {MOST} experiments: choose fewer values, or sample with --trials=20"
        )
    return made


def check(space: Space, base: config.Experiment) -> None:
    """Validates the combinations of all values, and of the ends of the ranges; the first of very many.

    Raises:
      UserError: one of them cannot be trained.
    """
    for values in itertools.islice(_corners(space), MOST):
        combination = Combination(dict(zip(space, values)))
        try:
            validation.validate(combination.experiment(base))
        except UserError as error:
            raise UserError(f"--over: with {combination.name}: {error}") from None


def _corners(space: Space) -> Iterator[tuple[object, ...]]:
    return itertools.product(*((v.low, v.high) if isinstance(v, Range) else v for v in space.values()))


def _divided(text: str, separator: str) -> list[str]:
    """Divides a text where the separator is not between quotes or brackets."""
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
        raise UserError(f"--over: {quote or closing[-1]} is missing in {text!r}")
    return parts


def _field(name: str, base: config.Experiment) -> object:
    """Returns the value that a field has, which is of its type."""
    owner: Any = base
    for part in name.split("."):
        known = tuple(f.name for f in dataclasses.fields(owner)) if dataclasses.is_dataclass(owner) else ()
        if part not in known:
            raise UserError(f"--over: there is no field {name!r}{field_syntax.suggest(part, known) if known else ''}")
        owner = getattr(owner, part)
    if dataclasses.is_dataclass(owner):
        raise UserError(f"--over: {name} is a group of fields: name one of them")
    return owner


def _value(name: str, text: str, like: object) -> object:
    kind: Any = type(like)
    if isinstance(like, str):
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        return str(ast.literal_eval(text)) if quoted else text
    try:
        if isinstance(like, bool):
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError, OverflowError):
        words = {bool: "True or False", int: "a whole number", float: "a number"}[kind]
        raise UserError(f"--over: {name} must be {words}, got {text!r}") from None


def _range(name: str, text: str, values: Range) -> Range:
    if values.low < values.high < math.inf and values.low > (0 if values.log else -math.inf):
        return values
    raise UserError(f"--over: {name}={text} must be finite, with LOW < HIGH{' and LOW > 0' * values.log}: {_FORM}")
