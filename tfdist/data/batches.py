"""Global batches that come as they are: of a `tf.data.Dataset`, or of what Python makes.

Each worker reads whole batches and keeps its own rows. A `shuffle()` without a seed has another order on each worker,
and each time that it is begun: so workers compare checksums of what they read.
"""

import collections
import dataclasses
import itertools
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.cluster.peers import Peers
from tfdist.config import schedule
from tfdist.data import draws, python_batches
from tfdist.data.batch_layout import Layout, own_rows, unpack
from tfdist.data.protocol import Feed, FeedCall, Source, order, spread
from tfdist.data.records import Records
from tfdist.data.spec import Structure
from tfdist.errors import UserError

_COMPARED, _ENTRIES = 2**16, 1024  # entries of a batch, and of each of its rows, that a checksum looks at, about
_NOT_AHEAD = tf.data.Options()
_NOT_AHEAD.experimental_optimization.inject_prefetch = False
_EMPTY = 8  # batches, from the first on, of which one must have rows
_FACTOR = 0x1E3779B97F4A7C15  # Odd, with many bits set


@dataclasses.dataclass(frozen=True, slots=True)
class Batches(Source):
    """A `tf.data.Dataset` of global batches, each (x,), (x, y) or (x, y, weight), in the order that it has.

    The first batch decides the batch size; later ones may be smaller.

    Args:
      dataset: the batches.
      decode: turns a batch as it is stored into one to train on, such as JPEGs into images, or None; of own rows only.
      reader: what else there is to know of it, where Python makes the batches.
      stored: facts of what it is read from.
    """

    dataset: tf.data.Dataset
    decode: Callable[..., tuple] | None = None
    reader: python_batches.Reader = python_batches.TENSORFLOWS
    stored: Mapping[str, object] = dataclasses.field(default_factory=dict)
    bare: bool = dataclasses.field(default=False, init=False)  # its elements are inputs alone, and not a tuple
    size = None
    columns = None

    def __post_init__(self):
        if not isinstance(self.dataset.element_spec, tuple):
            object.__setattr__(self, "bare", True)
            object.__setattr__(self, "dataset", self.dataset.map(lambda x: (x,)))
        specs = keras.tree.flatten(self.decoded.element_spec)
        for spec in specs:
            if not isinstance(spec, tf.TensorSpec):
                what = f"a data set of {type(spec).__name__} cannot be batched evenly"
                raise UserError(what, "make its tensors dense")
        if any(spec.shape.rank == 0 for spec in specs) or len({s.shape[0] for s in specs if s.shape.rank} - {None}) > 1:
            raise UserError("the data set has single examples and no batches", "give dataset.batch(64)")

    @property
    def decoded(self) -> tf.data.Dataset:
        """Returns the data set of whole batches to train on."""
        return self.dataset.map(self.decode, tf.data.AUTOTUNE) if self.decode else self.dataset

    @property
    def batches(self) -> int | None:
        """Returns the batches per epoch, None if the data set does not know, 0 if it has no end."""
        count = self.reader.cardinality(self.dataset)
        if count == 0:
            raise UserError("the data set is empty", "give it at least one batch")
        if count == tf.data.INFINITE_CARDINALITY:
            return 0
        return count if count > 0 else None

    endless = property(lambda self: self.batches == 0)
    ends_anywhere = property(lambda self: self.batches is None)
    specs = property(lambda self: self.decoded.element_spec)

    def facts(self) -> dict[str, object]:
        return {"kind": "batches", "batches": self.batches, "elements": str(self.dataset.element_spec), **self.stored}

    def requested_batch(self, batch: int | None, default: int | None = None, steps: int | None = None) -> int | None:
        return batch

    def global_batch(self, batch: int | None) -> int:
        own = int(tf.nest.flatten(self.specs)[0].shape[0] or 0) or len(keras.tree.flatten(self.first_batch())[0])
        # A data set of a single, smaller batch is all of it; one of unknown length may be.
        if batch not in (None, own) and not (own < batch and self.batches in (1, None)):
            raise UserError(f"batch_size={batch} does not fit a data set of batches of {own}", "leave it out")
        return own

    def sizes(self, batch: int) -> set[int]:
        return {batch}

    def all_full(self, batch: int) -> bool:
        return {spec.shape[0] for spec in tf.nest.flatten(self.specs)} == {batch}

    def check_parts(self, batch: int, replicas: int, accumulate: int, shards: int) -> None:
        if self.batches != 1:  # a single one is all there is, and no more than an epoch's tail
            schedule.check_batch(batch, replicas, accumulate, "the data set's first batch (of {})", shards)

    def feed(self, layout: Layout, shuffle: int | None = None, seed: int | None = None, across: bool = False) -> Feed:
        if isinstance(self.reader, python_batches.SequenceReader):
            return SequenceFeed(self, layout, shuffle)
        return BatchFeed(self, layout, once=seed is None, across=across)

    def first_batch(self) -> tuple:
        """Returns the first global batch with rows; a data set that shuffles anew when read is one order further."""
        if self.reader.first is not None:
            first = keras.tree.map_structure(tf.convert_to_tensor, self.reader.first)
            return self.decode(*first) if self.decode else first
        _fill_caches(self.dataset)
        with draws.unmoved(self.dataset):
            for number in range(_EMPTY):
                found = [*self.decoded.skip(number).take(1)]  # whose iterator has ended, and draws no more
                if found and len(keras.tree.flatten(found[0])[0]):
                    return found[0]
        raise UserError("the data set is empty", "give it at least one batch")

    def first_rows(self, count: int) -> tuple:
        return self.first_batch()

    def spread_rows(self, count: int) -> tuple:
        batch = self.first_batch()
        total = len(keras.tree.flatten(batch)[0])
        some = spread(total, count)
        # All of them, since a model may be built for a batch of just this size.
        rows = np.concatenate([some, np.setdiff1d(np.arange(total), some)])
        return keras.tree.map_structure(lambda a: tf.gather(a, rows), batch)

    def repeats_order(self) -> bool:
        if self.reader.once:
            return False
        read = self.reader.read_first if isinstance(self.reader, python_batches.PythonReader) else self.first_batch
        one, two = (keras.tree.flatten(read()) for _ in range(2))
        return all(np.array_equal(a, b) for a, b in zip(one, two))

    def class_counts(self, classes: int) -> np.ndarray:
        def add(total: tf.Tensor, batch: tuple) -> tf.Tensor:
            labels = tf.cast(tf.reshape(batch[1], [-1]), tf.int32)
            return total + tf.math.bincount(labels, minlength=classes, maxlength=classes, dtype=tf.int64)

        return self.dataset.reduce(tf.zeros([classes], tf.int64), add).numpy()

    def map_targets(self, function: Callable[..., tuple]) -> "Batches":
        decode = self.decode
        return dataclasses.replace(self, decode=function if decode is None else lambda *b: function(*decode(*b)))

    def by_number(self, field: str) -> Records:
        what = f"{field} needs examples that can be read by number, and this data set is a stream of batches"
        raise UserError(what, "set data.cache=memory, or do it in the data set itself")


class BatchFeed(Feed):
    """Reads global batches from a `tf.data.Dataset`, which lives across epochs where their length is known.

    Args:
      layout: its batch has the size of the first one.
      once: read the data set from its beginning at every `restart`.
      across: epochs have a length of their own, and go on where the one before has ended.
    """

    def __init__(self, source: Batches, layout: Layout, once: bool = False, across: bool = False):
        self.batches = source.batches
        self._source, self._layout = source, layout
        self.draws = source.dataset in draws.COUNTING or bool(draws.drawn(source.dataset))
        anew = self.draws or draws.begins_anew(source.dataset, bool(source.stored)) or bool(_orders(source.dataset))
        once = once or (not across and anew)  # or draws and orders would be ahead
        self._stored = source.dataset
        if (self.batches or (across and self.batches is None)) and not once:
            # A new iterator per epoch would start with empty buffers; one that repeats goes on reading.
            self._stored = self._stored.repeat()
        self._endless = not once and (across or self.batches is not None)
        self._full = layout.even and source.all_full(layout.batch)
        self._reads_ahead = not _moves_on(self._stored)
        self._order = BatchOrder()
        self._keeps, self._kept = False, dict[int, tuple]()  # batches by their updates
        # Updates whose batch the iterator gave first, with which the epoch began, and up to which it has been read.
        self._began = self._first = self._end = 0
        self._inputs_agree: bool | None = None  # unknown before the first call
        self._dataset = self._decoded(self._stored)
        self._iterator: tf.data.Iterator | None = None

    def _decoded(self, stored: tf.data.Dataset) -> tf.data.Dataset:
        layout, decode = self._layout, self._source.decode
        if self._keeps:
            stored = stored.enumerate().map(self._keeping)
        if layout.local:

            def own(*batch: Structure) -> tuple:
                rows, count = own_rows(batch, layout)
                return decode(*rows) if decode else rows, count

            stored = self._order.watched(stored).map(own, tf.data.AUTOTUNE)
        elif decode:
            stored = stored.map(decode, tf.data.AUTOTUNE)
        return stored.prefetch(tf.data.AUTOTUNE) if self._reads_ahead else stored.with_options(_NOT_AHEAD)

    def next(self, update: int, limit: int) -> FeedCall:
        if self._iterator is None:
            self._order.begin()
            self._began = self._first = update
            self._iterator = iter(self._dataset)
        self._end = update + limit
        return FeedCall((self._iterator,), 0, limit, self._full)

    def digest(self, batches: int) -> list[str]:
        return self._order.digest(batches) if self._layout.local else []

    def compare(self, digests: Sequence[list[str]], peers: Peers, label: str) -> None:
        """Compares inputs, too, from the first call on, unless each worker draws its own random changes of them."""
        for rank, other in enumerate(digests):
            if other and other[0] != digests[0][0]:
                raise UserError(
                    f"worker {rank} ({peers.hosts[rank]}) has read other batches than worker 0 up to {label}",
                    "give shuffle() a seed, as in shuffle(1000, seed=0), "
                    "and set a global seed, if any, alike on all workers",
                )
        others = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if self._inputs_agree is None:
            repeats = self._source.repeats_order
            self._inputs_agree = not others or all(peers.gather("whether its data are the same again", repeats()))
        if others and self._inputs_agree:
            what = f"worker {others[0]} ({peers.hosts[others[0]]}) has read other inputs than worker 0 up to {label}"
            raise UserError(what, "give all workers the same data, and random changes of them the same seed")

    def resume(self, update: int, epoch: int, begun: int, first: int = 0) -> None:
        """Goes to a batch by skipping, before anything is decoded.

        A data set that shuffles anew each epoch has an order for each time that it is begun: so all of it is skipped
        where one iterator serves all epochs, and else it is begun as often.
        """
        if not self._endless:
            for _ in range(epoch):
                passed = iter(self._stored)
                collections.deque(passed if self.draws else (), maxlen=0)  # to draw as often
        self._iterator = None  # what it reads ahead is forgotten with it
        self._order.begin()
        self._began, self._first = update, update - begun
        if self._endless or begun:
            self._iterator = iter(self._decoded(self._stored.skip(update - first if self._endless else begun)))

    def restart(self) -> None:
        """Begins anew, unless one iterator serves all epochs."""
        if not self._endless:
            if self.draws and self._iterator is not None and 0 < (self.batches or 0) <= self._end - self._first:
                collections.deque(self._iterator, maxlen=0)  # to draw for rows that make no batch, too
            self._iterator = None

    def keep(self) -> None:
        if not self._keeps:
            self._keeps = True
            self._dataset = self._decoded(self._stored)

    def whole_batch(self, update: int) -> tuple | None:
        known = sorted(number for number in [*self._kept] if number <= update)
        if not known:
            return None
        for number in known[:-1]:
            self._kept.pop(number)
        decode, batch = self._source.decode, self._kept[known[-1]]
        return decode(*batch) if decode else batch

    def _keeping(self, number: tf.Tensor, batch: tuple) -> tuple:
        """Keeps the batches 0, 1, 2, 3, 4, 6, 8, 12, ... of an iterator: a check looks at fewer and fewer of them."""

        def note(number: np.int64, *leaves: np.ndarray) -> np.int64:
            tensors = [tf.constant(leaf) for leaf in leaves]  # copies of what TensorFlow will use again
            self._kept[self._began + int(number)] = tf.nest.pack_sequence_as(self._stored.element_spec, tensors)
            return np.int64(0)

        rest = tf.bitwise.bitwise_and(number, number - 1)  # without the lowest bit that is set
        due, leaves = tf.equal(rest, 0) | tf.equal(2 * number, 3 * rest), tf.nest.flatten(batch)
        noted = lambda: tf.numpy_function(note, [number, *leaves], tf.int64)
        done = tf.cond(due, noted, lambda: tf.constant(0, tf.int64))
        with tf.control_dependencies([done]):
            return tf.nest.map_structure(tf.identity, batch)


class SequenceFeed(BatchFeed):
    """Reads the batch that belongs to an update, so that nothing is read to go on in the middle.

    Update `u` reads batch number `u mod n` of pass `u div n` over the data, in an order of its batches that depends on
    the seed `shuffle` and that pass alone, or in that of the source. Each epoch begins to read anew, and finds what
    `on_epoch_end` has changed.
    """

    def __init__(self, source: Batches, layout: Layout, shuffle: int | None = None):
        super().__init__(source, layout, once=True)
        self._seed = shuffle

    def next(self, update: int, limit: int) -> FeedCall:
        """Returns at most `limit` batches from `update` on, none beyond the end of its pass."""
        size, first = self.batches, update
        if size:
            number, first = divmod(update, size)
            limit = min(limit, size - first)
        if self._iterator is None or (size and first == 0):
            reader = self._source.reader
            assert isinstance(reader, python_batches.SequenceReader)
            if not size:
                reader.numbers = itertools.count(first)
            else:
                passed = range(size) if self._seed is None else order(self._seed, number, size).tolist()
                reader.numbers = passed[first:]
            self._order.begin()
            self._began = update
            self._iterator = iter(self._dataset)
        return FeedCall((self._iterator,), 0, limit, False)

    def resume(self, update: int, epoch: int, begun: int, first: int = 0) -> None:
        """Begins to read anew; the position is a function of the update."""
        self._iterator = None


class BatchOrder:
    """The checksums of the batches that one worker has read, in their order."""

    def __init__(self) -> None:
        self._sums: dict[int, bytes] = {}  # by number since the iterator's beginning, with those that were read ahead
        self._next, self._digests = 0, [0, 0]

    def watched(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the same data set, which notes a checksum of each of its batches."""

        def noted(number: tf.Tensor, batch: tuple) -> tuple:
            x, y, weight = unpack(batch)
            targets = [part for part in (y, weight) if part is not None]
            sums = tf.stack([checksum(targets or x), checksum(x)])
            done = tf.numpy_function(self._note, [number, sums], tf.int64)
            with tf.control_dependencies([done]):  # before whoever reads the batch can ask
                return keras.tree.map_structure(tf.identity, batch)

        return dataset.enumerate().map(noted)

    def begin(self) -> None:
        """Forgets what an earlier iterator has read ahead."""
        self._sums.clear()
        self._next = 0

    def digest(self, batches: int) -> list[str]:
        """Returns checksums of all targets and of all inputs trained on so far, which now are `batches` more."""
        for number in range(self._next, self._next + batches):
            sums = self._sums.pop(number, bytes(16))
            self._digests = [zlib.crc32(part, old) for part, old in zip((sums[:8], sums[8:]), self._digests)]
        self._next += batches
        return [f"{digest:08x}" for digest in self._digests]

    def _note(self, number: np.int64, sums: np.ndarray) -> np.int64:
        self._sums[int(number)] = sums.astype("<i8").tobytes()
        return np.int64(0)


def _fill_caches(dataset: tf.data.Dataset) -> bool:
    """Reads what is kept in a cache, since `prefetch()` behind it does or not; returns whether the data set ends."""
    name, count = type(dataset).__name__, dataset.cardinality()
    # A cache that is read in part, as before `take()`, keeps nothing.
    ends = [_fill_caches(part) for part in dataset._inputs() if "Take" not in name]
    # What filters data that end does end, too; what makes data sets of examples, as of a generator, may not.
    keeps = ends == [True] and "FlatMap" not in name and "Interleave" not in name
    known = count >= 0 or (count == tf.data.UNKNOWN_CARDINALITY and keeps)
    if name == "CacheDataset" and dataset not in _FILLED and known:
        dataset.reduce(0, lambda number, *_: number)
        _FILLED.add(dataset)
    return bool(known)


_FILLED = weakref.WeakSet[tf.data.Dataset]()


def share_order(one: object, other: object) -> bool:
    """Returns whether two data sets read one `shuffle()`, whose order each reading moves on for both."""
    return (
        isinstance(one, tf.data.Dataset) and isinstance(other, tf.data.Dataset) and bool(_orders(one) & _orders(other))
    )


def _orders(dataset: tf.data.Dataset) -> set[int]:
    moves = "Shuffle" in type(dataset).__name__ and getattr(dataset, "_reshuffle_each_iteration", None) is not False
    return ({id(dataset)} if moves else set()).union(*map(_orders, dataset._inputs()))


def _moves_on(dataset: tf.data.Dataset) -> bool:
    """Returns whether how far a data set is read decides the order of its next reading: a shuffle() is repeated."""
    repeats = "Repeat" in type(dataset).__name__ and bool(_orders(dataset))
    return repeats or any(map(_moves_on, dataset._inputs()))


def checksum(parts: Structure) -> tf.Tensor:
    """Returns a number, int64, that depends on which examples a part of a batch has, and on their order."""
    total, odd = tf.zeros([], tf.int64), lambda count: 2 * tf.range(count, dtype=tf.int64) + 1
    for tensor in map(tf.convert_to_tensor, tf.nest.flatten(parts, expand_composites=True)):
        count = tf.shape(tensor, tf.int64)[0]
        total += count
        if tensor.shape[1:].num_elements() == 0:
            continue
        width = tf.reduce_prod(tf.shape(tensor, tf.int64)[1:])
        table = tf.reshape(bits(tensor), [count, width])[:, :: tf.maximum(width // _ENTRIES, 1)]
        some = table[:: tf.maximum(tf.size(table, tf.int64) // _COMPARED, 1)]
        rows = tf.reduce_sum(some * odd(tf.shape(some, tf.int64)[1]), 1)
        total = _scattered(total) + tf.reduce_sum(_scattered(rows) * odd(tf.shape(some, tf.int64)[0]))
    return total


def _scattered(numbers: tf.Tensor) -> tf.Tensor:
    """Returns a hash of each number: weighted by its place as it is, a row of 0 and 1 would count alike anywhere."""
    for _ in range(2):
        numbers = numbers * _FACTOR
        numbers = tf.bitwise.bitwise_xor(numbers, tf.bitwise.right_shift(numbers, tf.constant(29, tf.int64)))
    return numbers


def bits(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the entries of a tensor as int64, each by its bits: as numbers, 0.0 and -0.0 would be the same."""
    if tensor.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(tensor, 2**62)
    if tensor.dtype.is_complex:
        tensor = tf.math.real(tensor) + tf.math.imag(tensor)
    if tensor.dtype.is_floating:
        tensor = tf.bitcast(tensor, {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}[tensor.dtype.size])
    return tf.cast(tensor, tf.int64)
