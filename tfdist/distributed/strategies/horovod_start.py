"""The start of Horovod, whose C++ side waits for processes that may never come, and then aborts. No TensorFlow.

So the workers wait for each other here first, where it can be said who is missing: through the store of horovodrun, in
which Gloo's ranks leave their addresses, too. `mpirun` has none.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping

from tfdist.cluster import schema, standard_error, wire
from tfdist.errors import UserError, one_line, printable

_UNREACHABLE_S = 15.0
"""horovodrun is lost if it has not answered for so long."""
_ASK_S = 3.0
_PAUSE_S = (0.05, 1.0)
"""Between two questions: at first, and at most, since horovodrun answers all workers of a job in one process."""
_GRACE_S = 5.0
"""How much longer than the chief the others wait, which hear from it who is missing."""
_ALL = "all"


def meet(limit: float, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Waits until all workers that horovodrun has started are there.

    Args:
      limit: seconds.
      environ: variables of horovodrun.

    Returns:
      The host name of each worker by rank; nothing where there is no horovodrun.

    Raises:
      UserError: one has not come, or horovodrun cannot be reached.
    """
    try:
        rank, size = int(environ["HOROVOD_RANK"]), int(environ["HOROVOD_SIZE"])
        store = _Store(environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    except (KeyError, ValueError):
        return ()
    here = f" ({platform.node()})" if environ.get("HOROVOD_LOCAL_SIZE") == environ["HOROVOD_SIZE"] else ""
    store.put(f"rank-{rank}", platform.node())
    if rank:
        return _hear(store, size, limit, here)
    return _gather(store, size, limit, here)


def _gather(store: _Store, size: int, limit: float, here: str) -> tuple[str, ...]:
    """Waits for all, and tells them so, or who is missing."""
    hosts: dict[int, str] = {}
    for left in _pauses(limit):
        for rank in set(range(size)) - set(hosts):
            host = store.get(f"rank-{rank}")
            if host is not None:
                hosts[rank] = printable(host, 253)
        if len(hosts) == size or not left:
            break
    missing = ", ".join(f"worker {r}{here}" for r in range(size) if r not in hosts)
    if missing:
        problem = f"{missing} of {size} has not come within {limit:g} s: look at its output, or raise --start_timeout"
        store.put(_ALL, json.dumps({"problem": problem}))
        raise UserError(problem)
    store.put(_ALL, json.dumps({"hosts": [hosts[r] for r in range(size)]}))
    return tuple(hosts[r] for r in range(size))


def _hear(store: _Store, size: int, limit: float, here: str) -> tuple[str, ...]:
    """Waits for what the chief has found."""
    text = None
    for left in _pauses(limit + _GRACE_S):
        text = store.get(_ALL)
        if text is not None or not left:
            break
    if text is None:
        there = store.get("rank-0") is not None
        who = f"worker 0{here} is there, but not all {size} workers" if there else f"worker 0{here} of {size}"
        verb = "have" if there else "has not"
        raise UserError(f"{who} {verb} come within {limit:g} s: look at its output, or raise --start_timeout")
    try:
        hosts = schema.each(schema.line(253), size, size)
        read = schema.named(hosts=schema.record(hosts=hosts), problem=schema.record(problem=schema.line(4000)))
        found = read(json.loads(text))
    except (ValueError, RecursionError, wire.WireError):  # the store takes what anybody gives it
        return ()
    if "problem" in found:
        raise UserError(found["problem"])
    return tuple(found["hosts"])


def _pauses(limit: float) -> Iterator[bool]:
    """Gives turns with growing pauses between them; the value is False in the last one, so many seconds later."""
    deadline, pause = time.monotonic() + limit, _PAUSE_S[0]
    while (left := deadline - time.monotonic()) > 0:
        yield True
        time.sleep(min(pause, left))
        pause = min(2 * pause, _PAUSE_S[1])
    yield False


class _Store:
    """Texts that horovodrun keeps for its workers."""

    def __init__(self, address: str, port: int):
        self._address, self._port = address, port

    def put(self, key: str, text: str) -> None:
        """Leaves a text for the others."""
        self._ask("PUT", key, text.encode())

    def get(self, key: str) -> str | None:
        """Returns what somebody has left; None if nobody has."""
        status, content = self._ask("GET", key)
        return content.decode(errors="replace") if status == http.client.OK else None

    def _ask(self, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        begun = time.monotonic()
        while True:
            try:
                with contextlib.closing(http.client.HTTPConnection(self._address, self._port, timeout=_ASK_S)) as link:
                    link.request(method, f"/tfdist/{key}", body)
                    answer = link.getresponse()
                    return answer.status, answer.read()
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() - begun >= _UNREACHABLE_S:
                    raise UserError(
                        f"horovodrun cannot be reached at {self._address}:{self._port} "
                        f"({one_line(error, 200) or type(error).__name__}): look at its output, and at the network"
                    ) from None
            time.sleep(_PAUSE_S[1])


@contextlib.contextmanager
def bounded(limit: float) -> Iterator[None]:
    """Ends this process with a line and exit code 2 if what is done inside, in C++, takes more seconds."""
    started = threading.Event()

    def watch() -> None:
        if not started.wait(limit):
            # The main thread is in C++, where no exception reaches it.
            standard_error.write(
                f"tfdist: error: Horovod has not started within {limit:g} s: look at the output of the other workers, "
                "or raise --start_timeout\n"
            )
            os._exit(2)

    threading.Thread(target=watch, name="tfdist horovod start", daemon=True).start()
    try:
        yield
    finally:
        started.set()
