"""What Keras' callbacks remember from epoch to epoch, and would forget in a new process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfdist.models import keras_internals

_KNOWN: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "stopped_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best", "epochs_since_last_save", keras_internals.BATCHES_SEEN),
}
_ARRAYS = {keras.callbacks.EarlyStopping: "best_weights"}


def capture(callbacks: Any) -> dict[str, dict]:
    """By name: what JSON can hold. A callback of one's own takes part with `get_state()` and `set_state(state)`."""
    found = {}
    for name, callback in _named(callbacks):
        if hasattr(callback, "get_state"):
            found[name] = callback.get_state()
            continue
        for kind, fields in _KNOWN.items():
            if isinstance(callback, kind):
                found[name] = {f: _plain(getattr(callback, f, None)) for f in fields}
    return found


def restore(callbacks: Any, states: dict[str, dict]) -> None:
    """Gives callbacks their state back; after `on_train_begin`, in which they forget it."""
    for name, callback in _named(callbacks):
        if name not in states:
            continue
        if hasattr(callback, "set_state"):
            callback.set_state(states[name])
        else:
            for field, value in states[name].items():
                setattr(callback, field, value)


def arrays(callbacks: Any) -> dict[str, np.ndarray]:
    """The best weights of EarlyStopping."""
    return {
        f"{name}/{i:04d}": np.asarray(array)
        for name, callback in _named(callbacks)
        for kind, field in _ARRAYS.items()
        if isinstance(callback, kind)
        for i, array in enumerate(getattr(callback, field, None) or [])
    }


def set_arrays(callbacks: Any, found: dict[str, np.ndarray]) -> None:
    """Puts back what `arrays` gave."""
    for name, callback in _named(callbacks):
        mine = [found[key] for key in sorted(found) if key.rpartition("/")[0] == name]
        for kind, field in _ARRAYS.items():
            if mine and isinstance(callback, kind):
                setattr(callback, field, mine)


def _named(callbacks: Any) -> list[tuple[str, Any]]:
    """Callbacks by class and number: a new process has them in the same order."""
    seen: dict[str, int] = {}
    named = []
    for callback in callbacks.callbacks:
        kind = type(callback).__name__
        seen[kind] = seen.get(kind, -1) + 1
        named.append((f"{kind}.{seen[kind]}", callback))
    return named


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, (np.generic, np.ndarray)) and np.ndim(value) == 0 else value
