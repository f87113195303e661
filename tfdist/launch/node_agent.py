"""What a launcher does on its own node: rounds of workers, as node 0 orders them. No TensorFlow.

Node 0's launcher decides (coordinator.py), also for itself: a single machine is a
node 0 alone.
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
from tfdist.config import messages
from tfdist.errors import UserError
from tfdist.launch import node_links
from tfdist.launch.event_loop import Events, Screen, Signalled
from tfdist.launch.machines import NO_WAITS, Waits
from tfdist.launch.worker_process import Start, WorkerGroup

END_S = 30.0
"""After so long, a worker that cannot even be killed is left to the system."""


@dataclasses.dataclass(frozen=True, slots=True)
class RoundPlan:
    """What the command line asks for, checked."""

    command: tuple[str, ...]
    """Program and arguments of every worker."""
    nproc: int
    """Workers on this node."""
    nnodes: int
    """How many nodes there are; in an elastic job how many there can be."""
    node: int
    """See `machines.Nodes`."""
    addr: str
    """Address of node 0."""
    port: int
    """Port of node 0's launcher where there are several nodes, else of rank 0; 0 for a free one."""
    max_restarts: int
    start_timeout: float
    shares: tuple[Mapping[str, str], ...]
    """Variables by which each worker of this node gets its part of the GPUs."""
    agreed: Mapping[str, Any]
    """See `node_links.Hello`."""
    workdir: str = ""
    """The run folder, which node 0's launcher holds for its workers; empty where they write to none that is known."""
    log_dir: str = ""
    """Where each rank's lines are kept; empty for nowhere."""
    secret: str = dataclasses.field(default="", repr=False)
    """Words by which the launchers know each other."""
    least: int = 0
    """How few nodes an elastic job may have; 0 where their number is fixed."""
    waits: Waits = NO_WAITS


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """One start of all workers, as node 0 tells it to one node."""

    attempt: int
    """How often there was one before."""
    node: int
    """Rank of the node."""
    world: int
    """Workers on all nodes."""
    first: int
    """Rank of the node's first worker."""
    port: int
    """Where the workers meet, at node 0's address."""
    salt: str
    """From which the launchers make the secret of the workers; it travels between machines in clear."""


def variables(plan: RoundPlan, this: Round, local_rank: int, fd: int | None = None) -> dict[str, str]:
    """Returns what the launcher sets in the environment of one worker.

    Args:
      fd: number of the inherited socket at which rank 0 meets the others.
    """
    values: dict[str, object] = {
        "RANK": this.first + local_rank,
        "WORLD_SIZE": this.world,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": plan.nproc,
        "GROUP_RANK": this.node,
        "MASTER_ADDR": plan.addr,
        "MASTER_PORT": this.port,
        "TFDIST_ATTEMPT": this.attempt,
        "TFDIST_SECRET": wire.derived(plan.secret, this.salt),
        "PYTHONUNBUFFERED": 1,  # the last words of a worker that is killed would be in its buffer
    }
    if fd is not None:
        values["TFDIST_MEETING_FD"] = fd
    return {name: str(value) for name, value in values.items()} | dict(plan.shares[local_rank])


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the launcher's environment without what speaks of another cluster."""
    return env_vars.without(environ, env_vars.OTHER_LAUNCHERS)


class Node:
    """The workers of this machine, as orders from node 0 want them."""

    def __init__(self, plan: RoundPlan, events: Events, screen: Screen):
        self.listener: socket.socket | None = None
        """On node 0: the socket that rank 0 of the next round inherits."""
        self.folder: RunFolder | None = None
        """On node 0: the run folder, whose lock rank 0 inherits."""
        self.rounds = ""
        """On node 0: what rank 0 is told of the rounds so far, for the record of the run."""
        self._plan, self._events, self._screen = plan, events, screen
        self._workers: WorkerGroup | None = None
        self._news: list[wire.Message] = []

    def obey(self, order: wire.Message) -> None:
        """Does what node 0 has ordered."""
        kind = order["order"]
        if kind == "round":
            self._start(Round(**order["round"]))
        elif kind == "say":
            self._screen.say(order["line"], error=order["error"])
        elif kind == "end":
            self._blame(order["text"], order["lines"])
        if self._workers is not None and kind in ("stop", "end", "kill"):
            {"stop": self._workers.stop, "end": self._workers.end, "kill": self._workers.kill}[kind]()

    def timeout(self) -> float:
        """Returns the seconds until there is something to do by itself."""
        return self._workers.timeout() if self._workers else math.inf

    def news(self) -> list[wire.Message]:
        """Returns what has happened here since the last call."""
        news, self._news = self._news, []
        news += [{"event": "signal", "name": name} for name in self._events.signals]
        self._events.signals.clear()
        if self._workers is not None:
            news += [{"event": "exit", "exit": dataclasses.asdict(e)} for e in self._workers.poll()]
            if not self._workers.alive:
                self._workers = None
                news.append({"event": "ended"})
        return news

    @property
    def alive(self) -> tuple[int, ...]:
        """Ranks that run here."""
        return self._workers.alive if self._workers else ()

    def _start(self, this: Round) -> None:
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
                if rank == 0 and self.rounds:
                    environ[env_vars.ROUNDS] = self.rounds
                if rank == 0 and lock is not None:
                    environ[env_vars.FOLDER_LOCK] = str(lock)
                    fds += (lock,)
                log = log_dir / f"rank-{rank}.log" if log_dir else None
                starts.append(Start(rank, plan.command, environ, fds, log, title))
            self._workers = WorkerGroup(starts, self._events, self._screen)
        except OSError as error:
            what = f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
            line = f"node {this.node} ({socket.gethostname()}) cannot start its workers: {what}"
            self._news += [{"event": "cannot", "line": line}, {"event": "ended"}]
        finally:
            if lock is not None:
                os.close(lock)
            if listener is not None:
                listener.close()
                self.listener = None

    def _blame(self, text: str, lines: list[str]) -> None:
        if not text:
            return  # nobody: other nodes take part from now on
        self._screen.say(f"root cause: {text}{'; its last lines:' if lines else ''}", error=True)
        for line in lines:
            self._screen.say(f"  {line}", error=True)


def hello(plan: RoundPlan) -> node_links.Hello:
    """Returns what this launcher says of itself to the others."""
    node = int(plan.node != 0) if plan.least else plan.node  # in an elastic job node 0 numbers the others
    return node_links.Hello(node, plan.nnodes, plan.nproc, socket.gethostname(), plan.agreed)


def code_of(name: str) -> int:
    """Returns the exit code after a signal that came while no worker was running."""
    return 130 if name == "SIGINT" else 143


def follow(plan: RoundPlan, events: Events, screen: Screen) -> int:
    """Runs the launcher of another node than 0.

    Returns:
      The exit code.

    Raises:
      UserError: node 0 cannot be reached or refuses this node.
    """
    node, beats = Node(plan, events, screen), node_links.Heartbeats()
    try:
        # A node of an elastic job comes back as often as it is cut off.
        for attempt in itertools.count() if plan.least else range(plan.max_restarts + 1):
            wait = plan.waits.rejoin if plan.least and attempt else plan.start_timeout
            try:
                link = node_links.join(plan.addr, plan.port, plan.secret, hello(plan), wait, events, screen)
            except UserError as error:
                if attempt == 0:
                    raise
                screen.say(f"error: {error}", error=True)
                break
            beats.set((link,))
            code = _serve(node, link, events, screen)
            if code is not None:
                return code
            # Node 0 is lost. Its launcher may be started again, where restarts are wanted, or this node was cut off.
    except Signalled:
        name = events.signals[0]
        screen.say(f"{name}: no worker was running", error=True)
        return code_of(name)
    finally:
        beats.close()
    return 1


def _serve(node: Node, link: node_links.Link, events: Events, screen: Screen) -> int | None:
    """Obeys node 0 to the end; returns the exit code, or None when node 0 was lost."""
    while not link.lost:
        events.wait(min(node_links.BEAT_S, node.timeout()))
        for news in node.news():
            link.send(news)
        for order in link.take():
            if order["order"] == "over":
                if order["line"]:
                    screen.say(order["line"], error=True)
                link.lose("over")
                return order["code"]
            node.obey(order)
    node.obey({"order": "end", "text": f"{link} is lost: {link.lost}", "lines": []})
    deadline, stopped = time.monotonic() + END_S, False
    while node.alive and time.monotonic() < deadline:
        events.wait(min(node_links.BEAT_S, node.timeout()))
        stopped = any(news["event"] == "signal" for news in node.news()) or stopped
    return 1 if stopped else None
