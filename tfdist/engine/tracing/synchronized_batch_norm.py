"""Synchronized batch normalization over replicas that differ in their number of rows.

Keras 3 makes three all-reduces of a layer's forward pass, takes E(x^2) - E(x)^2 of values far from zero, counts the
rows of a replica that has none of its own, and does not synchronize a masked input at all. Here sums, sums of squares
and counts travel together: one all-reduce forward, and its gradient backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfdist.engine.tracing import layer_state
from tfdist.errors import UserError
from tfdist.models import keras_internals


@contextlib.contextmanager
def exact(model: keras.Model, replicas: int) -> Iterator[None]:
    """Lets the synchronized layers of a model share their sums while it is traced.

    Args:
      replicas: over all workers; nothing changes for one.
    """
    layers = [layer for layer in keras_internals.flat_layers(model) if replicas > 1 and _fits(layer)]
    with keras_internals.batch_moments({layer: _moments(layer) for layer in layers}):
        yield


def _fits(layer: keras.Layer) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized


def _inside(layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor | None:
    """Returns which values of the inputs count, in a shape that broadcasts to theirs; None for all.

    Raises:
      UserError: some rows of the batch do not count, and the inputs have other rows.
    """
    inside = None if mask is None else tf.cast(mask, tf.bool)[..., None]
    real = layer_state.real_rows()
    if real is None:
        return inside
    if inputs.shape[0] != real.shape[0]:
        raise UserError(
            f"layer {layer.name!r} normalizes other rows ({inputs.shape[0]}) than those of a batch that is filled up "
            f"({real.shape[0]}): make the batch size and the examples of an epoch divisible by the number of replicas"
        )
    real = tf.reshape(real, [-1, *[1] * (inputs.shape.rank - 1)])
    return real if inside is None else tf.logical_and(inside, real)


def _moments(layer: keras.layers.BatchNormalization) -> Callable:
    def moments(inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns mean and variance of all replicas' rows, [channels] each."""
        axis = layer.axis % inputs.shape.rank
        axes = [i for i in range(inputs.shape.rank) if i != axis]
        broadcast = [inputs.shape[i] if i == axis else 1 for i in range(inputs.shape.rank)]
        # Sums of squares of values far from zero would leave few digits for the variance.
        shift = tf.stop_gradient(tf.cast(layer.moving_mean.value, inputs.dtype))
        values = inputs - tf.reshape(shift, broadcast)
        inside = _inside(layer, inputs, mask)
        if inside is None:
            count = tf.cast(tf.size(inputs) // inputs.shape[axis], inputs.dtype)
        else:
            inside = tf.broadcast_to(inside, tf.shape(inputs))
            values = tf.where(inside, values, tf.zeros_like(values))
            count = tf.reduce_sum(tf.cast(inside, inputs.dtype)) / inputs.shape[axis]
        own = tf.concat([tf.reduce_sum(values, axes), tf.reduce_sum(tf.square(values), axes), [count]], 0)
        present = layer_state.present()
        if present is not None:
            own = tf.where(present, own, tf.zeros_like(own))
        total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, own)
        sums, squares, rows = tf.split(total, [inputs.shape[axis], inputs.shape[axis], 1])
        mean = tf.math.divide_no_nan(sums, rows)
        variance = tf.maximum(tf.math.divide_no_nan(squares, rows) - tf.square(mean), 0.0)
        return mean + shift, variance

    return moments
