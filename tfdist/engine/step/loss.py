"""A compiled Keras loss as sums and counts, so that it can be added up over replicas.

Keras reduces a batch to one number, and a mean of means is not the mean when
the parts differ in size. Here each loss is taken apart into a numerator that
adds up over micro-batches and replicas and the denominator that belongs to it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UserError, one_line

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One loss of one output, for a slice of the global batch.

    `numerator / denominator`, each summed over the slices, is the loss of the
    whole global batch. `denominator` is None where the host knew it beforehand
    and the numerator has been divided already.
    """

    name: str
    weight: Any
    numerator: Any
    denominator: Any


class Objective:
    """The loss of a compiled model, for slices of global batches."""

    def __init__(self, model: keras.Model, jit: bool = False):
        self._model = model
        self._jit = jit
        self.regularized = [v for v in model.trainable_variables if v.regularizer is not None]

    def names(self, y: Any, y_pred: Any) -> list[str]:
        """Names under which Keras logs the single losses; empty for fewer than two."""
        names = [f"{entry.name}_loss" for entry, *_ in self._pairs(y, y_pred, None)]
        return names if len(names) > 1 else []

    def parts(self, y: Any, y_pred: Any, weight: Any, real: Any, count: Any) -> list[Part]:
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
        """
        parts = []
        for entry, y_true, prediction, sample_weight in self._pairs(y, y_pred, weight):
            numerator, denominator = self._sums(entry.loss, y_true, prediction, sample_weight, real, count)
            scale = 1.0 if entry.loss_weights is None else entry.loss_weights
            parts.append(Part(entry.name, scale, numerator, denominator))
        share = None
        for value in self._added():
            if share is None:
                here = tf.shape(keras.tree.flatten(y_pred)[0])[0] if real is None else real
                share = tf.cast(here, value.dtype) / tf.cast(count, value.dtype)
            parts.append(Part("", 1.0, value * tf.cast(share, value.dtype), None))
        return parts

    def regularization(self) -> list[Any]:
        """Penalty of each variable in `regularized`, the same on every replica."""
        return [variable.regularizer(variable) for variable in self.regularized]

    def _added(self) -> list[Any]:
        # Keras appends one loss per regularized weight after what add_loss collected.
        losses = self._model.losses
        return [tf.convert_to_tensor(v) for v in losses[: len(losses) - len(self.regularized)]]

    def _pairs(self, y: Any, y_pred: Any, weight: Any) -> list[tuple]:
        """(entry, y_true, y_pred, sample_weight) per loss, matched by Keras itself.

        Keras accepts targets, outputs and losses in many mixtures of lists and
        dicts. Rather than repeat its rules, its CompileLoss runs with every
        loss replaced by a recorder (private `_flat_losses`, `_metrics`;
        tests/models/test_keras_internals.py notices when they change).
        """
        compiled = self._model._compile_loss
        if compiled is None:
            return []
        if not compiled.built:
            self._build(compiled, y, y_pred)
        entries = list(compiled._flat_losses)
        found: list[tuple] = []

        def recorder(entry):
            def record(y_true, prediction, sample_weight=None):
                found.append((entry, y_true, prediction, sample_weight))
                return tf.zeros(())

            return record

        metrics = compiled._metrics
        compiled._flat_losses = [entry._replace(loss=recorder(entry)) for entry in entries]
        compiled._metrics = [None] * len(entries)
        try:
            compiled(y, y_pred, weight)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"targets do not fit the model's outputs: {one_line(error)}") from error
        finally:
            compiled._flat_losses, compiled._metrics = entries, metrics
        return found

    @staticmethod
    def _build(compiled: Any, y: Any, y_pred: Any) -> None:
        try:
            compiled(y, y_pred, None)  # Keras builds on its first call only
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"loss does not fit the model's outputs: {one_line(error)}") from error
        for entry in compiled._flat_losses:
            _check(entry.loss)

    def _sums(self, loss: Any, y_true: Any, y_pred: Any, weight: Any, real: Any, count: Any) -> tuple:
        """Numerator and denominator of `loss`, following keras.losses.Loss.__call__
        and reduce_weighted_values (Keras 3), with filler rows left out."""
        mask = getattr(y_pred, "_keras_mask", None)
        to_tensor = lambda t: keras.ops.convert_to_tensor(t, dtype=loss.dtype)
        y_pred = keras.tree.map_structure(to_tensor, y_pred)
        y_true = keras.tree.map_structure(to_tensor, y_true)
        values = loss.call(y_true, y_pred)
        out_mask = getattr(values, "_keras_mask", None)
        if out_mask is not None:
            mask = out_mask if mask is None else mask & out_mask
        values = tf.cast(values, loss.dtype)
        if values.shape.rank == 0:
            return self._of_scalar(loss, y_true, y_pred, weight, real, count)

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
            return numerator, None
        if loss.reduction == "mean_with_sample_weight" and (weight is not None or mask is not None):
            counted = mask if weight is None else weight if mask is None else weight * mask
            return numerator, _sum_real(counted, is_real)
        if mask is not None:
            return numerator, _sum_real(mask, is_real) * _elements(scaled) / _elements(mask)
        return numerator / (tf.cast(count, values.dtype) * _elements(scaled)), None

    def _of_scalar(self, loss: Any, y_true: Any, y_pred: Any, weight: Any, real: Any, count: Any) -> tuple:
        """A user's loss that returns one number for a batch counts as a mean over examples.

        It is called again on the real rows alone, so that filler has no part in
        it; on a replica without any, on one row that then weighs nothing.
        """
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
        if weight is not None:
            raise UserError(
                f"loss {loss.name!r} returns one number per batch and cannot be combined with "
                "sample weights: return one value per example"
            )
        if loss.reduction == "sum":
            return tf.where(real > 0, value, tf.zeros_like(value)), None
        return value * tf.cast(real, value.dtype) / tf.cast(count, value.dtype), None


def _check(loss: Any) -> None:
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


def _elements(values: Any) -> Any:
    """Loss values per example (product of all dimensions but the first)."""
    inner = values.shape[1:]
    if inner.is_fully_defined():
        return tf.constant(inner.num_elements(), values.dtype)
    return tf.cast(tf.reduce_prod(tf.shape(values)[1:]), values.dtype)


def _sum_real(values: Any, is_real: Any) -> Any:
    """Sum over the rows that are examples."""
    if is_real is not None:
        column = tf.reshape(is_real, [-1] + [1] * (values.shape.rank - 1))
        # where() and not a product: an inf in a filler row times 0 would be NaN.
        values = tf.where(column, values, tf.zeros_like(values))
    return tf.reduce_sum(values)


def _same_rank(values: Any, weight: Any) -> tuple:
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
