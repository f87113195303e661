"""Decides how an attempt of all workers ends: root cause, shutdown, exit code. No TensorFlow, no sockets, no clock."""

import dataclasses
import math
import signal
from collections.abc import Collection, Mapping
from typing import NamedTuple

from tfdist.cluster.wire import Message
from tfdist.launch import node_agent
from tfdist.launch.worker_process import Exit

STOP_S = 30.0  # from the signal that asks the workers to stop to SIGKILL
GROW_S = 300.0  # the same when they stop for a node that has joined: nothing is urgent
BLAME_S = 2.0  # how long a worker that stopped only because another was lost waits for that one to be found
FINAL = (0, 2, 130, 143)  # exit codes after which a restart would end the same way, or is not wanted


@dataclasses.dataclass(frozen=True, slots=True)
class Cause:
    code: int  # exit code for all launchers
    text: str
    lines: tuple[str, ...] = ()  # last lines of the worker
    weak: bool = False  # A consequence of something else, as the worker itself reports
    node: int = 0  # where it was reported
    error: str = ""  # the worker's own error


class NodeExit(NamedTuple):
    """The end of a node that leaves while the others go on."""

    code: int  # exit code of its launcher
    line: str

    @classmethod
    def by_signal(cls, name: str) -> "NodeExit":
        """Returns the end of a node that a signal has asked to stop."""
        return cls(node_agent.code_of(name), f"{name}: this node has left the job")


class AttemptOutcome:
    """How an attempt ends, decided from what is heard of it. `orders` says what is to be done; nothing is done here.

    Args:
      nodes: those that take part, in the order of their ranks, each with its name for messages.
      elastic: nodes may join and leave. Then an attempt may also end only because the next one has other nodes.
      new: nodes that take part for the first time, while others have before.
    """

    def __init__(self, nodes: Mapping[int, str], elastic: bool = False, new: Collection[int] = ()):
        self.busy = set(nodes)  # nodes on which workers of this attempt may live
        self.cause: Cause | None = None
        self.since = math.inf  # when the first event happened that has ended the attempt, except the end of the program
        self.leaving: dict[int, NodeExit] = {}  # nodes that leave the job
        self._change = ""  # why the next attempt has other nodes
        self._nodes, self._elastic, self._new = dict(nodes), elastic, sorted(new)
        self._reporter = 0  # node of the last event
        self._chief_done = self._some_done = False  # reached the end of the program: the chief, any worker
        self._preempted = False  # whether a worker was stopped by a signal of its own
        self._stopping = False  # whether the whole job is to stop
        self._stop_sent = False  # whether the workers were asked to stop, for whatever reason
        self._ending = False
        self._forced = 0
        self._stuck = False
        self._stubborn: list[str] = []
        self._noticed: dict[int, Exit] = {}  # workers that stopped because they lost another one, by rank
        self._signaled: set[int] = set()
        self._decide_at = self._kill_at = self._give_up_at = math.inf
        self._orders: list[Message] = []

    @property
    def deadline(self) -> float:
        """Time at which `orders` acts by itself."""
        decide_at = math.inf if self._stopping else self._decide_at  # others may be saving
        return min(decide_at, self._kill_at, self._give_up_at)

    @property
    def changes(self) -> bool:
        """Whether the attempt ended for a change of the nodes alone."""
        finished = self.cause or self._chief_done or self._stopping or self._stuck or self._forced
        return bool(self._change) and not finished

    @property
    def code(self) -> int:
        """Exit code of the launcher."""
        if self._forced == 130:
            return 130
        if self.cause:
            return self.cause.code
        if self._change and not (self._stopping or self._forced):
            return 0 if self._chief_done and not self._stuck else 1
        return self._forced or (143 if self._preempted else 0)

    reason = property(lambda self: (self.cause.text if self.cause else "") or self._change)
    """Why the attempt ended, if not by the end of the program."""

    @property
    def may_restart(self) -> bool:
        """Whether a restart might help."""
        preempted = self._preempted and not self._elastic
        return self.code not in FINAL and not (self._stopping or preempted or self._stuck)

    @property
    def settled(self) -> bool:
        """Whether the attempt is known to end, or about to end by itself."""
        return bool(self.cause or self._change or self._some_done or self._stop_sent or self._preempted)

    def hear(self, node: int, event: Message, now: float) -> None:
        """Takes an event on a node into account; one on a node that takes no part changes nothing."""
        if node not in self._nodes:
            return
        self._reporter = node
        leaves = self._elastic and not self._stopping
        match event["event"]:
            case "ended":
                self.busy.discard(node)
            case "lost" if leaves:
                self._go_on_without(node, event["line"], now)
            case "lost":
                self.busy.discard(node)
                self._fail(Cause(1, event["line"], node=node), now)
            case "cannot":
                self._fail(Cause(2, event["line"], node=node), now)
            case "exit":
                self._exit(node, Exit(**event["exit"]), now)
            case "signal" if leaves and node:
                self._leave(node, event["name"], now)
            case "signal":
                self._signal(node, event["name"], now)

    def grow(self, why: str, now: float) -> None:
        """Ends the attempt, in order, because other nodes join."""
        self._note_change(why, now)
        self._stop_sent = True
        self._kill_at = now + GROW_S
        self._orders.append({"order": "stop"})

    def suspect(self, silent: Collection[int], now: float) -> None:
        """Delays the blame for a lost worker while nothing is heard of its node either."""
        if silent and self.cause and self.cause.weak and not self._ending:
            self._decide_at = now + BLAME_S

    def orders(self, now: float) -> list[Message]:
        """Returns what is to be done now."""
        if now >= self._decide_at and not self._stopping and self.cause:
            self._end(self.cause, now)
        if now >= self._kill_at:
            self._kill(137, now)
        if now >= self._give_up_at:
            self._stuck, self._give_up_at = True, math.inf
            where = ", ".join(map(str, sorted(self.busy)))
            self._say(f"workers on node {where} do not end even when killed: they are left to the system")
            self.busy.clear()
        orders, self._orders = self._orders, []
        return orders

    def summary(self) -> list[Message]:
        """Returns the orders that remain when the attempt is over."""
        if self.cause and not self._ending:
            self._end(self.cause, math.inf)
        if self._stubborn:
            ranks = ", ".join(self._stubborn)
            self._say(f"{ranks} had not ended when asked to, and {'were' if ',' in ranks else 'was'} killed")
        orders, self._orders = self._orders, []
        return orders

    def _exit(self, node: int, exit: Exit, now: float) -> None:
        if exit.code == 0:
            self._some_done = True
            self._chief_done = self._chief_done or exit.rank == 0
        if self._stop_sent and not self._stopping and exit.lost:
            # One that was asked before it could save has taken this one with it.
            self._kill_at = min(self._kill_at, now + STOP_S)
        elif exit.code == -signal.SIGKILL and (self._ending or self._forced):
            self._stubborn.append(f"rank {exit.rank}")
        elif exit.code == 0 or self._ending:
            pass
        elif exit.status == 143 and (exit.code == 143 or self._stop_sent):
            # One worker that was asked to stop takes the others with it, all in order.
            self._preempted = True
            self._kill_at = min(self._kill_at, now + STOP_S)
        else:
            if exit.lost:
                self._noticed[exit.rank] = exit
            self._fail(Cause(exit.status, exit.describe(), tuple(exit.lines), exit.lost, node, exit.error), now)

    def _fail(self, cause: Cause, now: float) -> None:
        """Records a failure, unless one that matters more is known."""
        if self._ending:
            return
        undecided = self.cause is None or self.cause.weak
        if cause.code == 2 and self._new and undecided and not self._stopping:
            self._reject_new_nodes(cause, now)
            return
        self.since = min(self.since, now)
        if self.cause and (cause.weak or not undecided):
            return
        self.cause = cause
        self._decide_at = min(self._decide_at, now + BLAME_S if cause.weak else now)
        if self._elastic and self._stop_sent:  # others may be saving
            self._decide_at, self._kill_at = math.inf, min(self._kill_at, now + STOP_S)
        elif self._elastic and self._reporter and not cause.weak:
            # A machine that goes down kills its workers first: its launcher may be next.
            self._decide_at = now + BLAME_S

    def _reject_new_nodes(self, cause: Cause, now: float) -> None:
        """Goes on without the nodes that have just joined: the input was right without them, and is not with them."""
        who = ", ".join(self._nodes[node] for node in self._new)
        line = f"{who} cannot take part: {cause.error or cause.text}"
        self.cause = None
        self.leaving |= {node: NodeExit(2, f"error: {line}") for node in self._new}
        self._say(line)
        self._note_change(line, now)
        if self._stop_sent:  # others may be saving
            self._kill_at = min(self._kill_at, now + STOP_S)
        else:
            self._end(Cause(1, ""), now)

    def _note_change(self, why: str, now: float) -> None:
        self.since = min(self.since, now)
        self._change = f"{self._change}; {why}" if self._change else why

    def _go_on_without(self, node: int, line: str, now: float) -> None:
        """Goes on without a node that is lost; what its loss has done to others is no failure."""
        missed = node in self.busy
        self.busy.discard(node)
        if self.cause and (self.cause.weak or self.cause.node == node):
            self.cause, missed = None, True
        self._say(line)
        self._note_change(line, now)
        if missed and not self._ending and self.cause is None:
            self._end(Cause(1, ""), now)  # nobody is to blame; without the lost workers the others can do nothing

    def _leave(self, node: int, name: str, now: float) -> None:
        """Lets a node leave that a signal has asked to stop, after the update in progress."""
        if node in self.leaving:
            return
        self.leaving[node] = NodeExit.by_signal(name)
        line = f"{name}: {self._nodes[node]} leaves"
        self._note_change(line, now)
        if not self._ending:
            self._stop(f"{line};", now)

    def _signal(self, node: int, name: str, now: float) -> None:
        """Stops the job; srun and the like send one Ctrl-C to all launchers, so that only one's second counts."""
        if name == "SIGINT" and node in self._signaled:
            self._kill(130, now)
        elif not self._stopping:
            if self._ending:
                self._say(f"{name}: there will be no restart")
            else:
                self._stop(f"{name}:", now, again=True)
            self._stopping = self._stop_sent = True
        self._signaled.add(node)

    def _stop(self, why: str, now: float, again: bool = False) -> None:
        self._say(f"{why} the workers stop after the update in progress, and have {STOP_S:g} s for it")
        self._kill_at = min(self._kill_at, now + STOP_S)
        if again or not self._stop_sent:
            self._stop_sent = True
            self._orders.append({"order": "stop"})

    def _end(self, cause: Cause, now: float) -> None:
        """Ends all workers, and names the cause."""
        if cause.weak:
            self.cause = cause = self._missing(cause)
        self._ending, self._decide_at = True, math.inf
        self._give_up_at = min(self._give_up_at, now + node_agent.END_S)
        self._orders.append({"order": "end", "text": cause.text, "lines": list(cause.lines)})

    def _missing(self, cause: Cause) -> Cause:
        """Returns, for a consequence, the worker that was lost: one that is silent has not ended."""
        exit, seen = next(iter(self._noticed.values())), set()
        # A lost worker may itself have lost another one before.
        while exit.culprit in self._noticed and exit.culprit not in seen:
            seen.add(exit.culprit)
            exit = self._noticed[exit.culprit]
        if exit.culprit < 0:
            return cause
        text = f"rank {exit.culprit} {exit.complaint}, as rank {exit.rank} has noticed"
        return dataclasses.replace(cause, text=text, lines=())

    def _kill(self, code: int, now: float) -> None:
        goes_on = bool(self._change) and not self._stopping
        if goes_on and self.cause and not self._ending:
            self._end(self.cause, now)  # which has not been reported yet
        self._forced, self._kill_at = self._forced or code, math.inf
        self._give_up_at = min(self._give_up_at, now + node_agent.END_S)
        self._orders.append({"order": "kill"})
        if goes_on:  # those that do not end in order end all the same
            self._forced, self._ending = 0, True

    def _say(self, line: str) -> None:
        self._orders.append({"order": "say", "line": line, "error": True})
