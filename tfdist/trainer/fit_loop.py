"""The loop of a training over its epochs; update_loop.py has what is within each."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import keras

from tfdist.checkpoints import training_state
from tfdist.checkpoints.resume import Position
from tfdist.checkpoints.training_run import TrainingRun
from tfdist.data import batching, sources
from tfdist.distributed import arithmetic
from tfdist.errors import Interrupted, UserError
from tfdist.keras_bridge import ema, keras_internals, layer_state, layer_statistics, preconditions
from tfdist.models import layerwise_rates
from tfdist.step import step_calls
from tfdist.step.call_errors import NotFinite, OutOfMemory
from tfdist.trainer import agreement, arguments, evaluation
from tfdist.trainer import steps_per_call as pace_lib
from tfdist.trainer.callbacks import callback_list
from tfdist.trainer.checkpointing import Keeper
from tfdist.trainer.fit_options import FitOptions, is_due
from tfdist.trainer.measuring import Evaluation
from tfdist.trainer.update_loop import UpdateLoop
from tfdist.verification import equivalence_check


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
        self._reader = source.reader
        if options.virtual_replicas:
            distribution.peers.check_same(arithmetic.facts(distribution), "what decides about the last bit")
        batch = source.requested_batch(options.batch_size, steps=options.steps_per_epoch)
        self._layout = batching.layout_of(
            source, batch, distribution, options.accumulate, shards=options.virtual_replicas
        )
        self._feed = self._read()
        if options.steps_per_epoch is None and self._feed.batches == 0:
            raise UserError("the data set never ends: give steps_per_epoch")
        self._step = step_calls.step_of(model, distribution, source)
        self._step.check_batches("train", self._layout, source.sizes(self._layout.batch))
        step_calls.trains(model)
        self._step.prepare_training()
        preconditions.trains(model)
        preconditions.targets(model, self._step.output_shape, source)
        self._validation = self._prepared_validation()
        self._factors = layerwise_rates.factors(model, options.learning_rates or {}, options.layer_decay)
        training_state.separate_streams(model, distribution, apart=not options.virtual_replicas)
        self._per_epoch = options.steps_per_epoch or self._feed.batches or None
        self._callbacks = callback_list.for_fit(options, model, self._per_epoch)
        preconditions.reduce_dtype(options.reduce_dtype, distribution)
        preconditions.among("check_agreement", options.check_agreement, equivalence_check.CHOICES)
        preconditions.on_nonfinite(options.on_nonfinite, options.checkpoints is not None)
        looks = any(pace_lib.looks_at_batches(callback) for callback in self._callbacks.callbacks)
        (looks,) = agreement.anywhere(distribution, "whether a callback wants every update", looks)
        self._pace = pace_lib.choose(model, looks, options.steps_per_call)
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
            source.size,
            options.virtual_replicas,
        )
        self._keeper = Keeper(options.checkpoints, run)
        self._updates: UpdateLoop

    def run(self) -> keras.callbacks.History:
        """Trains from the beginning, or from where a checkpoint is, to the end."""
        apart = callback_list.apart(self._callbacks, self._options.distribution)
        with keras_internals.variables_as_numbers(), apart, self._measured_by_callbacks():
            return self._run()

    def _run(self) -> keras.callbacks.History:
        self._model.stop_training = False
        first = layer_state.Snapshot(training_state.gathered_variables(self._model))
        keras_internals.restored_epoch(self._model)  # that of an earlier training
        self._callbacks.on_train_begin()
        epoch = callback_list.restored_epoch(self._model, self._callbacks, self._options.distribution)
        if epoch:
            self._position = Position(update=epoch * (self._per_epoch or 0), epoch=epoch)
        self._updates = self._update_loop()
        began = self._position
        self._position = self._keeper.begin(began, rollback=self._options.on_nonfinite == "rollback")
        self._updates.replica_check.check_if_due(self._model, self._position.update)
        if self._goes_on():
            self._reader.catch_up(self._position.epoch - began.epoch, self._position.update - began.update)
            self._check(first)
        while self._goes_on():
            try:
                self.run_epoch()
            except Interrupted:
                self._keeper.end(self._position)
                raise
            except (NotFinite, OutOfMemory) as error:
                self.recover(error)
        # Before the last checkpoint, which would keep what is wrong.
        self._updates.replica_check.check(self._model, "after the last update")
        self._keeper.end(self._position)
        ema.finalize(keras_internals.inner_optimizer(self._model.optimizer), self._model.trainable_variables)
        self._callbacks.on_train_end(self._logs)
        self._updates.replica_check.check(self._model, "at the end of fit")
        return self._model.history

    def run_epoch(self) -> None:
        """Makes the updates of an epoch, or those that are left of it, and what follows them."""
        position, epoch = self._position, self._position.epoch
        self._callbacks.on_epoch_begin(epoch)
        self._reader.begin()
        self._updates.run(position, min(self._per_epoch or math.inf, self._last - position.update + position.begun))
        if not self._model.stop_training:  # as Keras, which leaves an epoch there
            self._reader.end()
        if not position.measured:
            layer_statistics.average(self._model, self._options.distribution, self._options.virtual_replicas)
            position.measured = True
        self._logs = dict(position.logs)
        with self._averaged():
            self.validate(epoch)
            self._callbacks.on_epoch_end(epoch, self._logs)
        self._position = Position(
            position.update, epoch + 1, stopped=self._model.stop_training, skipped=position.skipped
        )
        label = f"the end of epoch {epoch + 1}"
        agreed = agreement.agree(self._step, label, 0.0, self._options.should_stop, self._keeper.due())
        self._position.stopped = self._model.stop_training
        self._keeper.after_epoch(self._position, self._logs, agreed)

    def validate(self, epoch: int) -> None:
        """Adds the loss and the metrics of the validation data to the logs, if it is time for that."""
        if self._validation and is_due(self._options.validation_freq, epoch):
            values = self._validation.run(self._callbacks, self._options.should_stop)
            self._logs.update({f"val_{name}": value for name, value in values.items()})

    def recover(self, error: NotFinite | OutOfMemory) -> None:
        """Goes back to the last good checkpoint, to train on from there without what has failed.

        Raises:
          TrainingError: that is not wanted, or cannot be.
        """
        if isinstance(error, OutOfMemory):
            if self._options.virtual_replicas:  # smaller micro-batches would have other bits
                raise OutOfMemory(f"{error}: use more virtual_replicas, which are smaller, or more devices") from error
            if self._step.own_step("train"):
                raise error  # its updates cannot be made of smaller micro-batches
            ordered = self._source.size is not None
            self._layout, self._position = self._keeper.smaller(error, self._layout, ordered)
            self._feed = self._read()
            self._check()
            self._updates = self._update_loop()
        elif self._options.on_nonfinite == "stop":
            raise error
        else:
            self._position = self._keeper.back(error, error.update, self._position, self._options.max_rollbacks)

    def _check(self, first: layer_state.Snapshot | None = None) -> None:
        """Refuses a model that would train, or be measured, in another way than on one device in whole batches.

        Args:
          first: what layers began with. After a resume, which may be on more replicas than there were before, they have
            gathered so much that a few rows change nothing: a maximum stays as it is.
        """
        choice = self._options.check_agreement
        with layer_state.unchanged(training_state.gathered_variables(self._model)):
            if first is not None:
                first.put_back()
            equivalence_check.check_training(
                self._step, choice, self._options.virtual_replicas, self._layout.accumulate
            )
            if self._validation:
                self._validation.check(choice, within_fit=True)

    def _goes_on(self) -> bool:
        position = self._position
        more = position.update < self._last or position.begun > 0
        return position.epoch < self._options.epochs and not position.stopped and more

    def _read(self) -> batching.Feed:
        options = self._options
        across = options.steps_per_epoch is not None
        return batching.read_epochs(self._source, self._layout, options.shuffle, options.seed, across)

    def _prepared_validation(self) -> Evaluation | None:
        options = self._options
        if options.validation_data is None:
            return None
        source = sources.as_source(options.validation_data)
        steps = arguments.steps_at_most(options.validation_steps)
        batch = source.requested_batch(options.validation_batch_size or None, options.batch_size, steps)
        return Evaluation(self._model, source, options.distribution, batch, steps, options.virtual_replicas)

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
            self._options.virtual_replicas,
        )

    def _measured_by_callbacks(self) -> contextlib.AbstractContextManager:
        """Lets callbacks call `evaluate` and `predict` of the model where workers share its variables.

        Keras' own end there with an error, and are used everywhere else.
        """
        distribution, options = self._options.distribution, self._options
        if not distribution.variables_span_workers:
            return contextlib.nullcontext()
        choice = "off" if options.check_agreement == "off" else "auto"  # a callback may measure again and again
        known: dict[str, Any] = dict(
            distribution=distribution, virtual_replicas=options.virtual_replicas, check_agreement=choice
        )
        measure: Callable[..., object] = functools.partial(evaluation.evaluate, **known)
        predict: Callable[..., object] = functools.partial(evaluation.predict, **known)

        def evaluate(*given: object, **named: object) -> object:
            return measure(*given, **named if len(given) > 8 else {"return_dict": False, **named})

        return keras_internals.measured_by(self._model, evaluate, predict)

    def _averaged(self) -> contextlib.AbstractContextManager:
        """Returns the context in which the model has its averaged weights, where these are to be measured."""
        if not self._options.measure_average:
            return contextlib.nullcontext()
        return ema.instead(keras_internals.inner_optimizer(self._model.optimizer), self._model.trainable_variables)
