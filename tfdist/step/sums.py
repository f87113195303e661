"""Sums of losses and gradients: those of slices add up to those of the global batch, which are divided once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfdist.distributed.collectives import sum_in_order
from tfdist.keras_bridge.loss import LossTerm


class _LossValue(NamedTuple):
    """A loss of the whole global batch."""

    term: LossTerm
    value: tf.Tensor
    factor: tf.Tensor | None  # one over the term's denominator, for its gradients; None where that was known beforehand


@dataclasses.dataclass(slots=True)
class StepSums:
    """The sums of a slice of a global batch: gradients in groups, and one vector of loss sums.

    Group 0 is the gradient of all losses whose denominator is known beforehand; each further group belongs to one loss
    with a denominator of its own.
    """

    present: list[list[bool]]  # for each group, which of the trainable variables have a gradient
    terms: list[LossTerm]  # without their tensors
    grads: list[tf.Tensor]  # of all groups, one after the other
    scalars: tf.Tensor  # the numerators of all terms, and then the denominators of those that have one

    @classmethod
    def of(cls, groups: list[list[tf.Tensor | None]], terms: list[LossTerm]) -> StepSums:
        """Packs the results of a backward pass.

        Args:
          groups: one gradient or None per trainable variable, for each of `loss.objectives`; none where nothing trains.
        """
        own = [t for t in terms if t.denominator is not None]
        scalars = [t.numerator for t in terms] + [t.denominator for t in own]
        dtype = scalars[0].dtype if scalars else tf.float32
        for scalar in scalars:
            dtype = scalar.dtype if scalar.dtype.size > dtype.size else dtype
        return cls(
            present=[[g is not None for g in group] for group in groups],
            terms=[t._replace(numerator=None, denominator=None if t.denominator is None else True) for t in terms],
            grads=[g for group in groups for g in group if g is not None],
            scalars=tf.stack([tf.cast(s, dtype) for s in scalars]) if scalars else tf.zeros([1], dtype),
        )

    def tensors(self) -> list[tf.Tensor]:
        """Returns the tensors to add up, in an order that is the same everywhere."""
        return [*self.grads, self.scalars]

    def with_tensors(self, tensors: list[tf.Tensor]) -> StepSums:
        """Returns the same with other `tensors`."""
        return dataclasses.replace(self, grads=list(tensors[:-1]), scalars=tensors[-1])

    def plus(self, tensors: list[tf.Tensor]) -> StepSums:
        """Returns the same with `tensors` of another slice added."""
        return self.with_tensors([a + b for a, b in zip(self.tensors(), tensors)])

    def _values(self) -> list[_LossValue]:
        """Returns the losses of the global batch: the one division."""
        own = iter(range(len(self.terms), len(self.terms) + sum(t.denominator is not None for t in self.terms)))
        values = []
        for i, term in enumerate(self.terms):
            value, factor = self.scalars[i], None
            if term.denominator is not None:
                factor = tf.math.divide_no_nan(tf.ones_like(value), self.scalars[next(own)])
                value = value * factor
            values.append(_LossValue(term, value, factor))
        return values

    def gradients(self) -> list[tf.Tensor | None]:
        """Returns the gradient of the global batch's loss, one tensor or None per trainable variable."""
        factors = [f * tf.cast(term.weight, f.dtype) for term, _, f in self._values() if f is not None]
        if len(self.present) > len(factors):
            factors = [None, *factors]
        remaining = iter(self.grads)
        totals: list[tf.Tensor | None] = [None] * (len(self.present[0]) if self.present else 0)
        for present, factor in zip(self.present, factors):
            for i in (i for i, has_gradient in enumerate(present) if has_gradient):
                grad = next(remaining)
                grad = grad if factor is None else grad * tf.cast(factor, grad.dtype)
                totals[i] = grad if totals[i] is None else totals[i] + grad
        return totals

    def by_term(self) -> dict[str, tf.Tensor]:
        """Returns each loss of the global batch, and the sum of all `add_loss`, by their names in messages."""
        values: dict[str, tf.Tensor] = {}
        for term, value, _ in self._values():
            name = f"loss {term.name!r}" if term.name else "add_loss"
            values[name] = values[name] + value if name in values else value
        return values

    def losses(self, penalties: list[tf.Tensor]) -> tf.Tensor:
        """Returns the total loss of the global batch, then the single losses if there are several, [1 + outputs]."""
        if len(self.terms) == 1 and self.terms[0].denominator is None and not penalties:
            return self.scalars * tf.cast(self.terms[0].weight, self.scalars.dtype)
        values = self._values()
        weighted = [value * tf.cast(term.weight, value.dtype) for term, value, _ in values]
        weighted += [tf.cast(p, self.scalars.dtype) for p in penalties]
        single = [value for term, value, _ in values if term.name]
        total = sum_in_order(weighted) if weighted else tf.zeros([], self.scalars.dtype)
        return tf.stack([total, *(single if len(single) > 1 else [])])


def seconds_now(*after: tf.Tensor | tf.Operation) -> tf.Tensor:
    """Returns seconds since 1970 as float64, read once the tensors `after` exist, and the operations have run."""
    with tf.control_dependencies(list(after)):
        return tf.timestamp()


def timed(
    reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]], tensors: list[tf.Tensor], clock: bool
) -> tuple[list[tf.Tensor], tf.Tensor | None]:
    """Returns what `reduce` makes of tensors, and its seconds, float64; None without a clock."""
    if not clock:
        return reduce(tensors), None
    begun = seconds_now(*tensors)
    # What is sent last waits for the clock, so that the sums of the others begin within the backward pass; without
    # this dependency, a busy executor may read the clock any time later.
    with tf.control_dependencies([begun]):
        first = tf.identity(tensors[0])
    totals = reduce([first, *tensors[1:]])
    return totals, seconds_now(*totals) - begun
