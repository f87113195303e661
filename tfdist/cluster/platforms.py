"""Variables of training platforms, which describe each node (machine or container) of a job. No TensorFlow.

They count nodes, not workers: a launcher on each node starts the workers, or there is one worker on each.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from tfdist.cluster import env_vars
from tfdist.cluster.addresses import checked_host
from tfdist.errors import UserError, one_line

PORT = 29500  # port of node 0 where a platform names none; torchrun's


class PlatformNode(NamedTuple):
    """A node of a job, as its platform describes it."""

    source: str  # the variable that counts the nodes, which identifies the platform in messages
    nnodes: int
    node_rank: int
    gpus: int = 0  # GPUs of each node; 0 if the platform names none
    addr: str = ""
    port: int = 0  # address of node 0; "" and 0 where a single node has none


def node(environ: Mapping[str, str]) -> PlatformNode | None:
    """Finds the node that a platform's variables describe, or None; raises UserError if they make no sense."""
    environ = env_vars.filled(environ)
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
    if env_vars.number(environ, "MLP_WORKER_NUM", least=1) > 1:
        env_vars.need(environ, "MLP_ROLE_INDEX", "MLP_WORKER_0_HOST", "MLP_WORKER_0_PORT", beside="MLP_WORKER_NUM")
    rank, nodes = env_vars.pair({"MLP_ROLE_INDEX": "0", **environ}, "MLP_ROLE_INDEX", "MLP_WORKER_NUM")
    addr, port = env_vars.host_and_port(environ, "MLP_WORKER_0_HOST", "MLP_WORKER_0_PORT")
    return PlatformNode("MLP_WORKER_NUM", nodes, rank, _gpus(environ, "MLP_WORKER_GPU"), addr, port)


def _kubeflow(environ: Mapping[str, str]) -> PlatformNode | None:
    """Reads torchrun's defaults of flags, which Kubeflow sets in each pod."""
    if "PET_NNODES" not in environ:
        return None
    if ":" in environ["PET_NNODES"]:
        raise UserError(
            f"PET_NNODES={environ['PET_NNODES']} is an elastic job, whose number of nodes changes", "give one number"
        )
    if env_vars.number(environ, "PET_NNODES", least=1) > 1:
        env_vars.need(environ, "PET_NODE_RANK", "PET_MASTER_ADDR", beside="PET_NNODES")
    rank, nodes = env_vars.pair({"PET_NODE_RANK": "0", **environ}, "PET_NODE_RANK", "PET_NNODES")
    addr, port = env_vars.host_and_port(environ, "PET_MASTER_ADDR", "PET_MASTER_PORT")
    # `auto`, `cpu` and `gpu` leave the number to torchrun, and to --nproc_per_node here.
    each = environ.get("PET_NPROC_PER_NODE", "")
    gpus = 0 if each in ("", "auto", "cpu", "gpu") else env_vars.number(environ, "PET_NPROC_PER_NODE", least=1)
    return PlatformNode("PET_NNODES", nodes, rank, gpus, addr, port or (PORT if addr else 0))


def _sagemaker(environ: Mapping[str, str]) -> PlatformNode | None:
    if "SM_HOSTS" not in environ:
        return None
    env_vars.need(environ, "SM_CURRENT_HOST", beside="SM_HOSTS")
    try:
        hosts = json.loads(environ["SM_HOSTS"])
    except (ValueError, RecursionError):
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        raise UserError(f"SM_HOSTS={one_line(environ['SM_HOSTS'], 100)} is not a JSON list of host names", "correct it")
    hosts = sorted({checked_host(host, "SM_HOSTS") for host in hosts}, key=_natural)
    if environ["SM_CURRENT_HOST"] not in hosts:
        raise UserError(f"SM_CURRENT_HOST={environ['SM_CURRENT_HOST']} is none of SM_HOSTS: {', '.join(hosts)}")
    rank = hosts.index(environ["SM_CURRENT_HOST"])
    return PlatformNode("SM_HOSTS", len(hosts), rank, _gpus(environ, "SM_NUM_GPUS"), hosts[0], PORT)


def _natural(host: str) -> list[tuple[int, str]]:
    """Returns a key that sorts algo-2 before algo-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", host)]


def _skypilot(environ: Mapping[str, str]) -> PlatformNode | None:
    if "SKYPILOT_NODE_RANK" not in environ:
        return None
    env_vars.need(environ, "SKYPILOT_NODE_IPS", beside="SKYPILOT_NODE_RANK")
    # One host per line, which `filled` has joined.
    hosts = [checked_host(host, "SKYPILOT_NODE_IPS") for host in environ["SKYPILOT_NODE_IPS"].split()]
    counted = {**environ, "SKYPILOT_NODE_IPS": str(len(hosts))}
    rank, nodes = env_vars.pair(counted, "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS")
    gpus = _gpus(environ, "SKYPILOT_NUM_GPUS_PER_NODE")
    return PlatformNode("SKYPILOT_NODE_RANK", nodes, rank, gpus, hosts[0], PORT)


def _dlc(environ: Mapping[str, str]) -> PlatformNode | None:
    if not counts_nodes(environ):
        return None
    rank, nodes = env_vars.pair(environ, "RANK", "WORLD_SIZE")
    addr, port = env_vars.host_and_port(environ, "MASTER_ADDR", "MASTER_PORT")
    gpus = env_vars.number(environ, "NPROC_PER_NODE", least=1)
    return PlatformNode("NPROC_PER_NODE", nodes, rank, gpus, addr, port or (PORT if addr else 0))


def _gpus(environ: Mapping[str, str], name: str) -> int:
    return env_vars.number(environ, name) if name in environ else 0
