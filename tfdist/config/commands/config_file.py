"""What goes wrong in a person's config file, in one line that names the place. No TensorFlow."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from typing import NoReturn

from tfdist.errors import UserError, one_line


@contextlib.contextmanager
def guarded(path: str) -> Iterator[None]:
    """A context in which that file is run, and can neither end the process nor fail in more than one line.

    Raises:
      UserError: it has failed, or wanted to end the process.
    """
    end, os._exit = os._exit, _end  # which would end the command as if all were done
    try:
        yield
    except (Exception, SystemExit) as error:
        failure, line = _in_file(error, path)
        if failure is None:
            raise
        at = f" ({path}:{line})" if line else ""
        if isinstance(failure, SystemExit):
            raise UserError(
                f"--config={path} ends the program with {failure.code!r}{at}: it must only return an Experiment"
            ) from None
        raise UserError(f"--config={path} cannot be used: {_described(failure)}{at}") from error
    finally:
        os._exit = end


def _end(status: int) -> NoReturn:
    raise SystemExit(status)


def _described(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    return f"{type(error).__name__}: {one_line(next(iter(str(error).splitlines()), ''), 300)}".rstrip(": ")


def _in_file(error: BaseException, path: str) -> tuple[BaseException | None, int | None]:
    """Returns the error that came out of the file, and its line there; (None, None) if it has not to do with it.

    config_flags and absl raise other errors in its place, whose text is a whole traceback.
    """
    here = os.path.realpath(path)
    for failure in _behind(error):
        if isinstance(failure, SyntaxError) and failure.filename and os.path.realpath(failure.filename) == here:
            return failure, failure.lineno
        frames = traceback.extract_tb(failure.__traceback__)
        lines = [f.lineno for f in frames if os.path.realpath(f.filename) == here]
        if lines:
            return failure, lines[-1]
    return None, None


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    """Goes from an error to the one that it was raised for, and so on; the first ones last."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__ or _kept_back(error)
    yield from reversed(chain)


def _kept_back(error: BaseException) -> BaseException | None:
    """Returns the OSError that config_flags keeps until somebody looks at the config."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        with contextlib.suppress(Exception):
            kept = object.__getattribute__(owner, "_error")
            if isinstance(kept, OSError):
                return kept
    return None
