"""The thread of a worker that listens to the others, and ends the process when one is lost. No TensorFlow."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.cluster import exit_record, heartbeat, schema, signals, standard_error, votes
from tfdist.cluster.activity import SILENT_S, Activity
from tfdist.cluster.exit_record import LostWorker
from tfdist.cluster.heartbeat import PHASES, State
from tfdist.cluster.signals import GRACE_S, IN_CALL_S
from tfdist.cluster.transport import Transport
from tfdist.cluster.wire import ClosedError, Connection, Message, WireError
from tfdist.errors import one_line

_BEAT = schema.record(**{"beat": schema.one_of(*PHASES), "update": schema.whole(), "for": schema.number})
_FAILED = schema.record(failed=schema.line(4000))

TO_CHIEF = schema.named(
    beat=_BEAT,
    gather=schema.record(gather=schema.whole(), label=schema.text(1000), value=schema.anything),
    failed=_FAILED,
)
"""What other workers say to the chief."""


def of_chief(size: int) -> schema.Reader:
    """Returns what reads the words of the chief of so many workers."""
    values = schema.each(schema.anything, size, size)
    return schema.named(
        beat=_BEAT,
        gathered=schema.record(gathered=schema.whole(), values=values),
        failed=_FAILED,
        lost=schema.record(lost=schema.line(4000), worker=schema.whole(-1), why=schema.line(4000)),
    )


BEAT_S = 1.0
"""Seconds between heartbeats."""
EXIT_S = 15.0
"""Time for a program to end after its main thread has, when a worker is lost: a thread of it may wait for that one."""
END = "the end of the run"
"""The gather with which workers leave."""


class Watch:
    """What this worker knows of the others, and the thread that keeps it up to date.

    Args:
      rank: this worker's.
      hosts: host name of each worker, by rank.
      connections: to other workers, by rank; none for a worker alone, which needs no thread.
      start_timeout: as in `Peers`.
      stall_timeout: as in `Peers`.
      last_words: called with `failure` when the process is ended from beside the main thread.
      on_loss: called on the chief when another worker has died or fallen silent.
    """

    def __init__(
        self,
        rank: int,
        hosts: tuple[str, ...],
        connections: Mapping[int, Connection],
        start_timeout: float,
        stall_timeout: float,
        last_words: Callable[[str], None],
        on_loss: Callable[[], None] = lambda: None,
    ):
        self.failure = ""
        """Why the run cannot go on, once a worker is lost."""
        self.acknowledged = threading.Event()
        """Set when the main thread sees to the failure itself."""
        self.code = 1
        """Exit code of the process after a failure."""
        self.finished = False
        """Whether all workers have reached the end of the run."""
        self.transport = Transport(connections)
        self.activity = Activity(self.transport.ranks)
        self.signals: list[signals.Seen] = []
        self.start_timeout, self._stall_timeout = start_timeout, stall_timeout
        self._rank, self._hosts, self._last_words, self._on_loss = rank, hosts, last_words, on_loss
        self._died = False
        """Whether the failure is that a worker has died or fallen silent, which has told no reason."""
        self._reader = of_chief(len(hosts)) if rank else TO_CHIEF
        self._votes = votes.Votes(hosts)
        self._gathered: dict[int, list[Any]] = {}
        self._changed = threading.Condition()

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._serve, name="tfdist peers", daemon=True).start()

    # -- for the main thread ------------------------------------------------

    def give(self, number: int, label: str, value: object) -> None:
        """Gives this worker's value to a `Peers.gather`, to be collected by the chief."""
        if self._rank == 0:
            self._collect(0, number, label, value)
        else:
            self.transport.tell({"gather": number, "label": label, "value": value})

    def wait_for_values(self, number: int) -> list[object] | None:
        """Waits for all values of a `Peers.gather`; None when the run fails before they are there."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._gathered or self.failure)
            return self._gathered.pop(number, None)

    def wait_for_failure(self, seconds: float) -> None:
        """Waits until something is known to have failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure, seconds)

    def wait_for_departures(self, seconds: float) -> bool:
        """Waits until the processes of all others are gone; returns whether one has been silent instead."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.transport.gone) == len(self.transport.ranks), seconds)
            silence = self.activity.silence(self.transport.gone, SILENT_S, time.monotonic())
            if silence:
                why = f"silent for {silence.seconds:.0f} s at the end of the run"
                self.failure = f"lost worker {silence.rank} ({self._hosts[silence.rank]}): {why}"
                exit_record.leave(LostWorker(silence.rank, f"({self._hosts[silence.rank]}): {why}"))
        return silence is not None

    def stop(self, message: str) -> None:
        """Ends the run by a failure of this worker, and tells the others."""
        with self._changed:
            if self.failure or self.finished:
                return
            self.failure = message
        self.transport.tell({"failed": one_line(message, 4000)})

    def say_last_line(self) -> None:
        """Says the failure on standard error, and whatever `last_words` does with it."""
        # Not by print: the main thread may hold the lock of its stream, or keep back what is printed.
        with contextlib.suppress(OSError):
            standard_error.write(f"tfdist: failed: {self.failure}\n")
        with contextlib.suppress(Exception):
            self._last_words(self.failure)

    # -- the thread ---------------------------------------------------------

    def _serve(self) -> None:
        try:
            with self.transport.waiting():
                self._attend()
        except Exception as error:  # without this thread nobody would ever be missed
            self._fail(f"the watch on the other workers has failed: {type(error).__name__}: {error}")
        self._end()

    def _attend(self) -> None:
        """Talks with the others until one is lost."""
        beaten = last = time.monotonic()
        while not self.failure:
            arrivals = self.transport.wait(BEAT_S / 2)
            now = time.monotonic()
            if now - last > 3 * BEAT_S:  # this process itself was stopped, or its lock was held
                self.activity.pardon(now)
            last = now
            self.signals += [signals.Seen(number, now) for number in arrivals.signals]
            for rank in arrivals.ranks:
                self._read(rank)
            if now - beaten >= BEAT_S:
                beaten = now
                phase, update, since = self.activity.own
                self.transport.tell({"beat": phase, "update": update, "for": now - since})
            self._look(now)

    def _read(self, rank: int) -> None:
        """Takes in what worker `rank` says, or that it has gone."""
        try:
            for message in self.transport.read(rank):
                self._hear(rank, self._reader(message))
        except ClosedError:
            self._forget(rank, "its process ended")
        except WireError as error:
            self._forget(rank, str(error))

    def _forget(self, rank: int, why: str) -> None:
        """Listens no longer to a worker of which nothing more can be expected."""
        with self._changed:
            self.transport.forget(rank)
            self._changed.notify_all()
        if not self.finished:
            self._miss(rank, why)

    def _hear(self, rank: int, message: Message) -> None:
        now = time.monotonic()
        self.activity.hear(rank, now)
        if "beat" in message:
            self.activity.others[rank] = State(message["beat"], message["update"], now - message["for"])
        elif "gather" in message:
            self._collect(rank, message["gather"], message["label"], message["value"])
        elif "gathered" in message:
            with self._changed:
                self._gathered[message["gathered"]] = message["values"]
                self._changed.notify_all()
        elif "failed" in message:
            self._lose(rank, f"it stopped: {message['failed']}")
        elif "lost" in message:
            lost = LostWorker(message["worker"], message["why"]) if message["worker"] >= 0 else None
            self._fail(message["lost"], lost)

    def _collect(self, rank: int, number: int, label: str, value: object) -> None:
        """Takes in, on the chief, one worker's part of a `Peers.gather`."""
        with self._changed:
            try:
                values = self._votes.cast(rank, number, label, value)
            except votes.MismatchError as error:
                self._fail(str(error))
                return
        if values is None:
            return
        # First: once the main thread knows, it may hold Python's lock until all others have gone on, too.
        self.transport.tell({"gathered": number, "values": values})
        with self._changed:
            self._gathered[number] = values
            self._changed.notify_all()

    def _look(self, now: float) -> None:
        """Looks for workers that are silent, stuck, or gone ahead."""
        silence = self.activity.silence(self.transport.gone, self.start_timeout, now)
        if silence:
            self._miss(silence.rank, f"silent for {silence.seconds:.0f} s")
            return
        self._heed(now)
        if self._rank == 0:
            ended = self._votes.waiting_at(END)
            states = {0: self.activity.own, **self.activity.others}
            stall = heartbeat.find(states, ended, now, self._stall_timeout)
            if stall is None:
                return
            if stall.rank is None:
                self._fail(stall.why)
            else:
                self._lose(stall.rank, stall.why)

    def _heed(self, now: float) -> None:
        """Stops this worker after a signal that its main thread, waiting in C++ for another worker, does not see."""
        if self.failure:
            return
        activity = self.activity
        stop = signals.overdue(tuple(self.signals), activity.own, activity.others.values(), activity.longest_call, now)
        if stop is None:
            return
        self.code = stop.code
        self.transport.tell({"failed": stop.why})
        with self._changed:
            self.failure = self.failure or stop.why
            self._changed.notify_all()

    def _miss(self, rank: int, why: str) -> None:
        """Ends the run because nothing is heard of a worker, which has not said why."""
        self._died = self._died or not self.failure
        self._lose(rank, why)

    def _lose(self, rank: int, why: str) -> None:
        lost = LostWorker(rank, f"({self._hosts[rank]}): {why}")
        self._fail(f"lost worker {rank} {lost.why}", lost)

    def _fail(self, message: str, lost: LostWorker | None = None) -> None:
        if self.failure or self.finished:
            return
        if self._rank == 0:
            worker, why = lost or (-1, "")
            # First: from the next line on the main thread may end the process.
            self.transport.tell({"lost": message, "worker": worker, "why": why})
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
                self._on_loss()
        if not self._seen_to(deadline):
            self.say_last_line()
            _end_threads(max(deadline, begun + EXIT_S) if self._died else deadline)
            os._exit(self.code)
        # The program may go on after the error, but other threads of it must not keep it from its end.
        threading.main_thread().join()
        time.sleep(EXIT_S)
        os._exit(self.code)

    def _seen_to(self, deadline: float) -> bool:
        """Returns whether the main thread sees to the failure, once that is known."""
        begun = time.monotonic()
        while not self.acknowledged.wait(max(0.0, min(IN_CALL_S / 4, deadline - time.monotonic()))):
            now, own = time.monotonic(), self.activity.own
            if now >= deadline or (own.phase == "call" and now - max(own.since, begun) >= IN_CALL_S):
                return False
        return True


def _end_threads(deadline: float) -> None:
    """Lets threads of tfdist end for which the interpreter would wait, too: one may be writing a checkpoint."""
    for thread in threading.enumerate():
        if thread.name.startswith("tfdist ") and not thread.daemon:  # pools have threads that never end by themselves
            thread.join(max(0.0, deadline - time.monotonic()))
