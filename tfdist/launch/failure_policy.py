"""What a round of workers comes to: whom to blame, when to end the others, which exit code. No TensorFlow, no clock."""

from __future__ import annotations

import dataclasses
import math
import signal

from tfdist.cluster.wire import Message
from tfdist.launch import node_agent
from tfdist.launch.worker_process import Exit

STOP_S = 30.0
"""From the signal that asks the workers to stop to the one that does not ask."""
BLAME_S = 2.0
"""How long a worker that stopped only because another was lost waits for that other one to be found."""
FINAL = (0, 2, 130, 143)
"""Exit codes after which a restart would end the same way, or is not wanted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cause:
    """Why a round has failed."""

    code: int
    """Exit code for all launchers."""
    text: str
    lines: tuple[str, ...] = ()
    weak: bool = False
    """A consequence of something else, as the worker says itself."""
    node: int = 0
    """Where it was heard of."""


class Verdict:
    """What a round comes to, from what is heard of it. It does nothing itself: `orders` says what is to be done."""

    def __init__(self, nnodes: int):
        self.busy = set(range(nnodes))
        """Nodes on which workers of this round may live."""
        self.cause: Cause | None = None
        self.since = math.inf
        """When the first thing happened that has ended the round, if not the end of the program."""
        self._preempted = False
        self._stopping = False
        """Whether all of it shall stop."""
        self._asked = False
        """Whether the workers were asked to stop, for whatever reason."""
        self._ending = False
        self._forced = 0
        self._stuck = False
        self._stubborn: list[str] = []
        self._noticed: dict[int, Exit] = {}
        """Workers that stopped because they missed another one, by rank."""
        self._signalled: set[int] = set()
        self._decide_at = self._kill_at = self._give_up_at = math.inf
        self._orders: list[Message] = []

    @property
    def deadline(self) -> float:
        """Time at which `orders` has something to say of its own."""
        decide_at = math.inf if self._stopping else self._decide_at  # others may be saving
        return min(decide_at, self._kill_at, self._give_up_at)

    @property
    def code(self) -> int:
        """Exit code of the launcher."""
        if self._forced == 130:
            return 130
        if self.cause:
            return self.cause.code
        return self._forced or (143 if self._preempted else 0)

    @property
    def reason(self) -> str:
        """Why the round has ended, if not by the end of the program."""
        return self.cause.text if self.cause else ""

    @property
    def may_restart(self) -> bool:
        """Whether another round might go better."""
        return self.code not in FINAL and not (self._stopping or self._preempted or self._stuck)

    def hear(self, node: int, news: Message, now: float) -> None:
        """Takes in what has happened on a node."""
        event = news["event"]
        if event == "ended":
            self.busy.discard(node)
        elif event == "lost":
            self.busy.discard(node)
            self._fail(Cause(1, news["line"], node=node), now)
        elif event == "cannot":
            self._fail(Cause(2, news["line"], node=node), now)
        elif event == "exit":
            self._exit(node, Exit(**news["exit"]), now)
        elif event == "signal":
            self._signal(node, news["name"], now)

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
        """Returns what remains to be said when the round is over."""
        if self.cause and not self._ending:
            self._end(self.cause, math.inf)
        if self._stubborn:
            ranks = ", ".join(self._stubborn)
            self._say(f"{ranks} had not ended when asked to, and {'were' if ',' in ranks else 'was'} killed")
        orders, self._orders = self._orders, []
        return orders

    def _exit(self, node: int, exit: Exit, now: float) -> None:
        if exit.code == -signal.SIGKILL and (self._ending or self._forced):
            self._stubborn.append(f"rank {exit.rank}")
            return
        if exit.code == 0 or self._ending:
            return
        if exit.status == 143 and (exit.code == 143 or self._asked):
            # One worker that was asked to stop takes the others with it, all in order.
            self._preempted = True
            self._kill_at = min(self._kill_at, now + STOP_S)
        else:
            if exit.lost:
                self._noticed[exit.rank] = exit
            self._fail(Cause(exit.status, exit.describe(), tuple(exit.lines), exit.lost, node), now)

    def _fail(self, cause: Cause, now: float) -> None:
        if self._ending:
            return
        self.since = min(self.since, now)
        if self.cause is None or (self.cause.weak and not cause.weak):
            self.cause = cause
            self._decide_at = min(self._decide_at, now + BLAME_S if cause.weak else now)

    def _signal(self, node: int, name: str, now: float) -> None:
        # srun and the like send one Ctrl-C to all launchers: only one's second counts.
        if name == "SIGINT" and node in self._signalled:
            self._kill(130, now)
        elif not self._stopping:
            self._stopping = self._asked = True
            if self._ending:
                self._say(f"{name}: there will be no restart")
            else:
                self._say(f"{name}: the workers stop after the update in progress, and have {STOP_S:g} s for it")
                self._kill_at = min(self._kill_at, now + STOP_S)
                self._orders.append({"order": "stop"})
        self._signalled.add(node)

    def _missing(self, cause: Cause) -> Cause:
        """Returns, for a cause that is a consequence, the worker that was missed: one that is silent has not ended."""
        exit, seen = next(iter(self._noticed.values())), set()
        # A worker that was missed may itself have missed another one before.
        while exit.culprit in self._noticed and exit.culprit not in seen:
            seen.add(exit.culprit)
            exit = self._noticed[exit.culprit]
        if exit.culprit < 0:
            return cause
        return dataclasses.replace(
            cause, text=f"rank {exit.culprit} {exit.complaint}, as rank {exit.rank} has noticed", lines=()
        )

    def _end(self, cause: Cause, now: float) -> None:
        if cause.weak:
            self.cause = cause = self._missing(cause)
        self._ending, self._decide_at = True, math.inf
        self._give_up_at = min(self._give_up_at, now + node_agent.END_S)
        self._orders.append({"order": "end", "text": cause.text, "lines": list(cause.lines)})

    def _kill(self, code: int, now: float) -> None:
        self._forced, self._kill_at = self._forced or code, math.inf
        self._give_up_at = min(self._give_up_at, now + node_agent.END_S)
        self._orders.append({"order": "kill"})

    def _say(self, line: str) -> None:
        self._orders.append({"order": "say", "line": line, "error": True})
