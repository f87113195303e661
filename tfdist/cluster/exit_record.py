"""What a worker tells its launcher of why it ended: which other worker it has lost. No TensorFlow.

The launcher shows the cause of a failure and not its consequences. It keeps the record in memory, under a path that any
descendant can write to: a shell or another program may stand between it and the worker.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import NamedTuple

from tfdist.cluster import schema
from tfdist.cluster.env_vars import EXIT_RECORD
from tfdist.cluster.wire import WireError

_NAME = "tfdist-exit-record"
_LONGEST = 4000


class LostWorker(NamedTuple):
    """Another worker, because of which one ended."""

    rank: int
    """-1 if it is not known which one."""
    why: str
    """Follows its name in a line: its host, and what was seen of it."""


_READ = schema.record(rank=schema.whole(-1), why=schema.line(_LONGEST))


def leave(lost: LostWorker) -> None:
    """Tells the launcher, if there is one, in case this process fails; the last word counts."""
    path = os.environ.get(EXIT_RECORD, "")
    with contextlib.suppress(OSError):
        if os.readlink(path).startswith(f"/memfd:{_NAME}"):  # the launcher may be gone, and its number another's
            with open(path, "wb") as file:
                file.write(json.dumps(lost._asdict()).encode())


class ExitRecord:
    """A launcher's place for what one worker leaves."""

    def __init__(self):
        self._fd = os.memfd_create(_NAME)
        self.environ = {EXIT_RECORD: f"/proc/{os.getpid()}/fd/{self._fd}"}
        """What the worker must be given."""

    def read(self) -> LostWorker | None:
        """Returns what the worker has left, if anything, and gives the memory back."""
        try:
            return LostWorker(**_READ(json.loads(os.pread(self._fd, 2 * _LONGEST, 0))))
        except (ValueError, RecursionError, WireError):
            return None
        finally:
            os.close(self._fd)
