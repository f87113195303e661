"""Why a worker ended, reported to its launcher: its own error, or the worker that it has lost. No TensorFlow.

The launcher shows the cause of a failure and not its consequences. It keeps the record in memory, under a path that any
descendant can write to: a shell or another program may stand between it and the worker.
"""

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

    rank: int  # -1 if unknown
    why: str  # follows its name in a line: its host, and how it was lost


_LINE = schema.line(_LONGEST)
_READ = schema.named(
    error=schema.record(error=_LINE), lost=schema.record(lost=schema.record(rank=schema.whole(-1), why=_LINE))
)


def leave(report: LostWorker | str) -> None:
    """Tells the launcher, if there is one, why this process is about to fail: an error of its own or a lost worker."""
    path = os.environ.get(EXIT_RECORD, "")
    record = {"error": report} if isinstance(report, str) else {"lost": report._asdict()}
    with contextlib.suppress(OSError):
        if os.readlink(path).startswith(f"/memfd:{_NAME}"):  # the launcher may be gone, and its number another's
            with open(path, "wb") as file:
                file.write(json.dumps(record).encode())


class ExitRecord:
    """A launcher's place for the report of one worker."""

    def __init__(self):
        self._fd = os.memfd_create(_NAME)
        self.environ = {EXIT_RECORD: f"/proc/{os.getpid()}/fd/{self._fd}"}  # the worker's environment must include it

    def read(self) -> LostWorker | str:
        """Returns what the worker has reported, "" if nothing, and frees the memory."""
        try:
            record = _READ(json.loads(os.pread(self._fd, 4 * _LONGEST, 0)))
        except (ValueError, RecursionError, WireError):
            return ""
        finally:
            os.close(self._fd)
        return record["error"] if "error" in record else LostWorker(**record["lost"])
