"""The loop of a training over epochs, and over calls of the compiled function."""

import contextlib
import dataclasses
import math
import time

import keras
import tensorflow as tf

from tfdist.checkpoints import training_state
from tfdist.checkpoints.resume import Position
from tfdist.config.messages import logger
from tfdist.data import batches
from tfdist.errors import Interrupted, UserError, one_line
from tfdist.keras_bridge import ema, keras_internals, layer_state, metrics, preconditions, zero
from tfdist.step import step_calls
from tfdist.step.batch_loop import CallResult, Totals
from tfdist.step.functions import TrainingOptions
from tfdist.step.step_calls import NotFinite, OutOfMemory
from tfdist.trainer import agreement
from tfdist.trainer import callbacks as callbacks_lib
from tfdist.trainer.checkpoint_hook import CheckpointHook
from tfdist.trainer.evaluation import answering_callbacks
from tfdist.trainer.plan import TrainingPlan, feed_of
from tfdist.verification import equivalence_check
from tfdist.verification.replica_sync_check import EVERY, Audit, ReplicaSyncCheck


class FitLoop:
    """Carries out a `TrainingPlan`."""

    def __init__(self, plan: TrainingPlan):
        self._plan, self._options, self._step = plan, plan.options, plan.step
        self._model, self._distribution, self._callbacks = plan.model, plan.options.distribution, plan.callbacks
        self._compiled = keras_internals.compiled_loss(plan.model)
        self._reader = plan.source.reader
        self._position = plan.start_of(plan.options.initial_epoch)
        self._logs: dict = {}
        self._checkpoints = CheckpointHook(plan.options.checkpoints, plan.run())
        self._tuner = agreement.StepsPerCallTuner(plan.updates_per_call)
        self._slow_workers = agreement.SlowWorkers(self._distribution.peers.hosts)
        # Loss scaling skips such updates, and Keras' own callback ends the training in its own way.
        self._allows_nan = hasattr(plan.model.optimizer, "inner_optimizer") or any(
            isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in plan.callbacks.callbacks
        )
        self._times_sums = self._distribution.timed or self._distribution.replicas == 1
        self._call_ended = 0.0  # by `time.perf_counter`
        self._repeated: equivalence_check.RepeatedCheck | None = None

    def run(self) -> keras.callbacks.History:
        """Trains from the beginning, or from where a checkpoint is, to the end."""
        options, distribution = self._options, self._distribution
        with (
            keras_internals.variables_as_numbers(),
            metrics.counting_resets(self._model),
            callbacks_lib.chief_alone(self._callbacks, distribution),
            answering_callbacks(self._model, distribution, options.virtual_replicas, options.check_agreement),
            zero.whole_after(self._model, distribution),
        ):
            self._begin()
            while self._goes_on():
                try:
                    self._run_epoch()
                except Interrupted:
                    self._checkpoints.end(self._position)
                    zero.end(self._model)
                    raise
                except (NotFinite, OutOfMemory) as error:
                    self._recover(error)
            # Before the last checkpoint, which would keep what is wrong.
            self._check_again(0, last=True)
            self._sync_check.check(self._model, "after the last update")
            self._checkpoints.end(self._position)
            zero.end(self._model)
            ema.finalize(keras_internals.inner_optimizer(self._model.optimizer), self._model.trainable_variables)
            self._callbacks.on_train_end(self._logs)
            self._sync_check.check(self._model, "at the end of fit")
            return self._model.history

    def _begin(self) -> None:
        """Calls `on_train_begin`, resumes from a checkpoint, and checks the model."""
        self._model.stop_training = False
        self._gathered = training_state.gathered_variables(self._model)
        initial = layer_state.Snapshot(self._gathered)
        keras_internals.restored_epoch(self._model)  # that of an earlier training
        try:
            self._callbacks.on_train_begin()
        except OSError as error:
            what = f"a callback cannot begin ({type(error).__name__}: {one_line(error, 150)})"
            raise UserError(what, "move its file away, which a kill may have cut off; --workdir needs none") from error
        epoch = callbacks_lib.restored_epoch(self._model, self._callbacks, self._distribution)
        if epoch:
            self._position = self._plan.start_of(epoch)
        self._sliced: zero.SlicedState | None = None
        if self._options.zero_stage:
            callbacks_lib.no_whole_optimizer(self._callbacks, self._distribution)
            self._sliced = zero.begin(self._model, self._distribution)
        self._prepare_calls()
        # Their files would be ahead of a training that was killed before its first checkpoint.
        saves = self._keep_files or self._options.on_nonfinite == "rollback"
        self._position = self._checkpoints.begin(dataclasses.replace(self._position), saves)
        first = self._position.first_epoch
        self._start = start = self._plan.start_of(self._options.initial_epoch if first is None else first)
        self._model.stop_training = self._position.stopped  # scripts ask it afterwards
        self._sync_check.check_if_due(self._model, self._position.update)
        if self._goes_on():
            self._reader.catch_up(self._position.epoch - start.epoch, self._position.update - start.update)
            self._check(initial)
            if self._plan.validation:
                epochs = range(start.epoch, self._position.epoch)
                self._plan.validation.catch_up(sum(map(self._options.validates, epochs)))

    def _prepare_calls(self) -> None:
        """Sets what calls need, once `on_train_begin` of the callbacks has run, and anew with another plan."""
        self._hooks = callbacks_lib.with_hooks(self._callbacks)
        norm = any(callback.wants_gradient_norm for callback in self._hooks)
        # Those may save the model within an epoch, which needs its statistics averaged before.
        writers = filter(callbacks_lib.is_chief_only, self._callbacks.callbacks)
        saves = any(map(callbacks_lib.needs_every_batch, writers))
        files = callbacks_lib.keep_files(self._callbacks)
        wanted = agreement.any_worker(self._distribution, "what callbacks want", norm, saves, files)
        self._norm, self._averages, self._keep_files = wanted
        self._audit = Audit(self._step, self._options.virtual_replicas, self._options.audit)
        self._sync_check = ReplicaSyncCheck(self._distribution, every=min(self._options.audit or EVERY, EVERY))
        self._read = self._position.update  # the update up to which the feed has been read

    def _check(self, initial: layer_state.Snapshot | None = None) -> None:
        """Refuses a model that would train, or be evaluated, in another way than on one device in whole batches.

        `initial`: the layers' state before the training. After a resume, which may be on more replicas than before,
        they have gathered so much that a few rows change nothing: a maximum stays as it is.
        """
        plan, choice = self._plan, self._options.check_agreement
        with layer_state.unchanged(self._gathered):
            if initial is not None:
                initial.put_back()
            virtual, parts = self._options.virtual_replicas, plan.layout.accumulate
            equivalence_check.check_training(self._step, plan.source, choice, virtual, parts)
            if plan.validation:
                plan.validation.check(choice, within_fit=True)
        self._repeated = equivalence_check.RepeatedCheck(self._step, "train", choice, virtual, parts)
        if self._repeated.probes or self._options.audit:
            plan.feed.keep()

    def _check_again(self, updates: int, last: bool = False) -> None:
        """Repeats the check, so many updates after the call before, if it is time."""
        if self._repeated:
            self._repeated.after(updates, lambda: self._plan.feed.whole_batch(self._position.update - 1), last)

    def _goes_on(self) -> bool:
        position = self._position
        more = position.update < self._plan.last_update or position.begun > 0
        return position.epoch < self._options.epochs and not position.stopped and more

    def _run_epoch(self) -> None:
        """Makes the updates of an epoch, or those that are left of it, and what follows them."""
        position, epoch, options = self._position, self._position.epoch, self._options
        if position.begun == 0:
            self._step.reset()  # else they have just been restored, with what a callback has measured
        # Callbacks begin the epoch a second time: a rate that they halve there has been halved before the checkpoint.
        optimizers = preconditions.optimizers(self._model) if position.begun else []
        kept = [self._model.variables, self._model.metrics_variables, *map(keras_internals.state, optimizers)]
        restored = layer_state.Snapshot([v for part in kept for v in part] if position.begun else [])
        self._callbacks.on_epoch_begin(epoch)
        restored.put_back()
        self._reader.begin()
        until_last = self._plan.last_update - position.update + position.begun
        self._run_updates(position, min(self._plan.updates_per_epoch or math.inf, until_last))
        if not self._model.stop_training:  # as Keras, which leaves an epoch there
            self._reader.end()
        if not position.measured:
            layer_state.average_statistics(self._model, self._distribution, options.virtual_replicas)
            position.measured = True
        self._logs = dict(position.logs)
        with contextlib.ExitStack() as weights:
            if options.evaluate_ema:
                optimizer = keras_internals.inner_optimizer(self._model.optimizer)
                weights.enter_context(ema.instead(optimizer, self._model.trainable_variables))
            if self._plan.validation and options.validates(epoch):
                values = self._plan.validation.run(self._callbacks, options.should_stop)
                self._logs.update({f"val_{name}": value for name, value in values.items()})
            self._callbacks.on_epoch_end(epoch, self._logs)
        stopped = self._model.stop_training
        first = position.first_epoch
        self._position = Position(
            position.update, epoch + 1, stopped=stopped, skipped=position.skipped, first_epoch=first
        )
        due, label = self._checkpoints.due(), f"the end of epoch {epoch + 1}"
        decisions = agreement.agree(self._distribution, self._model, label, 0.0, options.should_stop, due)
        self._position.stopped = self._model.stop_training
        self._checkpoints.after_call(self._position, decisions, self._logs)

    def _recover(self, error: NotFinite | OutOfMemory) -> None:
        """Goes back to the last good checkpoint, to train on from there without what has failed; or raises."""
        plan, options = self._plan, self._options
        if isinstance(error, OutOfMemory):
            if options.virtual_replicas:  # smaller micro-batches would have other bits
                raise OutOfMemory(f"{error}: use more virtual_replicas, which are smaller, or more devices") from error
            if self._step.own_steps["train"]:
                raise error  # its updates cannot be made of smaller micro-batches
            ordered = plan.source.size is not None
            layout, self._position = self._checkpoints.halve_micro_batches(error, plan.layout, ordered)
            self._step.most_rows = layout.max_micro_rows
            self._plan = dataclasses.replace(plan, layout=layout, feed=feed_of(plan.source, layout, options))
            self._check()
            self._prepare_calls()
        elif options.on_nonfinite == "stop":
            raise error
        else:
            self._position = self._checkpoints.roll_back(error, error.update, self._position, options.max_rollbacks)

    def _run_updates(self, position: Position, limit: float) -> None:
        """Makes up to `limit` updates of an epoch, until the data ends or a callback stops; moves `position`."""
        if position.measured or position.begun >= limit:
            return  # stopped between the last update of an epoch and its end
        feed = self._plan.feed
        if self._read == position.update and position.begun == 0:
            feed.restart()
        else:  # once: each reading of a data set that shuffles anew is another order
            self._resume_feed()
            self._read = position.update
        totals = self._step.totals("train", position.sums, position.examples)
        self._call_ended = time.perf_counter()
        more = True
        while more and position.begun < limit and not self._model.stop_training:
            if position.update in position.skipped:
                position.update, position.begun = position.update + 1, position.begun + 1
                self._resume_feed()
            else:
                more = self._call(position, totals, limit)
        if position.begun < limit < math.inf and not more:
            logger.info(
                f"WARNING: the data ended after {position.begun} updates of epoch {position.epoch + 1}, not {limit}"
            )
        if not position.begun:
            what = f"the data set ended before the first update of epoch {position.epoch + 1}"
            raise UserError(what, "give it a batch at least")

    def _resume_feed(self) -> None:
        position, start = self._position, self._start
        if batches.share_order(getattr(self._plan.source, "dataset", None), self._options.validation_data):
            what = "a resume would have another order: validation_data reads the shuffle() of the training's data"
            raise UserError(what, "give it a shuffle() of its own, or one with reshuffle_each_iteration=False")
        self._plan.feed.resume(position.update, position.epoch - start.epoch, position.begun, start.update)

    def _call(self, position: Position, totals: Totals, limit: float) -> bool:
        """Makes the updates of one call; returns whether the data of this epoch may have more."""
        plan, step, model, feed = self._plan, self._step, self._model, self._plan.feed
        limits = [limit - position.begun, self._checkpoints.limit(position)]
        limits += [callback.limit_call(position.update) for callback in self._hooks]
        read_began = time.perf_counter()
        part = step_calls.read(step, feed, position.update, int(min(self._tuner.updates, *limits)))
        if part.first == part.last:
            return False
        waited = time.perf_counter() - read_began
        dtype = self._options.reduce_dtype
        options = TrainingOptions(dtype, self._norm, plan.lr_factors, self._sliced)
        # Python numbers that code of the user's own reads are those of its trace, of which Keras has one.
        full = plan.layout.full if step.runs_own["train"] else part.full
        call = step.compiled("train", dataclasses.replace(plan.layout, full=full), options, part.count)
        if self._compiled is not keras_internals.compiled_loss(model):
            what = "a callback compiled the model within fit, which goes on with the step that it began with"
            raise UserError(what, "call fit anew after compile()")
        self._sync_check.check_if_due(model, position.update)
        self._callbacks.on_train_batch_begin(position.begun)
        steady = id(call) in step.warm
        totals.refresh()
        start = time.perf_counter()
        arguments = (part.feed, tf.constant(part.first), tf.constant(part.last), *totals.arguments())
        with contextlib.nullcontext() if steady else self._checkpoints.noting_foreign_state(call, arguments):
            result = CallResult(*step_calls.run(step, call, arguments, feed, position.update))
        done = int(result.done)
        if not done:
            return False
        seconds = time.perf_counter() - start
        python, self._call_ended = start - self._call_ended - waited, start + seconds
        position.logs = totals.add(result)
        position.begun, position.update = position.begun + done, position.update + done
        position.sums, position.examples = totals.sums.tolist(), totals.examples
        self._read = position.update
        self._distribution.peers.doing("python", position.update)
        bad = int(result.nonfinite)
        if bad >= 0 and not self._allows_nan:
            update = position.update - done + bad - part.first
            raise NotFinite(position.logs.get("loss", math.nan), update, position.epoch)
        for_input, for_sums, norm = result.measures.numpy().tolist()
        all_reduce = for_sums if self._times_sums else None
        spent = callbacks_lib.Spent(waited + for_input, seconds - for_input - for_sums, all_reduce, python)
        timing = callbacks_lib.Call(done, int(result.examples), spent, steady, norm if self._norm else None)
        for callback in self._hooks:
            callback.on_call(timing)
        if self._averages:  # a callback may save the model
            layer_state.average_statistics(model, self._distribution, self._options.virtual_replicas)
        self._callbacks.on_train_batch_end(position.begun - 1, position.logs)
        if totals.refresh():
            position.logs = totals.logs(step.results("train"))
            position.sums, position.examples = totals.sums.tolist(), totals.examples
        decisions = agreement.agree(
            self._distribution,
            model,
            f"update {position.update}",
            seconds,
            self._options.should_stop,
            self._checkpoints.due(),
            feed.digest(done),
            feed,
            between=python,
            spent=(spent.input, spent.compute) if steady and all_reduce is not None else (),
        )
        if warning := self._slow_workers.record(decisions):
            logger.info(warning)
        self._tuner.record(decisions.seconds, done, steady, decisions.between)
        self._check_again(done)
        self._audit.after(position.update, done, lambda: feed.whole_batch(position.update - 1))
        if done < part.last - part.first:
            return False
        if position.begun < limit and not model.stop_training:
            self._checkpoints.after_call(position, decisions)
        return True
