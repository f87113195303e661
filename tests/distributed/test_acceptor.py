"""Who is let in at a port while strangers hold it: real sockets on the loopback device, no TensorFlow."""

import contextlib
import json
import queue
import socket

import pytest

from tfdist.distributed.connections import wire
from tfdist.distributed.connections.acceptor import Acceptor

LIMIT_S = 30


class Door:
    """An acceptor, with what it has let in and turned away."""

    def __init__(self, at_once):
        listener = wire.listen("127.0.0.1", 0)
        self.at = listener.getsockname()
        self._guests, self._strangers = queue.Queue(), queue.Queue()
        self._acceptor = Acceptor(
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


def test_why_somebody_was_turned_away(door):
    one = door(8)
    with pytest.raises(wire.WireError, match="does not know the secret"):
        wire.connect(*one.at, "guess")
    assert one.stranger() == ("127.0.0.1", "it does not know the secret of this run")
