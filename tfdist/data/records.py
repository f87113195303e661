"""Examples by number, and how the compiled step reads them: an endless `tf.data` pipeline that can begin anywhere."""

import dataclasses
import os
import threading
import zlib
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.batch_layout import Layout
from tfdist.data.protocol import Feed, FeedCall, Source, order
from tfdist.data.spec import Structure
from tfdist.errors import UserError, one_line

UNREADABLE = (tf.errors.OpError, UnicodeDecodeError)  # the latter where TensorFlow's message repeats bytes

REPAIR = "repair or remove it"  # the fix for an example that cannot be decoded
AHEAD = 2  # batches that lie ready. Not AUTOTUNE, which may take half of the machine's memory.
WAITING = 2  # examples in work for each thread that decodes, so that none waits for a file
_COMPARED = 2**16  # examples, about, whose labels workers compare bit by bit


@dataclasses.dataclass(frozen=True, slots=True)
class Records(Source):
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
      stored: returns `contents` of what is read, as far as known.
    """

    size: int
    read: Callable[[tf.Tensor], Structure]
    decode: Callable[[Structure, tf.Tensor], tuple]
    mix: Callable[[tuple, tuple, tf.Tensor], tuple] | None = None
    name: Callable[[int], str] = "example {}".format
    labels: np.ndarray | None = None
    stored: Callable[[], dict[str, object]] = dict

    def __post_init__(self):
        if self.size < 1:
            raise UserError("the data set is empty", "give it at least one example")

    columns = None

    specs = property(lambda self: self.in_order(1).element_spec)
    entries = property(lambda self: 3)
    mixes = property(lambda self: self.mix is not None)

    def facts(self) -> dict[str, object]:
        # By number or in memory is the same data; that depends on how much memory there is.
        facts: dict[str, object] = {"kind": "examples", "examples": self.size}
        if self.labels is not None:
            facts["checksum of labels"] = checksum_of_labels(self.labels)
        return facts

    def contents(self) -> dict[str, object]:
        labels = b"" if self.labels is None else self.labels.astype("<i8").tobytes()
        return self.stored() | ({"checksum of all labels": zlib.crc32(labels)} if labels else {})

    def feed(self, layout: Layout, shuffle: int | None = None, seed: int | None = None, across: bool = False) -> Feed:
        return RecordFeed(self, layout, shuffle, seed)

    def in_order(self, batch: int) -> tf.data.Dataset:
        """Returns all examples once, as plain batches in the order of the source; what is random is always the same."""
        feed = RecordFeed(self, Layout(batch, 1, 1))
        return feed.dataset(0).take(feed.batches).apply(tf.data.experimental.assert_cardinality(feed.batches))

    def first_rows(self, count: int) -> tuple:
        return next(iter(self.in_order(min(count, self.size))))

    def spread_rows(self, count: int) -> tuple:
        feed = RecordFeed(self, Layout(min(count, self.size), 1, 1), shuffle=0)
        (iterator,) = feed.next(0, 1).feed
        try:
            return next(iterator)
        except UNREADABLE as error:
            if unreadable := feed.first_unreadable():
                raise UserError(unreadable, REPAIR) from error
            raise

    def class_counts(self, classes: int) -> np.ndarray:
        if self.labels is None:
            what = "train.class_weight=balanced would have to read all examples first to count them"
            raise UserError(what, "write the weights, such as 0=3.0, 2=0.2")
        return np.bincount(self.labels, minlength=classes)

    def map_targets(self, function: Callable[..., tuple]) -> "Records":
        def decode(stored: Structure, seed: tf.Tensor) -> tuple:
            x, *rest = self.decode(stored, seed)
            _, *rest = function(x, *keras.tree.map_structure(lambda t: tf.expand_dims(t, 0), rest))
            return x, *keras.tree.map_structure(lambda t: t[0], rest)

        return dataclasses.replace(self, decode=decode)

    def map_inputs(self, function: Callable[[Structure, tf.Tensor], Structure]) -> "Records":
        """Returns records whose inputs are function(input, seed), one by one."""

        def decode(stored: Structure, seed: tf.Tensor) -> tuple:
            x, *rest = self.decode(stored, seed)
            return function(x, seed), *rest

        return dataclasses.replace(self, decode=decode)

    def by_number(self, field: str) -> "Records":
        return self


class RecordFeed(Feed):
    """Global batches of examples by number; a worker reads and decodes its own rows.

    Args:
      shuffle: seed of the order, or None for the order of the source.
      seed: decides what is random in an example, a new draw each epoch; None for the same one each time.
    """

    def __init__(self, source: Records, layout: Layout, shuffle: int | None = None, seed: int | None = None):
        self._source, self._layout = source, layout
        self._shuffle, self._seed = shuffle, seed
        self.batches: int = -(-source.size // layout.batch)
        self._tail = source.size - (self.batches - 1) * layout.batch
        self._full = source.size // layout.batch if layout.even else 0
        self._by_count = {count: _Decoded.of(layout, count, bool(source.mix)) for count in (layout.batch, self._tail)}
        self._width = max(len(decoded.positions) for decoded in self._by_count.values())  # decoded for each batch
        self._order: tuple[int, np.ndarray] | None = None
        self._lock = threading.Lock()
        self._iterator: tf.data.Iterator | None = None
        self._called = 0, 0  # the updates of the last call; the iterator gives what follows them

    def next(self, update: int, limit: int) -> FeedCall:
        number = update % self.batches
        full = number < self._full
        last = min(number + limit, self._full if full else self.batches)
        alike = self._shuffle is None and self._seed is None  # all epochs, so the end of one is the beginning
        first, ahead = (number, self._called[1] % self.batches) if alike else (update, self._called[1])
        if self._iterator is None or ahead != first:
            self._iterator = iter(self.dataset(first))
        self._called = first, first + last - number
        return FeedCall((self._iterator,), number, last, full)

    def first_unreadable(self) -> str:
        first, last = self._called
        for row in np.concatenate([self._rows(np.int64(update))[0] for update in range(first, last)]):
            try:
                one = self._source.read(tf.constant([row]))
                self._source.decode(tf.nest.map_structure(lambda t: t[0], one), tf.zeros([2], tf.int32))
            except Exception as error:  # of TensorFlow, or of Python that reads for it, which is called as it is here
                return f"{self._source.name(int(row))} cannot be decoded: {reason(error)}"
        return ""

    def whole_batch(self, update: int) -> tuple:
        feed = RecordFeed(self._source, Layout(self._layout.batch, 1, 1), self._shuffle, self._seed)
        return next(iter(feed.dataset(update).take(1)))

    def dataset(self, update: int) -> tf.data.Dataset:
        """Returns the batches from that of `update` on, without end, for `batch_layout.fetch`.

        They are columns of a global batch, or with several workers this one's rows, at least one, and the whole's size.
        """
        source, layout, width = self._source, self._layout, self._width
        # As few threads as run the model's operations, where those were counted.
        counted = tf.config.threading.get_inter_op_parallelism_threads()
        threads = max(2, counted or 2 * len(os.sched_getaffinity(0)))
        updates = tf.data.Dataset.range(update, np.iinfo(np.int64).max)
        columns = lambda decoded: decoded if isinstance(decoded, tuple) else (decoded,)
        examples = (
            updates.map(self._numbered)
            .map(lambda rows, seeds: (source.read(rows), seeds), 2)
            .unbatch()
            .map(lambda stored, seed: (columns(source.decode(stored, seed)), seed), WAITING * threads)
        )
        for spec in keras.tree.flatten(examples.element_spec[0]):
            if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
                raise UserError(
                    f"the decoder gives {spec} for an example: all must have one shape to be batched, "
                    "resize them or set the shape"
                )
        examples = examples.batch(width, drop_remainder=True)

        def finished(update: tf.Tensor, batch: tuple) -> tuple:
            last = tf.equal(update % self.batches, self.batches - 1)
            count = tf.where(last, self._tail, layout.batch)
            own = [self._by_count[c].own for c in (self._tail, layout.batch)]
            if source.mix:
                columns, seeds = batch
                own_rows = tf.cond(last, *(lambda rows=rows: tf.constant(rows) for rows in own))
                each, partners = (
                    keras.tree.map_structure(lambda t, at=at: tf.gather(t, at), columns)
                    for at in (own_rows, own_rows + 1)
                )
                # Other seeds than those of `decode`, so that nothing drawn here goes with what was drawn there.
                columns = source.mix(each, partners, tf.bitwise.invert(tf.gather(seeds, own_rows)))
            else:  # they come first, and are not copied
                rows = tf.where(last, *map(len, own))
                columns = keras.tree.map_structure(lambda t: t[:rows], batch[0])
            return (columns, count) if layout.local else columns

        ready = tf.data.Dataset.zip(updates, examples).map(finished).prefetch(AHEAD)
        options = tf.data.Options()
        options.deterministic = True
        options.threading.private_threadpool_size = threads  # a tenth faster than sharing those of the model
        # The thread that tunes a pipeline wakes once a minute, and an iterator's end may wait for it (TensorFlow 2.21).
        options.autotune.enabled = False
        return ready.with_options(options)

    def _numbered(self, update: tf.Tensor) -> tuple:
        """Returns rows int64 [width] and seeds int32 [width, 2] of this worker in the global batch of `update`."""
        rows, seeds = tf.numpy_function(self._rows, [update], [tf.int64, tf.int32])
        width = self._width
        return tf.ensure_shape(rows, [width]), tf.ensure_shape(seeds, [width, 2])

    def _rows(self, update: np.int64) -> tuple[np.ndarray, np.ndarray]:
        epoch, number = divmod(int(update), self.batches)
        count = self._tail if number == self.batches - 1 else self._layout.batch
        positions = self._by_count[count].positions
        rows = number * self._layout.batch + np.pad(positions, (0, self._width - len(positions)))
        if self._shuffle is not None:
            with self._lock:  # of a rollback's two iterators, each may be in another epoch
                if self._order is None or self._order[0] != epoch:
                    self._order = epoch, order(self._shuffle, epoch, self._source.size)
                rows = self._order[1][rows]
        rows = rows.astype(np.int64)
        return rows, example_seeds(self._seed or 0, 0 if self._seed is None else epoch, rows)


class _Decoded(NamedTuple):
    """The examples that a worker decodes for a global batch of a given size."""

    positions: np.ndarray  # places of the decoded examples in the global batch, int64 [n], at least one
    own: np.ndarray  # those that are rows of this worker and not partners, int32 [m], at least one

    @classmethod
    def of(cls, layout: Layout, count: int, mix: bool) -> "_Decoded":
        """Returns this worker's rows; to mix, behind each run of rows the partner of its last."""
        blocks = [block for block in layout.worker_positions(count) if len(block)] or [np.zeros(1, np.int64)]
        parts, own, at = [], [], 0
        for block in blocks:
            own.append(np.arange(at, at + len(block), dtype=np.int32))
            parts.append(np.append(block, (block[-1] + 1) % count) if mix else block)
            at += len(parts[-1])
        return cls(np.concatenate(parts), np.concatenate(own))


def example_seeds(seed: int, epoch: int, rows: np.ndarray) -> np.ndarray:
    """Returns the seeds, int32 [n, 2], of the rows [n] in an epoch.

    Each is the 64 bits of SplitMix64 (Steele, Lea and Flood, *Fast splittable pseudorandom number generators*, 2014),
    chained over seed, epoch and row.
    """
    state = np.zeros(len(rows), np.uint64)
    for number in (np.uint64(seed), np.uint64(epoch), rows.astype(np.uint64)):
        z = (state ^ number) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = z ^ (z >> np.uint64(31))
    return state.view(np.int32).reshape(-1, 2)


def reason(error: Exception) -> str:
    """Returns what TensorFlow says is wrong, without where in its graph, or what Python does."""
    if not isinstance(error, tf.errors.OpError):
        return one_line(error, 120).rstrip(".") or type(error).__name__
    text = str(error.message).split("}} ")[-1].split(" [Op:")[0].split("\nCondition x")[0]
    return one_line(text, 80).rstrip(".")


def checksum_of_labels(*columns: np.ndarray) -> int:
    some = (column[:: max(1, len(column) // _COMPARED)] for column in columns)
    return zlib.crc32(b"".join(part.astype("<i8").tobytes() for part in some))
