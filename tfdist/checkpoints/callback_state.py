"""State of Keras' callbacks that a checkpoint keeps: their counters and best weights."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable

import keras
import numpy as np

from tfdist.checkpoints import state_shape
from tfdist.errors import UserError, one_line
from tfdist.keras_bridge import keras_internals

State: TypeAlias = dict[str, Any]
"""A callback's state by name, as JSON can hold it."""
_KNOWN: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "stopped_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best", "epochs_since_last_save", keras_internals.BATCHES_SEEN),
}
_ARRAYS = {keras.callbacks.EarlyStopping: "best_weights"}


@runtime_checkable
class Stateful(Protocol):
    """A callback that keeps its state itself; `tfdist.Callback` is one, and any other with these methods."""

    def get_state(self) -> State | None:
        """Returns what JSON can hold; None for nothing of its own."""

    def set_state(self, state: State) -> None:
        """Takes it back."""


def capture(callbacks: keras.callbacks.CallbackList) -> dict[str, State]:
    """Returns the callbacks' states by name, as far as JSON can hold them."""
    states = {}
    for name, callback in _named(callbacks):
        own = callback.get_state() if isinstance(callback, Stateful) else None
        if own is not None:
            states[name] = own
            continue
        for kind, fields in _KNOWN.items():
            if isinstance(callback, kind):
                values = {field: getattr(callback, field, None) for field in fields}
                numpy = (np.generic, np.ndarray)
                states[name] = {
                    f: v.item() if isinstance(v, numpy) and np.ndim(v) == 0 else v for f, v in values.items()
                }
    return states


def restore(callbacks: keras.callbacks.CallbackList, states: dict[str, State]) -> None:
    """Restores the callbacks' states; after `on_train_begin`, in which they reset it.

    Raises:
      UserError: one cannot restore it.
    """
    for name, callback in _named(callbacks):
        if name not in states:
            continue
        try:
            _set_state(callback, states[name])
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise UserError(
                f"the checkpoint has no state that the callback {name} can go on with ({one_line(error, 120)})",
                "use the code that it was taken with, or move that checkpoint away",
            ) from error


def _set_state(callback: keras.callbacks.Callback, state: State) -> None:
    if isinstance(callback, Stateful):
        callback.set_state(state)
        return
    names = {field for kind, fields in _KNOWN.items() if isinstance(callback, kind) for field in fields}
    for field in names & state.keys():  # a file sets no other attribute of the callback
        if not state_shape.optional(state_shape.number)(state[field]):
            raise ValueError(f"{field} is {state[field]!r}")
        setattr(callback, field, state[field])


def arrays(callbacks: keras.callbacks.CallbackList) -> dict[str, np.ndarray]:
    """Returns the best weights of EarlyStopping, by the callback's name and their number."""
    return {
        f"{name}/{i:04d}": np.asarray(array)
        for name, callback in _named(callbacks)
        for kind, field in _ARRAYS.items()
        if isinstance(callback, kind)
        for i, array in enumerate(getattr(callback, field, None) or [])
    }


def set_arrays(callbacks: keras.callbacks.CallbackList, stored: dict[str, np.ndarray]) -> None:
    """Restores what `arrays` returned."""
    for name, callback in _named(callbacks):
        mine = [stored[key] for key in sorted(stored) if key.rpartition("/")[0] == name]
        for kind, field in _ARRAYS.items():
            if mine and isinstance(callback, kind):
                setattr(callback, field, mine)


def _named(callbacks: keras.callbacks.CallbackList) -> list[tuple[str, keras.callbacks.Callback]]:
    """Names callbacks by class and number: a new process has them in the same order."""
    seen: dict[str, int] = {}
    named = []
    for callback in callbacks.callbacks:
        kind = type(callback).__name__
        seen[kind] = seen.get(kind, -1) + 1
        named.append((f"{kind}.{seen[kind]}", callback))
    return named
