"""`tfrecord:/pattern`: examples in TFRecord files, read by number, their features as the experiment says."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import tensorflow as tf

from tfdist.config.field_syntax import Options, check_whole, suggest
from tfdist.config.messages import logger
from tfdist.data import image_decoding
from tfdist.data.datasets import tfrecord_index
from tfdist.data.records import UNREADABLE, reason
from tfdist.data.sources import Records
from tfdist.data.splits import named, select
from tfdist.errors import UserError

TYPES = ("jpeg", "png", "int64", "float32")
_WRITTEN = re.compile(r"^(\w+)(?:\[([\d, ]+)\])?$")
_NAMED = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Feature:
    """One feature of an example."""

    name: str
    kind: str
    shape: tuple[int, ...] = ()

    @property
    def is_image(self) -> bool:
        return self.kind in ("jpeg", "png")

    @property
    def parser(self) -> tf.io.FixedLenFeature:
        dtype = tf.string if self.is_image else tf.int64 if self.kind == "int64" else tf.float32
        return tf.io.FixedLenFeature(self.shape, dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class TFRecordSplits:
    """Both splits, and what a model must know."""

    train: Records
    eval: Records
    shape: tuple[int, ...]
    """Shape of an input; images have that of the first one."""
    dtype: str
    classes: int | None


def load(
    path: str,
    splits: dict[str, str],
    options: Options,
    skip: bool = False,
    free: bool = False,
) -> TFRecordSplits:
    """Finds the records of the files, and checks the first one.

    Args:
      path: a file, a pattern, or a folder, see `tfrecord_index.files`.
      splits: those for training and evaluation, by the field that asks for each.
      options: the features, in the order x, y, weight: `image=jpeg, label=int64`. Types are `jpeg`, `png`, `int64` and
        `float32`, the last two with a shape in quotes where they have one: `x='float32[28, 28, 1]'`. Besides
        `classes=10` where y is int64, `channels=1` for images that are not to be RGB, and `max_pixels=N` to allow
        larger ones than `image_decoding.MOST_PIXELS`, or fewer.
      skip: read all records now, and leave out those that are damaged, and what lies behind damage in a file, instead
        of refusing them. Else a damaged record is an error once it is read.
      free: images are made one size later; otherwise all must have the size of the first.

    Raises:
      UserError: no files or records, damaged ones, or features that are not in the first record.
    """
    features, classes, pictures = _features(options)
    by_split = tfrecord_index.files(path)
    wanted = named(splits.values())
    indexes = {name: tfrecord_index.index(paths, skip) for name, paths in by_split.items() if name in wanted}
    bad = [problem for index in indexes.values() for problem in index.broken]
    if bad:
        more = f", and {len(bad) - _NAMED} more files" if len(bad) > _NAMED else ""
        line = "; ".join(bad[:_NAMED]) + more
        if not skip:
            raise UserError(f"{line}: write them again, or leave out what is lost with data.on_error=skip")
        logger.info(f"WARNING: {line}: left out")
    sizes = {name: len(indexes[name].offsets) if name in indexes else 0 for name in by_split}
    sources: list[Records] = []
    shape = features[0].shape
    for field, text in splits.items():
        parts = [(indexes[name], rows) for name, rows in select(text, sizes, field, f"tfrecord:{path}")]
        if not sources:
            where = parts[0][0].name(int(parts[0][1][0]))
            try:
                first = parts[0][0].read(parts[0][1][:1])[0]
            except OSError as error:
                raise UserError(
                    f"{where} cannot be read: {reason(error)}: mend or remove it, or set data.on_error=skip"
                ) from None
            _check(first, features, where)
            if features[0].is_image:
                shape = _image_shape(first, features[0], pictures, where)
        sources.append(_records(parts, features, classes, pictures, None if free else shape))
    dtype = {"int64": "int32", "float32": "float32"}.get(features[0].kind, "uint8")
    return TFRecordSplits(sources[0], sources[1], shape, dtype, classes)


def _features(options: Options) -> tuple[list[Feature], int | None, image_decoding.Pictures]:
    numbers = {name: options[name] for name in ("classes", "channels", "max_pixels") if name in options}
    for name, value in numbers.items():
        check_whole(f"data.options: {name}", value)
    features = [_feature(name, text) for name, text in options.items() if name not in numbers]
    if not 2 <= len(features) <= 3:
        raise UserError(
            "data.options of tfrecord: names the features x, y and perhaps weight, in this order, with their types: "
            "write it like image=jpeg, label=int64, classes=10"
        )
    target, classes = features[1], numbers.get("classes")
    if target.is_image or (target.kind == "int64") != (classes is not None):
        raise UserError(
            f"data.options: the second feature, {target.name}, is the target: "
            "int64 together with classes=N for classes, or float32 without"
        )
    if any(f.is_image or f.kind != "float32" for f in features[2:]):
        raise UserError(f"data.options: the third feature, {features[2].name}, is the weight: float32")
    most = numbers.get("max_pixels", image_decoding.MOST_PIXELS)
    return features, classes, image_decoding.Pictures(numbers.get("channels", 3), most)


def _feature(name: str, text: object) -> Feature:
    written = _WRITTEN.match(text) if isinstance(text, str) else None
    if not written:
        raise UserError(
            f"data.options: {name}={text!r} is no type: write one of {', '.join(TYPES)}, or 'float32[8, 8, 1]'"
        )
    kind, shape = written.groups()
    if kind == "string":
        raise UserError(f"data.options: {name}=string cannot be trained on: write jpeg or png, or leave it out")
    if kind not in TYPES:
        raise UserError(f"data.options: unknown type {kind!r} of {name}{suggest(kind, TYPES)}")
    feature = Feature(name, kind, tuple(int(n) for n in shape.split(",") if n.strip()) if shape else ())
    if feature.is_image and shape:
        raise UserError(f"data.options: {name}={text!r}: an image has its shape from data.image_size")
    return feature


def _check(record: bytes, features: list[Feature], where: str) -> None:
    """Compares the first record with what the experiment says."""
    try:
        there = tf.train.Example.FromString(record).features.feature
    except Exception:  # protobuf has its own errors in each of its versions
        raise UserError(f"{where} is no tf.train.Example: only those can be read") from None
    kinds = {name: value.WhichOneof("kind") or "empty" for name, value in there.items()}
    listed = ", ".join(f"{name} ({kind.removesuffix('_list')})" for name, kind in sorted(kinds.items()))
    for feature in features:
        wanted = "bytes_list" if feature.is_image else "int64_list" if feature.kind == "int64" else "float_list"
        if feature.name not in kinds:
            raise UserError(f"data.options: there is no feature {feature.name!r} in {where}: it has {listed}")
        if kinds[feature.name] != wanted:
            raise UserError(f"data.options: {feature.name}={feature.kind} does not fit {where}, which has {listed}")
        count = len(getattr(there[feature.name], wanted).value)
        if count != int(np.prod(feature.shape)):
            raise UserError(
                f"data.options: {feature.name} has {count} values in {where}: give its shape, "
                f"such as {feature.name}='{feature.kind}[{count}]'"
            )


def _image_shape(record: bytes, feature: Feature, pictures: image_decoding.Pictures, where: str) -> tuple[int, ...]:
    try:
        with tf.device("CPU:0"):
            stored = tf.io.parse_single_example(record, {feature.name: feature.parser})[feature.name]
            return tuple(_pixels(stored, feature, pictures).shape)
    except UNREADABLE as error:
        raise UserError(f"{feature.name} of {where} cannot be decoded: {reason(error)}") from None


def _pixels(stored: tf.Tensor, feature: Feature, pictures: image_decoding.Pictures) -> tf.Tensor:
    decode = tf.io.decode_jpeg if feature.kind == "jpeg" else tf.io.decode_png
    return decode(image_decoding.bounded(stored, pictures.most), pictures.channels)


def _records(
    parts: list[tuple[tfrecord_index.TFRecordIndex, np.ndarray]],
    features: list[Feature],
    classes: int | None,
    pictures: image_decoding.Pictures,
    shape: tuple[int, ...] | None,
) -> Records:
    ends = np.cumsum([len(rows) for _, rows in parts])

    def place(number: int) -> tuple[tfrecord_index.TFRecordIndex, int]:
        part = int(np.searchsorted(ends, number, "right"))
        index, rows = parts[part]
        return index, int(rows[number - (ends[part] - len(rows))])

    def get(numbers: np.ndarray) -> np.ndarray:
        records = np.empty(len(numbers), object)
        for i, number in enumerate(numbers.tolist()):
            index, row = place(number)
            records[i] = index.read(np.array([row]))[0]
        return records

    def decode(record: tf.Tensor, seed: tf.Tensor) -> tuple:
        del seed  # nothing in it is random
        values = tf.io.parse_single_example(record, {f.name: f.parser for f in features})
        x, y, *weight = (values[f.name] for f in features)
        if features[0].is_image:
            x = _pixels(x, features[0], pictures)
            x = x if shape is None else tf.ensure_shape(x, shape)
        elif features[0].kind == "int64":
            whole, x = x, tf.cast(x, tf.int32)
            line = f"{features[0].name} has a number that int32 does not hold"
            check = tf.debugging.assert_equal(tf.cast(x, tf.int64), whole, line)
            with tf.control_dependencies([check] if check is not None else []):
                x = tf.identity(x)
        if classes is not None:
            # A GPU would train on NaN instead of failing.
            line = f"{features[1].name} is not in 0 to {classes - 1} (classes={classes})"
            checks = [tf.debugging.assert_non_negative(y, line), tf.debugging.assert_less(y, np.int64(classes), line)]
            with tf.control_dependencies([check for check in checks if check is not None]):
                y = tf.cast(y, tf.int32)
        for w in weight:
            line = f"{features[2].name} is negative, NaN or infinite"
            checks = [tf.debugging.assert_non_negative(w, line), tf.debugging.assert_less(w, np.float32(np.inf), line)]
            with tf.control_dependencies([check for check in checks if check is not None]):
                weight = [tf.identity(w)]
        return x, y, *weight

    def name(number: int) -> str:
        index, row = place(number)
        return index.name(row)

    def read(numbers: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(get, [numbers], tf.string), [None])

    return Records(int(ends[-1]), read, decode, name=name)
