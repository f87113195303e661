"""Runs the workers of one node as node 0 orders. No TensorFlow.

Node 0's launcher decides (see `coordinator`), also for itself: a single machine is a node 0 alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import pathlib
import socket
import time
from collections.abc import Mapping
from typing import Any

from tfdist.checkpoints.run_folder import RunFolder
from tfdist.cluster import env_vars, wire
from tfdist.cluster.registration import Member
from tfdist.config import messages
from tfdist.errors import UserError
from tfdist.launch import node_link
from tfdist.launch.event_loop import Events, Screen, Signalled
from tfdist.launch.machines import Nodes
from tfdist.launch.worker_process import Start, WorkerGroup

END_S = 30.0  # after this time, a worker that cannot even be killed is left to the system
_POLL_S = 2.0  # longest wait for an event


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The checked command line."""

    command: tuple[str, ...]  # program and arguments of every worker
    nproc: int  # workers on this node
    nodes: Nodes
    max_restarts: int
    start_timeout: float
    shares: tuple[Mapping[str, str], ...]  # variables by which each worker of this node gets its part of the GPUs
    facts: Mapping[str, Any]  # what must be the same on all nodes, by the name that messages give it
    workdir: str = ""
    """The run folder, which node 0's launcher locks for its workers; empty if unknown, or if they write nothing."""
    log_dir: str = ""  # where each rank's lines are kept; empty for nowhere
    secret: str = dataclasses.field(default="", repr=False)  # shared secret of the launchers


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """One start of all workers, as node 0 orders it from one node."""

    attempt: int  # number of earlier ones
    node: int  # rank of the node
    world: int  # workers on all nodes
    first: int  # rank of the node's first worker
    port: int  # where the workers register, at node 0's address
    salt: str  # from which the launchers derive the secret of the workers; it is sent in clear


def variables(plan: LaunchPlan, this: Attempt, local_rank: int, fd: int | None = None) -> dict[str, str]:
    """Returns the variables that the launcher sets for one worker; `fd` is of the socket at which rank 0 listens."""
    values: dict[str, object] = {
        "RANK": this.first + local_rank,
        "WORLD_SIZE": this.world,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": plan.nproc,
        "GROUP_RANK": this.node,
        "MASTER_ADDR": plan.nodes.addr,
        "MASTER_PORT": this.port,
        "TFDIST_ATTEMPT": this.attempt,
        "TFDIST_SECRET": wire.derived(plan.secret, this.salt),
        "PYTHONUNBUFFERED": 1,  # else a killed worker takes its last lines along
    }
    if fd is not None:
        values["TFDIST_MEETING_FD"] = fd
    return {name: str(value) for name, value in values.items()} | dict(plan.shares[local_rank])


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the launcher's environment without variables of another cluster."""
    return env_vars.without(environ, env_vars.OTHER_LAUNCHERS)


class NodeAgent:
    """The workers of this node, controlled by orders from node 0."""

    def __init__(self, plan: LaunchPlan, events: Events, screen: Screen):
        self.listener: socket.socket | None = None  # on node 0: the socket that rank 0 of the next round inherits
        self.folder: RunFolder | None = None  # on node 0: the run folder, whose lock rank 0 inherits
        self.attempts = ""  # on node 0: the attempts so far, which rank 0 records
        self._plan, self._events, self._screen = plan, events, screen
        self._workers: WorkerGroup | None = None
        self._pending: list[wire.Message] = []

    def obey(self, order: wire.Message) -> None:
        """Executes an order of node 0."""
        kind = order["order"]
        if kind == "round":
            self._start(Attempt(**order["round"]))
        elif kind == "say":
            self._screen.say(order["line"], error=order["error"])
        elif kind == "end" and order["text"]:  # else other nodes take part from now on
            self._screen.say(f"root cause: {order['text']}{'; its last lines:' if order['lines'] else ''}", error=True)
            for line in order["lines"]:
                self._screen.say(f"  {line}", error=True)
        if self._workers is not None and kind in ("stop", "end", "kill"):
            {"stop": self._workers.stop, "end": self._workers.end, "kill": self._workers.kill}[kind]()

    def timeout(self) -> float:
        """Returns the seconds until `events` has something to do by itself."""
        return self._workers.timeout() if self._workers else math.inf

    def events(self) -> list[wire.Message]:
        """Returns what has happened here since the last call, as messages to node 0."""
        pending, self._pending = self._pending, []
        pending += [{"event": "signal", "name": name} for name in self._events.signals]
        self._events.signals.clear()
        if self._workers is not None:
            pending += [{"event": "exit", "exit": dataclasses.asdict(e)} for e in self._workers.poll()]
            if not self._workers.alive:
                self._workers = None
                pending.append({"event": "ended"})
        return pending

    @property
    def alive(self) -> tuple[int, ...]:
        """Ranks that run here."""
        return self._workers.alive if self._workers else ()

    def _start(self, this: Attempt) -> None:
        plan, listener, lock = self._plan, self.listener, None
        try:
            log_dir = pathlib.Path(plan.log_dir) if plan.log_dir else None
            if log_dir is not None:
                log_dir.mkdir(parents=True, exist_ok=True)
            when, host = time.strftime("%Y-%m-%d %H:%M:%S"), socket.gethostname()
            title = f"--- attempt {this.attempt}, {when}, {host}: {messages.shell(plan.command)}"
            logs = f"; what they print is kept in {log_dir}" if log_dir else ""
            again = f", restart {this.attempt}" if this.attempt else ""
            ranks = f"{this.first}" + (f" to {this.first + plan.nproc - 1}" if plan.nproc > 1 else "")
            self._screen.say(f"starting rank {ranks} of {this.world} workers here{again}{logs}")
            starts = []
            lock = self.folder.lend() if self.folder else None
            for local_rank in range(plan.nproc):
                rank = this.first + local_rank
                fd = listener.fileno() if listener is not None and rank == 0 else None
                environ = inherited(os.environ) | variables(plan, this, local_rank, fd)
                fds: tuple[int, ...] = () if fd is None else (fd,)
                if rank == 0 and self.attempts:
                    environ[env_vars.ROUNDS] = self.attempts
                if rank == 0 and lock is not None:
                    environ[env_vars.FOLDER_LOCK] = str(lock)
                    fds += (lock,)
                log = log_dir / f"rank-{rank}.log" if log_dir else None
                starts.append(Start(rank, plan.command, environ, fds, log, title))
            self._workers = WorkerGroup(starts, self._events, self._screen)
        except OSError as error:
            what = f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
            line = f"node {this.node} ({socket.gethostname()}) cannot start its workers: {what}"
            self._pending += [{"event": "cannot", "line": line}, {"event": "ended"}]
        finally:
            if lock is not None:
                os.close(lock)
            if listener is not None:
                listener.close()
                self.listener = None


def member(plan: LaunchPlan) -> Member:
    """Returns what this launcher sends when it registers."""
    node = (
        int(plan.nodes.rank != 0) if plan.nodes.elastic else plan.nodes.rank
    )  # in an elastic job node 0 numbers the others
    return Member("node", node, plan.facts, socket.gethostname(), os.getpid(), nproc=plan.nproc)


def code_of(name: str) -> int:
    """Returns the exit code after a signal that came while no worker was running."""
    return 130 if name == "SIGINT" else 143


def follow(plan: LaunchPlan, events: Events, screen: Screen) -> int:
    """Runs the launcher of another node than 0; returns the exit code.

    Raises:
      UserError: node 0 cannot be reached or refuses this node.
    """
    agent, heartbeats = NodeAgent(plan, events, screen), node_link.Heartbeats()
    try:
        # A node of an elastic job comes back as often as it is cut off.
        for attempt in itertools.count() if plan.nodes.elastic else range(plan.max_restarts + 1):
            wait = plan.nodes.waits.rejoin if plan.nodes.elastic and attempt else plan.start_timeout
            try:
                link = node_link.join(plan.nodes.addr, plan.nodes.port, plan.secret, member(plan), wait, events, screen)
            except UserError as error:
                if attempt == 0:
                    raise
                screen.say(f"error: {error}", error=True)
                break
            heartbeats.set((link,))
            code = _serve(agent, link, events, screen)
            if code is not None:
                return code
            # Node 0 is lost. Its launcher may be started again, where restarts are wanted, or this node was cut off.
    except Signalled:
        name = events.signals[0]
        screen.say(f"{name}: no worker was running", error=True)
        return code_of(name)
    finally:
        heartbeats.close()
    return 1


def _serve(agent: NodeAgent, link: node_link.NodeLink, events: Events, screen: Screen) -> int | None:
    """Obeys node 0 to the end; returns the exit code, or None when node 0 was lost."""
    while not link.lost:
        events.wait(min(_POLL_S, agent.timeout()))
        for event in agent.events():
            link.send(event)
        for order in link.take():
            if order["order"] == "over":
                if order["line"]:
                    screen.say(order["line"], error=True)
                link.close("over")
                return order["code"]
            agent.obey(order)
    agent.obey({"order": "end", "text": f"{link} is lost: {link.lost}", "lines": []})
    deadline, stopped = time.monotonic() + END_S, False
    while agent.alive and time.monotonic() < deadline:
        events.wait(min(_POLL_S, agent.timeout()))
        stopped = any(event["event"] == "signal" for event in agent.events()) or stopped
    return 1 if stopped else None
