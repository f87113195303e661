"""What a round of workers comes to where nodes may come and go. No TensorFlow, no clock."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from tfdist.cluster.wire import Message
from tfdist.launch import node_agent
from tfdist.launch.failure_policy import BLAME_S, FINAL, STOP_S, Cause, Verdict
from tfdist.launch.worker_process import Exit

PATIENT_S = 300.0
"""Workers have so long to end the update in progress for a node that has come: nothing is urgent."""


class Farewell(NamedTuple):
    """The end of a node that leaves while the others go on."""

    code: int
    """Exit code of its launcher."""
    line: str
    """What it says."""


def left(signal: str) -> Farewell:
    """Returns the end of a node that a signal has asked to stop."""
    return Farewell(node_agent.code_of(signal), f"{signal}: this node has left the job")


class ElasticVerdict(Verdict):
    """What a round comes to: beside the failures of the program, which are the base's, that it needs other nodes.

    Args:
      members: the nodes that take part, in the order of their ranks.
      names: how to call them.
      new: those of them that have never taken part before, while others have.
    """

    def __init__(self, members: Sequence[int], names: Sequence[str], new: Collection[int] = ()):
        super().__init__(0)
        self.busy = set(members)
        self.leaving: dict[int, Farewell] = {}
        """Nodes that do not take part any more."""
        self.why = ""
        """Why the next round has other nodes; nothing where it has not."""
        self._names = dict(zip(members, names))
        self._new = sorted(new)
        self._done = False
        """Whether the chief has come to the end of the program."""
        self._ends = False
        """Whether some worker has."""
        self._heard_of = 0

    @property
    def changes(self) -> bool:
        """Whether the round has ended for a change of the nodes, and for nothing else."""
        return bool(self.why) and not (self.cause or self._done or self._stopping or self._stuck or self._forced)

    @property
    def code(self) -> int:
        if not self.why or self.cause or self._stopping or self._forced:
            return super().code
        return 0 if self._done and not self._stuck else 1

    @property
    def reason(self) -> str:
        return super().reason or self.why

    @property
    def may_restart(self) -> bool:
        return self.code not in FINAL and not (self._stopping or self._stuck)

    @property
    def settled(self) -> bool:
        """Whether it is known already that the round ends, or is about to end by itself."""
        return bool(self.cause or self.why or self._ends or self._asked or self._preempted)

    def hear(self, node: int, news: Message, now: float) -> None:
        """Takes in what has happened on a node; that of a node that only waits for a place changes nothing."""
        if node not in self._names:
            return
        self._heard_of = node
        if news["event"] == "lost" and not self._stopping:
            self._shrink(node, news["line"], now)
        elif news["event"] == "signal" and node and not self._stopping:
            self._leave(node, news["name"], now)
        else:
            super().hear(node, news, now)

    def grow(self, why: str, now: float) -> None:
        """Ends the round, in order, because other nodes shall take part."""
        self._change(why, now)
        self._asked = True
        self._kill_at = now + PATIENT_S
        self._orders.append({"order": "stop"})

    def suspect(self, silent: Collection[int], now: float) -> None:
        """Waits with the blame for a worker that is lost while its node, too, is not heard of."""
        if silent and self.cause and self.cause.weak and not self._ending:
            self._decide_at = now + BLAME_S

    def _change(self, why: str, now: float) -> None:
        self.since = min(self.since, now)
        self.why = f"{self.why}; {why}" if self.why else why

    def _shrink(self, node: int, line: str, now: float) -> None:
        """Goes on without a node that is lost; what its loss has done to others is no failure."""
        missed = node in self.busy
        self.busy.discard(node)
        if self.cause and (self.cause.weak or self.cause.node == node):
            self.cause, missed = None, True
        self._say(line)
        self._change(line, now)
        if missed and not self._ending and self.cause is None:
            self._end(Cause(1, ""), now)  # nobody is to blame; without the lost workers the others can do nothing

    def _leave(self, node: int, name: str, now: float) -> None:
        """Lets a node go that was asked to stop, after the update in progress."""
        if node in self.leaving:
            return
        self.leaving[node] = left(name)
        line = f"{name}: {self._names[node]} leaves"
        self._change(line, now)
        if self._ending:
            return
        self._say(f"{line}; the workers stop after the update in progress, and have {STOP_S:g} s for it")
        self._kill_at = min(self._kill_at, now + STOP_S)
        if not self._asked:
            self._asked = True
            self._orders.append({"order": "stop"})

    def _exit(self, node: int, exit: Exit, now: float) -> None:
        if exit.code == 0:
            self._ends = True
            self._done = self._done or exit.rank == 0
        if self._asked and not self._stopping and exit.lost:
            # One that was asked before it could save has taken this one with it.
            self._kill_at = min(self._kill_at, now + STOP_S)
            return
        super()._exit(node, exit, now)

    def _reject(self, cause: Cause, now: float) -> None:
        """Goes on without the nodes that have just joined: it was right without them, and is not with them."""
        who = ", ".join(self._names[node] for node in self._new)
        why = next((line for line in reversed(cause.lines) if line.startswith("tfdist: error: ")), cause.text)
        line = f"{who} cannot take part: {why.removeprefix('tfdist: error: ')}"
        self.cause = None
        self.leaving |= {node: Farewell(2, f"error: {line}") for node in self._new}
        self._say(line)
        self._change(line, now)
        if self._asked:  # others may be saving
            self._kill_at = min(self._kill_at, now + STOP_S)
        else:
            self._end(Cause(1, ""), now)

    def _fail(self, cause: Cause, now: float) -> None:
        fails = self._ending or self._stopping or (self.cause and not self.cause.weak)
        if cause.code == 2 and self._new and not fails:
            self._reject(cause, now)
            return
        super()._fail(cause, now)
        if cause is not self.cause or self._ending:
            return
        if self._asked:  # others may be saving
            self._decide_at, self._kill_at = math.inf, min(self._kill_at, now + STOP_S)
        elif self._heard_of and not cause.weak:
            # A machine that goes down kills its workers first: its launcher may be next.
            self._decide_at = now + BLAME_S

    def _kill(self, code: int, now: float) -> None:
        goes_on = bool(self.why) and not self._stopping
        if goes_on and self.cause and not self._ending:
            self._end(self.cause, now)  # which nobody has been told of yet
        super()._kill(code, now)
        if goes_on:  # those that do not end in order end all the same
            self._forced, self._ending = 0, True
