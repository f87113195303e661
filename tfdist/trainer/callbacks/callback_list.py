"""Which callbacks are called on which worker: those that write on the chief alone, all others on every worker."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import keras

from tfdist.checkpoints import training_state
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals, preconditions
from tfdist.trainer.arguments import Callbacks
from tfdist.trainer.callbacks.callback import Callback
from tfdist.trainer.fit_options import FitOptions

_NAMES = (
    "BackupAndRestore",
    "CSVLogger",
    "ModelCheckpoint",
    "OrbaxCheckpoint",
    "ProgbarLogger",
    "RemoteMonitor",
    "TensorBoard",
)
WRITERS = tuple(getattr(keras.callbacks, name) for name in _NAMES if hasattr(keras.callbacks, name))
"""Keras' callbacks that write to a disk, a terminal or a server: several workers would write over each other."""


class Elsewhere(Callback):
    """Stands on the other workers in the place of a callback that is called on the chief alone.

    So that all workers find the same list: as many updates in a call, and the same names in checkpoints.

    Args:
      original: what it stands for.
    """

    def __init__(self, original: keras.callbacks.Callback):
        super().__init__()
        self.original = original
        self.wants_gradient_norm = getattr(original, "wants_gradient_norm", False)

    def set_state(self, state: dict[str, object]) -> None:
        """Leaves the state to the chief."""


def original(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Returns the callback, or the one that it stands for."""
    return callback.original if isinstance(callback, Elsewhere) else callback


def for_chief(callback: keras.callbacks.Callback) -> bool:
    """Tells whether a callback is called on the chief alone: it says so, or it is one of Keras' that write."""
    said = getattr(callback, "chief_only", None)
    return isinstance(callback, WRITERS) if said is None else bool(said)


def for_fit(options: FitOptions, model: keras.Model, steps: int | None) -> keras.callbacks.CallbackList:
    """Returns the callbacks as Keras' fit would call them on this worker; a list that is one already stays as it is.

    Args:
      steps: updates of an epoch, if known.

    Raises:
      UserError: a callback for the chief alone has a hook that all workers must answer.
    """
    if isinstance(options.callbacks, keras.callbacks.CallbackList):
        here = copy.copy(options.callbacks)
        here.callbacks = _here(options.callbacks.callbacks, options.distribution)
        return here
    return keras.callbacks.CallbackList(
        _here(options.callbacks, options.distribution),
        add_history=True,
        add_progbar=options.verbose != 0 and options.distribution.is_chief,
        model=model,
        verbose=options.verbose,
        epochs=options.epochs,
        steps=steps,
    )


def for_measuring(
    callbacks: Callbacks, model: keras.Model, distribution: Distribution, verbose: int | str, steps: int | None
) -> keras.callbacks.CallbackList:
    """Returns the callbacks as Keras' evaluate and predict would call them on this worker.

    Args:
      verbose: 0 for no progress bar.
      steps: batches, if known.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return keras.callbacks.CallbackList(
        _here(callbacks, distribution),
        add_progbar=verbose != 0 and distribution.is_chief,
        model=model,
        verbose=verbose,
        epochs=1,
        steps=steps,
    )


def _here(callbacks: object, distribution: Distribution) -> list[keras.callbacks.Callback]:
    given = keras.tree.flatten(callbacks) if callbacks else []
    preconditions.not_of_horovod("callback", given)
    return [_placed(callback, distribution) for callback in given]


def _placed(callback: keras.callbacks.Callback, distribution: Distribution) -> keras.callbacks.Callback:
    if not for_chief(callback):
        return callback
    if isinstance(callback, Callback) and type(callback).limit_call is not Callback.limit_call:
        raise UserError(
            f"{type(callback).__name__} has chief_only=True and its own limit_call, which must be the same on all "
            "workers: leave out one of them"
        )
    if distribution.is_chief:
        return callback
    # Under the name of its class: checkpoints count callbacks by it.
    return type(type(callback).__name__, (Elsewhere,), {})(callback)


@contextlib.contextmanager
def apart(callbacks: keras.callbacks.CallbackList | None, distribution: Distribution) -> Iterator[None]:
    """Lets the chief's own callbacks, within it, call nothing that needs the other workers, who are not there.

    They would wait for ever. And they may take as long as saving does.
    """
    with contextlib.ExitStack() as stack:
        if callbacks is not None and distribution.workers > 1 and distribution.is_chief:
            for callback in callbacks.callbacks:
                if for_chief(callback):
                    stack.enter_context(_guarded(callback, distribution))
        yield


@contextlib.contextmanager
def _guarded(callback: keras.callbacks.Callback, distribution: Distribution) -> Iterator[None]:
    """Replaces the hooks that a callback overrides, for a while."""
    base = Callback if isinstance(callback, Callback) else keras.callbacks.Callback
    before = {}
    for name in (name for name in dir(base) if name.startswith("on_")):
        hook = getattr(callback, name)
        if getattr(hook, "__func__", None) is not getattr(base, name):
            before[name] = vars(callback).get(name)
            setattr(callback, name, _alone(hook, f"{type(callback).__name__}.{name} runs on the chief", distribution))
    try:
        yield
    finally:
        for name, own in before.items():
            if own is None:
                delattr(callback, name)
            else:
                setattr(callback, name, own)


def _alone(hook: Callable, what: str, distribution: Distribution) -> Callable:
    strategy = distribution.strategy

    def refuse(*arguments: object, **options: object) -> None:
        raise UserError(
            f"{what}, and reads what is summed over the workers, such as a metric: take it from the logs, or set "
            "chief_only=False"
        )

    def called(*arguments: object, **options: object) -> object:
        with distribution.peers.apart(what):
            strategy.reduce = refuse
            try:
                return hook(*arguments, **options)
            finally:
                del strategy.reduce

    return called


def restored_epoch(model: keras.Model, callbacks: keras.callbacks.CallbackList, distribution: Distribution) -> int:
    """Returns the epoch that BackupAndRestore has gone back to on the chief, 0 for none; to be called on all workers.

    Afterwards all replicas have what it has restored on the chief.
    """
    epoch = keras_internals.restored_epoch(model)
    kinds = [type(original(callback)) for callback in callbacks.callbacks]
    if not any(issubclass(kind, keras.callbacks.BackupAndRestore) for kind in kinds):
        return epoch
    epoch = distribution.peers.gather("the epoch to go back to", epoch)[0]
    training_state.share(model, distribution)
    return epoch


def average_first(callbacks: keras.callbacks.CallbackList, looks: Callable[[object], bool]) -> bool:
    """Tells whether a callback may save the model within an epoch, so that its statistics must be averaged first.

    Args:
      looks: tells whether a callback wants every single update.
    """
    return any(for_chief(original(callback)) and looks(callback) for callback in callbacks.callbacks)
