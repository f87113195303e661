"""Who is let in at a port: all are accepted, and greeted at the same time; the slowest make room. No TensorFlow."""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
from collections.abc import Callable

from tfdist.distributed.connections import wire

AT_ONCE = 64
"""Handshakes at the same time."""


def _nobody(host: str, why: str) -> None:
    """Says nothing about who was turned away."""


class Acceptor:
    """Accepts connections in the background, and shakes hands with each in a thread of its own.

    A stranger may hold a connection for as long as a handshake may take, and open many. So nobody has to wait for a
    place: whoever comes while all are taken gets that of the one who has had it the longest, among those from the
    address that holds the most.

    Args:
      listener: a listening socket.
      secret: what those must know who are let in.
      welcome: called in that thread with the connection of one who has shaken hands, and the address at its other end.
      turned_away: called there with the address of one who has not, and the reason.
      at_once: handshakes at the same time.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: str,
        welcome: Callable[[wire.Connection, str], None],
        turned_away: Callable[[str, str], None] = _nobody,
        at_once: int = AT_ONCE,
    ):
        self._listener, self._secret, self._at_once = listener, secret, at_once
        self._welcome, self._turned_away = welcome, turned_away
        self._greeted: dict[socket.socket, str] = {}
        """Those who shake hands just now, each with its address, in the order in which they came."""
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="acceptor", daemon=True).start()

    def close(self) -> None:
        """Frees the port at once: the thread that waits in `accept` would hold it until somebody came."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except ConnectionAbortedError:
                continue  # it has gone again
            except OSError:
                return  # closed
            with self._lock:
                if len(self._greeted) >= self._at_once:
                    self._make_room()
                self._greeted[sock] = address[0]
            threading.Thread(target=self._serve, args=(sock, address[0]), daemon=True).start()

    def _make_room(self) -> None:
        """Ends the slowest handshake. Its thread, which waits for the other side, closes the socket."""
        (most, _), *_ = collections.Counter(self._greeted.values()).most_common(1)
        slowest = next(sock for sock, host in self._greeted.items() if host == most)
        del self._greeted[slowest]
        with contextlib.suppress(OSError):
            slowest.shutdown(socket.SHUT_RDWR)

    def _serve(self, sock: socket.socket, host: str) -> None:
        why = ""
        try:
            connection = wire.accept(sock, self._secret)
        except (wire.WireError, OSError) as error:
            why = str(error)
        with self._lock:
            kept = self._greeted.pop(sock, None) is not None
        if why or not kept:
            sock.close()
            self._turned_away(host, why if kept else f"it was the slowest of {self._at_once}")
        else:
            self._welcome(connection, host)
