"""What `--over` asks for: fields, their values, and the experiments of all combinations. Pure values, no TensorFlow."""

from __future__ import annotations

import ast
import copy
import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist import config
from tfdist.config import field_syntax, validation
from tfdist.errors import UserError

MOST = 1000
"""Experiments in a sweep."""
_LONGEST = 120
"""Characters in the name of a run's folder."""
_FORM = "write it like optimizer.learning_rate=1e-3,1e-2; train.batch_size=32,64"
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


@dataclasses.dataclass(frozen=True, slots=True)
class Combination:
    """One experiment of a sweep."""

    values: Mapping[str, object]
    """By field, such as `train.batch_size`."""
    experiment: config.Experiment

    @property
    def name(self) -> str:
        """Returns what to call it."""
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


def parse(text: str, base: config.Experiment) -> dict[str, list[object]]:
    """Returns the values of each field, with its type.

    Args:
      text: `--over`: fields apart from each other by semicolons, values by commas. A comma or semicolon between quotes
        or brackets belongs to the value.
      base: the experiment of which fields are changed.

    Raises:
      UserError: it is not understood, a field does not exist, or a value is not of its type.
    """
    fields: dict[str, list[object]] = {}
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
        texts = [value.strip() for value in _divided(values, ",")]
        fields[name] = [_value(name, value, default) for value in texts]
        for value in fields[name]:
            if fields[name].count(value) > 1:
                raise UserError(f"--over gives {name} the value {value!r} twice: give each once")
    if not fields:
        raise UserError(f"--over says which fields to change, and is empty: {_FORM}")
    return fields


def combinations(fields: Mapping[str, Sequence[object]], base: config.Experiment) -> list[Combination]:
    """Returns all combinations, the last field changing first.

    Raises:
      UserError: there are too many, or one of them cannot be trained.
    """
    if math.prod(map(len, fields.values())) > MOST:
        raise UserError(f"--over asks for more than {MOST} experiments: choose fewer values")
    made = []
    for values in itertools.product(*fields.values()):
        experiment = copy.deepcopy(base)
        for name, value in zip(fields, values):
            *groups, last = name.split(".")
            owner: Any = experiment
            for group in groups:
                owner = getattr(owner, group)
            setattr(owner, last, value)
        made.append(Combination(dict(zip(fields, values)), experiment))
        try:
            validation.validate(experiment)
        except UserError as error:
            raise UserError(f"--over: with {made[-1].name}: {error}") from None
    return made


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
