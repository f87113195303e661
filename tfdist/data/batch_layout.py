"""How a global batch is shared out: over micro-batches, and each micro-batch over the replicas.

A global batch reaches a replica as a table of examples and, for data in memory, row numbers into it. Every part is a
run of rows that follow each other, and the parts are as even as they can be: a short batch is shared out like a full
one, and no row is added. Only a replica for which there is no row at all computes on one that is another's, and
nothing of it counts.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.structures import Structure


class Share(NamedTuple):
    """The rows of one replica in one micro-batch, or of a worker's replicas together."""

    start: int | tf.Tensor
    """The first of them."""
    rows: int | tf.Tensor
    """How many there are, possibly none."""


def _part(whole: int | tf.Tensor, parts: int, index: int | tf.Tensor) -> Share:
    """Returns part `index` of `parts` of so many rows; where they do not divide evenly, earlier ones have one more."""
    if parts == 1:
        return Share(0, whole)
    least, more = whole // parts, whole % parts
    if isinstance(whole, int) and isinstance(index, int):
        return Share(index * least + min(index, more), least + (index < more))
    return Share(index * least + tf.minimum(index, more), least + tf.cast(index < more, tf.int32))


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How a global batch is laid out over replicas and micro-batches.

    With shards, each of them is a replica here, though a device computes several one after the other: then nothing
    depends on how many devices there are.
    """

    batch: int
    """Examples of a full global batch."""
    replicas: int
    """Copies of the model over all workers, or shards."""
    accumulate: int
    """Micro-batches of an update."""
    first: int = 0
    """This worker's first replica among all."""
    local: int = 0
    """This worker's replicas; 0 for all of them."""
    static: bool = False
    """All shapes are known when a step is traced: every batch has `batch` examples, see static_rows.py."""
    shards: bool = False
    """The replicas are shards, whose shapes depend on the number of examples alone."""
    ends_anywhere: bool = False
    """The number of batches is not known, and may differ on other workers; see `step/next_batch.py`."""
    none_empty: bool = False
    """Every batch that there will be has a row for each shard of each micro-batch."""

    @property
    def micro(self) -> int:
        """Returns the most rows of one micro-batch of one replica."""
        return -(-self.batch // (self.replicas * self.accumulate))

    @property
    def share(self) -> int:
        """Returns the most rows of one replica."""
        return sum(-(-_part(self.batch, self.accumulate, i)[1] // self.replicas) for i in range(self.accumulate))

    @property
    def even(self) -> bool:
        """Returns whether a full batch divides evenly, so that every shape is known beforehand."""
        return self.batch % (self.replicas * self.accumulate) == 0

    @property
    def here(self) -> int:
        """Returns the number of this worker's replicas."""
        return self.local or self.replicas

    @property
    def taken_apart(self) -> str:
        """Returns by which argument a batch is taken apart on any number of devices; nothing if by none."""
        if self.accumulate > 1:
            return f"accumulate={self.accumulate}"
        return f"virtual_replicas={self.replicas}" if self.shards and self.replicas > 1 else ""

    def of_device(self, devices: int, device: int | tf.Tensor) -> Share:
        """Returns the shards that one device of so many computes: the first of them, and how many there are."""
        return _part(self.replicas, devices, device)

    def shared(self, count: int | tf.Tensor, micro: int | tf.Tensor, replica: int | tf.Tensor) -> Share:
        """Returns the rows of a replica in a micro-batch, counted in the global batch.

        The micro-batches are the same on any number of replicas: what looks across one, as synchronized BatchNorm does,
        finds the same examples together.

        Args:
          count: examples in the global batch; an int says that it is full.
          micro: number of the micro-batch.
          replica: number among all replicas.
        """
        if isinstance(count, int) and self.even:
            return Share((micro * self.replicas + replica) * self.micro, self.micro)
        before, rows = self.micro_batch(count, micro)
        start, rows = _part(rows, self.replicas, replica)
        return Share(before + start, rows)

    def micro_batch(self, count: int | tf.Tensor, micro: int | tf.Tensor) -> Share:
        """Returns the rows of all replicas in a micro-batch; arguments as for `shared`."""
        return _part(count, self.accumulate, micro)

    def of_worker(self, count: int | tf.Tensor, micro: int | tf.Tensor) -> Share:
        """Returns the rows of this worker in a micro-batch, which follow each other in the global batch."""
        start = self.shared(count, micro, self.first).start
        last = self.shared(count, micro, self.first + self.here - 1)
        return Share(start, last.start + last.rows - start)

    def in_own(self, count: int | tf.Tensor, micro: int | tf.Tensor, replica: int | tf.Tensor) -> Share:
        """Returns the same as `shared`, counted in the rows that this worker has taken by `own_positions`."""
        share = self.shared(count, micro, replica)
        if not self.local:
            return share
        before = self.of_worker(count, micro).start
        taken: int | tf.Tensor = 0
        for earlier in range(self.accumulate):
            taken += self.of_worker(count, earlier).rows * _as_number(earlier < micro)
        return Share(share.start - before + taken, share.rows)

    def own_positions(self, count: int) -> list[np.ndarray]:
        """Returns this worker's rows of a global batch of `count` examples: for each micro-batch, int64 [n]."""
        if not self.local:
            return [np.arange(count)]
        positions = []
        for whole in np.array_split(np.arange(count), self.accumulate):
            of_replica = np.array_split(whole, self.replicas)
            positions.append(np.concatenate(of_replica[self.first : self.first + self.local]))
        return positions


def _as_number(condition: bool | tf.Tensor) -> int | tf.Tensor:
    return int(condition) if isinstance(condition, bool) else tf.cast(condition, tf.int32)


class Batch(NamedTuple):
    """A global batch, or a worker's part of it."""

    table: Structure
    """Examples, tensors [n, ...]."""
    rows: tf.Tensor | tuple[()]
    """Where in `table` the rows of the batch are, int32 [rows]; () where `table` is the batch, or this worker's part.

    A tensor is a whole global batch, also for a worker."""
    count: tf.Tensor
    """Examples in the global batch, an int32 scalar."""


def fetch(feed: tuple, i: tf.Tensor, layout: Layout) -> tuple:
    """Returns whether a feed has global batch `i`, and a function that takes it, as a `Batch`.

    A feed is (table, rows [n, layout.batch], counts [n]) for a data set in memory, or (iterator,) over global batches,
    in which `i` is always the next.
    """
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


class Rows(NamedTuple):
    """What a replica has of a micro-batch."""

    data: Structure
    """Tensors [n, ...]; where there is no row, one that is not this replica's, of which nothing may count."""
    number: int | tf.Tensor
    """How many rows there are, possibly none."""
    whole: int | tf.Tensor
    """How many rows all replicas have together."""
    micro_batches: int
    """Of the global batch."""
    most: int
    """The most rows that a replica ever has of one, where collectives between workers want to know; or 0."""
    present: tf.Tensor | None
    """Whether there is a row, a bool scalar; None for certainly."""
    filled: bool = False
    """Whether `data` has `most` rows though `number`, a tensor, may be one less: then the last one counts nowhere."""

    def real(self) -> tf.Tensor | None:
        """Returns which rows of `data` count, bool [most]; None for all, as far as `present` allows."""
        return tf.range(self.most) < self.number if self.filled else None


def rows_of(batch: Batch, share: Share, in_own: Share) -> Structure:
    """Takes some rows of a global batch.

    Args:
      batch: see `Batch`.
      share: the rows, counted in the global batch.
      in_own: the same, counted in the part of this worker.

    Returns:
      Tensors [share.rows, ...]; of no rows, the first row there is.
    """
    of_table = isinstance(batch.rows, tuple)
    start = in_own.start if of_table else share.start
    if isinstance(share.rows, int):
        end, known = start + share.rows, share.rows
    else:  # behind the end there is nothing to take
        start = tf.where(share.rows > 0, start, 0)
        end, known = start + tf.maximum(share.rows, 1), None

    def some(tensor: tf.Tensor) -> tf.Tensor:
        return with_shape(tensor[start:end], [known, *tensor.shape[1:]])

    if of_table:
        return keras.tree.map_structure(some, batch.table)
    rows: tf.Tensor = batch.rows
    if known is None or known != rows.shape[0]:  # all of them begin at the first
        rows = some(rows)
    return keras.tree.map_structure(lambda t: tf.gather(t, rows), batch.table)


def own_rows(batch: tuple, layout: Layout) -> tuple:
    """Takes this worker's rows of a global batch inside a data set; at least one, for replicas that have none.

    Returns them and the number of examples of the whole batch.
    """
    count = tf.shape(keras.tree.flatten(batch)[0])[0]
    fits = tf.debugging.assert_less_equal(
        count, layout.batch, f"a batch of the data set is larger than the first one ({layout.batch} examples)"
    )
    with tf.control_dependencies([fits] if fits is not None else []):
        count = tf.identity(count)
    shares = [layout.of_worker(count, micro) for micro in range(layout.accumulate)]
    rows = tf.concat([tf.range(share.start, share.start + share.rows) for share in shares], 0)
    rows = tf.cond(tf.size(rows) > 0, lambda: rows, lambda: tf.zeros([1], tf.int32))
    return keras.tree.map_structure(lambda t: tf.gather(t, rows), batch), count


def unpack(data: tuple) -> tuple:
    """Returns (x, y, weight) of a tuple of one to three entries; missing ones are None."""
    padded = (*data, None, None)
    return padded[0], padded[1], padded[2]


def with_shape(tensor: tf.Tensor, shape: list) -> tf.Tensor:
    """Restores a static shape that slicing by a tensor loses."""
    tensor.set_shape(shape)
    return tensor
