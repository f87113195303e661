"""`--help` of commands with absl flags, and the fields of an experiment for it and docs/fields.md. No TensorFlow."""

import ast
import dataclasses
import functools
import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import NamedTuple

from absl import flags

from tfdist import config as definition

ASKED = frozenset(f"{dashes}{name}" for dashes in ("-", "--") for name in ("help", "helpshort", "?", "h"))
FIRST = ("config", "strategy", "devices", "workdir", "resume", "dry_run")  # flags that most people need


def is_asked(argv: list[str]) -> bool:
    return bool(ASKED.intersection(argv))


def page(names: Iterable[str], asked_for: definition.Experiment | None) -> str:
    """Returns the help of the running command: its flags of these names, and the fields of an experiment, if any."""
    width = max(40, min(shutil.get_terminal_size().columns, 80))
    fill = functools.partial(textwrap.fill, width=width, break_on_hyphens=False)

    def described(names: list[str]) -> str:
        lines = []
        for flag in (flags.FLAGS[name] for name in names):
            text = f"--{'[no]' * flag.boolean}{flag.name}: {flag.help}"
            if not (flag.default in (None, "", False, []) or flag.name == "config"):
                text += f" (default {str(flag.default_as_str).strip(chr(39))})"
            lines.append(fill(text, initial_indent="  ", subsequent_indent="      "))
        return "\n".join(lines)

    defined = sorted(name for name in set(names) if name in flags.FLAGS)
    about = str(sys.modules["__main__"].__doc__ or "").strip().split("\n\n")
    parts = [text if text.startswith(" ") else fill(text) for text in about]  # indented ones are commands
    parts += ["Flags:", described(sorted(defined, key=lambda name: name not in FIRST))]
    if asked_for is not None:
        lines, indent = [], " " * 6
        for field in fields(asked_for):
            lines.append(f"  --{field.name}: {field.kind}, {field.value}")
            lines.append(fill(field.meaning.replace("`", ""), initial_indent=indent, subsequent_indent=indent))
        parts += ["Fields of this experiment:", "\n".join(lines)]
    elif "config" in defined:
        parts.append(fill("--config.train.epochs=3 and the like set fields: --config=NAME --help lists them all."))
    return "\n\n".join(parts)


_LISTS = {"`MODELS`": definition.MODELS, "`APPLICATIONS`": ("a network of keras.applications",)}


class FieldDoc(NamedTuple):
    name: str  # on the command line, without dashes: `config.train.epochs`
    kind: str  # its type, as Python writes it
    value: str  # its value here; that of the default experiment where no other is looked at
    meaning: str  # in a sentence or more, on one line


@functools.cache
def _meanings() -> dict[tuple[str, str], str]:
    """Returns the docstrings of the fields, by class and field."""
    found = {}
    for owner in ast.parse(inspect.getsource(definition)).body:
        if not isinstance(owner, ast.ClassDef):
            continue
        for field, text in zip(owner.body, owner.body[1:]):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[owner.name, field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def fields(owner: object, prefix: str = "config") -> list[FieldDoc]:
    """Returns all fields of an experiment, or a group of it, with their values, in the order of their definition."""
    found = []
    for field in dataclasses.fields(owner):  # type: ignore[arg-type]
        value, name = getattr(owner, field.name), f"{prefix}.{field.name}"
        if dataclasses.is_dataclass(value):
            found += fields(value, name)
            continue
        meaning = _meanings().get((type(owner).__name__, field.name), "")
        for listed, names in _LISTS.items():
            meaning = meaning.replace(listed, ", ".join(names))
        kind = field.type.__name__ if isinstance(field.type, type) else str(field.type)
        found.append(FieldDoc(name, kind, repr(value) if isinstance(value, str) else str(value), meaning))
    return found
