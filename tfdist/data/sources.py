"""Data sets as global batches: the same batches for every strategy, each example once per epoch.

An example takes this way from a data set to an update:

1. A source, defined here, holds what somebody hands in: arrays in memory, a `tf.data.Dataset` of global batches (also
   of those that Python makes, see python_batches.py), or examples that are read by number. It knows nothing of
   replicas, of workers, or of when it is read.
2. A layout (batch_layout.py) says which rows of a global batch each worker, replica and micro-batch takes.
3. A feed (feeds.py, record_feed.py) joins the two. Asked for the batches from update u on, it puts the examples into
   the order of that epoch, which seed and epoch alone decide, picks the rows that the layout gives to this worker, and
   hands over what the compiled step reads them from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data import python_batches
from tfdist.data.batch_layout import unpack
from tfdist.data.structures import Structure
from tfdist.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class Arrays:
    """Examples in memory.

    Args:
      columns: (x,), (x, y) or (x, y, weight); each a structure of arrays of
        shape [examples, ...].
    """

    columns: tuple

    def __post_init__(self):
        sizes = {len(a) for a in keras.tree.flatten(self.columns)}
        if len(sizes) != 1:
            raise UserError(f"x, y and weights must have one entry per example each, got lengths {sorted(sizes)}")
        if sizes == {0}:
            raise UserError("the data set is empty: give it at least one example")

    @property
    def size(self) -> int:
        return len(keras.tree.flatten(self.columns)[0])


@dataclasses.dataclass(frozen=True, slots=True)
class Batches:
    """A `tf.data.Dataset` of global batches, each (x,), (x, y) or (x, y, weight).

    The first batch decides the batch size; later ones may be smaller. It is
    read in the order that it has: shuffle it yourself.

    Args:
      dataset: the batches.
      decode: turns a batch as it is stored into one to train on, such as JPEGs
        into images. A worker decodes its own rows only; None if there is
        nothing to decode.
      reader: what else there is to know of it, where Python makes the batches.
    """

    dataset: tf.data.Dataset
    decode: Callable[..., tuple] | None = None
    reader: python_batches.Reader = python_batches.TENSORFLOWS
    bare: bool = dataclasses.field(default=False, init=False)
    """Whether its elements are inputs alone, and not a tuple."""

    def __post_init__(self):
        if not isinstance(self.dataset.element_spec, tuple):
            object.__setattr__(self, "bare", True)
            object.__setattr__(self, "dataset", self.dataset.map(lambda x: (x,)))
        for spec in keras.tree.flatten(self.decoded.element_spec):
            if not isinstance(spec, tf.TensorSpec):
                raise UserError(f"a data set of {type(spec).__name__} cannot be batched evenly: make its tensors dense")
            if spec.shape.rank == 0:
                raise UserError("the data set has scalar elements: batch it (dataset.batch(64))")

    @property
    def decoded(self) -> tf.data.Dataset:
        """Returns the data set of whole batches to train on."""
        return self.dataset.map(self.decode, tf.data.AUTOTUNE) if self.decode else self.dataset

    @property
    def batches(self) -> int | None:
        """Returns the batches per epoch, None if the data set does not know, 0 if it has no end."""
        count = self.reader.cardinality(self.dataset)
        if count == 0:
            raise UserError("the data set is empty: give it at least one batch")
        if count == tf.data.INFINITE_CARDINALITY:
            return 0
        return count if count > 0 else None


@dataclasses.dataclass(frozen=True, slots=True)
class Records:
    """Examples by number, read and decoded when they are needed, by the worker that trains on them.

    Args:
      size: examples.
      read: (rows int64 [n]) -> structure of tensors [n, ...] as they are stored, such as paths and labels. Called
        inside a `tf.data` pipeline.
      decode: (one stored example, seed int32 [2]) -> (x,), (x, y) or (x, y, weight) of that example, with static
        shapes. Many run side by side inside the pipeline. `seed` depends on the run's seed, the epoch and the row
        alone, so an example is augmented alike by whichever worker has it.
      mix: None, or (columns, partners, seeds int32 [n, 2]) -> columns, over the rows of a batch [n, ...]. The partner
        of an example is the next one of the global batch, and of the last one the first.
      name: what to call an example in a message, by its row.
      labels: int [size], the class of each example, where that is known without reading them.
    """

    size: int
    read: Callable[[tf.Tensor], Structure]
    decode: Callable[[Structure, tf.Tensor], tuple]
    mix: Callable[[tuple, tuple, tf.Tensor], tuple] | None = None
    name: Callable[[int], str] = "example {}".format
    labels: np.ndarray | None = None

    def __post_init__(self):
        if self.size < 1:
            raise UserError("the data set is empty: give it at least one example")


Source = Arrays | Batches | Records


def as_source(data: Any, y: Structure = None, weight: Structure = None) -> Source:
    """Returns what `fit`, `evaluate` and `predict` accept, as a source.

    Args:
      data: a source, a `tf.data.Dataset` of global batches, arrays or a
        structure of arrays, or a tuple (x, y) or (x, y, weight) if `y` is None.
      y: targets when `data` is arrays.
      weight: sample weights when `data` is arrays.

    Raises:
      UserError: lengths that differ, no examples, or an unknown type.
    """
    source = _batched(data)
    if source is not None:
        if y is not None or weight is not None:
            raise UserError(f"targets and weights belong into the data set itself when it is a {type(data).__name__}")
        return source
    whole = isinstance(data, tuple) and y is None and weight is None and 1 <= len(data) <= 3
    columns = python_batches.without_missing(data if whole else (data, y, weight))
    return Arrays(keras.tree.map_structure(_column, columns))


def _batched(data: object) -> Source | None:
    """Returns `data` as a source if it holds its targets itself, else None."""
    if isinstance(data, (Arrays, Batches, Records)):
        return data
    if isinstance(data, tf.data.Dataset):
        return Batches(data)
    reader = python_batches.reader(data)
    return None if reader is None else Batches(reader.dataset(), reader=reader)


def _column(value: object) -> np.ndarray:
    array, floats = python_batches.array(value), keras.config.floatx()
    # As Keras does: else float64, NumPy's own type, would meet float32 in whatever a model computes by itself.
    return array.astype(floats) if array.dtype.kind == "f" and array.dtype != floats else array


def is_bare(source: Source) -> bool:
    """Returns whether Keras' `fit` would hand the inputs to a `train_step` as they are, and not as a tuple of one."""
    if isinstance(source, Batches):
        return source.bare
    return not isinstance(source, Arrays) or not isinstance(source.columns[0], tuple | list)


def entries(source: Source) -> int:
    """Returns how many of inputs, targets and weights a batch has; 3 where only its records know."""
    if isinstance(source, Arrays):
        return len(source.columns)
    return len(source.decoded.element_spec) if isinstance(source, Batches) else 3


def reader(source: Source) -> python_batches.Reader:
    """Returns who is told of epochs and knows what cannot be done with `source`."""
    return source.reader if isinstance(source, Batches) else python_batches.TENSORFLOWS


def split(source: Source, fraction: float) -> tuple[Arrays, Arrays]:
    """Returns the first examples of arrays and the last ones, which are `fraction` of them, as Keras divides them."""
    if not isinstance(source, Arrays):
        raise UserError(
            "validation_split takes the last examples of arrays, and the data is none: give validation_data instead"
        )
    first = math.floor(source.size * (1.0 - fraction)) if 0 < fraction < 1 else 0
    if not 0 < first < source.size:
        raise UserError(
            f"validation_split={fraction} leaves nothing of {source.size} examples on one side: use another part of 1"
        )
    parts = (slice(first), slice(first, None))
    one, two = (Arrays(keras.tree.map_structure(lambda a, p=p: a[p], source.columns)) for p in parts)
    return one, two


def weigh_classes(source: Source, weights: Mapping[int, float]) -> Source:
    """Multiplies each example's weight by that of its class, as Keras' `class_weight` does.

    Args:
      source: its targets are class numbers [n] or [n, 1], or one-hot rows.
      weights: factor by class; classes that are missing keep 1.
    """
    classes = max(weights) + 1
    factors = np.ones(classes + 1, keras.config.floatx())
    for number, factor in weights.items():
        factors[number] = factor

    def add(x, y=None, weight=None):
        if y is None or keras.tree.is_nested(y):
            raise UserError("class_weight needs a model with a single output and targets for it: use sample weights")
        y = tf.convert_to_tensor(y)
        if y.shape.rank > 1 and y.shape[-1] != 1:
            labels = tf.argmax(y, -1, tf.int32)
        else:
            labels = tf.cast(tf.reshape(y, [-1]), tf.int32)
        factor = tf.gather(factors, tf.minimum(labels, classes))
        return x, y, factor if weight is None else factor * tf.cast(weight, factor.dtype)

    if isinstance(source, Batches):
        return _then(source, add)
    if isinstance(source, Records):  # before examples are mixed, each with the weight of its own class
        decode = source.decode

        def weighed(stored: Structure, seed: tf.Tensor) -> tuple:
            x, *rest = decode(stored, seed)
            _, y, weight = add(x, *(tf.expand_dims(t, 0) for t in rest))
            return x, y[0], weight[0]

        return dataclasses.replace(source, decode=weighed)
    x, y, weight = add(*source.columns)
    return Arrays((x, y.numpy(), weight.numpy()))


def one_hot(source: Source, classes: int) -> Source:
    """Returns class numbers [n] as rows [n, classes] of 0 and 1: uint8, or float32 where examples are mixed."""
    mixes = isinstance(source, Records) and source.mix is not None
    dtype = tf.float32 if mixes else tf.uint8

    def rows(x, y, *weight):
        return (x, tf.one_hot(y, classes, on_value=1, off_value=0, dtype=dtype), *weight)

    if isinstance(source, Batches):
        return _then(source, rows)
    if isinstance(source, Records):  # before examples are mixed, and so one by one
        decode = source.decode
        return dataclasses.replace(source, decode=lambda stored, seed: rows(*decode(stored, seed)))
    return Arrays(tuple(c.numpy() if isinstance(c, tf.Tensor) else c for c in rows(*source.columns)))


def _then(source: Batches, function: Callable[..., tuple]) -> Batches:
    """Returns a source whose batches go through `function` after they have been decoded."""
    decode = source.decode
    return dataclasses.replace(source, decode=function if decode is None else lambda *b: function(*decode(*b)))


def order(seed: int, epoch: int, size: int) -> np.ndarray:
    """Returns the order of one epoch: a permutation of `size` by a counter-based generator (Philox), int32."""
    key = np.array([seed, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(size).astype(np.int32)


def first_batch(source: Batches) -> tuple:
    """Returns the first global batch.

    A data set that shuffles anew each time it is read is one order further then.
    """
    if source.reader.first is not None:
        first = keras.tree.map_structure(tf.convert_to_tensor, source.reader.first)
        return source.decode(*first) if source.decode else first
    for batch in source.decoded.take(1):
        return batch
    raise UserError("the data set is empty: give it at least one batch")


def check_labels(y: np.ndarray, classes: int, what: str) -> None:
    """Raises UserError when an integer target is not in [0, classes).

    A GPU would train on NaN instead of failing.
    """
    y = np.asarray(y)
    wrong = np.flatnonzero((y.reshape(-1) < 0) | (y.reshape(-1) >= classes))
    if wrong.size:
        value = y.reshape(-1)[wrong[0]]
        example = wrong[0] // max(1, y[0].size)
        raise UserError(
            f"label {value} of example {example} is out of range for {what} with {classes} classes "
            f"(0 to {classes - 1}); {wrong.size} such label{'s' * (wrong.size > 1)}: "
            "correct the labels or the model's last layer"
        )


def targets_of(source: Source) -> Structure:
    """Returns the targets in memory, or None where there are none."""
    return unpack(source.columns)[1] if isinstance(source, Arrays) else None
