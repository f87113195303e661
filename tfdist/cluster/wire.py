"""Messages between the processes of a job: JSON objects, one per line, over TCP. No TensorFlow, no pickles.

A connection opens with a challenge from both sides (HMAC-SHA256 over both nonces, as in RFC 2104), so that with a
shared secret neither an unknown process nor one of another job is taken for a peer. Without a secret the key is empty,
and the handshake only tells tfdist from other programs.
"""

import collections
import contextlib
import errno
import hmac
import json
import os
import re
import resource
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]  # A JSON object
VERSION = 1
HANDSHAKE_S = 5.0  # time limit of the handshake: a port scanner must not delay a job
LONGEST = 1 << 24  # bytes of the longest message
LONGEST_UNAUTHENTICATED = 1 << 12  # bytes of the longest message before the handshake has ended
DEEPEST = 64  # deepest nesting of a message: Python's own parser raises a RecursionError, much later
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_NONCE = re.compile(r"[0-9a-f]{32}")
_PROOF = re.compile(r"([0-9a-f]{64})?")


class WireError(Exception):
    """The other side cannot be reached, is lost, silent, or no tfdist process that knows the secret."""


class SilenceError(WireError):
    """Nothing arrived in time."""


class ClosedError(WireError):
    """The other side has closed the connection, or it broke."""


class ForeignError(WireError):
    """The other side is another program."""

    def __init__(self):
        super().__init__("it does not speak tfdist's protocol")


class SecretError(WireError):
    """The other side is a tfdist process with another secret."""


class Connection:
    """A connection to one peer. Any thread may send, one at a time may receive."""

    def __init__(self, sock: socket.socket):
        self.reader: Callable[[object], Message] = lambda message: message  # type: ignore[assignment, return-value]
        """checks what `read` returns"""
        self.heard = time.monotonic()  # when something last arrived
        self.lost: WireError | None = None  # why `read` will return no more, once that is so
        self.longest = LONGEST_UNAUTHENTICATED  # bytes of the longest message that is accepted
        self._socket = sock
        self._buffer = bytearray()
        self._sending = threading.Lock()
        sock.settimeout(HANDSHAKE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """Returns the number of the socket, for `select`."""
        return self._socket.fileno()

    local_host = property(lambda self: self._socket.getsockname()[0])
    """Address of the local interface that leads to the peer."""

    def send(self, message: Message) -> None:
        """Sends a message; raises ClosedError if the peer has disconnected."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError as error:
            raise ClosedError(f"connection lost ({error})") from None

    def tell(self, message: Message) -> None:
        """Sends a message to a peer that may have disconnected."""
        with contextlib.suppress(WireError):
            self.send(message)

    def is_open(self) -> bool:
        """Returns whether the other side is still connected, without reading its messages."""
        try:
            # No copy of the descriptor is made: where none is left, a connected peer would seem lost.
            return not _readable(self._socket, 0) or self._socket.recv(1, socket.MSG_PEEK) != b""
        except TimeoutError:  # another thread read it first
            return True
        except OSError:
            return False

    def receive(self, timeout: float) -> Message:
        """Waits for the next message, at most so many seconds; raises WireError if none comes."""
        end = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            if not _readable(self._socket, max(0.0, end - time.monotonic())):
                raise SilenceError(f"no answer within {timeout:.0f} s")
            self.fill()
        return self.take()

    def read(self) -> list[Message]:
        """Returns the messages that have arrived, checked by `reader`, without waiting; sets `lost` after the last."""
        messages: list[Message] = []
        try:
            if _readable(self._socket, 0):
                self.fill()
            while b"\n" in self._buffer:
                messages.append(self.reader(self.take()))
        except (WireError, OSError) as error:
            self.lost = error if isinstance(error, WireError) else ClosedError(f"connection lost ({error})")
        return messages

    def fill(self) -> None:
        """Receives what has arrived; call it when the socket is readable."""
        try:
            data = self._socket.recv(65536)
        except OSError as error:
            raise ClosedError(f"connection lost ({error})") from None
        if not data:
            raise ClosedError("connection closed")
        self.heard = time.monotonic()
        self._buffer += data
        if self._buffer[:1] != b"{":  # such as a gRPC server, which sends no end of line to wait for
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
        with contextlib.suppress(OSError):
            self._socket.close()


def _readable(sock: socket.socket, timeout: float) -> bool:
    """Waits until there is something to read, or the end of the connection; `select` knows no descriptor above 1023."""
    if sock.fileno() < 0:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket on one address of this machine, not on all of them; raises OSError."""
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
    """Opens a connection and performs the handshake; raises WireError."""
    try:
        connection = Connection(socket.create_connection((host, port), timeout))
    except OSError as error:
        raise WireError(str(error.strerror or error).lower()) from None
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
    """Performs the handshake on a socket that a listener has accepted; raises WireError."""
    connection, mine = Connection(sock), secrets.token_hex(16)
    try:
        connection.send({"tfdist": VERSION, "nonce": mine})
        answer = connection.receive(HANDSHAKE_S)
        theirs = _matching(answer, "nonce", _NONCE)
        try:
            _check(answer, _proof(secret, "client", mine, theirs))
        except WireError:
            connection.send({"proof": ""})  # closing without an answer would look like an accident, to be tried again
            raise
        connection.longest = LONGEST  # the next messages may be longer, and may arrive with this one
        connection.send({"proof": _proof(secret, "server", theirs, mine)})
    except WireError:
        connection.close()
        raise
    return connection


def derived(secret: str, salt: str) -> str:
    """Derives from a public salt a secret that only those who know `secret` can compute."""
    return _proof(secret, "derived", salt)


def _proof(secret: str, *about: str) -> str:
    # TFDIST_SECRET as the environment holds it, which need not be UTF-8.
    return hmac.new(secret.encode("utf-8", "surrogateescape"), " ".join(about).encode(), "sha256").hexdigest()


def _check(message: Message, expected: str) -> None:
    if not hmac.compare_digest(_matching(message, "proof", _PROOF), expected):
        raise SecretError("it does not know the secret of this job")


def _matching(message: Message, name: str, pattern: re.Pattern[str]) -> str:
    """Returns a field of an unauthenticated message, which may hold anything, even what cannot be encoded."""
    text = message.get(name)
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise ForeignError()
    return text


def _depth(line: bytes) -> int:
    """Returns the nesting depth of any message in one pass."""
    outside = b"".join(re.sub(rb"\\.", b"", line).split(b'"')[::2])  # of its texts
    deepest = depth = 0
    for bracket in outside.translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


AT_ONCE = 64  # most simultaneous handshakes
_RETRY_S = 1.0  # longest wait before it accepts again after it had no descriptor, thread or memory for it
_CLOSED = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)  # errors of `accept` on a listening socket that was closed


class Acceptor:
    """Accepts connections in the background, and performs each handshake in a thread of its own.

    An unknown program may hold a connection for as long as a handshake may take, and open many. So that nobody waits
    for a slot, a new connection takes that of the longest handshake from the address that holds the most. Handshakes
    take at most a quarter of this process' descriptors; if none is left all the same, the slowest is dropped too, and
    the port stays open. `admit` is called in that thread with each authenticated connection and its address, `reject`
    with the address of one that failed, and the reason.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: str,
        admit: Callable[[Connection, str], None],
        reject: Callable[[str, str], None] = lambda host, why: None,
        at_once: int = AT_ONCE,
    ):
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors != resource.RLIM_INFINITY:
            at_once = min(at_once, max(1, descriptors // 4))
        self._listener, self._secret, self._at_once = listener, secret, at_once
        self._admit, self._reject = admit, reject
        self._handshakes: dict[socket.socket, str] = {}  # sockets in a handshake, oldest first, each with its address
        self._lock = threading.Lock()
        self._released = threading.Event()  # set when a handshake has ended, and when the port is closed
        threading.Thread(target=self._accept, name="acceptor", daemon=True).start()

    def close(self) -> None:
        """Stops accepting connections, and frees the port, which a thread in `accept` would hold until the next."""
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
                continue
            except OSError as error:
                if error.errno in _CLOSED:
                    return
                # No descriptor or memory is left (EMFILE, ENFILE, ENOBUFS, ENOMEM), or the network failed for a moment:
                # ending here would close the port to everyone.
                self._recover()
                continue
            with self._lock:
                if len(self._handshakes) >= self._at_once:
                    self._drop_slowest()
                self._handshakes[sock] = address[0]
            try:
                threading.Thread(target=self._serve, args=(sock, address[0]), daemon=True).start()
            except (RuntimeError, MemoryError):  # no thread can be started, as beyond RLIMIT_NPROC
                with self._lock:
                    self._handshakes.pop(sock, None)
                sock.close()
                self._reject(address[0], "no thread could be started to answer it")
                self._recover()

    def _recover(self) -> None:
        """Drops the slowest handshake, and waits a bounded time until one has ended."""
        with self._lock:
            if self._handshakes:
                self._drop_slowest()
        self._released.wait(_RETRY_S)

    def _drop_slowest(self) -> None:
        """Drops the slowest handshake. Its thread, which waits for the other side, closes the socket."""
        count = collections.Counter(self._handshakes.values())
        most = max(count, key=count.__getitem__)  # `most_common` imports a module, which takes a descriptor
        slowest = next(sock for sock, host in self._handshakes.items() if host == most)
        del self._handshakes[slowest]
        with contextlib.suppress(OSError):
            slowest.shutdown(socket.SHUT_RDWR)

    def _serve(self, sock: socket.socket, host: str) -> None:
        why = ""
        try:
            connection = accept(sock, self._secret)
        except (WireError, OSError) as error:
            why = str(error)
        with self._lock:
            kept = self._handshakes.pop(sock, None) is not None
        admitted = kept and not why
        if not admitted:
            sock.close()
        self._released.set()
        if admitted:
            self._admit(connection, host)
        else:
            self._reject(host, why if kept else f"it was the slowest of {self._at_once}")
