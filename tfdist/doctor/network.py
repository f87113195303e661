"""Ports of this host, and doctors of others, which ask each other: `--listen` here, `--peers` there. No TensorFlow.

They send JSON lines over TCP, see `wire`. The one who listens tells host name, clock and versions, nothing else, and
only to those who know TFDIST_SECRET where that is set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import platform
import socket
import time

import psutil

from tfdist.cluster import discovery, schema, wire
from tfdist.cluster.addresses import Address, join, split
from tfdist.config.messages import aside
from tfdist.doctor.check import Finding, fail, ok, warn
from tfdist.errors import printable

PORT = 29500
"""Where launchers meet unless told otherwise (see `tfdist.launch`)."""
ALL = "0.0.0.0"
CLOCKS_APART_S = 1.0
TIMEOUT_S = 3.0
QUESTION = {"doctor": "how are you"}
QUESTIONS = 5
"""The answer that came soonest tells the clock best."""
_LONGEST_CALL_S = 10.0
_ANSWER = schema.record(
    doctor=schema.record(host=schema.line(253), versions=schema.table(schema.line(40), 100), clock=schema.number)
)
_LISTENS = "start there: python -m tfdist.doctor --listen={port}"


def own_ports(workers: discovery.Cluster, master_port: int | None) -> list[Address]:
    """Returns the addresses that a run would open here before TensorFlow starts; a launcher meets at `master_port`."""
    if master_port:
        return [Address(ALL, master_port)]
    if workers.addresses:  # TensorFlow then takes the same port, on all interfaces
        host, port = split(workers.addresses[workers.rank])
        return [Address(host, port), Address(ALL, port)]
    if workers.source in (discovery.LAUNCH, discovery.TORCHRUN, discovery.HOROVODRUN):
        return []  # the launcher holds it already
    if workers.size > 1:
        return [split(workers.master)] if workers.master and workers.rank == 0 else []
    return [Address(ALL, PORT)]


def port_here(host: str, port: int, needed: bool = True) -> list[Finding]:
    """Checks whether a port of this host is free; `needed` is one that a run as it is described would open."""
    name, at = f"port {port}", "it" if host == ALL else join(host, port)
    try:
        wire.listen(host, port).close()
    except socket.gaierror as error:
        reason = (error.strerror or str(error)).lower()
        return [fail(f"{host} is no address that this host knows ({reason})", "correct it, or /etc/hosts", name)]
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            holder = ""
            with contextlib.suppress(psutil.Error, OSError, StopIteration):  # of other users' only root is told
                listening = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid)
                pid = next(c.pid for c in listening if c.laddr.port == port)
                holder = f" by process {pid} ({psutil.Process(pid).name()})"
            taken = f"{at} is taken{holder}"
            if not needed:
                return [warn(f"{taken}; tfdist.launch would meet there", "choose another with --master_port", name)]
            return [fail(taken, "end that program, or choose another port", name)]
        if error.errno == errno.EADDRNOTAVAIL:
            return [fail(f"{at} is no address of this host", "correct the address, or start this worker there", name)]
        if error.errno == errno.EACCES:
            return [fail(f"{at} is not for this user", "choose a port from 1024 on", name)]
        return [fail(f"{at} cannot be used ({error.strerror or error})", "choose another address or port", name)]
    return [ok(f"{at} is free" if host != ALL else "free on all interfaces", name)]


def peer(address: str, versions: dict[str, str], secret: str, patience: float = 0.0) -> list[Finding]:
    """Asks another host: can it be reached, does a doctor answer, are clock and versions the same.

    A closed port is given `patience` seconds to open, because its doctor may start later than this one.
    """
    host, port = split(address, "--peers")
    until = time.monotonic() + patience
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        fix = "correct the name, or add it to DNS or /etc/hosts"
        return [fail(f"no address is known for {host} ({reason})", fix)]
    while True:
        try:
            return _compared(ask(host, port, secret, TIMEOUT_S), versions)
        except NoDoctorError as error:
            return [ok(f"another process of tfdist answers ({error})")]
        except wire.SilenceError:
            what = "accepts but says nothing: it is no tfdist doctor, another program has that port"
            return [warn(what, f"choose another port there, or {_LISTENS.format(port=port)}")]
        except wire.WireError as error:
            problem = error
        if not _closed(problem) or time.monotonic() > until:
            return [_unreachable(problem, port)]
        time.sleep(0.1)


def _unreachable(problem: wire.WireError, port: int) -> Finding:
    start = _LISTENS.format(port=port)
    if isinstance(problem, wire.SecretError):
        return warn("a tfdist with another secret answers", "set TFDIST_SECRET to the same on all hosts")
    if isinstance(problem, (wire.ForeignError, wire.ClosedError)):
        what = "another program answers (TensorFlow's gRPC server is one that does so)"
        return warn(what, f"choose another port there, or {start}")
    if _closed(problem):
        return fail("the host is there, its port is closed", f"{start}, or open that port in its firewall")
    if isinstance(problem, wire.UnreachableError) and problem.timed_out:
        what = f"no answer within {TIMEOUT_S:.0f} s: the host is down, or a firewall drops what is sent to that port"
        return fail(what, f"open that port between the hosts, and {start}")
    return fail(f"cannot be reached ({problem})", f"check the network between the hosts, and {start}")


def _closed(problem: wire.WireError) -> bool:
    return isinstance(problem, wire.UnreachableError) and problem.closed


def _compared(there: Peer, versions: dict[str, str]) -> list[Finding]:
    """Compares what a doctor has answered with this host."""
    checks = []
    delay = f"{2e3 * there.clock_error:.1f} ms there and back"
    if abs(there.clock_ahead) > CLOCKS_APART_S + there.clock_error:
        way = "ahead of" if there.clock_ahead > 0 else "behind"
        what = f"the clock of {there.host} is {abs(there.clock_ahead):,.1f} s {way} ours"
        checks.append(warn(what, "keep both in time: chronyd or systemd-timesyncd (timedatectl set-ntp true)"))
    compared = ("python", "tfdist", "tensorflow", "keras", "horovod")
    apart = [package for package in compared if there.versions.get(package) != versions.get(package)]
    if apart:
        each = [f"{p} {there.versions.get(p, 'none')} there and {versions.get(p, 'none')} here" for p in apart]
        what = f"{there.host} has other versions: {'; '.join(each)}"
        fix = "install the same on all hosts: workers refuse each other otherwise"
        checks.append(warn(what, fix) if apart == ["horovod"] else fail(what, fix))
    return checks or [ok(f"{there.host} answers, {delay}, with the same versions and time")]


# -- what doctors say to each other ------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """Another host, as its doctor tells."""

    host: str
    versions: dict[str, str]
    clock_ahead: float  # seconds, of ours
    clock_error: float  # half of the time from question to answer


class NoDoctorError(Exception):
    """It speaks tfdist's protocol and is no doctor: what it said."""


class PeerListener:
    """Answers other doctors until `close`; raises `OSError` where it cannot listen."""

    def __init__(self, host: str, port: int, versions: dict[str, str], secret: str):
        listener = wire.listen(host, port)
        self.port = listener.getsockname()[1]
        self._versions = versions
        self._acceptor = wire.Acceptor(listener, secret, self._answer, self._refuse)

    def _answer(self, connection: wire.Connection, who: str) -> None:
        """Answers one caller until it hangs up."""
        end, asked = time.monotonic() + _LONGEST_CALL_S, False
        with contextlib.closing(connection), contextlib.suppress(wire.WireError):
            while time.monotonic() < end and connection.receive(wire.HANDSHAKE_S) == QUESTION:
                mine = {"host": platform.node(), "versions": self._versions, "clock": time.time()}
                connection.send({"doctor": mine})
                asked = True
        if asked:
            aside.info(f"answered {who}")

    def _refuse(self, who: str, why: str) -> None:
        aside.info(f"{who} was not answered: {why}")

    def close(self) -> None:
        """Answers nobody any more."""
        self._acceptor.close()


def ask(host: str, port: int, secret: str, timeout: float) -> Peer:
    """Asks the doctor of another host.

    Raises:
      wire.WireError: nobody there, or not a tfdist process that knows the secret.
      NoDoctorError: another process of tfdist.
    """
    answers = []
    with contextlib.closing(wire.connect(host, port, secret, timeout)) as connection:
        for _ in range(QUESTIONS):
            before = time.time()
            connection.send(QUESTION)
            answer = connection.receive(timeout)
            after = time.time()
            try:
                said = _ANSWER(answer)["doctor"]
            except wire.WireError:
                reason = answer.get("refused", "it gave no answer that a doctor would give")
                raise NoDoctorError(printable(reason, 200)) from None
            ahead = said["clock"] - (before + after) / 2
            answers.append(Peer(said["host"], said["versions"], ahead, (after - before) / 2))
    return min(answers, key=lambda peer: peer.clock_error)
