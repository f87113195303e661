"""The search space that `--over` defines: fields with values or ranges. No TensorFlow, and no Optuna."""

import ast
import copy
import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdist import config
from tfdist.config import field_syntax, validation
from tfdist.config.commands import command_line
from tfdist.errors import UserError

MOST = 1000  # experiments in a grid
_LONGEST = 120  # characters in the name of a run's folder
_FORM = "write it like optimizer.learning_rate=log:1e-4:1e-1; train.batch_size=32,64"
_RANGE = re.compile(r"(log|uniform):([^:,]+):([^:,]+)")
_WORDS = {bool: "True or False", int: "an integer", float: "a number"}
Values = dict[str, Any]  # of one experiment, by field such as `train.batch_size`


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """All numbers between two, which are of the field's type."""

    low: Any
    high: Any
    log: bool  # sampled uniformly in the logarithm


Space = Mapping[str, Sequence[Any] | Range]  # values, or a range, by field


def title(values: Values) -> str:
    """Returns what to call an experiment."""
    return ", ".join(f"{field}={value}" for field, value in values.items())


def folder(values: Values) -> str:
    """Returns the name of the folder of a run, which depends on its values alone."""
    name = title(values).replace(", ", "_")
    plain = re.sub(r"[^\w.+=-]+", "-", name)
    if plain == name and len(plain) <= _LONGEST:
        return plain
    return f"{plain[:_LONGEST]}-{hashlib.blake2b(title(values).encode(), digest_size=4).hexdigest()}"


def experiment(values: Values, base: config.Experiment) -> config.Experiment:
    """Returns a copy of an experiment with these values."""
    made = copy.deepcopy(base)
    config.set_fields(made, values)
    return made


def parse(text: str) -> dict[str, list[Any] | Range]:
    """Returns the values or the range of each field, with its type.

    `text`: `--over`: fields separated by semicolons, values by commas; a comma or semicolon between quotes or brackets
    belongs to the value. `log:LOW:HIGH` and `uniform:LOW:HIGH` are ranges, of numbers alone.
    """
    fields: dict[str, list[Any] | Range] = {}
    for part in filter(None, (part.strip() for part in field_syntax.divided("--over", text, ";"))):
        name, equals, values = (text.strip() for text in part.partition("="))
        name = name.removeprefix("config.")
        if not equals:
            raise UserError(f"--over={text!r} is not understood at {part!r}: {_FORM}")
        if name in fields:
            raise UserError(f"--over names {name} twice", "give all its values together")
        default = command_line.field(f"config.{name}")
        if dataclasses.is_dataclass(default):
            raise UserError(f"--over: {name} is a group of fields", "name one of them")
        if (match := _RANGE.fullmatch(values)) and type(default) in (int, float):
            ends = Range(_value(name, match[2], default), _value(name, match[3], default), match[1] == "log")
            if not (ends.low < ends.high < math.inf and ends.low > (0 if ends.log else -math.inf)):
                positive = " and LOW > 0" * ends.log
                raise UserError(f"--over: {name}={values} must be finite, with LOW < HIGH{positive}: {_FORM}")
            fields[name] = ends
            continue
        texts = field_syntax.divided("--over", values, ",")
        choices = fields[name] = [_value(name, value.strip(), default) for value in texts]
        for value in choices:
            if choices.count(value) > 1:
                raise UserError(f"--over gives {name} the value {value!r} twice", "give each once")
    if not fields:
        raise UserError(f"--over says which fields to change, and is empty: {_FORM}")
    return fields


def grid(space: Space) -> list[Values]:
    """Returns all combinations, the last field changing first; refuses too many, and ranges."""
    for name, choices in space.items():
        if isinstance(choices, Range):
            raise UserError(f"--over={name}=... gives a range, which has no grid", "say how many runs with --trials=20")
    made = list(itertools.islice(_corners(space), MOST + 1))
    if len(made) > MOST:
        fix = "choose fewer values, or sample with --trials=20"
        raise UserError(f"--over asks for more than {MOST} experiments", fix)
    return made


def check(space: Space, base: config.Experiment) -> None:
    """Validates the combinations of all values, and of the ends of the ranges; the first of very many."""
    for values in itertools.islice(_corners(space), MOST):
        try:
            validation.validate(experiment(values, base))
        except UserError as error:
            raise UserError(f"--over: with {title(values)}: {error}") from None


def _corners(space: Space) -> Iterator[Values]:
    ends = ((choices.low, choices.high) if isinstance(choices, Range) else choices for choices in space.values())
    return (dict(zip(space, values)) for values in itertools.product(*ends))


def _value(name: str, text: str, like: object) -> object:
    kind: Any = type(like)
    if isinstance(like, str):
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        return str(ast.literal_eval(text)) if quoted else text
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError, OverflowError):
        raise UserError(f"--over: {name} must be {_WORDS[kind]}, got {text!r}") from None
