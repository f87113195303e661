"""Who is let in at a port while strangers hold it: real sockets on the loopback device, no TensorFlow."""

import contextlib
import json
import os
import queue
import resource
import socket
import subprocess
import sys
import threading

import pytest

from tfdist.cluster import wire

LIMIT_S = 30


class Door:
    """An acceptor, with what it has let in and turned away."""

    def __init__(self, at_once):
        listener = wire.listen("127.0.0.1", 0)
        self.at = listener.getsockname()
        self._guests, self._strangers = queue.Queue(), queue.Queue()
        self._acceptor = wire.Acceptor(
            listener,
            "hush",
            lambda connection, host: self._guests.put((connection, host)),
            lambda host, why: self._strangers.put((host, why)),
            at_once,
        )
        self.close = self._acceptor.close

    def guest(self):
        return self._guests.get(timeout=LIMIT_S)

    def stranger(self):
        return self._strangers.get(timeout=LIMIT_S)


@pytest.fixture
def door():
    made = []

    def make(at_once):
        made.append(Door(at_once))
        return made[-1]

    yield make
    for one in made:
        one.close()


def silent(stack, at, count, host="127.0.0.1"):
    """Opens connections, each once the one before was greeted, and says nothing."""
    opened = []
    for _ in range(count):
        sock = stack.enter_context(socket.create_connection(at, LIMIT_S, source_address=(host, 0)))
        assert json.loads(sock.recv(1000))["tfdist"] == wire.VERSION
        opened.append(sock)
    return opened


def test_strangers_who_hold_a_hundred_connections_keep_nobody_out(door):
    """There are places for eight, and nobody's time is up before the one who knows the secret has come."""
    eight = door(8)
    with contextlib.ExitStack() as stack:
        opened = silent(stack, eight.at, 100)
        connection = wire.connect(*eight.at, "hush")
        connection.send({"here": 1})
        guest, host = eight.guest()
        assert (host, guest.receive(LIMIT_S)) == ("127.0.0.1", {"here": 1})
        assert eight.stranger() == ("127.0.0.1", "it was the slowest of 8")
        assert opened[0].recv(1000) == b""  # the slowest was hung up on
        connection.close()
        guest.close()


def test_a_crowd_from_one_address_makes_room_itself(door):
    """The slowest of all is one from elsewhere, who is on a long way and not in the crowd."""
    eight = door(8)
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.create_connection(eight.at, LIMIT_S, source_address=("127.0.0.2", 0)))
        challenge = json.loads(sock.recv(1000))["nonce"]
        silent(stack, eight.at, 100)
        nonce = "0" * 32
        proof = wire._proof("hush", "client", challenge, nonce)
        sock.sendall(json.dumps({"nonce": nonce, "proof": proof}).encode() + b"\n")
        assert eight.guest()[1] == "127.0.0.2"


SHORT_OF_DESCRIPTORS = """
import json, os, resource, sys
from tfdist.cluster import wire
from tfdist.cluster.wire import Acceptor

def let_in(connection, host):
    connection.send({"welcome": True})

free = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
listener = wire.listen("127.0.0.1", 0)
acceptor = Acceptor(listener, "hush", let_in)
held = []
try:
    while free >= 0:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    for descriptor in [held.pop() for _ in range(free)]:
        os.close(descriptor)
print(json.dumps(listener.getsockname()), flush=True)
for line in sys.stdin:
    for descriptor in [held.pop() for _ in range(int(line))]:
        os.close(descriptor)
"""


@contextlib.contextmanager
def short_of_descriptors(free):
    """Runs an acceptor in a process of its own that may open so few files; gives that process and its address."""
    command = [sys.executable, "-c", SHORT_OF_DESCRIPTORS, str(free)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, tuple(json.loads(process.stdout.readline()))
        finally:
            process.kill()


@pytest.mark.parametrize(
    "free, others", [(-1, 100), (6, 100), (0, 20)], ids=["half of them free", "six free", "some after a while"]
)
def test_a_crowd_that_takes_all_descriptors_does_not_close_the_port(free, others):
    with short_of_descriptors(free) as (process, at), contextlib.ExitStack() as stack:
        for _ in range(others):  # who neither read nor write
            stack.enter_context(socket.create_connection(at, LIMIT_S))
        if not free:
            print(8, file=process.stdin, flush=True)
        connection = wire.connect(*at, "hush", LIMIT_S)
        stack.callback(connection.close)
        assert connection.receive(LIMIT_S) == {"welcome": True}


def test_a_thread_that_cannot_be_started_costs_one_connection(door, monkeypatch):
    """The limit of processes is that of the user, and root has none, so Python is told what the system would say."""
    one = door(8)
    start = threading.Thread.start

    def refuse(thread):
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with contextlib.closing(socket.create_connection(one.at, LIMIT_S)) as sock:
        assert sock.recv(1000) == b""
    assert one.stranger() == ("127.0.0.1", "no thread could be started to answer it")
    with contextlib.closing(wire.connect(*one.at, "hush", LIMIT_S)):
        assert one.guest()[1] == "127.0.0.1"


def test_a_descriptor_above_those_that_select_knows(door):
    """A data pipeline may hold a thousand files."""
    one = door(8)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 4096, hard))
    try:
        with contextlib.ExitStack() as stack, open(os.devnull) as file:
            while True:
                number = os.dup(file.fileno())
                stack.callback(os.close, number)
                if number > 1100:
                    break
            connection = stack.enter_context(contextlib.closing(wire.connect(*one.at, "hush", LIMIT_S)))
            guest, _ = one.guest()
            stack.enter_context(contextlib.closing(guest))
            assert connection.fileno() > 1024 and guest.is_open()
            connection.send({"here": 1})
            assert guest.receive(LIMIT_S) == {"here": 1}
            connection.close()
            with pytest.raises(wire.ClosedError):
                guest.receive(LIMIT_S)
            assert not guest.is_open()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
