"""Work that may hang: in processes that end when the one that started them ends, or in threads. No TensorFlow."""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import psutil

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


def run(
    command: Sequence[str],
    limit: float,
    every: float,
    tick: Callable[[float], None],
    ending: signal.Signals = signal.SIGTERM,
    **options: Any,  # of `subprocess.Popen`
) -> int | None:
    """Runs a program to its end and returns its exit code, or None: it may take `limit` seconds; OSError as `answer`.

    `tick` hears every so many seconds how many have passed. A program that has not ended gets `ending` and `GRACE_S`,
    and no process that it has started outlives this function.
    """
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    # Of a session of its own: Ctrl-C reaches this process alone, which ends the program.
    process = subprocess.Popen(command, **streams, **options, start_new_session=True, preexec_fn=end_with_the_parent())
    start = time.monotonic()
    try:
        while (passed := time.monotonic() - start) < limit:
            try:
                return process.wait(min(every, limit - passed))
            except subprocess.TimeoutExpired:
                tick(time.monotonic() - start)
        return None
    finally:
        if process.poll() is None:
            _end(process, ending)


def _end(process: subprocess.Popen, ending: signal.Signals) -> None:
    """Ends a program with all that it started; some of those lead sessions of their own."""
    family = psutil.Process(process.pid).children(recursive=True)
    try:
        process.send_signal(ending)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:  # also after another Ctrl-C
        for relative in family:  # psutil knows a process by its start, too: the number may be another's by now
            with contextlib.suppress(psutil.Error):
                relative.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    psutil.wait_procs(family, timeout=GRACE_S)


def answer(
    command: Sequence[str], timeout: float, text: str = "", **options: Any
) -> subprocess.CompletedProcess[str] | None:
    """Runs a program on an input, such as one that asks a driver; returns None if it does not end in time.

    `options` are those of `subprocess.Popen`. Raises OSError if it cannot start.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE if text else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=end_with_the_parent(),
        **options,
    )
    try:
        out, err = process.communicate(text, timeout)
    except BaseException as error:
        process.kill()
        # A process that waits within a driver cannot be killed; `subprocess.run` would wait for it for ever.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
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
