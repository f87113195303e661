"""Sums of floating-point tensors that depend on no order and no grouping.

Each tensor becomes integers of one unit, a power of two that is the same on all replicas: it follows from the
largest exponent in any of the terms. Integers add up to the same whatever comes first. An element down to 2^-34
of the largest (of 8 terms) keeps all 24 bits of a float32; what is smaller loses those below the unit.
"""

from typing import NamedTuple, cast

import numpy as np
import tensorflow as tf

from tfdist.data.spec import Structure
from tfdist.distributed.distribution import Distribution

SMALL = 1 << 14
"""Elements up to which tensors travel through one vector: each operation of its own costs more than a copy."""


class _Format(NamedTuple):
    """How a floating-point type is laid out in bits."""

    dtype: tf.DType
    bits: tf.DType  # the integer type of the same size
    mantissa: int
    bias: int

    def exponents(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the biased exponents of values that are not negative, as float32, which holds them exactly."""
        bits = tf.bitcast(values, self.bits)
        return tf.cast(tf.bitwise.right_shift(bits, tf.cast(self.mantissa, self.bits)), tf.float32)

    def powers(self, exponents: tf.Tensor) -> tf.Tensor:
        """Returns 2 to the power of exponents (without bias), integers within the range of normal values."""
        bits = tf.cast(exponents, self.bits) + self.bias
        return tf.bitcast(tf.bitwise.left_shift(bits, tf.cast(self.mantissa, self.bits)), self.dtype)


_FORMATS = (_Format(tf.float32, tf.int32, 23, 127), _Format(tf.float64, tf.int64, 52, 1023))
"""In which other types are computed, which they hold exactly."""


class _Kind:
    """The tensors of one floating-point format."""

    def __init__(self, layout: _Format, like: list[tf.Tensor]):
        self.layout = layout
        wide = layout.dtype == tf.float64
        own = [i for i, t in enumerate(like) if t.dtype.is_floating and (t.dtype == tf.float64) == wide]
        self.small = [i for i in own if _elements(like[i].shape) <= SMALL]
        self.large = [i for i in own if _elements(like[i].shape) > SMALL]
        self.sizes = [_elements(like[i].shape) for i in self.small]
        self.segments = np.repeat(np.arange(len(self.small), dtype=np.int32), self.sizes)

    def packed(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns one vector of the small tensors, if there are any, and then the large ones."""
        wide = [tf.cast(t, self.layout.dtype) for t in tensors]
        vector = [tf.concat([tf.reshape(wide[i], [-1]) for i in self.small], 0)] if self.small else []
        return [*vector, *(wide[i] for i in self.large)]

    def tops_of_large(self, packed: list[tf.Tensor]) -> tf.Tensor:
        """Returns the largest magnitude in each large tensor of one term, infinity where something is not finite."""
        tops = []
        for tensor in packed[len(packed) - len(self.large) :]:
            top = tf.maximum(tf.reduce_max(tensor), -tf.reduce_min(tensor))
            finite = tf.reduce_all(tf.math.is_finite(tensor))  # a maximum need not be NaN where an element is
            tops.append(tf.where(finite, top, tf.constant(np.inf, tensor.dtype)))
        return tf.stack(tops) if tops else tf.zeros([0], self.layout.dtype)

    def tops_of_small(self, vectors: tf.Tensor) -> tf.Tensor:
        """Returns the same of each small tensor, for all terms together: `vectors` is [terms, elements]."""
        magnitudes = tf.where(tf.math.is_finite(vectors), tf.abs(vectors), tf.constant(np.inf, vectors.dtype))
        tops = tf.math.segment_max(tf.reduce_max(magnitudes, 0), self.segments)
        return tf.ensure_shape(tops, [len(self.small)])

    def of_large(self, values: tf.Tensor) -> list[tf.Tensor]:
        """Returns what is there for each of the large tensors, out of one value per tensor."""
        return tf.unstack(values[len(self.small) :], len(self.large)) if self.large else []

    def scale(self, exponents: tf.Tensor, room: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns factors from values to integers and back, one per tensor; NaN for back where one is not finite.

        Given the biased exponents of the largest magnitudes in all terms, and the bits that an integer may take.
        """
        # Not as small as to make numbers that are not normal: threads may set those to zero.
        up = tf.minimum(room - (exponents - self.layout.bias + 1), self.layout.bias - 1.0)
        down = self.layout.powers(-up)
        bad = tf.equal(exponents, 2 * self.layout.bias + 1)  # of infinity and NaN
        return self.layout.powers(up), tf.where(bad, tf.constant(np.nan, down.dtype), down)


class _Own(NamedTuple):
    """The terms of one replica, of one floating-point format."""

    kind: _Kind
    small: tf.Tensor | None  # [terms, elements]; None where there are no small tensors
    large: list[tf.TensorArray]
    exponents: tf.Tensor  # of the largest magnitude in each tensor

    def integers(self, up: tf.Tensor, number: tf.Tensor | int) -> list[tf.Tensor]:
        """Returns their sums as integers, in the order in which the terms were packed."""
        sums = []
        if self.small is not None:
            terms = self.small * tf.gather(up, self.kind.segments)
            sums.append(tf.reduce_sum(tf.cast(terms, tf.int64), 0))
        if not self.large:
            return sums
        factors = self.kind.of_large(up)

        def body(i: tf.Tensor, totals: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
            terms = [array.read(i) * factor for array, factor in zip(self.large, factors)]
            return i + 1, [total + tf.cast(term, tf.int64) for total, term in zip(totals, terms)]

        start = [tf.zeros(array.element_shape, tf.int64) for array in self.large]
        _, totals = tf.while_loop(lambda i, _: i < number, body, (tf.constant(0), start))
        return sums + totals


def _largest(distribution: Distribution, own: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the largest exponents over all replicas; of sums alone, in which each replica has a row of its own."""
    if distribution.replicas == 1:
        return own
    flat = tf.concat(own, 0)
    place = tf.one_hot(distribution.replica_id(), distribution.replicas, dtype=tf.float32)
    (rows,) = distribution.all_sum([tf.reshape(place[:, None] * flat[None], [-1])])
    return tf.split(tf.reduce_max(tf.reshape(rows, [distribution.replicas, -1]), 0), [o.shape[0] for o in own])


class ExactSum:
    """How lists of tensors are added up, each list being one of at most so many terms over all replicas.

    `like`: the tensors of a term, of static shape: floating-point ones, and integers.
    """

    def __init__(self, like: list[tf.Tensor], terms: int):
        self._like = [(t.dtype, t.shape) for t in like]
        self._room = 62 - (terms - 1).bit_length()
        self._kinds = [_Kind(layout, like) for layout in _FORMATS]
        self._whole = [i for i, t in enumerate(like) if t.dtype.is_integer]

    def term(self, tensors: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor], tf.Tensor]:
        """Packs a term.

        Returns:
          What is to be kept of each term; magnitudes whose maximum is to be kept; integers whose sum is.
        """
        kept, tops = [], []
        for kind in self._kinds:
            packed = kind.packed(tensors)
            kept += packed
            tops.append(kind.tops_of_large(packed))
        whole = [tf.reshape(tf.cast(tensors[i], tf.int64), [-1]) for i in self._whole]
        return kept, tops, tf.concat(whole, 0) if whole else tf.zeros([0], tf.int64)

    def total(
        self,
        distribution: Distribution,
        kept: list[tf.TensorArray],
        tops: list[tf.Tensor],
        whole: tf.Tensor,
        number: tf.Tensor | int,
    ) -> list[tf.Tensor]:
        """Adds up this replica's `number` of terms, as `term` says, and those of all others; in replica context."""
        own, remaining = [], iter(kept)
        for kind, top in zip(self._kinds, tops):
            small = next(remaining).stack() if kind.small else None
            large = [next(remaining) for _ in kind.large]
            every = top if small is None else tf.concat([kind.tops_of_small(small), top], 0)
            own.append(_Own(kind, small, large, kind.layout.exponents(every)))
        largest = _largest(distribution, [terms.exponents for terms in own])
        scales = [kind.scale(exponents, self._room) for kind, exponents in zip(self._kinds, largest)]
        integers = [total for terms, (up, _) in zip(own, scales) for total in terms.integers(up, number)]
        return self._unpacked(distribution.all_sum([*integers, whole]), [down for _, down in scales])

    def _unpacked(self, sums: list[tf.Tensor], scales: list[tf.Tensor]) -> list[tf.Tensor]:
        """The sums over all replicas in the types and shapes of `like`."""
        remaining = iter(sums)
        results: list[Structure] = [None] * len(self._like)
        for kind, down in zip(self._kinds, scales):
            dtype = kind.layout.dtype
            if kind.small:
                vector = tf.cast(next(remaining), dtype) * tf.gather(down, kind.segments)
                for i, part in zip(kind.small, tf.split(vector, kind.sizes)):
                    results[i] = part
            for i, factor in zip(kind.large, kind.of_large(down)):
                results[i] = tf.cast(next(remaining), dtype) * factor
        if self._whole:
            sizes = [_elements(self._like[i][1]) for i in self._whole]
            for i, part in zip(self._whole, tf.split(next(remaining), sizes)):
                results[i] = part
        return [tf.reshape(tf.cast(r, dtype), shape) for r, (dtype, shape) in zip(results, self._like)]


def _elements(shape: tf.TensorShape) -> int:
    return cast(int, shape.num_elements())
