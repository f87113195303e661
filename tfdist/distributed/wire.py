"""Messages between the processes of a run: JSON objects, one per line, over TCP. No TensorFlow, no pickles.

A connection opens with a challenge from both sides (HMAC-SHA256 over both
nonces, as in RFC 2104), so that with a shared secret neither a stranger's
process nor another run's is taken for a peer. Without a secret the key is
empty and the handshake only tells tfdist from other programs.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
"""What one process says to another: a JSON object."""
VERSION = 1
HANDSHAKE_S = 5.0
"""Time for the first words of a connection: a port scanner must not hold up a meeting."""
LONGEST = 1 << 24
"""Bytes of the longest message."""


class WireError(Exception):
    """The other side has gone, is silent, or is not a tfdist process that knows the secret."""


class SilenceError(WireError):
    """Nothing came in time."""


class Connection:
    """A connection to one peer. `send` may be called from any thread, `receive` from one at a time."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._buffer = bytearray()
        self._sending = threading.Lock()
        sock.settimeout(HANDSHAKE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """Returns the number of the socket, for `select`."""
        return self._socket.fileno()

    @property
    def local_host(self) -> str:
        """Address of this side, of the interface that leads to the peer."""
        return self._socket.getsockname()[0]

    def send(self, message: Message) -> None:
        """Sends a message.

        Raises:
          WireError: the peer has gone.
        """
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError as error:
            raise WireError(f"connection lost ({error})") from None

    def tell(self, message: Message) -> None:
        """Sends a message to a peer that may have gone."""
        with contextlib.suppress(WireError):
            self.send(message)

    def is_open(self) -> bool:
        """Returns whether the other side is still there, without taking in what it has said."""
        try:
            with socket.socket(fileno=os.dup(self.fileno())) as sock:
                sock.setblocking(False)
                return sock.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def receive(self, timeout: float | None = None) -> Message:
        """Waits for the next message.

        Args:
          timeout: seconds to wait for it; None waits for ever.

        Raises:
          WireError: end of the connection, silence, or no JSON object.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self.pending():
            left = None if end is None else max(0.0, end - time.monotonic())
            ready, _, _ = select.select([self._socket], [], [], left)
            if not ready:
                raise SilenceError(f"no answer within {timeout:.0f} s")
            self.fill()
        return self.take()

    def pending(self) -> bool:
        """Returns whether a whole message has been read."""
        return b"\n" in self._buffer

    def fill(self) -> None:
        """Reads what has arrived; call it when the socket is readable."""
        try:
            data = self._socket.recv(65536)
        except OSError as error:
            raise WireError(f"connection lost ({error})") from None
        if not data:
            raise WireError("connection closed")
        self._buffer += data
        if self._buffer[:1] != b"{":  # a gRPC server, say, whose words have no end of line to wait for
            raise WireError("it does not speak tfdist's protocol")
        if len(self._buffer) > LONGEST:
            raise WireError("a message without an end")

    def take(self) -> Message:
        """Returns the first of the pending messages."""
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer[:] = rest
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise WireError("it does not speak tfdist's protocol")
        return message

    def close(self) -> None:
        """Closes the connection."""
        with contextlib.suppress(OSError):
            self._socket.close()


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket on one address of this machine, not on all of them.

    Raises:
      OSError: the address is not of this machine, or the port is taken.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock


class Acceptor:
    """Accepts connections in the background, each greeted in a thread of its own: no slow stranger keeps others out.

    Args:
      listener: a listening socket.
      greet: called with the socket of whoever has connected, and the address at its other end.
      at_once: greetings at the same time; None for any number.
      turns_away: whether those who come while so many are greeted are hung up on; else they wait.
    """

    def __init__(
        self,
        listener: socket.socket,
        greet: Callable[[socket.socket, str], None],
        at_once: int | None = None,
        turns_away: bool = False,
    ):
        self._listener, self._greet = listener, greet
        self._free = threading.Semaphore(at_once) if at_once else None
        self._turns_away = turns_away
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
            except OSError:
                return  # closed
            if self._free and not self._free.acquire(blocking=not self._turns_away):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock, address[0]), daemon=True).start()

    def _serve(self, sock: socket.socket, host: str) -> None:
        try:
            self._greet(sock, host)
        finally:
            if self._free:
                self._free.release()


def connect(host: str, port: int, secret: str = "", timeout: float = HANDSHAKE_S) -> Connection:
    """Opens a connection and shakes hands.

    Raises:
      WireError: nobody there, or not a tfdist process that knows the secret.
    """
    try:
        connection = Connection(socket.create_connection((host, port), timeout))
    except OSError as error:
        raise WireError(str(error.strerror or error).lower()) from None
    try:
        greeting = connection.receive(timeout)
        theirs, mine = str(greeting.get("nonce", "")), secrets.token_hex(16)
        if greeting.get("tfdist") != VERSION:
            raise WireError("it does not speak tfdist's protocol")
        connection.send({"nonce": mine, "proof": _proof(secret, "client", theirs, mine)})
        _check(connection.receive(timeout), _proof(secret, "server", mine, theirs))
    except WireError:
        connection.close()
        raise
    return connection


def accept(sock: socket.socket, secret: str = "") -> Connection:
    """Shakes hands with whoever has just connected; `sock` is what the listener's `accept` gave.

    Raises:
      WireError: not a tfdist process that knows the secret.
    """
    connection = Connection(sock)
    mine = secrets.token_hex(16)
    try:
        connection.send({"tfdist": VERSION, "nonce": mine})
        answer = connection.receive(HANDSHAKE_S)
        theirs = str(answer.get("nonce", ""))
        try:
            _check(answer, _proof(secret, "client", mine, theirs))
        except WireError:
            connection.send({"proof": ""})  # a silent end would look like an accident, after which one tries again
            raise
        connection.send({"proof": _proof(secret, "server", theirs, mine)})
    except WireError:
        connection.close()
        raise
    return connection


def _proof(secret: str, role: str, challenge: str, nonce: str) -> str:
    return hmac.new(secret.encode(), f"{role} {challenge} {nonce}".encode(), "sha256").hexdigest()


def _check(message: Message, expected: str) -> None:
    if not hmac.compare_digest(str(message.get("proof", "")), expected):
        raise WireError("it does not know the secret of this run")
