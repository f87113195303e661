"""Trains on three nodes of this machine while faults happen to them, and writes docs/evidence/goodput.md.

    make chaos            (or: python benchmarks/chaos/run.py --minutes=3 --tools=tfdist --seed=7)

Goodput is the time of updates that ended in the model over wall time. The nodes are network namespaces with a launcher
each, so a link can be cut; without root there is no cut link. What a platform does, the benchmark does: a launcher that
has ended, or that the others have given up, is replaced at once by a new one. Logs stay in benchmarks/out/chaos.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid

import psutil

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
WORK = ROOT / "benchmarks/out/chaos"
sys.path.insert(0, str(ROOT / "tests"))

NODES = 3
START_S, END_S = 300, 300  # most that a start, or the end of a run after the last fault, may take
MISSED_S = 40
"""After which the platform replaces a node that neither ends nor trains, as a liveness probe would."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens, and to which process: a worker or the launcher of a node, or its link."""

    kind: str
    victim: str  # `worker`, `chief` (the worker of node 0), `launcher`, `launcher of node 0` or `link`

    def __str__(self) -> str:
        return "cut link" if self.kind == "cut" else f"{self.kind} of a {self.victim}"


SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM")
FAULTS = [
    *(Fault(kind, victim) for kind in SIGNALS for victim in ("worker", "chief", "launcher", "launcher of node 0")),
    Fault("cut", "link"),
]


@dataclasses.dataclass(frozen=True)
class Tool:
    """A way to train on several nodes: the command of a node's launcher, and what is printed when a loss is noticed."""

    name: str
    command: object  # of the rank of a node, the address of node 0 and a number of epochs
    alone: object  # the command that trains without a fault on one device
    notices: str  # in a line that names who is lost, as a regular expression


def _tfdist(rank: int, address: str, epochs: int) -> list:
    launch = [sys.executable, "-m", "tfdist.launch", f"--nnodes=1:{NODES}", f"--master_addr={address}"]
    return [*launch, f"--node_rank={rank}", "--scale_wait=0", "--max_restarts=1000", "--", *_train(epochs)]


def _train(epochs: int) -> list:
    return [
        *("--config=digits_mlp", "--config.model.options=units=1024", "--config.train.virtual_replicas=6"),
        *(f"--config.train.epochs={epochs}", f"--config.eval.every={epochs} epochs", "--config.checkpoint.every=10 s"),
        *("--config.train.callbacks=progress_log:ProgressLog", "--progress=plain", "--notensorboard", "--workdir=run"),
    ]


def _torch(rank: int, address: str, epochs: int) -> list:
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}:29400", "--rdzv-id=chaos"]
    command = [ROOT / ".venv-torch/bin/torchrun", f"--nnodes=1:{NODES}", "--max-restarts=1000", *rendezvous]
    return [*command, HERE / "torch_elastic.py", epochs]


TOOLS = (
    Tool(
        "tfdist",
        _tfdist,
        lambda epochs: [sys.executable, "-m", "tfdist.train", "--strategy=default", *_train(epochs)],
        r"is lost:|root cause: rank",
    ),
    Tool(
        "torchrun, checkpoint every 10 s",
        _torch,
        lambda epochs: [ROOT / ".venv-torch/bin/python", HERE / "torch_elastic.py", epochs],
        r"failed \(exitcode|signal \d+ \(SIG",
    ),
)


class Node:
    """A launcher on a host, and a log of what it prints, with times."""

    def __init__(self, words: list, environ: dict, folder: pathlib.Path, log: pathlib.Path):
        self.process = subprocess.Popen(
            [str(word) for word in words],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._log = log
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with open(self._log, "a") as log:
            for line in self.process.stdout:
                log.write(f"{time.time():.3f} {line}")
                log.flush()

    def workers(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children()
        return []

    def end(self) -> None:
        """Ends everything of it, as a platform does with a node."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            for one in (*process.children(recursive=True), process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        self.process.wait()


class Job:
    """A run on all nodes, what happens to it, and what the platform does about it."""

    def __init__(self, tool: Tool, folder: pathlib.Path, epochs: int, hosts: object):
        self._tool, self._folder, self._epochs, self._hosts = tool, folder, epochs, hosts
        self._environ = _environ(folder)
        self.mark = self._environ["CHAOS_MARK"]
        self.updates = Updates(folder / "updates.log")
        self._cut: list[int] = []
        self.nodes = [self._start(rank) for rank in range(NODES)]

    def _start(self, rank: int) -> Node:
        names = [f"h{i + 1}" for i in range(NODES)]
        address, host = ("127.0.0.1", []) if self._hosts is None else ("10.77.0.1", self._hosts.on(names[rank]))
        words = [*host, *self._tool.command(rank, address, self._epochs)]
        return Node(words, self._environ, self._folder, self._folder / f"node-{rank}.log")

    @property
    def over(self) -> bool:
        return any(node.process.poll() == 0 for node in self.nodes)

    def trains_beyond(self, update: int, due: float = 0.0) -> bool:
        """Tells whether it has made a later update, and it is later than `due`; or whether it is over."""
        return self.over or (time.time() > due and self.updates.last() > update)

    def supervise(self) -> None:
        """Replaces the launchers that have ended."""
        for rank, node in enumerate(self.nodes):
            if node.process.poll() not in (None, 0) and not self.over:
                self._replace(rank)

    def _replace(self, rank: int) -> None:
        self.nodes[rank].end()
        if rank in self._cut:
            self._cut.remove(rank)
            self._hosts.plug(f"h{rank + 1}")
        self.nodes[rank] = self._start(rank)

    def let_happen(self, fault: Fault, draw: random.Random) -> int | None:
        """Returns the rank of the node to which it has happened, None where there is no such process just now."""
        first = fault.victim in ("chief", "launcher of node 0")
        rank = 0 if first else draw.randrange(1, NODES)
        node = self.nodes[rank]
        if fault.kind == "cut":
            self._cut.append(rank)
            self._hosts.unplug(f"h{rank + 1}")
            return rank
        processes = node.workers() if fault.victim in ("worker", "chief") else [psutil.Process(node.process.pid)]
        if fault.kind == "SIGSTOP" and "launcher" in fault.victim:  # a machine that hangs
            processes += node.workers()
        for process in processes:
            process.send_signal(getattr(signal, fault.kind))
        return rank if processes else None

    def replace_missed(self, rank: int) -> None:
        """Replaces a node that hangs or is cut off: the platform has missed it."""
        node = self.nodes[rank]
        stopped = [p for p in (psutil.Process(node.process.pid), *node.workers()) if p.status() == "stopped"]
        if rank in self._cut or stopped:
            self._replace(rank)

    def end(self) -> None:
        for node in self.nodes:
            node.end()


class Updates:
    """The updates that the chief has made, as `progress_log` writes them: time and number of each."""

    def __init__(self, path: pathlib.Path):
        self._path = path

    def read(self) -> list[tuple[float, int]]:
        if not self._path.exists():
            return []
        rows = [line.split() for line in self._path.read_text().splitlines()]
        return [(float(row[0]), int(row[1])) for row in rows if len(row) == 2]

    def last(self) -> int:
        return max((update for _, update in self.read()), default=0)


def _environ(folder: pathlib.Path) -> dict[str, str]:
    drop = ("TF_CONFIG", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {k: v for k, v in os.environ.items() if k not in drop and not k.startswith(("TFDIST_", "PET_"))}
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}", "UPDATES_LOG": str(folder / "updates.log")}
    words = {"TFDIST_SECRET": "of all nodes", "CHAOS_MARK": uuid.uuid4().hex, "OMP_NUM_THREADS": "1"}
    return environ | paths | words | {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}


def wait(true: object, seconds: float, job: Job | None = None) -> bool:
    """Waits until something is so, while the platform does its work."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        if job is not None:
            job.supervise()
        time.sleep(0.1)
    return True


def undisturbed(tool: Tool, folder: pathlib.Path, epochs: int) -> pathlib.Path:
    """Trains on one device, and returns the folder."""
    folder.mkdir(parents=True)
    with open(folder / "alone.log", "w") as log:
        words = [str(word) for word in tool.alone(epochs)]
        subprocess.run(words, cwd=folder, env=_environ(folder), stdout=log, stderr=log, check=True)
    return folder


def pace(rows: list[tuple[float, int]]) -> float:
    """Returns the seconds of an update while nothing happens: a median over windows of a second."""
    rates, start = [], 0
    for end in range(len(rows)):
        if rows[end][1] < rows[start][1] or rows[end][0] - rows[end - 1][0] > 1:
            start = end
        elif rows[end][0] - rows[start][0] >= 1:
            rates.append((rows[end][0] - rows[start][0]) / (rows[end][1] - rows[start][1]))
            start = end
    return statistics.median(rates)


def kept_after(rows: list[tuple[float, int]], moment: float) -> int:
    """Returns how many updates there were at a moment, of those that nobody had to make again later."""
    before = max((update for at, update in rows if at <= moment), default=0)
    return min([before, *(update - 1 for at, update in rows if at > moment)])


def measure(tool: Tool, minutes: float, seed: int, every: float, hosts: object) -> dict:
    """Trains with faults, and returns the row of the tool."""
    work = WORK / tool.name.partition(",")[0]
    shutil.rmtree(work, ignore_errors=True)
    epochs, folder = epochs_of(tool, work, minutes, hosts), work / "faults"
    folder.mkdir()
    began = time.time()
    job = Job(tool, folder, epochs, hosts)
    try:
        happened = let_faults_happen(job, tool, random.Random(seed), minutes, every, hosts is not None)
        ended = wait(lambda: job.over, END_S, job)
        wall = time.time() - began
        for node in job.nodes if ended else ():
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(60)
    finally:
        job.end()
    rows = job.updates.read()
    seconds, named = pace(rows), times_named(tool, folder)
    ends = [*(one["at"] for one in happened[1:]), rows[-1][0]]
    for one, end in zip(happened, ends):
        kept = kept_after(rows, end) - kept_after(rows, one["at"])
        one["lost"] = max(0.0, end - one["at"] - kept * seconds)
        one["named"] = next((at - one["at"] for at in named if one["at"] <= at <= end), None)
    return {
        "name": tool.name,
        "ended": ended,
        "wall": wall,
        "updates": job.updates.last(),
        "seconds_of_an_update": seconds,
        "goodput": job.updates.last() * seconds / wall,
        "start": rows[0][0] - began,
        "faults": happened,
        "orphans": sum(_marked(process, job.mark) for process in psutil.process_iter()),
        "same": same(folder, undisturbed(tool, work / "alone", epochs)) if ended else None,
    }


def epochs_of(tool: Tool, work: pathlib.Path, minutes: float, hosts: object) -> int:
    """Returns how many epochs take so long with a fifth of the time lost, by a short training without faults."""
    folder, tried = work / "trial", 40
    folder.mkdir(parents=True)
    job = Job(tool, folder, tried, hosts)
    try:
        if not wait(lambda: job.over, START_S, job):
            raise SystemExit(f"{tool.name} did not train: see {folder}")
    finally:
        job.end()
    seconds_of_epoch = pace(job.updates.read()) * job.updates.last() / tried
    return max(1, round(minutes * 60 * 0.8 / seconds_of_epoch))


def let_faults_happen(job: Job, tool: Tool, draw: random.Random, minutes: float, every: float, cut: bool) -> list[dict]:
    """Lets faults happen for so many minutes: each `every` seconds after the last, once the job trains again."""
    possible = FAULTS if cut else FAULTS[:-1]
    order = itertools.chain.from_iterable(draw.sample(possible, len(possible)) for _ in itertools.count())
    happened: list[dict] = []
    if not wait(lambda: job.updates.last() > 0, START_S, job):
        raise SystemExit(f"{tool.name} did not begin")
    due, last, end = time.time() + every, job.updates.last(), time.time() + 60 * minutes
    while wait(functools.partial(job.trains_beyond, last, due), START_S + every, job) and not job.over and due < end:
        fault, at, last = next(order), time.time(), job.updates.last()
        rank = job.let_happen(fault, draw)
        if rank is None:
            continue
        print(f"{tool.name}: update {last}: {fault}, node {rank}", file=sys.stderr, flush=True)
        happened.append({"fault": str(fault), "kind": fault.kind, "at": at})
        due = at + every
        if fault.kind in ("SIGSTOP", "cut"):
            wait(functools.partial(job.trains_beyond, last), MISSED_S, job)
            job.replace_missed(rank)
    return happened


def times_named(tool: Tool, folder: pathlib.Path) -> list[float]:
    """Returns when a launcher has named a process that is lost."""
    lines = [line for log in folder.glob("node-*.log") for line in log.read_text().splitlines()]
    return sorted(float(line.partition(" ")[0]) for line in lines if re.search(tool.notices, line))


def _marked(process: psutil.Process, mark: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("CHAOS_MARK") == mark
    return False


def same(folder: pathlib.Path, alone: pathlib.Path) -> float:
    """Returns 0 where the weights have the bits of one undisturbed device, else their relative distance."""
    import numpy as np

    if (folder / "run/result.json").exists():
        found, expected = (json.loads((at / "run/result.json").read_text()) for at in (folder, alone))
        if found["weights_sha256"] == expected["weights_sha256"]:
            return 0.0
        return abs(found["weights_norm"] / expected["weights_norm"] - 1) or 1e-16
    found, expected = (np.load(at / "weights.npy").astype(float) for at in (folder, alone))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def table(row: dict) -> str:
    """Returns the faults of a tool, by what happened and to whom."""
    by = collections.defaultdict(list)
    for one in row["faults"]:
        by[one["fault"]].append(one)
    lines = ["| fault | times | seconds lost: median (most) | seconds until named: median |", "|---|--:|--:|--:|"]
    for fault in sorted(by, key=lambda name: [str(f) for f in FAULTS].index(name)):
        lost = [one["lost"] for one in by[fault]]
        named = [one["named"] for one in by[fault] if one["named"] is not None]
        when = f"{statistics.median(named):.1f}" if named else "—"
        lines.append(f"| {fault} | {len(lost)} | {statistics.median(lost):.1f} ({max(lost):.1f}) | {when} |")
    return "\n".join(lines)


def mean(row: dict, *kinds: str) -> str:
    lost = [one["lost"] for one in row["faults"] if one["kind"] in kinds]
    return f"{statistics.mean(lost):.1f}" if lost else "—"


def summary(rows: list[dict]) -> str:
    names = ("goodput", "faults", "s per SIGKILL or SIGTERM", "s per SIGSTOP or cut link", "weights", "processes left")
    lines = ["| tool | " + " | ".join(names) + " |", "|---|" + "--:|" * len(names)]
    for row in rows:
        weights = "not finished" if row["same"] is None else "same bits" if row["same"] == 0 else f"{row['same']:.0e}"
        lost = mean(row, "SIGKILL", "SIGTERM"), mean(row, "SIGSTOP", "cut")
        cells = [f"{row['goodput']:.2f}", str(len(row["faults"])), *lost, weights, str(row["orphans"])]
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    from network import network

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", default="", help="only tools whose names begin so, between semicolons")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--every", type=float, default=60, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=1, help="order of the faults")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "docs/evidence")
    options = parser.parse_args()
    chosen = [tool for tool in TOOLS if not options.tools or tool.name.startswith(tuple(options.tools.split(";")))]
    chosen = [tool for tool in chosen if pathlib.Path(tool.command(0, "", 1)[0]).exists()]
    record = options.output / "goodput.json"
    known = {row["name"]: row for row in json.loads(record.read_text())} if record.exists() else {}
    WORK.mkdir(parents=True, exist_ok=True)
    # Else an end by SIGTERM would leave the hosts and what runs there.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with network(WORK) as hosts:
        for tool in chosen:
            known[tool.name] = measure(tool, options.minutes, options.seed, options.every, hosts)
    rows = [known[tool.name] for tool in TOOLS if tool.name in known]
    options.output.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(rows, indent=1) + "\n")
    tables = "\n\n".join(f"## {row['name']}\n\n{table(row)}" for row in rows)
    page = (HERE / "page.md").read_text().replace("SUMMARY", summary(rows)).replace("TABLES", tables)
    (options.output / "goodput.md").write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
