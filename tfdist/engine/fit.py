"""fit: when things happen. What one update does is in step.py."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.checkpoints import training_state
from tfdist.checkpoints.manager import Checkpoints, Run
from tfdist.checkpoints.resume import Position
from tfdist.data import sources
from tfdist.distributed import connect
from tfdist.distributed.distribution import Distribution
from tfdist.engine import batching, custom_train_step, evaluation, preconditions, step_calls
from tfdist.engine import steps_per_call as steps_per_call_lib
from tfdist.engine.checkpointing import Keeper
from tfdist.engine.replica_check import Guard
from tfdist.engine.step import ema
from tfdist.engine.step.step import Step
from tfdist.engine.steps_per_call import Pace
from tfdist.engine.timing import Call, Spent
from tfdist.errors import Interrupted, TrainingError, UserError
from tfdist.models import keras_internals, layerwise_rates


def fit(
    model: keras.Model,
    dataset: Any,
    y: Any = None,
    *,
    distribution: Distribution | None = None,
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
    reduce_dtype: str = "float32",
    checkpoints: Checkpoints | None = None,
    on_nonfinite: str = "stop",
    max_rollbacks: int = 3,
    measure_average: bool = False,
    learning_rates: Mapping[str, float] | None = None,
    layer_decay: float = 1.0,
    should_stop: Callable[[], str] = step_calls.never,
) -> keras.callbacks.History:
    """Trains a compiled model as `model.fit` does, with the same result under every strategy.

    Whether XLA compiles is the distribution's choice (`jit`), not that of `compile`.

    Args:
      model: a compiled Keras model, created in `distribution.scope()`.
      dataset: arrays, a tuple (x, y[, weight]), a `tf.data.Dataset` of global
        batches, or a source of `tfdist.data.sources`.
      y: targets, when `dataset` is arrays.
      distribution: of `tfdist.connect`; without it, one device.
      batch_size: global batch of arrays or records, over all replicas and
        micro-batches; 32 if not given. A data set brings its own.
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
      reduce_dtype: type in which gradients travel between replicas: `float32`
        (as they are), `bfloat16` or `float16` (half the bytes, less precision).
      checkpoints: where the state is kept and resumed from, at the very update; the last one is taken at the end, and
        when `should_stop` ends the training. None for none. With them, one process that runs out of memory goes on from
        the last one with micro-batches of half the size, and so with the same result.
      on_nonfinite: `stop` with an error when the loss is NaN or infinite, or `rollback` to the last checkpoint and
        leave out the update at which it was, and the one before.
      max_rollbacks: how often; then stop.
      measure_average: with an optimizer that has `use_ema`, validate the averaged weights, which the training will end
        with; callbacks' `on_epoch_end` sees them, too. Keras' fit validates the weights as they are.
      learning_rates: factors on the optimizer's learning rate and weight decay, by pattern for names of layers:
        `{"head*": 10.0}`.
      layer_decay: factor on both from each layer to the one below it; see `layerwise_rates.factors`.
      should_stop: asked after every call; a reason, on any worker, ends the
        training on all of them after the same update.

    Returns:
      The Keras `History`, with what was there before a resume.

    Raises:
      UserError: the model, data or arguments do not fit together.
      TrainingError: the loss is no longer finite, a worker is lost, or the
        replicas have come apart.
      Interrupted: `should_stop` gave a reason.
    """
    distribution = distribution or connect.default("no distribution given")
    source = sources.as_source(dataset, y, sample_weight)
    if class_weight:
        source = sources.weigh_classes(source, class_weight)
    preconditions.model_fits(model, distribution, accumulate)
    if preconditions.own_step(model):
        return custom_train_step.fit(model, source, locals())
    layout = batching.layout_of(source, batch_size, distribution, accumulate)
    feed = batching.read_epochs(source, layout, shuffle, seed)
    if steps_per_epoch is None and feed.batches == 0:
        raise UserError("the data set never ends: give steps_per_epoch")
    step = step_calls.step_of(model, distribution, source)
    preconditions.targets(model, step.output_shape, source)
    validation = None
    if validation_data is not None:
        measured = sources.as_source(validation_data)
        if validation_batch_size is None and not isinstance(measured, sources.Batches):
            validation_batch_size = layout.batch
        validation = evaluation.Evaluation(model, measured, distribution, validation_batch_size, validation_steps)
    factors = layerwise_rates.factors(model, learning_rates or {}, layer_decay)
    training_state.separate_streams(model, distribution)
    per_epoch = steps_per_epoch or feed.batches or None
    called = _callbacks(model, callbacks, verbose, epochs, per_epoch)
    preconditions.reduce_dtype(reduce_dtype, distribution)
    preconditions.on_nonfinite(on_nonfinite, checkpoints is not None)
    choice = steps_per_call_lib.choose(model, called, steps_per_call)
    position = Position(update=initial_epoch * (per_epoch or 0), epoch=initial_epoch)
    last = math.inf if steps is None else position.update + steps
    model.stop_training = False
    called.on_train_begin()
    examples = None if isinstance(source, sources.Batches) else source.size
    keeper = Keeper(checkpoints, Run(model, distribution, called, layout.batch, per_epoch, seed, examples))

    def training_from(now: Position) -> _Training:
        compiled = functools.partial(step.compiled, "train", layout, reduce_dtype=reduce_dtype, factors=factors)
        return _Training(step, compiled, feed, called, choice, should_stop, keeper, now.update)

    training = training_from(position)
    position = keeper.begin(position, rollback=on_nonfinite == "rollback")
    logs: dict = {}

    def averaged() -> contextlib.AbstractContextManager:
        if not measure_average:
            return contextlib.nullcontext()
        return ema.instead(keras_internals.inner_optimizer(model.optimizer), model.trainable_variables)

    while position.epoch < epochs and not position.stopped and (position.update < last or position.begun):
        epoch = position.epoch
        called.on_epoch_begin(epoch)
        try:
            training.epoch(position, min(per_epoch or math.inf, last - position.update + position.begun))
            if not position.measured:
                evaluation.average_statistics(model, distribution)
                position.measured = True
            logs = dict(position.logs)
            with averaged():
                if validation and _is_due(validation_freq, epoch):
                    logs.update({f"val_{k}": v for k, v in validation.run(called, should_stop).items()})
                called.on_epoch_end(epoch, logs)
            position = Position(position.update, epoch + 1, stopped=model.stop_training, skipped=position.skipped)
            _, late = step_calls.agree(step, f"the end of epoch {epoch + 1}", 0.0, should_stop, keeper.late())
            position.stopped = model.stop_training
            keeper.after_epoch(position, logs, late)
        except Interrupted:
            keeper.end(position)
            raise
        except NotFinite as error:
            if on_nonfinite == "stop":
                raise
            position = keeper.back(error, error.update, position, max_rollbacks)
        except step_calls.OutOfMemory as error:
            layout, position = keeper.smaller(error, layout, not isinstance(source, sources.Batches))
            feed = batching.read_epochs(source, layout, shuffle, seed)
            training = training_from(position)
    keeper.end(position)
    ema.finalize(keras_internals.inner_optimizer(model.optimizer), model.trainable_variables)
    called.on_train_end(logs)
    return model.history


class NotFinite(TrainingError):  # noqa: N818
    """The loss is NaN or infinite since `update`."""

    def __init__(self, message: str, update: int):
        super().__init__(message)
        self.update = update


class _Training:
    """Makes the updates of an epoch."""

    def __init__(
        self,
        step: Step,
        compiled: Callable[..., Callable],
        feed: batching.Feed,
        callbacks: Any,
        pace: Pace,
        should_stop: Callable[[], str],
        keeper: Keeper,
        at: int,
    ):
        self._step = step
        self._compiled = compiled
        self._feed = feed
        self._callbacks = callbacks
        self._pace = pace
        self._should_stop = should_stop
        self._keeper = keeper
        self._guard = Guard(step.model, step.distribution)
        self._watchers = [c for c in callbacks.callbacks if hasattr(c, "on_call")]
        self._limits = [c.limit_call for c in callbacks.callbacks if hasattr(c, "limit_call")]
        self._norm = any(getattr(c, "wants_gradient_norm", False) for c in callbacks.callbacks)
        # Loss scaling skips such updates, and Keras' own callback ends the training in its own way.
        self._forgives_nan = hasattr(step.model.optimizer, "inner_optimizer") or any(
            isinstance(c, keras.callbacks.TerminateOnNaN) for c in callbacks.callbacks
        )
        self._at = at
        """The update up to which the feed has been read."""

    def epoch(self, now: Position, limit: float) -> None:
        """Makes updates until there are `limit` in this epoch, the data ends or a callback stops; moves `now` on."""
        model, step = self._step.model, self._step
        if now.begun == 0:
            step.reset()  # else they have just been restored
        if now.measured or now.begun >= limit:
            return  # stopped between the last update of an epoch and its end
        if self._at == now.update and now.begun == 0:
            self._feed.restart()
        else:  # once: each reading of a data set that shuffles anew is another order
            self._feed.resume(now.update, now.epoch, now.begun)
            self._at = now.update
        totals = step_calls.Totals(step.part_names, now.sums, now.examples)
        ended = time.perf_counter()
        while now.begun < limit and not model.stop_training:
            if now.update in now.skipped:
                now.update, now.begun = now.update + 1, now.begun + 1
                self._feed.resume(now.update, now.epoch, now.begun)
                continue
            limits = (limit - now.begun, self._keeper.limit(now), *(most(now.update) for most in self._limits))
            want = int(min(self._pace.updates, *limits))
            asked = time.perf_counter()
            part = self._feed.next(now.update, want)
            waited = time.perf_counter() - asked
            call = self._compiled(full=part.full, norm=self._norm)
            self._guard.look(now.update)
            self._callbacks.on_train_batch_begin(now.begun)
            steady = id(call) in step.warm
            start = time.perf_counter()
            arguments = (part.feed, tf.constant(part.first), tf.constant(part.last))
            result = step_calls.run(step, call, arguments, self._feed, now.update)
            done = int(result[3])
            if not done:
                break
            seconds = time.perf_counter() - start
            python, ended = start - ended - waited, start + seconds
            watched = self._watched(result, done, seconds, waited, python, steady)
            now.logs = totals.add(result)
            bad = int(result[2])
            now.begun, now.update = now.begun + done, now.update + done
            now.sums, now.examples = totals.sums.tolist(), totals.examples
            self._at = now.update
            step.distribution.peers.doing("python", now.update)
            if bad >= 0 and not self._forgives_nan:
                raise _not_finite(now.logs, now.update - done + bad - part.first, now.epoch)
            for watcher in self._watchers:
                watcher.on_call(watched)
            self._callbacks.on_train_batch_end(now.begun - 1, now.logs)
            label = f"update {now.update}"
            seconds, late = step_calls.agree(step, label, seconds, self._should_stop, self._keeper.late())
            self._pace.took(seconds, done, part.full)
            if done < part.last - part.first:
                break
            if now.begun < limit and not model.stop_training:
                self._keeper.after_call(now, late)
        if not now.begun:
            raise UserError(
                f"the data set ended before the first update of epoch {now.epoch + 1}: give it a batch at least"
            )

    def _watched(self, result: tuple, done: int, seconds: float, waited: float, python: float, steady: bool) -> Call:
        """What a call tells of itself.

        Args:
          result: of the compiled function.
          seconds: that it took.
          waited: seconds for its argument.
          python: seconds before it.
        """
        for_input, for_sums, norm = result[5].numpy().tolist()
        known = self._step.timed or self._step.distribution.replicas == 1
        spent = Spent(waited + for_input, seconds - for_input - for_sums, for_sums if known else None, python)
        return Call(done, int(result[1]), spent, steady, norm if self._norm else None)


def _not_finite(logs: dict, update: int, epoch: int) -> NotFinite:
    """`update` counts from 0, as in `Position`; people count from 1."""
    return NotFinite(
        f"the loss is {logs['loss']} since update {update + 1} (epoch {epoch + 1}): "
        "try a lower learning rate, warm-up, or gradient clipping, and look for NaN in the data",
        update,
    )


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
