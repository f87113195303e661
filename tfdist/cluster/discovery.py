"""Discovers from environment variables alone who this worker is and who the others are. No TensorFlow.

The launcher of this very process (tfdist.launch, torchrun) takes precedence: a Slurm task or a pod may then describe
nodes, or the launcher itself. All other sources must agree, since one worker with a wrong rank makes all of them hang.
"""

import bisect
import dataclasses
import itertools
import json
import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from tfdist.cluster import env_vars
from tfdist.cluster.addresses import first_host, is_loopback, join, split
from tfdist.errors import UserError, one_line

LAUNCH, TORCHRUN, TF_CONFIG, HOROVODRUN = "tfdist.launch", "torchrun's variables", "TF_CONFIG", "horovodrun"
OPEN_MPI, SLURM, PMI = "Open MPI", "Slurm", "PMI"


class _Counts(NamedTuple):
    """The variables in which a launcher counts its workers."""

    rank: str
    size: str
    local_rank: str  # rank on this host
    local_size: str  # workers on this host


_COUNTS = {
    TORCHRUN: _Counts("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    HOROVODRUN: _Counts(*(f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    OPEN_MPI: _Counts(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    PMI: _Counts("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
# The source of a platform is named after its variable.
_UNSET = {source: f"{names.rank} and {names.size}" for source, names in _COUNTS.items()}
_UNSET |= {TF_CONFIG: "TF_CONFIG", SLURM: "SLURM_STEP_ID"}

_PORTS = range(15000, 31000)  # below Linux' ephemeral ports: an outgoing connection cannot have taken one
_MOST_HOSTS = 100_000  # most hosts of a Slurm step, ten times those of the largest machines; more are a typing error
_SPECIAL_STEPS = 0xFFFFFFF0  # from here on Slurm numbers batch scripts and interactive shells, which are no tasks


@dataclasses.dataclass(frozen=True, slots=True)
class Cluster:
    """This worker's place among the workers (processes) of a job."""

    source: str  # which variables describe it, for messages; empty for a process alone
    rank: int = 0
    size: int = 1  # workers in all
    local_rank: int = 0  # rank among the workers of this host, as far as known
    local_size: int = 1  # workers of this host, as far as known
    master: str = ""  # `host:port` at which rank 0 listens; empty if unknown
    addresses: tuple[str, ...] = ()  # `host:port` of every worker, where the source lists them (TF_CONFIG)
    secret: str = dataclasses.field(default="", repr=False)  # shared secret of the workers; empty if there is none
    attempt: int = 0  # number of restarts by the launcher
    meeting_fd: int | None = None  # socket that the launcher opened at `master` for rank 0 to listen on
    hosts: tuple[str, ...] = ()  # host name of every worker in rank order, where the source lists them

    @property
    def is_chief(self) -> bool:
        """Whether this worker decides for all."""
        return self.rank == 0


ALONE = Cluster("")
HOW_TO_SHARE = "set TFDIST_SECRET to the same long random text on all machines (openssl rand -hex 16 makes one)"


def find(environ: Mapping[str, str]) -> Cluster:
    """Returns the cluster that the environment describes, or `ALONE`; raises UserError if two sources disagree."""
    environ = env_vars.filled(environ)
    cluster = _launched(environ) or _agreed(environ)
    return dataclasses.replace(cluster, secret=environ.get("TFDIST_SECRET", "")) if cluster.source else ALONE


def check_secret(workers: Cluster, insecure: bool = False) -> None:
    """Raises UserError if workers connect over a network without a secret, unless `insecure` allows it."""
    places = [place for place in (workers.master, *workers.addresses) if place]
    if workers.size == 1 or workers.secret or insecure or all(is_loopback(split(place).host) for place in places):
        return
    raise UserError(
        f"{workers.size} workers connect to {workers.master} without a secret, so that anyone who reaches that port "
        "could join",
        f"{HOW_TO_SHARE}, or give --insecure in a network that only you can reach; on one machine use 127.0.0.1",
    )


def _launched(environ: Mapping[str, str]) -> Cluster | None:
    """Reads the variables of the launcher that started this process."""
    mark = next((n for n in ("TFDIST_ATTEMPT", "TORCHELASTIC_RUN_ID") if n in environ), None)
    if mark is None:
        return None
    env_vars.need(environ, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", beside=mark)
    cluster = dataclasses.replace(_counted(environ, TORCHRUN), master=env_vars.master(environ))
    if mark == "TFDIST_ATTEMPT":
        attempt = env_vars.number(environ, "TFDIST_ATTEMPT")
        fd = env_vars.number(environ, "TFDIST_MEETING_FD") if "TFDIST_MEETING_FD" in environ else None
        return dataclasses.replace(cluster, source=LAUNCH, attempt=attempt, meeting_fd=fd)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False":
        return cluster  # torchrun's agent only chose a free port
    # The agent's own store listens at MASTER_PORT for as long as the workers live.
    host, port = split(cluster.master)
    if cluster.local_size == cluster.size > 1 and "LOCAL_WORLD_SIZE" in environ:
        host = "127.0.0.1"  # the agent names its host, though all workers are here
    return dataclasses.replace(cluster, master=join(host, port + 1 if port < 65535 else port - 1))


def _agreed(environ: Mapping[str, str]) -> Cluster:
    """Returns what all sources other than launchers agree on; those that know more come first."""
    by_config, by_hand = read_tf_config(environ), _torchrun(environ)
    open_mpi, slurm, pmi = _mpi(environ, OPEN_MPI), _slurm(environ), _mpi(environ, PMI)
    # mpirun lets srun start its daemons, one on each node, and workers inherit the daemons' variables, but not
    # those on mpirun's own node: even a Slurm step that seems to agree would give them different masters.
    if slurm and slurm.local_size == 1 and (open_mpi or (pmi and (pmi.rank, pmi.size) != (slurm.rank, slurm.size))):
        slurm = None
    horovodrun = _counted(environ, HOROVODRUN) if _has(environ, HOROVODRUN) else None
    sources = [c for c in (by_config, by_hand, horovodrun, open_mpi, slurm, pmi) if c]
    # A node's number is not a worker's number where something starts workers on the nodes.
    if all(c.source in (TF_CONFIG, TORCHRUN) and c.local_size == 1 for c in sources):
        node = env_vars.platform_node(environ)
        if node and node.least:
            what = f"{node.source}={environ[node.source]} is an elastic job, whose number of nodes changes"
            raise UserError(what, "start python -m tfdist.launch on each, or give one number")
        if node:
            master = env_vars.master(environ, node.addr, node.port)
            sources.append(Cluster(node.source, node.node_rank, node.nnodes, master=master))
    # `srun -n1`, `mpirun -np 1` and a single node do not mean that a process is alone.
    sources = [c for c in sources if c.size > 1 or c.source in (TF_CONFIG, TORCHRUN, HOROVODRUN)] or sources
    if not sources:
        return ALONE
    chosen, *others = sources
    for other in others:
        if (other.rank, other.size) != (chosen.rank, chosen.size):
            raise UserError(
                f"this process is rank {chosen.rank} of {chosen.size} by {chosen.source} "
                f"and rank {other.rank} of {other.size} by {other.source}",
                f"unset {_UNSET.get(chosen.source, chosen.source)}, or unset {_UNSET.get(other.source, other.source)}",
            )
    if chosen is by_hand and not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & environ.keys():
        knows = max(sources, key=lambda c: c.local_size)
        chosen = dataclasses.replace(chosen, local_rank=knows.local_rank, local_size=knows.local_size)
    return chosen


def _torchrun(environ: Mapping[str, str]) -> Cluster | None:
    """Reads torchrun's variables as a user or a script sets them."""
    if not _has(environ, TORCHRUN) or env_vars.counts_nodes(environ):
        return None
    cluster = _counted(environ, TORCHRUN)
    if cluster.size > 1:
        env_vars.need(environ, "MASTER_ADDR", "MASTER_PORT", beside="WORLD_SIZE")
    cluster = dataclasses.replace(cluster, master=env_vars.master(environ))
    if "LOCAL_WORLD_SIZE" in environ or not re.match(r"localhost:|127\.|\[::1\]:", cluster.master):
        return cluster
    # With a loopback address, all workers are on this host.
    local_rank = cluster.local_rank if "LOCAL_RANK" in environ else cluster.rank
    return dataclasses.replace(cluster, local_rank=local_rank, local_size=cluster.size)


def _mpi(environ: Mapping[str, str], source: str) -> Cluster | None:
    """Reads the rank of mpirun: Open MPI, or MPICH and Intel MPI (PMI)."""
    if not _has(environ, source):
        return None
    cluster = _counted(environ, source)
    # Open MPI gives each mpirun a name that all its ranks share; PMI has nothing that could become a port.
    job = environ.get("PMIX_NAMESPACE", "") if source == OPEN_MPI else ""
    port = _PORTS[zlib.crc32(job.encode()) % len(_PORTS)] if job else 0
    host = "127.0.0.1" if cluster.local_size == cluster.size else ""
    # Azure names the node on which mpirun runs, with a port of its own.
    host = host or environ.get("AZ_BATCH_MASTER_NODE", "").partition(":")[0]
    return dataclasses.replace(cluster, master=env_vars.master(environ, host, port))


def _slurm(environ: Mapping[str, str]) -> Cluster | None:
    """Reads the task of srun. A batch script has most of these variables too, but no step."""
    step = environ.get("SLURM_STEP_ID", "")
    if not re.fullmatch(r"\d{1,10}", step, re.ASCII) or int(step) >= _SPECIAL_STEPS:
        return None
    # The job's variables come after the step's: a step may be smaller than its job.
    tasks, spread, nodes = (
        next((n for n in names if n in environ), names[0])
        for names in (
            ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
            ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
            ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        )
    )
    env_vars.need(environ, "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", tasks, spread, beside="SLURM_STEP_ID")
    rank, size = env_vars.pair(environ, "SLURM_PROCID", tasks)
    local_rank, per_node = env_vars.number(environ, "SLURM_LOCALID"), _tasks_per_node(environ[spread])
    if sum(per_node) != size:
        several = "start it in one component of this heterogeneous job, as srun --het-group=0 does"
        fix = several if env_vars.number(environ, "SLURM_HET_SIZE") > 1 else "unset SLURM_STEP_ID"
        raise UserError(f"{spread}={environ[spread]} does not add up to {tasks}={size}", fix)
    in_blocks = bisect.bisect_right(list(itertools.accumulate(per_node)), rank)
    node = env_vars.number(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else in_blocks
    if node >= len(per_node) or local_rank >= per_node[node]:
        what = f"SLURM_LOCALID={local_rank} on node {node} is outside {spread}={environ[spread]}"
        raise UserError(what, "unset SLURM_STEP_ID")
    host = ""
    if "MASTER_ADDR" not in environ and nodes in environ:
        if environ.get("SLURM_DISTRIBUTION") == "arbitrary" and len(per_node) > 1:
            what = "SLURM_DISTRIBUTION=arbitrary does not tell on which host rank 0 runs"
            raise UserError(what, "set MASTER_ADDR to that host")
        host = first_host(environ[nodes], nodes) if len(per_node) > 1 or size == 1 else "127.0.0.1"
    # Neighbouring jobs, steps and restarts get different ports: one may still hold its own when the next begins.
    job, restarts = env_vars.number(environ, "SLURM_JOB_ID"), env_vars.number(environ, "SLURM_RESTART_COUNT")
    port = _PORTS[(61 * job + 7 * int(step) + restarts) % len(_PORTS)]
    return Cluster(SLURM, rank, size, local_rank, per_node[node], env_vars.master(environ, host, port))


def _tasks_per_node(text: str) -> list[int]:
    """Reads `2(x3),1` as [2, 2, 2, 1]; empty if it is not of this form, or too long."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part, re.ASCII)
        if not match:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
        if len(counts) > _MOST_HOSTS:
            return []
    return counts


def read_tf_config(environ: Mapping[str, str]) -> Cluster | None:
    """Reads TF_CONFIG, where the chief has rank 0 and the workers follow; None without a cluster in it."""
    if "TF_CONFIG" not in environ:
        return None
    try:
        config = json.loads(environ["TF_CONFIG"])
        cluster = config.get("sparseCluster") or config.get("cluster") or {}
        jobs = {job: tasks for job, tasks in cluster.items() if tasks}
    except (ValueError, AttributeError, RecursionError) as error:
        what = f"TF_CONFIG is not a JSON object with a cluster in it ({error})"
        raise UserError(what, "correct or unset it") from None
    sparse = "sparseCluster" in config or isinstance(cluster.get("worker"), dict)
    if not jobs and not sparse:
        return None
    task = config.get("task")
    kind, number = (task.get("type"), str(task.get("index"))) if isinstance(task, dict) else (None, "")
    if kind not in ("chief", "worker") or not re.fullmatch(r"\d{1,9}", number, re.ASCII):
        what = f"TF_CONFIG's task is {json.dumps(task)}"
        raise UserError(what, 'write "task": {"type": "worker", "index": 0}, with its own type, chief or worker')
    index = int(number)
    for job in jobs.keys() - {"chief", "worker"}:
        raise UserError(f"TF_CONFIG's cluster has {job!r}, and tfdist knows chief and worker alone", "remove it")
    if sparse:
        # A complete map from index to address is a list. A map of one may be one of many.
        tasks, indices = jobs.get("worker", {}), [str(i) for i in range(len(jobs.get("worker", {})))]
        if "sparseCluster" in config or len(tasks) < 2 or tasks.keys() != set(indices):
            what = "TF_CONFIG is that of a dynamic TFJob, which lists not all workers"
            raise UserError(what, "set enableDynamicWorker: false")
        jobs["worker"] = [tasks[i] for i in indices]
    for job, tasks in jobs.items():
        if not isinstance(tasks, list):
            raise UserError(f"TF_CONFIG's {job} is {json.dumps(tasks)}, which is not a list of addresses", "correct it")
    if len(jobs.get("chief", [])) > 1:
        raise UserError(f"TF_CONFIG names {len(jobs['chief'])} chiefs", "name one, and the others as workers")
    if index >= len(jobs.get(kind, [])):
        what = f"TF_CONFIG's task is {kind} {index}, its cluster lists {len(jobs.get(kind, []))} of that type"
        raise UserError(what, "correct the index, which counts from 0")
    named = {f"{job} {i}": one_line(task) for job in ("chief", "worker") for i, task in enumerate(jobs.get(job, []))}
    places = [split(address, f"TF_CONFIG's {name}") for name, address in named.items()]
    for host, port in places:
        if sum((host.lower(), port) == (h.lower(), p) for h, p in places) > 1:
            raise UserError(f"TF_CONFIG names {join(host, port)} twice", "give each worker its own address")
    rank, hosts = list(named).index(f"{kind} {index}"), [host for host, _ in places]
    addresses = tuple(join(*place) for place in places)
    local_rank, local_size = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    return Cluster(TF_CONFIG, rank, len(places), local_rank, local_size, addresses[0], addresses)


def _has(environ: Mapping[str, str], source: str) -> bool:
    return not environ.keys().isdisjoint((_COUNTS[source].rank, _COUNTS[source].size))


def _counted(environ: Mapping[str, str], source: str) -> Cluster:
    """Reads rank and size in the world and on this host, as the source's four variables count them."""
    names = _COUNTS[source]
    rank, size = env_vars.pair(environ, names.rank, names.size)
    if names.local_size in environ:
        local_rank, local_size = env_vars.pair(environ, names.local_rank, names.local_size)
        if local_size > size:
            raise UserError(f"{names.local_size}={local_size} is more than {names.size}={size}", "correct one of them")
    else:
        local_rank, _ = env_vars.pair({names.local_rank: "0", **environ}, names.local_rank, names.size)
        local_size = local_rank + 1  # at least
    return Cluster(source, rank, size, local_rank, local_size)
