"""Ports of this host and of others. No TensorFlow."""

from __future__ import annotations

import contextlib
import errno
import socket
import time

import psutil

from tfdist.cluster import discovery, wire
from tfdist.cluster.addresses import Address, join, split
from tfdist.doctor import peer_query
from tfdist.doctor.check import Check, fail, ok, warn

PORT = 29500
"""Where launchers meet unless told otherwise (see `tfdist.launch`)."""
ALL = "0.0.0.0"
CLOCKS_APART_S = 1.0
TIMEOUT_S = 3.0
_LISTENS = "start there: python -m tfdist.doctor --listen={port}"


def own_ports(workers: discovery.Cluster, master_port: int | None) -> list[Address]:
    """Returns the addresses that a run with these workers would open here before TensorFlow starts.

    Args:
      master_port: where a launcher is to meet, if somebody says so.
    """
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


def port_here(host: str, port: int, needed: bool = True) -> list[Check]:
    """Checks whether a port of this host is free to listen on.

    Args:
      needed: a run as it is described would open it, and not only one that somebody may start some day.
    """
    name = f"port {port}"
    at = "it" if host == ALL else join(host, port)
    try:
        wire.listen(host, port).close()
    except socket.gaierror as error:
        reason = (error.strerror or str(error)).lower()
        return [fail(name, f"{host} is no address that this host knows ({reason})", "correct it, or /etc/hosts")]
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            taken = f"{at} is taken{_holder(port)}"
            if not needed:
                return [warn(name, f"{taken}; tfdist.launch would meet there", "choose another with --master_port")]
            return [fail(name, taken, "end that program, or choose another port")]
        if error.errno == errno.EADDRNOTAVAIL:
            return [fail(name, f"{at} is no address of this host", "correct the address, or start this worker there")]
        if error.errno == errno.EACCES:
            return [fail(name, f"{at} is not for this user", "choose a port from 1024 on")]
        return [fail(name, f"{at} cannot be used ({error.strerror or error})", "choose another address or port")]
    return [ok(name, f"{at} is free" if host != ALL else "free on all interfaces")]


def _holder(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):  # of other users' processes only root is told
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""


def peer(address: str, versions: dict[str, str], secret: str, patience: float = 0.0) -> list[Check]:
    """Asks another host: can it be reached, does a doctor answer, are clock and versions the same.

    Args:
      address: `host:port`.
      versions: those of this host.
      secret: TFDIST_SECRET.
      patience: seconds that a closed port is given to open, because its doctor may start later than this one.
    """
    host, port = split(address, "--peers")
    name, until = f"peer {address}", time.monotonic() + patience
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        fix = "correct the name, or add it to DNS or /etc/hosts"
        return [fail(name, f"no address is known for {host} ({reason})", fix)]
    while True:
        try:
            return _compared(name, peer_query.ask(host, port, secret, TIMEOUT_S), versions)
        except peer_query.NoDoctorError as error:
            return [ok(name, f"another process of tfdist answers ({error})")]
        except wire.SilenceError:
            what = "accepts but says nothing: it is no tfdist doctor, another program has that port"
            return [warn(name, what, f"choose another port there, or {_LISTENS.format(port=port)}")]
        except wire.WireError as error:
            problem = error
        if not _closed(problem) or time.monotonic() > until:
            return [_unreachable(name, problem, port)]
        time.sleep(0.1)


def _unreachable(name: str, problem: wire.WireError, port: int) -> Check:
    start = _LISTENS.format(port=port)
    if isinstance(problem, wire.SecretError):
        return warn(name, "a tfdist with another secret answers", "set TFDIST_SECRET to the same on all hosts")
    if isinstance(problem, (wire.ForeignError, wire.ClosedError)):
        what = "another program answers (TensorFlow's gRPC server is one that does so)"
        return warn(name, what, f"choose another port there, or {start}")
    if _closed(problem):
        return fail(name, "the host is there, its port is closed", f"{start}, or open that port in its firewall")
    if isinstance(problem, wire.UnreachableError) and problem.timed_out:
        what = f"no answer within {TIMEOUT_S:.0f} s: the host is down, or a firewall drops what is sent to that port"
        return fail(name, what, f"open that port between the hosts, and {start}")
    return fail(name, f"cannot be reached ({problem})", f"check the network between the hosts, and {start}")


def _closed(problem: wire.WireError) -> bool:
    return isinstance(problem, wire.UnreachableError) and problem.closed


def _compared(name: str, there: peer_query.Peer, versions: dict[str, str]) -> list[Check]:
    """Compares what a doctor has answered with this host."""
    checks = []
    delay = f"{2e3 * there.clock_error:.1f} ms there and back"
    if abs(there.clock_ahead) > CLOCKS_APART_S + there.clock_error:
        way = "ahead of" if there.clock_ahead > 0 else "behind"
        what = f"the clock of {there.host} is {abs(there.clock_ahead):,.1f} s {way} ours"
        checks.append(warn(name, what, "keep both in time: chronyd or systemd-timesyncd (timedatectl set-ntp true)"))
    apart = [
        package
        for package in ("python", "tfdist", "tensorflow", "keras", "horovod")
        if there.versions.get(package) != versions.get(package)
    ]
    if apart:
        each = [f"{p} {there.versions.get(p, 'none')} there and {versions.get(p, 'none')} here" for p in apart]
        what = f"{there.host} has other versions: {'; '.join(each)}"
        fix = "install the same on all hosts: workers refuse each other otherwise"
        checks.append(warn(name, what, fix) if apart == ["horovod"] else fail(name, what, fix))
    return checks or [ok(name, f"{there.host} answers, {delay}, with the same versions and time")]
