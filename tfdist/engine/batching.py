"""From a source of examples to a feed of global batches: laid out over replicas, in the order of each epoch."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tfdist.config import schedule
from tfdist.data import sources
from tfdist.data.batch_layout import Layout
from tfdist.data.feeds import ArrayFeed, BatchFeed
from tfdist.data.record_feed import RecordFeed
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError


def layout_of(
    source: sources.Source, batch: int | None, distribution: Distribution, accumulate: int, least: bool = True
) -> Layout:
    """Returns how the global batches of `source` are laid out, which all workers must have alike.

    Args:
      source: the examples; a data set brings its own batch size.
      batch: global batch, 32 if not given.
      accumulate: micro-batches per update.
      least: insist on an example per replica and micro-batch; measuring does without.

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
    if least:
        schedule.check_batch(batch, distribution.replicas, accumulate, "batch_size")
    if distribution.workers == 1:
        return Layout(batch, distribution.replicas, accumulate)
    distribution.peers.check_same({**sources.facts(source), "batch": batch}, "the data")
    return Layout(batch, distribution.replicas, accumulate, distribution.first, len(distribution.devices))


Feed = ArrayFeed | BatchFeed | RecordFeed


def read_epochs(source: sources.Source, layout: Layout, shuffle: bool, seed: int) -> Feed:
    """Returns a feed that reads `source` again and again, in a new order each time if it is to `shuffle`."""
    if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**31:
        raise UserError(f"seed must be a whole number between 0 and {2**31 - 1}, got {seed!r}")
    order = seed if shuffle else None
    match source:
        case sources.Arrays():
            return ArrayFeed(source, layout, order)
        case sources.Records():
            return RecordFeed(source, layout, order, seed)
    return BatchFeed(source, layout)


def digest(feed: Feed, batches: int) -> str:
    """Returns a checksum of what a feed has read so far, `batches` more than before, which all workers must have alike.

    It is "" where the order is a function of seed and epoch, and so the same in any case.
    """
    return feed.digest(batches) if isinstance(feed, BatchFeed) else ""


def read_once(source: sources.Source, layout: Layout) -> tuple[Feed, int | None]:
    """Returns a feed that reads `source` in its own order, and its number of batches if known."""
    if isinstance(source, sources.Batches):
        return BatchFeed(source, layout, once=True), source.batches or None
    feed = ArrayFeed(source, layout) if isinstance(source, sources.Arrays) else RecordFeed(source, layout)
    return feed, feed.batches
