"""Keyword arguments of public functions: misspelt names and former ones; and the tracebacks of their errors."""

import functools
import inspect
import os
import re
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


def checked_keywords(**former_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function suggest the right name of a misspelt argument, and accept former names (new by former)."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> R:
            for name in kwargs:
                if name not in parameters and name not in former_names:
                    known = field_syntax.suggest(config.current_name(name), tuple(parameters))
                    raise UserError(f"{function.__name__}() has no option {name!r}{known}")
            for former in [former for former in former_names if former in kwargs]:
                kwargs |= dict(zip(parameters, args))
                args, name, value = (), former_names[former], kwargs.pop(former)
                if value is not None and kwargs.get(name) is not None:
                    raise UserError(f"{former} is the former name of {name}", "give one of them")
                kwargs[name] = kwargs.get(name) if value is None else value
            try:
                return function(*args, **kwargs)
            except UserError as error:
                if not (flags.FLAGS.is_parsed() and "strategy" in flags.FLAGS):  # no command has been given
                    error.what, error.fix = (_FLAG.sub("", text) for text in (error.what, error.fix))
                if os.environ.get("TFDIST_TRACEBACK") == "full":
                    raise
                raise error.with_traceback(_of_user(error.__traceback__)) from None

        return wrapper

    return decorate


def _of_user(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without the frames of tfdist, Keras, which calls it in optree, and TensorFlow."""
    if trace is None:
        return None
    below, module = _of_user(trace.tb_next), str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]
    own = module in ("tfdist", "keras", "optree", "tensorflow")
    return below if own else TracebackType(below, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
