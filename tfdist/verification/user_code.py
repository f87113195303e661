"""Code that is neither Keras' nor TensorFlow's, tfdist's or Python's own, and whether a model runs such."""

import functools
import inspect
import pathlib
import sys
import sysconfig
import types
from collections.abc import Iterable

import numpy as np

import tfdist

_LIBRARIES = {"keras", "tensorflow", "tfdist", "numpy", *sys.stdlib_module_names} - {"__main__"}
"""Top-level packages whose code is known by their version."""
_WITHOUT_ATTRIBUTES = (str, bytes, int, float, complex, bool, type(None), np.ndarray, np.generic, types.ModuleType)


def is_own(code: object) -> bool:
    """Returns whether a function, or the class of an object, is code of the user's or of another library."""
    return _package(getattr(code, "__module__", None) or "") not in _LIBRARIES


def runs_own(roots: Iterable[object]) -> bool:
    """Returns whether objects may run code that is not of the libraries alone.

    It goes through attributes, containers and closures; of objects of other libraries only Keras' have such.
    """
    visited: dict[int, object] = {}  # which keeps them, or another could take an id
    pending = list(roots)
    while pending:
        thing = pending.pop()
        if isinstance(thing, _WITHOUT_ATTRIBUTES) or id(thing) in visited:
            continue
        visited[id(thing)] = thing
        if isinstance(thing, dict | list | tuple | set | frozenset):
            pending += thing.values() if isinstance(thing, dict) else thing
        elif isinstance(thing, functools.partial):
            pending += (thing.func, thing.args, thing.keywords)
        elif isinstance(thing, types.MethodType):
            pending += (thing.__self__, thing.__func__)
        elif isinstance(thing, types.FunctionType):
            thing = inspect.unwrap(thing)
            if is_own(thing) or thing.__module__ == "builtins":  # as of exec()
                return True
            cells = [c.cell_contents for c in thing.__closure__ or () if c != types.CellType()]  # but empty ones
            pending += [*cells, *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
        else:
            kind = thing if isinstance(thing, type) else type(thing)
            if any(is_own(base) for base in kind.__mro__):
                return True
            if _package(kind.__module__) == "keras" and not isinstance(thing, type):
                pending += getattr(thing, "__dict__", {}).values()
    return False


def _package(module: str) -> str:
    return module.partition(".")[0]


_FOLDERS = (str(pathlib.Path(tfdist.__file__).parent), *map(sysconfig.get_path, ("stdlib", "platstdlib")))


def is_users(file: str) -> bool:
    """Returns whether a file of code belongs to no library that is installed, and is none that AutoGraph has made."""
    path = pathlib.Path(file)
    installed = {"site-packages", "dist-packages"} & {*path.parts} or path.name.startswith("__autograph_generated_")
    return not installed and not any(path.is_relative_to(folder) for folder in _FOLDERS)
