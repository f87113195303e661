"""Data sets of TFDS: prepared where they are not, and read into memory, by number, or as a stream."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import logging
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from tfdist import config
from tfdist.config import field_syntax
from tfdist.data.augmentation.ops import parse, resize
from tfdist.data.record_feed import in_order
from tfdist.data.sources import Arrays, Batches, Records, Source
from tfdist.errors import UserError, one_line

_BY_NUMBER = tfds.core.FileFormat.ARRAY_RECORD
"""The format that TFDS reads by number."""

_READ = 256
"""Examples that are decoded at a time on their way into memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Both splits, and what TFDS knows of them."""

    train: Source
    eval: Source
    examples: int
    classes: int | None
    maximum: float
    names: tuple[str, ...]
    shape: tuple[int, ...]
    """Of one input, once images of all sizes have one."""
    dtype: str


def load(experiment: config.Experiment, memory: float, prepare: bool = True) -> Found:
    """The data set `data.name`, prepared first where that is still to be done.

    A split that fits is read into memory. Else, one in `array_record` is read by
    number, which needs no shuffle buffer and goes on anywhere at once, and one
    in another format as a stream. What is prepared here and will not fit is
    written as `array_record`.

    Args:
      memory: bytes that a split may take when `data.cache` is `auto`.
      prepare: False to refuse one that would have to be downloaded first.

    Raises:
      UserError: unknown name or split, an empty one, no targets, images without
        a size, or data that would have to be downloaded and cannot be.
    """
    data = experiment.data
    _quieten()
    builder = _builder(data.name, os.path.expanduser(data.data_dir) or None)
    if not (prepare or os.path.isdir(builder.data_dir) or type(builder).__module__.startswith("tfdist.")):
        raise UserError(
            f"data set {data.name!r} is not in {builder.data_dir} yet, and a dry run downloads nothing: "
            "leave out --dry_run, or prepare it first"
        )
    if not os.path.isdir(builder.data_dir):
        _prepare(builder, data.name, _will_not_fit(builder, data.cache, memory))
    info = builder.info
    keys = info.supervised_keys
    if not keys or not all(isinstance(key, str) for key in keys):
        raise UserError(
            f"data set {data.name!r} does not say which feature is the target: wrap it in a package.module:function"
        )
    inputs = info.features[keys[0]].get_tensor_spec()
    size, shape = field_syntax.image_size(data.image_size), inputs.shape
    if not shape.is_fully_defined():
        if not isinstance(info.features[keys[0]], tfds.features.Image) or not shape[-1]:
            raise UserError(
                f"{keys[0]!r} of {data.name} has another shape in each example: wrap it in a package.module:function"
            )
        if not size:
            raise UserError(f"the images of {data.name} have different sizes: set data.image_size, such as 224")
        shape = tf.TensorShape([*size, shape[-1]])
    parts = tfds.features.FeaturesDict({key: info.features[key] for key in keys})

    def split(field: str, name: str, batch: int) -> Source:
        try:
            count = info.splits[name].num_examples
        except (KeyError, ValueError, AssertionError):
            raise UserError(f"unknown {field} {name!r}: {data.name} has {', '.join(info.splits)}") from None
        if not count:
            raise UserError(f"{field}={name!r} of {data.name} is empty: choose a split with examples")
        fits = data.cache == "memory" or (data.cache == "auto" and _bytes(parts, info.splits[name]) < memory)
        if info.file_format == _BY_NUMBER:
            # A crop that is resized is cut from the whole image, by whoever augments.
            whole = field == "data.train_split" and parse(data.augment).smallest is not None
            to = None if _fixed(parts) or whole else tuple(shape[:2])
            source = _records(builder, name, parts, keys, to, data.resize)
            return _in_memory(source) if fits and _fixed(parts) else source
        if fits and _fixed(parts):
            table = builder.as_dataset(split=name, batch_size=-1, as_supervised=True, shuffle_files=False)
            return Arrays(tuple(tfds.as_numpy(table)))
        stored, decode = _stored(info.features, keys, tf.TensorSpec(shape, inputs.dtype), data.resize)
        stream = builder.as_dataset(split=name, as_supervised=True, shuffle_files=False, decoders=stored)
        if field == "data.train_split" and data.shuffle:
            buffer = min(count, 16 * batch + 10_000)
            stream = stream.shuffle(buffer, seed=experiment.seed, reshuffle_each_iteration=True)
        return Batches(stream.batch(batch), decode)

    target = info.features[keys[1]]
    return Found(
        split("data.train_split", data.train_split, experiment.train.batch_size),
        split("data.eval_split", data.eval_split, experiment.eval.batch_size),
        info.splits[data.train_split].num_examples,
        getattr(target, "num_classes", None),
        # Of the data set and not of the split in memory, so that a stream is scaled alike.
        getattr(builder, "MAXIMUM", 255.0),
        tuple(getattr(target, "names", None) or ()),
        tuple(shape),
        np.dtype(inputs.dtype.as_numpy_dtype).name,
    )


def _builder(name: str, data_dir: str | None) -> Any:
    if name == "digits":
        from tfdist.data.datasets import digits  # noqa: F401  registers the builder with TFDS
    try:
        return tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError:
        names = (*config.DATASETS, *tfds.list_builders(with_community_datasets=False))
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}? Else" if near else "see https://www.tensorflow.org/datasets/catalog, or"
        raise UserError(f"unknown data.name {name!r}: {hint} write package.module:function") from None
    except ValueError as error:
        kind, colon, _ = name.partition(":")
        near = difflib.get_close_matches(kind, config.FILES, n=1) if colon else []
        hint = f": did you mean {near[0]}:?" if near else f": {_line(error)}"
        raise UserError(f"data.name={name!r} is not accepted by TFDS{hint}") from None


def _prepare(builder: Any, name: str, by_number: bool) -> None:
    """Downloads and prepares, which TFDS does atomically."""
    by_hand, folder = builder.MANUAL_DOWNLOAD_INSTRUCTIONS, os.path.join(builder.data_dir_root, "downloads", "manual")
    if by_hand and not (os.path.isdir(folder) and os.listdir(folder)):
        raise UserError(
            f"data set {name!r} has to be downloaded by hand, from {builder.info.homepage}, into {folder}: "
            f"{_line(by_hand, 600)}"
        )
    command = f"tfds build {name}" + " --file_format=array_record" * by_number
    elsewhere = f"run `{command}` where there is a network, copy what it makes, and set data.data_dir"
    if host := _unreachable(builder):
        raise UserError(
            f"data set {name!r} is not in {builder.data_dir} and cannot be downloaded: {host} is not found: {elsewhere}"
        )
    print(f"tfdist: preparing the data set {name} in {builder.data_dir}", flush=True)
    kind = {"file_format": _BY_NUMBER} if by_number else {}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare(**kind)
    except Exception as error:  # TFDS lets through whatever its downloads raise
        if isinstance(error, OSError) and error.filename:
            raise UserError(f"data.data_dir is not usable: {_line(error)}: choose another folder") from error
        if by_hand:
            elsewhere = f"put into {folder} what TFDS asks for: {_line(by_hand, 600)}"
        raise UserError(
            f"data set {name!r} cannot be prepared in {builder.data_dir}: {_line(error)}: {elsewhere}"
        ) from error


def _unreachable(builder: Any) -> str:
    """A host that downloads need, when there is no network at all; TFDS itself tries for three minutes."""
    hosts = {urllib.parse.urlsplit(url).hostname for url in builder.url_infos or {}} - {None}
    have = os.path.join(builder.data_dir_root, "downloads")  # TFDS takes what was downloaded once
    if not hosts or urllib.request.getproxies() or (os.path.isdir(have) and os.listdir(have)):
        return ""
    for host in sorted({*hosts, "storage.googleapis.com"}):  # where TFDS has copies of some
        with contextlib.suppress(OSError):
            socket.getaddrinfo(host, 443)
            return ""
    return min(hosts)


def _will_not_fit(builder: Any, cache: str, memory: float) -> bool:
    """Whether a set that is not prepared yet, and so of unknown size, is one to read by number."""
    if cache != "auto":
        return cache == "stream"
    # What is downloaded is at least compressed; images of all sizes are not kept in memory at all.
    known = sum(info.size for info in (builder.url_infos or {}).values() if info.size)
    return not _fixed(builder.info.features) or known > memory


def _fixed(features: Any) -> bool:
    return all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(features.get_tensor_spec()))


def _bytes(features: Any, split: Any) -> int:
    """Bytes of a decoded split, if its shapes are known; texts count as they are stored."""
    specs = tf.nest.flatten(features.get_tensor_spec())
    decoded = sum((spec.shape.num_elements() or 0) * max(1, spec.dtype.size) for spec in specs)
    return max(decoded * split.num_examples, split.num_bytes if any(s.dtype == tf.string for s in specs) else 0)


def _records(
    builder: Any, split: str, features: Any, keys: tuple[str, ...], size: tuple[int, int] | None, policy: str
) -> Records:
    """Args: size: that images are made, or None."""
    raw = builder.as_data_source(split=split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)

    def get(rows: np.ndarray) -> np.ndarray:
        return np.array(raw.__getitems__(rows.tolist()), object)

    def decode(serialized: Any, seed: Any) -> tuple:
        del seed  # nothing in it is random
        example = features.deserialize_example(serialized)
        x, *rest = (example[key] for key in keys)
        return x if size is None else resize(x, size, policy), *rest

    read: Callable[[Any], Any] = lambda rows: tf.ensure_shape(tf.numpy_function(get, [rows], tf.string), [None])
    return Records(len(raw), read, decode, name=f"example {{}} of {builder.name} {split}".format)


def _in_memory(source: Records) -> Arrays:
    batches = in_order(source, _READ).as_numpy_iterator()
    return Arrays(tuple(np.concatenate(column) for column in zip(*batches)))


def _stored(features: Any, keys: tuple, spec: Any, policy: str) -> tuple[dict, Any]:
    """How to read images as they are stored, and the function that decodes a batch of them to `spec`.

    Shuffled as JPEGs they take a tenth of the memory, and each worker decodes only its own rows.
    """
    image = features[keys[0]]
    if not isinstance(image, tfds.features.Image):
        return {}, None

    def decode(x: Any, *rest: Any) -> tuple:
        one = lambda stored: resize(image.decode_example(stored), spec.shape[:2], policy)
        if image.get_tensor_spec().shape.is_fully_defined():
            one = image.decode_example
        return (tf.map_fn(one, x, fn_output_signature=spec), *rest)

    return {keys[0]: tfds.decode.SkipDecoding()}, decode


def _quieten() -> None:
    tfds.disable_progress_bar()
    logging.getLogger("absl").addFilter(_quiet)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # a warning of three lines for each retry of a download


def _quiet(record: logging.LogRecord) -> bool:
    """Lets TFDS' chatter about folders and file formats pass only when it is a warning."""
    return record.levelno >= logging.WARNING or "tensorflow_datasets" not in record.pathname


def _line(error: BaseException | str, length: int = 300) -> str:
    return one_line(error, length) or type(error).__name__
