"""Compiled Keras metrics in a compiled step: their updates, without many small and slow ops, and their results."""

import contextlib
import weakref
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.batch_layout import MicroBatch
from tfdist.data.spec import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.keras_bridge import gathering, keras_internals
from tfdist.keras_bridge.keras_internals import MASK, MetricArguments
from tfdist.keras_bridge.loss import is_of_keras, negated, variants


def update(model: keras.Model, distribution: Distribution, rows: MicroBatch, y_pred: Structure) -> None:
    """Updates the compiled metrics, if any, with a replica's rows as Keras does; in replica context."""
    _, y, weight = (*rows.data, None, None)[:3]
    pairs = keras_internals.metric_arguments(model, y, y_pred, weight)
    if not pairs:
        return
    for pair in pairs:
        whole = [metric for metric in pair.metrics if metric in _WHOLE]
        if whole:
            given = (pair.y_true, pair.y_pred) + (() if pair.weight is None else (pair.weight,))
            every, prediction, *weights = gathering.gathered(distribution, given, rows)
            for metric in whole:
                metric.update_state(every, prediction, sample_weight=weights[0] if weights else None)

    def add_up(pairs: list[MetricArguments] = pairs) -> tf.Tensor:
        for pair in pairs:
            for metric in pair.metrics:
                if metric not in _WHOLE:
                    _update(metric, pair)
        return tf.constant(0)

    if rows.padded:  # a metric need not take weights
        tf.cond(tf.equal(rows.size, rows.max_size), add_up, lambda: add_up([_without_last(pair) for pair in pairs]))
    elif rows.present is None:
        add_up()
    else:  # of no rows, a metric may make NaN, or count a batch
        tf.cond(rows.present, add_up, lambda: tf.constant(0))


def _without_last(pair: MetricArguments) -> MetricArguments:
    """Returns the same without the last row."""

    def without_last(value: tf.Tensor) -> tf.Tensor:
        mask = getattr(value, MASK, None)
        value = value[:-1]
        if mask is not None:
            setattr(value, MASK, mask[:-1])
        return value

    y_true, y_pred = (keras.tree.map_structure(without_last, v) for v in (pair.y_true, pair.y_pred))
    return pair._replace(y_true=y_true, y_pred=y_pred, weight=None if pair.weight is None else pair.weight[:-1])


def classify(model: keras.Model, y: Structure, y_pred: Structure) -> None:
    """Finds out which compiled metrics must see a whole batch, by trying them; not within a traced function.

    `y` and `y_pred` are targets and outputs of `SAMPLE_ROWS` rows.
    """
    for pair in keras_internals.metric_arguments(model, y, y_pred, None):
        for metric in pair.metrics:
            usual = [_adds_up(metric, pair.y_true, prediction) for prediction in variants(pair.y_pred)]
            unlikely = _adds_up(metric, pair.y_true, negated(pair.y_pred))
            if not is_of_keras(type(metric)):  # of rows that are all different, classes seen so far seem to add up
                # One that counts up to some number of rows seems to add up before. Outputs may be large, as of pixels.
                times = max(2, min(100, 10**7 // max(1, sum(map(tf.size, keras.tree.flatten(pair.y_pred))))))
                often = lambda values, times=times: keras.tree.map_structure(
                    lambda t: tf.concat([t] * times, 0), values
                )
                usual.append(_adds_up(metric, often(pair.y_true), often(pair.y_pred), already=1e7))
            if not all(usual) or unlikely is False or any(v.dtype == "bool" for v in metric.variables):
                _WHOLE.add(metric)
                for variable in metric.variables:  # which callbacks read and set outside of the replicas
                    keras_internals.let_first_replica_speak(variable)


def check(model: keras.Model, split_by: str) -> None:
    """Refuses metrics that must see a whole batch where that is taken apart (`Layout.split_by`) on one device, too."""
    for metric in whole_metrics(model) if split_by else []:
        what = f"metric {metric.name!r} does not add up over parts of a batch, which {split_by} takes apart"
        raise UserError(what, "use a smaller batch, or leave the metric out")


def _adds_up(metric: keras.Metric, y_true: Structure, y_pred: Structure, already: float = 0.0) -> bool | None:
    """Whether the state for a batch is the sum of the states for its parts; None where it cannot be told.

    A metric of the first examples alone adds nothing to a state in which so much has been counted `already`.
    """

    def state(before: list, rows: slice) -> list[np.ndarray]:
        part = keras.tree.map_structure(lambda t: t[rows], (y_true, y_pred))
        return metric.stateless_update_state(before, *part)

    first, second = slice(0, 3), slice(3, None)
    try:
        empty = metric.stateless_reset_state()
        whole, one, other = state(empty, slice(None)), state(empty, first), state(empty, second)
        after = state(one, second)
        full = [v + tf.cast(already, tf.convert_to_tensor(v).dtype) for v in empty] if already else empty
        more = state(full, slice(None))
    except (ValueError, TypeError, IndexError, tf.errors.OpError):
        return None  # it wants more rows, or other values
    for values in zip(empty, whole, one, other, after, full, more):
        e, w, a, b, c, f, m = (np.asarray(tf.cast(tf.convert_to_tensor(v), tf.float64)) for v in values)
        if not all(np.isfinite(v).all() for v in (e, w, a, b, c, f, m)):
            return None
        rounding = 1e-4 * max(1.0, np.abs(w).max(initial=0)) if w.size else 0
        counts_on = np.allclose(w - e, m - f, 1e-4, max(rounding, 4e-7 * already))  # to which float32 rounds
        if not (counts_on and np.allclose(w - e, a + b - 2 * e, 1e-4, rounding) and np.allclose(w, c, 1e-4, rounding)):
            return False
    return True


def create_variables(model: keras.Model, y: Structure, y_pred: Structure) -> None:
    """Creates the variables of the compiled metrics, also of those that would create them at their first update.

    Raises:
      ValueError: targets and outputs do not fit the metrics.
    """
    compiled = keras_internals.compiled_metrics(model)
    if compiled is None:
        return
    if not compiled.built:
        compiled.build(y, y_pred)
    for pair in keras_internals.metric_arguments(model, y, y_pred, None):
        for metric in pair.metrics:
            keras_internals.create_late_variables(metric, pair.y_true, pair.y_pred)


def _update(metric: keras.Metric, pair: MetricArguments) -> None:
    """Updates a metric; the mean over unweighted, unmasked examples of a function of theirs with fewer ops."""
    y_true, y_pred = pair.y_true, pair.y_pred
    is_mean = type(metric).update_state is keras.metrics.MeanMetricWrapper.update_state
    if pair.weight is not None or not is_mean or getattr(y_pred, MASK, None) is not None:
        metric.update_state(y_true, y_pred, sample_weight=pair.weight)
        return
    function, options = keras_internals.averaged_function(metric)
    same_rank = y_true.shape.rank == y_pred.shape.rank - 1
    if function is keras.metrics.sparse_categorical_accuracy and same_rank and y_true.dtype.is_integer:
        # Keras' argmax first rewrites every output, to tell 0.0 from -0.0. A label of 2.4 is no class, and never right.
        values = tf.cast(tf.equal(tf.argmax(y_pred, -1, tf.int32), tf.cast(y_true, tf.int32)), metric.dtype)
    else:
        values = tf.convert_to_tensor(function(y_true, y_pred, **options))  # a Python number, too
        if getattr(values, MASK, None) is not None or values.shape.rank == 0:
            metric.update_state(y_true, y_pred)
            return
        values = tf.cast(values, metric.dtype)
    if values.shape.rank > 1:
        values = tf.reduce_mean(values, list(range(1, values.shape.rank)))
    metric.total.value.assign_add(tf.reduce_sum(values), read_value=False)
    rows = values.shape[0] if values.shape[0] is not None else tf.shape(values)[0]
    metric.count.value.assign_add(tf.cast(rows, metric.count.dtype), read_value=False)


def results(model: keras.Model, distribution: Distribution, losses: bool = False) -> dict[str, tf.Tensor]:
    """Returns the results of all metrics, summed over replicas, under Keras' names.

    `losses`: also of those in which Keras averages the losses; without a step of the model's own nothing updates them.
    """
    return of_replica(model, losses) if distribution.workers == 1 else _of_workers(model, distribution, losses)


def _of_workers(model: keras.Model, distribution: Distribution, losses: bool) -> dict[str, tf.Tensor]:
    """Returns the results of all metrics from one sum of all that they have counted.

    TensorFlow would sum each variable when it is read, in a message of its own, one after the other. Over a link with a
    latency of 20 ms that took longer than the updates of a call.
    """
    others = [*whole_metrics(model), *([] if losses else keras_internals.loss_metrics(model))]
    apart = {id(v) for metric in others for v in metric.variables}
    summed = [v for metric in model.metrics for v in metric.variables if id(v) not in apart]

    def of_each() -> dict[str, tf.Tensor]:
        own = [tf.identity(tf.convert_to_tensor(v.value)) for v in summed]
        for variable, total in zip(summed, distribution.all_sum(own)):
            keras_internals.write_copy(variable.value, total)
        totals = of_replica(model, losses)
        for variable, value in zip(summed, own):
            keras_internals.write_copy(variable.value, value)
        return totals

    return {name: distribution.local(value)[0] for name, value in distribution.run(of_each, ()).items()}


def of_replica(model: keras.Model, losses: bool = False) -> dict[str, tf.Tensor]:
    """Returns the results of all metrics as they are; in replica context, of what this replica has updated."""
    of_losses = set() if losses else set(map(id, keras_internals.loss_metrics(model)))
    by_name = _flat({metric.name: metric.result() for metric in model.metrics if id(metric) not in of_losses})
    return {name: tf.convert_to_tensor(value) for name, value in by_name.items()}


def _flat(results: dict[str, object]) -> dict[str, object]:
    """Takes results apart that are dictionaries themselves, in Keras' order: a metric may return several numbers."""
    flat = {}
    for name, value in results.items():
        flat.update(_flat(value) if isinstance(value, dict) else {name: value})
    return flat


def add_losses(
    model: keras.Model, distribution: Distribution, sums: tf.Tensor, examples: tf.Tensor, running: bool
) -> None:
    """Adds loss values times examples, `CallResult.sums`, to the metrics in which Keras averages the losses.

    Each worker counts an equal part, so that it can tell the whole. In cross-replica context.

    `running`: `sums` are of all examples since the reset, and not only of these.
    """
    add = tf.raw_ops.AssignAddVariableOp
    for mean, total in zip(keras_internals.loss_metrics(model), tf.unstack(sums)):
        write = tf.raw_ops.AssignVariableOp if running else add
        for variable, value, put in (mean.total, total, write), (mean.count, examples, add):
            copy, *_ = keras_internals.copies(variable)
            put(resource=copy.handle, value=tf.cast(value / distribution.workers, copy.dtype))


def losses(model: keras.Model, distribution: Distribution) -> np.ndarray:
    """Returns sums and counts of the metrics in which Keras averages the losses, float64 [1 + parts, 2]."""

    def of_worker(variable: keras.Variable) -> float:
        copies = keras_internals.copies(variable)
        return sum(float(keras_internals.read_copy(copy)) for copy in copies)

    means = keras_internals.loss_metrics(model)
    return distribution.workers * np.array([[of_worker(mean.total), of_worker(mean.count)] for mean in means])


def set_losses(model: keras.Model, distribution: Distribution, sums: Sequence[float], examples: float) -> None:
    """Sets these sums and counts."""
    for mean, total in zip(keras_internals.loss_metrics(model), sums):
        for variable, value in (mean.total, total), (mean.count, examples):
            for i, copy in enumerate(keras_internals.copies(variable)):
                copy.assign(tf.cast(0 if i else value / distribution.workers, copy.dtype))


_RESETS: weakref.WeakKeyDictionary[keras.Metric, int] = weakref.WeakKeyDictionary()
"""How often the metrics of a model have been reset, by the first of them."""


def resets(model: keras.Model) -> Callable[[], int]:
    """Returns a function that tells how often the metrics have been reset; those by Keras count in `counting_resets`.

    With it whoever trains finds out that a callback has evaluated: Keras has one state for both.
    """
    first = _first(model)
    return lambda: _RESETS.get(first, 0)


def count_reset(model: keras.Model) -> None:
    """Counts a reset of all metrics."""
    _RESETS[_first(model)] = _RESETS.get(_first(model), 0) + 1


def counting_resets(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Counts, within it, what Keras resets, too."""
    metric = _first(model)
    theirs = metric.reset_state

    def reset_state() -> None:
        count_reset(model)
        theirs()

    return keras_internals.replaced("reset_state", [(metric, reset_state)])


def _first(model: keras.Model) -> keras.Metric:
    return next(iter([*model.metrics, *keras_internals.loss_metrics(model)]))


def reset(model: keras.Model, distribution: Distribution) -> None:
    """Resets all metrics; in cross-replica context.

    Each replica does it by itself: TensorFlow would give each a part of the value to begin with, and parts of 0.1 add
    up to another number, of an integer to none at all. The first replica has it, and the others zero, so that the
    sum is right. What a metric keeps of its state is what the first makes of the sum. Metrics that must see a whole
    batch have theirs everywhere.
    """
    whole = {id(v) for metric in whole_metrics(model) for v in metric.variables}
    summed = [v for metric in model.metrics for v in metric.variables if id(v) not in whole]
    many = distribution.replicas > 1
    keeping = [v for metric in model.metrics if many and _keeps(metric) for v in metric.variables if id(v) not in whole]

    def of_each() -> None:
        first = tf.equal(distribution.replica_id(), 0)
        own = [tf.convert_to_tensor(v.value) for v in keeping]
        for variable, total in zip(keeping, distribution.all_sum(own) if own else []):
            keras_internals.write_copy(variable.value, tf.where(first, total, tf.zeros_like(total)))
        for metric in model.metrics:
            metric.reset_state()
        for variable in summed if many else ():
            value = tf.convert_to_tensor(variable.value)
            keras_internals.write_copy(variable.value, tf.where(first, value, tf.zeros_like(value)))

    distribution.run(of_each, ())


def _keeps(metric: keras.Metric) -> bool:
    """Tells whether `reset_state` leaves something of the state, or makes the new one of it."""
    try:
        reset = tf.function(metric.stateless_reset_state, autograph=False).get_concrete_function()
    except Exception:  # whatever a metric of the user's raises there
        return True
    return bool(reset.captured_inputs)


_WHOLE: weakref.WeakSet[keras.Metric] = weakref.WeakSet()
"""Metrics that must see a whole batch: each replica keeps their state for all examples, and not for a part."""


def whole_metrics(model: keras.Model) -> list[keras.Metric]:
    """Returns the compiled metrics of a model that must see a whole batch."""
    every = [inner for metric in model.metrics for inner in getattr(metric, "metrics", [metric])]
    return [metric for metric in dict.fromkeys(every) if metric in _WHOLE]
