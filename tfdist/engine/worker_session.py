"""A command's work under a strategy that has been started: signals ask it to stop, failures are told to the others."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from tfdist.errors import TrainingError, UserError

if TYPE_CHECKING:
    from tfdist.distributed.peers import Peers

T = TypeVar("T")


def in_touch(peers: Peers, work: Callable[[], T]) -> T:
    """Does the work, and lets the other workers know when it fails here.

    Args:
      peers: of the distribution.
      work: what to do.

    Raises:
      UserError, TrainingError: what ended the work, in one line.
    """
    try:
        return work()
    except BaseException as error:
        failure = _failure(error, peers)
        reason = str(failure) or type(failure).__name__
        peers.fail(reason, {UserError: 2, KeyboardInterrupt: 130}.get(type(failure), 1))
        if not isinstance(failure, UserError):
            with contextlib.suppress(TrainingError):  # the reason itself may be that nothing can be written
                peers.last_words(reason)
        if failure is error:
            raise
        raise failure from error


def _failure(error: BaseException, peers: Peers) -> BaseException:
    """Returns what ends the work: an error of TensorFlow outside of a call may come from a lost worker."""
    import tensorflow as tf

    from tfdist.engine import call_errors

    if isinstance(error, SystemExit):
        return TrainingError(f"something in the run called sys.exit({error.code!r}): let the training end by itself")
    return call_errors.cause(error, peers) if isinstance(error, tf.errors.OpError) else error


class Signals:
    """A context in which SIGINT, SIGTERM and SIGUSR1 wait for the end of the current call; a second SIGINT does not."""

    def __init__(self):
        self.received = ""
        self._before: dict = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def reason(self) -> str:
        """Returns why the run shall stop, or nothing."""
        return f"stopped by {self.received} after the update in progress" if self.received else ""

    def _receive(self, number: int, frame: object) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
