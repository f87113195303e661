"""What `state.json` of a checkpoint must hold, whoever has written it: checksums tell of damage, not of forgery."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MOST = 10**15
"""More updates or epochs than a run can have."""


def _count(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= _MOST


def _number(value: object) -> bool:
    return isinstance(value, (int, float))


def _measure(value: object) -> bool:
    """Whether it is a number, or an array as lists of them."""
    return _number(value) or (isinstance(value, dict) and isinstance(value.get("array"), list))


def _list_of(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _by_name(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


_STATE: dict[str, Callable[[Any], bool]] = {
    "run": _by_name(lambda value: value is None or isinstance(value, int)),
    "replicas": _count,
    "strategy": lambda value: isinstance(value, str),
    "experiment": lambda value: isinstance(value, dict),
    "callbacks": lambda value: isinstance(value, dict),
    "history": _by_name(_list_of(_measure)),
    "epochs": _list_of(_count),
}
_POSITION: dict[str, Callable[[Any], bool]] = {
    "update": _count,
    "epoch": _count,
    "begun": _count,
    "measured": lambda value: isinstance(value, bool),
    "stopped": lambda value: isinstance(value, bool),
    "logs": _by_name(_measure),
    "sums": _list_of(_number),
    "examples": _number,
    "skipped": _list_of(_count),
}
_BEST: dict[str, Callable[[Any], bool]] = {
    "value": lambda value: value is None or _number(value),
    "update": lambda value: value is None or _count(value),
}


def wrong(state: object) -> str:
    """Returns what is wrong with the content of a `state.json`, in a few words; nothing if it can be put back."""
    if not isinstance(state, dict):
        return f"a {type(state).__name__} instead of an object"
    for name, known in (("position", _POSITION), ("best", _BEST)):
        part = state.get(name)
        if not isinstance(part, dict):
            return f"no object {name!r}"
        for field, value in part.items():  # what is left out has its default: earlier versions had fewer
            if field not in known or not known[field](value):
                return f"{field!r} in {name!r}"
    for field in ("update", "epoch", "begun"):
        if field not in state["position"]:
            return f"no {field!r} in 'position'"
    for name, check in _STATE.items():
        if name not in state or not check(state[name]):
            return f"no {name!r} as it should be"
    for name in ("cpu_kernels", "data_sha256"):  # earlier versions had none
        if not isinstance(state.get(name, ""), str):
            return f"no {name!r} as it should be"
    return ""
