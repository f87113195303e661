"""Runs a command's work under a started strategy: signals ask it to stop, and other workers learn of failures."""

import contextlib
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

from tfdist.cluster.peers import Peers
from tfdist.distributed.shared_memory_sum import LostWorkerError
from tfdist.errors import TrainingError, UserError

T = TypeVar("T")
_SENT: list[mmap.mmap] = []
"""Memory that forked children share: not zero once this process has sent a signal itself, as `terminate` does."""


def reporting_failures(peers: Peers, work: Callable[[], T]) -> T:
    """Runs the work; an error, in one line, is reported to the other workers and raised."""
    process = os.getpid()
    try:
        return work()
    except BaseException as error:
        if os.getpid() != process:
            _end_child(error)
        failure = _failure(error, peers)
        reason = str(failure) or type(failure).__name__
        peers.fail(reason, {UserError: 2, KeyboardInterrupt: 130}.get(type(failure), 1))
        if not isinstance(failure, UserError):
            with contextlib.suppress(TrainingError):  # the reason itself may be that nothing can be written
                peers.watch.last_words(reason)
        if failure is error:
            raise
        raise failure from error


def _end_child(error: BaseException) -> NoReturn:
    """Ends a child that code of the user has forked, after its sys.exit or an error.

    What follows is the parent's: its report, its files, and the end of TensorFlow, whose threads a child has not.
    """
    status = error.code if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
    code = 0 if status is None else status & 0xFF if isinstance(status, int) else 1
    with contextlib.suppress(Exception):
        if isinstance(status, str):
            print(status, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _failure(error: BaseException, peers: Peers) -> BaseException:
    """Returns the error that ends the work: one of TensorFlow outside of a call may come from a lost worker."""
    import tensorflow as tf

    from tfdist.step import step_calls

    if isinstance(error, SystemExit):
        return TrainingError(f"something in the run called sys.exit({error.code!r}): let the training end by itself")
    return step_calls.cause(error, peers) if isinstance(error, (tf.errors.OpError, LostWorkerError)) else error


class Signals:
    """A context in which SIGINT, SIGTERM and SIGUSR1 wait for the end of the current call; a second SIGINT does not.

    Children that are forked within, such as a pool of the data's, inherit the handlers. The first signal to the whole
    process group, as `timeout` and Slurm send it, lets them go on, since the update in progress may need them. Any
    other ends them: one of their parent's above all, which waits for their end after it.
    """

    def __init__(self):
        self.received = ""
        self._process = os.getpid()
        self._sent = mmap.mmap(-1, 1)
        self._signaled_child = 0  # process id of the child that has had its first signal
        self._before: dict = {}

    def __enter__(self) -> "Signals":
        if not _SENT:

            def see_kill(event: str, arguments: tuple) -> None:
                if event in ("os.kill", "os.killpg"):
                    for page in _SENT:
                        page[0] = 1

            sys.addaudithook(see_kill)
        _SENT.append(self._sent)
        main = threading.current_thread() is threading.main_thread()  # others cannot receive any
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) if main else ():
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def reason(self) -> str:
        """Returns why the run must stop, or an empty string."""
        return f"stopped by {self.received} after the update in progress" if self.received else ""

    def _receive(self, number: int, frame: object) -> None:
        orphaned = os.getppid() != self._process  # of a child
        if os.getpid() == self._process:
            if self.received and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.received = signal.Signals(number).name
        elif not (self._sent[0] or self._signaled_child == os.getpid() or orphaned):
            self._signaled_child = os.getpid()
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)  # os.kill would be seen, and end the other children
