"""From tar files to two sources: targets are read at once, inputs when they are needed, from where they lie."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfdist.config.field_syntax import Options
from tfdist.config.messages import logger
from tfdist.data import image_decoding
from tfdist.data.datasets import class_targets
from tfdist.data.datasets.tfrecord_index import Index
from tfdist.data.datasets.webdataset import columns, shards
from tfdist.data.records import reason
from tfdist.data.sources import Records
from tfdist.data.spec import Spec
from tfdist.data.splits import named, select
from tfdist.errors import UserError, one_line

T = TypeVar("T")
_THREADS = 16
_NAMED = 3


@dataclasses.dataclass(frozen=True, slots=True)
class _Samples:
    """Where the inputs of several samples are, and what goes with them."""

    index: Index
    tables: list[np.ndarray]
    """Targets, and weights where there are some."""

    def __getitem__(self, rows: np.ndarray) -> _Samples:
        index = self.index
        picked = dataclasses.replace(
            index, files=index.files[rows], offsets=index.offsets[rows], lengths=index.lengths[rows]
        )
        return _Samples(picked, [table[rows] for table in self.tables])

    def name(self, row: int) -> str:
        """Names a sample in a message; reads the headers of its tar file again."""
        path, offset = self.index.paths[self.index.files[row]], int(self.index.offsets[row])
        members = (m for sample in shards.listing(path).samples.values() for m in sample.values())
        return next((f"{m.name} in {path}" for m in members if m.offset == offset), f"a file in {path}")


def load(
    path: str, splits: Mapping[str, str], options: Options, skip: bool, free: bool
) -> tuple[Records, Records, Spec]:
    """Finds the samples of both splits, and reads their targets and the first input.

    Args:
      path: a file, a folder or a pattern, see `shards.files`.
      splits: those for training and evaluation, by the field that asks for each.
      options: `x=NAME, y=NAME` and `weight=NAME`, extensions, where it is not plain which; `field=NAME` of a target in
        a `.json` file; `channels=1` for images that are not to be RGB; `max_pixels`; `classes` and `classify`, see
        `class_targets.targets`.
      skip: leave out samples without an input or a target, and what lies behind damage, instead of refusing them.
      free: images are made one size later; otherwise all must have the size of the first.

    Raises:
      UserError: no files or samples, or some that cannot be trained on.
    """
    what = f"webdataset:{path}"
    columns.check(options)
    by_split = shards.files(path)
    wanted = named(splits.values())
    needed = {name: paths for name, paths in by_split.items() if name in wanted}
    names = _columns([p for paths in needed.values() for p in paths], options)
    found = {name: _samples(paths, names, options.get("field", ""), skip) for name, paths in needed.items()}
    sizes = {name: len(found[name].index.files) if name in found else 0 for name in by_split}
    train, evaluation = (
        _joined([found[name][rows] for name, rows in select(text, sizes, field, what)])
        for field, text in splits.items()
    )
    floats = keras.config.floatx()
    given: Options = {name: options[name] for name in ("classes", "classify") if name in options}
    targets = class_targets.targets(train.tables[0], evaluation.tables[0], given, floats)
    tables = [
        [y, *(class_targets.weights(w, what) for w in s.tables[1:])] for y, s in zip(targets[:2], (train, evaluation))
    ]
    first = train.index.read(np.zeros(1, np.int64))[0]
    if columns.kind(names[0]) == "npy":
        array = _first(lambda: columns.array(first), train)
        dtype = np.dtype(floats) if array.dtype.kind == "f" else array.dtype
        made = [_arrays(s, t, array, dtype) for s, t in zip((train, evaluation), tables)]
        maximum = 255.0 if dtype == np.uint8 else 1.0
        return made[0], made[1], Spec(array.shape or (1,), dtype.name, targets.classes, maximum)
    pictures = image_decoding.Pictures(
        options.get("channels", 3), options.get("max_pixels", image_decoding.MOST_PIXELS)
    )
    shape = _first(lambda: tuple(int(n) for n in pictures.decode(tf.constant(first)).shape), train)
    made = [_images(s, t, pictures, None if free else shape) for s, t in zip((train, evaluation), tables)]
    return made[0], made[1], Spec(shape, "uint8", targets.classes, 255.0)


def _columns(paths: Sequence[str], options: Options) -> list[str]:
    """Returns the extensions of input, target and weight, by the first sample that there is."""
    for path in paths:
        for key, sample in shards.listing(path).samples.items():
            return columns.chosen(list(sample), options, f"{key} in {path}")
    raise UserError(f"{' and '.join(paths[:_NAMED])} {'have' if len(paths) > 1 else 'has'} no samples: give others")


def _samples(paths: Sequence[str], names: Sequence[str], field: str, skip: bool) -> _Samples:
    """Looks into tar files, and says what is left out of them or refuses them.

    Args:
      names: extensions of input, target and weight.
      field: of a target in a JSON object.
    """
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        scans = list(pool.map(lambda path: _scan(path, names, field), paths))
    problems = [problem for scan in scans for problem in scan.problems]
    if problems:
        more = f", and {len(problems) - _NAMED:,} more" if len(problems) > _NAMED else ""
        line = "; ".join(problems[:_NAMED]) + more
        if not skip:
            raise UserError(f"{line}: write them again, or leave out what is lost with data.on_error=skip")
        logger.info(f"WARNING: {line}: left out")
    tables = []
    for column, name in enumerate(names[1:]):
        values = [value for scan in scans for value in scan.values[column]]
        if shapes := {value.shape for value in values} - {values[0].shape if values else ()}:
            raise UserError(
                f"{paths[0]}: .{name} has shape {list(values[0].shape)} at first and {list(min(shapes))} later: "
                "make them alike"
            )
        tables.append(np.stack(values) if values else np.zeros(0))
    parts = [np.full(len(scan.offsets), i, np.int32) for i, scan in enumerate(scans)]
    offsets = np.array([n for scan in scans for n in scan.offsets], np.int64)
    lengths = np.array([n for scan in scans for n in scan.lengths], np.int64)
    return _Samples(Index(tuple(paths), np.concatenate(parts), offsets, lengths, ()), tables)


@dataclasses.dataclass(slots=True)
class _TarScan:
    """What one tar file holds that can be trained on."""

    offsets: list[int]
    lengths: list[int]
    values: list[list[np.ndarray]]
    """Of targets and weights."""
    problems: list[str]


def _scan(path: str, names: Sequence[str], field: str) -> _TarScan:
    listed = shards.listing(path)
    scan = _TarScan([], [], [[] for _ in names[1:]], [])
    with open(path, "rb") as file:
        for key, sample in listed.samples.items():
            if missing := [name for name in names if name not in sample]:
                there = ", ".join(f".{extension}" for extension in sample)
                scan.problems.append(f"{key} in {path} has no .{missing[0]} (it has {there})")
                continue
            found = []
            for column, name in enumerate(names[1:]):
                content = os.pread(file.fileno(), sample[name].size, sample[name].offset)
                try:
                    found.append(columns.number(content, name, "" if column else field))
                except ValueError as error:
                    scan.problems.append(f"{key}.{name} in {path} holds no number: {one_line(error, 80).rstrip('.')}")
                    break
            else:
                scan.offsets.append(sample[names[0]].offset)
                scan.lengths.append(sample[names[0]].size)
                for values, value in zip(scan.values, found):
                    values.append(value)
    scan.problems += [listed.problem] if listed.problem else []
    return scan


def _joined(parts: Sequence[_Samples]) -> _Samples:
    """Returns the samples of several parts, one after the other."""
    before = np.cumsum([0, *(len(part.index.paths) for part in parts)])
    index = Index(
        tuple(path for part in parts for path in part.index.paths),
        np.concatenate([part.index.files + int(n) for part, n in zip(parts, before)]),
        np.concatenate([part.index.offsets for part in parts]),
        np.concatenate([part.index.lengths for part in parts]),
        (),
    )
    return _Samples(index, [np.concatenate(tables) for tables in zip(*(part.tables for part in parts))])


def _first(read: Callable[[], T], samples: _Samples) -> T:
    """Reads the first input, which an error names."""
    try:
        return read()
    except tf.errors.OpError as error:
        why = reason(error)
    except ValueError as error:
        why = one_line(error, 80).rstrip(".")
    raise UserError(f"{samples.name(0)} cannot be decoded: {why}")


def _images(
    samples: _Samples, tables: list[np.ndarray], pictures: image_decoding.Pictures, shape: tuple[int, ...] | None
) -> Records:
    """Returns a source of images, decoded by TensorFlow."""

    def decode(content: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(pictures.decode(content), shape or [None, None, pictures.channels])

    read = lambda rows: tf.ensure_shape(tf.numpy_function(samples.index.read, [rows], tf.string), [None])
    return _records(samples, read, decode, tables)


def _arrays(samples: _Samples, tables: list[np.ndarray], first: np.ndarray, dtype: np.dtype) -> Records:
    """Returns a source of arrays, which must all be like the first one."""
    shape = first.shape or (1,)

    def get(rows: np.ndarray) -> np.ndarray:
        found = np.empty([len(rows), *shape], dtype)
        for i, content in enumerate(samples.index.read(rows)):
            array = columns.array(content)
            if (array.shape, array.dtype) != (first.shape, first.dtype):
                was, now = (f"{a.dtype} {list(a.shape)}" for a in (first, array))
                raise ValueError(f"it is {now}, and the first is {was}")
            found[i] = array
        return found

    read = lambda rows: tf.ensure_shape(tf.numpy_function(get, [rows], dtype), [None, *shape])
    return _records(samples, read, lambda x: x, tables)


def _records(
    samples: _Samples,
    read: Callable[[tf.Tensor], tf.Tensor],
    decode: Callable[[tf.Tensor], tf.Tensor],
    tables: list[np.ndarray],
) -> Records:
    with tf.device("CPU:0"):
        constants = [tf.constant(table) for table in tables]
    y = tables[0]
    return Records(
        len(y),
        lambda rows: (read(rows), *(tf.gather(table, rows) for table in constants)),
        lambda stored, seed: (decode(stored[0]), *stored[1:]),
        name=samples.name,
        labels=y if y.dtype.kind == "i" and y.ndim == 1 else None,
    )
