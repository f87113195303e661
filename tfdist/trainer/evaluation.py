"""The public `evaluate` and `predict`, and what else only looks at a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import config
from tfdist.data import batching, sources
from tfdist.data.structures import Structure
from tfdist.distributed import connect
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals, layer_statistics, preconditions
from tfdist.step import step_calls
from tfdist.step.call_errors import EndOfData
from tfdist.trainer import agreement, arguments
from tfdist.trainer import steps_per_call as pace_lib
from tfdist.trainer.arguments import Callbacks, Data
from tfdist.trainer.callbacks import callback_list
from tfdist.trainer.measuring import Evaluation, read_once
from tfdist.verification import equivalence_check, replica_sync_check

PREDICT_ROWS = 4096
"""Rows that `predict` holds on the device before they are copied out."""


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
    dataset: Data = None,
    distribution: Distribution | None = None,
    virtual_replicas: int = 0,
    check_agreement: str = "auto",
    should_stop: Callable[[], str] = agreement.never,
    shards: int | None = None,
) -> Any:
    """Measures loss and metrics over a data set, every example once.

    Args:
      x, y, sample_weight, dataset: as for `fit`.
      batch_size: global batch of arrays; 32 if not given.
      verbose: 0 for no progress bar.
      steps: evaluate this many batches only.
      callbacks: Keras callbacks; their `on_test_*` methods are called, as in `fit` on the chief alone or everywhere.
      return_dict: unlike in Keras, True if not given.
      virtual_replicas, check_agreement, should_stop, shards: as for `fit`; a model that it has checked is not checked
        again.

    Returns:
      Values by the names that Keras gives them; without `return_dict` a list of them in Keras' order, or the only one.

    Raises:
      UserError: the model, data or arguments do not fit together.
      TrainingError: a worker is lost, or a call has failed.
      Interrupted: `should_stop` gave a reason.
    """
    virtual_replicas = config.renamed("virtual_replicas", virtual_replicas, "shards", shards)
    distribution = distribution or connect.current(model.distribute_strategy)
    source = sources.as_source(arguments.renamed(x, dataset), y, sample_weight)
    preconditions.among("check_agreement", check_agreement, equivalence_check.CHOICES)
    preconditions.model_fits(model, distribution, 1, virtual_replicas)
    layer_statistics.average(model, distribution, virtual_replicas)
    steps = arguments.steps_at_most(steps)
    batch_size = source.requested_batch(batch_size, steps=steps)
    measured = Evaluation(model, source, distribution, batch_size, steps, virtual_replicas)
    replica_sync_check.check_weights(model, distribution, "before an evaluation")
    measured.check(check_agreement)
    called = callback_list.for_measuring(callbacks, model, distribution, verbose, measured.batches)
    with keras_internals.variables_as_numbers(), callback_list.apart(called, distribution):
        logs = measured.run(called, should_stop)
    return logs if return_dict else keras_internals.metrics_in_order(model, logs)


def predict(
    model: keras.Model,
    x: Data = None,
    batch_size: int | None = None,
    verbose: int | str = "auto",
    steps: int | None = None,
    callbacks: Callbacks = None,
    *,
    dataset: Data = None,
    distribution: Distribution | None = None,
    virtual_replicas: int = 0,
    check_agreement: str = "auto",
    shards: int | None = None,
) -> Structure:
    """Returns the model's outputs, one row per example, in the order of the input.

    Args:
      x: as for `fit`; of a tuple of arrays, as of a data set's, the first entry is the input, unless the model has
        several inputs: then the tuple is them, as in Keras.
      batch_size: global batch of arrays; 32 if not given.
      verbose: 0 for no progress bar.
      steps: predict from this many batches only.
      callbacks: Keras callbacks; their `on_predict_*` methods are called.
      dataset: the name that `x` had before.
      virtual_replicas, check_agreement, shards: as for `fit`; a model that it has checked is not checked again.

    Returns:
      NumPy arrays of shape [examples, ...] in the structure of the outputs.

    Raises:
      UserError: the model, data or arguments do not fit together.
      TrainingError: a worker is lost, or a call has failed.
    """
    virtual_replicas = config.renamed("virtual_replicas", virtual_replicas, "shards", shards)
    distribution = distribution or connect.current(model.distribute_strategy)
    source = arguments.inputs(model, arguments.renamed(x, dataset))
    steps = arguments.steps_at_most(steps)
    batch_size = source.requested_batch(batch_size, steps=steps)
    options = _Options(steps, callbacks, verbose, virtual_replicas, check_agreement)
    made = _pieces(model, source, distribution, batch_size, "predict", None, options)
    pieces, rows = [], 0
    whole: list[Structure] = []
    for outputs, count in made:
        pieces.append(outputs)
        rows += count
        if rows >= PREDICT_ROWS:
            whole.append(_joined(pieces))
            pieces, rows = [], 0
    if pieces:
        whole.append(_joined(pieces))
    return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *whole)


def predict_batches(
    model: keras.Model,
    source: sources.Source,
    distribution: Distribution,
    batch_size: int | None = None,
    should_stop: Callable[[], str] = agreement.never,
    virtual_replicas: int = 0,
    check_agreement: str = "auto",
) -> Iterator[tuple[Structure, Structure]]:
    """Predicts batch by batch, beside the targets, in memory that does not grow. Every worker must read on.

    Args:
      source: read in its own order.
      batch_size: global batch of arrays; 32 if not given.
      should_stop, virtual_replicas, check_agreement: as for `fit`.

    Yields:
      (outputs, targets) of a global batch, NumPy arrays [n, ...]; targets are () where there are none.

    Raises:
      Interrupted: `should_stop` gave a reason, on any worker.
    """
    kind = "predict beside targets"
    options = _Options(virtual_replicas=virtual_replicas, check_agreement=check_agreement)
    for both, _ in _pieces(model, source, distribution, batch_size, kind, should_stop, options):
        outputs, targets = both
        yield keras.tree.map_structure(np.asarray, outputs), keras.tree.map_structure(np.asarray, targets)


class _Piece(NamedTuple):
    """What a call that predicts gives of a global batch."""

    outputs: Structure
    """Tensors [rows, ...], or (outputs, targets) of them."""
    rows: int


class _Options(NamedTuple):
    """How to predict, besides from what."""

    steps: int | None = None
    """End after this many batches."""
    callbacks: Callbacks = None
    verbose: int | str = 0
    """Of Keras."""
    virtual_replicas: int = 0
    check_agreement: str = "auto"


def _pieces(
    model: keras.Model,
    source: sources.Source,
    distribution: Distribution,
    batch_size: int | None,
    kind: str,
    should_stop: Callable[[], str] | None,
    options: _Options,
) -> Iterator[_Piece]:
    """Yields what a compiled function of `Step` gives for each global batch.

    Args:
      kind: of the function, see `Step.compiled`.
      should_stop: asked after each batch, if given.
    """
    steps, virtual_replicas = options.steps, options.virtual_replicas
    preconditions.among("check_agreement", options.check_agreement, equivalence_check.CHOICES)
    preconditions.scope(model, distribution)
    if virtual_replicas:
        preconditions.sharded(model, distribution, virtual_replicas)
    layer_statistics.average(model, distribution, virtual_replicas)
    layout = batching.layout_of(source, batch_size, distribution, 1, least=False, shards=virtual_replicas)
    feed, batches = read_once(source, layout, steps, "predict from")
    step = step_calls.step_of(model, distribution, source, outputs_only=True)
    replica_sync_check.check_weights(model, distribution, "before a prediction")
    equivalence_check.check_forward(step, "predict", options.check_agreement, virtual_replicas, source.entries)
    callbacks = callback_list.for_measuring(options.callbacks, model, distribution, options.verbose, batches)
    stoppable = any(pace_lib.looks_at_predictions(callback) for callback in callbacks.callbacks)
    (stoppable,) = agreement.anywhere(distribution, "whether a callback may stop", stoppable)
    source.reader.begin()
    model.stop_predicting = False
    callbacks.on_predict_begin()
    i = 0
    while (batches is None or i < batches) and not model.stop_predicting:
        part = step_calls.read(step, feed, i, 1)
        if part.first == part.last:
            break
        call = step.compiled(kind, layout, count=part.count)
        callbacks.on_predict_batch_begin(i)
        try:
            outputs, examples = step_calls.run(step, call, (part.feed, tf.constant(part.first)), feed)
        except EndOfData:
            break
        piece = _Piece(keras.tree.map_structure(lambda o, n=int(examples): o[:n], outputs), int(examples))
        callbacks.on_predict_batch_end(i, {"outputs": piece.outputs})
        i += 1
        yield piece
        read = feed.digest(1)
        if should_stop or read or stoppable:
            label = f"batch {i} of the predictions"
            agreement.agree(step, label, 0.0, should_stop or agreement.never, read=read, stops="stop_predicting")
    if not i:
        raise UserError("the data set to predict from is empty: give it at least one batch")
    callbacks.on_predict_end()
    source.reader.end()


def _joined(pieces: list[Structure]) -> Structure:
    return keras.tree.map_structure(lambda *parts: np.concatenate([p.numpy() for p in parts]), *pieces)
