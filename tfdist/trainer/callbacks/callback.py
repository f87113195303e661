"""The base class of callbacks that want to know more of a training than Keras tells them."""

from __future__ import annotations

import math

import keras

from tfdist.checkpoints.callback_state import State
from tfdist.trainer.timing import Call


class Callback(keras.callbacks.Callback):
    """A Keras callback with further hooks, which `tfdist.fit` calls; Keras' own `fit` ignores them.

    Each does nothing until a subclass overrides it. They are called on every worker, or with `chief_only` on the chief;
    what a callback does must not differ between workers where it changes the model.
    """

    chief_only: bool | None = None
    """With True, the callback is called on worker 0 alone, which is for those that write: files, a terminal, a server.
    It may save the model, but not change it, nor call what needs the other workers, such as `tfdist.evaluate`. Any
    callback may have this attribute; without it, or with None, it is True for those of Keras that write."""

    takes_many_updates: bool = False
    """A call of the compiled function makes many updates, unless a callback overrides `on_train_batch_begin` or
    `on_train_batch_end`: then it makes one. With True this callback is content with one `on_train_batch_end` for all
    updates of a call, for the last of them."""
    wants_gradient_norm: bool = False
    """With True, `on_call` is told the norm of the gradient, which costs a pass over it."""

    def limit_call(self, update: int) -> float:
        """Returns how many updates the next call may make at most, after `update` of them; the same on all workers."""
        return math.inf

    def on_call(self, call: Call) -> None:
        """Is called after each call of the compiled function, before `on_train_batch_end`.

        Args:
          call: how many updates and examples it had, and where this worker's time went.
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

        Args:
          accumulate: micro-batches per update from now on.
        """

    def get_state(self) -> State | None:
        """Returns what a checkpoint shall keep of this callback, as JSON can hold it.

        None, which this method returns, keeps nothing, or what tfdist knows of the callback's Keras class.
        """
        return None

    def set_state(self, state: State) -> None:
        """Takes back what a checkpoint has kept, after `on_train_begin`; each entry becomes an attribute of that name.

        Args:
          state: what `get_state` has returned.
        """
        for name, value in state.items():
            setattr(self, name, value)


def with_hooks(callbacks: keras.callbacks.CallbackList) -> list[Callback]:
    """Returns those of the callbacks that have these hooks, in their order."""
    return [callback for callback in callbacks.callbacks if isinstance(callback, Callback)]
