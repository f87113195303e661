"""The two protocols of this package, `Source` and `Feed`, and how both divide an epoch.

A source holds examples, and knows nothing of replicas, of workers, or of when it is read. A feed puts them into the
order of an epoch, which seed and epoch alone decide, and hands the compiled step the rows that a layout gives a worker.
"""

import abc
import dataclasses
import itertools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.cluster.peers import Peers
from tfdist.config import schedule
from tfdist.data import python_batches
from tfdist.data.batch_layout import Layout, unpack
from tfdist.data.spec import Structure
from tfdist.errors import UserError

_MOST = 32  # batches that a `StaticFeed` reads for one call; they lie in memory together


def order(seed: int, epoch: int, size: int) -> np.ndarray:
    """Returns the order of one epoch: a permutation of `size` by a counter-based generator (Philox), int32."""
    key = np.array([seed, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(size).astype(np.int32)


def spread(total: int, count: int) -> np.ndarray:
    """Returns `count` row numbers from all over: the first rows of sorted data are all of a class, or of one length."""
    return np.linspace(0, total - 1, min(count, total)).astype(np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class FeedCall:
    """The arguments of one call of a compiled function: it reads the batches `first` to `last - 1` of `feed`."""

    feed: tuple
    first: int
    last: int
    full: bool  # all batches are full and, but for a `StaticFeed`, divide evenly over replicas and micro-batches
    count: int | None = None  # examples of each of these batches, where the step needs it; see `StaticFeed`


class Feed:
    """Global batches of a source for the compiled step.

    Update `u` of a run reads global batch `u mod n` of epoch `u div n`, in an order that depends on the seed and that
    epoch alone, so a feed of examples needs no state, and `restart` and `resume` have nothing to do.
    """

    batches: int | None  # global batches of an epoch; None if unknown, 0 if it has no end
    draws = False  # whether functions of a data set draw from generators or variables

    def next(self, update: int, limit: int) -> FeedCall:
        """Returns at most `limit` batches from `update` on, none beyond its epoch."""
        raise NotImplementedError

    def restart(self) -> None:
        """Begins a pass over the data."""

    def resume(self, update: int, epoch: int, begun: int, first: int = 0) -> None:
        """Goes to an update, `begun` batches after the beginning of an epoch.

        `epoch`: number of epochs of this training before that one; `first`: the update that this training began with.
        """

    def digest(self, batches: int) -> list[str]:
        """Returns checksums, which workers compare, of all batches read so far, `batches` more than before.

        There are none where the order is a function of seed and epoch.
        """
        return []

    def compare(self, digests: Sequence[list[str]], peers: Peers, label: str) -> None:
        """Raises UserError where a worker has read other batches than worker 0, up to `label`."""

    def first_unreadable(self) -> str:
        """Names, after an error, the first example of the last call that cannot be decoded, and why; "" for none."""
        return ""

    def keep(self) -> None:
        """Keeps some of the batches that it reads from now on for `whole_batch`, if they cannot be read again."""

    def whole_batch(self, update: int) -> tuple | None:
        """Returns the global batch of an update that has been read, or of one shortly before; None if none is kept."""
        return None

    def same_length(self, update: int) -> tuple[int, int] | None:
        """Returns the examples of the batch of `update`, and the batches from it on with as many; None if unknown."""
        return None


class StaticFeed(Feed):
    """Reads what another feed reads for a step whose shapes are all static: batches of one length at a time.

    Python reads what a pipeline gives, since within a compiled function the length of the next batch is unknown.
    """

    def __init__(self, inner: Feed, layout: Layout):
        self.inner, self._layout = inner, layout
        self.batches, self.draws = inner.batches, inner.draws
        self._ahead: list[Structure] = []  # batches that have been read for a call and belong to the next one
        self._shapes: list[list[int]] | None = None  # shapes of an example, the same for all

    def next(self, update: int, limit: int) -> FeedCall:
        """Returns at most `limit` batches from `update` on, none beyond its epoch; none at the end of the data."""
        if same := self.inner.same_length(update):
            count, alike = same
            part = self.inner.next(update, min(limit, alike))
            return dataclasses.replace(part, full=count == self._layout.batch, count=count)
        if not self._ahead:
            part = self.inner.next(update, min(limit, _MOST))
            self._ahead = [self._checked(batch) for _, batch in zip(range(part.last - part.first), part.feed[0])]
        if not self._ahead:
            return FeedCall((), 0, 0, False)
        count = _examples(self._ahead[0])
        batches = list(itertools.takewhile(lambda batch: _examples(batch) == count, self._ahead[:limit]))
        self._ahead = self._ahead[len(batches) :]
        with tf.device("CPU:0"):
            table = batches[0]
            if len(batches) > 1:
                table = keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *batches)
            rows = tf.constant(np.arange(len(batches) * count, dtype=np.int32).reshape(-1, count))
            counts = tf.fill([len(batches)], count)
        return FeedCall((table, rows, counts), 0, len(batches), count == self._layout.batch, count)

    def restart(self) -> None:
        self._ahead = []
        self.inner.restart()

    def resume(self, update: int, epoch: int, begun: int, first: int = 0) -> None:
        self._ahead = []
        self.inner.resume(update, epoch, begun, first)

    def first_unreadable(self) -> str:
        return self.inner.first_unreadable()

    def keep(self) -> None:
        self.inner.keep()

    def whole_batch(self, update: int) -> tuple | None:
        return self.inner.whole_batch(update)

    def _checked(self, batch: Structure) -> Structure:
        shapes = [leaf.shape[1:].as_list() for leaf in keras.tree.flatten(batch)]
        self._shapes = self._shapes or shapes
        if not _examples(batch):
            raise UserError("the data set has a batch without rows, which cannot be compiled here", "filter it out")
        if shapes != self._shapes:
            raise UserError(
                f"the data set gives examples of shapes {shapes} after {self._shapes}, and each would be compiled anew "
                "here",
                "pad them to one, or cut them (dataset.padded_batch with padded_shapes)",
            )
        return batch


def _examples(batch: Structure) -> int:
    return int(keras.tree.flatten(batch)[0].shape[0])


class Source(abc.ABC):
    """The examples of a split."""

    __slots__ = ()

    size: int | None  # examples; None where only reading tells
    columns: tuple | None  # (x,), (x, y) or (x, y, weight), structures of arrays [examples, ...]; None if not in memory
    labels: np.ndarray | None = None  # int [size], classes of records, where known without reading them
    name: Callable[[int], str] | None = None  # names an example in a message, by its row
    reader: python_batches.Reader = python_batches.TENSORFLOWS
    """Is notified of epochs, and knows what cannot be done with the data."""

    # What a batch is.

    @property
    @abc.abstractmethod
    def specs(self) -> Structure:
        """(x,), (x, y) or (x, y, weight): the columns in memory, else the specs of a batch's tensors."""

    targets = property(lambda self: None if self.columns is None else unpack(self.columns)[1])
    """The targets in memory, or None where there are none."""

    bare: bool = True
    """True where Keras' `fit` would hand the inputs to a `train_step` as they are, and not as a tuple of one."""
    entries = property(lambda self: len(self.specs))
    """Number of columns of a batch; 3 where only reading tells."""
    weighted = property(lambda self: len(self.specs) == 3)
    """True if examples have weights."""

    mixes: bool = False
    """True if examples are mixed with each other, so that targets are rows of shares."""

    @abc.abstractmethod
    def facts(self) -> dict[str, object]:
        """Returns what the data of all workers must have in common, since each takes its own rows of it, as JSON.

        Lists of numbers may differ by rounding: machines prepare arrays with other instructions.
        """

    def contents(self) -> dict[str, object]:
        """Returns more such facts, of all that is in memory, which takes a pass over it; no checkpoint holds them."""
        return {}

    # How it is divided into global batches.

    endless: bool = False
    """True if the data never ends."""

    ends_anywhere: bool = False
    """True if the number of batches is unknown until they are read."""

    def requested_batch(self, batch: int | None, default: int | None = None, steps: int | None = None) -> int | None:
        """Returns the batch size to ask `global_batch` for: the user's, or `default` unless the data brings its own.

        Without both, arrays are divided into `steps` batches, as Keras does.
        """
        return default if batch is None else batch

    def global_batch(self, batch: int | None) -> int:
        """Returns the examples of a full global batch: `batch`, or 32; a data set of batches brings its own size."""
        return 32 if batch is None else batch

    def sizes(self, batch: int) -> set[int]:
        """Returns how many examples its global batches have, as far as known before they are read."""
        assert self.size is not None
        return {min(batch, self.size), self.size % batch or batch}

    def all_full(self, batch: int) -> bool:
        """Returns whether each of its global batches is known to have `batch` examples, as Keras would know it."""
        return bool(self.size) and self.sizes(batch) == {batch}

    def check_parts(self, batch: int, replicas: int, accumulate: int, shards: int) -> None:
        """Raises UserError where a global batch has no example for each replica, or shard, and micro-batch."""
        schedule.check_batch(batch, replicas, accumulate, "batch_size={}", shards)

    @abc.abstractmethod
    def feed(self, layout: Layout, shuffle: int | None = None, seed: int | None = None, across: bool = False) -> Feed:
        """Returns a feed that reads the source again and again, or without a seed, anew at each `restart`.

        Args:
          shuffle: seed of the order, a new one each epoch; None for the order of the source.
          seed: decides what is random in an example, drawn anew each epoch; None for the same each time.
          across: epochs have a length of their own, and go on in a data set where the one before has ended.
        """

    # Some of its examples.

    @abc.abstractmethod
    def first_rows(self, count: int) -> tuple:
        """Returns the first examples as a batch, `count` or more where that costs nothing."""

    @abc.abstractmethod
    def spread_rows(self, count: int) -> tuple:
        """Returns a batch that begins with `count` examples from all over the source, or of its first batch."""

    def repeats_order(self) -> bool:
        """Returns whether two readings give the same; a data set may shuffle each time that it is read."""
        return True

    @abc.abstractmethod
    def class_counts(self, classes: int) -> np.ndarray:
        """Returns the examples of each class, int64 [classes]."""

    # Sources made of it.

    @abc.abstractmethod
    def map_targets(self, function: Callable[..., tuple]) -> "Source":
        """Returns a source of function(x, y, weight), which gets batches, leaves x alone, and comes before mixing."""

    @abc.abstractmethod
    def by_number(self, field: str) -> Any:
        """Returns the examples as `Records`, or raises UserError naming `field` for a stream of batches."""

    def split(self, fraction: float) -> "tuple[Source, Source]":
        """Returns the first examples, and the last ones, which are `fraction` of them, as Keras divides arrays."""
        what = "validation_split takes the last examples of arrays, and the data is none"
        raise UserError(what, "give validation_data instead")


def weigh_classes(source: Source, weights: Mapping[int, float], loss: object = None) -> Source:
    """Multiplies each example's weight by that of its class, as Keras' `class_weight` does.

    Targets are class numbers [n] or [n, 1], or rows, one-hot unless the name of `loss` says that it takes numbers.
    Classes that are missing keep 1.
    """
    _, targets, _ = keras.utils.unpack_x_y_sample_weight(source.specs)
    shape = [] if targets is None or keras.tree.is_nested(targets) else list(targets.shape or ())
    of_numbers = "sparse" in str(getattr(loss, "name", loss)).lower()
    if len(shape) > 2 or (of_numbers and shape[1:] not in ([], [1])):  # Keras would raise, or weigh by a place
        what = f"class_weight takes one class for each example, and the targets have shape {['n', *shape[1:]]}"
        raise UserError(what.replace("'", ""), "give sample weights")
    if not isinstance(weights, Mapping):
        raise UserError(f"class_weight must be a dict, got {type(weights).__name__}", "give {class number: weight}")
    for number, factor in weights.items():
        whole = isinstance(number, numbers.Real) and float(number).is_integer() and number >= 0
        if not (whole and isinstance(factor, numbers.Real)):
            what = f"class_weight must map class numbers, from 0 on, to weights, got {number!r}: {factor!r}"
            raise UserError(what, "replace names by the numbers that the targets have")
    classes = int(max(weights)) + 1
    factors = np.ones(classes + 1, keras.config.floatx())
    for number, factor in weights.items():
        factors[int(number)] = factor

    def add(x, y=None, weight=None):
        if y is None or keras.tree.is_nested(y):
            raise UserError("class_weight needs a model with a single output and targets for it", "use sample weights")
        y = tf.convert_to_tensor(y)
        if y.shape.rank > 1 and y.shape[-1] != 1:
            labels = tf.argmax(y, -1, tf.int32)
        else:
            labels = tf.cast(tf.reshape(y, [-1]), tf.int32)
        factor = tf.gather(factors, tf.where(labels < 0, classes, tf.minimum(labels, classes)))
        return x, y, factor if weight is None else factor * tf.cast(weight, factor.dtype)

    return source.map_targets(add)


def one_hot(source: Source, classes: int) -> Source:
    """Returns class numbers [n] as rows [n, classes] of 0 and 1: uint8, or float32 where examples are mixed."""
    dtype = tf.float32 if source.mixes else tf.uint8

    def rows(x, y, *weight):
        # Of another number, a row of zeros would train without a word; a negative one is above all as an unsigned one.
        wrong = f"Received a label value of no class, outside the valid range of [0, {classes})"
        inside = tf.debugging.assert_less(tf.cast(y, tf.uint64), tf.constant(classes, tf.uint64), wrong)
        with tf.control_dependencies([] if inside is None else [inside]):  # eagerly, None
            y = tf.identity(y)
        return (x, tf.one_hot(y, classes, on_value=1, off_value=0, dtype=dtype), *weight)

    return source.map_targets(rows)
