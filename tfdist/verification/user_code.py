"""Code that is neither Keras' nor TensorFlow's, tfdist's or Python's own: what of it a model runs, and its digest."""

import functools
import hashlib
import inspect
import pathlib
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable

import numpy as np

import tfdist

_LIBRARIES = {"keras", "tensorflow", "tfdist", "numpy", *sys.stdlib_module_names} - {"__main__"}
"""Top-level packages whose code is known by their version."""
_WITHOUT_ATTRIBUTES = (str, bytes, int, float, complex, bool, type(None), np.ndarray, np.generic, types.ModuleType)


def is_own(code: object) -> bool:
    """Returns whether a function, or the class of an object, is code of the user's or of another library."""
    return _package(getattr(code, "__module__", None) or "") not in _LIBRARIES


def take(functions: Iterable[Callable], argument: str) -> bool:
    """Returns whether any of these that is the user's own takes an argument, or may, if that cannot be known."""
    for function in filter(is_own, functions):
        try:
            if argument in inspect.signature(function).parameters:
                return True
        except (TypeError, ValueError):
            return True
    return False


def digest(roots: Iterable[object]) -> str:
    """Returns a digest of the code that objects may run; empty if all of it belongs to the libraries.

    It covers the file of every loaded module of the user's: what their methods call, inherit or read as a global is in
    one of them. It is the same in each process that has loaded the same files.

    Raises:
      OSError: some of the code is in no file, as that of a notebook's cell: what it calls may have changed.
    """
    modules, constants = _code_in(roots)
    if not modules:
        return ""
    packages = {_package(name) for name in modules}
    files = {name: file for name, module in list(sys.modules.items()) if (file := getattr(module, "__file__", None))}
    for name in modules:
        if name not in files:
            raise OSError(f"the source of {name} is not in a file")
    ours = {file for name, file in files.items() if is_users(file) or _package(name) in packages - {"__main__"}}
    # Not their paths, which are others on another machine, nor their names: the same file may have two.
    contents = sorted({hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest() for file in ours})
    return hashlib.sha256("\n".join([*contents, *constants]).encode()).hexdigest()


def _package(module: str) -> str:
    return module.partition(".")[0]


_FOLDERS = (str(pathlib.Path(tfdist.__file__).parent), *map(sysconfig.get_path, ("stdlib", "platstdlib")))


def is_users(file: str) -> bool:
    """Returns whether a file of code belongs to no library that is installed, and is none that AutoGraph has made."""
    path = pathlib.Path(file)
    installed = {"site-packages", "dist-packages"} & {*path.parts} or path.name.startswith("__autograph_generated_")
    return not installed and not any(path.is_relative_to(folder) for folder in _FOLDERS)


def _code_in(roots: Iterable[object]) -> tuple[set[str], list[str]]:
    """Returns the modules of what is the user's own in objects, and the constants of their functions.

    It goes through attributes, containers and closures; of objects of other libraries only Keras' have such.
    """
    modules: set[str] = set()
    constants: list[str] = []
    visited: dict[int, object] = {}  # which keeps them, or another could take an id
    pending = list(roots)
    while pending:
        thing = pending.pop()
        if isinstance(thing, _WITHOUT_ATTRIBUTES) or id(thing) in visited:
            continue
        visited[id(thing)] = thing
        if isinstance(thing, dict):
            pending += thing.values()
        elif isinstance(thing, list | tuple | set | frozenset):
            pending += thing
        elif isinstance(thing, functools.partial):
            pending += (thing.func, thing.args, thing.keywords)
        elif isinstance(thing, types.MethodType):
            pending += (thing.__self__, thing.__func__)
        elif isinstance(thing, types.FunctionType):
            thing = inspect.unwrap(thing)
            values = [*_cells(thing), *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
            if is_own(thing) or thing.__module__ == "builtins":  # as of exec()
                modules.add(thing.__module__)
                constants += [repr(value) for value in values if isinstance(value, _WITHOUT_ATTRIBUTES[:7])]
            pending += values
        else:
            kind = thing if isinstance(thing, type) else type(thing)
            own = {base.__module__ for base in kind.__mro__ if is_own(base)}
            modules |= own
            if own or _package(kind.__module__) == "keras":
                pending += getattr(thing, "__dict__", {}).values() if not isinstance(thing, type) else ()
    return modules, constants


def _cells(function: types.FunctionType) -> list[object]:
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return cells
