"""A compiled Keras loss as sums and counts, so that it can be added up over replicas.

Keras reduces a batch to one number, and a mean of means is not the mean when
the parts differ in size. Here each loss is taken apart into a numerator that
adds up over micro-batches and replicas and the denominator that belongs to it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist.data.structures import Structure
from tfdist.errors import UserError, one_line
from tfdist.models import keras_internals
from tfdist.models.keras_internals import MatchedLoss

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One loss of one output, for a slice of the global batch.

    `numerator / denominator`, each summed over the slices, is the loss of the
    whole global batch.
    """

    name: str
    """Of the output; empty for what `add_loss` has collected."""
    weight: float | tf.Tensor
    """Of this loss in the total."""
    numerator: tf.Tensor
    """A scalar."""
    denominator: tf.Tensor | None
    """A scalar; None where the host knew it beforehand and the numerator has been divided already."""


class _Quotient(NamedTuple):
    """The two scalars of a `Part`."""

    numerator: tf.Tensor
    denominator: tf.Tensor | None


class Objective:
    """The loss of a compiled model, for slices of global batches."""

    def __init__(self, model: keras.Model, jit: bool = False):
        self._model: Callable[[], keras.Model] = weakref.ref(model)  # see Step.model
        self._jit = jit
        self.regularized = [v for v in model.trainable_variables if v.regularizer is not None]
        """The variables with a regulariser."""

    def names(self, y: Structure, y_pred: Structure) -> list[str]:
        """Returns the names under which Keras logs the single losses; none for fewer than two."""
        names = [f"{matched.entry.name}_loss" for matched in self._matched(y, y_pred, None)]
        return names if len(names) > 1 else []

    def parts(
        self,
        y: Structure,
        y_pred: Structure,
        weight: Structure | None,
        real: tf.Tensor | None,
        count: tf.Tensor | int,
    ) -> list[Part]:
        """Takes the losses of one slice apart.

        Args:
          y: targets, structure of tensors of shape [slice, ...].
          y_pred: model outputs, with Keras masks attached where there are any.
          weight: sample weights (structure or tensor) or None.
          real: int32 scalar, the first `real` rows are examples, the rest filler;
            None when all are examples.
          count: examples in the whole global batch, int32 scalar or int.

        Returns:
          One `Part` per loss and one per `add_loss` value, which counts as a
          mean over examples, as Keras' own activity regularizers are.

        Raises:
          UserError: losses that cannot be taken apart, or that do not fit targets and outputs.
        """
        parts = []
        for matched in self._matched(y, y_pred, weight):
            entry = matched.entry
            numerator, denominator = self._quotient(matched, real, count)
            scale = 1.0 if entry.loss_weights is None else entry.loss_weights
            parts.append(Part(entry.name, scale, numerator, denominator))
        share = None
        for value in self._collected():
            if share is None:
                here = tf.shape(keras.tree.flatten(y_pred)[0])[0] if real is None else real
                share = tf.cast(here, value.dtype) / tf.cast(count, value.dtype)
            parts.append(Part("", 1.0, value * tf.cast(share, value.dtype), None))
        return parts

    def regularization(self) -> list[tf.Tensor]:
        """Returns the penalty of each variable in `regularized`, a scalar that is the same on every replica."""
        return [variable.regularizer(variable) for variable in self.regularized]

    def _collected(self) -> list[tf.Tensor]:
        """What `add_loss` has collected: Keras appends one loss per regularised weight after it."""
        losses = self._model().losses
        return [tf.convert_to_tensor(v) for v in losses[: len(losses) - len(self.regularized)]]

    def _matched(self, y: Structure, y_pred: Structure, weight: Structure | None) -> list[MatchedLoss]:
        compiled = keras_internals.compiled_loss(self._model())
        if compiled is None:
            return []
        if not compiled.built:
            try:
                compiled(y, y_pred, None)  # Keras builds on its first call only
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"loss does not fit the model's outputs: {one_line(error)}") from error
            for entry in keras_internals.loss_entries(compiled):
                _check(entry.loss)
        try:
            return keras_internals.matched_losses(compiled, y, y_pred, weight)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"targets do not fit the model's outputs: {one_line(error)}") from error

    def _quotient(self, matched: MatchedLoss, real: tf.Tensor | None, count: tf.Tensor | int) -> _Quotient:
        """Follows keras.losses.Loss.__call__ and reduce_weighted_values (Keras 3), with filler rows left out."""
        loss, weight = matched.entry.loss, matched.sample_weight
        mask = keras_internals.mask_of(matched.y_pred)
        to_tensor = lambda t: keras.ops.convert_to_tensor(t, dtype=loss.dtype)
        y_pred = keras.tree.map_structure(to_tensor, matched.y_pred)
        y_true = keras.tree.map_structure(to_tensor, matched.y_true)
        values = loss.call(y_true, y_pred)
        out_mask = keras_internals.mask_of(values)
        if out_mask is not None:
            mask = out_mask if mask is None else mask & out_mask
        values = tf.cast(values, loss.dtype)
        if values.shape.rank == 0:
            return self._of_scalar(MatchedLoss(matched.entry, y_true, y_pred, weight), real, count)

        is_real = None if real is None else tf.range(tf.shape(values)[0]) < real
        scaled = values
        if weight is not None:
            weight = tf.cast(weight, values.dtype)
            scaled, weight = _same_rank(scaled, weight)
            scaled = scaled * weight
        if mask is not None:
            mask = tf.cast(mask, values.dtype)
            scaled, mask = _same_rank(scaled, mask)
            scaled = scaled * mask
        numerator = _sum_real(scaled, is_real)

        if loss.reduction == "sum":
            return _Quotient(numerator, None)
        if loss.reduction == "mean_with_sample_weight" and (weight is not None or mask is not None):
            counted = mask if weight is None else weight if mask is None else weight * mask
            return _Quotient(numerator, _sum_real(counted, is_real))
        if mask is not None:
            return _Quotient(numerator, _sum_real(mask, is_real) * _elements(scaled) / _elements(mask))
        return _Quotient(numerator / (tf.cast(count, values.dtype) * _elements(scaled)), None)

    def _of_scalar(self, matched: MatchedLoss, real: tf.Tensor | None, count: tf.Tensor | int) -> _Quotient:
        """Takes a user's loss that returns one number for a batch as a mean over examples.

        It is called again on the real rows alone, so that filler has no part in
        it; on a replica without any, on one row that then weighs nothing.
        """
        loss, y_true, y_pred = matched.entry.loss, matched.y_true, matched.y_pred
        if self._jit:
            raise UserError(
                f"loss {loss.name!r} returns one number per batch, which --jit=on cannot slice: "
                "return one value per example, or use --jit=off"
            )
        if real is None:
            real = tf.shape(keras.tree.flatten(y_pred)[0])[0]
        rows = tf.maximum(real, 1)
        y_true, y_pred = keras.tree.map_structure(lambda t: t[:rows], (y_true, y_pred))
        value = tf.cast(loss.call(y_true, y_pred), loss.dtype)
        if matched.sample_weight is not None:
            raise UserError(
                f"loss {loss.name!r} returns one number per batch and cannot be combined with "
                "sample weights: return one value per example"
            )
        if loss.reduction == "sum":
            return _Quotient(tf.where(real > 0, value, tf.zeros_like(value)), None)
        return _Quotient(value * tf.cast(real, value.dtype) / tf.cast(count, value.dtype), None)


def _check(loss: keras.Loss) -> None:
    if loss.reduction in (None, "none"):
        raise UserError(
            f"loss {loss.name!r} has reduction={loss.reduction!r}, which leaves nothing to minimise: "
            f"use 'sum' or one of {', '.join(MEANS)}"
        )
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        raise UserError(
            f"loss {loss.name!r} overrides __call__, so its sum over replicas cannot be known: "
            "override call() and return one value per example"
        )


def _elements(values: tf.Tensor) -> tf.Tensor:
    """Loss values per example (product of all dimensions but the first)."""
    inner = values.shape[1:]
    if inner.is_fully_defined():
        return tf.constant(inner.num_elements(), values.dtype)
    return tf.cast(tf.reduce_prod(tf.shape(values)[1:]), values.dtype)


def _sum_real(values: tf.Tensor, is_real: tf.Tensor | None) -> tf.Tensor:
    """Sum over the rows that are examples."""
    if is_real is not None:
        column = tf.reshape(is_real, [-1] + [1] * (values.shape.rank - 1))
        # where() and not a product: an inf in a filler row times 0 would be NaN.
        values = tf.where(column, values, tf.zeros_like(values))
    return tf.reduce_sum(values)


def _same_rank(values: tf.Tensor, weight: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Keras' squeeze_or_expand_to_same_rank: ranks that differ by one meet at a last axis of 1."""
    if values.shape.rank == weight.shape.rank + 1 and weight.shape.rank == 1:
        if values.shape[-1] == 1:
            return tf.squeeze(values, -1), weight
        # Keras broadcasts [n, t] * [n] from the right, which only means something for n = 1.
        return values, weight[:, None]
    if values.shape.rank == weight.shape.rank + 1:
        return values, tf.expand_dims(weight, -1)
    if weight.shape.rank == values.shape.rank + 1 and weight.shape[-1] == 1:
        return values, tf.squeeze(weight, -1)
    return values, weight
