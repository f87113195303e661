"""What `--help` prints for a command with absl flags: the ones that most people need first. No TensorFlow."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable

from absl import flags

from tfdist.config import experiment
from tfdist.config.commands import field_docs

ASKED = frozenset(f"{dashes}{name}" for dashes in ("-", "--") for name in ("help", "helpshort", "?", "h"))
FIRST = ("config", "strategy", "devices", "workdir", "resume", "dry_run")
"""What most people need."""


def is_asked(argv: list[str]) -> bool:
    """Tells whether a command line asks for help."""
    return bool(ASKED.intersection(argv))


def page(names: Iterable[str], asked_for: experiment.Experiment | None) -> str:
    """Returns the help of the command that runs.

    Args:
      names: of its flags.
      asked_for: the experiment whose fields are listed, too; None for none.
    """
    width = max(40, min(shutil.get_terminal_size().columns, 80))
    there = [name for name in dict.fromkeys(names) if name in flags.FLAGS]
    first = [name for name in FIRST if name in there]
    rest = sorted(set(there) - set(first))
    parts = [str(sys.modules["__main__"].__doc__ or "").strip()]
    takes_config = "config" in there
    if takes_config and len(first) > 3:
        parts += ["What most people need:", _described(first, width), "More flags:", _described(rest, width)]
    else:
        parts += ["Flags:", _described(sorted(there), width)]
    if asked_for is not None:
        parts += ["Fields of this experiment:", field_docs.as_help(asked_for, width)]
    elif takes_config:
        hint = "--config.train.epochs=3 and the like set fields of the experiment: --config=NAME --help lists them with"
        parts.append(textwrap.fill(f"{hint} their values.", width))
    return "\n\n".join(parts)


def _described(names: list[str], width: int) -> str:
    return "\n".join(_flag(flags.FLAGS[name], width) for name in names)


def _flag(flag: flags.Flag, width: int) -> str:
    name = f"[no]{flag.name}" if flag.boolean else flag.name
    text = f"--{name}: {flag.help}"
    if not (flag.default in (None, "", False) or flag.name == "config"):
        text += f" (default {str(flag.default_as_str).strip(chr(39))})"
    return textwrap.fill(text, width, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
