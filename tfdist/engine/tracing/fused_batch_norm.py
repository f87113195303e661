"""TensorFlow's fused batch normalization in place of the dozen ops of which Keras 3 composes it.

Forward and backward are one op each; a network of small convolutions gains some
percent of its whole time on a CPU (benchmarks/README.md). The result is the same to rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfdist.models import keras_internals

SMALLEST_EPSILON = 1.001e-5
"""cuDNN takes no smaller one."""


@contextlib.contextmanager
def normalization(model: keras.Model | None) -> Iterator[None]:
    """Lets BatchNormalization layers use the fused op while `model` is traced, where it computes the same.

    Replicas are traced in threads: this surrounds them all.

    Args:
      model: the model, or None to change nothing.
    """
    layers = [layer for layer in (keras_internals.flat_layers(model) if model else ()) if _fits(layer)]
    with keras_internals.calls({layer: _call(layer) for layer in layers}):
        yield


def _fits(layer: keras.Layer) -> bool:
    """Exact class only: a subclass may compute something else. Images with channels last only."""
    return (
        type(layer) is keras.layers.BatchNormalization
        and layer.built
        and layer.input_spec.ndim == 4
        and layer.axis in (-1, 3)
        and layer.epsilon >= SMALLEST_EPSILON
        and not layer.synchronized
        and not getattr(layer, "renorm", False)  # older Keras has none
        and "call" not in vars(layer)
    )


def _call(layer: keras.layers.BatchNormalization) -> Callable[..., tf.Tensor]:
    composed = layer.call

    def call(inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None) -> tf.Tensor:
        if not training or not layer.trainable or mask is not None or inputs.dtype != tf.float32:
            return composed(inputs, training=training, mask=mask)
        channels = inputs.shape[-1]
        outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=inputs,
            scale=tf.convert_to_tensor(layer.gamma.value) if layer.scale else tf.ones([channels]),
            offset=tf.convert_to_tensor(layer.beta.value) if layer.center else tf.zeros([channels]),
            mean=tf.zeros([0]),
            variance=tf.zeros([0]),
            epsilon=layer.epsilon,
            is_training=True,
        )
        # It gives the unbiased variance (n - 1), and Keras keeps the biased one.
        count = tf.cast(tf.size(inputs) // channels, tf.float32)
        for average, value in ((layer.moving_mean, mean), (layer.moving_variance, variance * ((count - 1) / count))):
            average.assign(average.value * layer.momentum + value * (1 - layer.momentum))
        return outputs

    return call
