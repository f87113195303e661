"""`numpy:/path`: a `.npz` file, or a folder of `.npy` files, as examples in memory or by number.

An array is a column of a split: `x_train`, `train_x`, or `x` where there are no splits. Files are never unpickled.
"""

import functools
import glob
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import keras
import numpy as np

from tfdist.config.field_syntax import Options
from tfdist.data.datasets import examples
from tfdist.data.loaded import Loaded
from tfdist.data.sources import Arrays, Records, crc
from tfdist.data.spec import Spec
from tfdist.errors import UserError, one_line

COLUMNS = ("x", "y", "weight")
_OPTIONS = (*COLUMNS, "shape", "classes", "classify")
_PIECE = 1 << 26  # bytes that are looked at together

T = TypeVar("T")

Part = tuple[str, np.ndarray, slice]  # an array's name, the array, and which of its rows


def load(path: str, splits: Mapping[str, str], options: Options, fits: Callable[[float], bool]) -> Loaded:
    """Reads the arrays of both splits; those of `.npy` files that do not fit stay in their files.

    Args:
      options: names of the columns where they are others (`x=images, y=labels`), `shape=(28, 28, 1)` that an input has,
        and `classes` and `classify`, see `examples.targets_and_weights`.
      fits: whether so many bytes are to be held in memory.
    """
    what = f"numpy:{path}"
    examples.check_options(options, _OPTIONS, COLUMNS)
    arrays, in_files = _opened(os.path.expanduser(path), what)
    named = {column: options.get(column, column) for column in COLUMNS}
    by_split = _by_split(arrays, named, "weight" in options, what)
    sizes = {split: len(columns["x"][1]) for split, columns in by_split.items()}
    train, evaluation = (
        {c: [(*columns[c], slice(int(rows[0]), int(rows[-1]) + 1)) for columns, rows in pieces] for c in pieces[0][0]}
        for pieces in examples.cut_splits(splits, by_split, sizes, what)
    )
    if set(train) != set(evaluation):
        raise UserError(f"{what}: some splits have weights and others have none", "give them to all, or to none")
    *tables, classes = examples.targets_and_weights(
        ([_joined(split[column]) for column in COLUMNS[1:] if column in split] for split in (train, evaluation)),
        options,
        what,
    )
    shape = _shape([part for split in (train, evaluation) for part in split["x"]], options, what)
    dtype = _stored(train["x"][0][1].dtype)
    sources: list[Arrays | Records] = []
    for split, table in zip((train, evaluation), tables):
        size = len(table[0]) * math.prod(shape) * dtype.itemsize
        if in_files and not fits(size):
            x = examples.Parts([((name, array), np.arange(rows.start, rows.stop)) for name, array, rows in split["x"]])
            read = x.reader(lambda source, rows: source[1][rows].reshape(-1, *shape), dtype, shape)
            name = x.namer(lambda source, row: f"example {row} of {source[0]}.npy")
            sources.append(examples.records(read, lambda x: x, table, name))
        else:
            columns = _joined(split["x"]).astype(dtype).reshape(-1, *shape), *table
            sources.append(Arrays(columns, crc(columns)))
    # Both are searched for NaN; what is scaled by is the training's.
    maximum, _ = (255.0, 255.0) if dtype == np.uint8 else (_maximum(split["x"], what) for split in (train, evaluation))
    return Loaded(sources[0], sources[1], len(tables[0][0]), Spec(shape, dtype.name, classes, maximum))


def _opened(path: str, what: str) -> tuple[dict[str, Callable[[], np.ndarray]], bool]:
    """Returns what reads each array, by its name, and whether rows can be read from the files later."""
    if os.path.isdir(path):
        files = sorted(glob.glob(os.path.join(glob.escape(path), "*.npy")))
        if not files:
            raise UserError(f"{what}: there are no .npy files", "give a folder that has some, or a .npz file")
        mapped = {f: functools.partial(np.load, f, mmap_mode="r") for f in files}
        return {os.path.basename(f)[: -len(".npy")]: functools.partial(_read, f, mapped[f]) for f in files}, True
    if not os.path.isfile(path):
        raise UserError(f"{what}: there is no such file", "give a .npz file, or a folder of .npy files")
    opened = _read(path, functools.partial(np.load, path))
    if not isinstance(opened, np.lib.npyio.NpzFile):
        raise UserError(f"{what} is not an .npz file", "write it with numpy.savez(path, x=..., y=...)")
    one = lambda name: functools.partial(_read, f"{path}: {name}", functools.partial(opened.__getitem__, name))
    return {name: one(name) for name in opened.files}, False


def _read(path: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except Exception as error:  # a damaged file can fail anywhere in NumPy, in zipfile and in zlib
        why = one_line(error, 100).rstrip(".:") or type(error).__name__
        hint = "write it anew with numpy.save or numpy.savez, without Python objects"
        raise UserError(f"{path} cannot be read: {why}", hint) from None


def _by_split(
    arrays: Mapping[str, Callable[[], np.ndarray]], named: Mapping[str, str], weighted: bool, what: str
) -> dict[str, dict[str, tuple[str, np.ndarray]]]:
    """Returns the columns of each split, with the names that they have in the file."""
    by_split: dict[str, dict[str, tuple[str, np.ndarray]]] = {}
    for name, read in arrays.items():
        for column, stem in named.items():
            spelled = ((s, (f"{stem}_{s}", f"{s}_{stem}")) for s in examples.SPLIT_NAMES)
            split = next((s for s, names in [("train", (stem,)), *spelled] if name in names), "")
            if not split:
                continue
            if column in by_split.setdefault(split, {}):
                other = by_split[split][column][0]
                raise UserError(f"{what}: {other} and {name} are both {column} of {split}", "rename one of them")
            by_split[split][column] = name, read()
    listed = ", ".join(sorted(arrays)[:20]) or "none"
    if not any("x" in columns for columns in by_split.values()):
        raise UserError(
            f"{what} has no array {named['x']!r} or {named['x']}_train: it has {listed}; "
            "name them with data.options, as in x=images, y=labels"
        )
    for split, columns in by_split.items():
        missing = [column for column in ("x", "y", *(["weight"] if weighted else [])) if column not in columns]
        if missing:
            raise UserError(
                f"{what}: {split} has no array for {missing[0]} ({named[missing[0]]}): it has {listed}; "
                "add it, or name it with data.options"
            )
        for column, (name, array) in columns.items():
            kinds = "fiub" if column != "weight" else "fiu"
            if array.dtype.kind not in kinds or array.ndim == 0:
                raise UserError(f"{what}: {name} is {array.dtype} {list(array.shape)}", "give numbers for each example")
        lengths = {name: len(array) for name, array in columns.values()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} has {length:,}" for name, length in lengths.items())
            raise UserError(f"{what}: {split} has arrays of different lengths: {listed}")
    return by_split


def _joined(parts: Sequence[Part]) -> np.ndarray:
    """Returns the rows of all parts, in memory."""
    shapes = {name: array.shape[1:] for name, array, _ in parts}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise UserError(f"arrays that are taken together have other shapes: {listed}")
    return np.concatenate([array[rows] for _, array, rows in parts])


def _stored(dtype: np.dtype) -> np.dtype:
    """Returns the type in which an array is trained on: floats in Keras' own, the bytes in this machine's order."""
    return np.dtype(keras.config.floatx()) if dtype.kind == "f" else dtype.newbyteorder("=")


def _shape(parts: Sequence[Part], options: Options, what: str) -> tuple[int, ...]:
    name, first, _ = parts[0]
    for other, array, _ in parts:
        if (array.shape[1:], _stored(array.dtype)) != (first.shape[1:], _stored(first.dtype)):
            raise UserError(
                f"{what}: {other} is {array.dtype} {list(array.shape[1:])} and {name} {first.dtype} "
                f"{list(first.shape[1:])} for each example",
                "make them alike",
            )
    shape = first.shape[1:] or (1,)
    requested = options.get("shape", shape)
    requested = (requested,) if isinstance(requested, int) else requested
    if not isinstance(requested, (tuple, list)) or not all(type(n) is int and n > 0 for n in requested):
        raise UserError(f"data.options: shape must be integers such as (28, 28, 1), got {options.get('shape')!r}")
    if math.prod(requested) != math.prod(shape) or not math.prod(shape):
        what = f"data.options: shape={tuple(requested)} does not fit {name}, of {list(shape)} for each example"
        raise UserError(what)
    return tuple(requested)


def _maximum(parts: Sequence[Part], what: str) -> float:
    """Returns the largest input, which scales integers and pixels that are floats."""
    most = -math.inf
    for name, array, rows in parts:
        step = max(1, _PIECE // max(1, array[:1].nbytes))
        for start in range(rows.start, rows.stop, step):
            piece = array[start : min(start + step, rows.stop)]
            with np.errstate(over="ignore"):
                piece = piece.astype(_stored(piece.dtype), copy=False)  # in which 1e39 is infinite, if that is float32
            if piece.dtype.kind == "f" and not np.isfinite(piece).all():
                told = f"{what}: {name} has numbers that are NaN or infinite in {piece.dtype}"
                raise UserError(told, "correct them, or leave them out")
            most = max(most, float(piece.max()))
    return most or 1.0
