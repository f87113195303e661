"""Data sets of TFDS: prepared where they are not, and read into memory, by number, or as a stream."""

import contextlib
import io
import logging
import os
import pathlib
import random
import re
import socket
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from tfdist import config
from tfdist.config import field_syntax, local_files
from tfdist.data.arrays import Arrays, crc, in_memory
from tfdist.data.augmentation.ops import parse, resize
from tfdist.data.batches import Batches
from tfdist.data.datasets import tfrecords
from tfdist.data.datasets.examples import stored_reader
from tfdist.data.loaded import Loaded
from tfdist.data.protocol import Source
from tfdist.data.records import Records, reason
from tfdist.data.sources import check_labels
from tfdist.data.spec import Spec, Structure
from tfdist.errors import UserError, one_line, shown

BY_NUMBER = tfds.core.FileFormat.ARRAY_RECORD  # the format that TFDS reads by number
LIMIT_S = 24 * 3600.0  # limit for another run that prepares the same data set
_RESOLVING = threading.Lock()


def prepared(data: config.Data, memory: float, prepare: bool) -> tfds.core.DatasetBuilder:
    """Returns the builder of `data.name`, whose files are there; prepared as `array_record` if they will not fit.

    Args:
      memory: bytes that a split may take when `data.cache` is `auto`.
      prepare: False to refuse one that would have to be downloaded first, and to leave nothing behind.
    """
    tfds.disable_progress_bar()
    logging.getLogger("absl").addFilter(_quiet)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # a warning of three lines for each retry of a download
    builder = _builder(data.name, os.path.expanduser(data.data_dir) or None)
    exists, own = os.path.isdir(builder.data_dir), type(builder).__module__.startswith("tfdist.")
    if not (prepare or exists or own):
        what = f"data set {data.name!r} is not in {builder.data_dir} yet, and a dry run downloads nothing"
        raise UserError(what, "leave out --dry_run, or prepare it first")
    if not (prepare or exists):  # the one of tfdist's takes no download, and goes with this process
        builder = _builder(data.name, str(local_files.temporary_folder()))
        _prepare(builder, data.name, _will_not_fit(builder, data.cache, memory))
    elif not exists:
        with _alone(str(builder.data_dir_root), data.name):
            if os.path.isdir(builder.data_dir):  # meanwhile another run has prepared it
                return _builder(data.name, os.path.expanduser(data.data_dir) or None)
            _prepare(builder, data.name, _will_not_fit(builder, data.cache, memory))
    return builder


@contextlib.contextmanager
def _alone(folder: str, name: str) -> Iterator[None]:
    """Serializes runs that prepare a data set: of several, TFDS lets all but the first one fail at their end."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # TFDS has more to say of a folder that cannot be written
            if "://" not in folder:
                os.makedirs(folder, exist_ok=True)
                lock = pathlib.Path(folder, f".{re.sub(r'[^A-Za-z0-9]+', '_', name)}.lock")
                stack.enter_context(local_files.locked(lock, f"another run that prepares {name}", LIMIT_S))
        yield


def is_fixed(features: tfds.features.FeatureConnector) -> bool:
    """Returns whether these features have the same shape in all examples."""
    return all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(features.get_tensor_spec()))


def _builder(name: str, data_dir: str | None) -> tfds.core.DatasetBuilder:
    if name == "digits":
        from tfdist.data.datasets import digits  # noqa: F401  registers the builder with TFDS
    try:
        with _importing_no_features(name):
            return tfds.builder(name, data_dir=data_dir)
    except UserError:
        raise
    except tfds.core.DatasetNotFoundError:
        names = (*config.DATASETS, *tfds.list_builders(with_community_datasets=False))
        known = field_syntax.suggest(name, tuple(dict.fromkeys(names)))
        raise UserError(f"unknown data.name {name!r}{known}, or package.module:function") from None
    except ValueError as error:
        raise UserError(f"data.name={name!r} is not accepted by TFDS: {one_line(error, 300)}") from None
    except Exception as error:  # TFDS lets through whatever reading damaged files raises
        raise UserError(
            f"data set {name!r} cannot be opened: {one_line(error, 300)}",
            "correct the .json files in its folder, or delete it to prepare the data set again",
        ) from error


@contextlib.contextmanager
def _importing_no_features(name: str) -> Iterator[None]:
    """Refuses features of other packages: TFDS imports every module that the files of a data set name for a feature.

    Both a run folder and a data set may come from others. Modules imported already may be used.
    """
    connector = tfds.features.FeatureConnector
    with _RESOLVING:
        resolve = vars(connector)["cls_from_name"]

        def known(cls: type, class_name: str) -> type:
            module = str(class_name).rpartition(".")[0]
            if module and module not in sys.modules and not module.startswith("tensorflow_datasets."):
                raise UserError(
                    f"the data set {name!r} has a feature of class {one_line(class_name, 80)!r}, and only those of "
                    "TFDS are imported",
                    "return the data set from a function that imports it, data.name=package.module:function",
                )
            return resolve.__get__(None, cls)(class_name)

        connector.cls_from_name = classmethod(known)
        try:
            yield
        finally:
            connector.cls_from_name = resolve


def _prepare(builder: tfds.core.DatasetBuilder, name: str, by_number: bool) -> None:
    """Downloads and prepares, which TFDS does atomically."""
    by_hand, folder = builder.MANUAL_DOWNLOAD_INSTRUCTIONS, os.path.join(builder.data_dir_root, "downloads", "manual")
    if by_hand and not (os.path.isdir(folder) and os.listdir(folder)):
        raise UserError(
            f"data set {name!r} has to be downloaded by hand, from {builder.info.homepage}, into {folder}: "
            f"{one_line(by_hand, 600)}"
        )
    command = f"tfds build {name}" + " --file_format=array_record" * by_number
    elsewhere = f"run `{command}` where there is a network, copy what it makes, and set data.data_dir"
    if host := _unreachable(builder):
        raise UserError(
            f"data set {name!r} is not in {builder.data_dir} and cannot be downloaded: {host} is not found: {elsewhere}"
        )
    print(f"tfdist: preparing the data set {name} in {shown(builder.data_dir)}", flush=True)
    drawn = random.getstate()  # TFDS names a folder by it, and the seeds of Keras' layers come from it
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare(**({"file_format": BY_NUMBER} if by_number else {}))
    except Exception as error:  # TFDS lets through whatever its downloads raise
        if isinstance(error, OSError) and error.filename:
            raise UserError(f"data.data_dir is not usable: {one_line(error, 300)}", "choose another folder") from error
        if by_hand:
            elsewhere = f"put into {folder} what TFDS asks for: {one_line(by_hand, 600)}"
        what = f"data set {name!r} cannot be prepared in {builder.data_dir}: {one_line(error, 300)}: {elsewhere}"
        raise UserError(what) from error
    finally:
        random.setstate(drawn)


def _unreachable(builder: tfds.core.DatasetBuilder) -> str:
    """Names a host that downloads need, when there is no network at all; TFDS itself tries for three minutes."""
    hosts = {urllib.parse.urlsplit(url).hostname for url in builder.url_infos or {}} - {None}
    have = os.path.join(builder.data_dir_root, "downloads")  # TFDS takes what was downloaded once
    if not hosts or urllib.request.getproxies() or (os.path.isdir(have) and os.listdir(have)):
        return ""
    for host in sorted({*hosts, "storage.googleapis.com"}):  # where TFDS has copies of some
        with contextlib.suppress(OSError):
            socket.getaddrinfo(host, 443)
            return ""
    return min(hosts)


def _will_not_fit(builder: tfds.core.DatasetBuilder, cache: str, memory: float) -> bool:
    """Returns whether a set that is not prepared yet, and so of unknown size, is to be read by number."""
    if cache != "auto":
        return cache == "stream"
    # What is downloaded is at least compressed; images of all sizes are not kept in memory at all.
    known = sum(info.size for info in (builder.url_infos or {}).values() if info.size)
    return not is_fixed(builder.info.features) or known > memory


# Drops TFDS' records about folders and file formats, except warnings.
_quiet = lambda record: record.levelno >= logging.WARNING or "tensorflow_datasets" not in record.pathname


def load(experiment: config.Experiment, memory: float, prepare: bool = True) -> Loaded:
    """Loads the data set `data.name`, prepared first where that is still to be done.

    A split that fits into `memory` is read into it. Else, one in `array_record` is read by number, which needs no
    shuffle buffer and goes on anywhere at once, and one in another format as a stream. What is prepared here and will
    not fit is written as `array_record`.
    """
    data, builder = experiment.data, prepared(experiment.data, memory, prepare)
    features, keys = builder.info.features, builder.info.supervised_keys
    if not keys or not all(isinstance(key, str) for key in keys):
        what = f"data set {data.name!r} does not say which feature is the target"
        raise UserError(what, "wrap it in a package.module:function")
    inputs = _input_spec(data, features[keys[0]], keys[0])
    try:
        train, evaluation = (_source(experiment, builder, inputs, memory, use) for use in ("train", "eval"))
    except tf.errors.OpError as error:  # of files that are damaged, empty or gone, which it does not name
        problems = [reason(error)]
        if builder.info.file_format == tfds.core.FileFormat.TFRECORD:
            paths = [str(path) for split in builder.info.splits.values() for path in split.filepaths]
            problems = [*tfrecords.index(paths, thorough=True).broken, *problems]
        what = f"data set {data.name!r} in {builder.data_dir} cannot be read: {problems[0]}"
        raise UserError(what, "copy that file again, or delete the folder to prepare the data set again") from error
    target = features[keys[1]]
    spec = Spec(
        tuple(inputs.shape),
        np.dtype(inputs.dtype.as_numpy_dtype).name,
        getattr(target, "num_classes", None),
        # Of the data set and not of the split in memory, so that a stream is scaled alike.
        getattr(builder, "MAXIMUM", 65535.0 if inputs.dtype == "uint16" else 255.0),
        tuple(getattr(target, "names", None) or ()),
    )
    for source in (train, evaluation):
        if spec.classes is not None and source.columns is not None:
            check_labels(source.columns[1], spec.classes, "the data set")
    return Loaded(train, evaluation, builder.info.splits[data.train_split].num_examples, spec)


def _source(
    experiment: config.Experiment, builder: tfds.core.DatasetBuilder, inputs: tf.TensorSpec, memory: float, use: str
) -> Source:
    """Returns the split to use for `train` or `eval`; images of all sizes get that of `inputs`."""
    data, info, keys = experiment.data, builder.info, builder.info.supervised_keys
    field, split = f"data.{use}_split", getattr(data, f"{use}_split")
    try:
        count = info.splits[split].num_examples
    except (KeyError, ValueError, AssertionError):
        raise UserError(f"unknown {field} {split!r}: {data.name} has {', '.join(info.splits)}") from None
    if count <= 0:  # of a slice that ends before it begins
        raise UserError(f"{field}={split!r} of {data.name} is empty", "choose a split with examples")
    columns = tfds.features.FeaturesDict({key: info.features[key] for key in keys})
    fixed = is_fixed(columns)
    fits = data.cache == "memory" or (data.cache == "auto" and _bytes(columns, info.splits[split]) < memory)
    if info.file_format == BY_NUMBER:
        # A crop that is resized is cut from the whole image, by whoever augments.
        whole = use == "train" and parse(data.augment).smallest is not None
        size = None if fixed or whole else tuple(inputs.shape[:2])
        source = _records(builder, split, columns, keys, size, data.resize)
        return in_memory(source) if fits and fixed else source
    if fits and fixed:
        table = builder.as_dataset(split=split, batch_size=-1, as_supervised=True, shuffle_files=False)
        return Arrays(tuple(tfds.as_numpy(table)), 0)
    batch = getattr(experiment, use).batch_size
    decoders, decode = _undecoded(info.features, keys, inputs, data.resize)
    stream = builder.as_dataset(split=split, as_supervised=True, shuffle_files=False, decoders=decoders)
    # By some a resume notices other data; not by files, which on two machines have an example's features in any order.
    stored = {"checksum of the first examples": crc(list(stream.take(256)))}
    if use == "train" and data.shuffle:
        stream = stream.shuffle(min(count, 16 * batch + 10_000), experiment.seed, reshuffle_each_iteration=True)
    return Batches(stream.batch(batch), decode, stored=stored)


def _input_spec(data: config.Data, feature: tfds.features.FeatureConnector, key: str) -> tf.TensorSpec:
    """Returns type and shape of one input as it is trained on: images of different sizes get `data.image_size`."""
    inputs, size = feature.get_tensor_spec(), field_syntax.image_size(data.image_size)
    if not tf.nest.is_nested(inputs) and inputs.shape.is_fully_defined():
        return tf.TensorSpec(inputs.shape, inputs.dtype)
    if not isinstance(feature, tfds.features.Image) or not inputs.shape[-1]:
        what = f"{key!r} of {data.name} is not one tensor of the same shape in each example"
        raise UserError(what, "wrap it in a package.module:function")
    if not size:
        raise UserError(f"the images of {data.name} have different sizes", "set data.image_size, such as 224")
    return tf.TensorSpec([*size, inputs.shape[-1]], inputs.dtype)


def _bytes(features: tfds.features.FeaturesDict, split: tfds.core.SplitInfo) -> int:
    """Returns the bytes of a decoded split, if its shapes are known; texts count as they are stored."""
    specs = tf.nest.flatten(features.get_tensor_spec())
    decoded = sum((spec.shape.num_elements() or 0) * max(1, spec.dtype.size) for spec in specs)
    return max(decoded * split.num_examples, split.num_bytes if any(s.dtype == tf.string for s in specs) else 0)


def _records(
    builder: tfds.core.DatasetBuilder,
    split: str,
    features: tfds.features.FeaturesDict,
    keys: tuple[str, ...],
    size: tuple[int, int] | None,
    policy: str,
) -> Records:
    """Reads a split by number, and makes its images `size` unless that is None."""
    raw = builder.as_data_source(split=split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)

    def get(rows: np.ndarray) -> np.ndarray:
        return np.array(raw.__getitems__(rows.tolist()), object)

    def decode(serialized: tf.Tensor, seed: tf.Tensor) -> tuple:
        example = features.deserialize_example(serialized)
        x, *rest = (example[key] for key in keys)
        return x if size is None else resize(x, size, policy), *rest

    return Records(
        len(raw), stored_reader(get, tf.string), decode, name=f"example {{}} of {builder.name} {split}".format
    )


def _undecoded(
    features: tfds.features.FeaturesDict, keys: tuple, spec: tf.TensorSpec, policy: str
) -> tuple[dict, Callable[..., tuple] | None]:
    """Returns what makes TFDS leave images as they are stored, and what decodes a batch of them to `spec`.

    Shuffled as JPEGs they take a tenth of the memory, and each worker decodes only its own rows.
    """
    image = features[keys[0]]
    if not isinstance(image, tfds.features.Image):
        return {}, None

    def decode(x: tf.Tensor, *rest: Structure) -> tuple:
        one = lambda stored: resize(image.decode_example(stored), spec.shape[:2], policy)
        return (tf.map_fn(one, x, fn_output_signature=spec), *rest)

    return {keys[0]: tfds.decode.SkipDecoding()}, decode
