"""Runs the workers of one node as node 0 orders, over a link between their launchers. No TensorFlow.

Node 0 decides (see `coordinator`), also for itself: a single machine is a node 0 alone. Links carry events to node 0,
orders from it, and heartbeats both ways; registration is that of `cluster.registration`.
"""

import dataclasses
import errno
import itertools
import math
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.checkpoints.run_folder import RunFolder
from tfdist.cluster import env_vars, registration, schema, wire
from tfdist.cluster.heartbeat import BEAT_S, SILENT_S
from tfdist.cluster.registration import Member
from tfdist.cluster.schema import whole
from tfdist.config import messages
from tfdist.errors import UserError
from tfdist.launch.machines import Nodes
from tfdist.launch.worker_process import Events, Screen, Start, WorkerGroup

SUPERSEDED_S = 5.0  # after this silence, a launcher that registers with the same node rank is the old one started again
_HANGUPS = 3  # handshakes in a row that end early: by then it is no accident

_LINE, _HOST = schema.line(4000), schema.line(253)
_LINES = schema.each(_LINE, most=100)
_BEAT = schema.record(beat=whole())
_EXIT = schema.record(
    rank=whole(),
    pid=whole(),
    host=_HOST,
    code=whole(-255, 255),
    lost=schema.flag,
    lines=_LINES,
    culprit=whole(-1),
    complaint=_LINE,
    error=_LINE,
)
EVENTS = schema.named(
    beat=_BEAT,
    event=schema.tagged(
        "event",
        {
            "exit": {"exit": _EXIT},
            "ended": {},
            "cannot": {"line": _LINE},
            "signal": {"name": schema.one_of("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")},
        },
    ),
)
"""Messages to node 0."""
_ROUND = schema.record(
    attempt=whole(), node=whole(), world=whole(1), first=whole(), port=whole(1, 65535), salt=schema.line(64)
)
ORDERS = schema.named(
    beat=_BEAT,
    order=schema.tagged(
        "order",
        {
            "round": {"round": _ROUND},
            "say": {"line": _LINE, "error": schema.flag},
            "end": {"text": _LINE, "lines": _LINES},
            "stop": {},
            "kill": {},
            "over": {"code": whole(0, 255), "line": _LINE},
        },
    ),
)
"""Messages from node 0."""


class NodeLink:
    """The connection to another launcher that has registered, with the reader `EVENTS` or `ORDERS`."""

    def __init__(self, connection: wire.Connection, member: Member, events: Events, reader: schema.Reader):
        self.member = member
        self.since = time.monotonic()  # when it registered
        self.lost = ""  # why the link is lost, once it is
        self._connection, self._events = connection, events
        self._messages: list[wire.Message] = []
        connection.reader, connection.heard = reader, self.since
        events.watch(connection.fileno(), self._read)
        self._read()  # what arrived with the registration

    def __str__(self) -> str:
        return f"node {self.member.rank} ({self.member.host})"

    heard = property(lambda self: self._connection.heard)
    """When something last arrived."""

    def send(self, message: wire.Message) -> None:
        """Sends a message, if the other side is still connected."""
        self._connection.tell(message)

    def take(self) -> list[wire.Message]:
        """Returns the messages received since the last call, without heartbeats; call it after `Events.wait`."""
        silence = time.monotonic() - self.heard
        if silence > SILENT_S:
            self.close(f"silent for {silence:.0f} s")
        messages, self._messages = self._messages, []
        return messages

    def close(self, why: str) -> None:
        if not self.lost:
            self.lost = why
            self._events.forget(self._connection.fileno())
            self._connection.close()

    def _read(self) -> None:
        self._messages += [message for message in self._connection.read() if "beat" not in message]
        if self._connection.lost:
            self.close(str(self._connection.lost))


def beat(links: Mapping[int, NodeLink]) -> threading.Event:
    """Sends heartbeats over these links, which may change, also while this process writes to a slow terminal.

    Returns the event whose setting ends that.
    """
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(BEAT_S):
            for link in list(links.values()):
                if not link.lost:
                    link.send({"beat": 1})

    threading.Thread(target=run, name="heartbeats", daemon=True).start()
    return ended


class AddressInUseError(UserError):
    """The port is taken, or the address belongs to another machine: node 0 may be there."""


def listen(host: str, port: int, wait: float = 0.0, say: Callable[[str], object] = print) -> socket.socket:
    """Listens at --master_addr, whose name may become known within `wait` seconds, or raises UserError."""
    deadline = time.monotonic() + wait
    try:
        return registration.listen(host, port, deadline, registration.Reminder(say, deadline))
    except socket.gaierror as error:
        what = f"--master_addr={host} is not known ({error.strerror})"
        raise UserError(what, "give a name or address of node 0") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            taken = f"--master_port={port} is taken on {host}"
            raise AddressInUseError(taken, "choose another, the same on all nodes") from None
        kind = AddressInUseError if error.errno == errno.EADDRNOTAVAIL else UserError
        what = f"--master_addr={host} is not an address of this machine ({(error.strerror or '').lower()})"
        raise kind(what, "give that of node 0, and a --node_rank of their own to the other nodes") from None


def join(host: str, port: int, secret: str, own: Member, timeout: float, events: Events, screen: Screen) -> NodeLink:
    """Registers with node 0, which may start later; raises UserError if it refuses or is late, or `Signalled`."""
    node0, deadline = f"node 0 at {host}:{port}", time.monotonic() + timeout
    remind = registration.Reminder(screen.say, deadline)

    def attempt(limit: float) -> NodeLink:
        connection = wire.connect(host, port, secret, limit)
        try:
            connection.send(own._asdict())
            answer = registration.ANSWER_TO_NODE(connection.receive(2 * wire.HANDSHAKE_S))
            if "refused" in answer:
                raise UserError(answer["refused"], answer["fix"])
        except BaseException:
            connection.close()
            raise
        return NodeLink(connection, Member("node", 0, {}, answer["welcome"], 0), events, ORDERS)

    with events.interruptible():
        try:
            return registration.reach(attempt, deadline, lambda error, now: remind(f"{node0} ({error})", now), _HANGUPS)
        except registration.NotReachedError as error:
            raise UserError(
                f"timed out after {timeout:g} s waiting for {node0} ({error})",
                "start it there with --node_rank=0, correct --master_addr and --master_port, open that port, or raise "
                "--start_timeout",
            ) from None
        except wire.WireError as error:
            raise UserError(
                f"handshake with {node0} failed ({error})",
                "set the same TFDIST_SECRET on all nodes or on none, and --master_port to that of node 0's launcher",
            ) from None


END_S = 30.0  # after this time, a worker that cannot even be killed is left to the system
POLL_S = 2.0  # longest wait for an event


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
    workdir: str = ""  # the run folder, which node 0's launcher locks; empty if unknown, or if nothing is written
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
    """Returns the launcher's environment without variables of another cluster; sets have one order in all workers."""
    return {"PYTHONHASHSEED": "0"} | env_vars.without(environ, env_vars.OTHER_LAUNCHERS)


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

    alive = property(lambda self: self._workers.alive if self._workers else ())
    """Ranks that run here."""

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
    # In an elastic job node 0 numbers the others.
    node = int(plan.nodes.rank != 0) if plan.nodes.elastic else plan.nodes.rank
    return Member("node", node, plan.facts, socket.gethostname(), os.getpid(), nproc=plan.nproc)


def code_of(name: str) -> int:
    """Returns the exit code after a signal that came while no worker was running."""
    return 130 if name == "SIGINT" else 143


def follow(plan: LaunchPlan, events: Events, screen: Screen) -> int:
    """Runs the launcher of another node than 0; returns the exit code, or raises UserError at the start."""
    agent, links = NodeAgent(plan, events, screen), dict[int, NodeLink]()
    ended = beat(links)
    try:
        # A node of an elastic job comes back as often as it is cut off.
        for attempt in itertools.count() if plan.nodes.elastic else range(plan.max_restarts + 1):
            wait = plan.nodes.waits.rejoin if plan.nodes.elastic and attempt else plan.start_timeout
            try:
                link = join(plan.nodes.addr, plan.nodes.port, plan.secret, member(plan), wait, events, screen)
            except UserError as error:
                if attempt == 0:
                    raise
                screen.say(f"error: {error}", error=True)
                break
            links[0] = link
            code = _serve(agent, link, events, screen)
            if code is not None:
                return code
            # Node 0 is lost. Its launcher may be started again, where restarts are wanted, or this node was cut off.
    finally:
        ended.set()
    return 1


def _serve(agent: NodeAgent, link: NodeLink, events: Events, screen: Screen) -> int | None:
    """Obeys node 0 to the end; returns the exit code, or None when node 0 was lost."""
    while not link.lost:
        events.wait(min(POLL_S, agent.timeout()))
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
        events.wait(min(POLL_S, agent.timeout()))
        stopped = any(event["event"] == "signal" for event in agent.events()) or stopped
    return 1 if stopped else None
