"""A command's work under a strategy that has been started: what fails is told to the other workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from tfdist.errors import TrainingError, UserError

T = TypeVar("T")


def in_touch(peers: Any, work: Callable[[], T]) -> T:
    """Does the work, and lets the other workers know when it fails here.

    Args:
      peers: of the distribution.

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


def _failure(error: BaseException, peers: Any) -> BaseException:
    """What ends the work: an error that TensorFlow raises outside of a call may come from a lost worker."""
    import tensorflow as tf

    from tfdist.engine import step_calls

    if isinstance(error, SystemExit):
        return TrainingError(f"something in the run called sys.exit({error.code!r}): let the training end by itself")
    return step_calls.cause(error, peers) if isinstance(error, tf.errors.OpError) else error
