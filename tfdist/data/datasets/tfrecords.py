"""`tfrecord:/pattern`: examples in TFRecord files, read by number, their features as the experiment says.

One look at the lengths of records finds where each begins. The checksum of a length is compared when a file is indexed,
that of a record when it is read.
"""

import concurrent.futures
import dataclasses
import glob
import itertools
import mmap
import os
import re
import struct
import zlib
from collections.abc import Callable, Sequence

import google_crc32c
import numpy as np
import tensorflow as tf

from tfdist.config.field_syntax import Options, check_whole, suggest
from tfdist.config.messages import logger
from tfdist.data.datasets import examples
from tfdist.data.image_decoding import Pictures, bounded
from tfdist.data.loaded import Loaded
from tfdist.data.records import REPAIR, Records, reason
from tfdist.data.spec import Spec
from tfdist.errors import UserError

TYPES = ("jpeg", "png", "int64", "float32")
_WRITTEN = re.compile(r"^(\w+)(?:\[([\d, ]+)\])?$")
_THREADS = 16
_LENGTH, _CHECK = struct.Struct("<Q"), struct.Struct("<I")  # a record's length, and the check of that or of its bytes


@dataclasses.dataclass(frozen=True, slots=True)
class TFRecordIndex:
    """Records of several TFRecord files, compared with their checksums, which follow them, as they are read."""

    paths: tuple[str, ...]
    files: np.ndarray  # int32 [records], places in `paths`
    offsets: np.ndarray  # int64 [records], where a record's bytes begin
    lengths: np.ndarray  # int64 [records], with the checksum
    numbers: np.ndarray  # int64 [records], the number of each in its file
    broken: tuple[str, ...]  # files that are cut off or damaged: where, and what; records before that place are good
    digest: int  # of the checksums of all records

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Reads the bytes of records: object [n]."""
        contents = np.empty(len(rows), object)
        for i, row in enumerate(rows):
            path, length = self.paths[self.files[row]], int(self.lengths[row])
            with open(path, "rb", buffering=0) as file:
                content = os.pread(file.fileno(), length, int(self.offsets[row]))
            if len(content) < length:
                raise OSError(f"{path} has become shorter since the run began")
            contents[i] = content[: -_CHECK.size]
            if not _is_whole(contents[i], content[-_CHECK.size :]):
                raise OSError("its bytes do not match their checksum (CRC-32C)")
        return contents

    def name(self, row: int) -> str:
        return f"record {self.numbers[row]} of {self.paths[self.files[row]]}"


def files(path: str) -> dict[str, list[str]]:
    """Finds the files of each split, sorted, see `splits.by_file_name`; of a folder, all but hidden ones."""
    path = os.path.expanduser(path)
    pattern = os.path.join(glob.escape(path), "*") if os.path.isdir(path) else path
    paths = examples.matching(pattern)
    if not paths:
        what = f"data.name=tfrecord:{path} has no files"
        raise UserError(what, "give a file, a folder, or a pattern such as *.tfrecord")
    return examples.by_file_name(paths)


def index(paths: Sequence[str], thorough: bool = False) -> TFRecordIndex:
    """Finds the records of all files; if `thorough`, reads them now, and leaves out those without their checksums."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        offsets, lengths, numbers, problems, digests = zip(*pool.map(lambda path: _scan(path, thorough), paths))
    return TFRecordIndex(
        tuple(paths),
        np.repeat(np.arange(len(paths), dtype=np.int32), list(map(len, offsets))),
        np.concatenate(offsets),
        np.concatenate(lengths) + _CHECK.size,
        np.concatenate(numbers),
        tuple(itertools.chain(*problems)),
        zlib.crc32(repr(digests).encode()),
    )


def _scan(path: str, thorough: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str], int]:
    """Returns where the records of a file begin, lengths and numbers, all int64 [n], what is damaged, and a digest."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if whole is None:
        return *(np.zeros(0, np.int64),) * 3, [f"{path} is empty"], 0
    problems: list[str] = []
    with whole:
        offsets: list[int] = []
        lengths: list[int] = []
        damaged: list[int] = []
        at = digest = 0
        while at < size and not problems:
            check = at + _LENGTH.size
            start = check + _CHECK.size
            if start <= size and not _is_whole(whole[at:check], whole[check:start]):
                if at == 0:
                    what = f"{path} is not a TFRecord file, or is compressed, and cannot be read by number"
                    raise UserError(what, "give files of tf.io.TFRecordWriter(path), which does not compress")
                problems.append(f"{path} is damaged at byte {at:,}, behind {len(offsets):,} good records")
                continue
            end = start + _LENGTH.unpack_from(whole, at)[0] if start <= size else size
            if end + _CHECK.size > size:
                problems.append(f"{path} is cut off behind {len(offsets):,} records")
                continue
            at = end + _CHECK.size
            digest = zlib.crc32(whole[end:at], digest)
            if thorough and not _is_whole(whole[start:end], whole[end:at]):
                damaged.append(len(offsets))
            offsets.append(start)
            lengths.append(end - start)
    if damaged:
        more = f" and {len(damaged) - 1:,} more of its records do" if len(damaged) > 1 else " does"
        problems.insert(0, f"record {damaged[0]} of {path}{more} not match the checksum (CRC-32C)")
    kept = np.delete(np.arange(len(offsets)), np.array(damaged, np.int64))
    return np.array(offsets, np.int64)[kept], np.array(lengths, np.int64)[kept], kept, problems, digest


def _is_whole(record: bytes, check: bytes) -> bool:
    """Returns whether bytes have the masked CRC-32C that was written behind them."""
    crc = google_crc32c.value(record)
    return _CHECK.pack(((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF) == check


@dataclasses.dataclass(frozen=True, slots=True)
class Feature:
    name: str
    kind: str
    shape: tuple[int, ...] = ()

    is_image = property(lambda self: self.kind in ("jpeg", "png"))

    @property
    def parser(self) -> tf.io.FixedLenFeature:
        dtype = tf.string if self.is_image else tf.int64 if self.kind == "int64" else tf.float32
        return tf.io.FixedLenFeature(self.shape, dtype)


def load(path: str, splits: dict[str, str], options: Options, skip: bool = False, free: bool = False) -> Loaded:
    """Finds the records of the files, and checks the first one.

    Args:
      options: the features, in the order x, y, weight: `image=jpeg, label=int64`. Types are `jpeg`, `png`, `int64` and
        `float32`, the last two with a shape in quotes where they have one: `x='float32[28, 28, 1]'`. Besides
        `classes=10` where y is int64, `channels=1` for images that are not to be RGB, and `max_pixels=N`.
      skip: read all records now, and leave out those that are damaged, and what lies behind damage in a file, instead
        of refusing them. Else a damaged record is an error once it is read.
    """
    features, classes, pictures = _features(options)
    by_split = files(path)
    indexes = {name: index(by_split[name], skip) for name in by_split if name in examples.split_names(splits.values())}
    if broken := [problem for index in indexes.values() for problem in index.broken]:
        what = examples.first_few(broken, "more files")
        if not skip:
            raise UserError(what, "write them again, or leave out what is lost with data.on_error=skip")
        logger.info(f"WARNING: {what}: left out")
    sizes = {name: len(indexes[name].offsets) if name in indexes else 0 for name in by_split}
    train, evaluation = examples.cut_splits(splits, indexes, sizes, f"tfrecord:{path}")
    source, rows = train[0]
    where, x = source.name(int(rows[0])), features[0]
    try:
        first = source.read(rows[:1])[0]
    except OSError as error:
        raise UserError(f"{where} cannot be read: {reason(error)}", f"{REPAIR}, or set data.on_error=skip") from None
    _check(first, features, where)
    shape = x.shape
    if x.is_image:
        image = lambda: _pixels(tf.io.parse_single_example(first, {x.name: x.parser})[x.name], x, pictures)
        shape = tuple(examples.first_input(image, lambda: f"{x.name} of {where}").shape)
    decode = _decoder(features, classes, pictures, None if free else shape)
    stored: dict[str, object] = {"checksum of all records": [index.digest for index in indexes.values()]}
    sources = [
        Records(len(p), p.reader(TFRecordIndex.read), decode, name=p.namer(TFRecordIndex.name), stored=lambda: stored)
        for p in map(examples.Parts, (train, evaluation))
    ]
    dtype = {"int64": "int32", "float32": "float32"}.get(x.kind, "uint8")
    spec = Spec(shape, dtype, classes, 255.0 if dtype == "uint8" else 1.0)
    return Loaded(sources[0], sources[1], sources[0].size, spec)


def _features(options: Options) -> tuple[list[Feature], int | None, Pictures]:
    numbers = {name: options[name] for name in ("classes", "channels", "max_pixels") if name in options}
    for name, value in numbers.items():
        check_whole(f"data.options: {name}", value)
    features = [_feature(name, text) for name, text in options.items() if name not in numbers]
    if not 2 <= len(features) <= 3:
        what = "data.options of tfrecord: names the features x, y and perhaps weight, in this order, with their types"
        raise UserError(what, "write it like image=jpeg, label=int64, classes=10")
    target, classes = features[1], numbers.get("classes")
    if target.is_image or (target.kind == "int64") != (classes is not None):
        raise UserError(
            f"data.options: the second feature, {target.name}, is the target: "
            "int64 together with classes=N for classes, or float32 without"
        )
    if any(f.is_image or f.kind != "float32" for f in features[2:]):
        raise UserError(f"data.options: the third feature, {features[2].name}, is the weight: float32")
    return features, classes, Pictures.of(options)


def _feature(name: str, text: object) -> Feature:
    written = _WRITTEN.match(text) if isinstance(text, str) else None
    if not written:
        what = f"data.options: {name}={text!r} is not a type"
        raise UserError(what, f"write one of {', '.join(TYPES)}, or 'float32[8, 8, 1]'")
    kind, shape = written.groups()
    if kind not in TYPES:
        raise UserError(f"data.options: unknown type {kind!r} of {name}{suggest(kind, TYPES)}")
    feature = Feature(name, kind, tuple(int(n) for n in shape.split(",") if n.strip()) if shape else ())
    if feature.is_image and shape:
        raise UserError(f"data.options: {name}={text!r}: an image has its shape from data.image_size")
    return feature


def _check(record: bytes, features: list[Feature], where: str) -> None:
    """Compares the first record with what the experiment says."""
    try:
        stored = tf.train.Example.FromString(record).features.feature
    except Exception:  # protobuf has its own errors in each of its versions
        raise UserError(f"{where} is not a tf.train.Example: only those can be read") from None
    kinds = {name: value.WhichOneof("kind") or "empty" for name, value in stored.items()}
    listed = ", ".join(f"{name} ({kind.removesuffix('_list')})" for name, kind in sorted(kinds.items()))
    for feature in features:
        kind = "bytes_list" if feature.is_image else "int64_list" if feature.kind == "int64" else "float_list"
        if feature.name not in kinds:
            raise UserError(f"data.options: there is no feature {feature.name!r} in {where}: it has {listed}")
        if kinds[feature.name] != kind:
            raise UserError(f"data.options: {feature.name}={feature.kind} does not fit {where}, which has {listed}")
        count = len(getattr(stored[feature.name], kind).value)
        if count != int(np.prod(feature.shape)):
            what = f"data.options: {feature.name} has {count} values in {where}"
            raise UserError(what, f"give its shape, such as {feature.name}='{feature.kind}[{count}]'")


def _pixels(stored: tf.Tensor, feature: Feature, pictures: Pictures) -> tf.Tensor:
    decode = tf.io.decode_jpeg if feature.kind == "jpeg" else tf.io.decode_png
    return decode(bounded(stored, pictures.most), pictures.channels)


def _decoder(
    features: list[Feature], classes: int | None, pictures: Pictures, shape: tuple[int, ...] | None
) -> Callable[..., tuple]:
    """Returns the `decode` of `Records`."""

    def decode(record: tf.Tensor, seed: tf.Tensor) -> tuple:
        values = tf.io.parse_single_example(record, {f.name: f.parser for f in features})
        x, y, *weight = (values[f.name] for f in features)
        if features[0].is_image:
            x = _pixels(x, features[0], pictures)
            x = x if shape is None else tf.ensure_shape(x, shape)
        elif features[0].kind == "int64":
            whole, x = x, tf.cast(x, tf.int32)
            line = f"{features[0].name} has a number that int32 does not hold"
            x = _checked(x, tf.debugging.assert_equal(tf.cast(x, tf.int64), whole, line))
        if classes is not None:
            # A GPU would train on NaN instead of failing.
            line = f"{features[1].name} is not in 0 to {classes - 1} (classes={classes})"
            low, high = tf.debugging.assert_non_negative(y, line), tf.debugging.assert_less(y, np.int64(classes), line)
            y = tf.cast(_checked(y, low, high), tf.int32)
        for w in weight:
            line = f"{features[2].name} is negative, NaN or infinite"
            low, high = tf.debugging.assert_non_negative(w, line), tf.debugging.assert_less(w, np.float32(np.inf), line)
            weight = [_checked(w, low, high)]
        return x, y, *weight

    return decode


def _checked(value: tf.Tensor, *checks: tf.Operation | None) -> tf.Tensor:
    """Returns the value once these checks have passed, which are None outside of a graph."""
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(value)
