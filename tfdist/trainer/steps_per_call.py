"""How many updates a call of the compiled function makes."""

from __future__ import annotations

import collections

import keras

from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals
from tfdist.trainer.callbacks import callback_list
from tfdist.trainer.callbacks.callback import Callback

SHORTEST_S = 0.2
"""Python's share of it is small, and progress stays lively."""
TIMES_BETWEEN = 20
"""It lasts longer where so many times the time between two calls is more: far workers take long to agree."""
LONGEST_S = 1.0
"""It never lasts longer than that, since signals and callbacks wait for its end."""


def _call_seconds(between: float) -> float:
    """Returns how long calls should last with so many seconds from the end of one to the start of the next."""
    return min(max(SHORTEST_S, TIMES_BETWEEN * between), LONGEST_S)


_RECENT = 3
"""Calls of which the shortest time before counts: a callback may take long now and then."""
_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_TEST_HOOKS = ("on_test_batch_begin", "on_test_batch_end")
_PREDICT_HOOKS = ("on_predict_batch_begin", "on_predict_batch_end")


class Pace:
    """How many updates a call makes: as many as last as long as `_call_seconds` says.

    Args:
      fixed: that many in any case, or None.
    """

    def __init__(self, fixed: int | None):
        self._fixed = fixed
        self._compiled: set[bool] = set()
        self._between: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self.updates = fixed or 1

    def took(self, seconds: float, updates: int, full: bool, between: float = 0.0) -> None:
        """Learns from a call; the first of each kind teaches nothing, since it was compiled in it.

        Args:
          seconds: how long the call took, the same on all workers.
          updates: how many it made.
          full: whether its batches were known to be full, which is another compiled function.
          between: seconds from the call before to this one, the same on all workers.
        """
        if self._fixed:
            return
        self._between.append(between)
        if full not in self._compiled:
            self._compiled.add(full)
            return
        # At most tenfold at a time: the first measured call is short and may have been lucky.
        wanted = _call_seconds(min(self._between))
        self.updates = max(1, min(int(wanted * updates / seconds), 10 * updates, 1 << 20))


def choose(model: keras.Model, looks: bool, steps_per_call: int | str) -> Pace:
    """Returns the pace that `steps_per_call`, the compiled model and the callbacks allow.

    Args:
      looks: whether a callback, on any worker, wants every single update.
    """
    if steps_per_call == "auto":
        if model.steps_per_execution > 1:
            return Pace(model.steps_per_execution)
        return Pace(1 if looks else None)
    if not isinstance(steps_per_call, int) or steps_per_call < 1:
        raise UserError(f"steps_per_call must be 'auto' or a whole number of at least 1, got {steps_per_call!r}")
    return Pace(steps_per_call)


def looks_at_batches(callback: keras.callbacks.Callback) -> bool:
    """Tells whether a callback wants every single update."""
    own = keras.callbacks
    callback = callback_list.original(callback)
    match callback:
        case own.ModelCheckpoint():
            return callback.save_freq != "epoch"
        case own.TensorBoard():
            return callback.update_freq != "epoch" or keras_internals.profiles_batches(callback)
        case own.ProgbarLogger() | own.TerminateOnNaN():
            return False
    return not takes_many(callback) and _overrides(callback, _BATCH_HOOKS)


def looks_at_tests(callback: keras.callbacks.Callback) -> bool:
    """Tells whether a callback wants every single batch of an evaluation."""
    return _measures(callback, _TEST_HOOKS)


def looks_at_predictions(callback: keras.callbacks.Callback) -> bool:
    """Tells whether a callback is called after a batch of a prediction."""
    return _measures(callback, _PREDICT_HOOKS)


def takes_many(callback: keras.callbacks.Callback) -> bool:
    """Tells whether a callback says that it is content with one hook for all updates of a call."""
    return isinstance(callback, Callback) and callback.takes_many_updates


def _measures(callback: keras.callbacks.Callback, hooks: tuple[str, ...]) -> bool:
    callback = callback_list.original(callback)
    shows = isinstance(callback, keras.callbacks.ProgbarLogger)
    return not shows and not takes_many(callback) and _overrides(callback, hooks)


def _overrides(callback: keras.callbacks.Callback, hooks: tuple[str, ...]) -> bool:
    base = keras.callbacks.Callback
    return any(getattr(getattr(callback, hook), "__func__", None) is not getattr(base, hook) for hook in hooks)
