"""State of callbacks that a checkpoint keeps beside its tensors, such as the counters of Keras' own."""

from __future__ import annotations

from typing import Any, TypeAlias

import keras
import numpy as np

from tfdist.checkpoints import state_shape
from tfdist.errors import UserError, one_line
from tfdist.keras_bridge import keras_internals

State: TypeAlias = dict[str, Any]  # a callback's state by name, as JSON can hold it
_KNOWN: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "stopped_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best", "epochs_since_last_save", keras_internals.BATCHES_SEEN),
}


def _keeps_state(callback: Any) -> bool:
    """Tells whether a callback keeps its state itself, as `tfdist.Callback`; its `get_state` may be None."""
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def capture(callbacks: keras.callbacks.CallbackList) -> dict[str, State]:
    """Returns the callbacks' states by name, as far as JSON can hold them."""
    plain = lambda value: value.item() if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0 else value
    states = {}
    for name, callback in named(callbacks):
        own = callback.get_state() if _keeps_state(callback) else None
        known = {field: plain(getattr(callback, field, None)) for field in _known(callback)}
        if own is not None or known:
            states[name] = known if own is None else own
    return states


def _known(callback: keras.callbacks.Callback) -> list[str]:
    return [field for kind, fields in _KNOWN.items() if isinstance(callback, kind) for field in fields]


def restore(callbacks: keras.callbacks.CallbackList, states: dict[str, State]) -> None:
    """Restores the callbacks' states; after `on_train_begin`, in which they reset it. UserError if one cannot."""
    for name, callback in named(callbacks):
        if name not in states:
            continue
        state = states[name]
        try:
            if _keeps_state(callback):
                callback.set_state(state)
                continue
            for field in state.keys() & set(_known(callback)):  # a file sets no other attribute of the callback
                state_shape.require(state, {field: state_shape.optional(state_shape.number)})
                setattr(callback, field, state[field])
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise UserError(
                f"the checkpoint has no state that the callback {name} can go on with ({one_line(error, 120)})",
                "use the code that it was taken with, or move that checkpoint away",
            ) from error


def named(callbacks: keras.callbacks.CallbackList) -> list[tuple[str, keras.callbacks.Callback]]:
    """Names callbacks by class and number: a new process has them in the same order."""
    kinds = [type(callback).__name__ for callback in callbacks.callbacks]
    return [(f"{kind}.{kinds[:i].count(kind)}", callbacks.callbacks[i]) for i, kind in enumerate(kinds)]
