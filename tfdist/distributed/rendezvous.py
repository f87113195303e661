"""How workers find each other before TensorFlow or Horovod is told about them. No TensorFlow.

`MultiWorkerMirroredStrategy` waits for a missing peer for an hour, holding
Python's lock, and says nothing. So the workers first meet over plain TCP at
the chief's address, and go on only when all are there, agree, and can be reached.
"""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping

from tfdist.distributed import wire
from tfdist.distributed.addresses import join, split
from tfdist.distributed.cluster import Cluster
from tfdist.distributed.peers import Peers
from tfdist.errors import UserError

PATIENCE_S = 5.0
"""Seconds before the first line about who is missing; the next ones follow at three times this."""
LOOK_S = 0.5
"""Seconds between looks whether those who have come are still there."""
_HELLO = {"rank": int, "facts": dict, "address": str, "host": str, "pid": int}
"""What a worker says of itself."""
Say = Callable[[str], None]


def meet(
    cluster: Cluster,
    facts: Mapping[str, str],
    say: Say,
    start_timeout: float = 120.0,
    stall_timeout: float = 600.0,
) -> Peers:
    """Waits until all workers of the run are there.

    Args:
      cluster: who this worker is; `master` says where to meet.
      facts: what must be the same everywhere, by name: versions, the experiment.
      say: shows a line to a person.
      start_timeout: seconds to wait for the others.
      stall_timeout: for `Peers`.

    Raises:
      UserError: a worker did not come, is there twice, or differs; or the address cannot be used.
    """
    if cluster.size == 1:
        return Peers(hosts=(platform.node(),))
    if not cluster.master:
        raise UserError(
            f"{cluster.source} does not tell where worker 0 of {cluster.size} is: "
            "set MASTER_ADDR and MASTER_PORT to the same address on all workers"
        )
    facts = {"the number of workers": str(cluster.size), **facts}
    if cluster.addresses:
        facts["the list of workers"] = ", ".join(cluster.addresses)
    meeting = _Meeting(cluster, facts, say, time.monotonic() + start_timeout, start_timeout, stall_timeout)
    return meeting.host() if cluster.rank == 0 else meeting.attend()


class _Meeting:
    def __init__(self, cluster: Cluster, facts: dict, say: Say, deadline: float, start: float, stall: float):
        self._cluster, self._facts, self._say = cluster, facts, say
        self._deadline, self._start, self._stall = deadline, start, stall
        self._next_line = time.monotonic() + PATIENCE_S
        self._me = {"host": platform.node(), "pid": os.getpid()}

    # -- the chief ----------------------------------------------------------

    def host(self) -> Peers:
        cluster = self._cluster
        if cluster.meeting_fd is not None:
            listener = socket.socket(fileno=cluster.meeting_fd)
        else:
            listener = _listen(cluster.master, 0)
        arrivals: queue.Queue = queue.Queue()
        closed = threading.Event()
        threading.Thread(target=self._admit, args=(listener, arrivals, closed), daemon=True).start()
        present: dict[int, tuple[wire.Connection, dict]] = {}
        while len(present) < cluster.size - 1:
            self._wait_for(arrivals, present)
            self._miss(present)
        held = []
        addresses = list(cluster.addresses)
        if addresses:
            self._call_back(present)
            # TensorFlow needs this very port. Connections that are open do not stand in its way, a listener would.
            closed.set()
            _close(listener)
        else:
            socket_here, address = _reserve(listener.getsockname()[0])
            held.append(socket_here)
            addresses = [address, *(present[r][1]["address"] for r in sorted(present))]
            # Whoever comes later is told so, instead of being taken for a worker of TensorFlow.
            taken = f"the run has begun with {cluster.size} workers"
            threading.Thread(target=self._refuse, args=(arrivals, taken), daemon=True).start()
        hosts = (self._me["host"], *(present[r][1]["host"] for r in sorted(present)))
        for connection, _ in present.values():
            _tell(connection, {"welcome": {"addresses": addresses, "hosts": hosts}})  # `Peers` sees who has gone
        connections = {rank: connection for rank, (connection, _) in present.items()}
        return Peers(0, hosts, tuple(addresses), connections, tuple(held), self._start, self._stall)

    def _admit(self, listener: socket.socket, arrivals: queue.Queue, closed: threading.Event) -> None:
        """Shakes hands with everybody at once: one slow stranger must not keep out the workers."""

        def greet(sock: socket.socket) -> None:
            try:
                connection = wire.accept(sock, self._cluster.secret)
                hello = connection.receive(wire.HANDSHAKE_S)
            except wire.WireError:
                sock.close()
                return
            if all(isinstance(hello.get(name), kind) for name, kind in _HELLO.items()):
                arrivals.put((connection, hello))
            else:
                _tell(connection, {"refused": "this is the meeting of a run of tfdist: leave its port alone"})
                connection.close()

        while not closed.is_set():
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=greet, args=(sock,), daemon=True).start()

    def _wait_for(self, arrivals: queue.Queue, present: dict) -> None:
        """Takes in one arrival, or says who is missing."""
        now = time.monotonic()
        missing = [self._name(r) for r in range(1, self._cluster.size) if r not in present]
        who = ", ".join(missing)
        if now >= self._deadline:
            self._refuse_all(
                present,
                f"{who} of {self._cluster.size} has not come within {self._start:.0f} s: "
                "start it, check its address, or raise --start_timeout",
            )
        if now >= self._next_line:
            self._next_line = now + 3 * PATIENCE_S
            self._say(f"waiting for {who} of {self._cluster.size}, {self._deadline - now:.0f} s left")
        try:
            until = min(self._next_line, self._deadline, now + LOOK_S)
            connection, hello = arrivals.get(timeout=max(0.0, until - now))
        except queue.Empty:
            return
        problem = self._problem(hello, present)
        if problem:
            self._refuse_all({**present, None: (connection, hello)}, problem)
        present[hello["rank"]] = (connection, hello)

    def _miss(self, present: dict) -> None:
        """Forgets workers that have gone again; whatever started them may send them back."""
        for rank, (connection, hello) in list(present.items()):
            if not _is_open(connection):
                del present[rank]
                self._say(
                    f"worker {rank} ({hello['host']}, process {hello['pid']}) has gone before all had met: "
                    "look at its output"
                )

    def _problem(self, hello: dict, present: dict) -> str:
        """What is wrong with a worker that has come, in a line, or nothing."""
        rank, where = hello["rank"], f"{hello['host']}, process {hello['pid']}"
        for name, mine in self._facts.items():
            theirs = hello["facts"].get(name, "missing")
            if theirs != mine:
                return (
                    f"worker {rank} ({where}) differs from worker 0 in {name}: {theirs} and {mine}: "
                    "start all workers with the same cluster, experiment and versions"
                )
        before = present.get(rank)
        if before and _is_open(before[0]):
            other = f"{before[1]['host']}, process {before[1]['pid']}"
            return f"worker {rank} is there twice ({other} and {where}): give each worker an index of its own"
        if not 0 < rank < self._cluster.size:
            other = f"{self._me['host']}, process {self._me['pid']}"
            return f"worker {rank} is there twice ({other} and {where}): give each worker an index of its own"
        return ""

    def _call_back(self, present: dict) -> None:
        """Checks that each worker can be reached at its address in the list: TensorFlow would wait for it silently."""
        for rank, (_, hello) in present.items():
            try:
                connection = wire.connect(*split(self._cluster.addresses[rank]), self._cluster.secret)
                answer = connection.receive(wire.HANDSHAKE_S)
                connection.close()
                why = "" if answer == {"rank": rank} else "another worker answers there"
            except wire.WireError as error:
                why = str(error)
            if why:
                self._refuse_all(
                    present,
                    f"worker {rank} ({hello['host']}) cannot be reached at {self._cluster.addresses[rank]} ({why}): "
                    "correct its address in the list, or open that port between the workers",
                )

    def _refuse_all(self, present: dict, problem: str) -> None:
        for connection, _ in present.values():
            _tell(connection, {"refused": problem})
        raise UserError(problem)

    def _refuse(self, arrivals: queue.Queue, problem: str) -> None:
        while True:
            connection, hello = arrivals.get()
            text = f"{problem}, worker {hello['rank']} is one of them: give this one another port or index"
            _tell(connection, {"refused": text})
            connection.close()

    # -- the others ---------------------------------------------------------

    def attend(self) -> Peers:
        cluster = self._cluster
        held = []
        if cluster.addresses:
            listener = _listen(cluster.addresses[cluster.rank], cluster.rank)
            threading.Thread(target=self._answer, args=(listener,), daemon=True).start()
        connection = self._reach()
        address = cluster.addresses[cluster.rank] if cluster.addresses else ""
        if not address:
            sock, address = _reserve(connection.local_host)
            held.append(sock)
        hello = {"rank": cluster.rank, "facts": self._facts, "address": address, **self._me}
        chief = self._name(0)
        try:
            connection.send(hello)
            # The chief mostly gives up first and says why; but it may have started later, or hang.
            answer = connection.receive(max(1.0, self._deadline - time.monotonic()) + 2 * wire.HANDSHAKE_S)
        except wire.SilenceError:
            raise UserError(
                f"{chief} is there, but not all {cluster.size} workers have come within {self._start:.0f} s: "
                "its output says who is missing; start that one, or raise --start_timeout"
            ) from None
        except wire.WireError as error:
            raise UserError(f"{chief} ended before all workers had met ({error}): look at its output") from None
        if "welcome" not in answer:
            raise UserError(str(answer.get("refused", f"{chief} gave no reason")))
        if cluster.addresses:
            _close(listener)
        welcome = answer["welcome"]
        return Peers(
            cluster.rank,
            tuple(welcome["hosts"]),
            tuple(welcome["addresses"]),
            {0: connection},
            tuple(held),
            self._start,
            self._stall,
        )

    def _reach(self) -> wire.Connection:
        """A connection to the chief, which may start later than this worker."""
        host, port = split(self._cluster.master)
        chief = self._name(0)
        while True:
            try:
                left = self._deadline - time.monotonic()
                return wire.connect(host, port, self._cluster.secret, min(max(left, 1.0), wire.HANDSHAKE_S))
            except wire.WireError as error:
                why = str(error)
            now = time.monotonic()
            if "secret" in why or "protocol" in why:
                raise UserError(
                    f"{chief} is not what answers at {host}:{port} ({why}): another program or run has this port, "
                    "choose a free one"
                )
            if now >= self._deadline:
                raise UserError(
                    f"{chief} has not come within {self._start:.0f} s ({why}): "
                    "start it, check its address, or raise --start_timeout"
                )
            if now >= self._next_line:
                self._next_line = now + 3 * PATIENCE_S
                self._say(f"waiting for {chief}, {self._deadline - now:.0f} s left ({why})")
            time.sleep(0.1)

    def _answer(self, listener: socket.socket) -> None:
        """Says who is here to the chief's call back."""

        def answer(sock: socket.socket) -> None:
            with contextlib.suppress(wire.WireError):
                wire.accept(sock, self._cluster.secret).send({"rank": self._cluster.rank})

        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(sock,), daemon=True).start()

    def _name(self, rank: int) -> str:
        addresses = self._cluster.addresses
        at = addresses[rank] if addresses else self._cluster.master if rank == 0 else ""
        return f"worker {rank}" + (f" ({at})" if at else "")


def _listen(address: str, rank: int) -> socket.socket:
    host, port = split(address)
    try:
        return wire.listen(host, port)
    except OSError as error:
        raise UserError(
            f"worker {rank} cannot listen at {address} ({(error.strerror or str(error)).lower()}): "
            "it must be a free port on an address of this machine"
        ) from None


def _close(listener: socket.socket) -> None:
    """Frees its port at once: the thread that waits in `accept` would hold it until somebody came."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _reserve(host: str) -> tuple[socket.socket, str]:
    """A free port that nobody else is given until TensorFlow binds it: bound, but not listening."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, 0))
    return sock, join(host, sock.getsockname()[1])


def _is_open(connection: wire.Connection) -> bool:
    """Whether the other side is still there: a worker that was restarted may take its own place again."""
    try:
        sock = socket.socket(fileno=os.dup(connection.fileno()))
        with sock:
            sock.setblocking(False)
            return sock.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _tell(connection: wire.Connection, message: dict) -> None:
    try:
        connection.send(message)
    except wire.WireError:
        return
