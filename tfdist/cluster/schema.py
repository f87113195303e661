"""What messages may hold: readers that check a value of JSON before anybody uses it, and make it fit to be printed.

A reader takes a value and returns it, or raises `WireError`. Texts that a person may see come out escaped and cut
(`line`); texts that are compared stay as they are (`text`), and are escaped where they are printed. No TensorFlow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tfdist.cluster.wire import WireError
from tfdist.errors import printable

Reader: TypeAlias = Callable[[object], Any]


def _wrong() -> WireError:
    return WireError("it sent what no process of tfdist sends")


def whole(least: int = 0, most: int = 2**31 - 1) -> Reader:
    """Takes a whole number within limits."""

    def read(value: object) -> int:
        if type(value) is not int or not least <= value <= most:
            raise _wrong()
        return value

    return read


def number(value: object) -> float:
    """Takes a number that is finite as a float."""
    if type(value) is int and abs(value) < 2**63:
        return float(value)
    if not isinstance(value, float) or not math.isfinite(value):
        raise _wrong()
    return value


def flag(value: object) -> bool:
    """Takes true or false."""
    if not isinstance(value, bool):
        raise _wrong()
    return value


def line(longest: int = 1000) -> Reader:
    """Takes a text, and returns it as `printable` does."""

    def read(value: object) -> str:
        if not isinstance(value, str):
            raise _wrong()
        return printable(value, longest)

    return read


def text(longest: int = 1 << 20) -> Reader:
    """Takes a text that can be encoded, and returns it as it is: to be compared, not to be printed."""

    def read(value: object) -> str:
        if not isinstance(value, str) or len(value) > longest or re.search("[\ud800-\udfff]", value):
            raise _wrong()
        return value

    return read


def matching(pattern: str) -> Reader:
    """Takes a text of a certain form."""

    def read(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
            raise _wrong()
        return value

    return read


def one_of(*values: str) -> Reader:
    """Takes one of these texts."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in values:
            raise _wrong()
        return value

    return read


def each(reader: Reader, least: int = 0, most: int = 100_000) -> Reader:
    """Takes a list of so many things."""

    def read(value: object) -> list[object]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise _wrong()
        return [reader(item) for item in value]

    return read


def table(reader: Reader, most: int = 10_000) -> Reader:
    """Takes an object with any names, up to so many."""
    name_reader = text(1000)

    def read(value: object) -> dict[str, object]:
        if not isinstance(value, dict) or len(value) > most:
            raise _wrong()
        return {name_reader(name): reader(item) for name, item in value.items()}

    return read


def record(**readers: Reader) -> Reader:
    """Takes an object with just these names."""

    def read(value: object) -> dict[str, object]:
        if not isinstance(value, dict) or value.keys() != readers.keys():
            raise _wrong()
        return {name: reader(value[name]) for name, reader in readers.items()}

    return read


def tagged(tag: str, records: Mapping[str, Mapping[str, Reader]]) -> Reader:
    """Takes an object whose `tag` says which kind it is, and which has the names that belong to that kind."""
    known = {kind: record(**{tag: one_of(kind)}, **readers) for kind, readers in records.items()}

    def read(value: object) -> dict[str, object]:
        kind = value.get(tag) if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in known:
            raise _wrong()
        return known[kind](value)

    return read


def named(**records: Reader) -> Reader:
    """Takes an object that has one of these names, by the reader that belongs to the name."""

    def read(value: object) -> dict[str, object]:
        kind = next((name for name in records if isinstance(value, dict) and name in value), None)
        if kind is None:
            raise _wrong()
        return records[kind](value)

    return read


def anything(value: object) -> object:
    """Takes all that JSON can hold: its depth and length have limits of their own in `wire`."""
    return value
