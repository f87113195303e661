"""Data sets by name: TFDS, the ones that tfdist makes or packages, and the user's own functions."""

from __future__ import annotations

import dataclasses
import os
import zlib
from typing import Any

import tensorflow as tf

from tfdist import config
from tfdist.config import field_syntax, validation
from tfdist.data import bucket_files, image_sources
from tfdist.data.augmentation import ops
from tfdist.data.datasets import formats
from tfdist.data.loaded import Loaded
from tfdist.data.sources import one_hot
from tfdist.errors import UserError


def load(experiment: config.Experiment, prepare: bool = True, hold_out: bool = True) -> Loaded:
    """Loads the experiment's data set, preparing it first where TFDS must.

    Args:
      prepare: False to refuse one that would have to be downloaded first.
      hold_out: evaluate on a tenth of an image folder that has no splits, and train on the rest.

    Raises:
      UserError: unknown name or split, no examples, labels out of range, or
        data that would have to be downloaded and cannot be.
    """
    here = dataclasses.replace(experiment, data=bucket_files.here(experiment.data, prepare))
    loaded = formats.load(here, prepare, hold_out)
    if experiment.data.cache == "stream" and loaded.train.columns is not None:
        raise UserError(f"data.cache=stream: {experiment.data.name} can only be read into memory as a whole: use auto")
    return _pictured(experiment, loaded)


def facts(loaded: Loaded) -> dict[str, object]:
    """Returns `Source.facts` of the training split, with what the model is built for."""
    spec = loaded.spec
    known = [spec.names, [(c.name, c.kind, c.vocabulary) for c in (*spec.columns, *filter(None, [spec.target]))]]
    return {
        **loaded.train.facts(),
        "shape": list(spec.shape),
        "classes": spec.classes,
        "checksum of names": zlib.crc32(repr(known).encode()),
    }


def load_data(name: str, *, batch_size: int = 32, seed: int = 0, **options: object) -> Loaded:
    """Loads a data set by name, for `tfdist.fit`, `evaluate` and `predict`; to be called after `tfdist.connect`.

    Args:
      name: what `data.name` of an experiment may be: `image_folder:/path`, `csv:/path`, a TFDS name, ...
      batch_size: global batch of what can only be read as a stream.
      seed: decides the order of such a stream.
      **options: the other fields of `tfdist.config.Data`, such as `train_split="train[:90%]"`, `image_size=64`.

    Returns:
      A source for training, `train`, one for evaluation, `eval`, and what a model must know of them, `spec`. Classes
      are numbers, or one-hot rows where `augment` mixes examples.

    Raises:
      UserError: whatever the command would refuse.
    """
    known = {f.name for f in dataclasses.fields(config.Data)} - {"name", "shuffle"}  # fit shuffles what it can
    if unknown := sorted(set(options) - known - set(config.FORMER_NAMES)):
        raise UserError(
            f"load_data() has no option {unknown[0]!r}{field_syntax.suggest(unknown[0], tuple(sorted(known)))}"
        )
    texts: dict[str, Any] = {k: os.fspath(v) if isinstance(v, os.PathLike) else v for k, v in options.items()}
    if type(texts.get("image_size")) is int:
        texts["image_size"] = str(texts["image_size"])
    experiment = config.Experiment(seed=seed, data=config.Data(name=name, **texts))
    experiment.train.batch_size = experiment.eval.batch_size = batch_size
    loaded = load(validation.validate(experiment))
    if loaded.train.mixes and loaded.spec.classes:
        train, evaluation = (one_hot(source, loaded.spec.classes) for source in (loaded.train, loaded.eval))
        return dataclasses.replace(loaded, train=train, eval=evaluation)
    return loaded


def _pictured(experiment: config.Experiment, loaded: Loaded) -> Loaded:
    """Makes the images one size and, to train on, changes them at random."""
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
    images = None if train.columns is None else train.columns[0]
    if tf.nest.is_nested(images) and not spec.columns:
        field = "data.image_size" if data.augment == "" else "data.augment"
        raise UserError(f"{field} is for data whose input is one array of images, and this has several: leave it empty")
    lowest = 0.0 if images is None or len(shape) != 3 else float(images.min())
    recipe.check(shape, spec.dtype, spec.classes, lowest)
    if size is not None and spec.shape[:2] != size:
        evaluation = image_sources.resized(evaluation, size, data.resize)
        if recipe.smallest is None:  # a crop that is resized is cut from the whole image
            train = image_sources.resized(train, size, data.resize)
    if data.augment:
        train = image_sources.augmented(train, recipe, (shape[0], shape[1]))
    return dataclasses.replace(loaded, train=train, eval=evaluation, spec=dataclasses.replace(spec, shape=shape))
