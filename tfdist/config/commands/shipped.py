"""Experiments and flag files that come with tfdist, found by name from any folder. No TensorFlow."""

from __future__ import annotations

import ast
import functools
import os
import pathlib
import re
from collections.abc import Mapping

import tfdist
from tfdist.config import field_syntax
from tfdist.errors import UserError

_KINDS = {"config": ("configs", ".py"), "flagfile": ("flags", ".flags")}
"""Folder and ending, by the flag that takes such a file."""


@functools.cache
def files(flag: str) -> Mapping[str, pathlib.Path]:
    """Returns the files that come with tfdist, by name.

    Args:
      flag: `config` for experiments, `flagfile` for flag files.
    """
    folder, ending = _KINDS[flag]
    package = pathlib.Path(tfdist.__file__).parent
    # Installed, the folders are inside the package; in a checkout beside it. A setup.cfg beside the package says
    # nothing: `pip install --target .` puts it beside that of another project.
    inside = package / folder
    parent = inside if inside.is_dir() else package.parent / folder
    return {path.stem: path for path in sorted(parent.glob(f"*{ending}"))}


def path_of(flag: str, value: str) -> str:
    """Returns the path that the value of a flag means: that of a file, or of one that comes with tfdist.

    Args:
      flag: `config` or `flagfile`.
      value: a path, or a name such as `digits_mlp`; after a colon what `get_config` is called with.

    Raises:
      UserError: there is no such file, and none of that name comes with tfdist.
    """
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
    """Writes paths for the names of experiments and flag files, in place.

    Raises:
      UserError: a file does not exist.
    """
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
    lines = ["Experiments:"]
    for flag, heading in (("config", None), ("flagfile", "Flag files:")):
        lines += [] if heading is None else ["", heading]
        for name, path in files(flag).items():
            lines += [f"  --{flag}={name}", f"      {_first_line(path)}"]
    return "\n".join(lines)


def _first_line(path: pathlib.Path) -> str:
    """Returns what the file says of itself in its first line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    return text.lstrip("# ").splitlines()[0].rstrip(".:") if text.strip() else ""
