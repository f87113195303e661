"""Anything on every port, from strangers and from those who know the secret: nobody is kept out, and nothing breaks.

The ports are those of the launcher, of the meeting, and of the workers among each other. All begin with one handshake;
what may follow is a table for each. No TensorFlow, no processes.
"""

import contextlib
import copy
import hmac
import json
import queue
import selectors
import socket
import threading

import pytest
from hypothesis import event
from hypothesis import strategies as st
from support import adversary

from tfdist.cluster import registration, watch, wire
from tfdist.cluster.watch import Watch
from tfdist.launch import node_agent
from tfdist.launch.worker_process import Events

SECRET = "hush"
LIMIT_S = 60
EXIT = dict(rank=1, pid=2, host="h", code=-9, lost=True, lines=["a"], culprit=0, complaint="(h): silent", error="")
ROUND = dict(attempt=0, world=2, first=1, port=4000, salt="0f" * 16)
NODE = dict(kind="node", rank=1, facts={"--jit": "on"}, host="h", pid=2, address="", nproc=1)
READERS = [  # who reads it, and messages that are right
    (registration.MEMBER, [NODE, {**NODE, "kind": "worker", "address": "h:1"}]),
    (registration.ANSWER_TO_NODE, [{"welcome": "h"}, {"refused": "no", "fix": "x"}]),
    (node_agent.EVENTS, [{"beat": 1}, {"event": "exit", "exit": EXIT}, {"event": "signal", "name": "SIGTERM"}]),
    (node_agent.ORDERS, [{"order": "round", "round": ROUND}, {"order": "over", "code": 0, "line": ""}]),
    (registration.answer_to_worker(2), [{"welcome": {"addresses": ["h:1", "i:2"], "hosts": ["h", "i"]}},
                                        {"refused": "no", "fix": "x"}]),
    (watch.TO_CHIEF, [{"beat": "call", "update": 3, "for": 0.5}, {"gather": 0, "label": "x", "value": [1]}]),
    (watch.from_chief(2), [{"gathered": 0, "values": [None, 1]}, {"failed": "x"}, {"lost": "x", "worker": 1,
                                                                                   "why": "y"}]),
]  # fmt: skip
RIGHT = [message for _, those in READERS for message in those]


@pytest.fixture(autouse=True)
def no_thread_dies():
    """An error in a thread would leave a port that nobody serves, and the test would not notice."""
    died, hook = [], threading.excepthook
    threading.excepthook = died.append
    yield
    threading.excepthook = hook
    assert not died, died


@st.composite
def altered(draw, message):
    """A right message with something put in, taken out or replaced."""
    message = copy.deepcopy(message)
    holders = [message]
    for holder in holders:
        holders += [v for v in (holder.values() if isinstance(holder, dict) else holder) if isinstance(v, dict | list)]
    holder = draw(st.sampled_from(holders))
    if isinstance(holder, list):
        holder.insert(draw(st.integers(0, len(holder))), draw(adversary.values()))
    else:
        key = draw(st.sampled_from([*holder, "more"]))
        if key in holder and draw(st.booleans()):
            del holder[key]
        else:
            holder[key] = draw(adversary.values())
    return message


MESSAGES = st.one_of(adversary.values(), st.sampled_from(RIGHT).flatmap(altered), st.sampled_from(RIGHT))


def read_by(reader, message):
    try:
        read = reader(message)
    except wire.WireError as error:
        assert str(error) == "it sent what no process of tfdist sends"
        event("refused")
    else:
        assert reader(read) == read  # nothing is left to be made fit
        event("taken")


test_some_messages_as_a_reader_sees_them, test_any_message_as_a_reader_sees_it = adversary.few_and_many(
    100, 10000, read_by, reader=st.sampled_from([reader for reader, _ in READERS]), message=MESSAGES
)

# -- bytes ----------------------------------------------------------------------------


def lines(message):
    """A message as bytes, in the ways that one can be written."""
    text = json.dumps(message)
    return st.sampled_from([text.encode() + b"\n", text.encode(), text.encode("utf-16"), b" " + text.encode() + b"\n"])


BYTES = st.one_of(
    st.binary(max_size=200),
    MESSAGES.flatmap(lines),
    st.sampled_from([
        b"\n" * 1000, b"{" * 5000, b'{"a":' * 100 + b"1" + b"}" * 100 + b"\n", b'{"nonce": 1' + b"0" * 5000 + b"}\n",
        b'{"a": 1' + b"0" * 3000 + b"}\n", b'{"nonce": "\\ud800", "proof": ""}\n', b"x" * 1_000_000,
        b'{"a": "' + b"x" * 100_000 + b'"}\n', b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x80\x02}q\x00.",
    ]),
)  # fmt: skip
CONVERSATIONS = st.lists(BYTES, max_size=4)


def said_to(at, pieces, proof=""):
    """Says all of it to whoever listens there, after the handshake where the secret is given, and hangs up."""
    with contextlib.suppress(OSError), socket.create_connection(at, LIMIT_S) as sock:
        greeting = json.loads(sock.makefile("rb").readline() or b"{}")
        if proof:
            nonce = "0" * 32
            answer = hmac.new(proof.encode(), f"client {greeting['nonce']} {nonce}".encode(), "sha256").hexdigest()
            sock.sendall(json.dumps({"nonce": nonce, "proof": answer}).encode() + b"\n")
        for piece in pieces:
            sock.sendall(piece)


@pytest.fixture(scope="module")
def door():
    """A port, and who was let in there and who was not."""
    guests, strangers = queue.Queue(), queue.Queue()
    listener = wire.listen("127.0.0.1", 0)
    acceptor = wire.Acceptor(listener, SECRET, lambda *guest: guests.put(guest), lambda *who: strangers.put(who), 8)
    yield listener.getsockname(), guests, strangers
    acceptor.close()


def anything_before(door, pieces, many):
    """Whoever knows the secret is let in, whatever was said before by how many others."""
    at, guests, strangers = door
    for _ in range(many):
        said_to(at, pieces)
    connection = wire.connect(*at, SECRET)
    connection.send({"here": 1})
    guest, _ = guests.get(timeout=LIMIT_S)
    assert guest.receive(LIMIT_S) == {"here": 1}
    for one in (guest, connection):
        one.close()
    for _ in range(many):
        adversary.is_one_line(strangers.get(timeout=LIMIT_S)[1])


test_some_bytes_before_the_handshake, test_any_bytes_before_the_handshake = adversary.few_and_many(
    30, 1000, anything_before, pieces=CONVERSATIONS, many=st.integers(1, 20)
)


@pytest.mark.whole
def test_slow_ones(door):
    """A letter now and then: their time is up, or their place is somebody else's."""
    at, guests, strangers = door
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection(at, LIMIT_S)) for _ in range(20)]
        for letter in b'{"nonce"':
            for sock in socks:
                with contextlib.suppress(OSError):
                    sock.sendall(bytes([letter]))
        connection = wire.connect(*at, SECRET)
        guests.get(timeout=LIMIT_S)[0].close()
        connection.close()
        for _ in socks:
            adversary.is_one_line(strangers.get(timeout=LIMIT_S)[1])


# -- from one who knows the secret ----------------------------------------------------------


def pair():
    """Both ends of a connection on which hands have been shaken."""
    with wire.listen("127.0.0.1", 0) as listener:
        near = socket.create_connection(listener.getsockname())
        connection = wire.Connection(listener.accept()[0])
    connection.longest = wire.LONGEST
    return near, connection


def spoken(near, pieces):
    """Says it, while somebody reads or hangs up, and hangs up."""
    with near, contextlib.suppress(OSError):
        for piece in pieces:
            near.sendall(piece)


def another_node(pieces):
    near, connection = pair()
    with Events() as events:
        link = node_agent.NodeLink(connection, registration.Member(**NODE), events, node_agent.EVENTS)
        speaker = threading.Thread(target=spoken, args=(near, pieces))  # more than the sockets hold waits for a reader
        speaker.start()
        while not link.lost:
            events.wait(LIMIT_S)
            link.take()
        connection.close()
        speaker.join(LIMIT_S)
    adversary.is_one_line(link.lost)


def another_worker(pieces):
    near, connection = pair()
    watch = Watch(0, ("h", "i"), {1: connection}, LIMIT_S, LIMIT_S)
    speaker = threading.Thread(target=spoken, args=(near, pieces))
    speaker.start()
    with selectors.DefaultSelector() as watch._selector:
        watch._selector.register(connection, selectors.EVENT_READ)
        while not watch.failure and not watch.gone:
            assert watch._selector.select(LIMIT_S)
            watch._read(1)
    speaker.join(LIMIT_S)
    connection.close()
    adversary.is_one_line(watch.failure)


WELL_READ = st.lists(st.one_of(BYTES, st.sampled_from(RIGHT).map(lambda m: json.dumps(m).encode() + b"\n")), max_size=5)

test_some_bytes_of_another_node, test_any_bytes_of_another_node = adversary.few_and_many(
    30, 1000, another_node, pieces=WELL_READ
)
test_some_bytes_of_another_worker, test_any_bytes_of_another_worker = adversary.few_and_many(
    30, 1000, another_worker, pieces=WELL_READ
)
