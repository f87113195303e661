"""Messages between the processes of a run: JSON objects, one per line, over TCP. No TensorFlow, no pickles.

A connection opens with a challenge from both sides (HMAC-SHA256 over both
nonces, as in RFC 2104), so that with a shared secret neither a stranger's
process nor another run's is taken for a peer. Without a secret the key is
empty and the handshake only tells tfdist from other programs.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import re
import secrets
import select
import socket
import threading
import time
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
"""What one process says to another: a JSON object."""
VERSION = 1
HANDSHAKE_S = 5.0
"""Time for the first words of a connection: a port scanner must not hold up a meeting."""
LONGEST = 1 << 24
"""Bytes of the longest message."""
LONGEST_OF_STRANGERS = 1 << 12
"""Bytes of the longest message before the handshake has ended."""
DEEPEST = 64
"""How deeply a message may be nested: Python's own parser gives up with a RecursionError, much later."""
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_NONCE = re.compile(r"[0-9a-f]{32}")
_PROOF = re.compile(r"([0-9a-f]{64})?")


class WireError(Exception):
    """The other side has gone, is silent, or is not a tfdist process that knows the secret."""


class SilenceError(WireError):
    """Nothing came in time."""


class ClosedError(WireError):
    """The other side has gone."""


class ForeignError(WireError):
    """The other side is another program."""

    def __init__(self):
        super().__init__("it does not speak tfdist's protocol")


class SecretError(WireError):
    """The other side is a tfdist process with another secret."""


class UnreachableError(WireError):
    """No connection could be opened."""

    def __init__(self, error: OSError):
        super().__init__(str(error.strerror or error).lower())
        self.closed = isinstance(error, ConnectionRefusedError)
        """The host is there, and nobody listens at the port."""
        self.timed_out = isinstance(error, TimeoutError)


class Connection:
    """A connection to one peer. `send` may be called from any thread, `receive` from one at a time."""

    def __init__(self, sock: socket.socket):
        self.longest = LONGEST_OF_STRANGERS
        """Bytes of the longest message that is taken from the other side."""
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
            raise ClosedError(f"connection lost ({error})") from None

    def tell(self, message: Message) -> None:
        """Sends a message to a peer that may have gone."""
        with contextlib.suppress(WireError):
            self.send(message)

    def is_open(self) -> bool:
        """Returns whether the other side is still there, without taking in what it has said."""
        try:
            # No copy of the descriptor is made: where none is left, a peer that is there would seem to have gone.
            return not _readable(self._socket, 0) or self._socket.recv(1, socket.MSG_PEEK) != b""
        except TimeoutError:  # another thread has read it meanwhile
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
            if not _readable(self._socket, left):
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
            raise ClosedError(f"connection lost ({error})") from None
        if not data:
            raise ClosedError("connection closed")
        self._buffer += data
        if self._buffer[:1] != b"{":  # a gRPC server, say, whose words have no end of line to wait for
            raise ForeignError()
        end = self._buffer.find(b"\n")
        if (len(self._buffer) if end < 0 else end) > self.longest:
            raise WireError("a message that is too long")

    def take(self) -> Message:
        """Returns the first of the pending messages."""
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer[:] = rest
        if _depth(line) > DEEPEST:
            raise WireError("a message that is nested too deeply")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ForeignError()
        return message

    def close(self) -> None:
        """Closes the connection."""
        with contextlib.suppress(OSError):
            self._socket.close()


def _readable(sock: socket.socket, timeout: float | None) -> bool:
    """Waits until there is something to read, or the end of the connection; `select` knows no descriptor above 1023.

    Raises:
      OSError: the socket is closed.
    """
    if sock.fileno() < 0:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


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


def connect(host: str, port: int, secret: str = "", timeout: float = HANDSHAKE_S) -> Connection:
    """Opens a connection and shakes hands.

    Raises:
      WireError: nobody there, or not a tfdist process that knows the secret.
    """
    try:
        connection = Connection(socket.create_connection((host, port), timeout))
    except OSError as error:
        raise UnreachableError(error) from None
    try:
        greeting = connection.receive(timeout)
        if greeting.get("tfdist") != VERSION:
            raise ForeignError()
        theirs, mine = _matching(greeting, "nonce", _NONCE), secrets.token_hex(16)
        connection.send({"nonce": mine, "proof": _proof(secret, "client", theirs, mine)})
        _check(connection.receive(timeout), _proof(secret, "server", mine, theirs))
    except WireError:
        connection.close()
        raise
    connection.longest = LONGEST
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
        theirs = _matching(answer, "nonce", _NONCE)
        try:
            _check(answer, _proof(secret, "client", mine, theirs))
        except WireError:
            connection.send({"proof": ""})  # a silent end would look like an accident, after which one tries again
            raise
        connection.longest = LONGEST  # what follows may be longer, and may come together with what is read here
        connection.send({"proof": _proof(secret, "server", theirs, mine)})
    except WireError:
        connection.close()
        raise
    return connection


def derived(secret: str, salt: str) -> str:
    """Returns a secret that all who know `secret` can make, and nobody else, from a salt that anybody may read."""
    return hmac.new(_secret_bytes(secret), f"derived {salt}".encode(), "sha256").hexdigest()


def _proof(secret: str, role: str, challenge: str, nonce: str) -> str:
    return hmac.new(_secret_bytes(secret), f"{role} {challenge} {nonce}".encode(), "sha256").hexdigest()


def _check(message: Message, expected: str) -> None:
    if not hmac.compare_digest(_matching(message, "proof", _PROOF), expected):
        raise SecretError("it does not know the secret of this run")


def _matching(message: Message, name: str, pattern: re.Pattern[str]) -> str:
    """Returns a text of a stranger's message, which may hold anything, among it what cannot be encoded."""
    text = message.get(name)
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise ForeignError()
    return text


def _depth(line: bytes) -> int:
    """Returns how deeply the brackets of a message are nested, in one pass, whatever the message is."""
    brackets = line.count(b"[") + line.count(b"{")
    if brackets <= DEEPEST:
        return brackets
    outside = b"".join(re.sub(rb"\\.", b"", line).split(b'"')[::2])  # of its texts
    deepest = depth = 0
    for bracket in outside.translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _secret_bytes(secret: str) -> bytes:
    """Returns the bytes of TFDIST_SECRET as the environment holds them, which need not be UTF-8."""
    return secret.encode("utf-8", "surrogateescape")
