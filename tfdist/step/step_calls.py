"""The compiled functions of a model, made once, and one call of them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist.data.protocol import Feed, FeedCall
from tfdist.data.records import UNREADABLE
from tfdist.data.sources import Source
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.keras_bridge import batch_norm, keras_internals, loss_kinds, own_steps
from tfdist.step import call_errors
from tfdist.step.step import Step


class _Kept(NamedTuple):
    """The last step of a model."""

    key: tuple[int | str, ...]
    """What it was made for, as ids."""
    owners: tuple
    """What these ids belong to; held, or another object could take an id and be mistaken for its owner."""
    step: Step
    """It does not keep its model alive (see `Step.model`)."""
    trained: tuple[keras.Variable, ...] | None = None
    """The weights that a training has updated since the model was compiled; None for no training."""


_STEPS: dict[int, _Kept] = {}
"""By the id of the model, until it is gone; by the model itself those without a hash could have none."""


def step_of(model: keras.Model, distribution: Distribution, source: Source, outputs_only: bool = False) -> Step:
    """Returns the compiled functions of this model; kept with it until it is compiled anew or its weights change.

    Args:
      source: some of its examples tell the shapes, and on them losses and metrics are tried.
      outputs_only: the model need not be compiled, nor the source have targets.
    """
    key = _key(model, distribution)
    kept = _STEPS.get(id(model))
    if kept is not None and kept.key == key:
        kept.step.data_is(source.bare)
        return kept.step
    step = Step(model, distribution)
    try:
        rows = source.spread_rows(loss_kinds.ROWS)
    except UNREADABLE as error:
        raise call_errors.explained(error, None, None, distribution.peers) from error
    step.build(rows, source.bare, outputs_only)
    optimizer = [] if outputs_only else [v for o in own_steps.optimizers(model) for v in o.variables]
    distribution.broadcast([*model.variables, *optimizer])
    # Building may have created the weights.
    if not outputs_only:
        if kept is None:
            weakref.finalize(model, _STEPS.pop, id(model), None).atexit = False
        owners = _owners(model, distribution)
        compiled = len(owners) - len(model.trainable_variables)
        trained = None
        if kept is not None and [*map(id, kept.owners[:compiled])] == [*map(id, owners[:compiled])]:
            trained = kept.trained
        _STEPS[id(model)] = _Kept(_key(model, distribution), owners, step, trained)
    return step


def trains(model: keras.Model) -> None:
    """Notes that a training of this model, for which there is a step, begins.

    Raises:
      UserError: one before it, since the model was compiled, has updated other weights. Keras would go on with those.
    """
    kept, now = _STEPS[id(model)], tuple(model.trainable_variables)
    before = {id(v): v.path for v in kept.trained or now}
    here = {id(v): v.path for v in now}
    odd = [path for key, path in {**before, **here}.items() if key not in before or key not in here]
    if odd:
        raise UserError(
            f"the training before has updated other weights than this would, such as {odd[0]}: after a change of what "
            "is trainable, compile() the model again"
        )
    _STEPS[id(model)] = kept._replace(trained=now)


def _owners(model: keras.Model, distribution: Distribution) -> tuple:
    """Returns the objects that a step is made for; none of them refers to the model."""
    compiled = keras_internals.compiled_loss(model), keras_internals.compiled_metrics(model)
    return (distribution.strategy, *compiled, getattr(model, "optimizer", None), *model.trainable_variables)


def _key(model: keras.Model, distribution: Distribution) -> tuple[int | str, ...]:
    # A layer's `synchronized` is read while the step is traced: one that is set between two fits would do nothing.
    synchronized = "".join(str(int(layer.synchronized)) for layer in batch_norm.batch_norms(model))
    owners = (id(owner) for owner in _owners(model, distribution))
    return (distribution.jit, distribution.static_shapes, synchronized, *owners)


@contextlib.contextmanager
def eagerly(model: keras.Model) -> Iterator[None]:
    """Lets the compiled functions run as Python, op by op, if the model was compiled so: for prints and debuggers."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(before or model.run_eagerly)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def read(step: Step, feed: Feed, update: int, limit: int) -> FeedCall:
    """Returns the next batches of a feed, see `ArrayFeed.next`; a pipeline that Python reads may fail in this.

    Raises:
      UserError, TrainingError: see `call_errors.explained`.
    """
    try:
        return feed.next(update, limit)
    except UNREADABLE as error:
        raise call_errors.explained(error, feed, update, step.distribution.peers) from error


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
        with eagerly(step.model):
            result = call(*arguments)
        first, *_ = result
        keras.tree.map_structure(lambda t: t.numpy(), first)  # waits for the end, where TensorFlow has not
    except UNREADABLE as error:
        raise call_errors.explained(error, feed, update, peers) from error
    finally:
        peers.doing("python", update)
    step.warm.add(id(call))
    return result
