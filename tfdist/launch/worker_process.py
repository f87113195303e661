"""The worker processes of one launcher, its event loop and its output. No TensorFlow.

All of it happens in one thread around `Events.wait`, so that the lines of two workers never mix. A worker leads a
session and a process group of its own: Ctrl-C reaches the launcher alone, and its children end with a worker.
"""

import collections
import contextlib
import dataclasses
import errno
import functools
import math
import os
import pathlib
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Any

from tfdist.cluster.exit_record import ExitRecord
from tfdist.config import local_files
from tfdist.distributed.child_process import GRACE_S, end_with_the_parent


class Signalled(Exception):  # noqa: N818  an event and no error
    """A signal of this name came where `Events.interruptible` lets it stop the work, or no worker was running."""


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

    def __enter__(self) -> "Events":
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
                raise Signalled(self.signals[0])

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Lets a signal raise `Signalled` inside: for calls that wait by themselves."""
        self._interruptible = True
        try:
            if self.signals:
                raise Signalled(self.signals[0])
            yield
        finally:
            self._interruptible = False

    def watch(self, fd: int, ready: Callable[[], object]) -> None:
        """Calls `ready` from `wait` whenever `fd` can be read."""
        self._selector.register(fd, selectors.EVENT_READ, ready)

    def forget(self, fd: int) -> None:
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
        try:
            stream.flush()
            # `sys.stdout.buffer.write` would not write all of it: with PYTHONUNBUFFERED it is one write(2), which a
            # signal (a worker that ends is one) cuts short, and a non-blocking terminal takes only what has room.
            left = memoryview(data)
            while left:
                try:
                    left = left[os.write(stream.fileno(), left) :]
                except BlockingIOError:
                    select.select((), (stream.fileno(),), ())
        except OSError:  # `| head`, or a terminal that was closed: the logs remain
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), stream.fileno())


DRAIN_S = 1.0  # seconds that children of a dead worker may still write before they are killed
TAIL = 10  # last lines of a failed worker that are repeated
LONGEST_LINE = 1 << 16  # longest line in bytes: binary output must not fill the memory
_LEFT_OVER = 32  # reads that empty any pipe, unless a writer has left the process group


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    rank: int
    command: Sequence[str]
    environ: Mapping[str, str]  # the whole environment
    fds: tuple[int, ...] = ()  # inherited descriptors
    log: pathlib.Path | None = None  # file that its lines are appended to
    header: str = ""  # first line of this start in the log


@dataclasses.dataclass(frozen=True, slots=True)
class Exit:
    rank: int
    pid: int
    host: str
    code: int  # exit code, or the negative number of the signal that killed it
    lost: bool  # whether it only stopped because another worker was lost, as it reports
    lines: tuple[str, ...]  # the last ones; with a traceback those of standard error
    culprit: int = -1  # rank of the worker that it has lost; -1 if unknown
    complaint: str = ""  # host of that one, and how it was lost
    error: str = ""  # the error that it reports

    status = property(lambda self: 128 - self.code if self.code < 0 else self.code)
    """The code as in a shell: 137 for SIGKILL."""

    def describe(self) -> str:
        who = f"rank {self.rank} (on {self.host}, process {self.pid})"
        if self.code >= 0:
            return f"{who} ended with exit code {self.code}"
        hint = ", perhaps by the system for lack of memory" if self.code == -signal.SIGKILL else ""
        names = {number.value: number.name for number in signal.Signals}  # real-time signals have numbers only
        return f"{who} was killed by {names.get(-self.code, f'signal {-self.code}')}{hint}"


class Worker:
    """One child process, with its output."""

    def __init__(self, start: Start, events: Events, screen: Screen):
        self.rank = start.rank
        self.died = math.inf  # when its exit was noticed, by the monotonic clock
        self.code = 0
        self._events, self._screen = events, screen
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL)
        self._errors: collections.deque[str] = collections.deque(maxlen=TAIL)
        self._traceback = False
        self._log_path = start.log
        self._log = local_files.opened_to_append(start.log) if start.log else None
        self._record = ExitRecord()
        try:
            self._keep(f"{start.header}\n".encode())
            self._process = subprocess.Popen(
                start.command,
                env={**start.environ, **self._record.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=start.fds,
                start_new_session=True,
                preexec_fn=end_with_the_parent(),
            )
        except BaseException:
            self._record.read()
            self._close_log()
            raise
        self.pid = self._process.pid
        self._open: dict[IO[bytes], bytearray] = {}
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            self._open[pipe] = bytearray()
            os.set_blocking(pipe.fileno(), False)
            events.watch(pipe.fileno(), functools.partial(self._read, pipe))

    def signal(self, number: int, group: bool = False) -> None:
        """Sends a signal to the worker, or to its process group."""
        # It stays a zombie until `settle`, so its number cannot be reused.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if group else os.kill)(self.pid, number)

    def dead(self) -> bool:
        """Returns whether the process has ended; it is not reaped yet."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return False
        self.died = time.monotonic()
        self.code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return True

    def settle(self) -> bool:
        """Completes the output of a dead worker and kills its process group; returns False if that must wait."""
        if self._open and time.monotonic() < self.died + DRAIN_S:
            return False
        self.signal(signal.SIGKILL, group=True)
        for pipe in list(self._open):
            for _ in range(_LEFT_OVER):
                if pipe not in self._open or not self._read(pipe):
                    break
            if pipe in self._open:
                self._finish(pipe)
        self._process.wait()
        self._close_log()
        return True

    def exit(self) -> Exit:
        """Returns how a settled worker ended."""
        report = self._record.read()
        # What was printed before may be written after: it must not push the traceback out.
        lines = tuple(self._errors if self._traceback else self._tail)
        error, lost = (report, None) if isinstance(report, str) else ("", report)
        if self.code <= 0:  # it went on without that one, or was killed besides
            lost = None
        rank, why = lost or (-1, "")
        return Exit(self.rank, self.pid, socket.gethostname(), self.code, bool(lost), lines, rank, why, error)

    def _read(self, pipe: IO[bytes]) -> bool:
        """Reads what is available; returns False if that was nothing."""
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._finish(pipe)
            return False
        buffer = self._open[pipe]
        buffer += data
        *lines, rest = buffer.split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines.append(rest)
            rest = bytearray()
        self._open[pipe] = rest
        self._show(pipe, lines)
        return True

    def _finish(self, pipe: IO[bytes]) -> None:
        self._events.forget(pipe.fileno())
        rest = self._open.pop(pipe)
        self._show(pipe, [rest] if rest else [])
        pipe.close()

    def _show(self, pipe: IO[bytes], lines: Sequence[bytes | bytearray]) -> None:
        if not lines:
            return
        error = pipe is self._process.stderr
        self._screen.write(
            b"".join(b"[%d] %s\n" % (self.rank, line) for line in lines), sys.stderr if error else sys.stdout
        )
        self._keep(b"".join(b"%s\n" % line for line in lines))
        for text in (line.decode(errors="replace").rstrip("\r") for line in lines):
            self._tail.append(text)
            if error:
                self._errors.append(text)
                self._traceback = self._traceback or text.startswith("Traceback (most recent call last)")

    def _keep(self, data: bytes) -> None:
        if self._log is None:
            return
        try:
            if self._log.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # a full disk must not end the training
            self._screen.say(f"{self._log_path} cannot be written ({error.strerror}): the log ends here", error=True)
            self._close_log()

    def _close_log(self) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()
            self._log = None


class WorkerGroup:
    """The workers of one attempt on this node."""

    def __init__(self, starts: Sequence[Start], events: Events, screen: Screen):
        """Starts them; raises OSError, with none left, if one cannot be started."""
        self._running: list[Worker] = []
        self._dying: list[Worker] = []
        self._kill_at = math.inf
        try:
            for start in starts:
                self._running.append(Worker(start, events, screen))
        except OSError:
            self.kill()
            while self.alive:
                events.wait(0.1)
                self.poll()
            raise

    alive = property(lambda self: tuple(w.rank for w in [*self._running, *self._dying]))
    """Ranks that have not ended."""

    def stop(self) -> None:
        """Asks the workers, not their children, to stop after the update in progress."""
        for worker in self._running:
            worker.signal(signal.SIGTERM)

    def end(self) -> None:
        """Ends the workers' process groups, by force after a while."""
        for worker in self._running:
            worker.signal(signal.SIGTERM, group=True)
        self._kill_at = min(self._kill_at, time.monotonic() + GRACE_S)

    def kill(self) -> None:
        """Kills the workers' process groups."""
        for worker in self._running:
            worker.signal(signal.SIGKILL, group=True)

    def timeout(self) -> float:
        """Seconds until `poll` has something to do by itself."""
        settled = self._dying[0].died + DRAIN_S if self._dying else math.inf
        return min(settled, self._kill_at) - time.monotonic()

    def poll(self) -> list[Exit]:
        """Returns the workers that have exited since the last call, in order."""
        if time.monotonic() >= self._kill_at:
            self._kill_at = math.inf
            self.kill()
        dead = [w for w in self._running if w.dead()]
        self._running = [w for w in self._running if w not in dead]
        # Of exits that are noticed together, those by a signal are the likely cause of the others.
        self._dying += sorted(dead, key=lambda w: w.code >= 0)
        exits = []
        while self._dying and self._dying[0].settle():
            exits.append(self._dying.pop(0).exit())
        return exits
