"""Data sets by name: TFDS, the ones that tfdist makes or packages, and the user's own functions."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import config
from tfdist.config import field_syntax, user_functions, validation
from tfdist.data.augmentation import ops
from tfdist.data.datasets import image_sources
from tfdist.data.record_feed import in_order
from tfdist.data.sources import Arrays, Batches, Records, Source, as_source, check_labels, one_hot, targets_of
from tfdist.data.sources import facts as data_facts
from tfdist.data.spec import Spec
from tfdist.errors import UserError

MEMORY_SHARE = 0.25
"""Share of the machine's memory that `data.cache=auto` lets a decoded split take."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """Both splits and their description."""

    train: Source
    eval: Source
    examples: int
    """Examples in the training split."""
    spec: Spec


def _say(line: str) -> None:
    print(f"tfdist: {line}", flush=True)


def load(experiment: config.Experiment, prepare: bool = True, say: Callable[[str], None] = _say) -> Loaded:
    """Loads the experiment's data set, preparing it first where TFDS must.

    Args:
      prepare: False to refuse one that would have to be downloaded first.
      say: shows a line to a person.

    Raises:
      UserError: unknown name or split, no examples, labels out of range, or
        data that would have to be downloaded and cannot be.
    """
    loaded = _by_name(experiment, prepare, say)
    if experiment.data.cache == "stream" and isinstance(loaded.train, Arrays):
        raise UserError(f"data.cache=stream: {experiment.data.name} can only be read into memory as a whole: use auto")
    return _pictured(experiment, loaded)


def facts(loaded: Loaded) -> dict[str, Any]:
    """As `sources.facts`, with what the model is built for."""
    spec = loaded.spec
    known = [spec.names, [(c.name, c.kind, c.vocabulary) for c in (*spec.columns, *filter(None, [spec.target]))]]
    return {
        **data_facts(loaded.train),
        "shape": list(spec.shape),
        "classes": spec.classes,
        "checksum of names": zlib.crc32(repr(known).encode()),
    }


def load_data(name: str, *, batch_size: int = 32, seed: int = 0, **options: object) -> Loaded:
    """A data set by name, for `tfdist.fit`, `evaluate` and `predict`; after `tfdist.connect`.

    Args:
      name: as `data.name` of an experiment: `image_folder:/path`, `csv:/path`, a TFDS name, ...
      batch_size: global batch of what can only be read as a stream.
      seed: of the order of such a stream.
      **options: the other fields of `tfdist.config.Data`, such as `train_split="train[:90%]"`, `image_size=64`.

    Returns:
      A source for training, `train`, one for evaluation, `eval`, and what a model must know of them, `spec`. Classes
      are numbers, or one-hot rows where `augment` mixes examples.

    Raises:
      UserError: as the command would.
    """
    known = {f.name for f in dataclasses.fields(config.Data)} - {"name", "shuffle"}  # fit shuffles what it can
    if unknown := sorted(set(options) - known):
        raise UserError(
            f"load_data() has no option {unknown[0]!r}{field_syntax.suggest(unknown[0], tuple(sorted(known)))}"
        )
    texts: dict[str, Any] = {k: os.fspath(v) if isinstance(v, os.PathLike) else v for k, v in options.items()}
    if type(texts.get("image_size")) is int:
        texts["image_size"] = str(texts["image_size"])
    experiment = config.Experiment(seed=seed, data=config.Data(name=name, **texts))
    experiment.train.batch_size = experiment.eval.batch_size = batch_size
    loaded = load(validation.validate(experiment))
    if isinstance(loaded.train, Records) and loaded.train.mix and loaded.spec.classes:
        train, evaluation = (one_hot(source, loaded.spec.classes) for source in (loaded.train, loaded.eval))
        return dataclasses.replace(loaded, train=train, eval=evaluation)
    return loaded


def _pictured(experiment: config.Experiment, loaded: Loaded) -> Loaded:
    """Images made one size and, to train on, changed at random."""
    data, spec = experiment.data, loaded.spec
    size = field_syntax.image_size(data.image_size)
    recipe = ops.parse(data.augment, spec.maximum)
    if size is None and not data.augment:
        return loaded
    if size is not None and len(spec.shape) != 3:
        raise UserError(
            f"data.image_size={data.image_size!r} is for images [height, width, channels], "
            f"and this data has shape {list(spec.shape)}: leave it empty"
        )
    shape = spec.shape if size is None else (*size, spec.shape[-1])
    train, evaluation = loaded.train, loaded.eval
    if isinstance(train, Arrays) and tf.nest.is_nested(train.columns[0]) and not spec.columns:
        field = "data.image_size" if data.augment == "" else "data.augment"
        raise UserError(f"{field} is for data whose input is one array of images, and this has several: leave it empty")
    lowest = float(train.columns[0].min()) if isinstance(train, Arrays) and len(shape) == 3 else 0.0
    recipe.check(shape, spec.dtype, spec.classes, lowest)
    if size is not None and spec.shape[:2] != size:
        evaluation = image_sources.resized(evaluation, size, data.resize)
        if recipe.smallest is None:  # a crop that is resized is cut from the whole image
            train = image_sources.resized(train, size, data.resize)
    if data.augment:
        train = image_sources.augmented(train, recipe, (shape[0], shape[1]))
    return dataclasses.replace(loaded, train=train, eval=evaluation, spec=dataclasses.replace(spec, shape=shape))


def _by_name(experiment: config.Experiment, prepare: bool, say: Callable[[str], None]) -> Loaded:
    data = experiment.data
    options = field_syntax.options("data.options", data.options)
    if data.name == "synthetic":
        return _own(experiment, user_functions.call("data.options", synthetic, options))
    if data.name == "stdlib_text":
        from tfdist.data.datasets import stdlib_text

        return _own(experiment, user_functions.call("data.options", stdlib_text.load, options))
    match data.name.partition(":"):
        case ["csv", ":", path]:
            return _of_table(experiment, path, options, say)
        case ["image_folder", ":", path]:
            return _of_folder(experiment, path, options, say)
        case ["text", ":", path]:
            return _of_text(experiment, path, options)
        case ["tfrecord", ":", path]:
            return _of_tfrecords(experiment, path, options, say)
    if field_syntax.is_reference(data.name):
        return _of_function(experiment, user_functions.resolve("data.name", data.name), options)
    if options:
        raise UserError(f"data.options={data.options!r} is for functions, the TFDS data set {data.name!r} takes none")
    return _of_tfds(experiment, prepare)


def synthetic(examples: int = 4096, shape: tuple = (32, 32, 3), classes: int = 10, noise: float = 0.5) -> dict:
    """Made images: one random pattern per class, under noise. Learnable, and no download.

    Returns:
      Arrays by split: `train` of `examples`, and a quarter as many to `test`.
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

    def make(count):
        y = rng.integers(0, classes, count).astype("int32")
        return patterns[y] + noise * rng.normal(size=(count, *shape)).astype("float32"), y

    return {"train": make(examples), "test": make(max(1, examples // 4))}


def _own(experiment: config.Experiment, splits: dict) -> Loaded:
    def split(field: str, name: str) -> Arrays:
        if name not in splits:
            raise UserError(f"unknown {field} {name!r}{field_syntax.suggest(name, tuple(splits))}")
        return Arrays(splits[name])

    return _described(
        split("data.train_split", experiment.data.train_split),
        split("data.eval_split", experiment.data.eval_split),
    )


def _of_table(experiment: config.Experiment, path: str, options: dict, say: Callable[[str], None]) -> Loaded:
    from tfdist.data.datasets import tables

    data = experiment.data
    made = tables.prepare(path, options, (data.train_split, data.eval_split), data.broken == "skip", say)
    train, evaluation = Arrays(made.train), Arrays(made.eval)
    spec = Spec((len(made.columns),), "float32", made.classes, 1.0, made.names, made.columns, made.target)
    return Loaded(train, evaluation, train.size, spec)


def _of_folder(experiment: config.Experiment, path: str, options: dict, say: Callable[[str], None]) -> Loaded:
    from tfdist.data.datasets import image_folder

    data = experiment.data
    if options:
        raise UserError(f"data.options={data.options!r} is for functions, image_folder takes none")
    size = field_syntax.image_size(data.image_size)
    from_whole = ops.parse(data.augment).smallest is not None
    found = image_folder.load(path, data.train_split, data.eval_split, data.broken, size, data.resize, from_whole, say)
    shape = size or found.size
    if shape is None:
        raise UserError("data.image_size is needed, since the images have different sizes: write one such as 224")

    train = _held(found.train, data, shape, from_whole)
    spec = Spec((*shape, 3), "uint8", len(found.names), 255.0, found.names)
    return Loaded(train, _held(found.eval, data, shape), found.train.size, spec)


def _of_tfrecords(experiment: config.Experiment, path: str, options: dict, say: Callable[[str], None]) -> Loaded:
    from tfdist.data.datasets import tfrecords

    data = experiment.data
    splits = {"data.train_split": data.train_split, "data.eval_split": data.eval_split}
    size = field_syntax.image_size(data.image_size)
    found = tfrecords.load(path, splits, options, data.broken == "skip", say, size is not None)
    if found.dtype != "uint8":
        size = None
    shape = found.shape if size is None else (*size, found.shape[-1])
    from_whole = size is not None and ops.parse(data.augment).smallest is not None
    train = _held(found.train, data, size, from_whole)
    spec = Spec(shape, found.dtype, found.classes, 255.0 if found.dtype == "uint8" else 1.0)
    return Loaded(train, _held(found.eval, data, size), found.train.size, spec)


def _held(source: Records, data: config.Data, size: tuple[int, int] | None, whole: bool = False) -> Source:
    """Images made `size`, unless they are needed whole, and in memory if they fit."""
    if whole:
        if data.cache == "memory":
            raise UserError("data.cache=memory holds images of one size, and resized_crop needs them whole: use auto")
        return source
    made = source if size is None else image_sources.sized(source, size, data.resize)
    return image_sources.in_memory(made) if _in_memory(image_sources.size_in_memory(made), data.cache) else made


def _of_text(experiment: config.Experiment, path: str, options: dict) -> Loaded:
    from tfdist.data.datasets import text

    data = experiment.data
    memory = {"memory": math.inf, "stream": 0.0, "auto": _memory()}[data.cache]
    splits = {"data.train_split": data.train_split, "data.eval_split": data.eval_split}
    train, evaluation = user_functions.call("data.options", text.load, options, path, splits, memory)
    shape = (options.get("length", text.LENGTH),)
    return Loaded(train, evaluation, train.size, Spec(shape, "int32", text.VOCABULARY, text.VOCABULARY - 1.0))


def _of_function(experiment: config.Experiment, function: Callable, options: dict) -> Loaded:
    """`function(split=..., batch_size=..., **options)`, with what of it the function names."""
    data = experiment.data
    named = inspect.signature(function).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in named.values())

    def split(name: str, batch: int) -> Source:
        offered = {"split": name, "batch_size": batch}
        given = {k: v for k, v in offered.items() if k in named or every}
        source = as_source(user_functions.call("data.options", function, {**given, **options}))
        if isinstance(source, Batches):
            spec = tf.nest.flatten(source.decoded.element_spec)[0].shape
            if spec[0] not in (None, batch):
                raise UserError(
                    f"{data.name} returned batches of {spec[0]} examples for a batch size of {batch}: "
                    "take the argument batch_size and batch by it"
                )
        return source

    return _described(
        split(data.train_split, experiment.train.batch_size), split(data.eval_split, experiment.eval.batch_size)
    )


def _of_tfds(experiment: config.Experiment, prepare: bool) -> Loaded:
    from tfdist.data.datasets import tfds  # not before it is needed: TFDS takes a second to import

    found = tfds.load(experiment, _memory(), prepare)
    for source in (found.train, found.eval):
        if isinstance(source, Arrays) and found.classes is not None:
            check_labels(source.columns[1], found.classes, "the data set")
    spec = Spec(found.shape, found.dtype, found.classes, found.maximum, found.names)
    return Loaded(found.train, found.eval, found.examples, spec)


def _in_memory(size: float, cache: str) -> bool:
    """Whether a decoded split of `size` bytes is held in memory."""
    if cache != "auto":
        return cache == "memory"
    return size < _memory()


def _memory() -> float:
    """Bytes that a split may take in memory."""
    return MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _described(train: Source, evaluation: Source) -> Loaded:
    if isinstance(train, Batches):
        raise UserError(
            "a data function must return arrays, or its number of examples stays unknown: "
            "return NumPy arrays, or use the Python API (tfdist.fit) with a tf.data.Dataset"
        )
    classes, maximum = None, 1.0
    if isinstance(train, Records):
        first = tf.nest.flatten(in_order(train, 1).element_spec)[0]
        shape, dtype, y = tuple(first.shape[1:]), np.dtype(first.dtype.as_numpy_dtype), train.labels
        if dtype == np.uint8:
            maximum = 255.0
    else:
        first, y = tf.nest.flatten(train.columns[0])[0], targets_of(train)
        shape, dtype = np.shape(first)[1:], np.dtype(first.dtype)
        if dtype.kind in "fui":
            maximum = float(first.max()) or 1.0
    if y is not None and not tf.nest.is_nested(y) and np.issubdtype(y.dtype, np.integer):
        classes = int(y.max()) + 1
        for source in (train, evaluation):
            targets = source.labels if isinstance(source, Records) else targets_of(source)
            if targets is not None and not tf.nest.is_nested(targets):
                check_labels(targets, classes, "the data set")
    return Loaded(train, evaluation, train.size, Spec(tuple(shape), dtype.name, classes, maximum))
