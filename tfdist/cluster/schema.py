"""Readers that check a JSON value from another process before use, and make it printable. No TensorFlow.

A reader takes a value and returns it, or raises `WireError`. Texts that a person may see are escaped and cut (`line`);
texts that are compared stay as they are (`text`), and are escaped where they are printed.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tfdist.cluster.wire import WireError
from tfdist.errors import printable

Reader: TypeAlias = Callable[[Any], Any]


def _require(valid: object, value: Any = None) -> Any:
    if not valid:
        raise WireError("it sent what no process of tfdist sends")
    return value


def whole(least: int = 0, most: int = 2**31 - 1) -> Reader:
    return lambda value: _require(type(value) is int and least <= value <= most, value)


def number(value: Any) -> float:
    """Reads a finite number as a float."""
    _require((type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < 2**63))
    return float(value)


def flag(value: Any) -> bool:
    return _require(isinstance(value, bool), value)


def line(longest: int = 1000) -> Reader:
    """Reads a text, and makes it `printable`."""
    return lambda value: printable(_require(isinstance(value, str), value), longest)


def text(longest: int = 1 << 20) -> Reader:
    """Reads a text that can be encoded, and returns it unchanged: to be compared, not to be printed."""
    fits = lambda value: len(value) <= longest and not re.search("[\ud800-\udfff]", value)
    return lambda value: _require(isinstance(value, str) and fits(value), value)


def one_of(*values: str) -> Reader:
    return lambda value: _require(isinstance(value, str) and value in values, value)


def each(reader: Reader, least: int = 0, most: int = 100_000) -> Reader:
    """Reads a list of limited length."""

    def read(value: Any) -> list[object]:
        _require(isinstance(value, list) and least <= len(value) <= most)
        return [reader(item) for item in value]

    return read


def table(reader: Reader, most: int = 10_000) -> Reader:
    """Reads an object with any names, of limited size."""
    name_reader = text(1000)

    def read(value: Any) -> dict[str, object]:
        _require(isinstance(value, dict) and len(value) <= most)
        return {name_reader(name): reader(item) for name, item in value.items()}

    return read


def record(**readers: Reader) -> Reader:
    """Reads an object with exactly these names."""

    def read(value: Any) -> dict[str, object]:
        _require(isinstance(value, dict) and value.keys() == readers.keys())
        return {name: reader(value[name]) for name, reader in readers.items()}

    return read


def tagged(tag: str, records: Mapping[str, Mapping[str, Reader]]) -> Reader:
    """Reads an object whose `tag` names its kind, which determines the other names."""
    readers = {kind: record(**{tag: one_of(kind)}, **fields) for kind, fields in records.items()}

    def read(value: Any) -> dict[str, object]:
        kind = value.get(tag) if isinstance(value, dict) else None
        _require(isinstance(kind, str) and kind in readers)
        return readers[str(kind)](value)

    return read


def named(**records: Reader) -> Reader:
    """Reads an object by the reader of the first of these names that it has."""

    def read(value: Any) -> dict[str, object]:
        kind = next((name for name in records if isinstance(value, dict) and name in value), None)
        _require(kind)
        return records[str(kind)](value)

    return read


def anything(value: Any) -> object:
    """Reads any JSON value: its depth and length have limits of their own in `wire`."""
    return value
