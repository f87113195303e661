"""The updates of an epoch: one call of the compiled function after the other, many updates in each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import keras
import tensorflow as tf

from tfdist.checkpoints.resume import Position
from tfdist.config.messages import logger
from tfdist.data import batching
from tfdist.errors import UserError
from tfdist.keras_bridge import layer_statistics
from tfdist.step import step_calls
from tfdist.step.call_errors import NotFinite
from tfdist.step.results import CallResult, LastLogs, Totals
from tfdist.step.step import Step
from tfdist.trainer import agreement
from tfdist.trainer import steps_per_call as pace_lib
from tfdist.trainer.callbacks import callback, callback_list
from tfdist.trainer.checkpointing import Keeper
from tfdist.trainer.steps_per_call import Pace
from tfdist.trainer.timing import Call, Spent
from tfdist.verification.replica_sync_check import ReplicaSyncCheck


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
      shards: of a batch; 0 for none.
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
        shards: int = 0,
    ):
        self._step, self._model = step, step.model
        self._compiled = compiled
        self._feed = feed
        self._callbacks = callbacks
        self._pace = pace
        self._should_stop = should_stop
        self._keeper = keeper
        self.replica_check = ReplicaSyncCheck(step.distribution)
        self._hooked = callback.with_hooks(callbacks)
        self._norm, self._averages = agreement.anywhere(
            step.distribution,
            "what callbacks want",
            any(c.wants_gradient_norm for c in self._hooked),
            callback_list.average_first(callbacks, pace_lib.looks_at_batches),
        )
        # Loss scaling skips such updates, and Keras' own callback ends the training in its own way.
        self._forgives_nan = hasattr(step.model.optimizer, "inner_optimizer") or any(
            isinstance(c, keras.callbacks.TerminateOnNaN) for c in callbacks.callbacks
        )
        self._read = read
        self._shards = shards
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
        totals = self._step.totals("train", now.sums, now.examples, bool(self._shards))
        self._ended = time.perf_counter()
        more = True
        while more and now.begun < limit and not self._model.stop_training:
            if now.update in now.skipped:
                self._skip(now)
            else:
                more = self._call(now, totals, limit)
        if now.begun < limit < math.inf and not more:
            logger.info(f"WARNING: the data ended after {now.begun} updates of epoch {now.epoch + 1}, not {limit}")
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

    def _call(self, now: Position, totals: Totals | LastLogs, limit: float) -> bool:
        """Makes the updates of one call; returns whether the data of this epoch may have more."""
        limits = (limit - now.begun, self._keeper.limit(now), *(c.limit_call(now.update) for c in self._hooked))
        want = int(min(self._pace.updates, *limits))
        asked = time.perf_counter()
        part = step_calls.read(self._step, self._feed, now.update, want)
        if part.first == part.last:
            return False
        waited = time.perf_counter() - asked
        call = self._compiled(full=part.full, norm=self._norm, count=part.count)
        self.replica_check.check_if_due(self._model, now.update)
        self._callbacks.on_train_batch_begin(now.begun)
        steady = id(call) in self._step.warm
        start = time.perf_counter()
        arguments = (part.feed, tf.constant(part.first), tf.constant(part.last), *totals.arguments())
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
            layer_statistics.average(self._model, self._step.distribution, self._shards)
        self._callbacks.on_train_batch_end(now.begun - 1, now.logs)
        label, read = f"update {now.update}", self._feed.digest(done)
        due = self._keeper.due()
        agreed = agreement.agree(self._step, label, seconds, self._should_stop, due, read, between=python)
        self._pace.took(agreed.seconds, done, part.full, agreed.between)
        if done < part.last - part.first:
            return False
        if now.begun < limit and not self._model.stop_training:
            self._keeper.after_call(now, agreed)
        return True

    def _advance(self, now: Position, totals: Totals | LastLogs, result: CallResult, first: int) -> None:
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
            raise NotFinite(now.logs.get("loss", math.nan), now.update - done + bad - first, now.epoch)

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
