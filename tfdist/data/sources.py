"""Data as `fit`, `evaluate` and `predict` accept it, as a source; and from a source to a feed of global batches."""

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data import python_batches
from tfdist.data.arrays import Arrays, crc  # noqa: F401
from tfdist.data.batch_layout import Layout
from tfdist.data.batches import Batches
from tfdist.data.protocol import Feed, Source, StaticFeed, one_hot, order, weigh_classes  # noqa: F401
from tfdist.data.records import Records  # noqa: F401  like those above, for users of sources
from tfdist.data.spec import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError


def as_source(data: Any, y: Structure = None, weight: Structure = None) -> Source:
    """Returns what `fit`, `evaluate` and `predict` accept, as a source.

    Args:
      data: a source, a `tf.data.Dataset` of global batches, arrays or a structure of arrays, or a tuple (x, y) or
        (x, y, weight) if `y` is None.
      y: targets when `data` is arrays.
      weight: sample weights when `data` is arrays.
    """
    reader = None if isinstance(data, (Source, tf.data.Dataset)) else python_batches.reader(data)
    if reader is not None or isinstance(data, (Source, tf.data.Dataset)):
        if y is not None or weight is not None:
            raise UserError(f"targets and weights belong into the data set itself when it is a {type(data).__name__}")
        if isinstance(data, Source):
            return data
        return Batches(data) if reader is None else Batches(reader.dataset(), reader=reader)
    whole = isinstance(data, tuple) and y is None and weight is None and 1 <= len(data) <= 3
    columns = python_batches.without_missing(data if whole else (data, y, weight))
    floats = keras.config.floatx()

    def column(value: object) -> np.ndarray:
        array = python_batches.array(value)
        # As Keras does: else float64, NumPy's own type, would meet the float32 of a model's own constants.
        return array.astype(floats) if array.dtype.kind == "f" and array.dtype != floats else array

    return Arrays(keras.tree.map_structure(column, columns))


def check_labels(y: np.ndarray, classes: int, what: str) -> None:
    """Raises UserError when an integer target is not in [0, classes): a GPU would train on NaN instead of failing."""
    y = np.asarray(y)
    wrong = np.flatnonzero((y.reshape(-1) < 0) | (y.reshape(-1) >= classes))
    if wrong.size:
        value, example = y.reshape(-1)[wrong[0]], wrong[0] // max(1, y[0].size)
        raise UserError(
            f"label {value} of example {example} is out of range for {what} with {classes} classes "
            f"(0 to {classes - 1}); {wrong.size} such label{'s' * (wrong.size > 1)}",
            "correct the labels or the model's last layer",
        )


def layout_of(
    source: Source,
    batch: int | None,
    distribution: Distribution,
    accumulate: int,
    least: bool = True,
    virtual_replicas: int = 0,
) -> Layout:
    """Returns how the global batches of `source` are laid out, which all workers must have alike.

    Args:
      batch: global batch, 32 if not given; a data set brings its own.
      accumulate: micro-batches per update.
      least: insist on an example per replica or shard, and micro-batch; measuring does without.
      virtual_replicas: into which every micro-batch is cut; 0 for a slice per replica.
    """
    batch = source.global_batch(batch)
    if batch < 1:
        raise UserError(f"batch_size must be at least 1, got {batch}")
    if accumulate < 1:
        raise UserError(f"accumulate must be at least 1, got {accumulate}")
    if least:
        source.check_parts(batch, distribution.replicas, accumulate, virtual_replicas)
    replicas, virtual = virtual_replicas or distribution.replicas, bool(virtual_replicas)
    layout = Layout(batch, replicas, accumulate, virtual=virtual, full=source.all_full(batch) and not virtual)
    if virtual_replicas and source.size is not None:
        layout = dataclasses.replace(layout, none_empty=min(source.sizes(batch)) >= virtual_replicas * accumulate)
    if distribution.workers == 1:
        return dataclasses.replace(layout, static=distribution.static_shapes and not virtual_replicas)
    layout = layout.for_worker(distribution.replicas, distribution.first, len(distribution.devices))
    if source.reader.alone:
        raise UserError(source.reader.alone)
    distribution.peers.check_same({**source.facts(), "batch": batch, **source.contents()}, "the data")
    return dataclasses.replace(layout, ends_anywhere=source.ends_anywhere)


def read(source: Source, layout: Layout, shuffle: bool, seed: int, across: bool = False, once: bool = False) -> Feed:
    """Returns a feed that reads `source` again and again, or `once`; in a new order each time if `shuffle`."""
    if not isinstance(shuffle, (bool, np.bool_)):
        raise UserError(f"shuffle must be True or False, got {shuffle!r}", "shuffle within batches yourself")
    if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**31:
        raise UserError(f"seed must be an integer between 0 and {2**31 - 1}, got {seed!r}")
    feed = source.feed(layout, seed if shuffle else None, None if once else seed, across)
    return StaticFeed(feed, layout) if layout.static else feed
