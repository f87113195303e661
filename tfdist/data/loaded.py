"""A data set that has been loaded: its two splits, and what a model must know of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from tfdist.data.sources import Source, check_labels
from tfdist.data.spec import Spec
from tfdist.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Loaded:
    """Both splits of a data set and their description."""

    train: Source
    eval: Source
    examples: int
    """Examples in the training split."""
    spec: Spec

    def __repr__(self):
        classes = f", {self.spec.classes} classes" if self.spec.classes else ""
        size = getattr(self.eval, "size", None)
        tested = "" if size is None else f", {size:,} to evaluate"
        return (
            f"<Loaded: {self.examples:,} examples to train{tested}, {list(self.spec.shape)} {self.spec.dtype}{classes}>"
        )


def described(train: Source, evaluation: Source) -> Loaded:
    """Describes two splits of which nothing is known but what they hold.

    Raises:
      UserError: a stream of batches, which does not tell its length, or labels
        of the evaluation that no training example has.
    """
    if train.size is None:
        raise UserError(
            "a data function must return arrays, or its number of examples stays unknown: "
            "return NumPy arrays, or use the Python API (tfdist.fit) with a tf.data.Dataset"
        )
    if evaluation.reader.once:
        raise UserError("a data function returned a generator, which can be read once: return a keras.utils.PyDataset")
    classes, maximum = None, 1.0
    first = tf.nest.flatten(train.specs[0])[0]
    shape, dtype = tuple(first.shape[1:]), np.dtype(getattr(first.dtype, "as_numpy_dtype", first.dtype))
    if train.columns is None:
        maximum = 255.0 if dtype == np.uint8 else 1.0
    elif dtype.kind in "fui":
        maximum = float(first.max()) or 1.0
    y = train.targets if train.labels is None else train.labels
    if y is not None and not tf.nest.is_nested(y) and np.issubdtype(y.dtype, np.integer):
        classes = int(y.max()) + 1
        for source in (train, evaluation):
            targets = source.targets if source.labels is None else source.labels
            if targets is not None and not tf.nest.is_nested(targets):
                check_labels(targets, classes, "the data set")
    return Loaded(train, evaluation, train.size, Spec(shape, dtype.name, classes, maximum))
