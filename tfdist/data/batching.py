"""From a source of examples to a feed of global batches: laid out over replicas, in the order of each epoch."""

from __future__ import annotations

import dataclasses

import numpy as np

from tfdist.data.batch_layout import Layout
from tfdist.data.protocol import Feed, Source, StaticFeed
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError


def layout_of(
    source: Source,
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
    batch = source.global_batch(batch)
    if batch < 1:
        raise UserError(f"batch_size must be at least 1, got {batch}")
    if accumulate < 1:
        raise UserError(f"accumulate must be at least 1, got {accumulate}")
    if least:
        source.check_parts(batch, distribution.replicas, accumulate, shards)
    layout = Layout(batch, shards or distribution.replicas, accumulate, virtual=bool(shards))
    if shards and source.size is not None:
        layout = dataclasses.replace(layout, none_empty=min(source.sizes(batch)) >= shards * accumulate)
    if distribution.workers == 1:
        return dataclasses.replace(layout, static=distribution.static_shapes and not shards)
    layout = layout.for_worker(distribution.replicas, distribution.first, len(distribution.devices))
    if source.reader.alone:
        raise UserError(source.reader.alone)
    distribution.peers.check_same({**source.facts(), "batch": batch}, "the data")
    return dataclasses.replace(layout, ends_anywhere=source.ends_anywhere)


def read_epochs(source: Source, layout: Layout, shuffle: bool, seed: int, across: bool = False) -> Feed:
    """Returns a feed that reads `source` again and again, in a new order each time if it is to `shuffle`.

    Args:
      across: epochs have a length of their own, and go on in a data set where the one before has ended.
    """
    if not isinstance(shuffle, (bool, np.bool_)):
        raise UserError(f"shuffle must be True or False, got {shuffle!r}: shuffle within batches yourself")
    if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**31:
        raise UserError(f"seed must be a whole number between 0 and {2**31 - 1}, got {seed!r}")
    order = seed if shuffle else None
    feed = source.feed(layout, order, seed, across)
    return StaticFeed(feed, layout) if layout.static else feed


def read_once(source: Source, layout: Layout) -> Feed:
    """Returns a feed that reads `source` in its own order."""
    feed = source.feed_once(layout)
    return StaticFeed(feed, layout) if layout.static else feed
