"""Experiments and flag files: shipped ones by name, and errors in a person's own in one line. No TensorFlow."""

import ast
import contextlib
import functools
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping

import tfdist
from tfdist.config import field_syntax
from tfdist.errors import UserError, one_line

_KINDS = {"config": ("configs", ".py"), "flagfile": ("flags", ".flags")}  # folder and ending, by flag


@functools.cache
def files(flag: str) -> Mapping[str, pathlib.Path]:
    """Returns the files that come with tfdist, by name: experiments for `config`, flag files for `flagfile`."""
    folder, ending = _KINDS[flag]
    package = pathlib.Path(tfdist.__file__).parent
    # Installed, the folders are inside the package; in a checkout beside it. A setup.cfg beside the package says
    # nothing: `pip install --target .` puts it beside that of another project.
    inside = package / folder
    parent = inside if inside.is_dir() else package.parent / folder
    return {path.stem: path for path in sorted(parent.glob(f"*{ending}"))}


def path_of(flag: str, value: str) -> str:
    """Returns the path for a value of `--config` or `--flagfile`; after a colon is what `get_config` is called with."""
    path, colon, rest = value.partition(":") if flag == "config" else (value, "", "")
    if os.path.isfile(path):
        return value
    known = files(flag)
    if path in known:
        return f"{known[path]}{colon}{rest}"
    kind = "a Python file with get_config()" if flag == "config" else "a file with a flag on each line"
    complaint = f"--{flag}={path} does not exist: give the path of {kind}"
    if re.fullmatch(r"\w+", path) and known:
        complaint += f", or one that comes with tfdist{field_syntax.suggest(path, tuple(known))}"
    raise UserError(complaint)


def fill_in(argv: list[str]) -> None:
    """Writes paths for the names of experiments and flag files, in place. Raises UserError: a file does not exist."""
    for i, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        flag = name.lstrip("-")
        if not name.startswith("-") or flag not in _KINDS:
            continue
        if equals:
            argv[i] = f"{name}={path_of(flag, value)}"
        elif i + 1 < len(argv):
            argv[i + 1] = path_of(flag, argv[i + 1])


def listing() -> str:
    """Returns a line for each experiment and flag file: what it is, and how it is asked for."""

    def first_line(path: pathlib.Path) -> str:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            text = ast.get_docstring(ast.parse(text)) or ""
        return text.lstrip("# ").splitlines()[0].rstrip(".:") if text.strip() else ""

    parts = []
    for flag, heading in (("config", "Experiments:"), ("flagfile", "Flag files:")):
        lines = (f"  --{flag}={name}\n      {first_line(path)}" for name, path in files(flag).items())
        parts.append("\n".join([heading, *lines]))
    return "\n\n".join(parts)


@contextlib.contextmanager
def guarded(path: str) -> Iterator[None]:
    """A context in which that file is run, and can neither end the process nor fail in more than one line."""
    end = os._exit  # which would end the command as if all were done
    os._exit = sys.exit  # type: ignore[assignment]
    try:
        yield
    except (Exception, SystemExit) as error:
        failure, line = _in_file(error, path)
        if failure is None:
            raise
        at = f" ({path}:{line})" if line else ""
        if isinstance(failure, SystemExit):
            what = f"--config={path} ends the program with {failure.code!r}{at}: it must only return an Experiment"
            raise UserError(what) from None
        text = failure.msg if isinstance(failure, SyntaxError) else next(iter(str(failure).splitlines()), "")
        why = f"{type(failure).__name__}: {one_line(text, 300)}".rstrip(": ")
        raise UserError(f"--config={path} cannot be used: {why}{at}") from error
    finally:
        os._exit = end


def _in_file(error: BaseException, path: str) -> tuple[BaseException | None, int | None]:
    """Returns the error that came out of the file, and its line there; (None, None) if it has not to do with it.

    config_flags and absl raise other errors in its place, whose text is a whole traceback.
    """
    here = os.path.realpath(path)
    chain: list[BaseException] = []  # from the error to the one that it was raised for, and so on
    behind: BaseException | None = error
    while behind is not None and behind not in chain:
        chain.append(behind)
        behind = behind.__cause__ or behind.__context__ or _kept_back(behind)
    for failure in reversed(chain):
        if isinstance(failure, SyntaxError) and failure.filename and os.path.realpath(failure.filename) == here:
            return failure, failure.lineno
        frames = traceback.extract_tb(failure.__traceback__)
        lines = [f.lineno for f in frames if os.path.realpath(f.filename) == here]
        if lines:
            return failure, lines[-1]
    return None, None


def _kept_back(error: BaseException) -> BaseException | None:
    """Returns the OSError that config_flags keeps until somebody looks at the config."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        with contextlib.suppress(Exception):
            kept = object.__getattribute__(owner, "_error")
            if isinstance(kept, OSError):
                return kept
    return None
