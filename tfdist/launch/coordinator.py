"""Node 0's launcher: gathers the nodes, starts rounds, finds the cause of a failure, starts again. No TensorFlow."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import time
from typing import NamedTuple

from tfdist.checkpoints import bucket_folder
from tfdist.cluster import wire
from tfdist.errors import UserError
from tfdist.launch import node_agent, node_links, node_messages
from tfdist.launch.event_loop import Events, Screen
from tfdist.launch.failure_policy import Verdict

FAREWELL_S = 3.0
"""For the other launchers to hear the last word."""


_RECORDED = 50
"""The chief is told of so many rounds at most."""


class NodeNews(NamedTuple):
    """What has happened on a node, as `Verdict.hear` takes it."""

    node: int
    news: wire.Message


class _Stopped(Exception):  # noqa: N818  an event and no error
    """A signal came while no worker was running."""


class Coordinator:
    """All of a launch, from beginning to end."""

    def __init__(self, plan: node_agent.RoundPlan, events: Events, screen: Screen):
        """Listens for the other nodes where there are some.

        Raises:
          UserError: that cannot be done at --master_addr and --master_port.
        """
        self._plan, self._events, self._screen = plan, events, screen
        self._node = node_agent.Node(plan, events, screen)
        self._folder = bucket_folder.opened(plan.workdir, writes=True) if plan.workdir else None
        """Held from before the first round until after the last: between two, no worker holds it."""
        self._node.folder = self._folder
        self._hello = node_agent.hello(plan)
        self._links: dict[int, node_links.Link] = {}
        self._news: list[NodeNews] = []
        self._beats = node_links.Heartbeats()
        self._launch = secrets.token_hex(8)
        self._rounds: list[list] = []
        """Nodes, workers and end of each round so far, and the time when it began to end."""
        self._due = math.inf
        """When `_watch` has something to do by itself."""
        self._listener = node_links.NodeListener(plan.addr, plan.port, plan.secret, events) if plan.nnodes > 1 else None

    def run(self) -> int:
        """Runs round after round.

        Returns:
          The exit code.

        Raises:
          UserError: a node does not come or does not fit, or another run has the run folder; those that are there
            know it too.
        """
        attempt, failures, code, line, wrong = 0, 0, 2, "", None
        try:
            while True:
                self._gather(first=attempt == 0)
                if self._folder:
                    self._folder.reserve()
                verdict = self._round(attempt)
                code = verdict.code
                attempt += 1
                if self._other_nodes(verdict):
                    continue
                if not verdict.may_restart or failures == self._plan.max_restarts:
                    break
                failures += 1
                self._back_off(failures)
        except UserError as error:
            wrong, line = error, f"error: {error}"
        except _Stopped as stopped:
            code, line = node_agent.code_of(str(stopped)), f"{stopped}: no worker was running"
        if self._folder:
            self._folder.release()
        self._over(code, line)
        if wrong and attempt == 0:  # later it is not wrong input that has ended the run
            raise wrong
        if line:
            self._screen.say(line, error=True)
        return code

    # -- the other nodes -----------------------------------------------------

    def _gather(self, first: bool) -> None:
        """Waits until every node is here; `first` if none has ever been."""
        plan, begun = self._plan, time.monotonic()
        deadline, next_line = begun + plan.start_timeout, begun
        while self._listener and len(self._links) < plan.nnodes - 1:
            now = time.monotonic()
            absent = [n for n in range(1, plan.nnodes) if n not in self._links]
            who = f"node{'s' * (len(absent) > 1)} {', '.join(map(str, absent))} of {plan.nnodes}"
            if now >= deadline:
                raise UserError(
                    f"{who} {'have' if len(absent) > 1 else 'has'} not come within {plan.start_timeout:g} s to "
                    f"{self._listener.address}: start python -m tfdist.launch --nnodes={plan.nnodes} "
                    f"--node_rank={absent[0]} --master_addr={plan.addr} --master_port={plan.port} ... there, "
                    "or raise --start_timeout"
                )
            if now >= next_line:
                next_line += node_links.PATIENCE_S
                left = f"{deadline - now:.0f} s left"
                self._say(f"waiting for {who} at {self._listener.address}, {left}")
            for node, news in self._pump(min(deadline, next_line), gathering=first):
                self._idle(node, news)

    def _idle(self, node: int, news: wire.Message) -> None:
        """Sees to what happens while no worker runs."""
        if news["event"] == "signal":
            raise _Stopped(news["name"])
        if news["event"] == "lost":
            self._screen.say(news["line"], error=True)

    def _admit(self, connection: wire.Connection, theirs: node_links.Hello, gathering: bool) -> None:
        """Lets a launcher in, or turns it away: before the first round for the good of all, later alone."""
        problem = theirs.problem(self._hello)
        theirs = self._numbered(theirs)
        there = self._links.get(theirs.node)
        if not problem and there and time.monotonic() - there.heard < node_links.SUPERSEDED_S:
            problem = (
                f"node {theirs.node} is there twice ({there.hello.host} and {theirs.host}): "
                "give each node a --node_rank of its own"
            )
        if problem:
            node_links.refuse(connection, problem)
            if gathering:
                raise UserError(problem)
            self._screen.say(f"turned away: {problem}", error=True)
            return
        if there:
            there.lose(f"started again on {theirs.host}")
            self._drop(there)
        try:
            connection.send({"welcome": self._hello.host})
        except wire.WireError:
            connection.close()
            return
        self._links[theirs.node] = node_links.Link(connection, theirs, self._events, node_messages.EVENTS)
        self._beats.set(tuple(self._links.values()))
        self._welcome(self._links[theirs.node])

    def _numbered(self, theirs: node_links.Hello) -> node_links.Hello:
        """Returns a hello with the number that its node has here: its own, where the nodes are fixed."""
        return theirs

    def _welcome(self, link: node_links.Link) -> None:
        """Sees to a node that has come."""

    def _drop(self, link: node_links.Link) -> None:
        del self._links[link.hello.node]
        self._beats.set(tuple(self._links.values()))
        self._news.append(NodeNews(link.hello.node, {"event": "lost", "line": f"{link} is lost: {link.lost}"}))

    def _pump(self, until: float, gathering: bool = False) -> list[NodeNews]:
        """Waits until something happens, or `until`; returns what it was, with the node."""
        timeout = min(until - time.monotonic(), self._node.timeout(), node_links.BEAT_S)
        self._events.wait(timeout)
        self._news += [NodeNews(0, news) for news in self._node.news()]
        for link in list(self._links.values()):
            self._news += [NodeNews(link.hello.node, news) for news in link.take()]
            if link.lost:
                self._drop(link)
        if self._listener:
            for line in self._listener.strangers():
                self._screen.say(line, error=True)
            for connection, theirs in self._listener.arrivals():
                self._admit(connection, theirs, gathering)
        news, self._news = self._news, []
        return news

    def _tell(self, order: wire.Message) -> None:
        """Gives an order to all nodes."""
        for link in self._links.values():
            link.send(order)
        self._node.obey(order)

    def _say(self, line: str) -> None:
        self._tell({"order": "say", "line": line, "error": False})

    def _over(self, code: int, line: str) -> None:
        """Tells the others that this is the end, and waits until they know it."""
        for link in self._links.values():
            link.send({"order": "over", "code": code, "line": line})
        self._see_off(list(self._links.values()))
        self._beats.close()
        if self._listener:
            self._listener.close()

    def _see_off(self, links: list[node_links.Link]) -> None:
        """Waits until the others have closed their connections.

        To close at once, with their beats unread, would make the system throw away what they have not read.
        """
        end = time.monotonic() + FAREWELL_S
        while any(not link.lost for link in links) and time.monotonic() < end:
            self._events.wait(0.1)

    # -- rounds --------------------------------------------------------------

    def _round(self, attempt: int) -> Verdict:
        """Starts all workers once, and sees to them until their end."""
        verdict = self._start(attempt)
        while verdict.busy:
            for node, news in self._pump(min(verdict.deadline, self._due)):
                verdict.hear(node, news, time.monotonic())
            self._watch(verdict)
            for order in verdict.orders(time.monotonic()):
                self._tell(order)
        for order in verdict.summary():
            self._tell(order)
        self._rounds[-1] += [verdict.reason, time.time() - max(0.0, time.monotonic() - verdict.since)]
        return verdict

    def _watch(self, verdict: Verdict) -> None:
        """Sees during a round to what is no news: nothing, where the nodes are fixed."""

    def _other_nodes(self, verdict: Verdict) -> bool:
        """Tells whether a round has ended because other nodes take part in the next: never, where they are fixed."""
        return False

    def _members(self) -> list[int]:
        """Returns the nodes that take part in the next round, in the order of their ranks."""
        return [0, *sorted(self._links)]

    def _verdict(self, members: list[int]) -> Verdict:
        return Verdict(len(members))

    def _start(self, attempt: int) -> Verdict:
        """Has the nodes start their workers; returns what is to become of these."""
        plan = self._plan
        # One machine: the port is for the workers. Several: the launchers have it, and each round meets elsewhere.
        listener = node_links.listen(plan.addr, 0 if self._listener else plan.port)
        salt = secrets.token_hex(16)
        members = self._members()
        counts = [self._links[n].hello.nproc if n else plan.nproc for n in members]
        world, port = sum(counts), listener.getsockname()[1]
        self._node.listener = listener
        told = {"launch": self._launch, "nodes": len(members), "rounds": self._rounds[-_RECORDED:]}
        self._node.rounds = json.dumps(told)
        self._rounds.append([len(members), world])
        for place, node in enumerate(members):
            this = node_agent.Round(attempt, place, world, sum(counts[:place]), port, salt)
            order: wire.Message = {"order": "round", "round": dataclasses.asdict(this)}
            if node:
                self._links[node].send(order)
            else:
                self._node.obey(order)
        return self._verdict(members)

    def _back_off(self, failures: int) -> None:
        seconds = min(30.0, 2.0 ** (failures - 1))
        self._say(f"restart {failures} of {self._plan.max_restarts} in {seconds:g} s")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for node, news in self._pump(end):
                self._idle(node, news)
