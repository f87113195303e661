"""The loops of a training: epochs, and in each the calls that make its updates."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Collection
from typing import Any

import keras
import tensorflow as tf

from tfdist.checkpoints import training_state
from tfdist.checkpoints.resume import Position
from tfdist.checkpoints.training_run import TrainingRun
from tfdist.data import sources
from tfdist.engine import agreement, batching, callback, callback_list, evaluation, preconditions, step_calls
from tfdist.engine import steps_per_call as pace_lib
from tfdist.engine.call_errors import NotFinite, OutOfMemory
from tfdist.engine.checkpointing import Keeper
from tfdist.engine.fit_options import FitOptions
from tfdist.engine.replica_check import Guard
from tfdist.engine.step import ema
from tfdist.engine.step.results import CallResult, Totals
from tfdist.engine.step.step import Step
from tfdist.engine.steps_per_call import Pace
from tfdist.engine.timing import Call, Spent
from tfdist.errors import Interrupted, UserError
from tfdist.models import keras_internals, layerwise_rates


class FitLoop:
    """One training of a compiled model.

    Args:
      model: compiled, and created in the distribution's scope.
      source: the examples, weighed.
      options: how to train.

    Raises:
      UserError: they do not fit together.
    """

    def __init__(self, model: keras.Model, source: sources.Source, options: FitOptions):
        distribution = options.distribution
        self._model, self._source, self._options = model, source, options
        self._layout = batching.layout_of(source, options.batch_size, distribution, options.accumulate)
        self._feed = self._read()
        if options.steps_per_epoch is None and self._feed.batches == 0:
            raise UserError("the data set never ends: give steps_per_epoch")
        self._step = step_calls.step_of(model, distribution, source)
        preconditions.targets(model, self._step.output_shape, source)
        self._validation = self._prepared_validation()
        self._factors = layerwise_rates.factors(model, options.learning_rates or {}, options.layer_decay)
        training_state.separate_streams(model, distribution)
        self._per_epoch = options.steps_per_epoch or self._feed.batches or None
        self._callbacks = callback_list.for_fit(options, model, self._per_epoch)
        preconditions.reduce_dtype(options.reduce_dtype, distribution)
        preconditions.on_nonfinite(options.on_nonfinite, options.checkpoints is not None)
        self._pace = pace_lib.choose(model, self._callbacks, options.steps_per_call)
        first = options.initial_epoch
        self._position = Position(update=first * (self._per_epoch or 0), epoch=first)
        self._last = math.inf if options.steps is None else self._position.update + options.steps
        """The update that ends the training, if its epochs do not end it before."""
        self._logs: dict[str, Any] = {}
        run = TrainingRun(
            model,
            distribution,
            self._callbacks,
            self._layout.batch,
            self._per_epoch,
            options.seed,
            None if isinstance(source, sources.Batches) else source.size,
        )
        self._keeper = Keeper(options.checkpoints, run)
        self._updates: UpdateLoop

    def run(self) -> keras.callbacks.History:
        """Trains from the beginning, or from where a checkpoint is, to the end."""
        with keras_internals.variables_as_numbers(), callback_list.apart(self._callbacks, self._options.distribution):
            return self._run()

    def _run(self) -> keras.callbacks.History:
        self._model.stop_training = False
        keras_internals.restored_epoch(self._model)  # that of an earlier training
        self._callbacks.on_train_begin()
        epoch = callback_list.restored_epoch(self._model, self._callbacks, self._options.distribution)
        if epoch:
            self._position = Position(update=epoch * (self._per_epoch or 0), epoch=epoch)
        self._updates = self._update_loop()
        self._position = self._keeper.begin(self._position, rollback=self._options.on_nonfinite == "rollback")
        while self._goes_on():
            try:
                self.run_epoch()
            except Interrupted:
                self._keeper.end(self._position)
                raise
            except (NotFinite, OutOfMemory) as error:
                self.recover(error)
        self._keeper.end(self._position)
        ema.finalize(keras_internals.inner_optimizer(self._model.optimizer), self._model.trainable_variables)
        self._callbacks.on_train_end(self._logs)
        return self._model.history

    def run_epoch(self) -> None:
        """Makes the updates of an epoch, or those that are left of it, and what follows them."""
        position, epoch = self._position, self._position.epoch
        self._callbacks.on_epoch_begin(epoch)
        self._updates.run(position, min(self._per_epoch or math.inf, self._last - position.update + position.begun))
        if not position.measured:
            evaluation.average_statistics(self._model, self._options.distribution)
            position.measured = True
        self._logs = dict(position.logs)
        with self._averaged():
            self.validate(epoch)
            self._callbacks.on_epoch_end(epoch, self._logs)
        self._position = Position(
            position.update, epoch + 1, stopped=self._model.stop_training, skipped=position.skipped
        )
        label = f"the end of epoch {epoch + 1}"
        agreed = agreement.agree(self._step, label, 0.0, self._options.should_stop, self._keeper.late())
        self._position.stopped = self._model.stop_training
        self._keeper.after_epoch(self._position, self._logs, agreed.save)

    def validate(self, epoch: int) -> None:
        """Adds the loss and the metrics of the validation data to the logs, if it is time for that."""
        if self._validation and _is_due(self._options.validation_freq, epoch):
            values = self._validation.run(self._callbacks, self._options.should_stop)
            self._logs.update({f"val_{name}": value for name, value in values.items()})

    def recover(self, error: NotFinite | OutOfMemory) -> None:
        """Goes back to the last good checkpoint, to train on from there without what has failed.

        Raises:
          TrainingError: that is not wanted, or cannot be.
        """
        if isinstance(error, OutOfMemory):
            ordered = not isinstance(self._source, sources.Batches)
            self._layout, self._position = self._keeper.smaller(error, self._layout, ordered)
            self._feed = self._read()
            self._updates = self._update_loop()
        elif self._options.on_nonfinite == "stop":
            raise error
        else:
            self._position = self._keeper.back(error, error.update, self._position, self._options.max_rollbacks)

    def _goes_on(self) -> bool:
        position = self._position
        more = position.update < self._last or position.begun > 0
        return position.epoch < self._options.epochs and not position.stopped and more

    def _read(self) -> batching.Feed:
        return batching.read_epochs(self._source, self._layout, self._options.shuffle, self._options.seed)

    def _prepared_validation(self) -> evaluation.Evaluation | None:
        options = self._options
        if options.validation_data is None:
            return None
        source, batch = sources.as_source(options.validation_data), options.validation_batch_size
        if batch is None and not isinstance(source, sources.Batches):
            batch = self._layout.batch
        return evaluation.Evaluation(self._model, source, options.distribution, batch, options.validation_steps)

    def _update_loop(self) -> UpdateLoop:
        compiled = functools.partial(
            self._step.compiled,
            "train",
            self._layout,
            reduce_dtype=self._options.reduce_dtype,
            factors=self._factors,
        )
        return UpdateLoop(
            self._step,
            compiled,
            self._feed,
            self._callbacks,
            self._pace,
            self._options.should_stop,
            self._keeper,
            self._position.update,
        )

    def _averaged(self) -> contextlib.AbstractContextManager:
        """Returns the context in which the model has its averaged weights, where these are to be measured."""
        if not self._options.measure_average:
            return contextlib.nullcontext()
        return ema.instead(keras_internals.inner_optimizer(self._model.optimizer), self._model.trainable_variables)


class UpdateLoop:
    """Makes the updates of an epoch, many in each call.

    Args:
      step: of the model.
      compiled: `step.compiled` for training; given `full` and `norm`, it returns the function to call.
      feed: the global batches.
      callbacks: of Keras, and those that know more.
      pace: how many updates a call makes.
      should_stop: returns a reason to stop the run, or nothing.
      keeper: of the checkpoints.
      read: the update up to which the feed has been read.
    """

    def __init__(
        self,
        step: Step,
        compiled: Callable[..., Callable],
        feed: batching.Feed,
        callbacks: keras.callbacks.CallbackList,
        pace: Pace,
        should_stop: Callable[[], str],
        keeper: Keeper,
        read: int,
    ):
        self._step, self._model = step, step.model
        self._compiled = compiled
        self._feed = feed
        self._callbacks = callbacks
        self._pace = pace
        self._should_stop = should_stop
        self._keeper = keeper
        self._guard = Guard(step.model, step.distribution)
        self._hooked = callback.with_hooks(callbacks)
        self._norm = any(c.wants_gradient_norm for c in self._hooked)
        self._averages = callback_list.average_first(callbacks, pace_lib.looks_at_batches)
        # Loss scaling skips such updates, and Keras' own callback ends the training in its own way.
        self._forgives_nan = hasattr(step.model.optimizer, "inner_optimizer") or any(
            isinstance(c, keras.callbacks.TerminateOnNaN) for c in callbacks.callbacks
        )
        self._read = read
        self._ended = 0.0
        """When the last call ended, by `time.perf_counter`."""

    def run(self, now: Position, limit: float) -> None:
        """Makes updates until there are `limit` in this epoch, the data ends or a callback stops; moves `now` on.

        Raises:
          UserError: the data does not fit, or there is none.
          NotFinite: a loss is not.
          OutOfMemory: there is not enough for an update.
          TrainingError: an update has failed.
          Interrupted: some worker has a reason to stop.
        """
        if now.begun == 0:
            self._step.reset()  # else they have just been restored
        if now.measured or now.begun >= limit:
            return  # stopped between the last update of an epoch and its end
        self._open(now)
        totals = Totals(self._step.part_names, now.sums, now.examples)
        self._ended = time.perf_counter()
        more = True
        while more and now.begun < limit and not self._model.stop_training:
            if now.update in now.skipped:
                self._skip(now)
            else:
                more = self._call(now, totals, limit)
        if not now.begun:
            raise UserError(
                f"the data set ended before the first update of epoch {now.epoch + 1}: give it a batch at least"
            )

    def _open(self, now: Position) -> None:
        """Brings the feed to where the training is."""
        if self._read == now.update and now.begun == 0:
            self._feed.restart()
        else:  # once: each reading of a data set that shuffles anew is another order
            self._feed.resume(now.update, now.epoch, now.begun)
            self._read = now.update

    def _skip(self, now: Position) -> None:
        """Leaves out one update."""
        now.update, now.begun = now.update + 1, now.begun + 1
        self._feed.resume(now.update, now.epoch, now.begun)

    def _call(self, now: Position, totals: Totals, limit: float) -> bool:
        """Makes the updates of one call; returns whether the data of this epoch may have more."""
        limits = (limit - now.begun, self._keeper.limit(now), *(c.limit_call(now.update) for c in self._hooked))
        want = int(min(self._pace.updates, *limits))
        asked = time.perf_counter()
        part = self._feed.next(now.update, want)
        waited = time.perf_counter() - asked
        call = self._compiled(full=part.full, norm=self._norm)
        self._guard.look(now.update)
        self._callbacks.on_train_batch_begin(now.begun)
        steady = id(call) in self._step.warm
        start = time.perf_counter()
        arguments = (part.feed, tf.constant(part.first), tf.constant(part.last))
        result = CallResult(*step_calls.run(self._step, call, arguments, self._feed, now.update))
        done = int(result.done)
        if not done:
            return False
        seconds = time.perf_counter() - start
        python, self._ended = start - self._ended - waited, start + seconds
        told = self._told(result, seconds, waited, python, steady)
        self._advance(now, totals, result, part.first)
        for hooked in self._hooked:
            hooked.on_call(told)
        if self._averages:  # a callback may save the model
            evaluation.average_statistics(self._model, self._step.distribution)
        self._callbacks.on_train_batch_end(now.begun - 1, now.logs)
        label, read = f"update {now.update}", batching.digest(self._feed, done)
        agreed = agreement.agree(self._step, label, seconds, self._should_stop, self._keeper.late(), read)
        self._pace.took(agreed.seconds, done, part.full)
        if done < part.last - part.first:
            return False
        if now.begun < limit and not self._model.stop_training:
            self._keeper.after_call(now, agreed.save)
        return True

    def _advance(self, now: Position, totals: Totals, result: CallResult, first: int) -> None:
        """Moves `now` on by what a call has done.

        Args:
          first: number of the call's first batch, as it counts them.

        Raises:
          NotFinite: the loss is not, and that is not forgiven.
        """
        now.logs = totals.add(result)
        bad, done = int(result.nonfinite), int(result.done)
        now.begun, now.update = now.begun + done, now.update + done
        now.sums, now.examples = totals.sums.tolist(), totals.examples
        self._read = now.update
        self._step.distribution.peers.doing("python", now.update)
        if bad >= 0 and not self._forgives_nan:
            raise NotFinite(now.logs["loss"], now.update - done + bad - first, now.epoch)

    def _told(self, result: CallResult, seconds: float, waited: float, python: float, steady: bool) -> Call:
        """Returns what callbacks are told of a call.

        Args:
          seconds: that it took.
          waited: seconds for its argument.
          python: seconds before it.
          steady: nothing was compiled in it.
        """
        for_input, for_sums, norm = result.measures.numpy().tolist()
        known = self._step.timed or self._step.distribution.replicas == 1
        spent = Spent(waited + for_input, seconds - for_input - for_sums, for_sums if known else None, python)
        return Call(int(result.done), int(result.examples), spent, steady, norm if self._norm else None)


def _is_due(frequency: int | Collection[int], epoch: int) -> bool:
    if isinstance(frequency, int):
        return (epoch + 1) % frequency == 0
    return epoch + 1 in frequency
