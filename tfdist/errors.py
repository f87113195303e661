"""The two kinds of failure a command tells apart by its exit code."""

import re
import sys


class UserError(Exception):
    """The input or the environment is wrong: one line, exit code 2, no traceback.

    Args:
      what: what is wrong, and what was received.
      fix: what to change; "" where `what` says that already ("must be at least 1, got 0").
    """

    def __init__(self, what: object, fix: str = ""):
        super().__init__(*(what, fix) if fix else (what,))
        self.what, self.fix = str(what), fix

    def __str__(self) -> str:
        return f"{self.what}: {self.fix}" if self.fix else self.what


class TrainingError(Exception):
    """Training itself failed (a loss that is not finite, say): exit code 1."""


class PeerError(TrainingError):
    """Another worker is lost: exit code 1, at once, since the collectives of TensorFlow wait for it at exit too."""


class Interrupted(Exception):  # noqa: N818  an event and no error
    """Some worker was asked to stop, and all of them have, after the same update."""


def one_line(message: object, longest: int | None = None) -> str:
    """Returns an error, or another message that may span lines, as one line; cut after `longest` characters.

    An error that says nothing is named by its type. Of TensorFlow's errors the stacks are left out.
    """
    stack = re.compile(
        r"Graph execution error|Detected at node|Stack trace for op|Traceback \(|  File |\t \[\[\{\{node"
    )
    line = " ".join(" ".join(t for t in str(message).splitlines() if not stack.match(t)).split())[:longest]
    return line or (type(message).__name__ if isinstance(message, BaseException) else "")


def printable(message: object, longest: int = 300) -> str:
    """Returns what another process has sent as one line that is safe on a terminal.

    Control characters, and those that turn the direction of writing, become escapes as Python writes them.
    """
    text = str(message).expandtabs(4)
    cut = text if len(text) <= longest else text[: max(0, longest - 3)] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def shown(message: object, longest: int = 2000) -> str:
    """Returns a message as a line for the terminal of the person who gave what it tells of.

    A value in it may be a whole file, or hold what turns a terminal over. The beginning names what is wrong and the end
    what to change, so what is too long is cut in the middle.
    """
    text = printable(message, longest=sys.maxsize)
    cut, half = len(text) - longest, longest // 2
    return text if cut <= 0 else f"{text[:half]}...[{cut:,} characters]...{text[-half:]}"
