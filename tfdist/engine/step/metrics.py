"""Compiled Keras metrics in a compiled step: their updates, without the small ops that cost a small model its speed,
and their results."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.data.batch_layout import unpack
from tfdist.distributed.distribution import Distribution


def update(compiled: Any, data: Any, y_pred: Any, real: Any) -> None:
    """Does what `compiled.update_state(y, y_pred, weight)` does with the real rows alone, in replica context.

    Args:
      compiled: a built `model._compile_metrics`, or None.
      data: (x, y, weight).
      real: how many rows are examples and not filler; None for all.
    """
    if compiled is None:
        return
    _, y, weight = unpack(data)
    if real is not None:
        y, y_pred = _rows(y, real), _rows(y_pred, real)
        weight = None if weight is None else _rows(weight, real)
    outputs = compiled._flatten_y(y_pred)
    targets = compiled._flatten_y(y)
    weights = [None] * len(targets)
    if weight is not None:
        weights = compiled._flatten_y(weight)
        if len(weights) < len(targets):
            weights = [weights[0]] * len(targets)
    for group, y_true, prediction in zip(compiled._flat_metrics, targets, outputs):
        _each(group, y_true, prediction, None)
    for group, y_true, prediction, sample_weight in zip(compiled._flat_weighted_metrics, targets, outputs, weights):
        _each(group, y_true, prediction, sample_weight)


def _each(group: Any, y_true: Any, y_pred: Any, weight: Any) -> None:
    for metric in group.metrics if group else []:
        if weight is None and getattr(y_pred, "_keras_mask", None) is None and _is_mean(metric):
            _add_to_mean(metric, y_true, y_pred)
        else:
            metric.update_state(y_true, y_pred, sample_weight=weight)


def _is_mean(metric: Any) -> bool:
    """Whether `metric` is the mean over examples of a function of target and output, and no more."""
    return type(metric).update_state is keras.metrics.MeanMetricWrapper.update_state


def _add_to_mean(metric: Any, y_true: Any, y_pred: Any) -> None:
    """keras.metrics.MeanMetricWrapper.update_state for unweighted, unmasked examples."""
    if metric._fn is keras.metrics.sparse_categorical_accuracy and y_true.shape.rank == y_pred.shape.rank - 1:
        # Keras' argmax first rewrites every output, to tell 0.0 from -0.0.
        values = tf.cast(tf.equal(tf.argmax(y_pred, -1, tf.int32), tf.cast(y_true, tf.int32)), metric.dtype)
    else:
        values = metric._fn(y_true, y_pred, **metric._fn_kwargs)
        mask = getattr(values, "_keras_mask", None)
        if mask is not None or values.shape.rank == 0:
            metric.update_state(y_true, y_pred)
            return
        values = tf.cast(values, metric.dtype)
    if values.shape.rank > 1:
        values = tf.reduce_mean(values, list(range(1, values.shape.rank)))
    metric.total.value.assign_add(tf.reduce_sum(values), read_value=False)
    rows = values.shape[0] if values.shape[0] is not None else tf.shape(values)[0]
    metric.count.value.assign_add(tf.cast(rows, metric.count.dtype), read_value=False)


def results(model: keras.Model, distribution: Distribution) -> dict[str, Any]:
    """Results of all metrics but the loss values, under Keras' names."""
    skipped = {id(m) for m in ([model._loss_tracker] + (model._compile_loss.metrics if model._compile_loss else []))}
    own = [metric for metric in model.metrics if id(metric) not in skipped]
    found: dict = {}
    with distribution.totals([v for metric in own for v in metric.variables]):
        for metric in own:
            result = metric.result()
            found.update(result if isinstance(result, dict) else {metric.name: result})
        return {name: tf.convert_to_tensor(value) for name, value in found.items()}


def _rows(values: Any, real: Any) -> Any:
    def one(t):
        part = t[:real]
        mask = getattr(t, "_keras_mask", None)
        if mask is not None:
            part._keras_mask = mask[:real]
        return part

    return keras.tree.map_structure(one, values)
