"""Doctors on several hosts ask each other: `--listen` here, `--peers` there. JSON lines over TCP, see `wire`.

The one who listens tells host name, clock and versions, nothing else, and only to those who know TFDIST_SECRET
where that is set. Each question is one message; the answer comes at once, so that its clock can be compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import time

from tfdist.cluster import schema, wire
from tfdist.cluster.wire import Acceptor
from tfdist.config.messages import aside
from tfdist.errors import printable

QUESTION = {"doctor": "how are you"}
QUESTIONS = 5
"""The answer that came soonest tells the clock best."""
_LONGEST_CALL_S = 10.0
_ANSWER = schema.record(
    doctor=schema.record(host=schema.line(253), versions=schema.table(schema.line(40), 100), clock=schema.number)
)


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """Another host, as its doctor tells."""

    host: str
    versions: dict[str, str]
    clock_ahead: float
    """Seconds that its clock is ahead of ours."""
    clock_error: float
    """By how much that may be wrong: half of the time from question to answer."""


class NoDoctorError(Exception):
    """It speaks tfdist's protocol and is no doctor: what it said."""


class PeerListener:
    """Answers other doctors from the time it is made until `close`.

    Args:
      host: address of this machine to listen at, or 0.0.0.0 for all.

    Raises:
      OSError: the address is not of this machine, or the port is taken.
    """

    def __init__(self, host: str, port: int, versions: dict[str, str], secret: str):
        listener = wire.listen(host, port)
        self.port = listener.getsockname()[1]
        self._versions = versions
        self._acceptor = Acceptor(listener, secret, self._answer, self._refuse)

    def _answer(self, connection: wire.Connection, who: str) -> None:
        try:
            with contextlib.closing(connection):
                if self._talk(connection):
                    aside.info(f"answered {who}")
        except (wire.WireError, OSError) as error:
            self._refuse(who, str(error))

    def _refuse(self, who: str, why: str) -> None:
        aside.info(f"{who} was not answered: {why}")

    def _talk(self, connection: wire.Connection) -> int:
        """Answers one caller until he hangs up, and returns the number of his questions."""
        end, asked = time.monotonic() + _LONGEST_CALL_S, 0
        with contextlib.suppress(wire.WireError):
            while time.monotonic() < end and connection.receive(wire.HANDSHAKE_S) == QUESTION:
                mine = {"host": platform.node(), "versions": self._versions, "clock": time.time()}
                connection.send({"doctor": mine})
                asked += 1
        return asked

    def close(self) -> None:
        """Answers nobody any more."""
        self._acceptor.close()


def ask(host: str, port: int, secret: str, timeout: float) -> Peer:
    """Asks the doctor of another host.

    Raises:
      wire.WireError: nobody there, or not a tfdist process that knows the secret.
      NoDoctorError: another process of tfdist.
    """
    connection = wire.connect(host, port, secret, timeout)
    try:
        best: Peer | None = None
        for _ in range(QUESTIONS):
            before = time.time()
            connection.send(QUESTION)
            answer = connection.receive(timeout)
            after = time.time()
            peer = _read(answer, before, after)
            if best is None or peer.clock_error < best.clock_error:
                best = peer
        assert best
        return best
    finally:
        connection.close()


def _read(answer: wire.Message, before: float, after: float) -> Peer:
    """Reads what a doctor has answered, to a question that was sent at `before` and answered at `after`."""
    try:
        said = _ANSWER(answer)["doctor"]
    except wire.WireError:
        reason = answer.get("refused", "it gave no answer that a doctor would give")
        raise NoDoctorError(printable(reason, 200)) from None
    return Peer(said["host"], said["versions"], said["clock"] - (before + after) / 2, (after - before) / 2)
