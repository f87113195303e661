"""Sources of images: made one size, changed at random, held in memory."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.arrays import Arrays
from tfdist.data.augmentation import ops
from tfdist.data.batch_layout import Layout
from tfdist.data.protocol import Source
from tfdist.data.records import UNREADABLE, RecordFeed, Records
from tfdist.data.structures import Structure
from tfdist.errors import UserError

_PIECE = 256


def sized(source: Records, size: tuple[int, int], policy: str) -> Records:
    """Makes the images of a source `size`, as `ops.resize` does it."""
    decode = source.decode

    def made(stored: Structure, seed: tf.Tensor) -> tuple:
        x, *rest = decode(stored, seed)
        return ops.resize(x, size, policy), *rest

    return dataclasses.replace(source, decode=made)


def resized(source: Source, size: tuple[int, int], policy: str) -> Arrays | Records:
    """Makes the images of any source `size`; those in memory at once."""
    made = sized(source.by_number("data.image_size"), size, policy)
    return made if source.columns is None else in_memory(made)


def augmented(source: Source, recipe: ops.Recipe, size: tuple[int, int]) -> Records:
    """Changes the images of a source at random, in another way each epoch.

    Args:
      size: height and width that they have afterwards.
    """
    records: Records = source.by_number("data.augment")
    decode = records.decode

    def changed(stored: Structure, seed: tf.Tensor) -> tuple:
        x, *rest = decode(stored, seed)
        x = recipe.example(x, seed, size)
        return tf.ensure_shape(x, [*size, x.shape[-1]]), *rest

    return dataclasses.replace(records, decode=changed, mix=recipe.mix)


def in_memory(source: Records) -> Arrays:
    """Decodes all examples once, and keeps them."""
    spec = source.specs
    columns = keras.tree.map_structure(
        lambda s: np.empty([source.size, *s.shape[1:]], s.dtype.as_numpy_dtype), tuple(spec)
    )
    row = 0
    try:
        for batch in source.in_order(_PIECE):
            for column, part in zip(keras.tree.flatten(columns), keras.tree.flatten(batch)):
                column[row : row + len(part)] = part
            row += len(part)
    except UNREADABLE:
        feed = RecordFeed(source, Layout(_PIECE, 1, 1))
        feed.next(row // _PIECE, 1)
        if unreadable := feed.first_unreadable():
            raise UserError(f"{unreadable}: remove it, or write it anew") from None
        raise
    return Arrays(columns)


def size_in_memory(source: Records) -> int:
    """Returns the bytes that `in_memory` takes."""
    specs = tf.nest.flatten(source.specs)
    return source.size * sum(int(np.prod(s.shape[1:])) * s.dtype.size for s in specs)
