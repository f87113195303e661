"""Keyword arguments of public functions: misspelt names, and the tracebacks of their errors."""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from absl import flags

from tfdist import config
from tfdist.config import field_syntax, runtime_options
from tfdist.errors import UserError

_FLAG = re.compile(rf"--(?=(?:{'|'.join(runtime_options.names(runtime_options.PlacementOptions))}|check_agreement)\b)")
P = ParamSpec("P")
R = TypeVar("R")


def checked_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function suggest the right name of a misspelt argument, and name the user's lines alone in its errors."""
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
            if os.environ.get("TFDIST_TRACEBACK") == "full":
                raise
            error.__traceback__, error.__suppress_context__ = _of_user(error.__traceback__), True
            if sys.version_info >= (3, 11):
                raise  # what is raised by its name has a frame of this function; Python 3.10 would restore all others
            raise error

    return wrapper


def _of_user(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without the frames of tfdist, Keras, which calls it in optree, and TensorFlow."""
    if trace is None:
        return None
    below, module = _of_user(trace.tb_next), str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]
    own = module in ("tfdist", "keras", "optree", "tensorflow")
    return below if own else TracebackType(below, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
