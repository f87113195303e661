"""A limit on Horovod's start, which waits in C++ for processes that may never come. No TensorFlow."""

from __future__ import annotations

import contextlib
import http.client
import os
import platform
import threading
from collections.abc import Iterator, Mapping

from tfdist.distributed import standard_error

_LONGER_S = 30.0
"""How much longer Horovod itself may wait, which ends a process by an uncaught exception of C++ after 30 s."""
_ASK_S = 2.0


@contextlib.contextmanager
def bounded(limit: float) -> Iterator[None]:
    """Ends this process with a line that says who is missing, and exit code 2, if the start takes longer.

    Args:
      limit: seconds.
    """
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", f"{limit + _LONGER_S:.0f}")
    started = threading.Event()
    watch = threading.Thread(target=_watch, args=(started, limit), name="tfdist horovod start", daemon=True)
    watch.start()
    try:
        yield
    finally:
        started.set()


def _watch(started: threading.Event, limit: float) -> None:
    if started.wait(limit):
        return
    missing = _missing(os.environ)
    if started.is_set():
        return
    # The main thread is in C++, where no exception reaches it.
    standard_error.write(f"tfdist: error: {_line(missing, limit, os.environ)}\n")
    os._exit(2)


def _line(missing: list[int], limit: float, environ: Mapping[str, str]) -> str:
    here = f" ({platform.node()})" if environ.get("HOROVOD_LOCAL_SIZE") == environ.get("HOROVOD_SIZE") else ""
    who = ", ".join(f"worker {rank}{here}" for rank in missing)
    what = f"{who} of {environ.get('HOROVOD_SIZE')} has not come" if missing else "Horovod has not started"
    return f"{what} within {limit:g} s: look at the output of the others, or raise --start_timeout"


def _missing(environ: Mapping[str, str]) -> list[int]:
    """Asks horovodrun which processes have not given it their address; none where nobody can be asked."""
    try:
        size = int(environ["HOROVOD_SIZE"])
        address, port = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        return [rank for rank in range(size) if not _has_come(address, port, rank)]
    except (KeyError, ValueError, OSError, http.client.HTTPException):
        return []


def _has_come(address: str, port: int, rank: int) -> bool:
    with contextlib.closing(http.client.HTTPConnection(address, port, timeout=_ASK_S)) as connection:
        connection.request("GET", f"/global/{rank}")  # where each of Gloo's ranks leaves its addresses
        return connection.getresponse().status == http.client.OK
