"""RandAugment: a few random operations of one strength (Cubuk et al., "RandAugment", 2019)."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from tfdist.data.augmentation.color import jitter, seed_of, stored, uniform

OPERATIONS = (
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "contrast", "saturation",
    "autocontrast", "equalize", "solarize", "posterize", "sharpness",
)  # fmt: skip


def randaugment(image: tf.Tensor, seed: tf.Tensor, layers: int, magnitude: float, maximum: float = 255.0) -> tf.Tensor:
    """Applies `layers` of the paper's 14 operations, each drawn anew and as likely as any other.

    Args:
      magnitude: 0 to 10. 10 is a rotation by 30 degrees, a shear of 0.3, a shift
        by 0.45 of the side, a factor of 0.1 or 1.9 for brightness, contrast,
        saturation and sharpness, 4 bits left, or all values inverted. Signs are
        random. (torchvision counts the same strength up to 30.)
    """
    level = magnitude / 10
    for layer in range(layers):
        which, sign = tf.unstack(uniform(seed_of(seed, layer), 2))
        number = tf.minimum(tf.cast(which * len(OPERATIONS), tf.int32), len(OPERATIONS) - 1)
        image = apply(image, number, tf.where(sign < 0.5, -level, level), level, maximum)
    return image


def apply(image: tf.Tensor, number: tf.Tensor, signed: tf.Tensor, level: float, maximum: float) -> tf.Tensor:
    """Applies operation `number` of `OPERATIONS` with strength `level` in [0, 1], `signed` being plus or minus that."""
    factors = tf.where(tf.range(6, 9) == number, 1.0 + 0.9 * signed, 1.0)
    # Operations that share their code share a branch: a branch costs time to build and optimise, taken or not.
    branches = [
        lambda: image,
        lambda: _moved(image, number, signed),
        lambda: jitter(image, factors, 0.0, maximum),
        lambda: autocontrast(image, maximum),
        lambda: equalize(image, maximum),
        lambda: solarize(image, maximum * (1 - level), maximum),
        lambda: posterize(image, 8 - round(4 * level), maximum),
        lambda: sharpen(image, 1.0 + 0.9 * signed, maximum),
    ]
    branch = tf.gather([0, 1, 1, 1, 1, 1, 2, 2, 2, 3, 4, 5, 6, 7], number)
    return tf.ensure_shape(tf.switch_case(branch, branches), image.shape)


def _moved(image: tf.Tensor, number: tf.Tensor, signed: tf.Tensor) -> tf.Tensor:
    """Shears, shifts or rotates around the middle; what comes from outside is 0."""
    amounts = tf.where(tf.range(1, 6) == number, signed, 0.0) * [0.3, 0.3, 0.45, 0.45, math.pi / 6]
    shear_x, shear_y, shift_x, shift_y, angle = tf.unstack(amounts)
    height, width = tf.unstack(tf.cast(tf.shape(image)[:2], tf.float32))
    cosine, sine = tf.cos(angle), tf.sin(angle)
    # Where the pixel (x, y) of the result is taken from, relative to the middle (only one amount is not 0).
    a, b, c, d = cosine, shear_x - sine, shear_y + sine, cosine
    middle_x, middle_y = (width - 1) / 2, (height - 1) / 2
    from_x = middle_x - a * middle_x - b * middle_y + shift_x * width
    from_y = middle_y - c * middle_x - d * middle_y + shift_y * height
    transform = tf.stack([a, b, from_x, c, d, from_y, 0.0, 0.0])
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=image[None],
        transforms=transform[None],
        output_shape=tf.shape(image)[:2],
        fill_value=0.0,
        interpolation="NEAREST",
    )[0]


def autocontrast(image: tf.Tensor, maximum: float) -> tf.Tensor:
    """Stretches each channel to the whole range, as `PIL.ImageOps.autocontrast` does, but rounded."""
    values = tf.cast(image, tf.float32)
    low, high = tf.reduce_min(values, [0, 1]), tf.reduce_max(values, [0, 1])
    scale = tf.where(high > low, maximum / tf.maximum(high - low, 1e-6), 1.0)
    return stored(values * scale - tf.where(high > low, low * scale, 0.0), image, maximum)


def equalize(image: tf.Tensor, maximum: float) -> tf.Tensor:
    """Gives each channel a flat histogram of 256 levels, as `PIL.ImageOps.equalize` does."""
    channels = image.shape[-1]
    levels = tf.cast(tf.cast(image, tf.float32) * (255 / maximum), tf.int32)
    columns = tf.transpose(tf.reshape(levels, [-1, channels]))
    counts = tf.math.bincount(columns, minlength=256, maxlength=256, axis=-1)
    # As in PIL, the highest level that occurs has no part in the step.
    last = tf.gather(counts, tf.reduce_max(columns, 1), axis=1, batch_dims=1)
    step = (tf.shape(columns)[1] - last)[:, None] // 255
    below = tf.cumsum(counts, axis=1, exclusive=True)
    table = tf.minimum((step // 2 + below) // tf.maximum(step, 1), 255)
    table = tf.where(step == 0, tf.range(256), table)
    equalized = tf.reshape(tf.gather(table, columns, axis=1, batch_dims=1), [channels, -1])
    equalized = tf.reshape(tf.transpose(equalized), tf.shape(image))
    return stored(tf.cast(equalized, tf.float32) * (maximum / 255), image, maximum)


def solarize(image: tf.Tensor, threshold: float, maximum: float) -> tf.Tensor:
    """Inverts the values from `threshold` on."""
    values = tf.cast(image, tf.float32)
    return stored(tf.where(values < threshold, values, maximum - values), image, maximum)


def posterize(image: tf.Tensor, bits: int, maximum: float) -> tf.Tensor:
    """Keeps the upper `bits` of 8."""
    size = maximum / 255 * 2 ** (8 - bits)
    return stored(tf.floor(tf.cast(image, tf.float32) / size) * size, image, maximum)


def sharpen(image: tf.Tensor, factor: tf.Tensor | float, maximum: float) -> tf.Tensor:
    """Sharpens by a factor: 0 gives PIL's smoothed image, 1 the image, more the opposite of smoothing.

    The border stays as it is.
    """
    if any(side is not None and side < 3 for side in image.shape[:2]):
        return image  # all of it is border
    values = tf.cast(image, tf.float32)
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32)[..., None, None] / 13
    smooth = tf.nn.depthwise_conv2d(values[None], np.tile(kernel, [1, 1, image.shape[-1], 1]), [1] * 4, "VALID")[0]
    inner = values[1:-1, 1:-1]
    change = tf.pad((factor - 1) * (inner - smooth), [[1, 1], [1, 1], [0, 0]])
    return stored(values + change, image, maximum)
