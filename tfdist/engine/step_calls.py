"""The compiled functions of a model, made once, and one call of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import keras
import tensorflow as tf

from tfdist.data import sources
from tfdist.data.record_feed import first_row
from tfdist.distributed.distribution import Distribution
from tfdist.engine import call_errors
from tfdist.engine.batching import Feed
from tfdist.engine.step.step import Step
from tfdist.models import keras_internals

_STEPS: weakref.WeakKeyDictionary[keras.Model, tuple[tuple, Step]] = weakref.WeakKeyDictionary()
"""The last step of each model with the key it was made for. A step does not keep its model alive (`Step.model`)."""


def step_of(model: keras.Model, distribution: Distribution, source: sources.Source, outputs_only: bool = False) -> Step:
    """Returns the compiled functions of this model; kept with it until it is compiled anew or its weights change.

    Args:
      source: its first example tells the shapes.
      outputs_only: the model need not be compiled, nor the source have targets.
    """
    key = (
        id(distribution.strategy),
        distribution.jit,
        id(keras_internals.compiled_loss(model)),
        id(keras_internals.compiled_metrics(model)),
        id(getattr(model, "optimizer", None)),
        *(id(v) for v in model.trainable_variables),
    )
    known, kept = _STEPS.get(model, (None, None))
    if kept is not None and known == key:
        return kept
    step = Step(model, distribution)
    match source:
        case sources.Arrays():
            row = keras.tree.map_structure(lambda a: tf.convert_to_tensor(a[:1]), source.columns)
        case sources.Records():
            row = first_row(source)
        case _:
            row = sources.first_batch(source)
    step.build(row, outputs_only)
    optimizer = [] if outputs_only or model.optimizer is None else model.optimizer.variables
    distribution.broadcast([*model.variables, *optimizer])
    # Building may have created the weights.
    if not outputs_only:
        key = (*key[:5], *(id(v) for v in model.trainable_variables))
        _STEPS[model] = (key, step)
    return step


def run(step: Step, call: Callable[..., tuple], arguments: tuple, feed: Feed, update: int | None = None) -> tuple:
    """Calls a compiled function, and turns its errors into those that a person can act on.

    Args:
      call: of `step.compiled`.
      arguments: its tensors.
      feed: that the arguments come from.
      update: updates made so far, for those who watch this worker; None where the call makes none.

    Returns:
      What the function returns: the fields of a `CallResult`, or (outputs, examples) of one that predicts.

    Raises:
      EndOfData, UserError, PeerError, OutOfMemory, TrainingError: see `call_errors.explained`.
    """
    peers = step.distribution.peers
    peers.doing("call" if id(call) in step.warm else "compiling", update)
    try:
        result = call(*arguments)
        first, *_ = result
        keras.tree.map_structure(lambda t: t.numpy(), first)  # waits for the end, where TensorFlow has not
    except tf.errors.OpError as error:
        raise call_errors.explained(error, feed, update, peers) from error
    finally:
        peers.doing("python", update)
    step.warm.add(id(call))
    return result
