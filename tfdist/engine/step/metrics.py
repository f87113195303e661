"""Compiled Keras metrics in a compiled step: their updates, without the small ops that cost a small model its speed,
and their results."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.data.batch_layout import unpack
from tfdist.data.structures import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.models import keras_internals


def update(model: keras.Model, data: tuple[Structure, ...], y_pred: Structure, real: tf.Tensor | None) -> None:
    """Updates the compiled metrics as Keras does, by the real rows alone; in replica context.

    Args:
      model: built, its metrics too; without any nothing happens.
      data: (x, y, weight).
      real: how many rows are examples and not filler, an int32 scalar; None for all.
    """
    compiled = keras_internals.compiled_metrics(model)
    if compiled is None:
        return
    _, y, weight = unpack(data)
    if real is not None:
        y, y_pred = _rows(y, real), _rows(y_pred, real)
        weight = None if weight is None else _rows(weight, real)
    outputs = keras_internals.by_output(compiled, y_pred)
    targets = keras_internals.by_output(compiled, y)
    weights: list[Structure] = [None] * len(targets)
    if weight is not None:
        weights = keras_internals.by_output(compiled, weight)
        if len(weights) < len(targets):
            weights = [weights[0]] * len(targets)
    unweighted, weighted = keras_internals.metrics_by_output(compiled)
    for group, y_true, prediction in zip(unweighted, targets, outputs):
        _update_group(group, y_true, prediction, None)
    for group, y_true, prediction, sample_weight in zip(weighted, targets, outputs, weights):
        _update_group(group, y_true, prediction, sample_weight)


def create_variables(model: keras.Model, y: Structure, y_pred: Structure) -> None:
    """Creates the variables of the compiled metrics, also of those that would create them at their first update.

    Args:
      y: targets of at least one row.
      y_pred: the outputs for these rows.

    Raises:
      ValueError: they do not fit the metrics.
    """
    compiled = keras_internals.compiled_metrics(model)
    if compiled is None:
        return
    if not compiled.built:
        compiled.build(y, y_pred)
    outputs, targets = keras_internals.by_output(compiled, y_pred), keras_internals.by_output(compiled, y)
    for groups in keras_internals.metrics_by_output(compiled):
        for group, y_true, prediction in zip(groups, targets, outputs):
            for metric in group.metrics if group else []:
                keras_internals.create_late_variables(metric, y_true, prediction)


def _update_group(group: Any, y_true: Structure, y_pred: Structure, weight: tf.Tensor | None) -> None:
    for metric in group.metrics if group else []:
        if weight is None and keras_internals.mask_of(y_pred) is None and _is_mean(metric):
            _add_to_mean(metric, y_true, y_pred)
        else:
            metric.update_state(y_true, y_pred, sample_weight=weight)


def _is_mean(metric: keras.Metric) -> bool:
    """Whether `metric` is the mean over examples of a function of target and output, and no more."""
    return type(metric).update_state is keras.metrics.MeanMetricWrapper.update_state


def _add_to_mean(metric: keras.metrics.MeanMetricWrapper, y_true: tf.Tensor, y_pred: tf.Tensor) -> None:
    """Does what keras.metrics.MeanMetricWrapper.update_state does, for unweighted, unmasked examples."""
    function, options = keras_internals.averaged_function(metric)
    if function is keras.metrics.sparse_categorical_accuracy and y_true.shape.rank == y_pred.shape.rank - 1:
        # Keras' argmax first rewrites every output, to tell 0.0 from -0.0.
        values = tf.cast(tf.equal(tf.argmax(y_pred, -1, tf.int32), tf.cast(y_true, tf.int32)), metric.dtype)
    else:
        values = function(y_true, y_pred, **options)
        mask = keras_internals.mask_of(values)
        if mask is not None or values.shape.rank == 0:
            metric.update_state(y_true, y_pred)
            return
        values = tf.cast(values, metric.dtype)
    if values.shape.rank > 1:
        values = tf.reduce_mean(values, list(range(1, values.shape.rank)))
    metric.total.value.assign_add(tf.reduce_sum(values), read_value=False)
    rows = values.shape[0] if values.shape[0] is not None else tf.shape(values)[0]
    metric.count.value.assign_add(tf.cast(rows, metric.count.dtype), read_value=False)


def results(model: keras.Model, distribution: Distribution) -> dict[str, tf.Tensor]:
    """Returns the results of all metrics but the loss values, summed over replicas, under Keras' names."""
    of_losses = {id(metric) for metric in keras_internals.loss_metrics(model)}
    own = [metric for metric in model.metrics if id(metric) not in of_losses]
    by_name: dict[str, Any] = {}
    with distribution.totals([v for metric in own for v in metric.variables]):
        for metric in own:
            result = metric.result()
            by_name.update(result if isinstance(result, dict) else {metric.name: result})
        return {name: tf.convert_to_tensor(value) for name, value in by_name.items()}


def _rows(values: Structure, real: tf.Tensor) -> Structure:
    def one(t: tf.Tensor) -> tf.Tensor:
        part = t[:real]
        mask = keras_internals.mask_of(t)
        if mask is not None:
            keras_internals.set_mask(part, mask[:real])
        return part

    return keras.tree.map_structure(one, values)
