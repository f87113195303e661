"""From a source of examples to a feed of global batches: laid out over replicas, in the order of each epoch."""

from __future__ import annotations

import dataclasses
import functools

import keras
import numpy as np
import tensorflow as tf

from tfdist.config import schedule
from tfdist.data import sources, worker_facts
from tfdist.data.batch_layout import Layout
from tfdist.data.feeds.array_feed import ArrayFeed
from tfdist.data.feeds.batch_feed import BatchFeed, SequenceFeed
from tfdist.data.feeds.record_feed import RecordFeed
from tfdist.data.feeds.static_feed import StaticFeed
from tfdist.data.python_batches import SequenceReader
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError


def layout_of(
    source: sources.Source,
    batch: int | None,
    distribution: Distribution,
    accumulate: int,
    least: bool = True,
    shards: int = 0,
) -> Layout:
    """Returns how the global batches of `source` are laid out, which all workers must have alike.

    Args:
      source: the examples; a data set brings its own batch size.
      batch: global batch, 32 if not given.
      accumulate: micro-batches per update.
      least: insist on an example per replica or shard, and micro-batch; measuring does without.
      shards: into which every micro-batch is cut; 0 for a slice per replica.

    Raises:
      UserError: a batch that does not fit, or another worker has other data.
    """
    if isinstance(source, sources.Batches):
        own = int(tf.nest.flatten(source.decoded.element_spec)[0].shape[0] or 0)
        own = own or len(keras.tree.flatten(sources.first_batch(source))[0])
        # A data set of a single, smaller batch is all of it; one of unknown length may be.
        if batch not in (None, own) and not (own < batch and source.batches in (1, None)):
            raise UserError(f"batch_size={batch} does not fit a data set of batches of {own}: leave it out")
        batch = own
    batch = 32 if batch is None else batch
    if batch < 1:
        raise UserError(f"batch_size must be at least 1, got {batch}")
    if accumulate < 1:
        raise UserError(f"accumulate must be at least 1, got {accumulate}")
    whole = (
        isinstance(source, sources.Batches) and source.batches == 1
    )  # all there is, and no more than an epoch's tail
    if least and not whole:
        what = "the data set's first batch (of {})" if isinstance(source, sources.Batches) else "batch_size={}"
        schedule.check_batch(batch, distribution.replicas, accumulate, what, shards)
    if distribution.workers == 1 and not shards:
        return Layout(batch, distribution.replicas, accumulate, static=distribution.static_shapes)
    if shards:
        layout = _in_shards(source, Layout(batch, shards, accumulate, shards=True), distribution)
    else:
        layout = Layout(batch, distribution.replicas, accumulate, distribution.first, len(distribution.devices))
    if distribution.workers == 1:
        return layout
    if sources.reader(source).alone:
        raise UserError(sources.reader(source).alone)
    distribution.peers.check_same({**worker_facts.facts(source), "batch": batch}, "the data")
    unknown = isinstance(source, sources.Batches) and source.batches is None
    return dataclasses.replace(layout, ends_anywhere=unknown)


def _in_shards(source: sources.Source, layout: Layout, distribution: Distribution) -> Layout:
    """Returns `layout` with what is known of the shards of this worker, and of those without rows."""
    parts = layout.replicas * layout.accumulate
    known = not isinstance(source, sources.Batches)
    layout = dataclasses.replace(layout, none_empty=known and min(sizes(source, layout)) >= parts)
    if distribution.workers == 1:
        return layout
    first = layout.of_device(distribution.replicas, distribution.first)
    last = layout.of_device(distribution.replicas, distribution.first + len(distribution.devices) - 1)
    return dataclasses.replace(layout, first=first.start, local=last.start + last.rows - first.start)


def sizes(source: sources.Source, layout: Layout) -> set[int]:
    """Returns how many examples the batches of `source` have, as far as that is known before they are read."""
    if isinstance(source, sources.Batches):
        return {layout.batch}
    return {min(layout.batch, source.size), source.size % layout.batch or layout.batch}


def batch_size_of(source: sources.Source, batch: int | None, steps: int | None) -> int | None:
    """Returns the batch size; not given, arrays are divided into `steps` batches, as Keras does."""
    if batch is None and steps and isinstance(source, sources.Arrays):
        return -(-source.size // steps)
    return batch


Feed = ArrayFeed | BatchFeed | RecordFeed | StaticFeed
_Inner = ArrayFeed | BatchFeed | RecordFeed


def read_epochs(source: sources.Source, layout: Layout, shuffle: bool, seed: int, across: bool = False) -> Feed:
    """Returns a feed that reads `source` again and again, in a new order each time if it is to `shuffle`.

    Args:
      across: epochs have a length of their own, and go on in a data set where the one before has ended.
    """
    if not isinstance(shuffle, (bool, np.bool_)):
        raise UserError(f"shuffle must be True or False, got {shuffle!r}: shuffle within batches yourself")
    if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**31:
        raise UserError(f"seed must be a whole number between 0 and {2**31 - 1}, got {seed!r}")
    order = seed if shuffle else None
    match source:
        case sources.Arrays():
            feed: _Inner = ArrayFeed(source, layout, order)
        case sources.Records():
            feed = RecordFeed(source, layout, order, seed)
        case _ if isinstance(source.reader, SequenceReader):
            feed = SequenceFeed(source, layout, order)
        case _:
            feed = BatchFeed(source, layout, across=across)
    return StaticFeed(feed, layout) if layout.static else feed


def digest(feed: Feed, batches: int) -> str:
    """Returns a checksum of what a feed has read so far, `batches` more than before, which all workers must have alike.

    It is "" where the order is a function of seed and epoch, and so the same in any case.
    """
    return feed.digest(batches) if isinstance(feed, BatchFeed) else ""


def read_once(source: sources.Source, layout: Layout) -> tuple[Feed, int | None]:
    """Returns a feed that reads `source` in its own order, and its number of batches if known."""
    batches: int | None
    if isinstance(source, sources.Batches):
        kind = SequenceFeed if isinstance(source.reader, SequenceReader) else functools.partial(BatchFeed, once=True)
        feed: _Inner = kind(source, layout)
        batches = source.batches or None
    else:
        feed = ArrayFeed(source, layout) if isinstance(source, sources.Arrays) else RecordFeed(source, layout)
        batches = feed.batches
    return StaticFeed(feed, layout) if layout.static else feed, batches
