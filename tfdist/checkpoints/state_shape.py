"""Schema of a checkpoint's `state.json`: checksums find damage, not forgery."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

Check: TypeAlias = Callable[[Any], bool]
Shape: TypeAlias = Mapping[str, Check]  # checks of the fields of an object
_MOST = 10**15  # more updates or epochs than a run can have


def count(value: object) -> bool:
    """Accepts a number of updates or epochs."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST


def number(value: object) -> bool:
    """Accepts a number that a float can hold, infinity and NaN included."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= 2**63)


def finite(value: object) -> bool:
    """Accepts a number that is neither infinite nor NaN."""
    return number(value) and math.isfinite(value)  # type: ignore[arg-type]


def optional(check: Check) -> Check:
    """Returns a check that accepts None, too."""
    return lambda value: value is None or check(value)


def array(value: object) -> bool:
    """Accepts a number, or nested lists of numbers that form an array."""
    try:
        return number(value) or (isinstance(value, list) and np.asarray(value).dtype.kind in "biuf")
    except (ValueError, OverflowError, RecursionError):  # ragged, or deeper than arrays can be
        return False


def _measure(value: object) -> bool:
    """Accepts a metric: a number, or an array as nested lists."""
    return number(value) or (isinstance(value, dict) and value.keys() == {"array"} and array(value["array"]))


def list_of(check: Check) -> Check:
    """Returns a check of all entries of a list."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def by_name(check: Check) -> Check:
    """Returns a check of all values of an object."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def invalid_field(content: object, shape: Shape) -> str:
    """Returns the name of a field that is missing or invalid; empty if none is."""
    if not isinstance(content, dict):
        return "fields"
    return next((name for name, check in shape.items() if name not in content or not check(content[name])), "")


def require(content: Mapping[str, Any], shape: Shape) -> None:
    """Raises ValueError, which names the field, if one is missing or invalid."""
    if name := invalid_field(content, shape):
        raise ValueError(f"{name} is {content.get(name)!r}")


_STATE: Shape = {
    "run": by_name(lambda value: value is None or isinstance(value, int)),
    "replicas": count,
    "strategy": lambda value: isinstance(value, str),
    "experiment": by_name(lambda value: isinstance(value, str)),
    "callbacks": lambda value: isinstance(value, dict),
    "history": by_name(list_of(_measure)),
    "epochs": list_of(count),
    "cpu_kernels": lambda value: isinstance(value, str),
    "data_sha256": lambda value: isinstance(value, str),
    "facts": by_name(lambda value: isinstance(value, int | float | str | list)),
}
_LATER = {"cpu_kernels": "", "data_sha256": "", "facts": {}}  # earlier versions had none
_POSITION: Shape = {
    "update": count,
    "epoch": count,
    "begun": count,
    "measured": lambda value: isinstance(value, bool),
    "stopped": lambda value: isinstance(value, bool),
    "logs": by_name(_measure),
    "sums": list_of(number),
    "examples": number,
    "skipped": list_of(count),
}
_BEST: Shape = {"value": optional(number), "update": optional(count)}


def error_in(state: object) -> str:
    """Returns what is wrong with the content of a `state.json`, in a few words; empty if it can be restored."""
    if not isinstance(state, dict):
        return f"a {type(state).__name__} instead of an object"
    for name, shape in (("position", _POSITION), ("best", _BEST)):
        part = state.get(name)
        if not isinstance(part, dict):
            return f"no object {name!r}"
        for field, value in part.items():  # missing fields have their defaults: earlier versions had fewer
            if field not in shape or not shape[field](value):
                return f"{field!r} in {name!r}"
    if missing := [field for field in ("update", "epoch", "begun") if field not in state["position"]]:
        return f"no {missing[0]!r} in 'position'"
    if name := invalid_field({**_LATER, **state}, _STATE):
        return f"no {name!r} as it should be"
    # Fields that contradict each other. Epochs may end early, so there may be fewer updates than fit.
    position, run, epochs = state["position"], state["run"], state["epochs"]
    update, epoch, begun = (position[name] for name in ("update", "epoch", "begun"))
    if begun > update:
        return f"'begun' is {begun} in 'position', of {update} updates"
    if epochs and epochs != list(range(epoch - len(epochs), epoch)):
        return f"'epochs' end with {epochs[-1] + 1}, and 'epoch' is {epoch} in 'position'"
    length, batch = run.get("updates per epoch"), run.get("global batch")
    if length and not (begun <= length and epoch <= update - begun <= epoch * length):
        return f"'update' is {update} and 'begun' {begun} in 'position', in epoch {epoch} of epochs of {length} updates"
    examples = position.get("examples", 0.0)
    if not (examples >= 0 and (not batch or examples <= begun * batch)):
        return f"'examples' is {examples} in 'position', after {begun} updates of {batch} examples"
    return ""
