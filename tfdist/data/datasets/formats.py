"""From `data.name` and `data.options` to two splits: one function for each format that a data set can have."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdist import config
from tfdist.config import field_syntax, user_functions
from tfdist.config.field_syntax import Options
from tfdist.data import image_decoding, image_sources, python_examples
from tfdist.data.augmentation import ops
from tfdist.data.loaded import Loaded, described
from tfdist.data.sources import Arrays, Records, Source, as_source, check_labels
from tfdist.data.spec import Spec
from tfdist.errors import UserError


def synthetic(examples: int = 4096, shape: tuple = (32, 32, 3), classes: int = 10, noise: float = 0.5) -> dict:
    """Makes images of one random pattern per class, under noise.

    Args:
      examples: number of training images.
      shape: height, width and channels of an image, or any other shape.
      noise: standard deviation of what is added to a pattern, whose own is 1.

    Returns:
      Arrays by split: `train` of `examples`, and a quarter as many to `test`.

    Raises:
      UserError: an argument of another kind or range.
    """
    field_syntax.check_whole("data.options: examples", examples)
    field_syntax.check_whole("data.options: classes", classes)
    if not isinstance(shape, (tuple, list)) or not shape:
        raise UserError(f"data.options: shape must be that of an example, such as (8, 8, 3), got {shape!r}")
    for side in shape:
        field_syntax.check_whole("data.options: each side of shape", side)
    if not isinstance(noise, (int, float)):
        raise UserError(f"data.options: noise must be a number, got {noise!r}")
    rng = np.random.default_rng(0)
    patterns = rng.normal(size=(classes, *shape)).astype("float32")

    def make(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(0, classes, count).astype("int32")
        return patterns[y] + noise * rng.normal(size=(count, *shape)).astype("float32"), y

    return {"train": make(examples), "test": make(max(1, examples // 4))}


MEMORY_SHARE = 0.25
"""Share of the machine's memory that `data.cache=auto` lets a decoded split take."""


KINDS = ("csv", "hf", "image_folder", "numpy", "parquet", "text", "tfrecord", "webdataset")
"""What `data.name` begins with, before a colon, where `load` knows the format."""


def is_function(name: str) -> bool:
    """Returns whether a `data.name` is that of a function, `package.module:function`."""
    return name.partition(":")[0] not in KINDS and field_syntax.is_reference(name)


def load(experiment: config.Experiment, prepare: bool, hold_out: bool) -> Loaded:
    """Loads the data set that `data.name` names, as it is stored: images keep their sizes where they may.

    Args:
      prepare: False to refuse one that would have to be downloaded first.
      hold_out: evaluate on a tenth of an image folder that has no splits, and train on the rest.

    Raises:
      UserError: unknown name or split, no examples, or labels out of range.
    """
    data = experiment.data
    options = field_syntax.options("data.options", data.options)
    if data.name == "synthetic":
        return _from_splits(experiment, user_functions.call("data.options", synthetic, options))
    if data.name == "stdlib_text":
        from tfdist.data.datasets import stdlib_text

        return _from_splits(experiment, user_functions.call("data.options", stdlib_text.load, options))
    match data.name.partition(":"):
        case ["csv" | "parquet" as kind, ":", path]:
            return _from_table(experiment, kind, path, options)
        case ["hf", ":", name]:
            return _from_huggingface(experiment, name, options, prepare)
        case ["image_folder", ":", path]:
            return _from_image_folder(experiment, path, options, hold_out)
        case ["numpy", ":", path]:
            return _from_arrays(experiment, path, options)
        case ["text", ":", path]:
            return _from_text(experiment, path, options)
        case ["tfrecord", ":", path]:
            return _from_tfrecords(experiment, path, options)
        case ["webdataset", ":", pattern]:
            return _from_webdataset(experiment, pattern, options)
    if is_function(data.name):
        return _from_function(experiment, user_functions.resolve("data.name", data.name), options)
    if options:
        raise UserError(f"data.options={data.options!r} is for functions, the TFDS data set {data.name!r} takes none")
    return _from_tfds(experiment, prepare)


def _from_splits(experiment: config.Experiment, splits: dict) -> Loaded:
    """Chooses two of the splits that a function of tfdist has made."""

    def split(field: str, name: str) -> Arrays:
        if name not in splits:
            raise UserError(f"unknown {field} {name!r}{field_syntax.suggest(name, tuple(splits))}")
        return Arrays(splits[name])

    return described(
        split("data.train_split", experiment.data.train_split),
        split("data.eval_split", experiment.data.eval_split),
    )


def _splits(data: config.Data) -> dict[str, str]:
    """Returns the splits that are asked for, by the field that asks."""
    return {"data.train_split": data.train_split, "data.eval_split": data.eval_split}


def _from_table(experiment: config.Experiment, kind: str, path: str, options: Options) -> Loaded:
    from tfdist.data.datasets.tabular import tables

    data = experiment.data
    made = tables.prepare(path, options, (data.train_split, data.eval_split), data.on_error == "skip", kind)
    train, evaluation = Arrays(made.train), Arrays(made.eval)
    spec = Spec((len(made.columns),), "float32", made.classes, 1.0, made.names, made.columns, made.target)
    return Loaded(train, evaluation, train.size, spec)


def _from_image_folder(experiment: config.Experiment, path: str, options: Options, hold_out: bool) -> Loaded:
    from tfdist.data.datasets import image_folder

    data = experiment.data
    most = options.get("max_pixels", image_decoding.MOST_PIXELS)
    if options.keys() - {"max_pixels"}:
        raise UserError(f"data.options={data.options!r}: image_folder knows max_pixels alone")
    field_syntax.check_whole("max_pixels in data.options", most)
    size = field_syntax.image_size(data.image_size)
    from_whole = ops.parse(data.augment).smallest is not None
    folder = image_folder.load(
        path, data.train_split, data.eval_split, data.on_error, size, data.resize, from_whole, most, hold_out
    )
    shape = size or folder.size
    if shape is None:
        raise UserError("data.image_size is needed, since the images have different sizes: write one such as 224")

    train = _held(folder.train, data, shape, from_whole)
    spec = Spec((*shape, 3), "uint8", len(folder.names), 255.0, folder.names)
    return Loaded(train, _held(folder.eval, data, shape), folder.train.size, spec)


def _from_tfrecords(experiment: config.Experiment, path: str, options: Options) -> Loaded:
    from tfdist.data.datasets import tfrecords

    data = experiment.data
    size = field_syntax.image_size(data.image_size)
    files = tfrecords.load(path, _splits(data), options, data.on_error == "skip", size is not None)
    if files.dtype != "uint8":
        size = None
    shape = files.shape if size is None else (*size, files.shape[-1])
    from_whole = size is not None and ops.parse(data.augment).smallest is not None
    train = _held(files.train, data, size, from_whole)
    spec = Spec(shape, files.dtype, files.classes, 255.0 if files.dtype == "uint8" else 1.0)
    return Loaded(train, _held(files.eval, data, size), files.train.size, spec)


def _from_arrays(experiment: config.Experiment, path: str, options: Options) -> Loaded:
    from tfdist.data.datasets import array_files

    data = experiment.data
    made = array_files.load(path, _splits(data), options, lambda size: _fits(size, data.cache))
    return Loaded(made.train, made.eval, made.train.size, made.spec)


def _from_huggingface(experiment: config.Experiment, name: str, options: Options, prepare: bool) -> Loaded:
    from tfdist.data.datasets import huggingface

    data = experiment.data
    size = field_syntax.image_size(data.image_size)
    found = huggingface.load(name, _splits(data), options, size is not None, prepare)
    return _of_one_size(data, size, found.train, found.eval, found.spec)


def _from_webdataset(experiment: config.Experiment, pattern: str, options: Options) -> Loaded:
    from tfdist.data.datasets.webdataset import samples

    data = experiment.data
    size = field_syntax.image_size(data.image_size)
    found = samples.load(pattern, _splits(data), options, data.on_error == "skip", size is not None)
    return _of_one_size(data, size, *found)


def _of_one_size(
    data: config.Data, size: tuple[int, int] | None, train: Records, evaluation: Records, spec: Spec
) -> Loaded:
    """Makes what is an image `size`, if there is one, and reads the splits into memory if they fit."""
    if spec.dtype != "uint8" or len(spec.shape) != 3:
        size = None
    shape = spec.shape if size is None else (*size, spec.shape[-1])
    from_whole = size is not None and ops.parse(data.augment).smallest is not None
    held = _held(train, data, size, from_whole)
    return Loaded(held, _held(evaluation, data, size), train.size, dataclasses.replace(spec, shape=shape))


def _held(source: Records, data: config.Data, size: tuple[int, int] | None, whole: bool = False) -> Source:
    """Makes the images `size`, unless they are needed whole, and reads them into memory if they fit."""
    if whole:
        if data.cache == "memory":
            raise UserError("data.cache=memory holds images of one size, and resized_crop needs them whole: use auto")
        return source
    made = source if size is None else image_sources.sized(source, size, data.resize)
    return image_sources.in_memory(made) if _fits(image_sources.size_in_memory(made), data.cache) else made


def _from_text(experiment: config.Experiment, path: str, options: Options) -> Loaded:
    from tfdist.data.datasets import text

    data = experiment.data
    memory = {"memory": math.inf, "stream": 0.0, "auto": _memory()}[data.cache]
    train, evaluation = user_functions.call("data.options", text.load, options, path, _splits(data), memory)
    shape = (options.get("length", text.LENGTH),)
    return Loaded(train, evaluation, train.size, Spec(shape, "int32", text.VOCABULARY, text.VOCABULARY - 1.0))


def _from_function(experiment: config.Experiment, function: Callable, options: Options) -> Loaded:
    """Calls `function(split=..., batch_size=..., **options)`, with what of the first two it names."""
    data = experiment.data
    named = inspect.signature(function).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in named.values())

    size = field_syntax.image_size(data.image_size)
    from_whole = size is not None and ops.parse(data.augment).smallest is not None

    def by_number(made: object, whole: bool) -> Source:
        examples = python_examples.Examples(made, data.name)
        target = size if examples.are_images else None
        held = _held(examples.source(free=target is not None and not whole), data, None if whole else target, whole)
        if isinstance(held, Records) and examples.have_classes:
            return dataclasses.replace(held, labels=examples.labels())
        return held

    def split(name: str, batch: int, whole: bool = False) -> Source:
        offered = {"split": name, "batch_size": batch}
        given = {k: v for k, v in offered.items() if k in named or every}
        made = user_functions.call("data.options", function, {**given, **options})
        if python_examples.is_by_number(made):
            return by_number(made, whole)
        source = as_source(made)
        if source.size is None:
            spec = tf.nest.flatten(source.specs)[0].shape
            if spec[0] not in (None, batch):
                raise UserError(
                    f"{data.name} returned batches of {spec[0]} examples for a batch size of {batch}: "
                    "take the argument batch_size and batch by it"
                )
        return source

    return described(
        split(data.train_split, experiment.train.batch_size, from_whole),
        split(data.eval_split, experiment.eval.batch_size),
    )


def _from_tfds(experiment: config.Experiment, prepare: bool) -> Loaded:
    from tfdist.data.datasets import tfds  # not before it is needed: TFDS takes a second to import

    splits = tfds.load(experiment, _memory(), prepare)
    for source in (splits.train, splits.eval):
        if source.columns is not None and splits.classes is not None:
            check_labels(source.columns[1], splits.classes, "the data set")
    spec = Spec(splits.shape, splits.dtype, splits.classes, splits.maximum, splits.names)
    return Loaded(splits.train, splits.eval, splits.examples, spec)


def _fits(size: float, cache: str) -> bool:
    """Whether a decoded split of `size` bytes is held in memory."""
    if cache != "auto":
        return cache == "memory"
    return size < _memory()


def _memory() -> float:
    """Returns how many bytes a split may take in memory."""
    return MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
