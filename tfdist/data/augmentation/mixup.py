"""MixUp and CutMix: each example of a batch with its partner, targets and weights along with them."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

_POINTS = 2049


def mixer(alphas: dict[str, float]) -> Callable[..., tuple]:
    """Returns a function (columns, partners, seeds int32 [n, 2]) -> columns that mixes a batch.

    Columns are (x, y) or (x, y, weight): x [n, h, w, c], y one-hot [n, classes], weight [n]. Targets and weights come
    out so that the cross-entropy of an example is share * weight * l(y) + (1 - share) * partner weight * l(partner y).

    `alphas`: `mixup`, `cutmix` or both, with the parameters of Beta(alpha, alpha) that shares are drawn from; of both,
    each example gets one, by its seed.
    """
    quantiles = {name: _quantiles(alpha) for name, alpha in alphas.items()}

    @tf.autograph.experimental.do_not_convert
    def mix(columns: tuple, partners: tuple, seeds: tf.Tensor) -> tuple:
        drawn = tf.unstack(draws(seeds, 4), axis=1)
        cuts = drawn[3] < 0.5 if len(alphas) == 2 else tf.fill(tf.shape(drawn[3]), "cutmix" in alphas)
        x, share = columns[0], tf.ones_like(drawn[0])
        if "mixup" in alphas:
            share = tf.where(cuts, 1.0, _interpolated(quantiles["mixup"], drawn[0]))
            x = blended(x, partners[0], share)
        if "cutmix" in alphas:
            kept = tf.where(cuts, _interpolated(quantiles["cutmix"], drawn[0]), 1.0)
            x, left = pasted(x, partners[0], kept, drawn[1], drawn[2])
            share = share * left
        return (x, *weighed(columns[1:], partners[1:], share))

    return mix


def blended(x: tf.Tensor, partner: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Returns `share` of each image and the rest of its partner (Zhang et al., "mixup", 2017)."""
    part = tf.reshape(share, [-1] + [1] * (x.shape.rank - 1))
    ours, theirs = tf.cast(x, tf.float32), tf.cast(partner, tf.float32)
    values = theirs + part * (ours - theirs)
    return tf.cast(values if x.dtype.is_floating else tf.round(values), x.dtype)


def pasted(x: tf.Tensor, partner: tf.Tensor, share: tf.Tensor, down: tf.Tensor, right: tf.Tensor) -> tuple:
    """Puts a rectangle of each partner into its image (Yun et al., "CutMix", 2019); returns what share stayed, too.

    Args:
      share: [n], of the area that is to stay: the rectangle has the image's proportions, and is cut at the border.
      down: [n] in [0, 1), height of its middle.
      right: [n] in [0, 1), its middle from the left.
    """
    side = tf.sqrt(1.0 - share)

    def span(length, middle):
        extent = tf.floor(side * tf.cast(length, tf.float32))
        begin = tf.floor(middle * tf.cast(length, tf.float32)) - tf.floor(extent / 2)
        places = tf.range(tf.cast(length, tf.float32))[None]
        return (places >= begin[:, None]) & (places < (begin + extent)[:, None])

    shape = tf.shape(x)
    inside = span(shape[1], down)[:, :, None] & span(shape[2], right)[:, None, :]
    stayed = 1.0 - tf.reduce_mean(tf.cast(inside, tf.float32), [1, 2])
    return tf.where(inside[..., None], partner, x), stayed


def weighed(columns: tuple, partners: tuple, share: tf.Tensor) -> tuple:
    """Mixes targets [n, classes], or targets and weights [n], by `share` [n]."""
    if len(columns) == 1:
        part = tf.cast(share, columns[0].dtype)[:, None]
        return (part * columns[0] + (1 - part) * partners[0],)
    (y, weight), (other, others) = columns, partners
    part = tf.cast(share, weight.dtype)
    ours, theirs = part * weight, (1 - part) * others
    total = ours + theirs
    # Where both weigh nothing the targets do not matter, as long as they are numbers.
    of_ours = tf.cast(tf.where(total > 0, ours / tf.where(total > 0, total, 1), part), y.dtype)[:, None]
    return of_ours * y + (1 - of_ours) * other, total


def draws(seeds: tf.Tensor, count: int) -> tf.Tensor:
    """Returns `count` numbers in [0, 1) for each of `seeds` int32 [n, 2]: float32 [n, count].

    TensorFlow's stateless functions take one seed for a whole batch, and here each row has its own. So: a hash of 32
    bits ("lowbias32", Wellons 2018) of both halves and of the number's place.
    """
    first, second = tf.unstack(tf.bitcast(seeds, tf.uint32), axis=1)
    places = tf.constant(np.arange(1, count + 1, dtype=np.uint32) * np.uint32(0x9E3779B9))
    mixed = _hash(_hash(first ^ np.uint32(0x6A09E667)) ^ second)
    bits = _hash(mixed[:, None] ^ places[None])
    return tf.cast(_right(bits, 8), tf.float32) * 2.0**-24


def _hash(value: tf.Tensor) -> tf.Tensor:
    value = (value ^ _right(value, 16)) * tf.constant(0x7FEB352D, tf.uint32)
    value = (value ^ _right(value, 15)) * tf.constant(0x846CA68B, tf.uint32)
    return value ^ _right(value, 16)


def _right(value: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.right_shift(value, tf.constant(bits, tf.uint32))


def _quantiles(alpha: float) -> np.ndarray:
    """Returns [_POINTS] quantiles of Beta(alpha, alpha), evenly spaced in probability; float32."""
    with tf.init_scope(), tf.device("CPU:0"):
        probabilities = tf.constant(np.linspace(0, 1, _POINTS))
        low, high = tf.zeros_like(probabilities), tf.ones_like(probabilities)
        for _ in range(60):
            middle = (low + high) / 2
            under = tf.math.betainc(tf.cast(alpha, tf.float64), tf.cast(alpha, tf.float64), middle) < probabilities
            low, high = tf.where(under, middle, low), tf.where(under, high, middle)
        return low.numpy().astype(np.float32)


def _interpolated(table: np.ndarray, place: tf.Tensor) -> tf.Tensor:
    """Returns values of `table` at `place` [n] in [0, 1) of its length."""
    exact = place * (len(table) - 1)
    below = tf.cast(exact, tf.int32)
    rest = exact - tf.cast(below, exact.dtype)
    low, high = tf.gather(table, below), tf.gather(table, below + 1)
    return low + rest * (high - low)
