"""Shared by the adapters: sources one after another, their targets and weights, and the one way to make records.

Splits are in the syntax of TFDS: `train`, `train[:90%]`, `train[100:]`, `train[:-50]+test`.
"""

import glob
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfdist.config import field_syntax
from tfdist.config.field_syntax import Options, check_whole, suggest
from tfdist.data.records import UNREADABLE, Records, reason
from tfdist.data.sources import check_labels
from tfdist.errors import UserError

_MOST_CLASSES = 1000  # classes that there may be more of than examples
_NAMED = 3  # problems that a message names

T = TypeVar("T")


class Parts:
    """Examples of several sources, those of one after those of the other.

    `parts`: of each, the source and which of its rows are taken.
    """

    def __init__(self, parts: Sequence[tuple[Any, np.ndarray]]):
        self._parts, self._ends = list(parts), np.cumsum([len(rows) for _, rows in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _by_source(self, numbers: np.ndarray) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """Yields the sources that these examples are in: which of the numbers, and their rows there."""
        part_of = np.searchsorted(self._ends, numbers, "right")
        for part in np.unique(part_of):
            (source, rows), which = self._parts[part], np.flatnonzero(part_of == part)
            yield source, which, rows[numbers[which] - (self._ends[part] - len(rows))]

    def reader(
        self, read: Callable[[Any, np.ndarray], Any], dtype: Any = object, shape: tuple[int, ...] = ()
    ) -> Callable[[tf.Tensor], tf.Tensor]:
        """Returns the `read` of `Records`, where read(source, rows) gives [n, *shape]; objects are bytes."""

        def get(numbers: np.ndarray) -> np.ndarray:
            stored = np.empty([len(numbers), *shape], dtype)
            for source, which, rows in self._by_source(numbers):
                stored[which] = read(source, rows)
            return stored

        return stored_reader(get, tf.string if dtype is object else dtype, shape)

    def namer(self, name: Callable[[Any, int], str]) -> Callable[[int], str]:
        """Returns what names an example by its number, where name(source, row) does it for one source."""

        def named(number: int) -> str:
            ((source, _, rows),) = self._by_source(np.array([number]))
            return name(source, int(rows[0]))

        return named


def stored_reader(get: Callable[[np.ndarray], np.ndarray], dtype: Any, shape: tuple = ()) -> Callable[..., tf.Tensor]:
    """Returns the `read` of `Records` that Python reads: `get`(numbers int64 [n]) gives an array [n, *shape]."""
    return lambda numbers: tf.ensure_shape(tf.numpy_function(get, [numbers], dtype), [None, *shape])


def records(
    read: Callable[[tf.Tensor], tf.Tensor],
    decode: Callable[[tf.Tensor], tf.Tensor],
    tables: Sequence[np.ndarray],
    name: Callable[[int], str],
) -> Records:
    """Returns records whose inputs are read when they are needed.

    Targets, and weights where there are some, are in memory: `tables`.
    """
    with tf.device("CPU:0"):
        constants = [tf.constant(table) for table in tables]
    y = tables[0]
    return Records(
        len(y),
        lambda numbers: (read(numbers), *(tf.gather(table, numbers) for table in constants)),
        lambda stored, seed: (decode(stored[0]), *stored[1:]),
        name=name,
        labels=y if y.dtype.kind == "i" and y.ndim == 1 else None,
    )


def first_input(decode: Callable[[], T], name: Callable[[], str]) -> T:
    """Decodes the first input, which an error names."""
    try:
        with tf.device("CPU:0"):
            return decode()
    except (*UNREADABLE, ValueError, OSError) as error:
        raise UserError(f"{name()} cannot be decoded: {reason(error)}") from None


def check_options(options: Options, known: Collection[str], names: Collection[str] = ()) -> None:
    """Refuses `data.options` that are not among those `known`, and values of another kind; `names` take names."""
    for option, value in options.items():
        if option not in known:
            raise UserError(f"unknown {option!r} in data.options{suggest(option, tuple(known))}")
        if option in names and not (isinstance(value, str) and value):
            raise UserError(f"data.options: {option} must be a name, got {value!r}")
        if option in ("channels", "max_pixels"):
            check_whole(f"data.options: {option}", value)


def first_few(problems: Sequence[str], rest: str) -> str:
    """Names the first of these problems, and how many more there are."""
    more = f", and {len(problems) - _NAMED:,} {rest}" if len(problems) > _NAMED else ""
    return "; ".join(problems[:_NAMED]) + more


def targets_and_weights(
    splits: Iterable[Sequence[np.ndarray]], options: Options, what: str
) -> tuple[list[np.ndarray], list[np.ndarray], int | None]:
    """Returns targets and weights of both splits for a model, and the number of classes, if they are classes.

    Classes are int32; other targets, and weights, have Keras' float type. `what` names the data set.

    Args:
      splits: of both, targets [n, ...] as they are stored, and weights where there are some.
      options: `classify=False` where integers are no classes, `classes=N` where not all of them occur.
    """
    train, evaluation = splits
    y, other, classes = _targets(train[0], evaluation[0], options)
    made = []
    for targets, (_, *rest) in ((y, train), (other, evaluation)):
        made.append([targets, *(_weights(w, targets, what) for w in rest)])
    return made[0], made[1], classes


def _targets(train: np.ndarray, evaluation: np.ndarray, options: Options) -> tuple[np.ndarray, np.ndarray, int | None]:
    classify, number = options.get("classify"), options.get("classes")
    if not (classify is None or isinstance(classify, bool)):
        raise UserError(f"data.options: classify must be True or False, got {classify!r}")
    whole = train.dtype.kind in "iub" and evaluation.dtype.kind in "iub"
    if (classify or number is not None) and (not whole or classify is False):
        option = "classify=True" if classify else f"classes={number}"
        raise UserError(f"data.options: {option} is for targets that are integers, and these are not classes")
    if not whole or classify is False:
        floats = keras.config.floatx()
        with np.errstate(over="ignore"):
            train, evaluation = train.astype(floats), evaluation.astype(floats)
        if not (np.isfinite(train).all() and np.isfinite(evaluation).all()):
            what = f"some targets are NaN or infinite in {floats}"
            raise UserError(what, "leave out those examples, or correct them")
        return train, evaluation, None
    if number is not None:
        check_whole("data.options: classes", number)
    one_each = [y.reshape(len(y)) if y.ndim == 2 and y.shape[1] == 1 else y for y in (train, evaluation)]
    classes = int(number) if isinstance(number, int) else int(train.max()) + 1
    if number is None and classes > max(_MOST_CLASSES, len(train)):
        what = f"targets are integers up to {classes - 1:,}, more classes than examples"
        raise UserError(what, "set classify=False in data.options if they are numbers, or classes=N")
    for y in one_each:
        check_labels(y, classes, "the data set")
    return one_each[0].astype(np.int32), one_each[1].astype(np.int32), classes


def _weights(values: np.ndarray, targets: np.ndarray, what: str) -> np.ndarray:
    """Returns sample weights; a negative one would make a loss grow."""
    if values.shape[1:] not in ((), (1,), targets.shape[1 : values.ndim]):
        told = f"{what} has weights {list(values.shape[1:])} for each example, of targets {list(targets.shape[1:])}"
        raise UserError(told, "give one for each example, or for each target")
    with np.errstate(over="ignore"):  # is infinite then
        weights = values.astype(keras.config.floatx())
    wrong = weights[~((weights >= 0) & (weights < np.inf))]
    if wrong.size:
        what = f"{what} has the weight {float(wrong[0]):g}"
        raise UserError(what, "give finite ones of 0 or more, and 0 to leave an example out")
    return weights


_BOUND = r"(-?\d+(?:\.\d+)?%|-?\d+)?"
_PART = re.compile(rf"^\s*([^\[\]+\s]+)\s*(?:\[\s*{_BOUND}\s*:\s*{_BOUND}\s*\])?\s*$")
SPLIT_NAMES = ("train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval")
"""Words by which folders and files are known to be splits."""


def split_names(texts: Iterable[str]) -> set[str]:
    """Returns the names of the splits that these texts are slices of."""
    return {part.split("[")[0].strip() for text in texts for part in text.split("+")}


def unreadable(folder: str) -> NoReturn:
    """Refuses a folder that may not be read, and would be left out."""
    raise UserError(f"the folder {folder} cannot be read", "correct its permissions")


def matching(pattern: str) -> list[str]:
    """Returns the files that a pattern finds, sorted; UserError for a folder that `glob` leaves out in silence."""
    rest = pattern
    while glob.has_magic(rest):
        rest, name = os.path.split(rest)
        needs = os.X_OK | (os.R_OK if glob.has_magic(name) else 0)
        for folder in glob.iglob(rest or ".", recursive=True):
            if os.path.isdir(folder) and not os.access(folder, needs):
                unreadable(folder)
    return sorted(f for f in glob.glob(pattern, recursive=True) if os.path.isfile(f))


def by_file_name(paths: Iterable[str]) -> dict[str, list[str]]:
    """Returns the files of each split, told by a word such as `train` or `test`; without any, all are `train`."""
    words = {f: set(SPLIT_NAMES) & set(re.split(r"[^a-z]+", os.path.basename(f).lower())) for f in paths}
    if not any(w & {"train", "training"} for w in words.values()):
        return {"train": list(paths)}
    by_split: dict[str, list[str]] = {}
    for f, split_names in words.items():
        if len(split_names) != 1:
            raise UserError(f"{f} does not say of which split it is, and others do", "name it like train or test")
        by_split.setdefault(split_names.pop(), []).append(f)
    return by_split


def held_out(train: str, evaluation: str, sizes: Mapping[str, int]) -> tuple[str, str]:
    """Returns the splits for training and evaluation, a tenth of the examples for the latter where all are in `train`.

    To be called only where slices are not sorted, such as by class. Other splits than a whole `train`, and one by a
    common name that is not there, are returned as they are.
    """
    size = sizes.get("train", 0)
    missing = evaluation.strip().lower() in SPLIT_NAMES and evaluation.strip() not in sizes
    if list(sizes) != ["train"] or train.strip() != "train" or not missing or size < 2:
        return train, evaluation
    tenth = max(1, round(size / 10))
    return f"train[:-{tenth}]", f"train[-{tenth}:]"


def cut_splits(
    splits: Mapping[str, str], parts: Mapping[str, T], sizes: Mapping[str, int], what: str
) -> list[list[tuple[T, np.ndarray]]]:
    """Returns the examples of these splits, each by its field: parts, see `select_split`, and the numbers there."""
    return [[(parts[name], rows) for name, rows in select_split(t, sizes, field, what)] for field, t in splits.items()]


def select_split(text: str, sizes: Mapping[str, int], field: str, what: str) -> list[tuple[str, np.ndarray]]:
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
