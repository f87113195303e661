"""How workers find each other before TensorFlow or Horovod is told about them. No TensorFlow.

`MultiWorkerMirroredStrategy` waits for a missing peer for an hour, holding
Python's lock, and says nothing. So the workers first meet over plain TCP at
the chief's address, and go on only when all are there, agree, and can be reached.
"""

from __future__ import annotations

import os
import platform
import queue
import socket
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from tfdist.cluster import exit_record, schema, wire
from tfdist.cluster.addresses import join, split
from tfdist.cluster.discovery import Cluster
from tfdist.cluster.exit_record import LostWorker
from tfdist.cluster.peers import Peers
from tfdist.cluster.wire import Acceptor
from tfdist.config.messages import aside
from tfdist.errors import UserError, printable


def _address(value: object) -> str:
    """Takes `host:port`."""
    try:
        return join(*split(schema.text(300)(value)))
    except UserError:
        raise wire.WireError("it sent an address that is none") from None


_HOST = schema.line(253)
_INTRODUCTION = schema.record(
    rank=schema.whole(),
    facts=schema.table(schema.text()),
    address=lambda value: value if value == "" else _address(value),
    host=_HOST,
    pid=schema.whole(),
)
"""What a worker says to the chief."""


def answer_to(size: int) -> schema.Reader:
    """Returns what reads the chief's answer to a worker."""
    places = {"addresses": schema.each(_address, size, size), "hosts": schema.each(_HOST, size, size)}
    refused = schema.line(4000)
    return schema.named(
        welcome=schema.record(welcome=schema.record(**places)),
        missing=schema.record(missing=schema.whole(), refused=refused),
        refused=schema.record(refused=refused),
    )


class Introduction(NamedTuple):
    """What a worker says of itself when it comes."""

    rank: int
    facts: dict[str, str]
    """What must be the same everywhere, by name."""
    address: str
    """`host:port` for TensorFlow; empty where the list of workers tells."""
    host: str
    pid: int

    @classmethod
    def read(cls, message: wire.Message) -> Introduction | None:
        """Returns the introduction in a message; None if it is something else."""
        try:
            return cls(**_INTRODUCTION(message))
        except wire.WireError:
            return None

    @property
    def process(self) -> str:
        """Which process this is, for a person."""
        return f"{self.host}, process {self.pid}"


PATIENCE_S = 5.0
"""Seconds before the first line about who is missing; the next ones follow at three times this."""
LOOK_S = 0.5
"""Seconds between looks whether those who have come are still there."""


class _Guest(NamedTuple):
    """A worker that has come to the chief."""

    connection: wire.Connection
    who: Introduction


def meet(
    cluster: Cluster,
    facts: Mapping[str, str],
    start_timeout: float = 120.0,
    stall_timeout: float = 600.0,
) -> Peers:
    """Waits until all workers of the run are there.

    Args:
      cluster: who this worker is; `master` says where to meet.
      facts: what must be the same everywhere, by name: versions, the experiment.
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
    times = _Times(time.monotonic() + start_timeout, start_timeout, stall_timeout)
    return _Chief(cluster, facts, times).host() if cluster.rank == 0 else _Worker(cluster, facts, times).attend()


class _Times(NamedTuple):
    """How long the meeting and the run may wait."""

    deadline: float
    """When the meeting gives up, by this process' monotonic clock."""
    start_timeout: float
    stall_timeout: float


class _Meeting:
    """What the chief and the other workers have in common."""

    def __init__(self, cluster: Cluster, facts: dict[str, str], times: _Times):
        self._cluster, self._times = cluster, times
        self._me = Introduction(cluster.rank, facts, "", platform.node(), os.getpid())
        self._next_line = time.monotonic() + PATIENCE_S

    def _name(self, rank: int) -> str:
        """Returns how messages call a worker."""
        addresses = self._cluster.addresses
        at = addresses[rank] if addresses else self._cluster.master if rank == 0 else ""
        if self._cluster.hosts:
            at = f"{self._cluster.hosts[rank]} at {at}" if at else self._cluster.hosts[rank]
        elif not at and self._cluster.size == self._cluster.local_size:
            at = self._me.host
        return f"worker {rank}" + (f" ({at})" if at else "")

    def _leave_record(self, missing: int) -> None:
        """Tells the launcher which worker has not come."""
        host = self._name(missing).removeprefix(f"worker {missing}").lstrip()
        exit_record.leave(LostWorker(missing, f"{host} has not come within {self._times.start_timeout:.0f} s".strip()))

    def _say_for_whom(self, who: str, now: float, why: str = "") -> None:
        """Says now and then for whom this worker waits."""
        if now >= self._next_line:
            self._next_line = now + 3 * PATIENCE_S
            aside.info(f"waiting for {who}, {self._times.deadline - now:.0f} s left{f' ({why})' if why else ''}")


class _Chief(_Meeting):
    """Worker 0, to which the others come."""

    def __init__(self, cluster: Cluster, facts: dict[str, str], times: _Times):
        super().__init__(cluster, facts, times)
        self._arrivals: queue.Queue[_Guest] = queue.Queue()
        self._present: dict[int, _Guest] = {}

    def host(self) -> Peers:
        """Waits until all workers are there, and tells them so."""
        cluster, times = self._cluster, self._times
        if cluster.meeting_fd is not None:
            listener = socket.socket(fileno=cluster.meeting_fd)
        else:
            listener = _listen(cluster.master, 0)
        here = listener.getsockname()[0]
        acceptor = Acceptor(listener, cluster.secret, self._greet)
        while len(self._present) < cluster.size - 1:
            self._wait_for_one()
            self._forget_the_gone()
        held = []
        addresses = list(cluster.addresses)
        present = {rank: self._present[rank] for rank in sorted(self._present)}
        if addresses:
            self._call_back()
            # TensorFlow needs this very port. Connections that are open do not stand in its way, a listener would.
            acceptor.close()
        else:
            reserved, address = _reserve(here)
            held.append(reserved)
            addresses = [address, *(guest.who.address for guest in present.values())]
            # Whoever comes later is told so, instead of being taken for a worker of TensorFlow.
            threading.Thread(target=self._refuse_latecomers, daemon=True).start()
        hosts = (self._me.host, *(guest.who.host for guest in present.values()))
        for guest in present.values():
            guest.connection.tell({"welcome": {"addresses": addresses, "hosts": hosts}})  # `Peers` sees who has gone
        connections = {rank: guest.connection for rank, guest in present.items()}
        return Peers(0, hosts, tuple(addresses), connections, tuple(held), times.start_timeout, times.stall_timeout)

    def _greet(self, connection: wire.Connection, host: str) -> None:
        """Lets in who is a worker."""
        del host
        try:
            who = Introduction.read(connection.receive(wire.HANDSHAKE_S))
        except wire.WireError:
            connection.close()
            return
        if who:
            self._arrivals.put(_Guest(connection, who))
        else:
            connection.tell({"refused": "this is the meeting of a run of tfdist: leave its port alone"})
            connection.close()

    def _wait_for_one(self) -> None:
        """Takes in one arrival, or says who is missing."""
        now, deadline = time.monotonic(), self._times.deadline
        who = ", ".join(self._name(r) for r in range(1, self._cluster.size) if r not in self._present)
        if now >= deadline:
            missing = min(set(range(1, self._cluster.size)) - self._present.keys())
            problem = (
                f"{who} of {self._cluster.size} has not come within {self._times.start_timeout:.0f} s: "
                "start it, check its address, or raise --start_timeout"
            )
            for guest in self._present.values():
                guest.connection.tell({"missing": missing, "refused": problem})
            self._leave_record(missing)
            raise UserError(problem)
        self._say_for_whom(f"{who} of {self._cluster.size}", now)
        try:
            until = min(self._next_line, deadline, now + LOOK_S)
            guest = self._arrivals.get(timeout=max(0.0, until - now))
        except queue.Empty:
            return
        problem = self._problem(guest.who)
        if problem:
            self._refuse_all(problem, guest)
        self._present[guest.who.rank] = guest

    def _forget_the_gone(self) -> None:
        """Forgets workers that have gone again; whatever started them may send them back."""
        for rank, guest in list(self._present.items()):
            if not guest.connection.is_open():
                del self._present[rank]
                aside.info(f"worker {rank} ({guest.who.process}) has gone before all had met: look at its output")

    def _problem(self, who: Introduction) -> str:
        """Returns what is wrong with a worker that has come, in a line; "" if nothing is."""
        for name, mine in self._me.facts.items():
            theirs = who.facts.get(name, "missing")
            if theirs != mine:
                return (
                    f"worker {who.rank} ({who.process}) differs from worker 0 in {name}: "
                    f"{printable(theirs, 1000)} and {mine}: "
                    "start all workers with the same cluster, experiment and versions"
                )
        before = self._present.get(who.rank)
        if before and before.connection.is_open():
            other = before.who.process
        elif not 0 < who.rank < self._cluster.size:
            other = self._me.process
        else:
            return ""
        return f"worker {who.rank} is there twice ({other} and {who.process}): give each worker an index of its own"

    def _call_back(self) -> None:
        """Checks that each worker can be reached at its address in the list: TensorFlow would wait for it silently.

        Raises:
          UserError: one cannot.
        """
        for rank, guest in self._present.items():
            try:
                connection = wire.connect(*split(self._cluster.addresses[rank]), self._cluster.secret)
                answer = connection.receive(wire.HANDSHAKE_S)
                connection.close()
                why = "" if answer == {"rank": rank} else "another worker answers there"
            except wire.WireError as error:
                why = str(error)
            if why:
                self._refuse_all(
                    f"worker {rank} ({guest.who.host}) cannot be reached at {self._cluster.addresses[rank]} ({why}): "
                    "correct its address in the list, or open that port between the workers"
                )

    def _refuse_all(self, problem: str, *others: _Guest) -> NoReturn:
        """Ends the meeting for all who are there, and `others` besides."""
        for guest in (*self._present.values(), *others):
            guest.connection.tell({"refused": problem})
        raise UserError(problem)

    def _refuse_latecomers(self) -> None:
        while True:
            guest = self._arrivals.get()
            text = (
                f"the run has begun with {self._cluster.size} workers, worker {guest.who.rank} is one of them: "
                "give this one another port or index"
            )
            guest.connection.tell({"refused": text})
            guest.connection.close()


class _Worker(_Meeting):
    """A worker that comes to the chief."""

    def attend(self) -> Peers:
        """Goes to the chief and waits until it says that all are there."""
        cluster, times = self._cluster, self._times
        held = []
        if cluster.addresses:
            listener = _listen(cluster.addresses[cluster.rank], cluster.rank)
            acceptor = Acceptor(listener, cluster.secret, self._answer)
        connection = self._reach()
        address = cluster.addresses[cluster.rank] if cluster.addresses else ""
        if not address:
            reserved, address = _reserve(connection.local_host)
            held.append(reserved)
        chief = self._name(0)
        try:
            connection.send(self._me._replace(address=address)._asdict())
            # The chief mostly gives up first and says why; but it may have started later, or hang.
            limit = max(1.0, times.deadline - time.monotonic()) + 2 * wire.HANDSHAKE_S
            answer = answer_to(cluster.size)(connection.receive(limit))
        except wire.SilenceError:
            raise UserError(
                f"{chief} is there, but not all {cluster.size} workers have come within {times.start_timeout:.0f} s: "
                "its output says who is missing; start that one, or raise --start_timeout"
            ) from None
        except wire.WireError as error:
            exit_record.leave(LostWorker(-1, ""))
            raise UserError(f"{chief} ended before all workers had met ({error}): look at its output") from None
        if "missing" in answer:
            self._leave_record(answer["missing"])
        if "refused" in answer:
            raise UserError(answer["refused"])
        if cluster.addresses:
            acceptor.close()
        welcome = answer["welcome"]
        hosts, addresses = tuple(welcome["hosts"]), tuple(welcome["addresses"])
        return Peers(
            cluster.rank, hosts, addresses, {0: connection}, tuple(held), times.start_timeout, times.stall_timeout
        )

    def _reach(self) -> wire.Connection:
        """Connects to the chief, which may start later than this worker."""
        host, port = split(self._cluster.master)
        chief, times = self._name(0), self._times
        while True:
            try:
                left = times.deadline - time.monotonic()
                return wire.connect(host, port, self._cluster.secret, min(max(left, 1.0), wire.HANDSHAKE_S))
            except wire.WireError as error:
                why, other = str(error), isinstance(error, (wire.SecretError, wire.ForeignError))
            now = time.monotonic()
            if other:
                raise UserError(
                    f"{chief} is not what answers at {host}:{port} ({why}): another program or run has this port, "
                    "choose a free one"
                )
            if now >= times.deadline:
                self._leave_record(0)
                raise UserError(
                    f"{chief} has not come within {times.start_timeout:.0f} s ({why}): "
                    "start it, check its address, or raise --start_timeout"
                )
            self._say_for_whom(chief, now, why)
            time.sleep(0.1)

    def _answer(self, connection: wire.Connection, host: str) -> None:
        """Says who is here to the chief's call back."""
        del host
        connection.tell({"rank": self._cluster.rank})


def _listen(address: str, rank: int) -> socket.socket:
    host, port = split(address)
    try:
        return wire.listen(host, port)
    except OSError as error:
        raise UserError(
            f"worker {rank} cannot listen at {address} ({(error.strerror or str(error)).lower()}): "
            "it must be a free port on an address of this machine"
        ) from None


def _reserve(host: str) -> tuple[socket.socket, str]:
    """Takes a free port that nobody else is given until TensorFlow binds it: bound, but not listening."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, 0))
    return sock, join(host, sock.getsockname()[1])
