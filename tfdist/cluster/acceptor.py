"""Who is let in at a port: all are accepted, and greeted at the same time; the slowest make room. No TensorFlow."""

from __future__ import annotations

import collections
import contextlib
import errno
import resource
import socket
import threading
from collections.abc import Callable

from tfdist.cluster import wire

AT_ONCE = 64
"""Handshakes at the same time."""
_RETRY_S = 1.0
"""Longest wait before the next attempt to accept while this process has no descriptor, thread or memory for it."""
_CLOSED = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)
"""Errors of `accept` on a listening socket that was closed."""


def _nobody(host: str, why: str) -> None:
    """Says nothing about who was turned away."""


class Acceptor:
    """Accepts connections in the background, and shakes hands with each in a thread of its own.

    A stranger may hold a connection for as long as a handshake may take, and open many. So nobody has to wait for a
    place: whoever comes while all are taken gets that of the one who has had it the longest, among those from the
    address that holds the most. Handshakes take at most a quarter of the descriptors of this process. Where there is no
    descriptor left all the same, the slowest makes room, too, and the port stays open.

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
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors != resource.RLIM_INFINITY:
            at_once = min(at_once, max(1, descriptors // 4))
        self._listener, self._secret, self._at_once = listener, secret, at_once
        self._welcome, self._turned_away = welcome, turned_away
        self._greeted: dict[socket.socket, str] = {}
        """Those who shake hands just now, each with its address, in the order in which they came."""
        self._lock = threading.Lock()
        self._released = threading.Event()
        """Set when a handshake has ended, and when the port is closed."""
        threading.Thread(target=self._accept, name="acceptor", daemon=True).start()

    def close(self) -> None:
        """Frees the port at once: the thread that waits in `accept` would hold it until somebody came."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._released.set()

    def _accept(self) -> None:
        while True:
            self._released.clear()
            try:
                sock, address = self._listener.accept()
            except ConnectionAbortedError:
                continue  # it has gone again
            except OSError as error:
                if error.errno in _CLOSED:
                    return
                # No descriptor or memory is left (EMFILE, ENFILE, ENOBUFS, ENOMEM), or the network failed for a moment:
                # ending here would keep everybody out from now on.
                self._recover()
                continue
            with self._lock:
                if len(self._greeted) >= self._at_once:
                    self._make_room()
                self._greeted[sock] = address[0]
            try:
                threading.Thread(target=self._serve, args=(sock, address[0]), daemon=True).start()
            except (RuntimeError, MemoryError):  # no thread can be started, as beyond RLIMIT_NPROC
                with self._lock:
                    self._greeted.pop(sock, None)
                sock.close()
                self._turned_away(address[0], "no thread could be started to answer it")
                self._recover()

    def _recover(self) -> None:
        """Ends the slowest handshake, and waits until one has ended, a bounded time."""
        with self._lock:
            if self._greeted:
                self._make_room()
        self._released.wait(_RETRY_S)

    def _make_room(self) -> None:
        """Ends the slowest handshake. Its thread, which waits for the other side, closes the socket."""
        count = collections.Counter(self._greeted.values())
        most = max(count, key=count.__getitem__)  # `most_common` imports a module, which takes a descriptor
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
        admitted = kept and not why
        if not admitted:
            sock.close()
        self._released.set()
        if admitted:
            self._welcome(connection, host)
        else:
            self._turned_away(host, why if kept else f"it was the slowest of {self._at_once}")
