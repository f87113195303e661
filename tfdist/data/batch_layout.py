"""The layout of a global batch: over micro-batches, and each micro-batch over the replicas.

Slices are consecutive rows, as even as possible, and no row is added. Only a replica without any row computes on one of
another replica, and the result is discarded.
"""

import dataclasses
from typing import NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.spec import Structure


class RowRange(NamedTuple):
    """Consecutive rows of a global batch."""

    start: int | tf.Tensor
    size: int | tf.Tensor  # number of rows, possibly 0


def _split(size: int | tf.Tensor, parts: int, index: int | tf.Tensor) -> RowRange:
    """Returns part `index` of `size` rows in `parts`; where they do not divide evenly, earlier ones have one more."""
    if parts == 1:
        return RowRange(0, size)
    least, more = size // parts, size % parts
    if isinstance(size, int) and isinstance(index, int):
        return RowRange(index * least + min(index, more), least + (index < more))
    return RowRange(index * least + tf.minimum(index, more), least + tf.cast(index < more, tf.int32))


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How a global batch is laid out over replicas and micro-batches.

    Virtual replicas are laid out like replicas, though a device computes several one after the other: so nothing
    depends on the number of devices. In the methods, `count` is the number of examples in the global batch, where an
    int says that it is full; `micro` and `replica` are numbers from 0, among all workers.
    """

    batch: int  # examples of a full global batch
    replicas: int  # replicas over all workers, virtual ones if there are any
    accumulate: int  # micro-batches of an update
    first: int = 0  # this worker's first replica among all
    local: int = 0  # this worker's replicas; 0 for all of them
    static: bool = False  # all shapes are known when a step is traced: every batch is full, and the host slices it
    virtual: bool = False  # the replicas are virtual: shapes depend on the number of examples alone, and sums are exact
    ends_anywhere: bool = False  # the number of batches is unknown, and may differ on other workers, see `next_batch`
    none_empty: bool = False  # every batch has a row for each virtual replica of each micro-batch
    full: bool = False  # every batch is known to have `batch` examples, so that shapes are known when a step is traced

    max_micro_rows = property(lambda self: -(-self.batch // (self.replicas * self.accumulate)))
    """Returns the most rows that a replica has of one micro-batch."""

    @property
    def max_rows(self) -> int:
        """Returns the most rows that a replica has of a global batch."""
        return sum(-(-_split(self.batch, self.accumulate, i)[1] // self.replicas) for i in range(self.accumulate))

    even = property(lambda self: self.batch % (self.replicas * self.accumulate) == 0)
    """Returns whether a full batch divides evenly, so that every shape is known beforehand."""

    @property
    def split_by(self) -> str:
        """Returns the argument that splits a batch on any number of devices, as `accumulate=2`; empty for none."""
        if self.accumulate > 1:
            return f"accumulate={self.accumulate}"
        return f"virtual_replicas={self.replicas}" if self.virtual and self.replicas > 1 else ""

    def of_device(self, devices: int, device: int | tf.Tensor) -> RowRange:
        """Returns which of the virtual replicas one device of `devices` computes."""
        return _split(self.replicas, devices, device)

    def for_worker(self, devices: int, first: int, local: int) -> "Layout":
        """Returns the layout for a worker with `local` of all `devices`, the first of which is `first`."""
        if self.virtual:
            start, last = self.of_device(devices, first).start, self.of_device(devices, first + local - 1)
            first, local = start, last.start + last.size - start
        return dataclasses.replace(self, first=first, local=local)

    def micro_batch(self, count: int | tf.Tensor, micro: int | tf.Tensor) -> RowRange:
        """Returns the rows of a micro-batch, the same on any number of replicas, as synchronized BatchNorm needs."""
        return _split(count, self.accumulate, micro)

    def of_replica(self, count: int | tf.Tensor, micro: int | tf.Tensor, replica: int | tf.Tensor) -> RowRange:
        """Returns the rows of a replica in a micro-batch."""
        if isinstance(count, int) and count == self.batch and self.even:
            return RowRange((micro * self.replicas + replica) * self.max_micro_rows, self.max_micro_rows)
        before, size = self.micro_batch(count, micro)
        start, size = _split(size, self.replicas, replica)
        return RowRange(before + start, size)

    def of_worker(self, count: int | tf.Tensor, micro: int | tf.Tensor) -> RowRange:
        """Returns the rows of this worker in a micro-batch."""
        start = self.of_replica(count, micro, self.first).start
        last = self.of_replica(count, micro, self.first + (self.local or self.replicas) - 1)
        return RowRange(start, last.start + last.size - start)

    def start_in_worker(
        self, count: int | tf.Tensor, micro: int | tf.Tensor, start: int | tf.Tensor
    ) -> int | tf.Tensor:
        """Returns where row `start` of a micro-batch is among the rows of this worker, see `worker_positions`."""
        if not self.local:
            return start
        sizes = [self.of_worker(count, m).size for m in range(self.accumulate)]
        earlier = sum(sizes[:micro]) if isinstance(micro, int) else tf.reduce_sum(tf.stack(sizes)[:micro])
        return start - self.of_worker(count, micro).start + earlier

    def worker_positions(self, count: int) -> list[np.ndarray]:
        """Returns this worker's rows of a global batch: for each micro-batch, int64 [n]."""
        if not self.local:
            return [np.arange(count)]
        ranges = [self.of_worker(count, micro) for micro in range(self.accumulate)]
        return [np.arange(own.start, own.start + own.size) for own in ranges]


class MicroBatch(NamedTuple):
    """The rows of a replica in a micro-batch."""

    data: Structure
    """(x, y, weight), tensors [n, ...]; of no rows, a row of another replica, of which nothing may count."""
    size: int | tf.Tensor  # number of rows, possibly 0
    total: int | tf.Tensor  # number of rows of all replicas
    parts: int  # into how many parts a device takes the global batch apart: micro-batches, times virtual replicas
    max_size: int  # the most rows that a replica ever has, where collectives between workers need it; else 0
    present: tf.Tensor | None  # whether there is a row, a bool scalar; None for certainly
    padded: bool = False  # `data` has `max_size` rows though `size`, a tensor, may be one less: the last one is padding
    row_mask: tf.Tensor | None = None  # which rows of `data` count, bool [max_size]; None for all that are present


class Batch(NamedTuple):
    """A global batch, or a worker's part of it, out of which each replica takes its rows."""

    table: Structure  # examples, tensors [n, ...]
    rows: tf.Tensor | tuple[()]
    """Where in `table` the rows of the batch are, int32 [rows]; () where `table` is the batch, or this worker's part.

    A tensor is a whole global batch, also for a worker."""
    count: tf.Tensor  # examples in the global batch, an int32 scalar

    def micro_batch(
        self, layout: Layout, count: int | tf.Tensor, micro: int | tf.Tensor, replica: int | tf.Tensor
    ) -> MicroBatch:
        """Takes the rows of a replica in a micro-batch; arguments as for `Layout`."""
        rows = layout.of_replica(count, micro, replica)
        parts = layout.replicas * layout.accumulate
        certain = parts == 1 or layout.none_empty or (isinstance(count, int) and count >= parts)
        return MicroBatch(
            data=self._take(rows, layout.start_in_worker(count, micro, rows.start)),
            size=rows.size,
            total=layout.micro_batch(count, micro).size,
            parts=layout.accumulate * (layout.replicas if layout.virtual else 1),
            max_size=layout.max_micro_rows if layout.local else 0,
            present=None if certain else tf.convert_to_tensor(rows.size > 0),
        )

    def _take(self, rows: RowRange, start_in_worker: int | tf.Tensor) -> Structure:
        """Returns tensors [rows.size, ...]; of no rows, the first row there is."""
        in_table = isinstance(self.rows, tuple)
        start = start_in_worker if in_table else rows.start
        size = max(rows.size, 1) if isinstance(rows.size, int) else None
        # Behind the end there is nothing to take.
        start = tf.where(rows.size > 0, start, 0) if size is None else start if rows.size else 0
        end = start + (tf.maximum(rows.size, 1) if size is None else size)

        def sliced(tensor: tf.Tensor) -> tf.Tensor:
            return with_shape(tensor[start:end], [size, *tensor.shape[1:]])

        if in_table:
            return keras.tree.map_structure(sliced, self.table)
        numbers: tf.Tensor = self.rows
        if size is None or size != numbers.shape[0]:  # all of them begin at the first
            numbers = sliced(numbers)
        return keras.tree.map_structure(lambda t: tf.gather(t, numbers), self.table)


class HostSlice(NamedTuple):
    """The rows of a global batch that the host has sliced for one replica, which needs static shapes, as on a TPU.

    The number of examples is known then, too: slices differ by one row at most, and the shorter ones are padded.
    """

    data: Structure  # tensors [micro-batches, layout.max_micro_rows, ...]
    sizes: tf.Tensor  # how many rows of each micro-batch count, int32 [micro-batches]

    def micro_batch(
        self, layout: Layout, count: int | tf.Tensor, micro: int | tf.Tensor, replica: int | tf.Tensor
    ) -> MicroBatch:
        """Returns the rows of this replica in a micro-batch."""
        least = layout.batch // (layout.replicas * layout.accumulate)
        size = layout.max_micro_rows if layout.even else self.sizes[micro]
        padded = bool(least) and not layout.even
        return MicroBatch(
            data=keras.tree.map_structure(lambda tensor: tensor[micro], self.data),
            size=size,
            total=layout.micro_batch(layout.batch, micro).size,
            parts=layout.accumulate,
            max_size=layout.max_micro_rows,
            present=None if least else size > 0,
            padded=padded,
            row_mask=tf.range(layout.max_micro_rows) < size if padded else None,
        )


ReplicaBatch: TypeAlias = Batch | HostSlice  # what a replica gets of a global batch


def host_slices(batch: Batch, layout: Layout) -> list[HostSlice]:
    """Slices a global batch of `layout.batch` examples for each replica."""
    ranges = [
        [layout.of_replica(layout.batch, micro, replica) for micro in range(layout.accumulate)]
        for replica in range(layout.replicas)
    ]
    sizes = np.array([[rows.size for rows in of_one] for of_one in ranges], np.int32)
    starts = np.array([[rows.start for rows in of_one] for of_one in ranges])
    # Behind its last row a replica has that one again; without any it has the first of the batch.
    at = np.minimum(np.arange(layout.max_micro_rows), np.maximum(sizes - 1, 0)[..., None])
    positions = np.where(sizes[..., None] > 0, starts[..., None] + at, 0)
    with tf.device("CPU:0"):
        rows = tf.constant(positions.reshape(-1), tf.int32)
        if not isinstance(batch.rows, tuple):
            rows = tf.gather(batch.rows, rows)

        def of_replicas(tensor: tf.Tensor) -> list[tf.Tensor]:
            return tf.unstack(tf.reshape(tf.gather(tensor, rows), [*positions.shape, *tensor.shape[1:]]))

        columns = [of_replicas(tensor) for tensor in keras.tree.flatten(batch.table)]
        return [
            HostSlice(
                keras.tree.pack_sequence_as(batch.table, [column[replica] for column in columns]),
                tf.constant(sizes[replica]),
            )
            for replica in range(layout.replicas)
        ]


def fetch(feed: tuple, i: tf.Tensor, layout: Layout) -> tuple:
    """Returns whether a feed has global batch `i`, and a function that takes it, as a `Batch`.

    A feed is (table, rows [n, layout.batch], counts [n]) for data in memory; (iterator,), in which `i` is the next; or
    (batch, count) for a single one, of which it has this worker's rows.
    """
    if len(feed) == 2:
        return True, lambda: Batch(feed[0], (), feed[1])
    if len(feed) == 3:
        table, rows, counts = feed

        def next_of_table() -> Batch:
            # By one op, where a slice of a tensor takes four: they are a tenth of an update of a small model.
            with tf.device("CPU:0"):
                return Batch(table, tf.gather(rows, i), tf.gather(counts, i))

        return True, next_of_table
    element = feed[0].get_next_as_optional()

    def take() -> Batch:
        batch = element.get_value()
        if layout.local:  # the pipeline has left out the rows of the other workers
            return Batch(batch[0], (), batch[1])
        return Batch(batch, (), tf.shape(keras.tree.flatten(batch)[0])[0])

    return element.has_value(), take


def own_rows(batch: tuple, layout: Layout) -> tuple:
    """Takes this worker's rows of a global batch inside a data set; one, if there is any, for replicas without.

    Returns them and the number of examples of the whole batch.
    """
    count = tf.shape(keras.tree.flatten(batch)[0])[0]
    fits = tf.debugging.assert_less_equal(
        count, layout.batch, f"a batch of the data set is larger than the first one ({layout.batch} examples)"
    )
    with tf.control_dependencies([fits] if fits is not None else []):
        count = tf.identity(count)
    ranges = [layout.of_worker(count, micro) for micro in range(layout.accumulate)]
    rows = tf.concat([tf.range(own.start, own.start + own.size) for own in ranges], 0)
    rows = tf.cond(tf.size(rows) > 0, lambda: rows, lambda: tf.zeros([tf.minimum(count, 1)], tf.int32))
    return keras.tree.map_structure(lambda t: tf.gather(t, rows), batch), count


def unpack(data: tuple) -> tuple:
    """Returns (x, y, weight) of a tuple of one to three entries; missing ones are None."""
    return (*data, None, None)[:3]


def with_shape(tensor: tf.Tensor, shape: list) -> tf.Tensor:
    """Restores a static shape that slicing by a tensor loses."""
    tensor.set_shape(shape)
    return tensor
