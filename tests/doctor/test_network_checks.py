"""The doctor's checks of this host's ports, against real sockets."""

import socket

import pytest
from support.doctor_findings import one

from tfdist.cluster import discovery
from tfdist.cluster.discovery import Cluster
from tfdist.doctor import workers as checks

HERE = "127.0.0.1"


def unknown(*args, **kwargs):
    """No test asks the name servers of the machine that it runs on."""
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_free_and_a_taken_port(port):
    one(checks.port_here(HERE, port), "ok", f"{HERE}:{port} is free")
    one(checks.port_here(checks.ALL, port), "ok", "free on all interfaces")
    with socket.create_server((HERE, port)):
        one(checks.port_here(HERE, port), "fail", f"{HERE}:{port} is taken by process ", "choose another port")
        one(checks.port_here(checks.ALL, port), "fail", "it is taken", "end that program")
        one(checks.port_here(checks.ALL, port, needed=False), "warn", "tfdist.launch would meet there", "--master_port")


def test_addresses_that_are_not_ours(port, monkeypatch):
    one(checks.port_here("192.0.2.1", port), "fail", "is no address of this host", "start this worker there")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    one(checks.port_here("h1", port), "fail", "is no address that this host knows", "/etc/hosts")


ADDRESSES = ("a:1", "b:2")


@pytest.mark.parametrize(
    "workers, master_port, expected",
    [
        (discovery.ALONE, None, [(checks.ALL, 29500)]),
        (discovery.ALONE, 1234, [(checks.ALL, 1234)]),
        (Cluster(discovery.TF_CONFIG, 1, 2, master="a:1", addresses=ADDRESSES), None, [("b", 2), (checks.ALL, 2)]),
        (Cluster(discovery.SLURM, 0, 2, master="n1:15000"), None, [("n1", 15000)]),
        (Cluster(discovery.SLURM, 1, 2, master="n1:15000"), None, []),
        (Cluster(discovery.PMI, 0, 2), None, []),
        (Cluster(discovery.LAUNCH, 0, 2, master="n1:15000"), None, []),
    ],
)
def test_which_ports_a_run_would_open_here(workers, master_port, expected):
    assert checks.own_ports(workers, master_port) == expected
