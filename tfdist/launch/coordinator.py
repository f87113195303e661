"""Node 0's launcher: waits for the nodes, starts attempts, decides how each ends, starts again. No TensorFlow.

In an elastic job (`--nnodes=MIN:MAX`) a node that is lost, leaves or joins ends the attempt, and the next one begins
with the nodes that are there then, from the newest checkpoint: no failure, and no restart of `--max_restarts`.
"""

import dataclasses
import json
import math
import secrets
import time
from collections.abc import Callable
from typing import TypeAlias

from tfdist.checkpoints import bucket_folder
from tfdist.cluster import wire
from tfdist.cluster.registration import Arrival, Registrar, Reminder, drain, refuse
from tfdist.errors import UserError
from tfdist.launch import node_agent
from tfdist.launch.failure_policy import AttemptOutcome, NodeExit
from tfdist.launch.worker_process import Events, Screen, Signalled

EXIT_WAIT_S = 3.0  # time for the other launchers to receive the last message
_RECORDED = 50  # most attempts that the chief records

NodeEvent: TypeAlias = tuple[int, wire.Message]  # a node and an event on it, for `AttemptOutcome.hear`


def run(plan: node_agent.LaunchPlan, events: Events, screen: Screen) -> int:
    """Runs this node's launcher; in an elastic job the one that can listen at `plan.nodes.addr` is node 0.

    Returns the exit code; raises UserError if node 0 cannot listen or be reached there, or refuses this node.
    """
    try:
        if plan.nodes.rank <= 0:
            try:
                coordinator = Coordinator(dataclasses.replace(plan, nodes=plan.nodes._replace(rank=0)), events, screen)
            except node_agent.AddressInUseError:
                if plan.nodes.rank == 0:
                    raise
            else:
                return coordinator.run()
        return node_agent.follow(plan, events, screen)
    except Signalled as stopped:
        screen.say(f"{stopped}: no worker was running", error=True)
        return node_agent.code_of(str(stopped))


class Coordinator:
    def __init__(self, plan: node_agent.LaunchPlan, events: Events, screen: Screen):
        """Listens for the other nodes, if there are any; raises UserError if that is not possible."""
        self._plan, self._nodes, self._events, self._screen = plan, plan.nodes, events, screen
        self._agent = node_agent.NodeAgent(plan, events, screen)
        if plan.workdir:
            self._agent.folder = bucket_folder.opened(plan.workdir, writes=True)  # locked also between attempts
        self._own = node_agent.member(plan)
        self._links: dict[int, node_agent.NodeLink] = {}
        self._dismissed: list[node_agent.NodeLink] = []  # links to nodes that have left, until they have read so
        self._numbered = 0  # nodes of an elastic job that have ever registered; each keeps its number
        self._taking_part: tuple[int, ...] = ()  # nodes of the attempt in progress
        self._trusted: set[int] = set()  # nodes that have ever taken part
        self._pending: list[NodeEvent] = []
        self._launch, self._since = secrets.token_hex(8), time.time()
        self._attempts: list[list] = []  # number of nodes and workers, end, and its time, of each attempt so far
        self._registrar: Registrar | None = None
        if plan.nodes.max > 1:
            with events.interruptible():
                listener = node_agent.listen(plan.nodes.addr, plan.nodes.port, plan.start_timeout, screen.say)
            self._registrar = Registrar(listener, plan.secret, "node", events.wake)
            self._heartbeats = node_agent.beat(self._links)

    def run(self) -> int:
        """Runs attempt after attempt; returns the exit code, or raises a UserError, which the other nodes know too."""
        attempt, failures, code, line, wrong = 0, 0, 2, "", None
        try:
            while True:
                self._gather(first=attempt == 0)
                if self._agent.folder:
                    self._agent.folder.reserve()
                outcome = self._attempt(attempt)
                code = outcome.code
                attempt += 1
                self._taking_part = ()
                for node, node_exit in outcome.leaving.items():
                    self._dismiss(node, node_exit)
                if outcome.changes:
                    continue
                if not outcome.may_restart or failures == self._plan.max_restarts:
                    break
                failures += 1
                seconds = min(30.0, 2.0 ** (failures - 1))
                self._say(f"restart {failures} of {self._plan.max_restarts} in {seconds:g} s")
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    for node, event in self._poll(end):
                        self._idle(node, event)
        except UserError as error:
            wrong, line = error, f"error: {error}"
        except Signalled as stopped:
            code, line = node_agent.code_of(str(stopped)), f"{stopped}: no worker was running"
        if self._agent.folder:
            self._agent.folder.release()
        self._finish(code, line)
        if wrong and attempt == 0:  # later it is not wrong input that has ended the run
            raise wrong
        if line:
            self._screen.say(line, error=True)
        return code

    # -- the other nodes -----------------------------------------------------

    def _gather(self, first: bool) -> None:
        """Waits until there are nodes enough; at first also for those that may join soon after them."""
        plan, nodes = self._plan, self._nodes
        if not self._registrar:
            return
        again = nodes.elastic and not first
        limit, flag = (nodes.waits.rejoin, "rejoin") if again else (plan.start_timeout, "start")
        at = f"at {self._registrar.address}"
        missing = lambda: nodes.min - 1 - len(self._links)
        room = lambda: nodes.max - 1 - len(self._links)
        absent = lambda: [str(node) for node in range(1, nodes.max) if node not in self._links]

        def who() -> str:
            if nodes.elastic:
                return f"{_nodes(missing())} of at least {nodes.min} {at}"
            return f"node{'s' * (len(absent()) > 1)} {', '.join(absent())} of {nodes.max} {at}"

        while True:
            if not self._wait(lambda: missing() <= 0, limit, who, first):
                rank = "" if nodes.elastic else f"--node_rank={absent()[0]} "
                raise UserError(
                    f"timed out after {limit:g} s waiting for {who()}",
                    f"start python -m tfdist.launch {nodes.size} {rank}--master_addr={nodes.addr} "
                    f"--master_port={nodes.port} ... there, or raise --{flag}_timeout",
                )
            if first and nodes.elastic:
                self._wait(lambda: room() <= 0, nodes.waits.join, lambda: f"up to {_nodes(room())} {at}", first)
            if missing() <= 0:  # else one has disconnected meanwhile
                return

    def _wait(self, enough: Callable[[], bool], seconds: float, who: Callable[[], str], first: bool) -> bool:
        """Waits until `enough`; returns False if that took too long."""
        deadline = time.monotonic() + seconds
        remind = Reminder(self._say, deadline)
        while not enough():
            now = time.monotonic()
            if now >= deadline:
                return False
            remind(who(), now)
            for node, event in self._poll(min(deadline, remind.next), gathering=first):
                self._idle(node, event)
        return True

    def _idle(self, node: int, event: wire.Message) -> None:
        """Handles the event of a node that takes no part in an attempt."""
        if event["event"] == "signal":
            if not (self._nodes.elastic and node):
                raise Signalled(event["name"])
            self._dismiss(node, NodeExit.by_signal(event["name"]))
        elif event["event"] == "lost":
            self._screen.say(event["line"], error=True)

    def _admit(self, arrival: Arrival, gathering: bool) -> None:
        """Registers a launcher or refuses it, which ends a job of a fixed number of nodes before its first attempt."""
        member = arrival.member
        if self._nodes.elastic:
            self._numbered += 1
            member = member._replace(rank=self._numbered)
        before = self._links.get(member.rank)
        silent = before is not None and time.monotonic() - before.heard >= node_agent.SUPERSEDED_S
        size = math.inf if self._nodes.elastic else self._nodes.max
        problem = member.conflict(self._own, before.member if before and not silent else None, size)
        if problem:
            refuse(arrival.connection, problem)
            if gathering and not self._nodes.elastic:
                raise problem
            self._screen.say(f"rejected: {problem}", error=True)
            return
        if before:
            before.close(f"started again on {member.host}")
            self._drop(before)
        try:
            arrival.connection.send({"welcome": self._own.host})
        except wire.WireError:
            arrival.connection.close()
            return
        link = node_agent.NodeLink(arrival.connection, member, self._events, node_agent.EVENTS)
        self._links[member.rank] = link
        if self._nodes.elastic and self._taking_part:
            full = len(self._taking_part) >= self._nodes.max
            self._say(f"{link} {f'waits for a place among {self._nodes.max} nodes' if full else 'has joined'}")

    def _drop(self, link: node_agent.NodeLink) -> None:
        del self._links[link.member.rank]
        self._pending.append((link.member.rank, {"event": "lost", "line": f"{link} is lost: {link.lost}"}))

    def _dismiss(self, node: int, node_exit: NodeExit) -> None:
        """Ends the launcher of a node that leaves the job."""
        link = self._links.pop(node, None)
        if link:
            self._dismissed.append(link)
            link.send({"order": "over", "code": node_exit.code, "line": node_exit.line})

    def _poll(self, until: float, gathering: bool = False) -> list[NodeEvent]:
        """Waits until something happens, or `until`; returns what it was, with the node."""
        self._events.wait(min(until - time.monotonic(), self._agent.timeout(), node_agent.POLL_S))
        self._pending += [(0, event) for event in self._agent.events()]
        for link in list(self._links.values()):
            self._pending += [(link.member.rank, event) for event in link.take()]
            if link.lost:
                self._drop(link)
        for link in list(self._dismissed):
            link.take()
            if link.lost:
                self._dismissed.remove(link)
        if self._registrar:
            for line in self._registrar.rejections():
                self._screen.say(line, error=True)
            for arrival in drain(self._registrar.arrivals):
                self._admit(arrival, gathering)
        events, self._pending = self._pending, []
        return events

    def _tell(self, order: wire.Message) -> None:
        """Gives an order to all nodes."""
        for link in self._links.values():
            link.send(order)
        self._agent.obey(order)

    def _say(self, line: str) -> None:
        self._tell({"order": "say", "line": line, "error": False})

    def _finish(self, code: int, line: str) -> None:
        """Ends the other launchers, and waits until they have closed their connections.

        If this side closed at once, with their heartbeats unread, the system would discard what they have not read.
        """
        for link in self._links.values():
            link.send({"order": "over", "code": code, "line": line})
        links, end = [*self._links.values(), *self._dismissed], time.monotonic() + EXIT_WAIT_S
        while any(not link.lost for link in links) and time.monotonic() < end:
            self._events.wait(0.1)
        if self._registrar:
            self._heartbeats.set()
            self._registrar.close()

    # -- attempts ------------------------------------------------------------

    def _attempt(self, attempt: int) -> AttemptOutcome:
        """Starts all workers once, and follows them to their end."""
        outcome, grow_at = self._start(attempt), math.inf
        while outcome.busy:
            for node, event in self._poll(min(outcome.deadline, grow_at)):
                if node and node not in self._taking_part:
                    self._idle(node, event)
                else:
                    outcome.hear(node, event, time.monotonic())
            if self._nodes.elastic:
                grow_at = self._watch_membership(outcome)
            for order in outcome.orders(time.monotonic()):
                self._tell(order)
        for order in outcome.summary():
            self._tell(order)
        self._attempts[-1] += [outcome.reason, time.time() - max(0.0, time.monotonic() - outcome.since)]
        return outcome

    def _start(self, attempt: int) -> AttemptOutcome:
        """Orders the nodes to start their workers."""
        plan = self._plan
        # One machine: the port is for the workers. Several: the launchers have it, and each attempt uses another.
        listener = node_agent.listen(plan.nodes.addr, 0 if self._registrar else plan.nodes.port)
        salt, members = secrets.token_hex(16), [0, *sorted(self._links)][: plan.nodes.max]
        counts = [self._links[n].member.nproc if n else plan.nproc for n in members]
        world, port = sum(counts), listener.getsockname()[1]
        self._agent.listener = listener
        earlier = self._attempts[-_RECORDED:]
        rounds = {"launch": self._launch, "since": self._since, "nodes": len(members), "rounds": earlier}
        self._agent.attempts = json.dumps(rounds)
        self._attempts.append([len(members), world])
        for place, node in enumerate(members):
            this = node_agent.Attempt(attempt, place, world, sum(counts[:place]), port, salt)
            order: wire.Message = {"order": "round", "round": dataclasses.asdict(this)}
            if node:
                self._links[node].send(order)
            else:
                self._agent.obey(order)
        self._taking_part = tuple(members)
        new = set(members) - self._trusted if self._trusted else set()
        self._trusted.update(members)
        names = {n: str(self._links[n]) if n else f"node 0 ({self._own.host})" for n in members}
        return AttemptOutcome(names, plan.nodes.elastic, new if plan.nodes.elastic else ())

    def _watch_membership(self, outcome: AttemptOutcome) -> float:
        """Looks for nodes that are about to be lost, and for those that wait; returns when these join at last."""
        now, links = time.monotonic(), self._links.items()
        members = [link for node, link in links if node in self._taking_part]
        waiting = [link for node, link in links if node not in self._taking_part]
        outcome.suspect([link.member.rank for link in members if now - link.heard > node_agent.SUPERSEDED_S], now)
        room = self._nodes.max - len(self._taking_part)
        if outcome.settled or not waiting or room <= 0:
            return math.inf
        due = min(link.since for link in waiting) + self._nodes.waits.scale
        if now < due and len(waiting) < room:
            return due
        who = ", ".join(map(str, waiting[:room]))
        verb = "join" if len(waiting) > 1 else "joins"
        self._say(f"{who} {verb}: the workers stop after the update in progress")
        outcome.grow(f"{who} joined", now)
        return math.inf


def _nodes(count: int) -> str:
    return f"{count} more node{'s' * (count != 1)}"
