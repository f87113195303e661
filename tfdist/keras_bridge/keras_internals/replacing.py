"""How something of Keras is replaced for a while."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

PATCHED = threading.RLock()
"""Held while a class or module of Keras is changed: of two threads that trace at once, one would undo the other's."""


@contextlib.contextmanager
def replaced(name: str, by_object: Mapping[object, object]) -> Iterator[None]:
    """Gives objects another attribute, within it; past Keras' tracker of attributes, for it is none to keep."""
    # The end of an inner change must leave what an outer one has set.
    before = [(owner, vars(owner)[name]) for owner in by_object if name in vars(owner)]
    for owner, value in by_object.items():
        vars(owner)[name] = value
    try:
        yield
    finally:
        for owner in by_object:
            del vars(owner)[name]
        for owner, value in before:
            vars(owner)[name] = value
