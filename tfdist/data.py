"""Data sets as global batches: the same batches for every strategy, each example once per epoch.

A source is what somebody hands in; a feed is how the compiled step reads it.
Update `u` of a run reads global batch `u mod n` of epoch `u div n`, in an order
that depends on the seed and that epoch alone, so a feed needs no state.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UserError
from tfdist.layout import Layout, own_rows, unpack


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
    """

    dataset: Any
    decode: Callable[..., tuple] | None = None

    def __post_init__(self):
        if not isinstance(self.dataset.element_spec, tuple):
            object.__setattr__(self, "dataset", self.dataset.map(lambda x: (x,)))
        for spec in keras.tree.flatten(self.decoded.element_spec):
            if not isinstance(spec, tf.TensorSpec):
                raise UserError(f"a data set of {type(spec).__name__} cannot be batched evenly: make its tensors dense")
            if spec.shape.rank == 0:
                raise UserError("the data set has scalar elements: batch it (dataset.batch(64))")

    @property
    def decoded(self) -> Any:
        """The data set of whole batches to train on."""
        return self.dataset.map(self.decode, tf.data.AUTOTUNE) if self.decode else self.dataset

    @property
    def batches(self) -> int | None:
        """Batches per epoch, or None if the data set does not know."""
        count = int(self.dataset.cardinality())
        if count == 0:
            raise UserError("the data set is empty: give it at least one batch")
        if count == tf.data.INFINITE_CARDINALITY:
            return 0
        return count if count > 0 else None


Source = Arrays | Batches


def as_source(data: Any, y: Any = None, weight: Any = None) -> Source:
    """What `fit`, `evaluate` and `predict` accept, as a source.

    Args:
      data: a source, a `tf.data.Dataset` of global batches, arrays or a
        structure of arrays, or a tuple (x, y) or (x, y, weight) if `y` is None.
      y: targets when `data` is arrays.
      weight: sample weights when `data` is arrays.

    Raises:
      UserError: lengths that differ, no examples, or an unknown type.
    """
    if isinstance(data, (Arrays, Batches, tf.data.Dataset)):
        if y is not None or weight is not None:
            raise UserError(f"targets and weights belong into the data set itself when it is a {type(data).__name__}")
        return data if isinstance(data, (Arrays, Batches)) else Batches(data)
    columns = (
        data if isinstance(data, tuple) and y is None and weight is None and 1 <= len(data) <= 3 else (data, y, weight)
    )
    while columns and columns[-1] is None:
        columns = columns[:-1]
    if len(columns) == 3 and columns[1] is None:
        raise UserError("sample weights without targets have nothing to weigh: give y as well")
    return Arrays(keras.tree.map_structure(_array, columns))


def _array(value: Any) -> Any:
    if isinstance(value, (tf.Tensor, np.ndarray)):
        return value if isinstance(value, np.ndarray) else value.numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise UserError(f"data must be rectangular arrays: {error}") from error
    if array.dtype == object or array.ndim == 0:
        raise UserError(
            f"cannot train on {type(value).__name__}: "
            "give NumPy arrays, a tf.data.Dataset of batches, or a source of tfdist"
        )
    return array


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
        return Batches(source.decoded.map(add))
    x, y, weight = add(*source.columns)
    return Arrays((x, y.numpy(), weight.numpy()))


def one_hot(source: Source, classes: int) -> Source:
    """Class numbers [n] as rows [n, classes] of 0 and 1 (uint8)."""

    def rows(x, y, *weight):
        return (x, tf.one_hot(y, classes, on_value=1, off_value=0, dtype=tf.uint8), *weight)

    if isinstance(source, Batches):
        return dataclasses.replace(source, dataset=source.dataset.map(rows))
    return Arrays(tuple(c.numpy() if isinstance(c, tf.Tensor) else c for c in rows(*source.columns)))


def order(seed: int, epoch: int, size: int) -> np.ndarray:
    """The order of one epoch: a permutation of `size` by a counter-based generator (Philox)."""
    key = np.array([seed, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(size).astype(np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """The next global batches for one call of a compiled function: its arguments."""

    feed: tuple
    first: int
    last: int
    full: bool
    """All batches are full and divide evenly over replicas and micro-batches."""


class ArrayFeed:
    """Reads global batches out of tables in memory, by row numbers.

    Args:
      source: examples in memory.
      layout: batch size, replicas and micro-batches.
      shuffle: seed of the order, or None for the order of the source.
    """

    def __init__(self, source: Arrays, layout: Layout, shuffle: int | None = None):
        self._layout = layout
        self._size = source.size
        self._seed = shuffle
        with tf.device("CPU:0"):  # a data set may be larger than a GPU's memory
            self._table = keras.tree.map_structure(tf.convert_to_tensor, source.columns)
        self.batches = -(-self._size // layout.batch)
        self._full = self._size // layout.batch if layout.rows == layout.batch else 0
        self._ahead: dict[int, concurrent.futures.Future] = {}
        self._executor = concurrent.futures.ThreadPoolExecutor(1)
        self._rows: tuple[int, Any] = (-1, None)
        counts = np.full(self.batches, layout.batch, np.int32)
        counts[-1] = self._size - (self.batches - 1) * layout.batch
        self._counts = counts

    def next(self, update: int, limit: int) -> Call:
        """At most `limit` batches from `update` on, none beyond its epoch."""
        epoch, first = divmod(update, self.batches)
        last = min(first + limit, self.batches)
        full = first < self._full
        if full:
            last = min(last, self._full)
        return Call((self._table, *self._of_epoch(epoch)), first, last, full)

    def example(self) -> tuple:
        """The first row, as a batch of one."""
        return keras.tree.map_structure(lambda t: t[:1], self._table)

    def restart(self) -> None:
        """Nothing to do: the position is a function of the update."""

    def resume(self, update: int, epoch: int, begun: int) -> None:
        """Nothing to do either."""

    def _of_epoch(self, epoch: int) -> tuple:
        if self._seed is None:
            epoch = 0
        if self._rows[0] != epoch:
            ready = self._ahead.pop(epoch, None)
            rows = ready.result() if ready else self._layout_rows(epoch)
            self._ahead.clear()
            with tf.device("CPU:0"):
                self._rows = epoch, (tf.convert_to_tensor(rows), tf.convert_to_tensor(self._counts))
            if self._seed is not None:  # so that the next epoch begins without a pause
                self._ahead[epoch + 1] = self._executor.submit(self._layout_rows, epoch + 1)
        return self._rows[1]

    def _layout_rows(self, epoch: int) -> np.ndarray:
        """[batches, layout.own_rows] row numbers; filler repeats the examples of its own batch."""
        layout = self._layout
        rows = np.arange(self._size, dtype=np.int32) if self._seed is None else order(self._seed, epoch, self._size)
        tail = rows[(self.batches - 1) * layout.batch :]
        whole = rows[: (self.batches - 1) * layout.batch].reshape(-1, layout.batch)
        return layout.own(np.concatenate([_fill(whole, layout.rows), _fill(tail[None], layout.rows)]))


def _fill(rows: np.ndarray, width: int) -> np.ndarray:
    return rows[:, np.arange(width) % rows.shape[1]]


class BatchFeed:
    """Reads global batches from a `tf.data.Dataset`, which lives across epochs where its length is known.

    Args:
      source: global batches.
      layout: of the size of the first batch.
      once: read the data set from its beginning at every `restart`.
    """

    def __init__(self, source: Batches, layout: Layout, once: bool = False):
        self.batches = source.batches
        self._source, self._layout = source, layout
        self._stored = source.dataset
        if self.batches and not once:
            # A new iterator per epoch would start with empty buffers; one that repeats goes on reading.
            self._stored = self._stored.repeat()
        self._endless = not once and self.batches is not None
        self._dataset = self._decoded(self._stored)
        self._iterator: Any = None

    def _decoded(self, stored: Any) -> Any:
        layout, decode = self._layout, self._source.decode
        if layout.local:

            def own(*batch: Any) -> tuple:
                rows, count = own_rows(batch, layout)
                return decode(*rows) if decode else rows, count

            stored = stored.map(own, tf.data.AUTOTUNE)
        elif decode:
            stored = stored.map(decode, tf.data.AUTOTUNE)
        return stored.prefetch(tf.data.AUTOTUNE)

    def next(self, update: int, limit: int) -> Call:
        del update  # an iterator knows its position
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        return Call((self._iterator,), 0, limit, False)

    def resume(self, update: int, epoch: int, begun: int) -> None:
        """Goes to a batch by skipping, before anything is decoded.

        A data set that shuffles anew each epoch has an order for each time that it is begun: so all of it is skipped
        where one iterator serves all epochs, and else it is begun as often.
        """
        if not self._endless:
            for _ in range(epoch):
                iter(self._stored)
        self._iterator = iter(self._decoded(self._stored.skip(update if self._endless else begun)))

    def restart(self) -> None:
        """Begins anew, unless one iterator serves all epochs."""
        if not self._endless:
            self._iterator = None


Feed = ArrayFeed | BatchFeed


def first_batch(source: Batches) -> tuple:
    """The first global batch. A data set that shuffles anew each time it is read is one order further then."""
    for batch in source.decoded.take(1):
        return batch
    raise UserError("the data set is empty: give it at least one batch")


def check_labels(y: Any, classes: int, what: str) -> None:
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


def targets_of(source: Source) -> Any:
    """Targets in memory, or None where there are none."""
    return unpack(source.columns)[1] if isinstance(source, Arrays) else None
