"""Node 0's launcher of a job whose nodes may come and go: `--nnodes=MIN:MAX`. No TensorFlow.

A node that is lost, leaves or comes ends the round of workers, and the next one begins with the nodes that are there
then, from the newest checkpoint. That is no failure, and no restart of `--max_restarts`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

from tfdist.errors import UserError
from tfdist.launch import coordinator, node_agent, node_links
from tfdist.launch.elastic_policy import ElasticVerdict, Farewell, left
from tfdist.launch.event_loop import Events, Screen
from tfdist.launch.failure_policy import Verdict

_HERE = 0
"""Node 0, which this launcher is."""


def run(plan: node_agent.RoundPlan, events: Events, screen: Screen) -> int:
    """Runs the launcher of one node: that of node 0, if it is the one at `plan.addr`.

    Returns:
      The exit code.

    Raises:
      UserError: node 0 cannot listen there, or cannot be reached there.
    """
    if plan.node <= 0:
        try:
            leader = ElasticCoordinator(plan, events, screen)
        except node_links.ElsewhereError:
            if plan.node == 0:
                raise
        else:
            return leader.run()
    return node_agent.follow(plan, events, screen)


class ElasticCoordinator(coordinator.Coordinator):
    """All of such a launch, from beginning to end."""

    def __init__(self, plan: node_agent.RoundPlan, events: Events, screen: Screen):
        super().__init__(dataclasses.replace(plan, node=_HERE), events, screen)
        self._come = 0
        """How many nodes have ever come; each has its number for good."""
        self._since: dict[int, float] = {}
        """When the nodes came that wait for a place."""
        self._round_of: tuple[int, ...] = ()
        """Nodes of the round."""
        self._known: set[int] = set()
        """Nodes that have ever taken part in a round."""
        self._dismissed: list[node_links.Link] = []
        """Links to nodes that have left, until they have heard so."""

    # -- who takes part ------------------------------------------------------

    def _numbered(self, theirs: node_links.Hello) -> node_links.Hello:
        self._come += 1
        return dataclasses.replace(theirs, node=self._come)

    def _welcome(self, link: node_links.Link) -> None:
        self._since[link.hello.node] = time.monotonic()
        if self._round_of:
            full = len(self._round_of) >= self._plan.nnodes
            what = f"waits for a place among {self._plan.nnodes} nodes" if full else "has come"
            self._say(f"{link} {what}")

    def _drop(self, link: node_links.Link) -> None:
        super()._drop(link)
        self._since.pop(link.hello.node, None)

    def _members(self) -> list[int]:
        return super()._members()[: self._plan.nnodes]

    def _verdict(self, members: list[int]) -> Verdict:
        self._round_of = tuple(members)
        for node in members:
            self._since.pop(node, None)
        new = set(members) - self._known if self._known else ()
        self._known.update(members)
        return ElasticVerdict(members, [self._name(node) for node in members], new)

    def _name(self, node: int) -> str:
        return str(self._links[node]) if node else f"node 0 ({self._hello.host})"

    # -- before a round ------------------------------------------------------

    def _gather(self, first: bool) -> None:
        """Waits until there are nodes enough; at first also for those that may come soon after them."""
        plan, listener = self._plan, self._listener
        assert listener is not None
        limit, flag = (plan.start_timeout, "start") if first else (plan.waits.rejoin, "rejoin")
        missing = lambda: plan.least - 1 - len(self._links)
        room = lambda: plan.nnodes - 1 - len(self._links)
        while True:
            if self._wait(lambda: missing() <= 0, limit, lambda: f"{_nodes(missing())} more, at {listener.address}"):
                if first:
                    self._wait(lambda: room() <= 0, plan.waits.join, lambda: f"up to {_nodes(room())} more")
                if missing() <= 0:  # else one has gone meanwhile
                    return
                continue
            raise UserError(
                f"{_nodes(missing())} of at least {plan.least} {'has' if missing() == 1 else 'have'} not "
                f"{'come' if first else 'come back'} within {limit:g} s to {listener.address}: start "
                f"python -m tfdist.launch --nnodes={plan.least}:{plan.nnodes} --master_addr={plan.addr} "
                f"--master_port={plan.port} ... there, or raise --{flag}_timeout"
            )

    def _wait(self, enough: Callable[[], bool], seconds: float, who: Callable[[], str]) -> bool:
        """Waits until it is enough; returns False if that took too long."""
        begun = time.monotonic()
        deadline, next_line = begun + seconds, begun
        while not enough():
            now = time.monotonic()
            if now >= deadline:
                return False
            if now >= next_line:
                next_line += node_links.PATIENCE_S
                self._say(f"waiting for {who()}, {deadline - now:.0f} s left")
            for node, news in self._pump(min(deadline, next_line)):
                self._idle(node, news)
        return True

    # -- during a round ------------------------------------------------------

    def _watch(self, verdict: Verdict) -> None:
        """Looks for nodes that are about to be lost, and for those that wait for a place."""
        assert isinstance(verdict, ElasticVerdict)
        now = time.monotonic()
        silent = [
            n for n in self._round_of if n in self._links and now - self._links[n].heard > node_links.SUPERSEDED_S
        ]
        verdict.suspect(silent, now)
        self._due = math.inf
        room = self._plan.nnodes - len(self._round_of)
        if verdict.settled or not self._since or room <= 0:
            return
        due = min(self._since.values()) + self._plan.waits.scale
        if now < due and len(self._since) < room:
            self._due = due
            return
        who = ", ".join(str(self._links[n]) for n in list(self._since)[:room])
        self._say(f"{who} {'join' if len(self._since) > 1 else 'joins'}: the workers stop after the update in progress")
        verdict.grow(f"{who} joined", now)

    def _pump(self, until: float, gathering: bool = False) -> list[coordinator.NodeNews]:
        """Waits until something happens; a launcher that does not fit is turned away alone, whenever it comes."""
        news = super()._pump(until)
        for node, what in news:
            if what["event"] == "signal" and node and node not in self._round_of:
                self._dismiss(node, left(what["name"]))
            elif what["event"] == "lost" and node not in self._round_of:
                self._screen.say(what["line"], error=True)
        for link in list(self._dismissed):
            link.take()
            if link.lost:
                self._dismissed.remove(link)
        return [each for each in news if not each.node or each.node in self._round_of]

    def _other_nodes(self, verdict: Verdict) -> bool:
        assert isinstance(verdict, ElasticVerdict)
        self._round_of = ()
        for node, farewell in verdict.leaving.items():
            self._dismiss(node, farewell)
        return verdict.changes

    def _dismiss(self, node: int, farewell: Farewell) -> None:
        """Lets a node go."""
        link = self._links.pop(node, None)
        if link is None:
            return
        self._since.pop(node, None)
        self._beats.set(tuple(self._links.values()))
        self._dismissed.append(link)
        link.send({"order": "over", "code": farewell.code, "line": farewell.line})

    def _see_off(self, links: list[node_links.Link]) -> None:
        super()._see_off([*links, *self._dismissed])


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}"
