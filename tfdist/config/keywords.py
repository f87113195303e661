"""Keyword arguments of public functions: misspelt names, and deprecated ones."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from tfdist import config
from tfdist.config import field_syntax
from tfdist.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")


def checked_keywords(**former_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function suggest the right name of a misspelt argument, and accept deprecated names (new by former)."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> R:
            for name in kwargs:
                if name not in parameters and name not in former_names:
                    known = field_syntax.suggest(name, tuple(parameters))
                    raise UserError(f"{function.__name__}() has no option {name!r}{known}")
            for former in [former for former in former_names if former in kwargs]:
                kwargs |= dict(zip(parameters, args))
                args, name, value = (), former_names[former], kwargs.pop(former)
                default = parameters[name].default
                if default is None and value is not None and kwargs.get(name) is not None:
                    raise UserError(f"{former} is the former name of {name}", "give one of them")
                kwargs[name] = config.renamed(name, kwargs.get(name, default), former, value, default)
            return function(*args, **kwargs)

        return wrapper

    return decorate
