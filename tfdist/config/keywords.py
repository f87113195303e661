"""Keyword arguments of public functions: misspelt names, and what errors call them."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from absl import flags

from tfdist import config
from tfdist.config import field_syntax, runtime_options
from tfdist.errors import UserError

_FLAG = re.compile(rf"--(?=(?:{'|'.join(runtime_options.names(runtime_options.PlacementOptions))}|check_agreement)\b)")
P = ParamSpec("P")
R = TypeVar("R")


def checked_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function suggest the right name of a misspelt argument, and name arguments as such in its errors."""
    parameters = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> R:
        try:
            for name in kwargs:
                if name not in parameters:
                    known = field_syntax.suggest(config.current_name(name), parameters)
                    raise UserError(f"{function.__name__}() has no option {name!r}{known}")
            return function(*args, **kwargs)
        except UserError as error:
            if not (flags.FLAGS.is_parsed() and "strategy" in flags.FLAGS):  # no command has been given
                error.what, error.fix = (_FLAG.sub("", text) for text in (error.what, error.fix))
            raise

    return wrapper
