"""Work that may hang: in processes that end when the one that started them ends, or in threads. No TensorFlow."""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
GRACE_S = 5.0  # from SIGTERM to SIGKILL: a worker inside TensorFlow's constructor never sees the first
_PR_SET_PDEATHSIG = 1
_KILL_S = 1.0  # seconds until a process that was killed counts as one that cannot be


def end_with_the_parent() -> Callable[[], None]:
    """Returns what a child does before its program: ask Linux for SIGKILL when this process dies, however it dies."""
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # It died in between. Linux has nothing earlier to ask: a child that was stopped before this, and whose parent
        # was killed then, can end only when somebody lets it go on.
        if os.getppid() != parent:
            os._exit(1)

    return ask


def answer(
    command: Sequence[str], timeout: float, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Runs a program that asks a driver; returns None if it does not end in time; OSError if it cannot start."""
    process = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=end_with_the_parent(),
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        # A process that waits within a driver cannot be killed; `subprocess.run` would wait for it for ever.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)
        return None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def later(work: Callable[[], T]) -> Future[T]:
    """Begins some work. Not in a pool, which would wait at exit for a thread that hangs in a system call."""
    future: Future[T] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # belongs to those who ask for the result
            future.set_exception(error)

    threading.Thread(target=do, daemon=True).start()
    return future
