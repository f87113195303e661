"""How the processes of a job find each other: workers register with worker 0, launchers with node 0. No TensorFlow.

In `meet` all workers must be there, agree, and be reachable before TensorFlow starts, since
`MultiWorkerMirroredStrategy` waits for a missing peer for an hour, holding Python's lock, and says nothing.
"""

import math
import os
import platform
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

from tfdist import __version__
from tfdist.cluster import exit_record, schema, wire
from tfdist.cluster.addresses import join, split
from tfdist.cluster.discovery import Cluster
from tfdist.cluster.peers import Peers
from tfdist.config.messages import aside
from tfdist.errors import UserError, printable

RETRY_S = 0.1  # seconds between two attempts to connect
PATIENCE_S = 5.0  # seconds before a worker's first line about who is missing
REPEAT_S = 15.0  # seconds between such lines
CHECK_S = 0.5  # seconds between checks that registered workers are still connected
_MOST_REJECTIONS = 20  # lines about rejected connections, after which there are no more
T = TypeVar("T")


def _address(value: object) -> str:
    """Reads `host:port`, or an empty text."""
    try:
        return "" if value == "" else join(*split(schema.text(300)(value)))
    except UserError:
        raise wire.WireError("it sent no address") from None


_HOST = schema.line(253)
_LINE = schema.line(4000)
MEMBER = schema.record(
    kind=schema.one_of("worker", "node"),
    rank=schema.whole(),
    facts=schema.table(schema.anything),
    host=_HOST,
    pid=schema.whole(),
    address=_address,
    nproc=schema.whole(1, 100_000),
)
REFUSED = schema.record(refused=_LINE, fix=_LINE)


def answer_to_worker(size: int) -> schema.Reader:
    """Returns the reader for the chief's answer to one of `size` workers."""
    places = {"addresses": schema.each(_address, size, size), "hosts": schema.each(_HOST, size, size)}
    return schema.named(
        welcome=schema.record(welcome=schema.record(**places)),
        missing=schema.record(missing=schema.whole(), refused=_LINE, fix=_LINE),
        refused=REFUSED,
    )


ANSWER_TO_NODE = schema.named(welcome=schema.record(welcome=_HOST), refused=REFUSED)


class Member(NamedTuple):
    """What a worker or launcher sends when it registers."""

    kind: str  # `worker` or `node` (a launcher)
    rank: int
    facts: Mapping[str, Any]  # what must be the same everywhere, by the name that messages give it
    host: str
    pid: int
    address: str = ""  # `host:port` of a worker for TensorFlow; empty where the list of workers tells
    nproc: int = 1  # workers of a node

    @property
    def process(self) -> str:
        """Names this process in messages."""
        return f"{self.host}, process {self.pid}"

    def conflict(self, own: "Member", registered: "Member | None", size: float) -> UserError | None:
        """Returns why this member cannot join the job of `own`, which has rank 0, with `size` members.

        `registered` is who has this rank already.
        """
        kind, name = own.kind, f"{self.kind} {self.rank}"
        for fact in [*own.facts, *(f for f in self.facts if f not in own.facts)]:
            theirs, ours = (printable(member.facts.get(fact, "nothing"), 300) for member in (self, own))
            if own.facts.get(fact, "nothing") != self.facts.get(fact, "nothing"):
                return UserError(
                    f"{name} ({self.process}) differs from {kind} 0 in {printable(fact, 80)}: {theirs} and {ours}",
                    "start all nodes with the same flags"
                    if kind == "node"
                    else "start all workers with the same cluster, experiment and versions",
                )
        if not 0 < self.rank < size:
            registered = own
        if registered:
            return UserError(
                f"two processes joined as {name} ({registered.process} and {self.process})",
                "give each node its own --node_rank" if kind == "node" else "give each worker its own index",
            )
        return None


def refuse(connection: wire.Connection, error: UserError) -> None:
    """Tells a member why it cannot take part."""
    connection.tell({"refused": error.what, "fix": error.fix})
    connection.close()


class Arrival(NamedTuple):
    connection: wire.Connection
    member: Member


class Registrar:
    """Queues the members of a `kind` that register at a listening socket, and rejects everything else.

    `notify` is called in another thread when there is something new.
    """

    def __init__(self, listener: socket.socket, secret: str, kind: str, notify: Callable[[], object] = lambda: None):
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._rejections: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reported: set[str] = set()
        self._kind, self._notify = kind, notify
        # A name may resolve to the loopback address on the machine itself; the line about who is missing shows it.
        self.address = "{}:{}".format(*listener.getsockname()[:2])
        self._acceptor = wire.Acceptor(listener, secret, self._admit, self._reject)

    def rejections(self) -> list[str]:
        """Returns why connections were rejected, a line for each host and reason, once, and not more than a few."""
        lines = [line for line in dict.fromkeys(drain(self._rejections)) if line not in self._reported]
        lines = lines[: max(0, _MOST_REJECTIONS - len(self._reported))]
        self._reported.update(lines)
        if lines and len(self._reported) == _MOST_REJECTIONS:
            lines.append("further connections are rejected without a line")
        return lines

    def close(self) -> None:
        self._acceptor.close()

    def _admit(self, connection: wire.Connection, host: str) -> None:
        try:
            message = connection.receive(wire.HANDSHAKE_S)
        except wire.WireError as error:
            connection.close()
            self._reject(host, str(error))
            return
        try:
            member = Member(**MEMBER(message))
        except wire.WireError:
            member = None
        if member is None or member.kind != self._kind:
            fix = "choose another port, or install the same version"
            refuse(connection, UserError(f"this port is used by a job of tfdist {__version__}", fix))
            self._reject(host, f"it sent no registration of a {self._kind} of tfdist {__version__}")
            return
        self.arrivals.put(Arrival(connection, member))
        self._notify()

    def _reject(self, host: str, why: str) -> None:
        self._rejections.put(f"rejected a connection from {host}: {why}")
        self._notify()


def drain(waiting: queue.SimpleQueue[T]) -> list[T]:
    """Empties a queue that no other thread reads."""
    return [waiting.get_nowait() for _ in range(waiting.qsize())]


class NotReachedError(wire.WireError):
    """The other side could not be reached in time."""


def reach(
    attempt: Callable[[float], T], deadline: float, report: Callable[[wire.WireError, float], None], hangups: float
) -> T:
    """Repeats an attempt to connect until it succeeds, since the other side may start later.

    Args:
      attempt: called with its time limit in seconds.
      deadline: when to give up, by the monotonic clock, with a NotReachedError.
      report: called with the error and the time after an attempt that has failed.
      hangups: attempts in a row that the other side may accept and not answer.
    """
    unanswered = 0
    while True:
        try:
            return attempt(min(max(deadline - time.monotonic(), 1.0), wire.HANDSHAKE_S))
        except wire.WireError as error:
            unanswered = unanswered + 1 if isinstance(error, (wire.ClosedError, wire.SilenceError)) else 0
            if isinstance(error, (wire.SecretError, wire.ForeignError)) or unanswered >= hangups:
                raise
            now = time.monotonic()
            if now >= deadline:
                raise NotReachedError(str(error)) from None
            report(error, now)
        time.sleep(RETRY_S)


def listen(host: str, port: int, deadline: float, remind: Callable[[str, float], None]) -> socket.socket:
    """Listens at an address of this machine; raises OSError.

    A cluster publishes the name of a pod only after its start: until the deadline it need not be known.
    """
    while True:
        try:
            return wire.listen(host, port)
        except socket.gaierror as error:
            now = time.monotonic()
            if now >= deadline:
                raise
            remind(f"the name of this machine, {host} ({(error.strerror or str(error)).lower()})", now)
        time.sleep(RETRY_S)


class Reminder:
    """Says from time to time who is missing."""

    def __init__(self, say: Callable[[str], object], deadline: float, first_s: float = 0.0):
        self.next = time.monotonic() + first_s  # when the next line is due
        self._say, self._deadline = say, deadline

    def __call__(self, missing: str, now: float) -> None:
        if now >= self.next:
            self.next = now + REPEAT_S
            self._say(f"waiting for {missing}, {self._deadline - now:.0f} s left")


# -- workers ------------------------------------------------------------------


def meet(
    cluster: Cluster, facts: Mapping[str, str], start_timeout: float = 120.0, stall_timeout: float = 600.0
) -> Peers:
    """Waits until all workers of the run have registered; raises UserError if one is late, joined twice, or differs.

    Args:
      facts: what must be the same everywhere, by name: versions, the experiment.
      start_timeout: seconds to wait for the others.
      stall_timeout: for `Peers`.
    """
    if cluster.size == 1:
        return Peers(hosts=(platform.node(),))
    if not cluster.master:
        what = f"{cluster.source} does not tell where worker 0 of {cluster.size} is"
        raise UserError(what, "set MASTER_ADDR and MASTER_PORT to the same address on all workers")
    facts = {"the number of workers": str(cluster.size), **facts}
    if cluster.addresses:
        facts["the list of workers"] = ", ".join(cluster.addresses)
    own = Member("worker", cluster.rank, facts, platform.node(), os.getpid())
    role = _Chief(cluster, own, start_timeout) if cluster.rank == 0 else _JoiningWorker(cluster, own, start_timeout)
    try:
        connections, hosts, addresses, held = role.run()
    except UserError as error:
        if not role.reported:
            exit_record.leave(str(error)[:4000])
        raise
    return Peers(cluster.rank, hosts, addresses, connections, held, start_timeout, stall_timeout)


_Places: TypeAlias = tuple[dict[int, wire.Connection], tuple[str, ...], tuple[str, ...], socket.socket | None]
"""This worker's connections, all hosts and addresses, and the socket that reserves its port for TensorFlow."""


class _Registration:
    """What the chief and the other workers have in common."""

    def __init__(self, cluster: Cluster, own: Member, start_timeout: float):
        self._cluster, self._own, self._start_timeout = cluster, own, start_timeout
        self._deadline = time.monotonic() + start_timeout
        self._remind = Reminder(aside.info, self._deadline, PATIENCE_S)
        self.reported = False  # whether the launcher knows which worker is missing

    def _name(self, rank: int) -> str:
        """Returns how messages call a worker."""
        place = self._place(rank)
        return f"worker {rank}" + (f" ({place})" if place else "")

    def _place(self, rank: int) -> str:
        addresses = self._cluster.addresses
        at = addresses[rank] if addresses else self._cluster.master if rank == 0 else ""
        if self._cluster.hosts:
            return f"{self._cluster.hosts[rank]} at {at}" if at else self._cluster.hosts[rank]
        return at or (self._own.host if self._cluster.size == self._cluster.local_size else "")

    def _listen(self, address: str) -> socket.socket:
        try:
            return listen(*split(address), self._deadline, self._remind)
        except OSError as error:
            what = f"worker {self._own.rank} cannot listen at {address} ({(error.strerror or str(error)).lower()})"
            raise UserError(what, "it must be a free port on an address of this machine") from None

    def _report_missing(self, rank: int, why: str = "") -> None:
        """Tells the launcher which worker is missing; -1 if unknown."""
        self.reported = True
        exit_record.leave(exit_record.LostWorker(rank, why))

    def _report_late(self, rank: int) -> None:
        place, late = self._place(rank), f"has not joined within {self._start_timeout:.0f} s"
        self._report_missing(rank, f"({place}) {late}" if place else late)


class _Chief(_Registration):
    """Worker 0, with which the others register."""

    def run(self) -> _Places:
        """Waits until all workers are there, and tells them so."""
        cluster = self._cluster
        self._present: dict[int, Arrival] = {}
        fd = cluster.meeting_fd
        listener = socket.socket(fileno=fd) if fd is not None else self._listen(cluster.master)
        host, registrar = listener.getsockname()[0], Registrar(listener, cluster.secret, "worker")

        def refuse_latecomers() -> None:
            while True:
                connection, member = registrar.arrivals.get()
                has_begun = f"the run has begun with {cluster.size} workers, worker {member.rank} is one of them"
                refuse(connection, UserError(has_begun, "give this one another port or index"))

        while len(self._present) < cluster.size - 1:
            self._wait_for_one(registrar)
            for rank, arrival in list(self._present.items()):  # whatever started them may send them back
                if not arrival.connection.is_open():
                    del self._present[rank]
                    who = f"worker {rank} ({arrival.member.process})"
                    aside.info(f"{who} disconnected before all workers had joined: look at its output")
        present = {rank: self._present[rank] for rank in sorted(self._present)}
        held, addresses = None, cluster.addresses
        if addresses:
            self._call_back()
            # TensorFlow needs this very port. Connections that are open do not stand in its way, a listener would.
            registrar.close()
        else:
            held, address = _reserve(host)
            addresses = (address, *(arrival.member.address for arrival in present.values()))
            # Whoever comes later is told so, instead of being taken for a worker of TensorFlow.
            threading.Thread(target=refuse_latecomers, daemon=True).start()
        hosts = (self._own.host, *(arrival.member.host for arrival in present.values()))
        for arrival in present.values():  # `Peers` notices who has gone
            arrival.connection.tell({"welcome": {"addresses": list(addresses), "hosts": list(hosts)}})
        return {rank: arrival.connection for rank, arrival in present.items()}, hosts, tuple(addresses), held

    def _wait_for_one(self, registrar: Registrar) -> None:
        """Registers one arrival, or gives up on those missing."""
        now, size = time.monotonic(), self._cluster.size
        missing = [rank for rank in range(1, size) if rank not in self._present]
        who = f"{', '.join(map(self._name, missing))} of {size}"
        if now >= self._deadline:
            error = UserError(
                f"timed out after {self._start_timeout:.0f} s waiting for {who}",
                "start it, check its address, or raise --start_timeout",
            )
            for arrival in self._present.values():
                arrival.connection.tell({"missing": missing[0], "refused": error.what, "fix": error.fix})
            self._report_late(missing[0])
            raise error
        self._remind(who, now)
        try:
            until = min(self._remind.next, self._deadline, now + CHECK_S)
            arrival = registrar.arrivals.get(timeout=max(0.0, until - now))
        except queue.Empty:
            return
        before = self._present.get(arrival.member.rank)
        connected = before is not None and before.connection.is_open()
        problem = arrival.member.conflict(self._own, before.member if before and connected else None, size)
        if problem:
            self._refuse_all(problem, arrival)
        self._present[arrival.member.rank] = arrival

    def _call_back(self) -> None:
        """Checks that each worker can be reached at its address in the list: TensorFlow would wait for it silently."""
        for rank, arrival in self._present.items():
            address = self._cluster.addresses[rank]
            try:
                connection = wire.connect(*split(address), self._cluster.secret)
                answer = connection.receive(wire.HANDSHAKE_S)
                connection.close()
                why = "" if answer == {"rank": rank} else "another worker answers there"
            except wire.WireError as error:
                why = str(error)
            if why:
                self._refuse_all(
                    UserError(
                        f"worker {rank} ({arrival.member.host}) cannot be reached at {address} ({why})",
                        "correct its address in the list, or open that port between the workers",
                    )
                )

    def _refuse_all(self, problem: UserError, *others: Arrival) -> NoReturn:
        for arrival in (*self._present.values(), *others):
            arrival.connection.tell({"refused": problem.what, "fix": problem.fix})
        raise problem


class _JoiningWorker(_Registration):
    """A worker that registers with the chief."""

    def run(self) -> _Places:
        """Connects to the chief and waits until it says that all are there."""
        cluster = self._cluster
        if cluster.addresses:
            answer_call_back = lambda connection, host: connection.tell({"rank": cluster.rank})
            listener = self._listen(cluster.addresses[cluster.rank])
            acceptor = wire.Acceptor(listener, cluster.secret, answer_call_back)
        connection = self._reach_chief()
        if cluster.addresses:
            held, address = None, cluster.addresses[cluster.rank]
        else:
            held, address = _reserve(connection.local_host)
        chief = self._name(0)
        try:
            connection.send(self._own._replace(address=address)._asdict())
            # The chief mostly gives up first and says why; but it may have started later, or hang.
            limit = max(1.0, self._deadline - time.monotonic()) + 2 * wire.HANDSHAKE_S
            answer = answer_to_worker(cluster.size)(connection.receive(limit))
        except wire.SilenceError:
            what = f"timed out after {self._start_timeout:.0f} s waiting until {chief} has all {cluster.size} workers"
            raise UserError(what, "its output says who is missing; start that one, or raise --start_timeout") from None
        except wire.WireError as error:
            self._report_missing(-1)
            raise UserError(f"{chief} ended before all workers had joined ({error})", "look at its output") from None
        if "missing" in answer:
            self._report_late(answer["missing"])
        if "refused" in answer:
            raise UserError(answer["refused"], answer["fix"])
        if cluster.addresses:
            acceptor.close()
        welcome = answer["welcome"]
        return {0: connection}, tuple(welcome["hosts"]), tuple(welcome["addresses"]), held

    def _reach_chief(self) -> wire.Connection:
        host, port = split(self._cluster.master)
        chief = self._name(0)
        try:
            return reach(
                lambda limit: wire.connect(host, port, self._cluster.secret, limit),
                self._deadline,
                lambda error, now: self._remind(f"{chief} ({error})", now),
                math.inf,
            )
        except NotReachedError as error:
            self._report_late(0)
            what = f"timed out after {self._start_timeout:.0f} s waiting for {chief} ({error})"
            raise UserError(what, "start it, check its address, or raise --start_timeout") from None
        except wire.WireError as error:
            what = f"handshake with {chief} failed ({error})"
            raise UserError(what, "another program or job has this port, choose a free one") from None


def _reserve(host: str) -> tuple[socket.socket, str]:
    """Reserves a free port until TensorFlow binds it: bound, but not listening."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, 0))
    return sock, join(host, sock.getsockname()[1])
