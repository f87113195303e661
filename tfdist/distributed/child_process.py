"""Processes that end when the one that started them ends, however it ends. No TensorFlow."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

GRACE_S = 5.0
"""From SIGTERM to SIGKILL: a worker inside TensorFlow's constructor never sees the first."""
_PR_SET_PDEATHSIG = 1


def end_with_the_parent() -> Callable[[], None] | None:
    """Returns what a child does before its program: ask Linux for SIGKILL when this process dies, however it dies."""
    if not sys.platform.startswith("linux"):
        return None
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return ask
