"""Examples on which an exported model is compared with the original: the first real ones, or made ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras
import numpy as np

from tfdist.data import sources
from tfdist.data.structures import Structure
from tfdist.distributed import connect
from tfdist.engine import batching
from tfdist.export import saved_model
from tfdist.models import keras_internals

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.data.spec import Spec

COUNT = 8
"""How many examples a comparison takes."""


def first(source: sources.Source) -> Structure:
    """Returns the inputs of the first examples, arrays [COUNT, ...]."""
    if isinstance(source, sources.Arrays):
        columns = source.columns
    else:
        layout = batching.layout_of(source, COUNT, connect.default(""), 1, least=False)
        feed, _ = batching.read_once(source, layout)
        columns = next(iter(feed.next(0, 1).feed[0]))
    return keras.tree.map_structure(lambda array: np.asarray(array)[:COUNT], columns[0])


def made(model: keras.Model, spec: Spec) -> Structure:
    """Returns inputs that are like none in particular, arrays [COUNT, ...] in the model's structure."""
    draw = np.random.default_rng(0)
    # Numbers that all embeddings know, of however many things.
    known = [
        layer.input_dim for layer in keras_internals.flat_layers(model) if isinstance(layer, keras.layers.Embedding)
    ]
    end = min([max(1, int(min(spec.maximum, 255))) + 1, *known])

    def one(tensor: tf.TensorSpec) -> np.ndarray:
        shape = [COUNT, *(side or 4 for side in tensor.shape[1:])]
        kind = np.dtype(tensor.dtype.as_numpy_dtype)
        if np.issubdtype(kind, np.integer):
            return draw.integers(0, end, shape).astype(kind)
        return draw.normal(size=shape).astype(kind)

    return keras.tree.map_structure(one, saved_model.inputs(model, spec))
