"""Metrics that must see a whole batch, since what they keep does not add up over its parts."""

from __future__ import annotations

import weakref

import keras

_WHOLE: weakref.WeakSet[keras.Metric] = weakref.WeakSet()


def remember(metric: keras.Metric) -> None:
    """Notes that the state of `metric` for a batch is not the sum of its states for the parts of the batch."""
    _WHOLE.add(metric)


def is_whole(metric: keras.Metric) -> bool:
    """Returns whether `metric` was noted so: each replica then keeps its state for all examples, and not for a part."""
    return metric in _WHOLE


def of(model: keras.Model) -> list[keras.Metric]:
    """Returns the compiled metrics of a model that were noted so."""
    every = [inner for metric in model.metrics for inner in getattr(metric, "metrics", [metric])]
    return [metric for metric in dict.fromkeys(every) if is_whole(metric)]
