"""The public `evaluate` and `predict`, and the evaluation that a training runs again and again."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist.config.messages import logger
from tfdist.config.runtime_options import checked_keywords
from tfdist.data import sources
from tfdist.data.batch_layout import Layout
from tfdist.data.protocol import Feed
from tfdist.data.spec import Structure
from tfdist.distributed import connect
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals, layer_state, metrics, preconditions
from tfdist.step import step_calls
from tfdist.step.batch_loop import CallResult
from tfdist.trainer import agreement
from tfdist.trainer.agreement import NOTHING_DUE, StepsPerCallTuner
from tfdist.trainer.callbacks import Callbacks, any_needs_every_batch, chief_alone, on_this_worker
from tfdist.verification import equivalence_check, replica_sync_check

Data: TypeAlias = Any
"""Arrays, a tuple of them, a `tf.data.Dataset`, what `python_batches` reads, or a source of `tfdist.data.sources`."""


def limited(number: int | None, most: int | None, what: str) -> int | None:
    """Returns a number of epochs or steps, or what `keras.config.set_max_epochs` or `..._steps_per_epoch` allows."""
    if not most or (number and number <= most):
        return number
    logger.info(f"WARNING: at most {most} {what}, since keras.config says so")
    return most


@checked_keywords
def evaluate(
    model: keras.Model,
    x: Data = None,
    y: Structure = None,
    batch_size: int | None = None,
    verbose: int | str = "auto",
    sample_weight: Structure = None,
    steps: int | None = None,
    callbacks: Callbacks = None,
    return_dict: bool = True,
    *,
    distribution: Distribution | None = None,
    virtual_replicas: int = 0,
    check_agreement: str = "auto",
    should_stop: Callable[[], str] = agreement.never,
) -> Any:
    """Measures loss and metrics over a data set, every example once.

    Args:
      x, y, sample_weight: as for `fit`.
      batch_size: global batch of arrays; 32 if not given.
      verbose: 0 for no progress bar.
      steps: evaluate this many batches only.
      callbacks: Keras callbacks; their `on_test_*` methods are called, as in `fit` on the chief alone or everywhere.
      return_dict: unlike in Keras, True if not given.
      virtual_replicas, check_agreement, should_stop: as for `fit`; a model that it has checked is not checked again.

    Returns:
      Values by the names that Keras gives them; without `return_dict` a list of them in Keras' order, or the only one.

    Raises:
      UserError: the model, data or arguments do not fit together.
      TrainingError: a worker is lost, or a call has failed.
      Interrupted: `should_stop` gave a reason.
    """
    distribution = distribution or connect.current(model.distribute_strategy)
    source = sources.as_source(x, y, sample_weight)
    preconditions.among("check_agreement", check_agreement, equivalence_check.CHOICES)
    preconditions.model_fits(model, distribution, 1, virtual_replicas)
    layer_state.average_statistics(model, distribution, virtual_replicas)
    steps = limited(steps, keras.config.max_steps_per_epoch(), "steps")
    batch_size = source.requested_batch(batch_size, steps=steps)
    evaluation = Evaluation(model, source, distribution, batch_size, steps, virtual_replicas)
    replica_sync_check.check_weights(model, distribution, "before an evaluation")
    evaluation.check(check_agreement)
    called = on_this_worker(callbacks, model, distribution, verbose, evaluation.batches)
    one = distribution.one_thread()
    with one, keras_internals.variables_as_numbers(), metrics.counting_resets(model), chief_alone(called, distribution):
        logs = evaluation.run(called, should_stop)
    return logs if return_dict else keras_internals.metrics_in_order(model, logs)


class Evaluation:
    """Evaluates one source, any number of times; the arguments are as for `fit`."""

    def __init__(
        self,
        model: keras.Model,
        source: sources.Source,
        distribution: Distribution,
        batch: int | None,
        steps: int | None,
        virtual_replicas: int = 0,
    ):
        layout = sources.layout_of(source, batch, distribution, 1, least=False, virtual_replicas=virtual_replicas)
        self._feed, self.batches = _feed(source, layout, steps, "evaluate")
        self._reader, self._steps = source.reader, steps
        self._step = step_calls.step_of(model, distribution, source, batch=layout.batch)
        preconditions.targets(model, self._step.output_shape, source)
        self._step.compiled("test", layout)  # refuses what cannot be evaluated
        self._step.check_batches("test", layout, source.sizes(layout.batch))
        self._tuner = StepsPerCallTuner(None)
        self._layout, self._virtual_replicas, self.source = layout, virtual_replicas, source
        self._repeated: equivalence_check.RepeatedCheck | None = None
        self.examples = 0  # examples evaluated by the last run

    def check(self, choice: str, within_fit: bool = False) -> None:
        """Refuses a model that replicas, or virtual replicas, do not measure as one device does.

        Args:
          choice: as `check_agreement` of `fit`.
          within_fit: whether a training has been checked; that counts if it had weights, too.
        """
        within_fit = within_fit and self.source.entries <= len(self._step.sample_rows or ())
        equivalence_check.check_forward(self._step, "test", self.source, choice, self._virtual_replicas, within_fit)
        self._repeated = equivalence_check.RepeatedCheck(self._step, "test", choice, self._virtual_replicas)
        if self._repeated.probes:
            self._feed.keep()

    def catch_up(self, runs: int) -> None:
        """Reads on, after a resume, to where the order of a data set that shuffles is after so many runs."""
        if self._feed.draws and self._steps and runs:
            logger.info("WARNING: steps read a part of validation_data, which draws other numbers after a resume")
        elif runs:
            self._feed.resume(0, runs, 0)
        for _ in range(runs):
            self._reader.catch_up(1, 0)

    def run(
        self, callbacks: keras.callbacks.CallbackList | None, should_stop: Callable[[], str] = agreement.never
    ) -> dict[str, float]:
        """Returns loss and metrics by name; calls the `on_test_*` methods of the callbacks."""
        step, model, distribution = self._step, self._step.model, self._step.distribution
        self._feed.restart()
        callbacks = callbacks or keras.callbacks.CallbackList()
        every = any_needs_every_batch(callbacks, distribution, "test")
        tuner = StepsPerCallTuner(model.steps_per_execution) if every else self._tuner
        self._reader.end()  # Keras does, before an evaluation and not before a prediction
        self._reader.begin()
        model.stop_evaluating = False
        callbacks.on_test_begin()
        step.reset()
        totals = step.totals("test")
        done, logs = 0, dict[str, float]()
        while (self.batches is None or done < self.batches) and not model.stop_evaluating:
            count = tuner.updates if self.batches is None else min(tuner.updates, self.batches - done)
            part = step_calls.read(step, self._feed, done, count)
            if part.first == part.last:
                break
            call = step.compiled("test", self._layout, count=part.count)
            callbacks.on_test_batch_begin(done)
            totals.refresh()
            start, steady = time.perf_counter(), id(call) in step.warm
            arguments = (part.feed, tf.constant(part.first), tf.constant(part.last), *totals.arguments())
            result = CallResult(*step_calls.run(step, call, arguments, self._feed))
            fresh = int(result.done)
            if not fresh:
                break
            seconds = time.perf_counter() - start
            logs, done = totals.add(result), done + fresh
            callbacks.on_test_batch_end(done - 1, logs)
            if totals.refresh():
                logs = totals.logs(step.results("test"))
            digest, label = self._feed.digest(fresh), f"batch {done} of an evaluation"
            decisions = agreement.agree(
                distribution, model, label, seconds, should_stop, NOTHING_DUE, digest, self._feed, "stop_evaluating"
            )
            tuner.record(decisions.seconds, fresh, steady)
            if self._repeated:
                self._repeated.after(fresh, lambda at=done - 1: self._feed.whole_batch(at))  # type: ignore[misc]
            if fresh < part.last - part.first:
                break
        if not done:
            raise UserError("the data set to evaluate is empty", "give it at least one batch")
        self._reader.end()
        self.examples = round(totals.examples)
        callbacks.on_test_end(logs)
        return logs


def _feed(source: sources.Source, layout: Layout, steps: int | None, what: str) -> tuple[Feed, int | None]:
    """Returns a feed that reads `source` in its own order, and the number of batches to read, if known."""
    if steps is not None and steps < 1:
        raise UserError(f"steps must be at least 1, got {steps}")
    feed = sources.read(source, layout, shuffle=False, seed=0, once=True)
    batches = min(feed.batches, steps or feed.batches) if feed.batches else steps
    if batches is None and source.endless:
        raise UserError(f"the data set to {what} never ends", "give the number of steps")
    return feed, batches


@checked_keywords
def predict(
    model: keras.Model,
    x: Data = None,
    batch_size: int | None = None,
    verbose: int | str = "auto",
    steps: int | None = None,
    callbacks: Callbacks = None,
    *,
    distribution: Distribution | None = None,
    virtual_replicas: int = 0,
    check_agreement: str = "auto",
) -> Structure:
    """Returns the model's outputs, one row per example, in the order of the input.

    Args:
      x: as for `fit`; of a tuple of arrays, as of a data set's, the first entry is the input, unless the model has
        several inputs: then the tuple is them, as in Keras.
      batch_size: global batch of arrays; 32 if not given.
      verbose: 0 for no progress bar.
      steps: predict from this many batches only.
      callbacks: Keras callbacks; their `on_predict_*` methods are called.
      virtual_replicas, check_agreement: as for `fit`; a model that it has checked is not checked again.

    Returns:
      NumPy arrays of shape [examples, ...] in the structure of the outputs.

    Raises:
      UserError: the model, data or arguments do not fit together.
      TrainingError: a worker is lost, or a call has failed.
    """
    distribution = distribution or connect.current(model.distribute_strategy)
    inputs = getattr(model, "inputs", None)
    # A tuple of arrays is the inputs of a model, as in Keras; but of one with a single input, which Keras would refuse,
    # it is (x, y[, weight]), as `fit` takes it.
    source = sources.as_source((x,) if isinstance(x, tuple) and (inputs is None or len(inputs) != 1) else x)
    steps = limited(steps, keras.config.max_steps_per_epoch(), "steps")
    batch_size = source.requested_batch(batch_size, steps=steps)
    run = functools.partial(predictions, "predict", steps=steps, callbacks=callbacks, verbose=verbose)
    with distribution.one_thread():
        batches = run(model, source, distribution, batch_size, virtual_replicas, check_agreement)
        return _concatenated([keras.tree.map_structure(np.asarray, outputs) for outputs, _ in batches])


def predictions(
    kind: str,
    model: keras.Model,
    source: sources.Source,
    distribution: Distribution,
    batch_size: int | None,
    virtual_replicas: int,
    check_agreement: str,
    should_stop: Callable[[], str] | None = None,
    steps: int | None = None,
    callbacks: Callbacks = None,
    verbose: int | str = 0,
) -> Iterator[tuple[Structure, int]]:
    """Yields for each global batch the outputs of a compiled function, tensors [rows, ...], and their number of rows.

    Every worker must read on. `kind`: of the function, see `Step.compiled`; `should_stop`: called after each batch.
    """
    preconditions.among("check_agreement", check_agreement, equivalence_check.CHOICES)
    preconditions.scope(model, distribution, virtual_replicas)
    layer_state.average_statistics(model, distribution, virtual_replicas)
    layout = sources.layout_of(source, batch_size, distribution, 1, least=False, virtual_replicas=virtual_replicas)
    feed, batches = _feed(source, layout, steps, "predict from")
    step = step_calls.step_of(model, distribution, source, outputs_only=True, batch=layout.batch)
    replica_sync_check.check_weights(model, distribution, "before a prediction")
    equivalence_check.check_forward(step, "predict", source, check_agreement, virtual_replicas)
    repeated = equivalence_check.RepeatedCheck(step, "predict", check_agreement, virtual_replicas)
    if repeated.probes:
        feed.keep()
    called = on_this_worker(callbacks, model, distribution, verbose, batches)
    stoppable = any_needs_every_batch(called, distribution, "predict")
    source.reader.begin()
    model.stop_predicting = False
    called.on_predict_begin()
    i = 0
    while (batches is None or i < batches) and not model.stop_predicting:
        part = step_calls.read(step, feed, i, 1)
        if part.first == part.last:
            break
        call = step.compiled(kind, layout, count=part.count)
        called.on_predict_batch_begin(i)
        try:
            outputs, examples = step_calls.run(step, call, (part.feed, tf.constant(part.first)), feed)
        except step_calls.EndOfData:
            break
        repeated.after(1, lambda at=i: feed.whole_batch(at))  # type: ignore[misc]
        rows = int(examples)
        if layout.split_by or layout.static:  # which fill batches up; elsewhere an example may have several rows
            outputs = keras.tree.map_structure(lambda o, n=rows: o[:n], outputs)
        called.on_predict_batch_end(i, {"outputs": outputs})
        i += 1
        yield outputs, rows
        digest, label, stop = feed.digest(1), f"batch {i} of the predictions", should_stop or agreement.never
        if should_stop or digest or stoppable:
            agreement.agree(distribution, model, label, 0.0, stop, NOTHING_DUE, digest, feed, "stop_predicting")
    if not i:
        raise UserError("the data set to predict from is empty", "give it at least one batch")
    called.on_predict_end()
    source.reader.end()


def _concatenated(pieces: list[Structure]) -> Structure:
    def whole(*parts: Any) -> np.ndarray:
        if len(parts) == 1:
            return np.require(parts[0], requirements="W")  # the memory of a tensor is not for scripts to write into
        # Of what has one number for each batch, Keras returns a row of them, and of a single batch the number.
        return np.concatenate([np.atleast_1d(p) for p in parts])

    return keras.tree.map_structure(whole, *pieces)


def answering_callbacks(
    model: keras.Model, distribution: Distribution, virtual_replicas: int, check_agreement: str
) -> contextlib.AbstractContextManager:
    """Lets callbacks call `model.evaluate` and `model.predict`, within it, where workers share the model's variables.

    Keras' own end there with an error, and are used everywhere else.
    """
    # TensorFlow keeps each variable of such a strategy on all workers: one of them alone cannot read it.
    if distribution.workers == 1 or distribution.strategy.num_replicas_in_sync <= len(distribution.devices):
        return contextlib.nullcontext()
    choice = "off" if check_agreement == "off" else "auto"  # a callback may evaluate again and again
    options: dict[str, Any] = dict(distribution=distribution, virtual_replicas=virtual_replicas, check_agreement=choice)

    def answer(*args: Any, **kwargs: object) -> object:
        return evaluate(*args, **options | ({} if len(args) > 8 else {"return_dict": False}) | kwargs)

    return keras_internals.measured_by(model, answer, functools.partial(predict, **options))
