"""Splits as people write them, in the syntax of TFDS: `train`, `train[:90%]`, `train[100:]`, `train[:-50]+test`."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np

from tfdist.config import field_syntax
from tfdist.errors import UserError

T = TypeVar("T")
_BOUND = r"(-?\d+(?:\.\d+)?%|-?\d+)?"
_PART = re.compile(rf"^\s*([^\[\]+\s]+)\s*(?:\[\s*{_BOUND}\s*:\s*{_BOUND}\s*\])?\s*$")
NAMES = ("train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval")
"""Words by which folders and files are known to be splits."""


def named(texts: Iterable[str]) -> set[str]:
    """Returns the names of the splits that these texts are slices of."""
    return {part.split("[")[0].strip() for text in texts for part in text.split("+")}


def by_file_name(paths: Iterable[str]) -> dict[str, list[str]]:
    """Returns the files of each split, told by a word such as `train` or `test`; without any, all are `train`."""
    words = {f: set(NAMES) & set(re.split(r"[^a-z]+", os.path.basename(f).lower())) for f in paths}
    if not any(w & {"train", "training"} for w in words.values()):
        return {"train": list(paths)}
    by_split: dict[str, list[str]] = {}
    for f, named in words.items():
        if len(named) != 1:
            raise UserError(f"{f} does not say of which split it is, and others do", "name it like train or test")
        by_split.setdefault(named.pop(), []).append(f)
    return by_split


def held_out(train: str, evaluation: str, sizes: Mapping[str, int]) -> tuple[str, str]:
    """Returns the splits for training and evaluation, a tenth of the examples for the latter where all are in `train`.

    To be called only where slices are not sorted, such as by class. Other splits than a whole `train`, and one by a
    common name that is not there, are returned as they are.
    """
    size = sizes.get("train", 0)
    missing = evaluation.strip().lower() in NAMES and evaluation.strip() not in sizes
    if list(sizes) != ["train"] or train.strip() != "train" or not missing or size < 2:
        return train, evaluation
    tenth = max(1, round(size / 10))
    return f"train[:-{tenth}]", f"train[-{tenth}:]"


def cut(
    splits: Mapping[str, str], parts: Mapping[str, T], sizes: Mapping[str, int], what: str
) -> list[list[tuple[T, np.ndarray]]]:
    """Returns the examples of these splits, each by its field: parts that `select` names, and the numbers there."""
    return [[(parts[name], rows) for name, rows in select(t, sizes, field, what)] for field, t in splits.items()]


def select(text: str, sizes: Mapping[str, int], field: str, what: str) -> list[tuple[str, np.ndarray]]:
    """Returns the examples of a split: for each part, its split's name and the numbers there, int64 and ascending.

    Percents are rounded to the closest example, as in TFDS: `[:90%]` and `[90%:]` share none and leave none out.

    Args:
      text: a split, a slice of one, or several of them joined by `+`.
      sizes: examples of each split that there is.
      field: the experiment's, for messages, as is `what`, the data set.
    """
    parts = []
    for part in text.split("+"):
        written = _PART.match(part)
        if not written:
            what = f"{field}={text!r} is not understood"
            raise UserError(what, "write train, train[:90%], train[100:], train[:-50] or train+test")
        name, first, last = written.groups()
        if name not in sizes:
            slices = f", and slices such as {min(sizes)}[:90%]" if sizes else ""
            near = field_syntax.suggest(name, tuple(sorted(sizes)))
            raise UserError(f"{field}={text!r}: {what} has no split {name!r}{near}{slices}")
        size = sizes[name]
        begin = 0 if first is None else _bound(first, size, text, field, what)
        end = size if last is None else _bound(last, size, text, field, what)
        if begin >= end:
            raise UserError(f"{field}={text!r} selects none of the {size:,} examples of {what}", "choose other bounds")
        parts.append((name, np.arange(begin, end)))
    return parts


def _bound(text: str, size: int, whole: str, field: str, what: str) -> int:
    share = text.endswith("%")
    number = float(text[:-1]) * size / 100 if share else int(text)
    # Half up, not to even: what two slices share as a bound must be one number.
    bound = int(np.floor(number + 0.5))
    if text.startswith("-"):
        bound += size
    if not 0 <= bound <= size:
        limit = "100 %" if share else f"{size:,} examples"
        raise UserError(f"{field}={whole!r} goes beyond the {limit} of {what}", "choose other bounds")
    return bound
