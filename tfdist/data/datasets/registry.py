"""Data sets by name: one case of `_stored` for each format that `data.name` can have."""

import contextlib
import dataclasses
import inspect
import math
import os
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdist import config
from tfdist.cluster.peers import Peers
from tfdist.config import buckets, field_syntax, user_functions, validation
from tfdist.config.runtime_options import checked_keywords
from tfdist.data import loaded as loaded_lib
from tfdist.data import python_examples, spec_file
from tfdist.data.arrays import Arrays, in_memory, size_in_memory
from tfdist.data.augmentation import ops
from tfdist.data.datasets import array_files, huggingface, image_folder, tables, text, tfrecords
from tfdist.data.loaded import Loaded, described
from tfdist.data.protocol import Source
from tfdist.data.records import Records
from tfdist.data.sources import as_source, one_hot
from tfdist.errors import UserError

_MEMORY_SHARE = 0.25  # share of the machine's memory that `data.cache=auto` lets a decoded split take


def load(experiment: config.Experiment, prepare: bool = True, hold_out: bool = True) -> Loaded:
    """Loads the experiment's data set, preparing it first where TFDS must.

    Args:
      prepare: False to refuse one that would have to be downloaded first.
      hold_out: evaluate on a tenth of an image folder that has no splits, and train on the rest.
    """
    local = dataclasses.replace(experiment, data=buckets.data_here(experiment.data, prepare))
    loaded = _stored(local, prepare, hold_out)
    if experiment.data.cache == "stream" and loaded.train.columns is not None:
        what = f"data.cache=stream: {experiment.data.name} can only be read into memory as a whole"
        raise UserError(what, "use auto")
    return _pictured(experiment, loaded)


def load_together(peers: Peers, data: config.Data, load: Callable[[], Loaded]) -> Loaded:
    """Loads `data` on all workers, each of which calls this with the same `load`.

    It runs first on the chief, then on one worker of each host, and then on those others that cannot share with it. A
    function of the user runs on all of them: it may leave something behind that the model or the loss look at.
    """
    if _is_function(data.name):
        return peers.once(load)
    with contextlib.closing(loaded_lib.SharedTables()) as shared:
        return peers.once(load, shared.offer, loaded_lib.take)


def facts(loaded: Loaded) -> dict[str, object]:
    """Returns `Source.facts` of the training split, with what the model is built for."""
    spec = loaded.spec
    return {**loaded.train.facts(), "shape": list(spec.shape), "classes": spec.classes, **spec_file.facts(spec)}


@checked_keywords
def load_data(
    name: str,
    *,
    batch_size: int = 32,
    seed: int = 0,
    train_split: str = "train",
    eval_split: str = "test",
    data_dir: str | os.PathLike[str] = "",
    cache: str = "auto",
    options: str = "",
    image_size: str | int = "",
    resize: str = "crop",
    augment: str = "",
    on_error: str = "refuse",
) -> Loaded:
    """Loads a data set by name, for `tfdist.fit`, `evaluate` and `predict`; to be called after `tfdist.connect`.

    Args:
      name: what `data.name` of an experiment may be: `image_folder:/path`, `csv:/path`, a TFDS name, ...
      batch_size: global batch of what can only be read as a stream.
      seed: decides the order of such a stream.
      train_split, eval_split, data_dir, cache, options, image_size, resize, augment, on_error: as the fields of
        `tfdist.config.Data`, such as `train_split="train[:90%]"`, `image_size=64`.

    Returns:
      A source for training, `train`, one for evaluation, `eval`, and what a model must know of them, `spec`. Classes
      are numbers, or one-hot rows where `augment` mixes examples.

    Raises:
      UserError: whatever the command would refuse.
    """
    fields = dict(locals(), data_dir=os.fspath(data_dir), image_size=str(image_size))
    del fields["batch_size"], fields["seed"]
    experiment = config.Experiment(seed=seed, data=config.Data(**fields))
    experiment.train.batch_size = experiment.eval.batch_size = batch_size
    loaded = load(validation.validate(experiment))
    if loaded.train.mixes and loaded.spec.classes:
        train, evaluation = (one_hot(source, loaded.spec.classes) for source in (loaded.train, loaded.eval))
        return dataclasses.replace(loaded, train=train, eval=evaluation)
    return loaded


def _is_function(name: str) -> bool:
    """Returns whether a `data.name` is that of a function, `package.module:function`."""
    return field_syntax.files(name) is None and field_syntax.is_reference(name)


def _stored(experiment: config.Experiment, prepare: bool, hold_out: bool) -> Loaded:
    """Loads the data set that `data.name` names, as it is stored: images keep their sizes where they may."""
    data = experiment.data
    options = field_syntax.options("data.options", data.options)
    splits = {"data.train_split": data.train_split, "data.eval_split": data.eval_split}
    size, skip = field_syntax.image_size(data.image_size), data.on_error == "skip"
    match data.name.partition(":"):
        case ["synthetic" | "stdlib_text" as name, "", ""]:
            function = synthetic if name == "synthetic" else text.stdlib_text
            made = user_functions.call("data.options", function, options)
            for field, name in splits.items():
                if name not in made:
                    raise UserError(f"unknown {field} {name!r}{field_syntax.suggest(name, tuple(made))}")
            return described(*(Arrays(made[name]) for name in splits.values()))
        case ["csv" | "parquet" as kind, ":", path]:
            trained_on = spec_file.of_model(experiment.model.name)
            return tables.prepare(path, options, (data.train_split, data.eval_split), skip, kind, trained_on)
        case ["hf", ":", name]:
            return _of_one_size(data, size, huggingface.load(name, splits, options, size is not None, prepare))
        case ["image_folder", ":", path]:
            folder = image_folder.load(path, data, options, size, _crops(data), hold_out)
            height, width, _ = folder.spec.shape
            return _of_one_size(data, (height, width), folder)
        case ["numpy", ":", path]:
            return array_files.load(path, splits, options, lambda size: size < _room(data.cache))
        case ["text", ":", path]:
            return user_functions.call("data.options", text.load, options, path, splits, _room(data.cache))
        case ["tfrecord", ":", path]:
            return _of_one_size(data, size, tfrecords.load(path, splits, options, skip, size is not None))
        case ["webdataset", ":", pattern]:
            return _of_one_size(data, size, huggingface.load_tars(pattern, splits, options, size is not None, prepare))
    if _is_function(data.name):
        return _from_function(experiment, user_functions.resolve("data.name", data.name), options)
    if options:
        raise UserError(f"data.options={data.options!r} is for functions, the TFDS data set {data.name!r} takes none")
    from tfdist.data.datasets import tfds  # which takes a second to import

    return tfds.load(experiment, _room("auto"), prepare)


def synthetic(examples: int = 4096, shape: tuple = (32, 32, 3), classes: int = 10, noise: float = 0.5) -> dict:
    """Makes images of one random pattern per class, under noise: `train` has `examples`, and `test` a quarter as many.

    Args:
      shape: height, width and channels of an image, or any other shape.
      noise: standard deviation of what is added to a pattern, whose own is 1.
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


def _from_function(experiment: config.Experiment, function: Callable, options: field_syntax.Options) -> Loaded:
    """Calls `function(split=..., batch_size=..., **options)`, with what of the first two it names."""
    data, named = experiment.data, inspect.signature(function).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in named.values())
    size = field_syntax.image_size(data.image_size)
    from_whole = size is not None and _crops(data)

    def by_number(made: object, whole: bool) -> Source:
        examples = python_examples.Examples(made, data.name)
        target = size if examples.are_images else None
        held = _held(examples.source(free=target is not None and not whole), data, None if whole else target, whole)
        if isinstance(held, Records) and examples.have_classes:
            return dataclasses.replace(held, labels=examples.labels())
        return held

    def split(name: str, batch: int, whole: bool = False) -> Source:
        offered = {"split": name, "batch_size": batch}
        named_arguments = {k: v for k, v in offered.items() if k in named or every}
        made = user_functions.call("data.options", function, {**named_arguments, **options})
        if python_examples.is_by_number(made):
            return by_number(made, whole)
        source = as_source(made)
        if source.size is None:
            spec = tf.nest.flatten(source.specs)[0].shape
            if spec[0] not in (None, batch):
                what = f"{data.name} returned batches of {spec[0]} examples for a batch size of {batch}"
                raise UserError(what, "take the argument batch_size and batch by it")
        return source

    return described(
        split(data.train_split, experiment.train.batch_size, from_whole),
        split(data.eval_split, experiment.eval.batch_size),
    )


def _crops(data: config.Data) -> bool:
    """Returns whether training images are needed whole, since a crop that is resized is cut from them."""
    return ops.parse(data.augment).smallest is not None


def _of_one_size(data: config.Data, size: tuple[int, int] | None, loaded: Loaded) -> Loaded:
    """Makes what is an image `size`, if there is one, and reads the splits into memory if they fit."""
    spec = loaded.spec
    if spec.dtype != "uint8" or len(spec.shape) != 3:
        size = None
    shape = spec.shape if size is None else (*size, spec.shape[-1])
    train = _held(loaded.train, data, size, size is not None and _crops(data))
    evaluation = _held(loaded.eval, data, size)
    return Loaded(train, evaluation, loaded.examples, dataclasses.replace(spec, shape=shape))


def _held(source: Source, data: config.Data, size: tuple[int, int] | None, whole: bool = False) -> Source:
    """Makes the images `size`, unless they are needed whole, and reads them into memory if they fit."""
    if whole:
        if data.cache == "memory":
            raise UserError("data.cache=memory holds images of one size, and resized_crop needs them whole", "use auto")
        return source
    made: Records = source.by_number("data.image_size")
    if size is not None:
        made = made.map_inputs(lambda x, seed: ops.resize(x, size, data.resize))
    return in_memory(made) if size_in_memory(made) < _room(data.cache) else made


def _room(cache: str) -> float:
    """Returns how many bytes a decoded split may take in memory."""
    memory = _MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"memory": math.inf, "stream": 0.0, "auto": memory}[cache]


def resized(source: Source, size: tuple[int, int], policy: str) -> Arrays | Records:
    """Makes the images of any source `size`; those in memory at once."""
    made = source.by_number("data.image_size").map_inputs(lambda x, seed: ops.resize(x, size, policy))
    return made if source.columns is None else in_memory(made)


def augmented(source: Source, recipe: ops.Recipe, size: tuple[int, int]) -> Records:
    """Changes the images of a source at random, in another way each epoch; they are of this size afterwards."""

    def changed(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        x = recipe.example(x, seed, size)
        return tf.ensure_shape(x, [*size, x.shape[-1]])

    records: Records = source.by_number("data.augment")
    return dataclasses.replace(records.map_inputs(changed), mix=recipe.mix)


def _pictured(experiment: config.Experiment, loaded: Loaded) -> Loaded:
    """Makes the images one size and, to train on, changes them at random."""
    data, spec = experiment.data, loaded.spec
    size, recipe = field_syntax.image_size(data.image_size), ops.parse(data.augment, spec.maximum)
    if size is None and not data.augment:
        return loaded
    if size is not None and len(spec.shape) != 3:
        raise UserError(
            f"data.image_size={data.image_size!r} is for images [height, width, channels], "
            f"and this data has shape {list(spec.shape)}",
            "leave it empty",
        )
    shape = spec.shape if size is None else (*size, spec.shape[-1])
    train, evaluation = loaded.train, loaded.eval
    images = None if train.columns is None else train.columns[0]
    if tf.nest.is_nested(images) and not spec.columns:
        field = "data.image_size" if data.augment == "" else "data.augment"
        what = f"{field} is for data whose input is one array of images, and this has several"
        raise UserError(what, "leave it empty")
    lowest = 0.0 if images is None or len(shape) != 3 else float(images.min())
    recipe.check(shape, spec.dtype, spec.classes, lowest)
    if size is not None and spec.shape[:2] != size:
        evaluation = resized(evaluation, size, data.resize)
        if recipe.smallest is None:  # a crop that is resized is cut from the whole image
            train = resized(train, size, data.resize)
    if data.augment:
        train = augmented(train, recipe, (shape[0], shape[1]))
    return dataclasses.replace(loaded, train=train, eval=evaluation, spec=dataclasses.replace(spec, shape=shape))
