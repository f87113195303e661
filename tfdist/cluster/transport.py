"""The connections between the workers of a run: messages to all of them, and what arrives. No TensorFlow."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tfdist.cluster.wire import Connection, Message


class Arrivals(NamedTuple):
    """What has come while `Transport.wait` waited."""

    signals: tuple[signal.Signals, ...]
    """Signals that this process was sent, within `Transport.seeing_signals`."""
    ranks: tuple[int, ...]
    """Workers that have said something, or have gone."""


class Transport:
    """The connections of this worker. Any thread may send; one thread alone may wait and read.

    Args:
      connections: by the rank at their other end; none for a worker alone, which
        has nothing to wait for.
    """

    def __init__(self, connections: Mapping[int, Connection]):
        self.gone: set[int] = set()
        """Ranks that will say nothing more."""
        self._connections = dict(connections)
        if self._connections:
            self._woken, self._wakeup = socket.socketpair()
            self._wakeup.setblocking(False)

    def abandon(self) -> None:
        """Closes this side in a forked child: what it said there would be taken for its parent's words.

        The parent's connections stay open, and end with the parent alone.
        """
        if self._connections:
            signal.set_wakeup_fd(-1)  # the parent would take a signal to the child for its own
            self._woken.close()
            self._wakeup.close()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks at the other ends."""
        return tuple(self._connections)

    def tell(self, message: Message) -> None:
        """Sends a message to everybody who is still there."""
        for rank, connection in self._connections.items():
            if rank not in self.gone:
                connection.tell(message)  # the reading side finds out who has gone

    def wait(self, seconds: float) -> Arrivals:
        """Waits until something arrives, `seconds` at most."""
        signals: list[signal.Signals] = []
        ranks: list[int] = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._woken:
                signals += map(signal.Signals, self._woken.recv(64))
            else:
                ranks.append(key.data)
        return Arrivals(tuple(signals), tuple(ranks))

    def read(self, rank: int) -> Iterator[Message]:
        """Yields the messages that a worker named by `wait` has sent.

        Raises:
          WireError: there will be no more.
        """
        connection = self._connections[rank]
        connection.fill()
        while connection.pending():
            yield connection.take()

    def forget(self, rank: int) -> None:
        """Waits no longer for a worker that has gone."""
        self.gone.add(rank)
        self._selector.unregister(self._connections[rank])

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Makes `wait` possible; for the thread that reads."""
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._woken, selectors.EVENT_READ)
            for rank, connection in self._connections.items():
                self._selector.register(connection, selectors.EVENT_READ, rank)
            yield

    @contextlib.contextmanager
    def seeing_signals(self) -> Iterator[None]:
        """Lets `wait` see signals, even while the main thread, which handles them, waits in C++ for a lost worker."""
        before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
