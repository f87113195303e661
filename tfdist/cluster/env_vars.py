"""Environment variables that describe a job: names, parsing, and those of training platforms. No TensorFlow.

A platform describes each node (machine or container) and counts nodes, not workers: a launcher on each node starts the
workers, or there is one worker on each.
"""

import itertools
import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from tfdist.cluster.addresses import checked_host, checked_port, join
from tfdist.errors import UserError, one_line

ROUNDS = "TFDIST_ROUNDS"  # the launcher's list of earlier attempts for the chief (see `monitoring.recorder.Segments`)
FOLDER_LOCK = "TFDIST_FOLDER_LOCK_FD"  # the descriptor by which it lends the chief the run folder's lock
EXIT_RECORD = "TFDIST_EXIT_RECORD"  # variable with the path of the exit record (see `exit_record`)
HOLD = "TFDIST_HOLD_RANDOM_LAYERS"  # with it `tfdist.compare` trains without random layers, for its check
_OWN = ("TFDIST_MEETING_FD", ROUNDS, FOLDER_LOCK, EXIT_RECORD)
OTHER_LAUNCHERS = ("TF_CONFIG", "TORCHELASTIC_RUN_ID", "HOROVOD_", *_OWN)
"""prefixes: with them a worker takes another for its launcher"""
CLUSTER = (
    *("TF_CONFIG", "TORCHELASTIC_", "HOROVOD_", "TFDIST_ATTEMPT", *_OWN),
    *("SLURM_", "PMI_"),
    *("PET_", "SM_HOSTS", "SM_CURRENT_HOST", "SKYPILOT_NODE_", "NPROC_PER_NODE", "OMPI_COMM_WORLD_", "MLP_"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_"),
)
"""Prefixes of all variables by which a process takes itself for one of several workers."""


def without(environ: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    """Returns the environment without the variables that have one of these prefixes."""
    return {name: value for name, value in environ.items() if not name.startswith(prefixes)}


def filled(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables on one line each, without empty ones, which scripts leave instead of unsetting them."""
    return {name: one_line(value) for name, value in environ.items() if value.strip()}


def need(environ: Mapping[str, str], *names: str, beside: str) -> None:
    """Raises UserError unless all variables are set that are required with `beside`."""
    missing = [name for name in names if name not in environ]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set beside {beside}={environ[beside]}",
            f"set {'them' if len(missing) > 1 else 'it'}, or unset {beside}",
        )


def number(environ: Mapping[str, str], name: str, least: int = 0) -> int:
    """Reads an integer of at least `least`, 0 where it is not set, or raises UserError."""
    if name not in environ:
        return 0
    text = environ[name]
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or int(text) < least:
        raise UserError(f"{name}={text} is not an integer of at least {least}", "correct it")
    return int(text)


def pair(environ: Mapping[str, str], index: str, count: str) -> tuple[int, int]:
    """Reads an index and its count, or raises UserError."""
    need(environ, *{index, count} - environ.keys(), beside=count if count in environ else index)
    i, n = number(environ, index), number(environ, count, least=1)
    if i >= n:
        raise UserError(f"{index}={i} is outside {count}={n}: it counts from 0 to {n - 1}")
    return i, n


def master(environ: Mapping[str, str], host: str = "", port: int = 0) -> str:
    """Returns the chief's address: MASTER_ADDR and MASTER_PORT, else `host` and `port` as far as known; or ""."""
    own_host, own_port = host_and_port(environ, "MASTER_ADDR", "MASTER_PORT")
    host, port = own_host or host, own_port or port
    return join(host, port) if host and port else ""


def host_and_port(environ: Mapping[str, str], host: str, port: str) -> tuple[str, int]:
    """Reads two variables; "" and 0 where not set."""
    return (
        checked_host(environ[host], host) if host in environ else "",
        checked_port(environ[port], port) if port in environ else 0,
    )


PORT = 29500  # port of node 0 where a platform names none; torchrun's


class PlatformNode(NamedTuple):
    """A node of a job, as its platform describes it."""

    source: str  # the variable that counts the nodes, which identifies the platform in messages
    nnodes: int  # in an elastic job the most
    node_rank: int  # -1 in an elastic job that does not number them
    gpus: int = 0  # GPUs of each node; 0 if the platform names none
    addr: str = ""
    port: int = 0  # address of node 0; "" and 0 where a single node has none
    least: int = 0  # minimum number of nodes of an elastic job


def platform_node(environ: Mapping[str, str]) -> PlatformNode | None:
    """Finds the node that a platform's variables describe, or None; raises UserError if they make no sense."""
    environ = filled(environ)
    nodes = [node for read in (_mlp, _kubeflow, _sagemaker, _skypilot, _dlc) if (node := read(environ))]
    for one, other in itertools.pairwise(nodes):
        if (one.node_rank, one.nnodes) != (other.node_rank, other.nnodes):
            raise UserError(
                f"this is node {one.node_rank} of {one.nnodes} by {one.source} and node {other.node_rank} of "
                f"{other.nnodes} by {other.source}",
                f"unset {one.source}, or unset {other.source}",
            )
    return nodes[0] if nodes else None


def counts_nodes(environ: Mapping[str, str]) -> bool:
    """Returns whether `RANK` and `WORLD_SIZE` count nodes, as on PAI-DLC, which also sets NPROC_PER_NODE.

    https://www.alibabacloud.com/help/en/pai/general-environment-variables
    """
    return {"RANK", "WORLD_SIZE", "NPROC_PER_NODE"} <= environ.keys() and not (
        {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & environ.keys()
    )


def _mlp(environ: Mapping[str, str]) -> PlatformNode | None:
    if "MLP_WORKER_NUM" not in environ:
        return None
    if number(environ, "MLP_WORKER_NUM", least=1) > 1:
        need(environ, "MLP_ROLE_INDEX", "MLP_WORKER_0_HOST", "MLP_WORKER_0_PORT", beside="MLP_WORKER_NUM")
    rank, nodes = pair({"MLP_ROLE_INDEX": "0", **environ}, "MLP_ROLE_INDEX", "MLP_WORKER_NUM")
    addr, port = host_and_port(environ, "MLP_WORKER_0_HOST", "MLP_WORKER_0_PORT")
    return PlatformNode("MLP_WORKER_NUM", nodes, rank, number(environ, "MLP_WORKER_GPU"), addr, port)


def _kubeflow(environ: Mapping[str, str]) -> PlatformNode | None:
    """Reads torchrun's defaults of flags, which Kubeflow sets in each pod."""
    if "PET_NNODES" not in environ:
        return None
    least, elastic, most = environ["PET_NNODES"].rpartition(":")
    environ = {**environ, "PET_NNODES": most}
    fewest = number({"PET_NNODES": least}, "PET_NNODES", least=1) if elastic else 0
    if elastic:  # PyTorchJob says where such members meet, and numbers none
        host, _, at = environ.get("PET_RDZV_ENDPOINT", "").partition(":")
        environ = filled({"PET_MASTER_ADDR": host, "PET_MASTER_PORT": at, **environ})
    if number(environ, "PET_NNODES", least=max(1, fewest)) > 1:
        need(environ, *(("PET_MASTER_ADDR",) if elastic else ("PET_NODE_RANK", "PET_MASTER_ADDR")), beside="PET_NNODES")
    if elastic and "PET_NODE_RANK" not in environ:
        rank, nodes = (-1 if int(most) > 1 else 0), int(most)
    else:
        rank, nodes = pair({"PET_NODE_RANK": "0", **environ}, "PET_NODE_RANK", "PET_NNODES")
    fewest = fewest if nodes > 1 else 0
    addr, port = host_and_port(environ, "PET_MASTER_ADDR", "PET_MASTER_PORT")
    # `auto`, `cpu` and `gpu` leave the number to torchrun, and to --nproc_per_node here.
    each = environ.get("PET_NPROC_PER_NODE", "")
    gpus = 0 if each in ("", "auto", "cpu", "gpu") else number(environ, "PET_NPROC_PER_NODE", least=1)
    return PlatformNode("PET_NNODES", nodes, rank, gpus, addr, port or (PORT if addr else 0), fewest)


def _sagemaker(environ: Mapping[str, str]) -> PlatformNode | None:
    if "SM_HOSTS" not in environ:
        return None
    need(environ, "SM_CURRENT_HOST", beside="SM_HOSTS")
    try:
        hosts = json.loads(environ["SM_HOSTS"])
    except (ValueError, RecursionError):
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        raise UserError(f"SM_HOSTS={one_line(environ['SM_HOSTS'], 100)} is not a JSON list of host names", "correct it")
    natural = lambda host: [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", host)]
    hosts = sorted({checked_host(host, "SM_HOSTS") for host in hosts}, key=natural)  # algo-2 before algo-10
    if environ["SM_CURRENT_HOST"] not in hosts:
        raise UserError(f"SM_CURRENT_HOST={environ['SM_CURRENT_HOST']} is none of SM_HOSTS: {', '.join(hosts)}")
    rank = hosts.index(environ["SM_CURRENT_HOST"])
    return PlatformNode("SM_HOSTS", len(hosts), rank, number(environ, "SM_NUM_GPUS"), hosts[0], PORT)


def _skypilot(environ: Mapping[str, str]) -> PlatformNode | None:
    if "SKYPILOT_NODE_RANK" not in environ:
        return None
    need(environ, "SKYPILOT_NODE_IPS", beside="SKYPILOT_NODE_RANK")
    # One host per line, which `filled` has joined.
    hosts = [checked_host(host, "SKYPILOT_NODE_IPS") for host in environ["SKYPILOT_NODE_IPS"].split()]
    counted = {**environ, "SKYPILOT_NODE_IPS": str(len(hosts))}
    rank, nodes = pair(counted, "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS")
    gpus = number(environ, "SKYPILOT_NUM_GPUS_PER_NODE")
    return PlatformNode("SKYPILOT_NODE_RANK", nodes, rank, gpus, hosts[0], PORT)


def _dlc(environ: Mapping[str, str]) -> PlatformNode | None:
    if not counts_nodes(environ):
        return None
    rank, nodes = pair(environ, "RANK", "WORLD_SIZE")
    addr, port = host_and_port(environ, "MASTER_ADDR", "MASTER_PORT")
    gpus = number(environ, "NPROC_PER_NODE", least=1)
    return PlatformNode("NPROC_PER_NODE", nodes, rank, gpus, addr, port or (PORT if addr else 0))
