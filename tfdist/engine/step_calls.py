"""One call of a compiled function: its making, its errors and what it measures."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data import sources
from tfdist.data.record_feed import RecordFeed, first_row
from tfdist.distributed.distribution import Distribution
from tfdist.distributed.peers import Peers
from tfdist.engine import batching
from tfdist.engine.step.step import NO_BATCH, Step
from tfdist.errors import Interrupted, TrainingError, UserError
from tfdist.models import keras_internals

_STEPS: weakref.WeakKeyDictionary[keras.Model, tuple[tuple, Step]] = weakref.WeakKeyDictionary()
"""The last step of each model with the key it was made for. A step does not keep its model alive (`Step.model`)."""


class EndOfData(Exception):  # noqa: N818  an event and no error
    """There is no further batch."""


class OutOfMemory(TrainingError):  # noqa: N818
    """A device has not had the memory for an update; the weights may be between two updates."""


def step_of(model: keras.Model, distribution: Distribution, source: sources.Source, outputs_only: bool = False) -> Step:
    """The compiled functions of this model; kept with it until it is compiled anew or its weights change."""
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


class Totals:
    """Adds the sums of calls up to the logs of an epoch, in float64."""

    def __init__(self, names: list[str], sums: Sequence[float] = (), examples: float = 0.0):
        self._names = ["loss", *names]
        self.sums = np.array(sums) if len(sums) else np.zeros(len(self._names))
        self.examples = examples

    def add(self, result: tuple) -> dict[str, float]:
        sums, examples, _, _, metrics, _ = result
        self.sums += sums.numpy()
        self.examples += float(examples)
        losses = self.sums / max(self.examples, 1.0)
        logs = dict(zip(self._names, losses.tolist()))
        for name, value in metrics.items():
            value = value.numpy()
            logs[name] = float(value) if value.ndim == 0 else value
        return logs


def run(step: Step, call: Any, arguments: tuple, feed: batching.Feed, update: int | None = None) -> Any:
    """Calls a compiled function, and turns its errors into those that a person can act on.

    Args:
      call: of `step.compiled`.
      arguments: its tensors.
      feed: that the arguments come from.
      update: updates made so far, for those who watch this worker; as before if not given.

    Raises:
      EndOfData: a data set of unknown length has no more batches.
      UserError: data that does not fit.
      PeerError: another worker is lost.
      OutOfMemory: there is not enough for an update.
      TrainingError: anything else that TensorFlow reports.
    """
    peers = step.distribution.peers
    peers.doing("call" if id(call) in step.warm else "compiling", update)
    try:
        result = call(*arguments)
        keras.tree.map_structure(lambda t: t.numpy(), result[0])  # waits for the end, where TensorFlow has not
    except tf.errors.OpError as error:
        if NO_BATCH in str(error):
            raise EndOfData from error
        for pattern, advice in _COMPLAINTS:
            found = re.search(pattern, str(error))
            if found:
                raise UserError(f"{found[0]}{advice}") from error
        if isinstance(feed, RecordFeed) and _IN_PIPELINE.search(str(error)):
            broken = feed.broken()
            if broken:
                raise UserError(f"{broken}: mend or remove it, or set data.broken=skip") from error
        if isinstance(error, tf.errors.ResourceExhaustedError) and re.search("OOM|[Mm]emory|alloc", str(error)):
            text = " ".join(str(error).split())
            tensor = re.search(r"allocating tensor with shape\[[\d,]*\]", text)
            text = f"out of memory ({tensor[0] if tensor else text[:200]})"
            if update is None:
                raise TrainingError(f"{text}: measure with a smaller batch (eval.batch_size)") from error
            raise OutOfMemory(text) from error
        raise cause(error, peers) from error
    finally:
        peers.doing("python", update)
    step.warm.add(id(call))
    return result


def cause(error: tf.errors.OpError, peers: Peers) -> TrainingError:
    """What an error of TensorFlow means: a lost worker, if it may and the others know of one, or what it says."""
    text = " ".join(str(error).split())
    mine = isinstance(error, _OWN_FAULTS) and not re.search("[Cc]ollective|Horovod", text)
    if not mine and peers.verdict():
        return peers.error()
    return TrainingError(text[:400])


_OWN_FAULTS = (
    tf.errors.FailedPreconditionError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnimplementedError,
)
"""Without a word of a collective in them, these have nothing to do with the other workers."""
_IN_PIPELINE = re.compile("IteratorGetNext|OptionalGetValue")
_COMPLAINTS = (
    (
        r"Received a label value of .*? outside the valid range of \[.*?\)",
        ": correct the labels or the model's last layer",
    ),
    (r"a batch of the data set is larger than the first one \(.*?\)", ": make the first batch the largest"),
)


def agree(
    step: Step, label: str, seconds: float, should_stop: Callable[[], str], save: bool = False
) -> tuple[float, bool]:
    """What all workers must do alike after a call, though they see different clocks and signals.

    Args:
      label: where this worker is.
      seconds: how long the call took here.
      should_stop: a reason to stop the run, or nothing.
      save: whether this worker finds it time for a checkpoint.

    Returns:
      How long it took on average, and whether the chief finds it time for a checkpoint: the same on all workers.

    Raises:
      Interrupted: some worker has a reason to stop.
    """
    peers = step.distribution.peers
    votes = peers.gather(label, [seconds, should_stop(), bool(getattr(step.model, "stop_training", False)), save])
    for rank, (_, reason, _, _) in enumerate(votes):
        if reason:
            raise Interrupted(reason + (f" (worker {rank})" if peers.size > 1 else ""))
    step.model.stop_training = any(stop for _, _, stop, _ in votes)
    return sum(vote[0] for vote in votes) / len(votes), votes[0][3]


def never() -> str:
    """No reason to stop."""
    return ""
