"""Data sets of TFDS, prepared where they are not, and read into memory, by number, or as a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from tfdist import config
from tfdist.config import field_syntax
from tfdist.data.augmentation.ops import parse, resize
from tfdist.data.datasets.tfds_preparation import BY_NUMBER, is_fixed, prepared
from tfdist.data.sources import Arrays, Batches, Records, Source
from tfdist.data.structures import Structure
from tfdist.errors import UserError

_READ = 256
"""Examples that are decoded at a time on their way into memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class TfdsSplits:
    """Both splits, and what TFDS knows of them."""

    train: Source
    eval: Source
    examples: int
    """Examples in the training split."""
    classes: int | None
    maximum: float
    """Largest value of an input."""
    names: tuple[str, ...]
    """Names of the classes, where they have some."""
    shape: tuple[int, ...]
    """Shape of one input, once images of all sizes have one."""
    dtype: str


def load(experiment: config.Experiment, memory: float, prepare: bool = True) -> TfdsSplits:
    """Loads the data set `data.name`, prepared first where that is still to be done.

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
    reader = _SplitReader(experiment, prepared(data, memory, prepare), memory)
    info, target = reader.info, reader.info.features[reader.keys[1]]
    return TfdsSplits(
        reader.split("data.train_split", data.train_split, experiment.train.batch_size),
        reader.split("data.eval_split", data.eval_split, experiment.eval.batch_size),
        info.splits[data.train_split].num_examples,
        getattr(target, "num_classes", None),
        # Of the data set and not of the split in memory, so that a stream is scaled alike.
        getattr(reader.builder, "MAXIMUM", 255.0),
        tuple(getattr(target, "names", None) or ()),
        tuple(reader.spec.shape),
        np.dtype(reader.spec.dtype.as_numpy_dtype).name,
    )


class _SplitReader:
    """Reads the splits of one prepared data set.

    Raises:
      UserError: it has no targets, or its images have different sizes and are not to be made one.
    """

    def __init__(self, experiment: config.Experiment, builder: tfds.core.DatasetBuilder, memory: float):
        self._experiment, self._memory = experiment, memory
        self.builder, self.info = builder, builder.info
        name, features = experiment.data.name, builder.info.features
        self.keys = builder.info.supervised_keys
        if not self.keys or not all(isinstance(key, str) for key in self.keys):
            raise UserError(
                f"data set {name!r} does not say which feature is the target: wrap it in a package.module:function"
            )
        self.spec = _input_spec(experiment.data, features[self.keys[0]], self.keys[0])
        """Type and shape of one input, once images of all sizes have one."""

        self._columns = tfds.features.FeaturesDict({key: features[key] for key in self.keys})

    def split(self, field: str, name: str, batch: int) -> Source:
        """Returns the source of one split.

        Args:
          field: the experiment's, for messages.
          name: in the syntax of TFDS.
          batch: global batch, if it is read as a stream.
        """
        data, builder = self._experiment.data, self.builder
        count = self._examples(field, name)
        fits = data.cache == "memory" or (
            data.cache == "auto" and _bytes(self._columns, self.info.splits[name]) < self._memory
        )
        fixed = is_fixed(self._columns)
        if self.info.file_format == BY_NUMBER:
            # A crop that is resized is cut from the whole image, by whoever augments.
            whole = field == "data.train_split" and parse(data.augment).smallest is not None
            size = None if fixed or whole else tuple(self.spec.shape[:2])
            source = _records(builder, name, self._columns, self.keys, size, data.resize)
            return _in_memory(source) if fits and fixed else source
        if fits and fixed:
            table = builder.as_dataset(split=name, batch_size=-1, as_supervised=True, shuffle_files=False)
            return Arrays(tuple(tfds.as_numpy(table)))
        decoders, decode = _undecoded(self.info.features, self.keys, self.spec, data.resize)
        stream = builder.as_dataset(split=name, as_supervised=True, shuffle_files=False, decoders=decoders)
        if field == "data.train_split" and data.shuffle:
            buffer = min(count, 16 * batch + 10_000)
            stream = stream.shuffle(buffer, seed=self._experiment.seed, reshuffle_each_iteration=True)
        return Batches(stream.batch(batch), decode)

    def _examples(self, field: str, split: str) -> int:
        name, splits = self._experiment.data.name, self.info.splits
        try:
            count = splits[split].num_examples
        except (KeyError, ValueError, AssertionError):
            raise UserError(f"unknown {field} {split!r}: {name} has {', '.join(splits)}") from None
        if not count:
            raise UserError(f"{field}={split!r} of {name} is empty: choose a split with examples")
        return count


def _input_spec(data: config.Data, feature: tfds.features.FeatureConnector, key: str) -> tf.TensorSpec:
    """Returns type and shape of one input as it is trained on: images of different sizes get `data.image_size`."""
    inputs, size = feature.get_tensor_spec(), field_syntax.image_size(data.image_size)
    if inputs.shape.is_fully_defined():
        return tf.TensorSpec(inputs.shape, inputs.dtype)
    if not isinstance(feature, tfds.features.Image) or not inputs.shape[-1]:
        raise UserError(
            f"{key!r} of {data.name} has another shape in each example: wrap it in a package.module:function"
        )
    if not size:
        raise UserError(f"the images of {data.name} have different sizes: set data.image_size, such as 224")
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
        del seed  # nothing in it is random
        example = features.deserialize_example(serialized)
        x, *rest = (example[key] for key in keys)
        return x if size is None else resize(x, size, policy), *rest

    def read(rows: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(get, [rows], tf.string), [None])

    return Records(len(raw), read, decode, name=f"example {{}} of {builder.name} {split}".format)


def _in_memory(source: Records) -> Arrays:
    batches = source.in_order(_READ).as_numpy_iterator()
    return Arrays(tuple(np.concatenate(column) for column in zip(*batches)))


def _undecoded(
    features: tfds.features.FeaturesDict, keys: tuple, spec: tf.TensorSpec, policy: str
) -> tuple[dict, Callable[..., tuple] | None]:
    """Returns what makes TFDS leave images as they are stored, and a function that decodes a batch of them to `spec`.

    Shuffled as JPEGs they take a tenth of the memory, and each worker decodes only its own rows.
    """
    image = features[keys[0]]
    if not isinstance(image, tfds.features.Image):
        return {}, None

    def decode(x: tf.Tensor, *rest: Structure) -> tuple:
        one = lambda stored: resize(image.decode_example(stored), spec.shape[:2], policy)
        if image.get_tensor_spec().shape.is_fully_defined():
            one = image.decode_example
        return (tf.map_fn(one, x, fn_output_signature=spec), *rest)

    return {keys[0]: tfds.decode.SkipDecoding()}, decode
