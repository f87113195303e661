"""The nodes of a launch, from the launcher's flags or a training platform. No TensorFlow."""

import argparse
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from tfdist.cluster import discovery, env_vars
from tfdist.cluster.addresses import is_loopback
from tfdist.config.field_syntax import float_or_nan
from tfdist.errors import UserError

JOIN_S, SCALE_S = 30.0, 10.0  # default of --join_timeout and of --scale_wait
_MOST = 100_000
_ELASTIC = ("join_timeout", "rejoin_timeout", "scale_wait")  # flags of elastic jobs


class Waits(NamedTuple):
    """How long an elastic job waits for nodes, in seconds."""

    join: float = JOIN_S  # at the start, for more nodes than MIN
    rejoin: float = 120.0  # later, for replacements, when fewer than MIN are left
    scale: float = SCALE_S  # for others to join, too, before the workers are restarted with a node that has joined


class Nodes(NamedTuple):
    """The nodes of a launch, and where they register."""

    max: int  # number of nodes; in an elastic job the maximum
    min: int  # minimum number of nodes; `max` where it is fixed
    elastic: bool  # whether nodes may join and leave
    rank: int  # rank of this one; in an elastic job 0 for node 0, else 1, or -1 where the address of node 0 decides
    addr: str  # address of node 0
    port: int  # port there; 0 for any free one
    nproc: str  # default of `--nproc_per_node`
    waits: Waits

    @property
    def size(self) -> str:
        """The flag that gives the number of nodes."""
        return f"--nnodes={f'{self.min}:' if self.elastic else ''}{self.max}"


def find(options: argparse.Namespace, environ: Mapping[str, str], start_timeout: float) -> Nodes:
    """Returns the nodes by the flags, else by a training platform's variables; raises UserError if neither suffices."""
    platform = env_vars.platform_node(environ)
    elastic = platform and platform.least and options.nnodes is None
    text = f"{platform.least}:{platform.nnodes}" if platform and elastic else options.nnodes or ""
    if ":" in text:
        return _elastic(text, platform, options, environ, start_timeout)
    for name in _ELASTIC:
        if getattr(options, name) is not None:
            raise UserError(f"--{name} is for --nnodes=MIN:MAX, where nodes may join and leave", "leave it out")
    if platform and (platform.least or options.nnodes not in (None, str(platform.nnodes))):
        platform = None  # the nodes are arranged by hand
    index = environ.get("JOB_COMPLETION_INDEX", "").strip()
    if index and not platform and options.nnodes is None:
        raise UserError(
            f"JOB_COMPLETION_INDEX={index} says that this is one pod of a job, and nothing says of how many, so that "
            "each would train alone: give --nnodes and --master_addr (a TrainJob",
            "set spec.trainer), or --nnodes=1 for pods that are independent",
        )
    default = platform or env_vars.PlatformNode("", 1, 0)
    nnodes = whole("--nnodes", default.nnodes if options.nnodes is None else options.nnodes, 1)
    # A pod of an indexed Job of Kubernetes knows its number, and nothing else.
    if nnodes == 1 or platform:
        index = ""
    # A script whose variable is unset passes an empty one: ignored, it would make each node node 0.
    node = whole("--node_rank", index or default.node_rank if options.node_rank is None else options.node_rank, 0)
    if node >= nnodes:
        raise UserError(f"--node_rank={node} does not exist with --nnodes={nnodes}: ranks of nodes count from 0 on")
    return Nodes(nnodes, nnodes, False, node, *_node_0(str(nnodes), nnodes, default, options), Waits())


def _node_0(text: str, most: int, default: env_vars.PlatformNode, options: argparse.Namespace) -> tuple[str, int, str]:
    """Returns address and port of node 0, for `most` nodes at most, and how many workers a node has by default."""
    addr = options.master_addr or default.addr
    if most > 1 and not addr:
        raise UserError(f"--nnodes={text} needs --master_addr: the address of node 0 in the network of the nodes")
    port = whole("--master_port", options.master_port or default.port or (env_vars.PORT if most > 1 else 0), 0, 65535)
    if port == 0 and most > 1:
        what = "--master_port=0 means any free port, which other nodes cannot know"
        raise UserError(what, "give the same on all nodes")
    return addr or "127.0.0.1", port, str(default.gpus or 1)


def _elastic(
    text: str,
    platform: env_vars.PlatformNode | None,
    options: argparse.Namespace,
    environ: Mapping[str, str],
    start_timeout: float,
) -> Nodes:
    """Returns the nodes of an elastic job of MIN:MAX nodes; its platform's number, if any, is MAX."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, re.ASCII)
    if not match:
        raise UserError(f"--nnodes must be an integer of at least 1, or MIN:MAX such as 2:4, got {text}")
    least, most = int(match[1]), int(match[2])
    if not 1 <= least <= most or not 2 <= most <= _MOST:
        raise UserError(f"--nnodes={text} is MIN:MAX, where MIN is 1 to MAX, and MAX 2 to {_MOST}")
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "").strip()
    fixed = "TF_CONFIG" if environ.get("TF_CONFIG", "").strip() else ""
    if platform and platform.nnodes == 1:
        platform = None
    if not fixed and platform and not platform.least and platform.nnodes != most:
        fixed = f"{platform.source}={platform.nnodes}"
    if not fixed and tasks not in ("", "1"):
        fixed = f"SLURM_STEP_NUM_TASKS={tasks}"
    if fixed:
        what = f"--nnodes={text} lets the number of nodes change, and {fixed} fixes it"
        raise UserError(what, "unset that, or give --nnodes one number")
    default = platform or env_vars.PlatformNode("", 1, -1)
    node_0 = _node_0(text, most, default, options)
    # A pod of an indexed Job of Kubernetes knows its number. Node 0 numbers the others.
    known = environ.get("JOB_COMPLETION_INDEX", "").strip() or str(default.node_rank)
    index = known if options.node_rank is None else options.node_rank
    node = -1 if index == "-1" and options.node_rank is None else min(whole("--node_rank", index, 0), 1)
    waits = Waits(
        seconds("--join_timeout", options.join_timeout or str(JOIN_S), least=0),
        seconds("--rejoin_timeout", options.rejoin_timeout or str(start_timeout)),
        seconds("--scale_wait", options.scale_wait or str(SCALE_S), least=0),
    )
    return Nodes(most, least, True, node, *node_0, waits)


def secret(nodes: Nodes, insecure: bool, environ: Mapping[str, str]) -> str:
    """Returns the launchers' shared secret, empty for one alone; raises UserError where anyone could join node 0."""
    shared = environ.get("TFDIST_SECRET", "").strip()
    if insecure and (shared or nodes.max == 1):
        why = "TFDIST_SECRET is set" if shared else "with one machine the launcher makes a secret by itself"
        raise UserError(f"--insecure has no effect because {why}", "leave it out")
    if nodes.max > 1 and not (shared or insecure or is_loopback(nodes.addr)):
        raise UserError(
            f"{nodes.size} needs TFDIST_SECRET in the environment, since anyone who reaches {nodes.addr} "
            f"could join: {discovery.HOW_TO_SHARE}, or give --insecure in a network that only you can reach"
        )
    return shared


def whole(name: str, value: str | int, least: int, most: float = math.inf) -> int:
    text = str(value)
    is_number = text.isascii() and text.isdigit() and len(text) < 20  # Python reads no number of 4,300 digits
    if not is_number or not least <= int(text) <= most:
        limits = f"of at least {least}" if most == math.inf else f"from {least} to {most:g}"
        also = ", or auto" if name == "--nproc_per_node" else ""
        raise UserError(f"{name} must be an integer {limits}{also}, got {text[:40] or 'nothing'}")
    return int(text)


def seconds(name: str, text: str, least: float = math.ulp(0.0)) -> float:
    value = float_or_nan(text)
    if not least <= value < math.inf:
        raise UserError(f"{name} must be a {'' if least == 0 else 'positive '}number of seconds, got {text}")
    return value
