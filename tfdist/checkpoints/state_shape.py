"""Schema of a checkpoint's `state.json`: checksums find damage, not forgery."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

Check: TypeAlias = Callable[[Any], bool]
Shape: TypeAlias = Mapping[str, Check]  # checks of the fields of an object
_MOST = 10**15  # more updates or epochs than a run can have

text: Check = lambda value: isinstance(value, str)
flag: Check = lambda value: isinstance(value, bool)
mapping: Check = lambda value: isinstance(value, dict)
count: Check = lambda value: type(value) is int and 0 <= value <= _MOST  # of updates or epochs
# That a float can hold: infinity and NaN are numbers, too.
number: Check = lambda value: isinstance(value, float) or (isinstance(value, int) and abs(value) <= 2**63)
finite: Check = lambda value: number(value) and math.isfinite(value)
optional: Callable[[Check], Check] = lambda check: lambda value: value is None or check(value)
list_of: Callable[[Check], Check] = lambda check: lambda value: isinstance(value, list) and all(map(check, value))
by_name: Callable[[Check], Check] = lambda check: lambda value: mapping(value) and all(map(check, value.values()))


def array(value: object) -> bool:
    """Accepts a number, or nested lists of numbers that form an array."""
    try:
        return number(value) or (isinstance(value, list) and np.asarray(value).dtype.kind in "biuf")
    except (ValueError, OverflowError, RecursionError):  # ragged, or deeper than arrays can be
        return False


# A metric: a number, or an array as nested lists. Callbacks may add other values to the logs.
_measure: Check = lambda v: (
    number(v) or (mapping(v) and (v.keys() == {"json"} or (v.keys() == {"array"} and array(v["array"]))))
)


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
    "strategy": text,
    "experiment": by_name(text),
    "callbacks": mapping,
    "history": by_name(list_of(_measure)),
    "epochs": list_of(count),
    "cpu_kernels": text,
    "data_sha256": text,
    "facts": by_name(lambda value: isinstance(value, int | float | str | list)),
    "keras_random": optional(list_of(count)),
}
# Earlier versions had none of these.
_LATER: dict[str, Any] = {"cpu_kernels": "", "data_sha256": "", "facts": {}, "keras_random": None}
_POSITION: Shape = {
    "update": count,
    "epoch": count,
    "begun": count,
    "measured": flag,
    "stopped": flag,
    "logs": by_name(_measure),
    "sums": list_of(number),
    "examples": number,
    "skipped": list_of(count),
    "first_epoch": optional(count),
}
_BEST: Shape = {"value": optional(number), "update": optional(count), "metric": text}


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
