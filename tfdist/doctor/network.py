"""The ports of this host that a run would open. No TensorFlow."""

from __future__ import annotations

import contextlib
import errno
import socket

import psutil

from tfdist.cluster import discovery, wire
from tfdist.cluster.addresses import Address, join, split
from tfdist.doctor.check import Finding, fail, ok, warn

PORT = 29500
"""Where launchers meet unless told otherwise (see `tfdist.launch`)."""
ALL = "0.0.0.0"


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
