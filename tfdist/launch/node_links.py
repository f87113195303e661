"""How the launchers of several nodes meet and stay in touch: node 0 listens, the others come. No TensorFlow.

A connection carries beats both ways, `order`s from node 0 and `event`s to it;
what those mean stands in node_agent.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import queue
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, TypeVar

from tfdist import __version__
from tfdist.cluster import wire
from tfdist.cluster.schema import Reader
from tfdist.cluster.wire import Acceptor
from tfdist.errors import UserError, printable
from tfdist.launch import node_messages
from tfdist.launch.event_loop import Events, Screen

BEAT_S = 2.0
"""Seconds between two beats of a launcher."""
SILENT_S = 12.0
"""A launcher that says nothing for so long is lost: its machine or the way to it is gone."""
SUPERSEDED_S = 5.0
"""After so long a silence, a launcher that comes with the same node rank is the old one started again."""
PATIENCE_S = 15.0
"""Seconds between two lines about who is missing."""
RETRY_S = 0.5
"""Seconds between two tries to reach node 0."""
T = TypeVar("T")


class ElsewhereError(UserError):
    """The address is taken, or of another machine: if anybody listens there, it is somebody else."""


_SPOKEN_TO = 3
"""Handshakes that end early in a row: by then it is no accident."""
_MOST_LINES = 20
"""Lines about strangers, after which there are no more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
    """What a launcher says of itself when it comes."""

    node: int
    nnodes: int
    nproc: int
    host: str
    agreed: Mapping[str, Any]
    """What must be the same on all nodes, by the name that a message shall give it."""

    @classmethod
    def read(cls, message: wire.Message) -> Hello | None:
        """Returns the hello in a message, or None."""
        try:
            return cls(**node_messages.HELLO(message)["hello"])
        except wire.WireError:
            return None

    def problem(self, mine: Hello) -> str:
        """Returns why this launcher does not fit to `mine`, node 0, in a line; or an empty string."""
        who = f"node {self.node} ({self.host})"
        if self.nnodes != mine.nnodes and "--nnodes" not in {*mine.agreed, *self.agreed}:
            return (
                f"{who} was started with --nnodes={self.nnodes}, node 0 with --nnodes={mine.nnodes}: "
                "give the same number everywhere"
            )
        if not 0 < self.node < mine.nnodes:
            return f"{who} was started with the --node_rank of node 0 ({mine.host}): give each node its own"
        for name in [*mine.agreed, *(n for n in self.agreed if n not in mine.agreed)]:
            here, there = mine.agreed.get(name, "nothing"), self.agreed.get(name, "nothing")
            if here != there:
                return (
                    f"{who} differs from node 0 in {printable(name, 80)}: {_short(there)} and {_short(here)}: "
                    "start all nodes with the same"
                )
        return ""


def _short(value: object) -> str:
    return printable(value, 80)


class Link:
    """The connection to another launcher, once both know each other."""

    def __init__(self, connection: wire.Connection, hello: Hello, events: Events, reader: Reader):
        """Begins to read what comes.

        Args:
          reader: `node_messages.EVENTS` or `node_messages.ORDERS`.
        """
        self.hello = hello
        self.heard = time.monotonic()
        self.lost = ""
        """Why there is no more to come, once that is so."""
        self._connection, self._events, self._reader = connection, events, reader
        self._messages: list[wire.Message] = []
        events.watch(connection.fileno(), self._read)
        self._take_in()  # what came with the hello

    def __str__(self) -> str:
        return f"node {self.hello.node} ({self.hello.host})"

    def send(self, message: wire.Message) -> None:
        """Sends a message, if the other side is still there; `take` tells when it is not."""
        self._connection.tell(message)

    def take(self) -> list[wire.Message]:
        """Returns what has come since the last call, beats left out; to be called after `Events.wait`, which reads."""
        silence = time.monotonic() - self.heard
        if not self.lost and silence > SILENT_S:
            self.lose(f"silent for {silence:.0f} s")
        messages, self._messages = self._messages, []
        return messages

    def _read(self) -> None:
        try:
            self._connection.fill()
        except wire.WireError as error:
            self.lose(str(error))
        else:
            self._take_in()

    def _take_in(self) -> None:
        self.heard = time.monotonic()
        try:
            while self._connection.pending():
                message = self._reader(self._connection.take())
                if "beat" not in message:
                    self._messages.append(message)
        except wire.WireError as error:
            self.lose(str(error))

    def lose(self, why: str) -> None:
        """Closes the connection, for the reason given."""
        if self.lost:
            return
        self.lost = why
        self._events.forget(self._connection.fileno())
        self._connection.close()


class Heartbeats:
    """Tells the other launchers that this one lives, also while it writes to a slow terminal."""

    def __init__(self):
        self._links: tuple[Link, ...] = ()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)

    def set(self, links: tuple[Link, ...]) -> None:
        """Names the links to beat on from now on."""
        self._links = links
        if links and not self._thread.is_alive():
            self._thread.start()

    def close(self) -> None:
        """Ends the beats."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(BEAT_S):
            for link in self._links:
                if not link.lost:
                    link.send({"beat": 1})


class NodeListener:
    """Where node 0 hears the other launchers come. Handshakes have threads, so that no stranger holds up a run."""

    def __init__(self, host: str, port: int, secret: str, events: Events):
        """Listens at once.

        Raises:
          UserError: that cannot be done at this address.
        """
        self._events = events
        self._come: queue.SimpleQueue[tuple[wire.Connection, Hello]] = queue.SimpleQueue()
        self._strangers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._known: set[str] = set()
        listener = listen(host, port)
        # A name may mean the loopback address on the machine itself; the line about who is missing shows it.
        self.address = "{}:{}".format(*listener.getsockname()[:2])
        self._acceptor = Acceptor(listener, secret, self._greet, self._turned_away)

    def arrivals(self) -> list[tuple[wire.Connection, Hello]]:
        """Returns the launchers that have come since the last call."""
        return _all(self._come)

    def strangers(self) -> list[str]:
        """Returns why others were turned away, a line for each host and reason, once; not more than so many in all."""
        lines = [line for line in dict.fromkeys(_all(self._strangers)) if line not in self._known]
        lines = lines[: max(0, _MOST_LINES - len(self._known))]
        self._known.update(lines)
        if lines and len(self._known) == _MOST_LINES:
            lines.append("there are more like these, which are turned away without a line")
        return lines

    def close(self) -> None:
        """Lets nobody in any more."""
        self._acceptor.close()

    def _greet(self, connection: wire.Connection, host: str) -> None:
        try:
            hello = Hello.read(connection.receive(wire.HANDSHAKE_S))
        except wire.WireError as error:
            connection.close()
            self._turned_away(host, str(error))
            return
        if hello is None:
            refuse(connection, f"node 0 runs tfdist {__version__}, whose launcher speaks otherwise: install the same")
            self._turned_away(host, "its launcher is of another version")
            return
        self._come.put((connection, hello))
        self._events.wake()

    def _turned_away(self, host: str, why: str) -> None:
        self._strangers.put(f"turned away a connection from {host}: {why}")
        self._events.wake()


def _all(waiting: queue.SimpleQueue[T]) -> list[T]:
    """Empties a queue."""
    items = []
    with contextlib.suppress(queue.Empty):
        while True:
            items.append(waiting.get_nowait())
    return items


def refuse(connection: wire.Connection, why: str) -> None:
    """Tells a launcher why it cannot take part."""
    connection.tell({"refused": why})
    connection.close()


def listen(host: str, port: int) -> socket.socket:
    """Listens at the address in --master_addr.

    Raises:
      UserError: it is no address of this machine, or the port is taken.
    """
    try:
        return wire.listen(host, port)
    except socket.gaierror as error:
        raise UserError(
            f"--master_addr={host} is not known ({error.strerror}): give a name or address of node 0"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ElsewhereError(
                f"--master_port={port} is taken on {host}: choose another, the same on all nodes"
            ) from None
        kind = ElsewhereError if error.errno == errno.EADDRNOTAVAIL else UserError
        raise kind(
            f"--master_addr={host} is no address of this machine ({(error.strerror or '').lower()}): "
            "give that of node 0, and a --node_rank of their own to the other nodes"
        ) from None


def join(host: str, port: int, secret: str, hello: Hello, timeout: float, events: Events, screen: Screen) -> Link:
    """Goes to node 0, which may start later.

    Args:
      timeout: seconds to wait for it.

    Raises:
      UserError: it cannot be reached within `timeout`, or refuses this node.
      Signalled: a signal came.
    """
    begun = time.monotonic()
    next_line, spoken_to = begun, 0
    node0 = f"node 0 at {host}:{port}"
    with events.interruptible():
        while True:
            try:
                return _join(host, port, secret, hello, events)
            except wire.WireError as error:
                why, other = str(error), isinstance(error, (wire.SecretError, wire.ForeignError))
                # Somebody there who does not want us: it closes.
                spoken_to = spoken_to + 1 if isinstance(error, (wire.ClosedError, wire.SilenceError)) else 0
            if other or spoken_to >= _SPOKEN_TO:
                raise UserError(
                    f"{node0} does not shake hands ({why}): set the same TFDIST_SECRET on all nodes or on none, "
                    "and see that --master_port is that of node 0's launcher"
                )
            now = time.monotonic()
            if now >= begun + timeout:
                raise UserError(
                    f"{node0} cannot be reached within {timeout:g} s ({why}): start it there with --node_rank=0, "
                    "correct --master_addr and --master_port, open that port, or raise --start_timeout"
                )
            if now >= next_line:
                next_line += PATIENCE_S
                screen.say(f"waiting for {node0} ({why}), {begun + timeout - now:.0f} s left")
            time.sleep(min(RETRY_S, timeout))


def _join(host: str, port: int, secret: str, hello: Hello, events: Events) -> Link:
    connection = wire.connect(host, port, secret)
    try:
        connection.send({"hello": dataclasses.asdict(hello)})
        answer = node_messages.ANSWER(connection.receive(2 * wire.HANDSHAKE_S))
    except BaseException:
        connection.close()
        raise
    if "refused" in answer:
        connection.close()
        raise UserError(answer["refused"])
    return Link(connection, Hello(0, hello.nnodes, 1, answer["welcome"], {}), events, node_messages.ORDERS)
