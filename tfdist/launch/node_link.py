"""Links between the launchers of several nodes: events to node 0, orders from it, heartbeats both ways. No TensorFlow.

What orders and events mean is in `node_agent` and `coordinator`; registration is that of `cluster.registration`.
"""

from __future__ import annotations

import errno
import socket
import threading
import time

from tfdist.cluster import registration, schema, wire
from tfdist.cluster.heartbeat import BEAT_S, SILENT_S
from tfdist.cluster.registration import Member
from tfdist.cluster.schema import whole
from tfdist.errors import UserError
from tfdist.launch.event_loop import Events, Screen

SUPERSEDED_S = 5.0  # after this silence, a launcher that registers with the same node rank is the old one started again
_HANGUPS = 3  # handshakes in a row that end early: by then it is no accident

_LINE, _HOST = schema.line(4000), schema.line(253)
_LINES = schema.each(_LINE, most=100)
_BEAT = schema.record(beat=whole())
_EXIT = schema.record(
    rank=whole(),
    pid=whole(),
    host=_HOST,
    code=whole(-255, 255),
    lost=schema.flag,
    lines=_LINES,
    culprit=whole(-1),
    complaint=_LINE,
    error=_LINE,
)
EVENTS = schema.named(
    beat=_BEAT,
    event=schema.tagged(
        "event",
        {
            "exit": {"exit": _EXIT},
            "ended": {},
            "cannot": {"line": _LINE},
            "signal": {"name": schema.one_of("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")},
        },
    ),
)
"""Messages to node 0."""
_ROUND = schema.record(
    attempt=whole(),
    node=whole(),
    world=whole(1),
    first=whole(),
    port=whole(1, 65535),
    salt=schema.line(64),
)
ORDERS = schema.named(
    beat=_BEAT,
    order=schema.tagged(
        "order",
        {
            "round": {"round": _ROUND},
            "say": {"line": _LINE, "error": schema.flag},
            "end": {"text": _LINE, "lines": _LINES},
            "stop": {},
            "kill": {},
            "over": {"code": whole(0, 255), "line": _LINE},
        },
    ),
)
"""Messages from node 0."""


class NodeLink:
    """The connection to another launcher that has registered, with the reader `EVENTS` or `ORDERS`."""

    def __init__(self, connection: wire.Connection, member: Member, events: Events, reader: schema.Reader):
        self.member = member
        self.lost = ""  # why the link is lost, once it is
        self._connection, self._events = connection, events
        self._messages: list[wire.Message] = []
        connection.reader, connection.heard = reader, time.monotonic()
        events.watch(connection.fileno(), self._read)
        self._read()  # what arrived with the registration

    def __str__(self) -> str:
        return f"node {self.member.rank} ({self.member.host})"

    @property
    def heard(self) -> float:
        """When something last arrived."""
        return self._connection.heard

    def send(self, message: wire.Message) -> None:
        """Sends a message, if the other side is still connected."""
        self._connection.tell(message)

    def take(self) -> list[wire.Message]:
        """Returns the messages received since the last call, without heartbeats; call it after `Events.wait`."""
        silence = time.monotonic() - self.heard
        if silence > SILENT_S:
            self.close(f"silent for {silence:.0f} s")
        messages, self._messages = self._messages, []
        return messages

    def close(self, why: str) -> None:
        """Closes the connection, for the reason given."""
        if not self.lost:
            self.lost = why
            self._events.forget(self._connection.fileno())
            self._connection.close()

    def _read(self) -> None:
        self._messages += [message for message in self._connection.read() if "beat" not in message]
        if self._connection.lost:
            self.close(str(self._connection.lost))


class Heartbeats:
    """Sends heartbeats to other launchers, also while this one writes to a slow terminal."""

    def __init__(self):
        self._links: tuple[NodeLink, ...] = ()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def set(self, links: tuple[NodeLink, ...]) -> None:
        """Sets the links that heartbeats are sent to from now on."""
        self._links = links
        if links and not self._thread.is_alive():
            self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(BEAT_S):
            for link in self._links:
                if not link.lost:
                    link.send({"beat": 1})


class AddressInUseError(UserError):
    """The port is taken, or the address belongs to another machine: node 0 may be there."""


def listen(host: str, port: int) -> socket.socket:
    """Listens at --master_addr, or raises UserError."""
    try:
        return wire.listen(host, port)
    except socket.gaierror as error:
        raise UserError(
            f"--master_addr={host} is not known ({error.strerror})", "give a name or address of node 0"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            taken = f"--master_port={port} is taken on {host}"
            raise AddressInUseError(taken, "choose another, the same on all nodes") from None
        kind = AddressInUseError if error.errno == errno.EADDRNOTAVAIL else UserError
        raise kind(
            f"--master_addr={host} is no address of this machine ({(error.strerror or '').lower()})",
            "give that of node 0, and a --node_rank of their own to the other nodes",
        ) from None


def join(host: str, port: int, secret: str, own: Member, timeout: float, events: Events, screen: Screen) -> NodeLink:
    """Registers with node 0, which may start later.

    Raises:
      UserError: it cannot be reached within `timeout` seconds, or refuses this node.
      Signalled: a signal came.
    """
    node0, deadline = f"node 0 at {host}:{port}", time.monotonic() + timeout
    remind = registration.Reminder(screen.say, deadline)

    def attempt(limit: float) -> NodeLink:
        connection = wire.connect(host, port, secret, limit)
        try:
            connection.send(own._asdict())
            answer = registration.ANSWER_TO_NODE(connection.receive(2 * wire.HANDSHAKE_S))
            if "refused" in answer:
                raise UserError(answer["refused"], answer["fix"])
        except BaseException:
            connection.close()
            raise
        return NodeLink(connection, Member("node", 0, {}, answer["welcome"], 0), events, ORDERS)

    with events.interruptible():
        try:
            return registration.reach(attempt, deadline, lambda error, now: remind(f"{node0} ({error})", now), _HANGUPS)
        except registration.NotReachedError as error:
            raise UserError(
                f"timed out after {timeout:g} s waiting for {node0} ({error})",
                "start it there with --node_rank=0, correct --master_addr and --master_port, open that port, or raise "
                "--start_timeout",
            ) from None
        except wire.WireError as error:
            raise UserError(
                f"handshake with {node0} failed ({error})",
                "set the same TFDIST_SECRET on all nodes or on none, and --master_port to that of node 0's launcher",
            ) from None
