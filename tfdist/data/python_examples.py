"""Examples that Python makes by number: a random-access source or `MapDataset` of Grain, or whatever has a length and
items, such as a map-style data set of torch. Neither package is imported.
"""

import contextlib
import sys
import threading
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.config.messages import logger
from tfdist.data.sources import Records
from tfdist.data.spec import Structure
from tfdist.errors import UserError, one_line


def is_by_number(data: object) -> bool:
    """Returns whether `data` has a length and items, and is no array, table, or sequence of batches."""
    known = isinstance(data, (Sequence, Mapping, tf.Tensor, keras.utils.PyDataset)) or hasattr(data, "__array__")
    if known or not hasattr(data, "__getitem__"):
        return False
    try:
        return len(data) >= 0  # type: ignore[arg-type]
    except TypeError:  # also of a sparse matrix, which has the method
        return False


class Examples:
    """Examples (x, y) or (x, y, weight) by number, of data for which `is_by_number` holds; `what` names it."""

    def __init__(self, data: object, what: str):
        self._data, self._what = data, what
        grains = [c.__name__ for c in type(data).__mro__ if c.__module__.startswith("grain")]
        if "BatchMapDataset" in grains:
            what = f"{what} returned batches, and needs examples, which are batched later"
            raise UserError(what, "leave out batch()")
        size = len(data)  # type: ignore[arg-type]
        if size == sys.maxsize:
            raise UserError(f"{what} returned examples without end", "leave out repeat()")
        pipeline = [data]
        for part in pipeline:  # which grows meanwhile, by all that it is made of
            pipeline += getattr(part, "parents", None) or ()
        if size and any("RandomMap" in type(part).__name__ for part in pipeline):
            logger.info(
                f"WARNING: random_map of {what} draws once for an example, alike in each epoch: see data.augment"
            )
        # Grain itself reads by several threads; others may have a file that is open.
        self._lock = contextlib.nullcontext() if grains else threading.Lock()
        self.size = size
        self._first: tuple = ()
        if size:
            try:
                self._first = self._example(0)
            except Exception as error:  # of code that is not ours
                raise UserError(f"example 0 of {what} cannot be read: {one_line(error, 200).rstrip('.')}") from error

    @property
    def are_images(self) -> bool:
        """True if the input is one image of bytes."""
        x = self._first[0] if self._first else None
        return isinstance(x, np.ndarray) and x.dtype == np.uint8 and x.ndim == 3

    @property
    def have_classes(self) -> bool:
        """True if the target is one integer."""
        y = self._first[1] if self._first else None
        return isinstance(y, np.ndarray) and y.ndim == 0 and y.dtype.kind in "iu"

    def labels(self) -> np.ndarray:
        """Returns the class of each example: what the attribute `labels` tells, else what is read of all of them."""
        classes = self._class_attribute()
        if classes is None:
            line = f"reading {self.size:,} examples of {self._what} for their classes"
            logger.info(f"{line}: an attribute `labels`, with the class of each, would tell them")
            classes = np.array([self._example(row)[1] for row in range(self.size)])
        return classes

    def _class_attribute(self) -> np.ndarray | None:
        """Returns the class of each example, where there is an attribute that tells it."""
        labels = getattr(self._data, "labels", None) if self.have_classes else None
        if labels is None:
            return None
        classes = np.asarray(labels)
        if classes.shape != (self.size,) or classes.dtype.kind not in "iu":
            what = f"got {classes.dtype} {list(classes.shape)}"
            raise UserError(f"{self._what}: its attribute `labels` must have {self.size:,} integers, {what}")
        return classes

    def source(self, free: bool) -> Records:
        """Returns a source of them; if `free`, images may have different sizes."""
        flat, classes = keras.tree.flatten(self._first), self._class_attribute()
        shapes = [list(a.shape) for a in flat]
        if free and self.are_images:
            shapes[0][:2] = [None, None]

        def get(row: np.ndarray) -> list[np.ndarray]:
            example = self._example(int(row))
            keras.tree.assert_same_structure(example, self._first)
            parts = keras.tree.flatten(example)
            for part, first, shape in zip(parts, flat, shapes):
                if part.dtype != first.dtype or (tf.TensorShape(shape) != part.shape and None not in shape):
                    was, now = (f"{a.dtype} {list(a.shape)}" for a in (first, part))
                    raise ValueError(f"it has {now} where the first has {was}")
            if classes is not None and example[1] != classes[row]:
                raise ValueError(f"its target is {example[1]}, and `labels` has {classes[row]}")
            return parts

        def decode(row: tf.Tensor, seed: tf.Tensor) -> tuple:
            parts = tf.numpy_function(get, [row], [a.dtype for a in flat])
            return keras.tree.pack_sequence_as(self._first, [tf.ensure_shape(t, s) for t, s in zip(parts, shapes)])

        return Records(self.size, lambda rows: rows, decode, name=f"example {{}} of {self._what}".format)

    def _example(self, row: int) -> tuple:
        with self._lock:
            example = self._data[row]  # type: ignore[index]
        if example is None:
            raise ValueError("it is None, as behind filter(): leave out examples before they get their numbers")
        if not isinstance(example, (tuple, list)) or not 2 <= len(example) <= 3:
            raise ValueError(f"it must be (x, y) or (x, y, weight), got {type(example).__name__}")
        return keras.tree.traverse(_array, tuple(example))


def _array(value: Structure) -> np.ndarray | None:
    """Returns the array of a value, also of a list, as TensorFlow's `Dataset.map` has it; None of other structures."""
    if isinstance(value, (tuple, Mapping)):
        return None
    array, floats = np.asarray(value), keras.config.floatx()
    if array.dtype.kind not in "fiub":
        raise ValueError(f"it has a {type(value).__name__} where numbers are needed")
    return array.astype(floats) if array.dtype.kind == "f" else array
