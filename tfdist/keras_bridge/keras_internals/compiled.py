"""Private names of what a model is compiled with: losses and metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.data.structures import Structure
from tfdist.keras_bridge.keras_internals.replacing import PATCHED, replaced

if TYPE_CHECKING:
    from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics


class MatchedLoss(NamedTuple):
    """One loss of a compiled model with what Keras would call it with."""

    entry: Any
    """Keras' record: `loss`, `loss_weights`, `name`."""
    y_true: Structure
    y_pred: Structure
    sample_weight: tf.Tensor | None


def compiled_loss(model: keras.Model) -> CompileLoss | None:
    """Returns Keras' CompileLoss, or None; `model.loss` is only what the user has given, in any mixture of forms."""
    return model._compile_loss


def loss_entries(compiled: CompileLoss) -> list[Any]:
    """Returns the single losses of a built CompileLoss; in public there is only their weighted sum."""
    return list(compiled._flat_losses or [])


def matched_losses(
    compiled: CompileLoss, y: Structure, y_pred: Structure, sample_weight: Structure
) -> list[MatchedLoss]:
    """Returns which targets and outputs belong to which loss, matched by Keras itself.

    Keras accepts targets, outputs and losses in many mixtures of lists and dicts. Rather than repeat its rules, a
    built CompileLoss is called here with each loss replaced by a recorder.
    """
    entries, metrics = list(compiled._flat_losses), compiled._metrics
    matched: list[MatchedLoss] = []

    def recorder(entry: object) -> Callable:
        def record(y_true: Structure, prediction: Structure, sample_weight: tf.Tensor | None = None) -> tf.Tensor:
            matched.append(MatchedLoss(entry, y_true, prediction, sample_weight))
            return tf.zeros(())

        return record

    compiled._flat_losses = [entry._replace(loss=recorder(entry)) for entry in entries]
    compiled._metrics = [None] * len(entries)
    try:
        compiled(y, y_pred, sample_weight)
    finally:
        compiled._flat_losses, compiled._metrics = entries, metrics
    return matched


@contextlib.contextmanager
def unscaled_losses() -> Iterator[None]:
    """Lets the Keras losses that users call in a loss function or beside `add_loss` return their own value.

    Keras divides it by the strategy's number of replicas, since its `fit` adds the replicas' gradients up. tfdist
    weighs each replica by its rows, and the loss would be divided twice. Nothing public turns the division off.
    """
    from keras.src.losses import loss

    with PATCHED:  # two threads that trace at once would put the wrong one back
        theirs = loss.scale_loss_for_distribution, loss.unscale_loss_for_distribution
        loss.scale_loss_for_distribution = loss.unscale_loss_for_distribution = lambda value: value
        try:
            yield
        finally:
            loss.scale_loss_for_distribution, loss.unscale_loss_for_distribution = theirs


def compiled_with(model: keras.Model) -> list[object]:
    """Returns losses, weights and metrics as `compile` was given them; in public only what they serialise to."""
    given = model._compile_config.config
    return [given[name] for name in ("loss", "loss_weights", "metrics", "weighted_metrics")]


def loss_metrics(model: keras.Model) -> list[keras.Metric]:
    """Returns the metrics in which Keras itself averages the losses; `model.metrics` does not tell them from others."""
    compiled = model._compile_loss
    return [model._loss_tracker] + (compiled.metrics if compiled else [])


def compiled_metrics(model: keras.Model) -> CompileMetrics | None:
    """Returns Keras' CompileMetrics, or None; `model.metrics` does not tell which output a metric is for."""
    return model._compile_metrics


def metrics_by_output(compiled: CompileMetrics) -> tuple[list[Any], list[Any]]:
    """Returns the groups of metrics of each output, unweighted and weighted; None where an output has none.

    In public there is only `update_state` for all, which takes no slices of weights and many small operations.
    """
    return compiled._flat_metrics, compiled._flat_weighted_metrics


def by_output(compiled: CompileMetrics, structure: Structure) -> list[Structure]:
    """Returns targets, outputs or weights as a list in the order of `metrics_by_output`, by Keras' own rules."""
    return compiled._flatten_y(structure)


def create_late_variables(metric: keras.Metric, y_true: tf.Tensor, y_pred: tf.Tensor) -> None:
    """Creates the variables of a metric of Keras that makes them at its first update, once it knows the shapes.

    Nothing public does. Made during the first update, they would be missing where metrics are reset and in checkpoints.
    """
    kinds = (keras.metrics.AUC, keras.metrics.FBetaScore, keras.metrics.R2Score)
    # A subclass with an `update_state` of its own may hand on other shapes than it is given.
    if any(type(metric).update_state is kind.update_state for kind in kinds) and not metric._built:
        metric._build(*([] if isinstance(metric, keras.metrics.AUC) else [y_true.shape]), y_pred.shape)


def results(by_metric: Mapping[keras.Metric, Callable[[], object]]) -> AbstractContextManager[None]:
    """Gives metrics another `result`, within it.

    Keras names the results of compiled metrics by the outputs, and only while it asks them all; and a step's logs do
    not say which of them are results of metrics.
    """
    return replaced("result", by_metric)


@contextlib.contextmanager
def mean_updates(update: Callable) -> Iterator[None]:
    """Replaces, within it, what updates `keras.metrics.Mean`, by class: a step's means need not be the model's metrics.

    Args:
      update: called with (theirs, metric, values, weights or None); `theirs` takes the last three.
    """
    kind = keras.metrics.Mean
    with PATCHED:
        theirs = kind.__dict__["update_state"]
        kind.update_state = lambda self, values, sample_weight=None: update(theirs, self, values, sample_weight)
        try:
            yield
        finally:
            kind.update_state = theirs


def restored_epoch(model: keras.Model) -> int:
    """Returns the epoch that `keras.callbacks.BackupAndRestore` has gone back to, and forgets it; 0 for none.

    The callback leaves it in this attribute for Keras' `fit`, and nowhere else.
    """
    epoch, model._initial_epoch = model._initial_epoch, None
    return epoch or 0


def metrics_in_order(model: keras.Model, logs: dict[str, Any]) -> list[float] | float:
    """Returns the values of `logs` as Keras' `evaluate` does with return_dict=False: a list, or its only entry.

    Nothing public tells the order: `model.metrics_names` has one name for all compiled metrics.
    """
    return model._flatten_metrics_in_order(logs)


def averaged_function(metric: keras.metrics.MeanMetricWrapper) -> tuple[Callable, dict[str, object]]:
    """Returns the function that the metric averages, and its options; `get_config` gives them serialised."""
    return metric._fn, metric._fn_kwargs
