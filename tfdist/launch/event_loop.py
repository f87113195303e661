"""A launcher's event loop and output, in one thread, so that the lines of two workers never mix."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import IO, Any


class Signalled(Exception):  # noqa: N818  an event and no error
    """A signal came where `Events.interruptible` lets it stop the work."""


class Events:
    """Waits for output, sockets, signals, exits of children and other threads, all at once.

    As a context it handles the signals of the process.
    """

    def __init__(self):
        self.signals: list[str] = []  # names of received signals that have not been handled yet
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        self.watch(self._woken.fileno(), lambda: self._woken.recv(4096))
        self._before: dict[int, Any] = {}
        self._interruptible = False

    def __enter__(self) -> Events:
        self._wakeup_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._selector.close()
        self._woken.close()
        self._wake.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self.signals.append(signal.Signals(number).name)
            if self._interruptible:
                raise Signalled

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Lets a signal raise `Signalled` inside: for calls that wait by themselves."""
        self._interruptible = True
        try:
            if self.signals:
                raise Signalled
            yield
        finally:
            self._interruptible = False

    def watch(self, fd: int, ready: Callable[[], object]) -> None:
        """Calls `ready` from `wait` whenever `fd` can be read."""
        self._selector.register(fd, selectors.EVENT_READ, ready)

    def forget(self, fd: int) -> None:
        """Stops watching `fd`."""
        self._selector.unregister(fd)

    def wake(self) -> None:
        """Ends a `wait`, from another thread."""
        with contextlib.suppress(OSError):  # full: it wakes anyway
            self._wake.send(b"\0")

    def wait(self, timeout: float) -> None:
        """Handles events until at least one has happened, `timeout` seconds at most."""
        for key, _ in self._selector.select(max(0.0, timeout)):
            key.data()


class Screen:
    """The launcher's standard output and error. A reader that disappears stops neither it nor the workers."""

    def say(self, line: str, error: bool = False) -> None:
        """Writes a line of the launcher itself."""
        self.write(f"tfdist: {line}\n".encode(), sys.stderr if error else sys.stdout)

    def write(self, data: bytes, stream: IO[str]) -> None:
        """Writes bytes to standard output or error."""
        try:
            stream.flush()
            # `sys.stdout.buffer.write` would not write all of it: with PYTHONUNBUFFERED it is one write(2), which a
            # signal (a worker that ends is one) cuts short, and a terminal that another program has made non-blocking
            # takes only what has room.
            left = memoryview(data)
            while left:
                try:
                    left = left[os.write(stream.fileno(), left) :]
                except BlockingIOError:
                    select.select((), (stream.fileno(),), ())
        except OSError:  # `| head`, or a terminal that was closed: the logs remain
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), stream.fileno())
