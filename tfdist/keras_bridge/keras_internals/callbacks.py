"""Private names of Keras' callbacks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import keras

from tfdist.keras_bridge.keras_internals.replacing import PATCHED

BATCHES_SEEN = "_batches_seen_since_last_saving"
"""ModelCheckpoint counts in this attribute the batches since its last file, and nothing public tells the number."""


def profiles_batches(callback: keras.callbacks.TensorBoard) -> bool:
    """Returns whether the callback profiles; what it has read from `profile_batch` is kept privately."""
    return bool(callback._should_trace)


@contextlib.contextmanager
def measured_by(model: keras.Model, evaluate: Callable, predict: Callable) -> Iterator[None]:
    """Answers `model.evaluate` and `model.predict`, within it, for this model alone.

    Nothing else lets what a callback calls reach anybody but Keras. An attribute of the model would go with its copies,
    for which it would speak, too.

    Args:
      evaluate, predict: called with the model and what the callback has given.
    """
    with PATCHED:
        if not _ANSWERS:
            for name in _METHODS:
                _OWN[name] = vars(keras.Model).get(name)
                setattr(keras.Model, name, _answering(name, getattr(keras.Model, name)))
        before = _ANSWERS.get(id(model))
        _ANSWERS[id(model)] = dict(zip(_METHODS, (evaluate, predict)))
    try:
        yield
    finally:
        with PATCHED:
            if before is None:
                del _ANSWERS[id(model)]
            else:
                _ANSWERS[id(model)] = before
            if not _ANSWERS:
                for name, own in _OWN.items():
                    setattr(keras.Model, name, own) if own else delattr(keras.Model, name)


_METHODS = ("evaluate", "predict")
_OWN: dict[str, Callable | None] = {}
"""What the class itself had by these names."""
_ANSWERS: dict[int, dict[str, Callable]] = {}
"""Who answers, by the id of the model."""


def _answering(name: str, theirs: Callable) -> Callable:
    @functools.wraps(theirs)
    def method(self: keras.Model, *arguments: object, **options: object) -> object:
        answer = _ANSWERS.get(id(self), {}).get(name)
        return answer(self, *arguments, **options) if answer else theirs(self, *arguments, **options)

    return method
