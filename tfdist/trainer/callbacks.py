"""Callbacks: tfdist's further hooks, what they are told of time, and where each is called: some on the chief alone."""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras

from tfdist.checkpoints import training_state
from tfdist.checkpoints.training_run import State
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals, preconditions
from tfdist.trainer.agreement import any_worker

Callbacks: TypeAlias = Sequence[keras.callbacks.Callback] | keras.callbacks.CallbackList | None
_NAMES = "BackupAndRestore CSVLogger ModelCheckpoint OrbaxCheckpoint ProgbarLogger RemoteMonitor TensorBoard"
WRITERS = tuple(getattr(keras.callbacks, name) for name in _NAMES.split() if hasattr(keras.callbacks, name))
"""Keras' callbacks that write to a disk, a terminal or a server: several workers would write over each other."""
_BATCH_HOOKS = {
    "train": ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one worker."""

    input: float = 0.0  # waiting for the next batch while nothing else could be done
    compute: float = 0.0
    """In calls of the compiled function, without the other entries. What synchronized BatchNorm exchanges in the middle
    of a forward or backward pass is in it."""
    all_reduce: float | None = 0.0
    """From the last gradient to the last sum, the wait for slower replicas included; None where it cannot be told, as
    on GPUs, whose `compute` then contains it."""
    python: float = 0.0  # between calls: callbacks, agreement with other workers, checkpoints

    seconds = property(lambda self: self.input + self.compute + (self.all_reduce or 0.0) + self.python)
    """Returns the seconds of all entries together."""

    def __add__(self, other: "Spent") -> "Spent":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
        sums: list[Any] = [None if None in pair else sum(pair) for pair in pairs]
        return Spent(*sums)

    def share(self, name: str) -> float | None:
        """Returns the share of the time in the entry `name`, in [0, 1]; None if it is not known."""
        value = getattr(self, name)
        return None if value is None else value / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call of the compiled training function, as `tfdist.Callback.on_call` is told of it."""

    updates: int  # how many it made
    examples: int  # of these updates, over all replicas
    spent: Spent  # this worker's time since the last call of this epoch or its beginning
    steady: bool  # nothing was compiled in it
    gradient_norm: float | None
    """The norm in its last update, before clipping and without regularizers; None unless a callback has
    `wants_gradient_norm = True`."""


class Callback(keras.callbacks.Callback):
    """A Keras callback with further hooks, which `tfdist.fit` calls; Keras' own `fit` ignores them.

    Each does nothing until a subclass overrides it. They are called on every worker, or with `chief_only` on the chief;
    what a callback does must not differ between workers where it changes the model.
    """

    distribution: Distribution | None = None
    """That of the `fit` which calls it."""

    chief_only: bool | None = None
    """With True, the callback is called on worker 0 alone, which is for those that write: files, a terminal, a server.
    It may save the model, but not change it, nor call what needs the other workers, such as `tfdist.evaluate`. Any
    callback may have this attribute; without it, or with None, it is True for those of Keras that write."""

    takes_many_updates: bool = False
    """A call of the compiled function makes many updates, unless a callback overrides `on_train_batch_begin` or
    `on_train_batch_end`: then it makes one. With True this one gets one `on_train_batch_end` for the last of them."""
    wants_gradient_norm: bool = False  # with True, `on_call` gets the norm of the gradient, which costs a pass over it

    def limit_call(self, update: int) -> float:
        """Returns how many updates the next call may make at most, after `update` of them; the same on all workers."""
        return math.inf

    def on_call(self, call: Call) -> None:
        """Is called after each call of the compiled function, before `on_train_batch_end`.

        `call`: its number of updates and examples, and where this worker's time went.
        """

    def on_checkpoint(self, update: int) -> None:
        """Is called when a checkpoint has been taken after `update` updates; it may not be on the disk yet."""

    def on_rollback(self, update: int, skipped: list[int]) -> None:
        """Is called when training has gone back to a checkpoint, after a loss that was not finite.

        Args:
          update: updates made when that checkpoint was taken.
          skipped: the updates that will be left out, counted from 0.
        """

    def on_accumulate(self, accumulate: int) -> None:
        """Is called when memory has run out and training goes on with smaller micro-batches.

        `accumulate`: micro-batches per update from now on.
        """

    def get_state(self) -> State | None:
        """Returns the state that a checkpoint keeps of this callback, as JSON can hold it.

        None, which this method returns, keeps nothing, or the state that tfdist knows of the callback's Keras class.
        """
        return None

    def set_state(self, state: State) -> None:
        """Restores the state from a checkpoint, after `on_train_begin`; each entry becomes an attribute of that name.

        `state`: returned by `get_state`.
        """
        for name, value in state.items():
            setattr(self, name, value)


class ChiefOnlyPlaceholder(Callback):
    """Replaces, on the other workers, a callback that is called on the chief alone.

    So that all workers have the same list: the same updates in a call, and the same names in checkpoints.
    """

    def __init__(self, original: keras.callbacks.Callback):
        super().__init__()
        self.original = original
        self.wants_gradient_norm = getattr(original, "wants_gradient_norm", False)

    def set_state(self, state: dict[str, object]) -> None:
        """Leaves the state to the chief."""


def _original(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    return callback.original if isinstance(callback, ChiefOnlyPlaceholder) else callback


def with_hooks(callbacks: keras.callbacks.CallbackList) -> list[Callback]:
    """Returns those of the callbacks that have tfdist's hooks, in their order."""
    return [callback for callback in callbacks.callbacks if isinstance(callback, Callback)]


def is_chief_only(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback is called on the chief alone: by its attribute, or as one of Keras' that write."""
    callback = _original(callback)
    chief_only = getattr(callback, "chief_only", None)
    return isinstance(callback, WRITERS) if chief_only is None else bool(chief_only)


def keep_files(callbacks: keras.callbacks.CallbackList) -> bool:
    """Returns whether a callback goes on, when a training begins, with a file that an earlier one has left."""
    kinds = keras.callbacks.BackupAndRestore, keras.callbacks.CSVLogger
    return any(isinstance(c, kinds) and getattr(c, "append", True) for c in map(_original, callbacks.callbacks))


def no_whole_optimizer(callbacks: keras.callbacks.CallbackList, distribution: Distribution) -> None:
    """Refuses callbacks that write the optimizer within `fit`, where each of several workers has slices of it."""
    for callback in map(_original, callbacks.callbacks if distribution.workers > 1 else []):
        if isinstance(callback, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore):
            what = f"{type(callback).__name__} writes the optimizer, of which each worker has slices with zero_stage=1"
            raise UserError(what, "save the model after fit, or give fit checkpoints of tfdist")


def needs_every_batch(callback: keras.callbacks.Callback, kind: str = "train") -> bool:
    """Returns whether a callback needs a call for every single update, or batch of a `test` or `predict`."""
    callback = _original(callback)
    if isinstance(callback, keras.callbacks.ProgbarLogger):
        return False
    if kind == "train":
        match callback:
            case keras.callbacks.ModelCheckpoint():
                return callback.save_freq != "epoch"
            case keras.callbacks.TensorBoard():
                return callback.update_freq != "epoch" or keras_internals.profiles_batches(callback)
            case keras.callbacks.TerminateOnNaN():
                return False
    if isinstance(callback, Callback) and callback.takes_many_updates:
        return False
    own = lambda hook: getattr(getattr(callback, hook), "__func__", None) is not getattr(keras.callbacks.Callback, hook)
    return any(own(one) or not keras_internals.is_theirs(keras.callbacks.Callback, one) for one in _BATCH_HOOKS[kind])


def any_needs_every_batch(callbacks: keras.callbacks.CallbackList, distribution: Distribution, kind: str) -> bool:
    """Returns whether a callback on any worker needs every single update or batch; all workers call this."""
    needed = any(needs_every_batch(callback, kind) for callback in callbacks.callbacks)
    return any_worker(distribution, "whether a callback needs every batch", needed)[0]


def on_this_worker(
    callbacks: Callbacks,
    model: keras.Model,
    distribution: Distribution,
    verbose: int | str,
    steps: int | None,
    epochs: int = 1,
    fit: bool = False,
) -> keras.callbacks.CallbackList:
    """Returns the callbacks as Keras' fit, evaluate and predict would call them on this worker.

    Args:
      verbose: 0 for no progress bar.
      steps: updates of an epoch, or batches, if known.
      fit: with a History; a list that is a `CallbackList` keeps its settings.

    Raises:
      UserError: a callback for the chief alone has a hook that all workers must answer.
    """
    given = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
    given = keras.tree.flatten(given) if given else []
    preconditions.not_of_horovod("callback", given)
    here = [_placed(callback, distribution) for callback in given]
    if fit and isinstance(callbacks, keras.callbacks.CallbackList):
        copied = copy.copy(callbacks)
        copied.callbacks = here
        return copied
    bar = verbose != 0 and distribution.is_chief
    return keras.callbacks.CallbackList(here, fit, bar, model, verbose=verbose, epochs=epochs, steps=steps)


def _placed(callback: keras.callbacks.Callback, distribution: Distribution) -> keras.callbacks.Callback:
    if isinstance(callback, Callback):
        callback.distribution = distribution
    if not is_chief_only(callback):
        return callback
    if isinstance(callback, Callback) and type(callback).limit_call is not Callback.limit_call:
        raise UserError(
            f"{type(callback).__name__} has chief_only=True and its own limit_call, which must be the same on all "
            "workers",
            "leave out one of them",
        )
    if distribution.is_chief:
        return callback
    # Under the name of its class: checkpoints count callbacks by it.
    return type(type(callback).__name__, (ChiefOnlyPlaceholder,), {})(callback)


@contextlib.contextmanager
def chief_alone(callbacks: keras.callbacks.CallbackList, distribution: Distribution) -> Iterator[None]:
    """Refuses, within it, that the chief's own callbacks call what needs the other workers: these never answer."""
    alone = distribution.workers > 1 and distribution.is_chief
    with contextlib.ExitStack() as changes:
        for callback in filter(is_chief_only, callbacks.callbacks if alone else []):
            base = Callback if isinstance(callback, Callback) else keras.callbacks.Callback
            for name in (name for name in dir(base) if name.startswith("on_")):
                hook = getattr(callback, name)
                if getattr(hook, "__func__", None) is not getattr(base, name):
                    what = f"{type(callback).__name__}.{name} runs on the chief"
                    called = _called_alone(hook, what, distribution)
                    changes.enter_context(keras_internals.replaced(name, [(callback, called)]))
        yield


def _called_alone(hook: Callable, what: str, distribution: Distribution) -> Callable:
    def refuse(*arguments: object, **options: object) -> None:
        why = f"{what}, and reads what is summed over the workers, such as a metric"
        raise UserError(why, "take it from the logs, or set chief_only=False")

    def called(*arguments: object, **options: object) -> object:
        with distribution.peers.apart(what), keras_internals.replaced("reduce", [(distribution.strategy, refuse)]):
            return hook(*arguments, **options)

    return called


def restored_epoch(model: keras.Model, callbacks: keras.callbacks.CallbackList, distribution: Distribution) -> int:
    """Returns the epoch that BackupAndRestore has gone back to on the chief, 0 for none; all workers call this.

    Afterwards all replicas have the state that it has restored on the chief.
    """
    epoch = keras_internals.restored_epoch(model)
    kinds = [type(_original(callback)) for callback in callbacks.callbacks]
    if not any(issubclass(kind, keras.callbacks.BackupAndRestore) for kind in kinds):
        return epoch
    epoch = distribution.peers.gather("the epoch to go back to", epoch)[0]
    training_state.share(model, distribution)
    return epoch
