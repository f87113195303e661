"""A compiled Keras loss as numerators and denominators, so that it can be added up over replicas.

Keras reduces a batch to one number, and a mean of means is not the mean when the parts differ in size. Here each loss
is taken apart into a numerator, which adds up over micro-batches and replicas, and the denominator that belongs to it.
"""

import contextlib
import enum
import re
import weakref
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.batch_layout import MicroBatch
from tfdist.data.spec import Structure
from tfdist.distributed.collectives import sum_in_order
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError, one_line
from tfdist.keras_bridge import gathering, keras_internals, layer_state
from tfdist.keras_bridge.preconditions import PADDED

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
SAMPLE_ROWS = 8  # rows with which losses and metrics are classified


class LossTerm(NamedTuple):
    """One loss of one output, for a slice of the global batch.

    `numerator / denominator`, each summed over the slices, is the loss of the whole global batch.
    """

    name: str  # of the output; empty for `add_loss`
    weight: float | tf.Tensor  # of this loss in the total
    numerator: tf.Tensor  # a scalar
    denominator: tf.Tensor | None = None  # a scalar; None where known beforehand, and divided by already

    def weighted(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a value, or a gradient, times the weight."""
        # Not by `tf.cast`, which takes a Python number to float64 by way of float32.
        weight = self.weight if tf.is_tensor(self.weight) else tf.constant(self.weight, value.dtype)
        return value * tf.cast(weight, value.dtype)


class Kind(enum.Enum):
    """How a loss depends on the examples of a batch."""

    ROWS = "a value per example, which depends on that example alone"
    MEAN = "one number, the mean of what it is for each example"
    ACROSS = "a number, or values, that depend on the other examples too"


class Objective:
    """The loss of a compiled model, for slices of global batches."""

    def __init__(self, model: keras.Model, distribution: Distribution, jit: bool = False):
        self._model: Callable[[], keras.Model] = weakref.ref(model)  # see Step.model
        self._distribution = distribution
        self._jit = jit
        self._kinds: list[Kind] = []
        self.regularized = [v for v in model.trainable_variables if v.regularizer is not None]

    def names(self, y: Structure, y_pred: Structure) -> list[str]:
        """Returns the names under which Keras logs the single losses; none for fewer than two."""
        names = [f"{matched.entry.name}_loss" for matched in self._matched(y, y_pred, None)]
        return names if len(names) > 1 else []

    def classify(self, y: Structure, y_pred: Structure) -> None:
        """Classifies the losses by probing them with `SAMPLE_ROWS` rows; not within a traced function."""
        every = self._matched(y, y_pred, None)
        with layer_state.unchanged([]):  # a loss may count its batches, of which these are none
            self._kinds = [_kind_of(matched) for matched in every]

    def check(self, split_by: str) -> None:
        """Refuses losses that parts of a batch cannot give (see `Layout.split_by`), or within what XLA compiles."""
        for entry, kind in zip(keras_internals.loss_entries(self._model()), self._kinds):
            if split_by and kind is Kind.ACROSS:
                what = f"loss {entry.loss.name!r} looks across the batch, which {split_by} takes apart"
                raise UserError(what, "use a smaller batch, or a loss with a value per example")
            if self._jit and self._distribution.replicas > 1 and kind is not Kind.ROWS:
                raise UserError(
                    f"loss {entry.loss.name!r} looks across the batch, which --jit=on cannot exchange between replicas",
                    "use --jit=off, or a loss with a value per example",
                )

    def gathers(self, parts: int) -> bool:
        """Returns whether some loss is computed on the rows of all replicas; see `MicroBatch.parts`."""
        return any(_is_gathered(kind, parts) for kind in self._kinds)

    def terms(
        self, y: Structure, y_pred: Structure, weight: Structure | None, rows: MicroBatch, count: tf.Tensor | int
    ) -> list[LossTerm]:
        """Computes the losses of a slice of a global batch of `count` examples.

        Returns:
          One term per loss and one per `add_loss` value, which counts as a mean over examples, as regularizers do.
        """
        terms = []
        for i, matched in enumerate(self._matched(y, y_pred, weight)):
            entry = matched.entry
            whole = rows.parts * self._distribution.replicas == 1 and not rows.padded
            kind = self._kinds[i] if self._kinds else Kind.ROWS
            # On one device a user's loss has all rows, so that nobody needs to know how it depends on them.
            if _is_gathered(kind, rows.parts) or (whole and not _is_keras_loss(entry.loss)):
                numerator, denominator = self._of_all_rows(matched, rows)
            else:
                numerator, denominator = self._of_slice(matched, rows, count)
            scale = 1.0 if entry.loss_weights is None else entry.loss_weights
            terms.append(LossTerm(entry.name, scale, numerator, denominator))
        # Keras appends one loss per regularized weight to those that `add_loss` has collected.
        losses = self._model().losses
        for loss in losses[: len(losses) - len(self.regularized)]:
            if rows.padded:
                raise UserError(f"a layer calls add_loss or has an activity regularizer, {PADDED}")
            value = tf.convert_to_tensor(loss)
            value = tf.reduce_sum(value if value.dtype.is_floating else tf.cast(value, keras.config.floatx()))
            terms.append(LossTerm("", 1.0, _counted(value, rows) * _fraction(rows, count, value.dtype)))
        return terms

    def penalties(self) -> list[tf.Tensor]:
        """Returns the penalty of each variable in `regularized`, a scalar that is the same on every replica."""
        return [variable.regularizer(variable) for variable in self.regularized]

    def penalties_with_gradients(self) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
        """Returns the penalties, and for each trainable variable the gradient of their sum or None."""
        variables = self._model().trainable_variables
        if not self.regularized:
            return [], [None] * len(variables)
        with tf.GradientTape() as tape:
            penalties = self.penalties()
            total = sum_in_order([tf.cast(p, penalties[0].dtype) for p in penalties])
        gradients = tape.gradient(total, [v.value for v in self.regularized])
        by_variable = dict(zip(map(id, self.regularized), gradients))
        return penalties, [by_variable.get(id(v)) for v in variables]

    def _matched(self, y: Structure, y_pred: Structure, weight: Structure | None) -> list[keras_internals.MatchedLoss]:
        compiled = keras_internals.compiled_loss(self._model())
        if compiled is None:
            return []
        if not compiled.built:
            try:
                compiled(y, y_pred, None)  # Keras builds on its first call only
            except _MISFITS as error:
                try:  # a loss that picks some of the rows needs several
                    compiled(*keras.tree.map_structure(lambda t: tf.repeat(t, 64, 0), (y, y_pred)), None)
                except _MISFITS:
                    raise _misfit("loss does", y, y_pred, error) from error
            for entry in keras_internals.loss_entries(self._model()):
                if entry.loss.reduction in (None, "none"):
                    raise UserError(
                        f"loss {entry.loss.name!r} has reduction={entry.loss.reduction!r}, which leaves nothing to "
                        "minimize",
                        f"use 'sum' or one of {', '.join(MEANS)}",
                    )
        try:
            return keras_internals.matched_losses(compiled, y, y_pred, weight)
        except _MISFITS as error:
            raise _misfit("targets do", y, y_pred, error) from error

    def _of_slice(
        self, matched: keras_internals.MatchedLoss, rows: MicroBatch, count: tf.Tensor | int
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Returns numerator and denominator, as keras.losses.Loss.__call__ and reduce_weighted_values (Keras 3) do."""
        loss, weight = matched.entry.loss, matched.sample_weight
        if type(loss).__call__ is not keras.losses.Loss.__call__:
            return self._of_all_rows(matched, rows)
        mask = matched.mask
        values = loss.call(*_call_arguments(matched))
        out_mask = getattr(values, keras_internals.MASK, None)
        if out_mask is not None:
            mask = out_mask if mask is None else mask & out_mask
        values = tf.cast(values, loss.dtype)
        if values.shape.rank == 0:
            if rows.parts * self._distribution.replicas == 1:
                return self._of_all_rows(matched, rows)
            return _of_scalar(loss, values, weight, rows, count), None

        scaled = values
        if weight is not None:
            weight = tf.cast(weight, values.dtype)
            across = weight.shape.rank == 1 and values.shape.rank > 1 and values.shape[1:] != [1]
            if across and not _is_keras_loss(loss):  # on one device Keras lays them along the last axis
                what = f"loss {loss.name!r} returns {list(values.shape[1:])} values per example"
                fix = "average them in the loss, or give a weight for each value"
                raise UserError(f"{what}, and there is one weight for each", fix)
            scaled, weight = _same_rank(scaled, weight)
            scaled = scaled * weight
        if mask is not None:
            mask = tf.cast(mask, values.dtype)
            scaled, mask = _same_rank(scaled, mask)
            scaled = scaled * mask
        total = lambda tensor: _counted(tf.reduce_sum(_without_padding(tensor, rows)), rows)
        numerator = total(scaled)

        if loss.reduction == "sum":
            return numerator, None
        if loss.reduction == "mean_with_sample_weight" and (weight is not None or mask is not None):
            counted = mask if weight is None else weight if mask is None else weight * mask
            return numerator, total(counted)
        if mask is not None:
            return numerator, total(mask) * _values_per_row(scaled) / _values_per_row(mask)
        return numerator / (divisor(count, values.dtype) * _values_per_row(scaled)), None

    def _of_all_rows(self, matched: keras_internals.MatchedLoss, rows: MicroBatch) -> tuple[tf.Tensor, None]:
        """Computes a loss that looks across the batch on the rows of all replicas, as Keras does on one device.

        Every replica has the same value, which counts once; its gradient flows through each replica's own rows.
        """
        weight = () if matched.sample_weight is None else (matched.sample_weight,)
        arguments = gathering.gathered(self._distribution, (matched.y_true, matched.y_pred, *weight), rows)
        with tf.name_scope("loss"):  # a name such as `_mine` is no scope of its own
            value = matched.entry.loss(*arguments)
        if self._distribution.replicas == 1:
            return value, None
        once = tf.equal(self._distribution.replica_id(), 0)
        return value - tf.stop_gradient(tf.where(once, tf.zeros_like(value), value)), None


def objectives(terms: list[LossTerm]) -> list[tf.Tensor]:
    """Returns the scalars to differentiate: one for all known denominators, one per own denominator."""
    known = [t.weighted(t.numerator) for t in terms if t.denominator is None]
    own = [t.numerator for t in terms if t.denominator is not None]
    if not known:
        return own
    total = known[0] if len(known) == 1 else sum_in_order([tf.cast(k, known[0].dtype) for k in known])
    return [total, *own]


def _is_gathered(kind: Kind, parts: int) -> bool:
    # Also of what seems to be a mean: on other rows it may not be one, as where masked ones are left out of it.
    return kind is Kind.ACROSS or (kind is Kind.MEAN and parts == 1)


def _of_scalar(
    loss: keras.Loss, value: tf.Tensor, weight: tf.Tensor | None, rows: MicroBatch, count: tf.Tensor | int
) -> tf.Tensor:
    """Takes a user's loss that returns one number for a micro-batch as a mean over examples."""
    if rows.padded:
        raise UserError(f"loss {loss.name!r} returns one number per batch, {PADDED}")
    if weight is not None:
        what = f"loss {loss.name!r} returns one number per batch and cannot be combined with sample weights"
        raise UserError(what, "return one value per example")
    value = _counted(value, rows)
    return value if loss.reduction == "sum" else value * _fraction(rows, count, value.dtype)


_MISFITS = ValueError, KeyError, TypeError, tf.errors.InvalidArgumentError, tf.errors.UnimplementedError


def _misfit(what: str, y: Structure, y_pred: Structure, error: Exception) -> UserError:
    """Returns the error that names both sides, since Keras' own may be no more than a missing index."""
    shapes = [keras.tree.map_structure(lambda t: tuple(t.shape[1:]), side) for side in (y, y_pred)]
    reason = f"no {error.args[0]!r}" if isinstance(error, KeyError) and error.args else one_line(error, 200)
    reason = re.sub(r"{{.*?}} | \[Op:.*", "", reason)
    return UserError(
        f"{what} not fit the model's outputs: an example's targets have the shapes {one_line(shapes[0])}, "
        f"its outputs {one_line(shapes[1])} ({reason})"
    )


def _values_per_row(values: tf.Tensor) -> tf.Tensor:
    """Returns the number of loss values per example (product of all dimensions but the first)."""
    inner = values.shape[1:]
    if inner.is_fully_defined():
        return tf.constant(inner.num_elements(), values.dtype)
    return tf.cast(tf.reduce_prod(tf.shape(values)[1:]), values.dtype)


def _counted(total: tf.Tensor, rows: MicroBatch) -> tf.Tensor:
    """Returns a sum over rows, 0 where there are none."""
    # where() and not a product: an inf of a row that does not count times 0 would be NaN.
    return total if rows.present is None else tf.where(rows.present, total, tf.zeros_like(total))


def _without_padding(values: tf.Tensor, rows: MicroBatch) -> tf.Tensor:
    """Returns values [rows, ...] with zeros for the padding."""
    mask = rows.row_mask
    if mask is None:
        return values
    return tf.where(tf.reshape(mask, [-1, *[1] * (values.shape.rank - 1)]), values, tf.zeros_like(values))


def _fraction(rows: MicroBatch, count: tf.Tensor | int, dtype: tf.DType) -> tf.Tensor:
    """Returns the fraction of the global batch in a slice."""
    return tf.cast(rows.size, dtype) / divisor(count, dtype)


def divisor(count: tf.Tensor | int, dtype: tf.DType) -> tf.Tensor:
    """Returns the number of examples to divide by; as in Keras, the loss of a batch without any is 0."""
    return tf.cast(count if isinstance(count, int) else tf.maximum(count, 1), dtype)


def _same_rank(values: tf.Tensor, weight: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Follows Keras' squeeze_or_expand_to_same_rank: ranks that differ by one meet at a last axis of 1."""
    if weight.shape.rank == 1 and values.shape.rank > 1:
        if values.shape[1:] == [1]:
            return tf.squeeze(values, -1), weight
        # Keras broadcasts [n, t] * [n] from the right, which only means something for n = 1.
        return values, tf.reshape(weight, [-1, *[1] * (values.shape.rank - 1)])
    if values.shape.rank == weight.shape.rank + 1:
        return values, tf.expand_dims(weight, -1)
    if weight.shape.rank == values.shape.rank + 1 and weight.shape[-1] == 1:
        return values, tf.squeeze(weight, -1)
    return values, weight


def _call_arguments(matched: keras_internals.MatchedLoss) -> tuple[Structure, Structure]:
    """Returns targets and outputs as `keras.losses.Loss.__call__` passes them to `call`."""
    to_tensor = lambda t: keras.ops.convert_to_tensor(t, dtype=matched.entry.loss.dtype)
    return tuple(keras.tree.map_structure(to_tensor, values) for values in (matched.y_true, matched.y_pred))


def _kind_of(matched: keras_internals.MatchedLoss) -> Kind:
    """Classifies a loss by probing it with `SAMPLE_ROWS` rows together and one by one, with other outputs too."""
    loss = matched.entry.loss
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return Kind.ACROSS
    y_true, y_pred = _call_arguments(matched)
    kinds = {_kind_for(loss, y_true, prediction) for prediction in variants(y_pred)}
    probes = [(y_true, negated(y_pred))]
    if not _is_keras_loss(loss):
        if _changes_row_count(loss, y_true, y_pred):
            return Kind.ACROSS
        # What depends on the batch may not in these rows, as the number of positives where there is one at most.
        extremes = [_changed(y_true, like) for like in (tf.zeros_like, tf.ones_like)]
        probes += [(extreme, prediction) for extreme in extremes for prediction in variants(y_pred)]
    for probe in probes:
        with contextlib.suppress(ValueError, TypeError, tf.errors.OpError):
            kinds.add(_kind_for(loss, *probe))
    return Kind.ACROSS if len(kinds) > 1 else kinds.pop()


def is_of_keras(code: object) -> bool:
    """Returns whether a function or class is defined by Keras, which computes a value per example."""
    return str(getattr(code, "__module__", "")).partition(".")[0] == "keras"


def _is_keras_loss(loss: keras.Loss) -> bool:
    return is_of_keras(type(loss)) and is_of_keras(getattr(loss, "fn", type(loss)))


def _changes_row_count(loss: keras.Loss, y_true: Structure, y_pred: Structure) -> bool:
    """Returns whether the number of values depends on the rows, as with tf.boolean_mask: the graph does not know it."""
    try:
        traced = tf.function(loss.call).get_concrete_function(y_true, y_pred)
    except (ValueError, TypeError, AttributeError, tf.errors.OpError):  # training reports it, or it is no graph code
        return False
    shape = tf.nest.flatten(traced.structured_outputs)[0].shape
    return shape.rank is None or (shape.rank > 0 and shape[0] is None)


def _kind_for(loss: keras.Loss, y_true: Structure, y_pred: Structure) -> Kind:
    def same(one: tf.Tensor, other: tf.Tensor) -> bool:
        rounding = {"float64": 1e-9, "float32": 1e-4 if _is_keras_loss(loss) else 1e-5}.get(loss.dtype, 3e-2)
        one, other = (tf.cast(value, tf.float64) for value in (one, other))
        return one.shape == other.shape and np.allclose(one, other, rounding, rounding, equal_nan=True)

    try:
        whole = tf.convert_to_tensor(loss.call(y_true, y_pred))
        if not same(whole, tf.convert_to_tensor(loss.call(y_true, y_pred))):
            return Kind.ROWS if whole.shape.rank else Kind.MEAN  # it draws random numbers: nothing can be told
        single = [
            tf.convert_to_tensor(loss.call(*keras.tree.map_structure(lambda t, i=i: t[i : i + 1], (y_true, y_pred))))
            for i in range(SAMPLE_ROWS)
        ]
    except (ValueError, TypeError, IndexError, tf.errors.OpError):
        return Kind.ACROSS  # it needs more than one example, or others
    if whole.shape.rank == 0:
        return Kind.MEAN if same(whole, tf.reduce_mean(tf.stack(single), 0)) else Kind.ACROSS
    if whole.shape[0] != SAMPLE_ROWS or any(value.shape[:1] != [1] for value in single):
        return Kind.ACROSS
    return Kind.ROWS if same(whole, tf.concat(single, 0)) else Kind.ACROSS


def variants(y_pred: Structure) -> list[Structure]:
    """Returns outputs as they are, in another order, and with differences: a new model may give all rows alike."""
    return [y_pred, _changed(y_pred, lambda t: tf.reverse(t, [0])), _changed(y_pred, _spread)]


def negated(y_pred: Structure) -> Structure:
    """Returns outputs of another sign, which a model need not be able to give.

    Where all are below zero, a maximum that begins there seems to add up, and so it does where all are zero.
    """
    return _changed(y_pred, lambda t: -_spread(tf.where(tf.equal(t, 0), _spread(tf.ones_like(t), -1.0), t)))


def _changed(values: Structure, change: Callable[[tf.Tensor], tf.Tensor]) -> Structure:
    return keras.tree.map_structure(lambda t: change(t) if t.dtype.is_floating else t, values)


def _spread(t: tf.Tensor, least: float = 0.5) -> tf.Tensor:
    factors = tf.constant(np.random.default_rng(0).uniform(least, 1.0, [SAMPLE_ROWS]))
    return t * tf.cast(tf.reshape(factors, [-1, *[1] * (t.shape.rank - 1)]), t.dtype)
