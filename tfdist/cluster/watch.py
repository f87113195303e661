"""The thread of a worker that listens to the others, and ends the process when one is lost. No TensorFlow."""

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfdist.cluster import exit_record, heartbeat, schema
from tfdist.cluster.heartbeat import BEAT_S, GRACE_S, IN_CALL_S, PHASES, SILENT_S, ReceivedSignal, State
from tfdist.cluster.wire import ClosedError, Connection, Message
from tfdist.config.commands import standard_streams
from tfdist.errors import one_line

_BEAT = schema.record(**{"beat": schema.one_of(*PHASES), "update": schema.whole(), "for": schema.number})
_FAILED = schema.record(failed=schema.line(4000))
TO_CHIEF = schema.named(
    beat=_BEAT,
    gather=schema.record(gather=schema.whole(), label=schema.text(1000), value=schema.anything),
    failed=_FAILED,
)
"""Messages of other workers to the chief."""


def from_chief(size: int) -> schema.Reader:
    """Returns the reader for messages of the chief of `size` workers."""
    values = schema.each(schema.anything, 1, size)
    return schema.named(
        beat=_BEAT,
        gathered=schema.record(gathered=schema.whole(), values=values),
        failed=_FAILED,
        lost=schema.record(lost=schema.line(4000), worker=schema.whole(-1), why=schema.line(4000)),
    )


EXIT_S = 15.0  # for a program to end after its main thread: a thread of it may wait for the lost worker


class Watch:
    """What this worker knows of the others, and the thread that keeps it up to date; arguments are as in `Peers`."""

    def __init__(
        self,
        rank: int,
        hosts: tuple[str, ...],
        connections: Mapping[int, Connection],
        start_timeout: float,
        stall_timeout: float,
    ):
        now = time.monotonic()
        self.last_words: Callable[[str], object] = lambda failure: None
        """Called with `failure` when the process is ended from beside the main thread."""
        self.on_loss: Callable[[], object] = lambda: None
        """Called on the chief, beside the main thread, when another worker has died or fallen silent."""
        self.failure = ""  # why the run cannot go on, once a worker is lost
        self.acknowledged = threading.Event()  # set when the main thread handles the failure itself
        self.code = 1  # exit code of the process after a failure
        self.finished = False  # whether all workers have reached the end of the run
        self.state = State("starting", 0, now)  # what this worker is doing
        self.signals: list[ReceivedSignal] = []
        self.gone: set[int] = set()  # ranks that have disconnected
        self.start_timeout, self._stall_timeout = start_timeout, stall_timeout
        self._rank, self._hosts = rank, hosts
        self._connections = dict(connections)
        self._states = dict.fromkeys(connections, self.state)
        self._longest_call = 0.0
        self._died = False  # whether the failure is that a worker has died or fallen silent, without giving a reason
        self._votes: dict[int, dict[int, tuple[str, Any]]] = {}  # label and value by rank, by number of the gather
        self._gathered: dict[int, list[Any]] = {}
        self._changed = threading.Condition()
        for connection in connections.values():
            connection.reader, connection.heard = from_chief(len(hosts)) if rank else TO_CHIEF, now
        if connections:
            self._woken, self._wakeup = socket.socketpair()
            self._wakeup.setblocking(False)

    def start(self) -> None:
        threading.Thread(target=self._serve, name="tfdist peers", daemon=True).start()

    # -- for the main thread ------------------------------------------------

    def begin(self, phase: str, update: int | None = None) -> None:
        """Records what this worker is about to do; `update` as before if not given."""
        now = time.monotonic()
        if self.state.phase == "call":
            self._longest_call = max(self._longest_call, now - self.state.since)
        before, self.state = self.state.phase, State(phase, self.state.update if update is None else update, now)
        # Sent at once when it begins, since the next beat may have to wait for Python's lock; and when it ends, since
        # one that is stopped before its next beat would be given the time that saving may take.
        if {before, phase} & set(heartbeat.EXEMPT):
            self.send({"beat": phase, "update": self.state.update, "for": 0.0})

    def send(self, message: Message) -> None:
        """Sends a message to all who are still connected; any thread may."""
        for rank, connection in self._connections.items():
            if rank not in self.gone:
                connection.tell(message)  # the reading side finds out who has gone

    @contextlib.contextmanager
    def seeing_signals(self) -> Iterator[None]:
        """Lets the thread see signals, even while the main thread, which handles them, waits in C++."""
        before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            self.signals.clear()

    def abandon(self) -> None:
        """Closes this side in a forked child: messages sent there would seem to come from its parent.

        The parent's connections stay open, and end with the parent alone.
        """
        if self._connections:
            signal.set_wakeup_fd(-1)  # the parent would take a signal to the child for its own
            self._woken.close()
            self._wakeup.close()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self.finished = True

    def give(self, number: int, label: str, value: object) -> None:
        """Gives this worker's value to a `Peers.gather`, to be collected by the chief."""
        if self._rank == 0:
            self._collect(0, number, label, value)
        else:
            self.send({"gather": number, "label": label, "value": value})

    def wait_for_values(self, number: int, seconds: float | None = None) -> list[object] | None:
        """Waits for all values of a `Peers.gather`; None when the run fails before, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._gathered or self.failure, seconds)
            return self._gathered.pop(number, None)

    def wait_for_failure(self, seconds: float) -> None:
        """Waits until something is known to have failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure, seconds)

    def wait_for_departures(self, seconds: float) -> bool:
        """Waits until the processes of all others are gone; returns whether one has fallen silent instead."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.gone) == len(self._connections), seconds)
            silent = self._find_silent(SILENT_S, time.monotonic())
            if silent:
                rank, why = silent[0], f"{silent[1]} at the end of the run"
                self.failure = f"lost worker {rank} ({self._hosts[rank]}): {why}"
                exit_record.leave(exit_record.LostWorker(rank, f"({self._hosts[rank]}): {why}"))
        return silent is not None

    def stop(self, message: str) -> None:
        """Ends the run by a failure of this worker, and tells the others."""
        with self._changed:
            if self.failure or self.finished:
                return
            self.failure = message
        exit_record.leave(one_line(message, 4000))
        self.send({"failed": one_line(message, 4000)})

    def print_failure(self) -> None:
        """Writes the failure to standard error, and calls `last_words`."""
        # Not by print: the main thread may hold the lock of its stream, or keep back what is printed.
        with contextlib.suppress(OSError):
            standard_streams.write_error(f"tfdist: failed: {self.failure}\n")
        with contextlib.suppress(Exception):
            self.last_words(self.failure)

    # -- the thread ---------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._listen()
        except Exception as error:  # without this thread no loss would ever be noticed
            self._fail(f"the watch on the other workers has failed: {type(error).__name__}: {error}")
        self._end()

    def _listen(self) -> None:
        """Exchanges messages with the others until one is lost."""
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._woken, selectors.EVENT_READ, -1)
            for rank, connection in self._connections.items():
                self._selector.register(connection, selectors.EVENT_READ, rank)
            beaten = last = time.monotonic()
            while not self.failure:
                ready = [key.data for key, _ in self._selector.select(BEAT_S / 2)]
                now = time.monotonic()
                if now - last > 3 * BEAT_S:  # this process itself was stopped, or its lock was held
                    for connection in self._connections.values():
                        connection.heard = now
                last = now
                for rank in ready:
                    if rank < 0:
                        self.signals += [ReceivedSignal(signal.Signals(n), now) for n in self._woken.recv(64)]
                    else:
                        self._read(rank)
                if now - beaten >= BEAT_S:
                    beaten = now
                    phase, update, since = self.state
                    self.send({"beat": phase, "update": update, "for": now - since})
                self._check(now)

    def _read(self, rank: int) -> None:
        """Handles what worker `rank` has sent, or that it has disconnected."""
        connection = self._connections[rank]
        for message in connection.read():
            self._handle(rank, message)
        if connection.lost:
            with self._changed:
                self.gone.add(rank)
                self._selector.unregister(connection)
                self._changed.notify_all()
            if not self.finished:
                ended = isinstance(connection.lost, ClosedError)
                self._miss(rank, "its process ended" if ended else str(connection.lost))

    def _handle(self, rank: int, message: Message) -> None:
        if "beat" in message:
            self._states[rank] = State(message["beat"], message["update"], time.monotonic() - message["for"])
        elif "gather" in message:
            self._collect(rank, message["gather"], message["label"], message["value"])
        elif "gathered" in message:
            with self._changed:
                values = message["values"]
                self._gathered[message["gathered"]] = values * (len(self._hosts) if len(values) == 1 else 1)
                self._changed.notify_all()
        elif "failed" in message:
            self._lose(rank, f"it stopped: {message['failed']}")
        elif "lost" in message:
            lost = exit_record.LostWorker(message["worker"], message["why"]) if message["worker"] >= 0 else None
            self._fail(message["lost"], lost)

    def _collect(self, rank: int, number: int, label: str, value: object) -> None:
        """Adds, on the chief, one worker's value to a `Peers.gather`."""
        with self._changed:
            votes = self._votes.setdefault(number, {})
            votes[rank] = label, value
            first, (expected, _) = next(iter(votes.items()))
            raised = [who for who, (where, _) in votes.items() if where.startswith(heartbeat.RAISED)]
            if label != expected and raised:
                self._lose(raised[0], f"it stopped: {votes[raised[0]][1]}")
            elif label != expected:
                self._fail(
                    f"worker {rank} ({self._hosts[rank]}) is at {label!r} while worker {first} ({self._hosts[first]}) "
                    f"is at {expected!r}: every worker must make the same calls"
                )
            if label != expected or len(votes) < len(self._hosts):
                return
            values = [value for _, (_, value) in sorted(self._votes.pop(number).items())]
        # One for all where they agree, as they mostly do, or bytes would grow with the square of the workers.
        shown = values[:1] if len(set(map(repr, values))) == 1 else values
        # First: once the main thread knows, it may hold Python's lock until all others have gone on, too.
        self.send({"gathered": number, "values": shown})
        with self._changed:
            self._gathered[number] = values
            self._changed.notify_all()

    def _find_silent(self, start_timeout: float, now: float) -> tuple[int, str] | None:
        """Finds a worker of which nothing was heard for too long; `start_timeout` if it may hold Python's lock."""
        for rank, connection in self._connections.items():
            waits = self._states[rank].phase in heartbeat.MAY_HOLD_LOCK
            silence, limit = now - connection.heard, max(SILENT_S, start_timeout if waits else 0.0)
            if silence > limit and rank not in self.gone:
                return rank, f"silent for {silence:.0f} s"
        return None

    def _check(self, now: float) -> None:
        """Looks for workers that are silent or stuck, and for a signal that the main thread does not see."""
        silent = self._find_silent(self.start_timeout, now)
        if silent:
            self._miss(*silent)
            return
        if not self.failure:
            stop = heartbeat.overdue_stop(
                tuple(self.signals), self.state, self._states.values(), self._longest_call, now
            )
            if stop:
                self.code, why = stop
                self.send({"failed": why})
                with self._changed:
                    self.failure = self.failure or why
                    self._changed.notify_all()
        if self._rank == 0:
            states = {0: self.state, **self._states}
            with self._changed:
                waiting = {rank: label for votes in self._votes.values() for rank, (label, _) in votes.items()}
            stall = heartbeat.find_stall(states, waiting, now, self._stall_timeout)
            rank, why = stall or (None, "")
            if rank is not None:
                self._lose(rank, why)
            elif why:
                self._fail(why)

    def _miss(self, rank: int, why: str) -> None:
        """Ends the run because a worker is lost that has given no reason."""
        self._died = self._died or not self.failure
        self._lose(rank, why)

    def _lose(self, rank: int, why: str) -> None:
        lost = exit_record.LostWorker(rank, f"({self._hosts[rank]}): {why}")
        self._fail(f"lost worker {rank} {lost.why}", lost)

    def _fail(self, message: str, lost: exit_record.LostWorker | None = None) -> None:
        if self.failure or self.finished:
            return
        if self._rank == 0:
            worker, why = lost or (-1, "")
            # First: from the next line on the main thread may end the process.
            self.send({"lost": message, "worker": worker, "why": why})
        if lost:
            exit_record.leave(lost)
        with self._changed:
            self.failure = self.failure or message
            self._changed.notify_all()

    def _end(self) -> None:
        """Ends the process unless the main thread does: it may wait for a lost peer in C++ for ever."""
        begun = time.monotonic()
        deadline = begun + (0.0 if self.code != 1 else GRACE_S)
        if self._died and self._rank == 0:
            with contextlib.suppress(Exception):
                self.on_loss()
        if not self._main_thread_acknowledges(deadline):
            self.print_failure()
            # The interpreter would wait for threads of tfdist, too: one may be writing a checkpoint.
            until = max(deadline, begun + EXIT_S) if self._died else deadline
            for thread in threading.enumerate():
                if thread.name.startswith("tfdist ") and not thread.daemon:  # threads of other pools may never end
                    thread.join(max(0.0, until - time.monotonic()))
            os._exit(self.code)
        # The program may go on after the error, but other threads of it must not keep it from its end.
        threading.main_thread().join()
        time.sleep(EXIT_S)
        os._exit(self.code)

    def _main_thread_acknowledges(self, deadline: float) -> bool:
        begun = time.monotonic()
        while not self.acknowledged.wait(max(0.0, min(IN_CALL_S / 4, deadline - time.monotonic()))):
            now, state = time.monotonic(), self.state
            if now >= deadline or (state.phase == "call" and now - max(state.since, begun) >= IN_CALL_S):
                return False
        return True
