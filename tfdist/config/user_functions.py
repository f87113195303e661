"""The user's own code: functions as `package.module:function`, the files they are in, and what runs such code."""

import argparse
import ast
import contextlib
import dis
import functools
import hashlib
import importlib.util
import inspect
import os
import pathlib
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from tfdist.errors import UserError

Result = TypeVar("Result")
CODE = "the code of"  # names of facts that are digests of the user's code begin so
SETUP = "the setup of the model"  # and that of a digest of its layers
RATE = "the learning rate of optimizer"  # behind it stands the number of the optimizer
KERAS_SETTINGS = f"{CODE} Keras' settings epsilon and image_data_format"
_FOLDERS = (str(pathlib.Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "platstdlib")))
tree = functools.cache(lambda path: ast.parse(path.read_bytes()))
syntax = functools.cache(lambda path: ast.dump(tree(path)))  # without comments and line breaks
_LIBRARIES = {"keras", "tensorflow", "tfdist", "numpy", *sys.stdlib_module_names} - {"__main__"}
"""Top-level packages whose code is known by their version."""
WRITTEN, _READ = set[str](), dict[str, pathlib.Path]()  # files below the working folder, once `note_files` is called
_RESULTS: dict[pathlib.Path, set[str]] = {}  # what earlier starts have written, by the file that lists it
_SETTINGS = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".txt", ".env")
_CONTAINERS = dict, list, tuple, set, frozenset
_ADDING = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "clear"}  # methods of containers
_WITHOUT_ATTRIBUTES = (str, bytes, int, float, complex, bool, type(None), np.ndarray, np.generic, types.ModuleType)


def as_now(reference: str) -> str:
    """Returns a data set of tfdist, a module or a file, where it is now; run folders of 0.1.0 have the old place."""
    moved = reference.replace("tfdist.datasets.", "tfdist.data.datasets.")
    return moved.replace("/tfdist/datasets/", "/tfdist/data/datasets/")


def resolve(field: str, reference: str, called: bool = True) -> Callable:
    """Returns the function, or any object unless `called`, of `package.module:function`, also in the working folder."""
    note_files()
    module_name, _, name = as_now(reference).partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `python -m` does so by itself, a console script does not
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{field}={reference!r} cannot be imported: {error}") from error
    function = getattr(module, name, None)
    if function is None or (called and not callable(function)):
        raise UserError(f"{field}={reference!r}: module {module_name} has no function {name!r}")
    return function


def call(field: str, function: Callable[..., Result], arguments: dict, *positional: object) -> Result:
    """Calls `function`, turning arguments that it does not take into one line that names `field`."""
    try:
        inspect.signature(function).bind(*positional, **arguments)
    except TypeError as error:
        what = f"{field}: {function.__module__}:{function.__qualname__} takes no such arguments: {error}"
        raise UserError(what) from None
    except ValueError:  # built-in functions have no signature
        pass
    return function(*positional, **arguments)


def is_users(file: str) -> bool:
    """Returns whether a file of code belongs to no library that is installed, and is none that AutoGraph has made."""
    path = pathlib.Path(file)
    installed = {"site-packages", "dist-packages"} & {*path.parts} or path.name.startswith("__autograph_generated_")
    return not installed and not any(path.is_relative_to(folder) for folder in _FOLDERS)


def loaded_files(modules: Iterable[str]) -> dict[pathlib.Path, str]:
    """Returns the files of the user's code among these modules and what they import, and where each is imported from.

    What is imported within a function counts, too, whether or not it has been.
    """
    pending, paths = [*modules], dict[pathlib.Path, str]()
    while pending:
        name = str(pending.pop())
        path, package = _file(name), name.rpartition(".")[0]
        pending += [package] * bool(package)
        if path.suffix != ".py" or path in paths or not is_users(str(path)) or not path.is_file():
            continue
        package = name if path.stem == "__init__" else package
        paths[path] = "/".join([*filter(None, package.split(".")), path.name])
        values = getattr(sys.modules.get(name), "__dict__", {}).values()  # of modules that are imported by their names
        pending += [getattr(v, "__name__" if isinstance(v, types.ModuleType) else "__module__", "") for v in values]
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom) and (package or not node.level):
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                pending += [base, *(f"{base}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                pending += [alias.name for alias in node.names]
    return dict(sorted(paths.items()))


def _file(name: str) -> pathlib.Path:
    """Returns the file of a module, which need not have been imported; no file of what is of no use here."""
    module, top = sys.modules.get(name), name.partition(".")[0]
    try:
        # To look for a module within a package imports that, which may be a large library.
        if module is None and top != name and not is_users(str(_file(top))):
            return pathlib.Path()
        spec = None if module else importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return pathlib.Path()
    return pathlib.Path(str(spec.origin if spec else getattr(module, "__file__", ""))).resolve()


def code_digests(references: Iterable[str]) -> dict[str, str]:
    """Returns by name a digest of each file of the user's that functions of `package.module:function` run or read."""
    files = loaded_files(as_now(reference).partition(":")[0] for reference in references)
    digest = lambda path: hashlib.sha256(syntax(path).encode()).hexdigest()[:16]
    return {f"{CODE} {name}": digest(path) for path, name in files.items()} | settings_read()


@functools.cache
def note_files() -> None:
    """Notes from now on which files below the working folder Python opens: all to write, and settings to read."""
    here = os.getcwd() + os.sep

    def note(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], str) and len(WRITTEN) + len(_READ) < 10_000:
            (name, mode, opened), path = arguments, os.path.abspath(arguments[0])
            writes = set(mode) & set("wax+") if isinstance(mode, str) else opened & (os.O_WRONLY | os.O_RDWR)
            if path.startswith(here) and writes:
                WRITTEN.add(path.removeprefix(here))
                for file, names in _RESULTS.items() if name.endswith(_SETTINGS) else ():
                    with contextlib.suppress(OSError, ValueError), file.open("a") as listed:
                        listed.write(f"{path.removeprefix(here)}\n" * (path.removeprefix(here) not in names))
                    names.add(path.removeprefix(here))
            elif path.startswith(here) and name.endswith(_SETTINGS) and is_users(path) and _opens_for_user():
                _READ[path.removeprefix(here)] = pathlib.Path(path)

    sys.addaudithook(note)


def list_results(file: pathlib.Path) -> None:
    """Lists in a file, from now on, the settings that are written: results, for which the next start takes them."""
    _RESULTS[file] = set(file.read_text().splitlines()) if file.exists() else set()


def _opens_for_user() -> bool:
    """Returns whether code of the user is what opens a file, by functions of libraries or by itself."""
    frame = inspect.currentframe()
    while frame and not is_users(frame.f_code.co_filename):
        ours = frame.f_globals.get("__name__", "").startswith("tfdist.") and frame.f_globals is not globals()
        frame = None if ours else frame.f_back
    return frame is not None


def settings_read() -> dict[str, str]:
    """Returns by name digests of settings that the user's code has read and nothing here written, and of Keras' own."""
    import keras

    digest = lambda path: hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    results = WRITTEN.union(*_RESULTS.values())
    small = {n: p for n, p in _READ.items() if n not in results and p.is_file() and p.stat().st_size < 1 << 20}
    read = {f"{CODE} {name}": digest(path) for name, path in sorted(small.items())}
    return read | {KERAS_SETTINGS: f"{keras.config.epsilon()} {keras.config.image_data_format()}"}


is_own_module = lambda names: names.get("__name__", "").partition(".")[0] not in _LIBRARIES
"""Whether the module with these global names is the user's, or of another library."""


def is_own(code: object) -> bool:
    """Returns whether a function, or the class of an object, is code of the user's or of another library."""
    return is_own_module({"__name__": getattr(code, "__module__", None) or ""})


def reachable(roots: Iterable[object], ends: tuple[type, ...] = ()) -> Iterator[object]:
    """Yields objects, and what they reach through attributes, containers, closures and names that own functions read.

    Of objects of libraries only Keras' are looked into, and none of the classes `ends`.
    """
    visited: dict[int, object] = {}  # which keeps them, or another could take an id
    pending = list(roots)
    while pending:
        thing = pending.pop()
        # As of tf.function; objects that answer to any name are none.
        is_wrapper = callable(thing) and not isinstance(thing, type) and "__wrapped__" in getattr(thing, "__dict__", ())
        thing = unwrapped(thing) if is_wrapper else thing
        if isinstance(thing, _WITHOUT_ATTRIBUTES) or id(thing) in visited:
            continue
        visited[id(thing)] = thing
        yield thing
        if isinstance(thing, ends):
            continue
        if isinstance(thing, _CONTAINERS):
            pending.extend(thing.values() if isinstance(thing, dict) else thing)
        elif isinstance(thing, functools.partial):
            pending += (thing.func, thing.args, thing.keywords)
        elif isinstance(thing, types.MethodType):
            pending += (thing.__self__, thing.__func__)
        elif isinstance(thing, types.FunctionType):
            pending += values_read(thing).values()
        elif not isinstance(thing, type) and (is_own(type(thing)) or type(thing).__module__.startswith("keras.")):
            pending += [*attributes(thing).values(), *own_attributes(thing)]


def values_read(function: types.FunctionType) -> dict[str, object]:
    """Returns by name defaults and enclosed variables of a function, and of one of the user's the globals it reads."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    values = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}  # but empty ones
    values["defaults"] = (function.__defaults__, function.__kwdefaults__)
    if not is_own(function):
        return values
    names = sorted({name for kind, name in operations(function.__code__) if kind == "LOAD_GLOBAL"})
    values |= {name: function.__globals__[name] for name in names if name in function.__globals__}
    return attributes_read(values, [function])


def attributes_read(values: dict[str, object], functions: Iterable[Any]) -> dict[str, object]:
    """Replaces modules, classes and objects of the user's by those of their attributes that functions read, if any."""
    code = [each for body in _bodies(functions) for each in operations(body)]
    names = sorted({name for kind, name in code if kind in ("LOAD_ATTR", "LOAD_METHOD") and name[:2] != "__"})
    found, pending, visited = dict[str, object](), [*values.items()], dict[int, object]()
    while pending:
        path, thing = pending.pop(0)
        if id(thing) in visited:  # objects that know each other have ever more paths
            continue
        known = dict[str, object]()
        for name in names if has_settings(thing) and path.count(".") < 5 else ():
            visited[id(thing)] = thing
            with contextlib.suppress(Exception):  # of a property that cannot be read yet
                known[name] = getattr(thing, name)
        counted, _ = stored(part for name, part in own_attributes(thing) if name != "__init__")
        pending += [(f"{path}.{name}", value) for name, value in known.items() if name not in counted]
        found |= {} if known else {path: thing}
    return found


def has_settings(thing: object) -> bool:
    """Returns whether an object is one of the user's that a program may have its constants in."""
    if inspect.ismodule(thing) or isinstance(thing, type):
        return is_users(_place(thing if inspect.ismodule(thing) else sys.modules.get(thing.__module__)))
    of_keras = any(kind.__module__.startswith("keras.") for kind in type(thing).__mro__)
    return isinstance(thing, types.SimpleNamespace | argparse.Namespace) or (is_users_object(thing) and not of_keras)


def _bodies(functions: Iterable[Any]) -> list[types.CodeType]:
    return [thing.__code__ for thing in map(unwrapped, functions) if inspect.isfunction(thing)]


def unwrapped(thing: Any) -> Any:
    """Returns a function without what libraries have wrapped around it; what code of the user's has wrapped stays."""
    own = lambda it: inspect.isfunction(it) and is_own_module(it.__globals__)
    return inspect.unwrap(thing, stop=own)


def stored(functions: Iterable[Any]) -> tuple[set[str], tuple[type, ...]]:
    """Returns the names that functions store, and the classes of containers if they add to some."""
    code = [each for body in _bodies(functions) for each in operations(body)]
    adds = any(kind == "STORE_SUBSCR" or name in _ADDING for kind, name in code)
    return {str(name) for kind, name in code if kind.startswith("STORE")}, (list, dict, set) if adds else ()


@functools.cache
def operations(code: types.CodeType) -> tuple[tuple[str, Any], ...]:
    """Returns what code and the functions within it do: kinds of operations, and the names that they are about."""
    inner = [each for part in filter(inspect.iscode, code.co_consts) for each in operations(part)]
    return *((step.opname, step.argval) for step in dis.get_instructions(code)), *inner


def is_users_object(thing: object) -> bool:
    """Returns whether the class of an object is of a file of the user's, or of a notebook."""
    return is_own(type(thing)) and is_users(_place(sys.modules.get(type(thing).__module__)))


def _place(module: object) -> str:
    return getattr(module, "__file__", None) or ("" if getattr(module, "__name__", "") == "__main__" else os.__file__)


def attributes(thing: object) -> dict[str, Any]:
    """Returns what an object holds by name, also in slots."""
    slots = [name for kind in type(thing).__mro__ for name in vars(kind).get("__slots__", ()) if hasattr(thing, name)]
    return {name: getattr(thing, name) for name in slots} | getattr(thing, "__dict__", {})


def own_attributes(thing: object) -> list[tuple[str, Any]]:
    """Returns the attributes of the user's classes of an object, or of a class and those it derives from, by name."""
    kinds = (thing if isinstance(thing, type) else type(thing)).__mro__
    return [item for kind in kinds if is_own(kind) for item in vars(kind).items()]


def runs_own(roots: Iterable[object]) -> bool:
    """Returns whether objects may run code that is not of the libraries alone."""
    of_function = lambda thing: is_own(thing) or thing.__module__ == "builtins"  # as of exec()
    of_kind = lambda thing: any(map(is_own, (thing if isinstance(thing, type) else type(thing)).__mro__))
    things = (thing for thing in reachable(roots) if not isinstance(thing, _CONTAINERS))
    return any((of_function if inspect.isfunction(thing) else of_kind)(thing) for thing in things)
