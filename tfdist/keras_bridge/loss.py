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

from tfdist.data.batch_layout import Rows
from tfdist.data.structures import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError, one_line
from tfdist.keras_bridge import gathering, keras_internals, layer_state, loss_kinds
from tfdist.keras_bridge.keras_internals import MatchedLoss
from tfdist.keras_bridge.loss_kinds import Kind
from tfdist.keras_bridge.preconditions import FILLED

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

    def __init__(self, model: keras.Model, distribution: Distribution, jit: bool = False):
        self._model: Callable[[], keras.Model] = weakref.ref(model)  # see Step.model
        self._distribution = distribution
        self._jit = jit
        self._kinds: list[Kind] = []
        self.regularized = [v for v in model.trainable_variables if v.regularizer is not None]
        """The variables with a regulariser."""

    def names(self, y: Structure, y_pred: Structure) -> list[str]:
        """Returns the names under which Keras logs the single losses; none for fewer than two."""
        names = [f"{matched.entry.name}_loss" for matched in self._matched(y, y_pred, None)]
        return names if len(names) > 1 else []

    def look(self, y: Structure, y_pred: Structure) -> None:
        """Finds out which losses look across the batch, by trying them; not within a traced function.

        Args:
          y: targets of `loss_kinds.ROWS` rows.
          y_pred: outputs for as many.
        """
        every = self._matched(y, y_pred, None)
        counted = layer_state.attribute_variables((m.entry.loss for m in every), keras.Variable, tf.Variable)
        with layer_state.unchanged(counted):  # a loss may count its batches, of which these are none
            self._kinds = [loss_kinds.look(matched) for matched in every]

    def check(self, taken_apart: str) -> None:
        """Refuses losses that cannot be computed from parts of a batch, or within what XLA compiles.

        Args:
          taken_apart: see `Layout.taken_apart`.

        Raises:
          UserError: naming the loss.
        """
        compiled = keras_internals.compiled_loss(self._model())
        entries = [] if compiled is None else keras_internals.loss_entries(compiled)
        for entry, kind in zip(entries, self._kinds):
            if taken_apart and kind is Kind.ACROSS:
                raise UserError(
                    f"loss {entry.loss.name!r} looks across the batch, which {taken_apart} takes apart: "
                    "use a smaller batch, or a loss with a value per example"
                )
            if self._jit and self._distribution.replicas > 1 and kind is not Kind.ROWS:
                raise UserError(
                    f"loss {entry.loss.name!r} looks across the batch, which --jit=on cannot exchange between "
                    "replicas: use --jit=off, or a loss with a value per example"
                )

    def gathers(self, micro_batches: int) -> bool:
        """Returns whether some loss is computed on the rows of all replicas."""
        return any(self._gathered(kind, micro_batches) for kind in self._kinds)

    @staticmethod
    def _gathered(kind: Kind, micro_batches: int) -> bool:
        # Also of what seems to be a mean: on other rows it may not be one, as where masked ones are left out of it.
        return kind is Kind.ACROSS or (kind is Kind.MEAN and micro_batches == 1)

    def parts(
        self, y: Structure, y_pred: Structure, weight: Structure | None, rows: Rows, count: tf.Tensor | int
    ) -> list[Part]:
        """Takes the losses of one slice apart.

        Args:
          y: targets, structure of tensors of shape [slice, ...].
          y_pred: model outputs, with Keras masks attached where there are any.
          weight: sample weights (structure or tensor) or None.
          rows: which part of the global batch the slice is.
          count: examples in the whole global batch, int32 scalar or int.

        Returns:
          One `Part` per loss and one per `add_loss` value, which counts as a
          mean over examples, as Keras' own activity regularizers are.

        Raises:
          UserError: losses that cannot be taken apart, or that do not fit targets and outputs.
        """
        parts = []
        for i, matched in enumerate(self._matched(y, y_pred, weight)):
            entry = matched.entry
            if self._gathered(self._kinds[i] if self._kinds else Kind.ROWS, rows.micro_batches):
                numerator, denominator = self._of_all_rows(matched, rows)
            else:
                numerator, denominator = self._quotient(matched, rows, count)
            scale = 1.0 if entry.loss_weights is None else entry.loss_weights
            parts.append(Part(entry.name, scale, numerator, denominator))
        added = self._collected()
        if added and rows.filled:
            raise UserError(f"a layer calls add_loss or has an activity regularizer, {FILLED}")
        for value in added:
            parts.append(Part("", 1.0, _counted(value, rows) * _share(rows, count, value.dtype), None))
        return parts

    def regularization(self) -> list[tf.Tensor]:
        """Returns the penalty of each variable in `regularized`, a scalar that is the same on every replica."""
        return [variable.regularizer(variable) for variable in self.regularized]

    def _collected(self) -> list[tf.Tensor]:
        """What `add_loss` has collected: Keras appends one loss per regularised weight after it."""
        losses = self._model().losses
        added = [tf.convert_to_tensor(v) for v in losses[: len(losses) - len(self.regularized)]]
        return [tf.reduce_sum(v if v.dtype.is_floating else tf.cast(v, keras.config.floatx())) for v in added]

    def _matched(self, y: Structure, y_pred: Structure, weight: Structure | None) -> list[MatchedLoss]:
        compiled = keras_internals.compiled_loss(self._model())
        if compiled is None:
            return []
        if not compiled.built:
            try:
                compiled(y, y_pred, None)  # Keras builds on its first call only
            except (ValueError, KeyError, TypeError, tf.errors.InvalidArgumentError) as error:
                raise _misfit("loss does", y, y_pred, error) from error
            for entry in keras_internals.loss_entries(compiled):
                _check(entry.loss)
        try:
            return keras_internals.matched_losses(compiled, y, y_pred, weight)
        except (ValueError, KeyError, TypeError, tf.errors.InvalidArgumentError) as error:
            raise _misfit("targets do", y, y_pred, error) from error

    def _quotient(self, matched: MatchedLoss, rows: Rows, count: tf.Tensor | int) -> _Quotient:
        """Follows keras.losses.Loss.__call__ and reduce_weighted_values (Keras 3) for the rows of a slice."""
        loss, weight = matched.entry.loss, matched.sample_weight
        if type(loss).__call__ is not keras.losses.Loss.__call__:
            return self._of_all_rows(matched, rows)
        mask = keras_internals.mask_of(matched.y_pred)
        y_true, y_pred = loss_kinds.arguments(matched)
        values = loss.call(y_true, y_pred)
        out_mask = keras_internals.mask_of(values)
        if out_mask is not None:
            mask = out_mask if mask is None else mask & out_mask
        values = tf.cast(values, loss.dtype)
        if values.shape.rank == 0:
            if rows.micro_batches * self._distribution.replicas == 1:
                return self._of_all_rows(matched, rows)
            return self._of_scalar(loss, values, weight, rows, count)

        scaled = values
        if weight is not None:
            weight = tf.cast(weight, values.dtype)
            scaled, weight = _same_rank(scaled, weight)
            scaled = scaled * weight
        if mask is not None:
            mask = tf.cast(mask, values.dtype)
            scaled, mask = _same_rank(scaled, mask)
            scaled = scaled * mask
        total = lambda tensor: _counted(tf.reduce_sum(_of_real_rows(tensor, rows)), rows)
        numerator = total(scaled)

        if loss.reduction == "sum":
            return _Quotient(numerator, None)
        if loss.reduction == "mean_with_sample_weight" and (weight is not None or mask is not None):
            counted = mask if weight is None else weight if mask is None else weight * mask
            return _Quotient(numerator, total(counted))
        if mask is not None:
            return _Quotient(numerator, total(mask) * _elements(scaled) / _elements(mask))
        return _Quotient(numerator / (tf.cast(count, values.dtype) * _elements(scaled)), None)

    def _of_scalar(
        self, loss: keras.Loss, value: tf.Tensor, weight: tf.Tensor | None, rows: Rows, count: tf.Tensor | int
    ) -> _Quotient:
        """Takes a user's loss that returns one number for a micro-batch as a mean over examples."""
        if rows.filled:
            raise UserError(f"loss {loss.name!r} returns one number per batch, {FILLED}")
        if weight is not None:
            raise UserError(
                f"loss {loss.name!r} returns one number per batch and cannot be combined with "
                "sample weights: return one value per example"
            )
        if loss.reduction == "sum":
            return _Quotient(_counted(value, rows), None)
        return _Quotient(_counted(value, rows) * _share(rows, count, value.dtype), None)

    def _of_all_rows(self, matched: MatchedLoss, rows: Rows) -> _Quotient:
        """Computes a loss that looks across the batch on the rows of all replicas, as Keras does on one device.

        Every replica has the same value, which counts once; its gradient flows through each replica's own rows.
        """
        entry, *values = matched
        weighted = values[2] is not None
        y_true, y_pred, *weight = gathering.gathered(
            self._distribution, tuple(values if weighted else values[:2]), rows
        )
        value = entry.loss(y_true, y_pred, *weight)
        if self._distribution.replicas == 1:
            return _Quotient(value, None)
        once = tf.equal(self._distribution.replica_id(), 0)
        return _Quotient(value - tf.stop_gradient(tf.where(once, tf.zeros_like(value), value)), None)


def _misfit(what: str, y: Structure, y_pred: Structure, error: Exception) -> UserError:
    """Returns the error that names both sides, since Keras' own may be no more than a missing index."""
    shapes = [keras.tree.map_structure(lambda t: tuple(t.shape[1:]), side) for side in (y, y_pred)]
    reason = f"no {error.args[0]!r}" if isinstance(error, KeyError) and error.args else one_line(error, 200)
    return UserError(
        f"{what} not fit the model's outputs: an example's targets have the shapes {one_line(shapes[0])}, "
        f"its outputs {one_line(shapes[1])} ({reason})"
    )


def _check(loss: keras.Loss) -> None:
    if loss.reduction in (None, "none"):
        raise UserError(
            f"loss {loss.name!r} has reduction={loss.reduction!r}, which leaves nothing to minimise: "
            f"use 'sum' or one of {', '.join(MEANS)}"
        )


def _elements(values: tf.Tensor) -> tf.Tensor:
    """Loss values per example (product of all dimensions but the first)."""
    inner = values.shape[1:]
    if inner.is_fully_defined():
        return tf.constant(inner.num_elements(), values.dtype)
    return tf.cast(tf.reduce_prod(tf.shape(values)[1:]), values.dtype)


def _counted(total: tf.Tensor, rows: Rows) -> tf.Tensor:
    """Returns a sum over rows, 0 where there are none."""
    # where() and not a product: an inf of a row that does not count times 0 would be NaN.
    return total if rows.present is None else tf.where(rows.present, total, tf.zeros_like(total))


def _of_real_rows(values: tf.Tensor, rows: Rows) -> tf.Tensor:
    """Returns values [rows, ...] with zeros for the rows that do not count."""
    real = rows.real()
    if real is None:
        return values
    return tf.where(tf.reshape(real, [-1, *[1] * (values.shape.rank - 1)]), values, tf.zeros_like(values))


def _share(rows: Rows, count: tf.Tensor | int, dtype: tf.DType) -> tf.Tensor:
    """Returns the part of the global batch that a slice is."""
    return tf.cast(rows.number, dtype) / tf.cast(count, dtype)


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
