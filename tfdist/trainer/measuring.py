"""The measuring of one source of examples, batch after batch; a training does it again and again."""

from __future__ import annotations

import time
from collections.abc import Callable

import keras
import tensorflow as tf

from tfdist.data import batching, sources
from tfdist.data.batch_layout import Layout
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.keras_bridge import preconditions
from tfdist.step import step_calls
from tfdist.step.results import CallResult
from tfdist.trainer import agreement
from tfdist.trainer import steps_per_call as pace_lib
from tfdist.trainer.steps_per_call import Pace
from tfdist.verification import equivalence_check


def read_once(source: sources.Source, layout: Layout, steps: int | None, what: str) -> tuple[batching.Feed, int | None]:
    """Returns a feed that reads `source` in its own order, and how many batches to read, if known.

    Raises:
      UserError: the data has no end, or `steps` is none.
    """
    if steps is not None and steps < 1:
        raise UserError(f"steps must be at least 1, got {steps}")
    feed = batching.read_once(source, layout)
    batches = min(feed.batches, steps or feed.batches) if feed.batches else steps
    if batches is None and source.endless:
        raise UserError(f"the data set to {what} never ends: give the number of steps")
    return feed, batches


class Evaluation:
    """The measuring of one source, again and again.

    Args:
      model: compiled, and created in the distribution's scope.
      source: the examples.
      distribution: under which the model was created.
      batch: global batch of arrays or records; 32 if not given.
      steps: measure this many batches only.
      shards: as for `fit`.

    Raises:
      UserError: they do not fit together.
    """

    def __init__(
        self,
        model: keras.Model,
        source: sources.Source,
        distribution: Distribution,
        batch: int | None,
        steps: int | None,
        shards: int = 0,
    ):
        self._layout = layout = batching.layout_of(source, batch, distribution, 1, least=False, shards=shards)
        self._feed, self.batches = read_once(source, layout, steps, "evaluate")
        self._reader = source.reader
        self._step = step_calls.step_of(model, distribution, source)
        preconditions.targets(model, self._step.output_shape, source)
        self._step.compiled("test", layout)  # refuses what cannot be measured
        self._step.check_batches("test", layout, source.sizes(layout.batch))
        self._pace = Pace(None)
        self._shards, self._entries = shards, source.entries
        self.examples = 0
        """That the last run has measured."""

    def check(self, choice: str, within_fit: bool = False) -> None:
        """Refuses a model that replicas, or shards, do not measure as one device does.

        Args:
          choice: as `check_agreement` of `fit`.
          within_fit: whether a training with these data has been checked.
        """
        equivalence_check.check_forward(self._step, "test", choice, self._shards, self._entries, within_fit)

    def run(
        self, callbacks: keras.callbacks.CallbackList | None, should_stop: Callable[[], str] = agreement.never
    ) -> dict[str, float]:
        """Returns loss and metrics by name.

        Args:
          callbacks: their `on_test_*` methods are called.
          should_stop: returns a reason to stop the run, or nothing.
        """
        step = self._step
        step.reset()
        self._feed.restart()
        totals = step.totals("test", handed_on=self._layout.shards)
        callbacks = callbacks or keras.callbacks.CallbackList()
        looks = any(pace_lib.looks_at_tests(callback) for callback in callbacks.callbacks)
        (looks,) = agreement.anywhere(step.distribution, "whether a callback wants every batch", looks)
        pace = Pace(step.model.steps_per_execution) if looks else self._pace
        self._reader.end()  # Keras does, before an evaluation and not before a prediction
        self._reader.begin()
        step.model.stop_evaluating = False
        callbacks.on_test_begin()
        done, logs = 0, dict[str, float]()
        while (self.batches is None or done < self.batches) and not step.model.stop_evaluating:
            want = pace.updates if self.batches is None else min(pace.updates, self.batches - done)
            part = step_calls.read(step, self._feed, done, want)
            if part.first == part.last:
                break
            call = step.compiled("test", self._layout, count=part.count)
            callbacks.on_test_batch_begin(done)
            start = time.perf_counter()
            arguments = (part.feed, tf.constant(part.first), tf.constant(part.last), *totals.arguments())
            result = CallResult(*step_calls.run(step, call, arguments, self._feed))
            fresh = int(result.done)
            if not fresh:
                break
            seconds = time.perf_counter() - start
            logs, done = totals.add(result), done + fresh
            callbacks.on_test_batch_end(done - 1, logs)
            read = self._feed.digest(fresh)
            label = f"batch {done} of an evaluation"
            agreed = agreement.agree(step, label, seconds, should_stop, read=read, stops="stop_evaluating")
            pace.took(agreed.seconds, fresh, part.full)
            if fresh < part.last - part.first:
                break
        if not done:
            raise UserError("the data set to evaluate is empty: give it at least one batch")
        self._reader.end()
        self.examples = round(totals.examples)
        callbacks.on_test_end(logs)
        return logs
