"""The machines of a launch, as the launcher's flags or a training platform describe them. No TensorFlow."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from tfdist.cluster import discovery, platforms
from tfdist.cluster.addresses import is_loopback
from tfdist.errors import UserError

PORT = platforms.PORT
"""Where launchers meet unless told otherwise."""
JOIN_S, SCALE_S = 30.0, 10.0
"""Default of --join_timeout and of --scale_wait."""
_MOST = 100_000
_ELASTIC = ("join_timeout", "rejoin_timeout", "scale_wait")
"""Flags that say something only where the number of nodes may change."""


class Waits(NamedTuple):
    """How long an elastic job waits for nodes, in seconds."""

    join: float = JOIN_S
    """At the start, for more than the fewest."""
    rejoin: float = 120.0
    """Later, for somebody to take the place of those that are lost, when there are fewer than the fewest."""
    scale: float = SCALE_S
    """For others to come, too, before the workers are started again with a node that has come."""


class Nodes(NamedTuple):
    """The machines of a launch, and where they meet."""

    max: int
    """Number of nodes; in an elastic job the maximum."""
    min: int
    """Minimum number of nodes; `max` where it is fixed."""
    elastic: bool
    """Whether nodes may join and leave."""
    rank: int
    """Rank of this one; in an elastic job 0 for node 0, else 1, or -1 where the address of node 0 decides."""
    addr: str
    """Address of node 0."""
    port: int
    """Port there; 0 for any free one."""
    nproc: str
    """Workers here unless told otherwise, as `--nproc_per_node` has it."""
    waits: Waits

    @property
    def size(self) -> str:
        """The flag that says how many there are."""
        return f"--nnodes={f'{self.min}:' if self.elastic else ''}{self.max}"


def find(options: argparse.Namespace, environ: Mapping[str, str], start_timeout: float) -> Nodes:
    """Finds the machines by the flags, else by what a training platform says.

    Args:
      options: the launcher's flags.
      environ: environment variables.
      start_timeout: seconds to wait for other machines, unless told otherwise.

    Raises:
      UserError: the flags make no sense, or are not enough.
    """
    if ":" in (options.nnodes or ""):
        return _elastic(options, environ, start_timeout)
    for name in _ELASTIC:
        if getattr(options, name) is not None:
            raise UserError(f"--{name} is for --nnodes=MIN:MAX, where nodes may come and go: leave it out")
    platform = platforms.node(environ)
    if platform and options.nnodes not in (None, str(platform.nnodes)):
        platform = None  # somebody arranges the nodes by hand
    index = environ.get("JOB_COMPLETION_INDEX", "").strip()
    if index and not platform and options.nnodes is None:
        raise UserError(
            f"JOB_COMPLETION_INDEX={index} says that this is one pod of a job, and nothing says of how many, so that "
            "each would train alone: give --nnodes and --master_addr (a TrainJob: set spec.trainer), or --nnodes=1 for "
            "pods that are independent"
        )
    default = platform or platforms.PlatformNode("", 1, 0)
    nnodes = whole("--nnodes", default.nnodes if options.nnodes is None else options.nnodes, 1)
    # A pod of an indexed Job of Kubernetes knows its number, and nothing else.
    if nnodes == 1 or platform:
        index = ""
    # An empty one is that of a script whose variable is not set: taken for nothing, each node would be node 0.
    node = whole("--node_rank", index or default.node_rank if options.node_rank is None else options.node_rank, 0)
    if node >= nnodes:
        raise UserError(f"--node_rank={node} does not exist with --nnodes={nnodes}: ranks of nodes count from 0 on")
    addr = options.master_addr or default.addr
    if nnodes > 1 and not addr:
        raise UserError(f"--nnodes={nnodes} needs --master_addr: the address of node 0 in the network of the nodes")
    port = whole("--master_port", options.master_port or default.port or (PORT if nnodes > 1 else 0), 0, 65535)
    if nnodes > 1:
        _check_port(port)
    return Nodes(nnodes, nnodes, False, node, addr or "127.0.0.1", port, str(default.gpus or 1), Waits())


def _check_port(port: int) -> None:
    if port == 0:
        raise UserError(
            "--master_port=0 means any free port, which other nodes cannot know: give the same on all nodes"
        )


def _elastic(options: argparse.Namespace, environ: Mapping[str, str], start_timeout: float) -> Nodes:
    """Finds the machines of a job whose number of nodes may change."""
    text = options.nnodes
    least, most = _range(text)
    fixed = _fixed_by(environ)
    if fixed:
        raise UserError(
            f"--nnodes={text} lets the number of nodes change, and {fixed} fixes it: unset that, or give "
            "--nnodes one number"
        )
    if not options.master_addr:
        raise UserError(f"--nnodes={text} needs --master_addr: the address of node 0 in the network of the nodes")
    port = whole("--master_port", options.master_port or PORT, 0, 65535)
    _check_port(port)
    # A pod of an indexed Job of Kubernetes knows its number. Whoever is not node 0 gets one from node 0.
    index = environ.get("JOB_COMPLETION_INDEX", "").strip() if options.node_rank is None else options.node_rank
    node = -1 if options.node_rank is None and not index else min(whole("--node_rank", index, 0), 1)
    waits = Waits(
        seconds("--join_timeout", options.join_timeout or str(JOIN_S), least=0),
        seconds("--rejoin_timeout", options.rejoin_timeout or str(start_timeout)),
        seconds("--scale_wait", options.scale_wait or str(SCALE_S), least=0),
    )
    return Nodes(most, least, True, node, options.master_addr, port, "1", waits)


def _range(text: str) -> tuple[int, int]:
    """Reads MIN:MAX."""
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, re.ASCII)
    if not found:
        raise UserError(
            "--nnodes must be a whole number of at least 1, or MIN:MAX such as 2:4, the fewest and the most nodes that "
            f"there may be, got {text}"
        )
    least, most = int(found[1]), int(found[2])
    wrong = ""
    if least > most:
        wrong = f"the fewest nodes can be at most as many as the most, got {least} and {most}: write {most}:{least}"
    if least < 1:
        wrong = f"the fewest nodes must be at least 1, got {least}: write 1:{max(2, most)}"
    if most < 2:
        wrong = f"the most nodes must be at least 2, got {most}: write 1:2, or leave --nnodes out for one machine"
    if most > _MOST:
        wrong = f"the most nodes can be at most {_MOST}, got {most}: write fewer"
    if wrong:
        raise UserError(f"--nnodes={text} is MIN:MAX, and {wrong}")
    return least, most


def _fixed_by(environ: Mapping[str, str]) -> str:
    """Returns the variable by which something has started, or describes, a fixed number of nodes; or nothing."""
    if environ.get("TF_CONFIG", "").strip():
        return "TF_CONFIG"
    platform = platforms.node(environ)
    if platform and platform.nnodes > 1:
        return platform.source
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "").strip()
    return f"SLURM_STEP_NUM_TASKS={tasks}" if tasks not in ("", "1") else ""


def secret(nodes: Nodes, insecure: bool, environ: Mapping[str, str]) -> str:
    """Returns the words by which launchers know each other; one that is alone needs none.

    Raises:
      UserError: there are none, and whoever reaches node 0 could take part; or `insecure` would change nothing.
    """
    words = environ.get("TFDIST_SECRET", "").strip()
    if insecure and (words or nodes.max == 1):
        why = "TFDIST_SECRET is set" if words else "with one machine the launcher makes a secret by itself"
        raise UserError(f"--insecure would change nothing, because {why}: leave it out")
    if nodes.max > 1 and not (words or insecure or is_loopback(nodes.addr)):
        raise UserError(
            f"{nodes.size} needs TFDIST_SECRET in the environment, since whoever reaches {nodes.addr} could "
            f"take part: {discovery.HOW_TO_SHARE}, or give --insecure in a network that only you can reach"
        )
    return words


def whole(name: str, value: str | int, least: int, most: float = math.inf) -> int:
    """Reads a whole number.

    Raises:
      UserError: it is none, or outside of the limits.
    """
    text = str(value)
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        limits = f"of at least {least}" if most == math.inf else f"from {least} to {most:g}"
        also = ", or auto" if name == "--nproc_per_node" else ""
        raise UserError(f"{name} must be a whole number {limits}{also}, got {text or 'nothing'}")
    return int(text)


def seconds(name: str, text: str, least: float = math.ulp(0.0)) -> float:
    """Reads a number of seconds.

    Args:
      name: of the flag.
      text: its value.
      least: 0 where no time at all may be meant.

    Raises:
      UserError: it is none, or less than `least`.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise UserError(f"{name} must be a {'' if least == 0 else 'positive '}number of seconds, got {text}")
    return value
