"""TF_CONFIG: what it says of this worker and the others. No TensorFlow."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from tfdist.cluster import env_vars
from tfdist.cluster.addresses import join, split
from tfdist.errors import UserError, one_line


class Membership(NamedTuple):
    """A worker's place by TF_CONFIG: the fields of `cluster.Cluster`, in their order, as far as it knows them."""

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    master: str = ""
    addresses: tuple[str, ...] = ()


def read(environ: Mapping[str, str]) -> Membership | None:
    """Reads TF_CONFIG, where the chief has rank 0 and the workers follow, as in TensorFlow.

    Returns:
      None if it is not set, or names no cluster.

    Raises:
      UserError: it makes no sense.
    """
    if "TF_CONFIG" not in environ:
        return None
    try:
        config = json.loads(environ["TF_CONFIG"])
        cluster = config.get("sparseCluster") or config.get("cluster") or {}
        jobs = {job: tasks for job, tasks in cluster.items() if tasks}
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"TF_CONFIG is not a JSON object with a cluster in it ({error}): correct or unset it") from None
    sparse = "sparseCluster" in config or isinstance(cluster.get("worker"), dict)
    if not jobs and not sparse:
        return None
    kind, index = _task(config)
    for job in jobs.keys() - {"chief", "worker"}:
        why = {"ps": "it has no parameter servers", "evaluator": "its rank 0 evaluates"}.get(
            job, "it has chief and worker"
        )
        raise UserError(f"TF_CONFIG's cluster has {job!r}, for which tfdist has no use ({why}): remove it")
    if sparse:
        whole = None if "sparseCluster" in config else _whole(jobs.get("worker", {}))
        if whole is None:
            return _dynamic(environ, kind, index)
        jobs["worker"] = whole
    for job, tasks in jobs.items():
        if not isinstance(tasks, list):
            raise UserError(f"TF_CONFIG's {job} is {json.dumps(tasks)}, which is no list of addresses: correct it")
    if len(jobs.get("chief", [])) > 1:
        raise UserError(f"TF_CONFIG names {len(jobs['chief'])} chiefs: name one, and the others as workers")
    if index >= len(jobs.get(kind, [])):
        raise UserError(
            f"TF_CONFIG's task is {kind} {index}, its cluster lists {len(jobs.get(kind, []))} of that type: "
            "correct the index, which counts from 0"
        )
    named = {f"{job} {i}": one_line(task) for job in ("chief", "worker") for i, task in enumerate(jobs.get(job, []))}
    places = [split(address, f"TF_CONFIG's {name}") for name, address in named.items()]
    for host, port in places:
        if sum((host.lower(), port) == (h.lower(), p) for h, p in places) > 1:
            raise UserError(f"TF_CONFIG names {join(host, port)} twice: give each worker its own address")
    rank = list(named).index(f"{kind} {index}")
    hosts = [host for host, _ in places]
    addresses = tuple(join(*place) for place in places)
    local_rank, local_size = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    return Membership(rank, len(places), local_rank, local_size, addresses[0], addresses)


def _task(config: dict[str, object]) -> tuple[str, int]:
    """Returns type and index of TF_CONFIG's task."""
    task = config.get("task")
    kind, index = (task.get("type"), task.get("index")) if isinstance(task, dict) else (None, None)
    if kind == "evaluator":
        raise UserError(
            "TF_CONFIG's task is an evaluator, for which tfdist has no use (its rank 0 evaluates): start none"
        )
    if kind not in ("chief", "worker") or not re.fullmatch(r"\d{1,9}", str(index), re.ASCII):
        raise UserError(
            f"TF_CONFIG's task is {json.dumps(task)}: "
            'write "task": {"type": "worker", "index": 0}, with this worker\'s own type and index'
        )
    return kind, int(str(index))


def _whole(tasks: dict[str, str]) -> list[str] | None:
    """Returns the addresses of a map from index to address, if it leaves none out. A map of one may be one of many."""
    indices = [str(i) for i in range(len(tasks))]
    return [tasks[i] for i in indices] if len(tasks) > 1 and tasks.keys() == set(indices) else None


def _dynamic(environ: Mapping[str, str], kind: str, index: int) -> Membership:
    """Finds the place of a worker of a TFJob with enableDynamicWorker, whose TF_CONFIG names nobody else.

    The pod template, which is the same for all workers, can tell the rest.
    """
    if kind != "worker":
        raise UserError(
            f"TF_CONFIG is that of the {kind} of a dynamic TFJob, which is in nobody's list: "
            "use workers only, or set enableDynamicWorker: false"
        )
    if "WORLD_SIZE" not in environ:
        raise UserError(
            "TF_CONFIG is that of a dynamic TFJob, which does not tell how many workers there are: "
            "set enableDynamicWorker: false, or give all workers WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    env_vars.need(environ, "MASTER_ADDR", "MASTER_PORT", beside="WORLD_SIZE")
    name = "index in TF_CONFIG"
    rank, size = env_vars.pair({**environ, name: str(index)}, name, "WORLD_SIZE")
    return Membership(rank, size, master=env_vars.master(environ))
