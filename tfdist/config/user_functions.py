"""The user's own functions: `package.module:function`, found and called with errors that name the field."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from tfdist.errors import UserError

Result = TypeVar("Result")


def as_now(reference: str) -> str:
    """Returns a data set of tfdist, a module or a file, where it is now; run folders of 0.1.0 have the old place."""
    moved = reference.replace("tfdist.datasets.", "tfdist.data.datasets.")
    return moved.replace("/tfdist/datasets/", "/tfdist/data/datasets/")


def resolve(field: str, reference: str, called: bool = True) -> Callable:
    """Returns the function, or any object unless `called`, of `package.module:function`, also in the working folder."""
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
