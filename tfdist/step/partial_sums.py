"""What micro-batches and replicas add up: gradients and sums, put together again after the sum."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import tensorflow as tf

from tfdist.distributed.collectives import sum_in_order
from tfdist.keras_bridge.loss import Part


class _LossValue(NamedTuple):
    """A loss of the whole global batch."""

    part: Part
    value: tf.Tensor
    factor: tf.Tensor | None
    """One over the part's denominator, for its gradients; None where that was known beforehand."""


@dataclasses.dataclass(slots=True)
class Payload:
    """What replicas and micro-batches add up: gradients by group, and one vector of sums.

    Group 0 is the gradient of everything whose denominator was known; each
    further group belongs to one part with a denominator of its own. `layout`
    says which variables have a gradient in which group.
    """

    layout: list[list[bool]]
    parts: list[Part]
    grads: list[tf.Tensor]
    sums: tf.Tensor

    @classmethod
    def of(cls, groups: list[list[tf.Tensor | None]], parts: list[Part]) -> Payload:
        """Packs what a backward pass gives.

        Args:
          groups: one gradient or None per trainable variable, for each of `goals`; none where nothing trains.
        """
        own = [p for p in parts if p.denominator is not None]
        scalars = [p.numerator for p in parts] + [p.denominator for p in own]
        dtype = scalars[0].dtype if scalars else tf.float32
        for scalar in scalars:
            dtype = scalar.dtype if scalar.dtype.size > dtype.size else dtype
        sums = tf.stack([tf.cast(s, dtype) for s in scalars]) if scalars else tf.zeros([1], dtype)
        return cls(
            layout=[[g is not None for g in group] for group in groups],
            parts=[
                dataclasses.replace(p, numerator=None, denominator=None if p.denominator is None else True)
                for p in parts
            ],
            grads=[g for group in groups for g in group if g is not None],
            sums=sums,
        )

    def tensors(self) -> list[tf.Tensor]:
        """Returns what is to be added up, in an order that is the same everywhere."""
        return [*self.grads, self.sums]

    def with_tensors(self, tensors: list[tf.Tensor]) -> Payload:
        """Returns the same with other `tensors`."""
        return dataclasses.replace(self, grads=list(tensors[:-1]), sums=tensors[-1])

    def plus(self, tensors: list[tf.Tensor]) -> Payload:
        """Returns the same with `tensors` of another micro-batch added."""
        return self.with_tensors([a + b for a, b in zip(self.tensors(), tensors)])

    def _values(self) -> list[_LossValue]:
        """The losses, after the sum."""
        own = iter(range(len(self.parts), len(self.parts) + sum(p.denominator is not None for p in self.parts)))
        values = []
        for i, part in enumerate(self.parts):
            factor = None
            value = self.sums[i]
            if part.denominator is not None:
                factor = tf.math.divide_no_nan(tf.ones_like(value), self.sums[next(own)])
                value = value * factor
            values.append(_LossValue(part, value, factor))
        return values

    def gradients(self) -> list[tf.Tensor | None]:
        """Returns one gradient or None per trainable variable, after the sum."""
        factors = [f * tf.cast(part.weight, f.dtype) for part, _, f in self._values() if f is not None]
        if len(self.layout) > len(factors):
            factors = [None, *factors]
        remaining = iter(self.grads)
        totals: list[tf.Tensor | None] = [None] * (len(self.layout[0]) if self.layout else 0)
        for present, factor in zip(self.layout, factors):
            for i, is_there in enumerate(present):
                if is_there:
                    grad = next(remaining)
                    grad = grad if factor is None else grad * tf.cast(factor, grad.dtype)
                    totals[i] = grad if totals[i] is None else totals[i] + grad
        return totals

    def by_part(self) -> dict[str, tf.Tensor]:
        """Returns each loss after the sum, and the sum of what `add_loss` was given, by what a message calls them."""
        values: dict[str, tf.Tensor] = {}
        for part, value, _ in self._values():
            name = f"loss {part.name!r}" if part.name else "add_loss"
            values[name] = values[name] + value if name in values else value
        return values

    def losses(self, penalties: list[tf.Tensor]) -> tf.Tensor:
        """Returns the total loss, then the single losses if there are several, [1 + outputs], after the sum.

        Args:
          penalties: of the regularisers, scalars.
        """
        if len(self.parts) == 1 and self.parts[0].denominator is None and not penalties:
            return self.sums * tf.cast(self.parts[0].weight, self.sums.dtype)
        values = self._values()
        weighted = [value * tf.cast(part.weight, value.dtype) for part, value, _ in values]
        weighted += [tf.cast(p, self.sums.dtype) for p in penalties]
        single = [value for part, value, _ in values if part.name]
        total = sum_in_order(weighted) if weighted else tf.zeros([], self.sums.dtype)
        return tf.stack([total, *(single if len(single) > 1 else [])])


def goals(parts: list[Part]) -> list[tf.Tensor]:
    """Returns the scalars to differentiate: one for all known denominators, one per own denominator."""
    known = [p.numerator * tf.cast(p.weight, p.numerator.dtype) for p in parts if p.denominator is None]
    own = [p.numerator for p in parts if p.denominator is not None]
    if not known:
        return own
    return [sum_in_order([tf.cast(k, known[0].dtype) for k in known]), *own]
