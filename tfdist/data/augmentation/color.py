"""What the operations on images share: random numbers, rounding and linear changes of colour."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

GREY = np.array([0.299, 0.587, 0.114], np.float32)
"""Weights of red, green and blue in luma (ITU-R BT.601), as in PIL and `tf.image.rgb_to_grayscale`."""

_YIQ = np.array([[0.299, 0.587, 0.114], [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]]).T


def uniform(seed: tf.Tensor, count: int, low: float = 0.0, high: float = 1.0) -> tf.Tensor:
    """Returns `count` numbers in [low, high), float32, that `seed` (int32 [2]) alone decides, on any device."""
    return tf.random.stateless_uniform([count], seed, low, high, alg="philox")


def seed_of(seed: tf.Tensor, place: int) -> tf.Tensor:
    """Returns a seed for the operation at `place`, so that two operations do not draw the same numbers."""
    # Spread over all bits (golden ratio), since the seeds of two examples may be neighbours.
    spread = np.array([0, (place + 1) * 0x9E3779B9 & 0xFFFFFFFF], np.uint32).view(np.int32)
    return tf.bitwise.bitwise_xor(seed, spread)


def stored(values: tf.Tensor, image: tf.Tensor, maximum: float) -> tf.Tensor:
    """Returns `values`, cut to [0, maximum], in the type of `image`: rounded where that is whole numbers."""
    values = tf.clip_by_value(values, 0.0, maximum)
    return tf.cast(values if image.dtype.is_floating else tf.round(values), image.dtype)


def recolored(image: tf.Tensor, matrix: tf.Tensor, offset: tf.Tensor, maximum: float) -> tf.Tensor:
    """Returns each pixel times `matrix` [c, c] plus `offset` (broadcast to [c])."""
    pixels = tf.reshape(tf.cast(image, tf.float32), [-1, image.shape[-1]])
    return tf.reshape(stored(pixels @ matrix + offset, image, maximum), tf.shape(image))


def mean_grey(image: tf.Tensor) -> tf.Tensor:
    """Returns the mean over all pixels of their luma."""
    means = tf.reduce_mean(tf.cast(image, tf.float32), [0, 1])
    return means[0] if image.shape[-1] == 1 else tf.tensordot(means, GREY, 1)


def jitter(image: tf.Tensor, factors: tf.Tensor, turn: tf.Tensor | float, maximum: float) -> tf.Tensor:
    """Changes brightness, contrast (around the image's mean) and saturation by factors, and turns the hue.

    One product per pixel: all four are linear, and hue is a rotation of the
    plane of I and Q in YIQ, which keeps luma. Nothing is cut in between.

    Args:
      image: [h, w, 1] or [h, w, 3]; a grey one has neither saturation nor hue.
      factors: [3], those of brightness, contrast and saturation.
      turn: radians.
    """
    brightness, contrast, saturation = tf.unstack(factors)
    factor = brightness * contrast
    offset = (1.0 - contrast) * brightness * mean_grey(image)
    if image.shape[-1] == 1:
        return stored(tf.cast(image, tf.float32) * factor + offset, image, maximum)
    parts = tf.stack([factor, factor * saturation * tf.cos(turn), factor * saturation * tf.sin(turn)])
    return recolored(image, tf.reshape(parts[None] @ _HUE, [3, 3]), offset, maximum)


def _hue() -> np.ndarray:
    """Returns [3, 9]: the parts of a change of hue that stay, that go with its cosine and that go with its sine."""
    back = np.linalg.inv(_YIQ)
    stay, cosine, sine = np.zeros((3, 3, 3))
    stay[0, 0] = cosine[1, 1] = cosine[2, 2] = sine[1, 2] = 1
    sine[2, 1] = -1
    return np.stack([(_YIQ @ part @ back).reshape(9) for part in (stay, cosine, sine)]).astype(np.float32)


_HUE = _hue()
