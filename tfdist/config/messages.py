"""Messages to a person: the logger `tfdist`, whose lines go to standard output. No TensorFlow.

`logging.getLogger("tfdist").setLevel("WARNING")` silences them; a handler added to it gets a copy of each.
"""

import logging
import os
import shlex
import sys
from collections.abc import Iterable

from tfdist.errors import shown

logger = logging.getLogger("tfdist")
aside = logging.getLogger("tfdist.aside")  # progress of any process, on standard error


class _Handler(logging.Handler):
    """Prints a record as `tfdist: line`, at once, to whatever `sys.stdout` or `sys.stderr` is at that moment."""

    def __init__(self, stream: str):
        super().__init__()
        self.stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        lines = record.getMessage().split("\n")  # a summary has several, and what stands in them may be anything
        text = "\n".join(shown(line, 4000) for line in lines)
        print(f"tfdist: {text}", file=getattr(sys, self.stream), flush=True)


def shell(words: Iterable[str]) -> str:
    """Returns words as a line for a shell, which prints as one line whatever they hold."""
    bytewise = lambda word: "".join(f"\\x{byte:02x}" for byte in os.fsencode(word))
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{bytewise(word)}'" for word in words)


def sized(count: float) -> str:
    """Returns a number of bytes as a person reads it."""
    if count >= 1e9:
        return f"{count / 1e9:,.1f} GB"
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


def chief_only(is_chief: bool) -> None:
    """Silences this process unless it is the chief, so that each line appears once in a job of many workers."""
    handler.setLevel(logging.NOTSET if is_chief else logging.CRITICAL + 1)


handler = _Handler("stdout")  # or `stderr`, where standard output is a script's
handler.addFilter(lambda record: record.name != aside.name)
logger.addHandler(handler)
aside.addHandler(_Handler("stderr"))
if logger.level == logging.NOTSET:  # else the user has chosen one before tfdist was loaded
    logger.setLevel(logging.INFO)
# The root logger may be absl's, which would write the line a second time to standard error.
logger.propagate = False
