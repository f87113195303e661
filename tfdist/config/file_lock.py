"""A lock on a file that lets one process at a time work; the kernel drops the lock of a process that dies."""

from __future__ import annotations

import contextlib
import fcntl
import pathlib
import time
from collections.abc import Iterator

from tfdist.config.messages import logger
from tfdist.errors import UserError


@contextlib.contextmanager
def alone(path: pathlib.Path, who: str, limit: float) -> Iterator[None]:
    """Waits until no other process holds the lock, says so once, and holds it for the length of the context.

    Args:
      path: of the file, which is made.
      who: another one that may hold it, for a person: `another build of Horovod`.
      limit: seconds to wait at most.

    Raises:
      UserError: it is held for longer.
      OSError: the file cannot be written.
    """
    with path.open("w") as file:
        until, told = time.monotonic() + limit, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise UserError(f"{who} holds {path} for {limit:g} s: end it and run again") from None
            if not told:
                told = True
                logger.info(f"{who} is running: waiting for it")
            time.sleep(0.2)
        yield
