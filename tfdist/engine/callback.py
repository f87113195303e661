"""The base class of callbacks that want to know more of a training than Keras tells them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import keras

from tfdist.checkpoints.callback_state import State
from tfdist.engine.timing import Call


class Callback(keras.callbacks.Callback):
    """A Keras callback with further hooks, which `tfdist.fit` calls; Keras' own `fit` ignores them.

    Each does nothing until a subclass overrides it. They are called on every worker; what a callback does there must
    not differ between workers where it changes the model.
    """

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


def as_list(
    callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.CallbackList | None,
    *,
    model: keras.Model,
    verbose: int | str,
    epochs: int = 1,
    steps: int | None,
    history: bool = True,
) -> keras.callbacks.CallbackList:
    """Returns the callbacks as Keras would call them; a list that is one already stays as it is.

    Args:
      steps: batches of an epoch, if known.
      history: with the `History` that `fit` returns.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(
        callbacks,
        add_history=history,
        add_progbar=verbose != 0,
        model=model,
        verbose=verbose,
        epochs=epochs,
        steps=steps,
    )
