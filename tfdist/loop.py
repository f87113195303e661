"""fit, evaluate and predict: when things happen. What one update does is in step.py."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import checks, pace, plan, strategy, update
from tfdist import data as data_lib
from tfdist.errors import TrainingError, UserError
from tfdist.layout import Layout, unpack
from tfdist.pace import Pace
from tfdist.step import NO_BATCH, Step

PREDICT_ROWS = 4096
"""Rows that `predict` holds on the device before they are copied out."""


def fit(
    model: keras.Model,
    dataset: Any,
    y: Any = None,
    *,
    distribution: strategy.Distribution | None = None,
    batch_size: int | None = None,
    epochs: int = 1,
    steps: int | None = None,
    callbacks: Any = None,
    verbose: Any = "auto",
    validation_data: Any = None,
    validation_freq: Any = 1,
    validation_batch_size: int | None = None,
    validation_steps: int | None = None,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    accumulate: int = 1,
    steps_per_call: int | str = "auto",
) -> keras.callbacks.History:
    """Trains a compiled model as `model.fit` does, with the same result under every strategy.

    Whether XLA compiles is the distribution's choice (`jit`), not that of `compile`.

    Args:
      model: a compiled Keras model, created in `distribution.scope()`.
      dataset: arrays, a tuple (x, y[, weight]), a `tf.data.Dataset` of global
        batches, or a source of `tfdist.data`.
      y: targets, when `dataset` is arrays.
      distribution: of `tfdist.connect`; without it, one device.
      batch_size: global batch of arrays, over all replicas and micro-batches; 32
        if not given. A data set brings its own.
      epochs: number of the last epoch, as in Keras.
      steps: stop after this many updates, even within an epoch.
      validation_freq: epochs between validations, or a list of epochs.
      validation_batch_size: as `batch_size`, and the same if not given.
      class_weight: weight of the examples of each class.
      shuffle: a new order of arrays each epoch, depending on seed and epoch.
      steps_per_epoch: updates that count as an epoch; needed for endless data.
      accumulate: micro-batches per update; less memory, the same result.
      steps_per_call: updates per call of the compiled function, `auto` to
        choose by time. A callback that looks at batches makes it 1.

    Returns:
      The Keras `History`.

    Raises:
      UserError: the model, data or arguments do not fit together.
      TrainingError: the loss is no longer finite.
    """
    distribution = distribution or strategy.default("no distribution given")
    source = data_lib.as_source(dataset, y, sample_weight)
    if class_weight:
        source = data_lib.weigh_classes(source, class_weight)
    checks.model_fits(model, distribution, accumulate)
    if checks.own_step(model):
        return _keras_fit(model, source, locals())
    layout = _layout(source, batch_size, distribution, accumulate)
    feed: data_lib.Feed = (
        data_lib.ArrayFeed(source, layout, seed if shuffle else None)
        if isinstance(source, data_lib.Arrays)
        else data_lib.BatchFeed(source, layout)
    )
    if steps_per_epoch is None and feed.batches == 0:
        raise UserError("the data set never ends: give steps_per_epoch")
    step = _step(model, distribution, source)
    checks.targets(model, step.output_shape, source)
    validation = None
    if validation_data is not None:
        measured = data_lib.as_source(validation_data)
        if validation_batch_size is None and isinstance(measured, data_lib.Arrays):
            validation_batch_size = layout.batch
        validation = _Evaluation(model, measured, distribution, validation_batch_size, validation_steps)
    _separate_dropout(model, distribution)
    per_epoch = steps_per_epoch or feed.batches or None
    called = _callbacks(model, callbacks, verbose, epochs, per_epoch)
    training = _Training(step, layout, feed, called, pace.choose(model, called, steps_per_call))

    model.stop_training = False
    called.on_train_begin()
    logs: dict = {}
    updates_left = steps if steps is not None else math.inf
    training.updates = initial_epoch * (per_epoch or 0)
    for epoch in range(initial_epoch, epochs):
        if updates_left <= 0:
            break
        called.on_epoch_begin(epoch)
        before = training.updates
        logs = training.epoch(epoch, min(per_epoch or math.inf, updates_left))
        updates_left -= training.updates - before
        average_statistics(model, distribution)
        if validation and _is_due(validation_freq, epoch):
            logs.update({f"val_{k}": v for k, v in validation.run(called).items()})
        called.on_epoch_end(epoch, logs)
        if model.stop_training:
            break
    update.finalize(model.optimizer, model.trainable_variables)
    called.on_train_end(logs)
    return model.history


def evaluate(
    model: keras.Model,
    dataset: Any,
    y: Any = None,
    *,
    distribution: strategy.Distribution | None = None,
    batch_size: int | None = None,
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
) -> dict[str, float]:
    """Loss and metrics over a data set, every example once.

    Args:
      dataset, y, sample_weight: as for `fit`.
      batch_size: global batch of arrays; 32 if not given.
      steps: evaluate this many batches only.
      callbacks: Keras callbacks; their `on_test_*` methods are called.

    Returns:
      Values by the names that Keras gives them.
    """
    distribution = distribution or strategy.default("no distribution given")
    source = data_lib.as_source(dataset, y, sample_weight)
    checks.model_fits(model, distribution, 1)
    average_statistics(model, distribution)
    called = keras.callbacks.CallbackList(callbacks, model=model) if callbacks else None
    return _Evaluation(model, source, distribution, batch_size, steps).run(called)


def predict(
    model: keras.Model,
    dataset: Any,
    *,
    distribution: strategy.Distribution | None = None,
    batch_size: int | None = None,
) -> Any:
    """The model's outputs, one row per example, in the order of the input.

    Args:
      dataset: arrays (a tuple's first entry is the input), or a `tf.data.Dataset` of batches.
      batch_size: global batch of arrays; 32 if not given.

    Returns:
      NumPy arrays of shape [examples, ...] in the structure of the outputs.
    """
    distribution = distribution or strategy.default("no distribution given")
    source = data_lib.as_source(dataset)
    checks.scope(model, distribution)
    average_statistics(model, distribution)
    layout = _layout(source, batch_size, distribution, 1, least=False)
    feed, batches = _once(source, layout)
    step = _step(model, distribution, source, outputs_only=True)
    call = step.compiled("predict", layout)
    pieces, rows, i = [], 0, 0
    whole: list = []
    while batches is None or i < batches:
        now = feed.next(i, 1)
        try:
            outputs, count = call(now.feed, tf.constant(now.first))
        except tf.errors.InvalidArgumentError as error:
            if batches is None and NO_BATCH in str(error):
                break
            raise _user_error(error) from error
        count = int(count)
        pieces.append(keras.tree.map_structure(lambda o, n=count: o[:n], outputs))
        rows, i = rows + count, i + 1
        if rows >= PREDICT_ROWS:
            whole.append(_joined(pieces))
            pieces, rows = [], 0
    if pieces:
        whole.append(_joined(pieces))
    return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *whole)


def average_statistics(model: keras.Model, distribution: strategy.Distribution) -> None:
    """Averages what each replica has gathered by itself (BatchNorm), before anybody looks at it."""
    distribution.average([v for v in model.non_trainable_variables if v.dtype.startswith(("float", "bfloat"))])


class _Training:
    """Runs epochs of updates and keeps count."""

    def __init__(self, step: Step, layout: Layout, feed: data_lib.Feed, callbacks: Any, pace: Pace):
        self._step = step
        self._layout = layout
        self._feed = feed
        self._callbacks = callbacks
        self._pace = pace
        # Loss scaling skips such updates, and Keras' own callback ends the training in its own way.
        self._forgives_nan = hasattr(step.model.optimizer, "inner_optimizer") or any(
            isinstance(c, keras.callbacks.TerminateOnNaN) for c in callbacks.callbacks
        )
        self.updates = 0
        """Updates since the beginning of the first epoch."""

    def epoch(self, epoch: int, limit: float) -> dict[str, float]:
        """Makes up to `limit` updates, until the data ends or a callback stops; returns the logs."""
        model, step = self._step.model, self._step
        step.reset()
        self._feed.restart()
        totals = _Totals(step.part_names)
        begun = 0
        logs: dict = {}
        while begun < limit and not model.stop_training:
            want = int(min(self._pace.updates, limit - begun))
            now = self._feed.next(self.updates, want)
            call = step.compiled("train", self._layout, now.full)
            self._callbacks.on_train_batch_begin(begun)
            start = time.perf_counter()
            result = _run(call, now.feed, now.first, now.last)
            done = int(result[3])
            if not done:
                break
            self._pace.took(time.perf_counter() - start, done, now.full)
            logs = totals.add(result)
            bad = int(result[2])
            begun, self.updates = begun + done, self.updates + done
            if bad >= 0 and not self._forgives_nan:
                raise _not_finite(logs, self.updates - done + bad - now.first + 1, epoch)
            self._callbacks.on_train_batch_end(begun - 1, logs)
            if done < now.last - now.first:
                break
        if not begun:
            raise UserError(
                f"the data set ended before the first update of epoch {epoch + 1}: give it a batch at least"
            )
        return logs


class _Totals:
    """Adds the sums of calls up to the logs of an epoch, in float64."""

    def __init__(self, names: list[str]):
        self._names = ["loss", *names]
        self._sums = np.zeros(len(self._names))
        self._examples = 0.0

    def add(self, result: tuple) -> dict[str, float]:
        sums, examples, _, _, metrics = result
        self._sums += sums.numpy()
        self._examples += float(examples)
        losses = self._sums / max(self._examples, 1.0)
        logs = dict(zip(self._names, losses.tolist()))
        for name, value in metrics.items():
            value = value.numpy()
            logs[name] = float(value) if value.ndim == 0 else value
        return logs


class _Evaluation:
    """Evaluates one source, again and again."""

    def __init__(
        self,
        model: keras.Model,
        source: data_lib.Source,
        distribution: strategy.Distribution,
        batch: int | None,
        steps: int | None,
    ):
        layout = _layout(source, batch, distribution, 1, least=False)
        self._feed, batches = _once(source, layout)
        self._batches = steps if batches is None else min(batches, steps or batches)
        if self._batches is None and isinstance(source, data_lib.Batches) and source.batches == 0:
            raise UserError("the data set to evaluate never ends: give the number of steps")
        self._step = _step(model, distribution, source)
        checks.targets(model, self._step.output_shape, source)
        self._call = self._step.compiled("test", layout)
        self._pace = Pace(None)

    def run(self, callbacks: Any) -> dict[str, float]:
        """Loss and metrics by name."""
        self._step.reset()
        self._feed.restart()
        totals = _Totals(self._step.part_names)
        callbacks = callbacks or keras.callbacks.CallbackList()
        callbacks.on_test_begin()
        done, logs = 0, {}
        while self._batches is None or done < self._batches:
            want = self._pace.updates if self._batches is None else min(self._pace.updates, self._batches - done)
            now = self._feed.next(done, want)
            callbacks.on_test_batch_begin(done)
            start = time.perf_counter()
            result = _run(self._call, now.feed, now.first, now.last)
            fresh = int(result[3])
            if not fresh:
                break
            self._pace.took(time.perf_counter() - start, fresh, now.full)
            logs, done = totals.add(result), done + fresh
            callbacks.on_test_batch_end(done - 1, logs)
            if fresh < now.last - now.first:
                break
        if not done:
            raise UserError("the data set to evaluate is empty: give it at least one batch")
        callbacks.on_test_end(logs)
        return logs


def _run(call: Any, feed: tuple, first: int, last: int) -> tuple:
    try:
        return call(feed, tf.constant(first), tf.constant(last))
    except tf.errors.InvalidArgumentError as error:
        raise _user_error(error) from error


_COMPLAINTS = (
    (
        r"Received a label value of .*? outside the valid range of \[.*?\)",
        "correct the labels or the model's last layer",
    ),
    (r"a batch of the data set is larger than the first one \(.*?\)", "make the first batch the largest"),
)


def _user_error(error: tf.errors.OpError) -> Exception:
    """The complaints of TensorFlow about data that a person can act on; anything else on one line."""
    for pattern, advice in _COMPLAINTS:
        found = re.search(pattern, str(error))
        if found:
            return UserError(f"{found[0]}: {advice}")
    return TrainingError(" ".join(str(error).split())[:400])


def _not_finite(logs: dict, number: int, epoch: int) -> TrainingError:
    return TrainingError(
        f"the loss is {logs['loss']} since update {number} (epoch {epoch + 1}): "
        "try a lower learning rate, warm-up, or gradient clipping, and look for NaN in the data"
    )


def _layout(
    source: data_lib.Source, batch: int | None, distribution: strategy.Distribution, accumulate: int, least: bool = True
) -> Layout:
    """How the global batches of `source` are laid out.

    Args:
      least: insist on an example per replica and micro-batch; measuring does without.
    """
    if isinstance(source, data_lib.Batches):
        found = int(tf.nest.flatten(source.dataset.element_spec)[0].shape[0] or 0)
        found = found or len(keras.tree.flatten(data_lib.first_batch(source))[0])
        # A data set of a single, smaller batch is all of it; one of unknown length may be.
        if batch not in (None, found) and not (found < batch and source.batches in (1, None)):
            raise UserError(f"batch_size={batch} does not fit a data set of batches of {found}: leave it out")
        batch = found
    batch = 32 if batch is None else batch
    if batch < 1:
        raise UserError(f"batch_size must be at least 1, got {batch}")
    if accumulate < 1:
        raise UserError(f"accumulate must be at least 1, got {accumulate}")
    if least:
        plan.check_batch(batch, distribution.replicas, accumulate, "batch_size")
    return Layout(batch, distribution.replicas, accumulate)


def _once(source: data_lib.Source, layout: Layout) -> tuple[data_lib.Feed, int | None]:
    """A feed that reads `source` in its own order, and its number of batches if known."""
    if isinstance(source, data_lib.Arrays):
        feed = data_lib.ArrayFeed(source, layout)
        return feed, feed.batches
    return data_lib.BatchFeed(source, layout, once=True), source.batches or None


def _step(
    model: keras.Model, distribution: strategy.Distribution, source: data_lib.Source, outputs_only: bool = False
) -> Step:
    """The compiled functions of this model; kept with it until it is compiled anew or its weights change."""
    key = (
        id(distribution.strategy),
        distribution.jit,
        *(id(getattr(model, name, None)) for name in ("_compile_loss", "_compile_metrics", "optimizer")),
        *(id(v) for v in model.trainable_variables),
    )
    known, kept = getattr(model, "_tfdist_step", (None, None))
    if kept is not None and known == key:
        return kept
    step = Step(model, distribution)
    if isinstance(source, data_lib.Arrays):
        row = keras.tree.map_structure(lambda a: tf.convert_to_tensor(a[:1]), source.columns)
    else:
        row = data_lib.first_batch(source)
    step.build(row, outputs_only)
    # Building may have created the weights. Past Keras' tracking, which would take it for part of the model.
    if not outputs_only:
        key = (*key[:5], *(id(v) for v in model.trainable_variables))
        object.__setattr__(model, "_tfdist_step", (key, step))
    return step


def _keras_fit(model: keras.Model, source: data_lib.Source, given: dict) -> Any:
    """A model with its own train_step, on one device: Keras' own fit does what its author meant."""
    for name, plain in (("steps", None), ("steps_per_call", "auto")):
        if given[name] != plain:
            raise UserError(
                f"{name} cannot be used with a model that has its own {checks.own_step(model)}: leave it out"
            )
    names: tuple[str, ...] = ("epochs", "callbacks", "verbose", "initial_epoch", "steps_per_epoch")
    names += ("validation_data", "validation_freq", "validation_batch_size", "validation_steps")
    options = {name: given[name] for name in names}
    if isinstance(source, data_lib.Batches):
        return model.fit(source.dataset, **options)
    x, y, weight = unpack(source.columns)
    return model.fit(x, y, sample_weight=weight, batch_size=given["batch_size"], shuffle=given["shuffle"], **options)


def _separate_dropout(model: keras.Model, distribution: strategy.Distribution) -> None:
    """Gives the random layers of each replica a stream of their own; replica 0 keeps Keras' own."""
    for variable in model.non_trainable_variables if distribution.replicas > 1 else ():
        copies: Any = getattr(variable.value, "values", ())
        if "seed_generator" in variable.path and len(copies) > 1:
            for replica, copy in enumerate(copies[1:], 1):
                offset = tf.constant([replica * 0x9E3779B1 % 2**32, 0], tf.uint32)
                copy.assign(tf.convert_to_tensor(copies[0]) + tf.cast(offset, copy.dtype))


def _callbacks(model: keras.Model, callbacks: Any, verbose: Any, epochs: int, steps: int | None) -> Any:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(
        callbacks, add_history=True, add_progbar=verbose != 0, model=model, verbose=verbose, epochs=epochs, steps=steps
    )


def _is_due(frequency: Any, epoch: int) -> bool:
    if isinstance(frequency, int):
        return (epoch + 1) % frequency == 0
    return epoch + 1 in frequency


def _joined(pieces: list) -> Any:
    return keras.tree.map_structure(lambda *parts: np.concatenate([p.numpy() for p in parts]), *pieces)
