"""The other workers of a run, as the main thread of one of them sees them. No TensorFlow.

Every worker has a connection to the chief, which carries heartbeats, small values that all must agree on, and the end
of the run. TensorFlow's own collectives notice a dead peer after ten seconds or never, and cannot say which: this can.
"""

import atexit
import contextlib
import math
import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from tfdist.cluster import exit_record, heartbeat
from tfdist.cluster.watch import Watch
from tfdist.cluster.wire import Connection
from tfdist.config.commands import standard_streams
from tfdist.errors import Interrupted, PeerError, UserError, one_line

ROUNDING = 1e-5  # relative to the largest number of a list; ten times this relative to a number itself
EXIT_WAIT_S = 20.0  # how long the chief waits at the end for the others' processes to exit

_OPEN: "weakref.WeakSet[Peers]" = weakref.WeakSet()  # the workers that this process is; a forked child is none

T = TypeVar("T")
N = TypeVar("N")


class Peers:
    """This worker's view of the others.

    Args:
      rank: this worker's, 0 for the chief.
      hosts: host name of each worker, by rank.
      addresses: `host:port` of each worker for TensorFlow, by rank.
      connections: on the chief to every other worker by rank, on the others to rank 0; none for a worker alone.
      held: the socket that reserves this worker's port until TensorFlow takes it, if any.
      start_timeout: seconds for what comes before training, compilation apart.
      stall_timeout: seconds without an update before a worker counts as stuck.
    """

    def __init__(
        self,
        rank: int = 0,
        hosts: tuple[str, ...] = ("",),
        addresses: tuple[str, ...] = (),
        connections: Mapping[int, Connection] | None = None,
        held: socket.socket | None = None,
        start_timeout: float = 120.0,
        stall_timeout: float = 600.0,
    ):
        self.rank, self.size = rank, len(hosts)
        self.hosts, self.addresses = hosts, addresses
        self.watch = Watch(rank, hosts, connections or {}, start_timeout, stall_timeout)
        self._alone = not connections
        self._held = held
        self._gathers = 0
        self.doing_apart = ""  # what this worker does without the others, in words; or ""
        if not self._alone:
            self.watch.start()
            atexit.register(self._at_exit)
            _OPEN.add(self)

    def abandon(self) -> None:
        """Disconnects in a forked child without notice: it is not a worker, whatever happens to it.

        Its exit handlers would end the run for its parent, or wait for a thread that the child does not have.
        """
        atexit.unregister(self._at_exit)
        self.watch.abandon()
        self.doing_apart = f"a process that worker {self.rank} has forked is not a worker"
        self.release_port()

    failure = property(lambda self: self.watch.failure)
    """Why the run cannot go on, once a worker is lost; else ""."""

    def release_port(self) -> None:
        """Gives up the reserved port, for TensorFlow to bind it in the next moment."""
        if self._held:
            self._held.close()

    def doing(self, phase: str, update: int | None = None) -> None:
        """Records that a phase (see `heartbeat.State`) begins, after so many updates or as before, to detect stalls.

        Raises UserError if all workers have a part in that phase, and this one is `apart`.
        """
        if phase in heartbeat.TOGETHER:
            self._needs_others()
        self.watch.begin(phase, update)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Notes that this worker is in another phase meanwhile."""
        before = self.watch.state.phase
        self.doing(phase)
        try:
            yield
        finally:
            self.doing(before)

    @contextlib.contextmanager
    def apart(self, what: str) -> Iterator[None]:
        """Notes that this worker does something without the others meanwhile, which may take as long as saving does.

        `what` tells who then calls something that needs all workers, which would wait for ever.
        """
        with self.during("saving"):
            self.doing_apart, before = what, self.doing_apart
            try:
                yield
            finally:
                self.doing_apart = before

    def _needs_others(self) -> None:
        if self.doing_apart:
            what = f"{self.doing_apart}, and calls what needs all workers"
            raise UserError(what, "leave that out, or set chief_only=False")

    def seeing_signals(self) -> contextlib.AbstractContextManager[None]:
        """Sees signals even while the main thread, which handles them, waits in C++ for a lost worker."""
        return contextlib.nullcontext() if self._alone else self.watch.seeing_signals()

    def gather(self, label: str, value: object = None) -> list[Any]:
        """Waits until all workers have called this with the same label; returns their values (JSON), in order of rank.

        Raises PeerError if a worker was lost meanwhile or is at another label, UserError if this one is `apart`.
        """
        if self._alone:
            return [value]
        self._needs_others()
        number, self._gathers = self._gathers, self._gathers + 1
        self.watch.give(number, label, value)
        with self.during("waiting"):
            values = self.watch.wait_for_values(number)
        if values is None:
            raise self.error()
        return values

    @contextlib.contextmanager
    def raising_together(self, what: str) -> Iterator[None]:
        """Lets an error leave `what` if it does so on all workers, or else ends the run.

        A script may catch it, and a worker that goes on alone would leave the others in a collective for ever.
        """
        try:
            yield
        except Exception as error:
            if not (self._alone or self.doing_apart or self.failure or isinstance(error, Interrupted)):
                number, self._gathers = self._gathers, self._gathers + 1
                kind, why = type(error).__name__, one_line(error, 4000)
                self.watch.give(number, f"{heartbeat.RAISED}{what}: {kind}", why)
                with self.during("waiting"):
                    others = self.watch.wait_for_values(number, heartbeat.AHEAD_S)
                if others is None:
                    exit_record.leave(why)
                    self.fail(why, 2 if isinstance(error, UserError) else 1)
            raise

    def check_same(
        self,
        facts: Mapping[str, object],
        label: str,
        what: str = "data",
        fix: str = "give all workers the same, the whole of it, since each takes its own rows",
    ) -> None:
        """Raises UserError on all workers if one has other facts: calls would not match, or examples be left out."""
        if self.size == 1:
            return
        first, *others = self.gather(label, facts)
        for rank, theirs in enumerate(others, 1):
            for name, value, expected in differing_facts(theirs, first):
                raise UserError(
                    f"worker {rank} ({self.hosts[rank]}) has other {what} than worker 0 ({name}: {value} and not "
                    f"{expected})",
                    fix,
                )

    def once(
        self,
        work: Callable[[], T],
        offer: Callable[[T], tuple[T, N | None]] = lambda result: (result, None),
        take: Callable[[N], T | None] = lambda note: None,
    ) -> T:
        """Runs `work` first on the chief, then on one worker of each host, then on the others, and returns its result.

        It is for work that leaves something on a disk, which may or may not be shared.

        Args:
          offer: called with the result where the host has other workers; returns it with a note for them, or None.
          take: called on those others with that note; returns the result, or None to do the work here.
        """
        if self.size == 1:
            return work()
        first = self.hosts.index(self.hosts[self.rank])
        own_turn = 0 if self.rank == 0 else 1 if first == self.rank else 2
        others = self.hosts.count(self.hosts[self.rank]) > 1
        note: N | None = None
        for now in range(3):
            offered: N | None = None
            if now == own_turn:
                taken = None if note is None else take(note)
                result = work() if taken is None else taken
                if first == self.rank and others:
                    result, offered = offer(result)
            note = self.gather("the data set's preparation", offered)[first] or note
        return result

    def verdict(self) -> str:
        """Returns what the peers know about the cause of an error in a collective, once they can know; else ""."""
        if not self._alone:
            self.watch.wait_for_failure(heartbeat.SILENT_S + 3 * heartbeat.BEAT_S)
        return self.failure

    def error(self) -> PeerError:
        """Returns `failure` as an error to raise; from now on the main thread sees to the end of the process."""
        self.watch.acknowledged.set()
        return PeerError(self.failure)

    def fail(self, message: str, code: int = 1) -> None:
        """Tells the others in a line that this worker stops with an error, so that they do; it exits with `code`."""
        self.watch.acknowledged.set()
        if self.watch.code not in heartbeat.BY_SIGNAL:
            self.watch.code = code
        if not self._alone:
            self.watch.stop(message)

    def leave(self) -> None:
        """Ends the run together: a worker that went first would take the others' collectives with it.

        The chief goes last, since it serves the others to their end.
        """
        if self._alone or self.watch.finished:
            return
        try:
            self.gather(heartbeat.END)
        except PeerError:
            self.watch.print_failure()
            return
        self.watch.finished = True
        if self.rank == 0 and self.watch.wait_for_departures(EXIT_WAIT_S):
            # Whoever has started the workers would wait for that one for ever. The run itself is over.
            self.watch.acknowledged.set()
            self.watch.finished = False
            standard_streams.write_error(f"tfdist: failed: {self.failure}\n")

    def _at_exit(self) -> None:
        """Ends a program that did not call `leave` together with the others, or at once after an error."""
        error = getattr(sys, "last_value", None)
        if error is not None and not self.watch.finished:
            # A collective fails where it is noticed, not where the cause is.
            of_tensorflow = type(error).__module__.startswith("tensorflow")
            if of_tensorflow and not self.watch.acknowledged.is_set() and self.verdict():
                self.watch.print_failure()
            self.fail(f"{type(error).__name__}: {one_line(error, 400)}")
        if not self.failure:
            self.leave()
        elif not self.watch.acknowledged.is_set():
            self.watch.acknowledged.set()
            self.watch.print_failure()
        if not self.failure or self.watch.finished:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(self.watch.code)  # TensorFlow would wait for the lost worker


os.register_at_fork(after_in_child=lambda: [*map(Peers.abandon, list(_OPEN))])


def differing_facts(theirs: Mapping[str, object], mine: Mapping[str, object]) -> Iterator[tuple[str, str, str]]:
    """Yields name, their value and mine of each fact in which both differ, numbers in lists by more than rounding."""
    for name, expected in mine.items():  # in its order, so that all workers report the same
        value = theirs.get(name)
        if isinstance(expected, list) and isinstance(value, list) and any(isinstance(v, float) for v in expected):
            value, expected = next(_differing(value, expected), (None, None))
        if name in theirs and value != expected:
            yield name, str(value)[:100], str(expected)[:100]


def _differing(theirs: list[object], mine: list[object]) -> Iterator[tuple[object, object]]:
    """Yields pairs that differ by more than rounding, or the lengths if they differ."""
    if len(theirs) != len(mine):
        yield f"{len(theirs)} values", f"{len(mine)} values"
        return
    floats = [abs(v) for v in mine if isinstance(v, float) and math.isfinite(v)]
    allowed = ROUNDING * max(floats, default=0.0)
    for value, expected in zip(theirs, mine):
        if not (isinstance(value, float) and isinstance(expected, float)):
            same = value == expected
        elif math.isnan(expected):
            same = math.isnan(value)
        else:
            same = math.isclose(value, expected, rel_tol=10 * ROUNDING, abs_tol=allowed)
        if not same:
            yield value, expected
