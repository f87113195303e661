"""The doctor's checks of ports and of other hosts, against real sockets."""

import contextlib
import logging
import queue
import socket
import struct
import threading
import time

import pytest
from support.doctor_findings import one

from tfdist.cluster import discovery, peers, registration, wire
from tfdist.cluster.discovery import Cluster
from tfdist.config import messages
from tfdist.doctor import network

VERSIONS = {"python": "3.11.7", "tfdist": "0.1.0", "tensorflow": "2.21.0", "keras": "3.15.1", "horovod": "0.28.1"}
HERE = "127.0.0.1"


@pytest.fixture
def port():
    with socket.create_server((HERE, 0)) as free:
        return free.getsockname()[1]


@pytest.fixture
def doctor():
    """Doctors of other hosts, which happen to be this one; and what they say."""
    made, said = [], queue.Queue()
    handler = logging.Handler()
    handler.emit = lambda record: said.put(record.getMessage())
    messages.aside.addHandler(handler)

    def start(versions=VERSIONS, secret=""):
        made.append(network.PeerListener(HERE, 0, versions, secret))
        return made[-1].port

    start.said = lambda: said.get(timeout=30)
    yield start
    messages.aside.removeHandler(handler)
    for line in made:
        line.close()


@pytest.fixture
def server():
    """A program that does something to each connection; gives its port."""
    listeners = []

    def start(talk):
        listener = socket.create_server((HERE, 0))
        listeners.append(listener)
        held = []  # a connection that nobody refers to is closed

        def serve():
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                held.append(sock)
                with contextlib.suppress(wire.WireError, OSError):
                    talk(sock)

        threading.Thread(target=serve, daemon=True).start()
        return listener.getsockname()[1]

    yield start
    for listener in listeners:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def unknown(*args, **kwargs):
    """No test asks the name servers of the machine that it runs on."""
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def ask(port, versions=VERSIONS, secret="", host=HERE, patience=0.0):
    return network.peer(f"{host}:{port}", versions, secret, patience)


# -- peers ----------------------------------------------------------------------


def test_a_doctor_with_the_same_versions_and_time(doctor):
    one(ask(doctor()), "ok", "with the same versions and time")
    assert doctor.said() == f"answered {HERE}"


def test_other_versions(doctor):
    other = doctor(VERSIONS | {"keras": "3.14.0", "python": "3.12.1"})
    text = "has other versions: python 3.12.1 there and 3.11.7 here; keras 3.14.0 there and 3.15.1 here"
    one(ask(other), "fail", text, "install the same on all hosts")
    without = {k: v for k, v in VERSIONS.items() if k != "horovod"}
    one(ask(doctor(without)), "warn", "horovod none there and 0.28.1 here", "install the same")


@pytest.mark.parametrize("off, text", [(100, "100.0 s ahead of ours"), (-7200, "7,200.0 s behind ours")])
def test_a_clock_that_is_wrong(off, text, server):
    def talk(sock):
        connection = wire.accept(sock)
        while connection.receive(30):
            connection.send({"doctor": {"host": "h9", "versions": VERSIONS, "clock": time.time() + off}})

    one(ask(server(talk)), "warn", f"the clock of h9 is {text}", "chronyd")


def test_the_clock_is_compared_at_the_soonest_of_several_answers(server):
    def talk(sock):
        connection, late = wire.accept(sock), iter([0.5, 0, 0, 0, 0])
        while connection.receive(30):
            wait = next(late)
            threading.Event().wait(wait)
            connection.send({"doctor": {"host": "h9", "versions": VERSIONS, "clock": time.time() + 100 * wait}})

    one(ask(server(talk)), "ok", "with the same versions and time")


def test_closed_and_unknown(port, monkeypatch):
    fix = f"start there: python -m tfdist.doctor --listen={port}"
    one(ask(port), "fail", "the host is there, its port is closed", fix)

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    one(ask(port, host="h1"), "fail", "no address is known for h1 (name or service not known)", "/etc/hosts")


def test_a_doctor_that_starts_later(port):
    """The same command runs on all hosts, and one is always first."""
    made = []
    later = threading.Timer(0.3, lambda: made.append(network.PeerListener(HERE, port, VERSIONS, "")))
    later.start()
    one(ask(port, patience=30.0), "ok", "with the same versions")
    later.join()
    made[0].close()


def test_one_that_accepts_and_says_nothing(server, monkeypatch):
    monkeypatch.setattr(network, "TIMEOUT_S", 0.3)
    one(
        ask(server(lambda sock: None)),
        "warn",
        "accepts but says nothing: it is no tfdist doctor",
        "choose another port",
    )


def test_one_that_answers_nothing_at_all(monkeypatch):
    """A queue of connections that is full: what comes is dropped, as by a firewall."""
    monkeypatch.setattr(network, "TIMEOUT_S", 0.3)
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind((HERE, 0))
        full.listen(0)
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        one(
            ask(full.getsockname()[1]),
            "fail",
            "no answer within 0 s: the host is down, or a firewall",
            "open that port",
        )


@pytest.mark.parametrize(
    "words",
    [b"SSH-2.0-OpenSSH_9.2\r\n", struct.pack(">I", 24)[1:] + b"\4\0\0\0\0\0", b"{}\n", b"{]\n", b"[1]\n", None],
    ids=["ssh", "grpc", "empty", "garbage", "list", "hangs up"],
)
def test_another_program(words, server):
    def talk(sock):
        sock.sendall(words or b"")
        if words is None:
            sock.close()

    one(ask(server(talk)), "warn", "another program answers", "choose another port")


@pytest.mark.parametrize("answer", [{}, {"doctor": 3}, {"doctor": {"host": "x", "versions": [], "clock": 1}},
                                    {"doctor": {"host": "x", "versions": {}, "clock": "noon"}}])  # fmt: skip
def test_a_tfdist_that_is_no_doctor(answer, server):
    def talk(sock):
        connection = wire.accept(sock)
        while connection.receive(30):
            connection.send(answer)

    one(ask(server(talk)), "ok", "another process of tfdist answers (it gave no answer that a doctor would give)")


def test_a_meeting_of_workers_is_not_disturbed(port, monkeypatch):
    """Asked while it waits for its second worker, it goes on to meet."""
    monkeypatch.setattr(peers, "EXIT_WAIT_S", 0.0)  # for a process to end, which is this one
    met = {}

    def work(rank):
        met[rank] = registration.meet(Cluster("test", rank, 2, master=f"{HERE}:{port}"), {}, 60)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in (0, 1)]
    threads[0].start()
    one(ask(port, patience=30.0), "ok", "another process of tfdist answers (this port is used by a job of tfdist")
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert met.keys() == {0, 1}
    leaving = [threading.Thread(target=met[rank].leave, daemon=True) for rank in met]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join(60)


def test_secrets(doctor):
    port = doctor(secret="hush")
    one(ask(port, secret="hush"), "ok", "with the same versions")
    one(ask(port, secret="guess"), "warn", "a tfdist with another secret answers", "set TFDIST_SECRET to the same")
    # Each is answered in a thread of its own, which says so after the other side has heard.
    said = {doctor.said(), doctor.said()}
    assert said == {f"answered {HERE}", f"{HERE} was not answered: it does not know the secret of this job"}


def test_strangers_do_not_keep_others_from_being_answered(doctor, monkeypatch):
    monkeypatch.setattr(wire, "HANDSHAKE_S", 30)
    port = doctor()
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((HERE, port))) for _ in range(8)]
        for stranger in strangers[:4]:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        one(ask(port), "ok", "with the same versions")
        for stranger in strangers[:4]:  # told who we are, and then hung up on
            stranger.settimeout(30)
            said = b""
            with contextlib.suppress(ConnectionError):
                while data := stranger.recv(1000):
                    said += data
            assert b'"tfdist"' in said and b"keras" not in said
    # one that knows the protocol and asks something else learns nothing
    connection = wire.connect(HERE, port)
    connection.send({"read": "/etc/passwd"})
    with pytest.raises(wire.WireError, match="connection"):
        connection.receive(30)


# -- own ports ------------------------------------------------------------------


def test_a_free_and_a_taken_port(port):
    one(network.port_here(HERE, port), "ok", f"{HERE}:{port} is free")
    one(network.port_here(network.ALL, port), "ok", "free on all interfaces")
    with socket.create_server((HERE, port)):
        one(network.port_here(HERE, port), "fail", f"{HERE}:{port} is taken by process ", "choose another port")
        one(network.port_here(network.ALL, port), "fail", "it is taken", "end that program")
        one(
            network.port_here(network.ALL, port, needed=False),
            "warn",
            "tfdist.launch would meet there",
            "--master_port",
        )


def test_addresses_that_are_not_ours(port, monkeypatch):
    one(network.port_here("192.0.2.1", port), "fail", "is no address of this host", "start this worker there")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    one(network.port_here("h1", port), "fail", "is no address that this host knows", "/etc/hosts")


ADDRESSES = ("a:1", "b:2")


@pytest.mark.parametrize(
    "workers, master_port, expected",
    [
        (discovery.ALONE, None, [(network.ALL, 29500)]),
        (discovery.ALONE, 1234, [(network.ALL, 1234)]),
        (Cluster(discovery.TF_CONFIG, 1, 2, master="a:1", addresses=ADDRESSES), None, [("b", 2), (network.ALL, 2)]),
        (Cluster(discovery.SLURM, 0, 2, master="n1:15000"), None, [("n1", 15000)]),
        (Cluster(discovery.SLURM, 1, 2, master="n1:15000"), None, []),
        (Cluster(discovery.PMI, 0, 2), None, []),
        (Cluster(discovery.LAUNCH, 0, 2, master="n1:15000"), None, []),
    ],
)
def test_which_ports_a_run_would_open_here(workers, master_port, expected):
    assert network.own_ports(workers, master_port) == expected
