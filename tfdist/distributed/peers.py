"""The workers of a run, in touch with each other over plain TCP while TensorFlow or Horovod train. No TensorFlow.

Every worker has a connection to the chief (see `rendezvous.py` for how it comes
about). Over it go heartbeats, what each worker is doing, small values that all
must agree on, and the end of the run. TensorFlow's own collectives notice a
dead peer after ten seconds or never, and cannot say which: this can.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.distributed import stall_detection
from tfdist.distributed.stall_detection import State
from tfdist.distributed.wire import Connection, WireError
from tfdist.errors import PeerError, UserError

BEAT_S = 1.0
"""Seconds between heartbeats."""
SILENT_S = 10.0
"""A worker that says nothing for so long is lost."""
GRACE_S = 4.0
"""Time for the main thread to notice a loss and to leave in order, before the process is ended."""
EXIT_S = 15.0
"""Time for a program to end after its main thread has, when a worker is lost: a thread of it may wait for that one."""
SIGNAL_S = 25.0
"""A worker that was asked to stop and waits for another for so long cannot stop in order; platforms kill after 30 s."""
FAREWELL_S = 20.0
"""How long the chief waits at the end for the others' processes to be gone."""
_END = "the end of the run"
_BY_SIGNAL = (130, 143)
"""Exit codes that stay, whatever else a signal's end brings about."""


class Peers:
    """This worker's view of the others.

    Args:
      rank: of this worker.
      hosts: host name of each worker, by rank.
      addresses: `host:port` of each worker for TensorFlow, by rank.
      connections: on the chief one to every other worker by rank, on the others
        one to rank 0; none when there is one worker.
      held: sockets that reserve ports until TensorFlow takes them.
      start_timeout: seconds for what comes before training, compilation apart.
      stall_timeout: seconds without an update before a worker counts as stuck.
    """

    def __init__(
        self,
        rank: int = 0,
        hosts: tuple[str, ...] = ("",),
        addresses: tuple[str, ...] = (),
        connections: dict[int, Connection] | None = None,
        held: tuple[socket.socket, ...] = (),
        start_timeout: float = 120.0,
        stall_timeout: float = 600.0,
    ):
        self.rank, self.size = rank, len(hosts)
        self.hosts, self.addresses = hosts, addresses
        self.failure = ""
        """Why the run cannot go on, once a worker is lost."""
        self.last_words: Callable[[str], None] = lambda message: None
        """Called with `failure` when the process is ended from beside the main thread."""
        self._connections = connections or {}
        self._held = held
        self._start_timeout, self._stall_timeout = start_timeout, stall_timeout
        self._changed = threading.Condition()
        self._number = 0
        self._collected: dict[int, dict[int, tuple[str, Any]]] = {}
        self._gathered: dict[int, list] = {}
        self._doing = State("starting", 0, time.monotonic())
        self._longest = 0.0
        self._seen = {r: time.monotonic() for r in self._connections}
        self._states = dict.fromkeys(self._connections, self._doing)
        self._left: set[int] = set()
        self._acknowledged = threading.Event()
        self._finished = False
        self._code = 1
        self._signals: list[tuple[signal.Signals, float]] = []
        if self._connections:
            self._wake, self._wakeup = socket.socketpair()
            self._wakeup.setblocking(False)
            threading.Thread(target=self._serve, name="tfdist peers", daemon=True).start()
            atexit.register(self._at_exit)

    # -- for the main thread ------------------------------------------------

    def release_ports(self) -> None:
        """Gives up the reserved ports, for TensorFlow to bind them in the next moment."""
        for sock in self._held:
            sock.close()

    def doing(self, phase: str, update: int | None = None) -> None:
        """Notes what this worker is about to do, for the watch on stalled workers.

        Args:
          phase: see `State`.
          update: updates made so far; as before if not given.
        """
        now = time.monotonic()
        if self._doing.phase == "call":
            self._longest = max(self._longest, now - self._doing.since)
        self._doing = State(phase, self._doing.update if update is None else update, now)
        if phase in stall_detection.EXEMPT:  # said at once: the next beat may have to wait for Python's lock
            self._tell({"beat": phase, "update": self._doing.update, "for": 0.0})

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """`doing(phase)` for a while, and back."""
        before = self._doing.phase
        self.doing(phase)
        try:
            yield
        finally:
            self.doing(before)

    @contextlib.contextmanager
    def seeing_signals(self) -> Iterator[None]:
        """Within it, a signal is seen even while the main thread, which handles it, waits in C++ for a lost worker."""
        if not self._connections:
            yield
            return
        before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            self._signals.clear()

    def gather(self, label: str, value: Any = None) -> list:
        """Every worker's value in order of rank, once all have called this with the same label.

        Args:
          label: what this is about, for the message when workers are at different points.
          value: anything that JSON can hold.

        Raises:
          PeerError: a worker was lost meanwhile.
        """
        number, self._number = self._number, self._number + 1
        if not self._connections:
            return [value]
        if self.rank == 0:
            self._collect(0, number, label, value)
        else:
            self._tell({"gather": number, "label": label, "value": value})
        with self.during("waiting"), self._changed:
            self._changed.wait_for(lambda: number in self._gathered or self.failure)
            if number in self._gathered:
                return self._gathered.pop(number)
        raise self.error()

    def check_same(self, facts: dict[str, Any], label: str) -> None:
        """Compares what all workers must have alike: else their calls would not match, or examples be left out.

        Args:
          facts: what this worker has; anything that JSON can hold.
          label: as for `gather`.

        Raises:
          UserError: on all workers, when one has other facts.
        """
        if self.size == 1:
            return
        first, *others = self.gather(label, facts)
        for rank, theirs in enumerate(others, 1):
            for name in first:  # in its order, so that all say the same
                if name in theirs and first[name] != theirs[name]:
                    there, here = (str(v)[:100] for v in (theirs[name], first[name]))
                    raise UserError(
                        f"worker {rank} ({self.hosts[rank]}) has other data than worker 0 ({name}: {there} and not "
                        f"{here}): give all workers the same, the whole of it, since each takes its own rows"
                    )

    def once(self, work: Callable[[], Any]) -> Any:
        """Runs `work` first on the chief, then on one worker of each host, then on the others.

        For work that leaves something on a disk, which may or may not be shared.
        """
        first = self.hosts.index(self.hosts[self.rank])
        turn = 0 if self.rank == 0 else 1 if self.rank == first else 2
        result = None
        for now in range(3 if self.size > 1 else 1):
            if now == turn:
                result = work()
            self.gather("the data set's preparation")
        return result

    def verdict(self) -> str:
        """After an error in a collective: what the peers know about its cause, waiting until they can know."""
        if self._connections:
            with self._changed:
                self._changed.wait_for(lambda: self.failure, SILENT_S + 3 * BEAT_S)
        return self.failure

    def error(self) -> PeerError:
        """`failure` as an error to raise; from now on the main thread sees to it."""
        self._acknowledged.set()
        return PeerError(self.failure)

    def fail(self, message: str, code: int = 1) -> None:
        """Tells the others that this worker stops with an error, for them to stop as well.

        Args:
          code: exit code of this process.
        """
        self._acknowledged.set()
        if self._code not in _BY_SIGNAL:
            self._code = code
        with self._changed:
            if not self._connections or self.failure or self._finished:
                return
            self.failure = message
        self._tell({"failed": message})

    def leave(self) -> None:
        """Ends the run together: a worker that went first would take the others' collectives with it.

        The chief goes last, since it serves the others to their end.
        """
        if not self._connections or self._finished:
            return
        try:
            self.gather(_END)
        except PeerError:
            self._last_line()
            return
        self._finished = True
        if self.rank == 0:
            with self._changed:
                self._changed.wait_for(lambda: len(self._left) == self.size - 1, FAREWELL_S)

    # -- the thread ---------------------------------------------------------

    def _serve(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake, selectors.EVENT_READ, self.rank)
                for rank, connection in self._connections.items():
                    selector.register(connection, selectors.EVENT_READ, rank)
                self._attend(selector)
        except Exception as error:  # without this thread nobody would ever be missed
            self._fail(f"the watch on the other workers has failed: {type(error).__name__}: {error}")
        self._end()

    def _attend(self, selector: selectors.BaseSelector) -> None:
        """Talks with the others until one is lost."""
        beaten = last = time.monotonic()
        while not self.failure:
            ready = selector.select(BEAT_S / 2)
            now = time.monotonic()
            if now - last > 3 * BEAT_S:  # this process itself was stopped, or its lock was held
                self._seen = dict.fromkeys(self._seen, now)
            last = now
            for key, _ in ready:
                if key.data == self.rank:
                    self._signals += [(signal.Signals(number), now) for number in self._wake.recv(64)]
                elif not self._read(key.data):
                    selector.unregister(key.fileobj)
            if now - beaten >= BEAT_S:
                beaten = now
                phase, update, since = self._doing
                self._tell({"beat": phase, "update": update, "for": now - since})
            self._look(now)

    def _read(self, rank: int) -> bool:
        """Takes in what worker `rank` says; False when there will be no more."""
        connection = self._connections[rank]
        try:
            connection.fill()
            while connection.pending():
                self._hear(rank, connection.take())
        except WireError:
            with self._changed:
                self._left.add(rank)
                self._changed.notify_all()
            if not self._finished:
                self._lose(rank, "its process ended")
            return False
        return True

    def _hear(self, rank: int, message: dict) -> None:
        now = time.monotonic()
        self._seen[rank] = now
        if "beat" in message:
            self._states[rank] = State(message["beat"], message["update"], now - message["for"])
        elif "gather" in message:
            self._collect(rank, message["gather"], message["label"], message["value"])
        elif "gathered" in message:
            with self._changed:
                self._gathered[message["gathered"]] = message["values"]
                self._changed.notify_all()
        elif "failed" in message:
            self._lose(rank, f"it stopped: {message['failed']}")
        elif "lost" in message:
            self._fail(message["lost"])

    def _collect(self, rank: int, number: int, label: str, value: Any) -> None:
        """On the chief: one worker's part of a `gather`."""
        with self._changed:
            parts = self._collected.setdefault(number, {})
            parts[rank] = (label, value)
            other, expected = next((r, text) for r, (text, _) in parts.items())
            if label != expected:
                self._fail(
                    f"worker {rank} ({self.hosts[rank]}) is at {label!r} while worker {other} ({self.hosts[other]}) "
                    f"is at {expected!r}: every worker must make the same calls"
                )
                return
            if len(parts) < self.size:
                return
            values = [parts[r][1] for r in range(self.size)]
            del self._collected[number]
            self._gathered[number] = values
            self._changed.notify_all()
        self._tell({"gathered": number, "values": values})

    def _look(self, now: float) -> None:
        """Looks for workers that are silent, stuck, or gone ahead."""
        for rank, seen in self._seen.items():
            long = self._states[rank].phase in ("starting", "saving")  # these may hold Python's lock
            if now - seen > (max(SILENT_S, self._start_timeout) if long else SILENT_S) and rank not in self._left:
                self._lose(rank, f"silent for {now - seen:.0f} s")
                return
        self._heed(now)
        if self.rank == 0:
            ended = {r for parts in self._collected.values() for r, (text, _) in parts.items() if text == _END}
            found = stall_detection.find({0: self._doing, **self._states}, ended, now, self._stall_timeout)
            if found:
                rank_or_none, why = found
                if rank_or_none is None:
                    self._fail(why)
                else:
                    self._lose(rank_or_none, why)

    def _heed(self, now: float) -> None:
        """Stops this worker after a signal that its main thread, waiting in C++ for another worker, does not see."""
        signals = tuple(self._signals)
        if not signals or self.failure:
            return
        name, at = signals[0]
        phase, update, since = self._doing
        interrupts = [at for name, at in signals if name == signal.SIGINT]
        busy = any(state.phase in stall_detection.EXEMPT for state in self._states.values())
        if len(interrupts) > 1 and now - interrupts[1] > GRACE_S:
            name, self._code = signal.SIGINT, 130
        elif phase in ("call", "waiting") and not busy and now - max(at, since) > max(SIGNAL_S, 2 * self._longest):
            self._code = 143
        else:
            return
        why = f"stopped by {name.name} after update {update}, which cannot be saved: no update has ended since"
        self._tell({"failed": why})
        with self._changed:
            self.failure = self.failure or why
            self._changed.notify_all()

    def _lose(self, rank: int, why: str) -> None:
        self._fail(f"lost worker {rank} ({self.hosts[rank]}): {why}")

    def _fail(self, message: str) -> None:
        if self.failure or self._finished:
            return
        if self.rank == 0:
            self._tell({"lost": message})  # first: from the next line on the main thread may end the process
        with self._changed:
            self.failure = self.failure or message
            self._changed.notify_all()

    def _end(self) -> None:
        """Ends the process unless the main thread does: it may wait for a lost peer in C++ for ever."""
        if not self._acknowledged.wait(0.0 if self._code != 1 else GRACE_S):
            self._last_line()
            os._exit(self._code)
        # The program may go on after the error, but other threads of it must not keep it from its end.
        threading.main_thread().join()
        time.sleep(EXIT_S)
        os._exit(self._code)

    def _last_line(self) -> None:
        # Not by print: the main thread may hold the lock of its stream.
        with contextlib.suppress(OSError):
            os.write(2, f"tfdist: failed: {self.failure}\n".encode())
        with contextlib.suppress(Exception):
            self.last_words(self.failure)

    def _at_exit(self) -> None:
        """The end of a program that did not call `leave`: together with the others, or at once after an error."""
        error = getattr(sys, "last_value", None)
        if error is not None and not self._finished:
            # A collective fails where it is noticed, not where the cause is.
            if type(error).__module__.startswith("tensorflow") and not self._acknowledged.is_set() and self.verdict():
                self._last_line()
            self.fail(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
        if not self.failure:
            self.leave()
        elif not self._acknowledged.is_set():
            self._acknowledged.set()
            self._last_line()
        if not self.failure or self._finished:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(self._code)  # TensorFlow would wait for the lost worker

    def _tell(self, message: dict) -> None:
        for rank, connection in self._connections.items():
            if rank not in self._left:
                with contextlib.suppress(WireError):  # the reading side finds out
                    connection.send(message)
