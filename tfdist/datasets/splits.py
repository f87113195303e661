"""Parts of a split by name, as TFDS writes them: `train`, `train[:90%]`, `train[1000:]`."""

from __future__ import annotations

import re

from tfdist import config
from tfdist.errors import UserError

_WRITTEN = re.compile(r"^([^\[\]]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?$")


def cut(field: str, text: str, sizes: dict[str, int]) -> tuple[str, slice]:
    """The split that `text` names and the rows of it.

    Args:
      sizes: examples by split.

    Raises:
      UserError: naming `field`, when there is no such split or nothing in it.
    """
    found = _WRITTEN.match(text)
    if not found:
        raise UserError(f"{field}={text!r} is not understood: write it like train, train[:90%] or train[1000:]")
    name, *bounds = found.groups()
    if name not in sizes:
        advice = (
            "" if len(sizes) > 1 else f"; cut it in two with {next(iter(sizes))}[:80%] and {next(iter(sizes))}[80%:]"
        )
        raise UserError(f"unknown {field} {text!r}{config.suggest(name, tuple(sizes))}{advice}")
    size = sizes[name]
    begin, end = (_row(bound, size, default) for bound, default in zip(bounds, (0, size)))
    if begin >= end:
        raise UserError(f"{field}={text!r} is empty: {name} has {size:,} examples")
    return name, slice(begin, end)


def _row(bound: str | None, size: int, default: int) -> int:
    if not bound:
        return default
    row = round(int(bound[:-1]) * size / 100) if bound.endswith("%") else int(bound)
    return min(max(row + size * (bound[0] == "-"), 0), size)
