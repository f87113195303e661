"""Starts all workers of this machine, or of several: `python -m tfdist.launch --nproc_per_node=2 -- <train flags>`.

Option names and their meaning are torchrun's. Exit codes: 0 done; 2 the input
or the environment is wrong; 130 and 143 stopped by a signal; else that of the
worker that failed first, 128 + n if signal n killed it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from tfdist import __version__
from tfdist.config import buckets, field_syntax, validation
from tfdist.config.commands import standard_streams
from tfdist.config.messages import aside
from tfdist.distributed import gpus
from tfdist.distributed.job import cluster, platforms
from tfdist.distributed.job.addresses import is_loopback
from tfdist.errors import UserError, shown
from tfdist.launch import coordinator, node_agent, node_links
from tfdist.launch.event_loop import Events, Screen

PORT = platforms.PORT
"""Where launchers meet unless told otherwise."""
_OWN = ("devices", "workdir", "threads", "progress", "start_timeout", "stall_timeout")
"""Environment flags that may differ between nodes."""


class _Nodes(NamedTuple):
    """The machines of a launch, and where they meet."""

    nnodes: int
    node: int
    """Which of them this is."""
    addr: str
    """Address of node 0."""
    port: int
    """Port there; 0 for any free one."""
    nproc: str
    """Workers here unless told otherwise, as `--nproc_per_node` has it."""


class _TrainFlags(NamedTuple):
    """What the flags of `tfdist.train` ask for."""

    experiment: dict[str, Any]
    """Fields of the experiment, by dotted name."""
    where: dict[str, Any]
    """Fields of the environment."""
    workdir: str
    """The run folder."""


class _Shares(NamedTuple):
    """The workers of this machine."""

    nproc: int
    variables: tuple[Mapping[str, str], ...]
    """Those by which each worker gets its part of the GPUs."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m tfdist.launch",
        usage="%(prog)s [flags] -- [train flags | script | -m module ...]",
        description="Starts the workers of a run, here and (with one launcher on each) on other machines, "
        "shows what they print, and ends them all when one fails.",
        epilog="--flag-name may be written for --flag_name. What a platform says of its nodes (PET_*, MLP_*, "
        "SM_HOSTS, SKYPILOT_*, JOB_COMPLETION_INDEX) is the default. Across machines the environment "
        "variable TFDIST_SECRET, the same on all of them, keeps others out of the launchers' meeting.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28, width=80),
    )
    add = parser.add_argument
    add("--nproc_per_node", metavar="N|auto", help="workers on this machine; auto: one per GPU (default 1)")
    add("--nnodes", metavar="N", help="machines (default 1); start the launcher on each")
    add("--node_rank", metavar="I", help="which of them this is, from 0 on (default 0)")
    add("--master_addr", metavar="HOST", help="address of node 0 (default 127.0.0.1 with one machine)")
    add("--master_port", metavar="PORT", help=f"port there (default {PORT}; with one machine any free one)")
    add("--max_restarts", metavar="N", default="0", help="start all workers again so often after a failure (default 0)")
    add("--start_timeout", metavar="SECONDS", default="120", help="wait so long for the other machines (default 120)")
    add("--log_dir", metavar="DIR", help="keep what each rank prints there (default WORKDIR/logs; none for a script)")
    add("--insecure", action="store_true", help="meet across machines without TFDIST_SECRET: the network must be yours")
    add("--version", action="version", version=f"tfdist {__version__}", help="print the version")
    add("--dry_run", action="store_true", help="print command and environment of each worker, and start nothing")
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the launcher's flags, and returns them with what stands after `--`.

    Raises:
      UserError: a flag is not known.
    """
    own, rest = list(argv), []
    if "--" in own:
        end = own.index("--")
        own, rest = own[:end], own[end + 1 :]
    parser = _parser()
    options, unknown = parser.parse_known_args([_underscored(a) for a in own])
    if unknown:
        name = unknown[0].lstrip("-").partition("=")[0]
        if not unknown[0].startswith("-"):
            raise UserError(
                f"unexpected argument {unknown[0]!r}: a script, as the flags of tfdist.train, stands after --"
            )
        from tfdist.config import runtime_options

        if name.partition(".")[0] in ("config", *runtime_options.Environment.__slots__):
            raise UserError(f"--{name} is a flag of tfdist.train: write it after --")
        known = tuple(sorted(vars(options)))
        begins = [k for k in known if k.startswith(name)]
        raise UserError(f"unknown flag --{name}{field_syntax.suggest(begins[0] if len(begins) == 1 else name, known)}")
    return options, rest


def _underscored(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name[:2] + name[2:].replace("-", "_") + equals + value if name.startswith("--") else argument


def make_plan(options: argparse.Namespace, rest: Sequence[str], environ: Mapping[str, str]) -> node_agent.RoundPlan:
    """Checks everything that can be known before a worker starts.

    Raises:
      UserError: something is wrong.
    """
    nodes = _nodes(options, environ)
    max_restarts = _whole("--max_restarts", options.max_restarts, 0)
    start_timeout = _seconds("--start_timeout", options.start_timeout)
    agreed: dict[str, Any] = {"the version of tfdist": __version__, "--max_restarts": max_restarts}
    workdir, devices = "", "all"
    field_syntax.check_local("--log_dir", options.log_dir or "")
    own_program = bool(rest) and (not rest[0].startswith("-") or rest[0] == "-m")
    if own_program:
        command = _program(rest)
        agreed["the command"] = shlex.join(rest)
    else:
        command = (sys.executable, "-m", "tfdist.train", *rest)
        train = _train_flags(rest)
        where, workdir = train.where, train.workdir
        if where["insecure"]:
            raise UserError("--insecure after -- would change nothing, since workers get a secret: write it before --")
        agreed |= {f"--{name}": value for name, value in train.experiment.items()}
        agreed |= {f"--{name}": value for name, value in where.items() if name not in _OWN}
        devices = "none" if where["virtual_devices"] else where["devices"]
    nproc, shares = _divide(options.nproc_per_node or nodes.nproc, devices, environ)
    if not own_program and (nproc > 1 or nodes.nnodes > 1) and where["strategy"] not in ("auto", "multi_worker"):
        instead = "start it with horovodrun" if where["strategy"] == "horovod" else "start python -m tfdist.train"
        raise UserError(
            f"--strategy={where['strategy']} is not for workers of tfdist.launch: {instead}, "
            "or use --strategy=multi_worker"
        )
    if any(shares) and devices != "all" and not own_program:
        command += ("--devices=all",)  # of those that the launcher has picked by the flag
    return node_agent.RoundPlan(
        command=command,
        nproc=nproc,
        nnodes=nodes.nnodes,
        node=nodes.node,
        addr=nodes.addr,
        port=nodes.port,
        max_restarts=max_restarts,
        start_timeout=start_timeout,
        shares=shares,
        agreed=json.loads(json.dumps(agreed, default=str)),  # as it arrives on the other side
        workdir=workdir,
        log_dir=os.path.expanduser(options.log_dir or "") or _logs(workdir),
        secret=_secret(nodes, options.insecure, environ),
    )


def _logs(workdir: str) -> str:
    """Returns where what the workers say is kept, on this machine: logs are added to, which no bucket can."""
    here = str(buckets.copy_of(workdir)) if buckets.is_url(workdir) else workdir
    return os.path.join(here, "logs") if here else ""


def _secret(nodes: _Nodes, insecure: bool, environ: Mapping[str, str]) -> str:
    """Returns the words by which launchers know each other; one that is alone needs none."""
    secret = environ.get("TFDIST_SECRET", "").strip()
    if insecure and (secret or nodes.nnodes == 1):
        why = "TFDIST_SECRET is set" if secret else "with one machine the launcher makes a secret by itself"
        raise UserError(f"--insecure would change nothing, because {why}: leave it out")
    if nodes.nnodes > 1 and not (secret or insecure or is_loopback(nodes.addr)):
        raise UserError(
            f"--nnodes={nodes.nnodes} needs TFDIST_SECRET in the environment, since whoever reaches {nodes.addr} could "
            f"take part: {cluster.HOW_TO_SHARE}, or give --insecure in a network that only you can reach"
        )
    return secret


def _nodes(options: argparse.Namespace, environ: Mapping[str, str]) -> _Nodes:
    """Finds the machines by the flags, else by what a training platform says."""
    platform = platforms.node(environ)
    if platform and options.nnodes not in (None, str(platform.nnodes)):
        platform = None  # somebody arranges the nodes by hand
    default = platform or platforms.PlatformNode("", 1, 0)
    nnodes = _whole("--nnodes", options.nnodes or default.nnodes, 1)
    # A pod of an indexed Job of Kubernetes knows its number, and nothing else.
    index = environ.get("JOB_COMPLETION_INDEX", "").strip() if nnodes > 1 and not platform else ""
    node = _whole("--node_rank", options.node_rank or index or default.node_rank, 0)
    if node >= nnodes:
        raise UserError(f"--node_rank={node} does not exist with --nnodes={nnodes}: ranks of nodes count from 0 on")
    addr = options.master_addr or default.addr
    if nnodes > 1 and not addr:
        raise UserError(f"--nnodes={nnodes} needs --master_addr: the address of node 0 in the network of the nodes")
    port = _whole("--master_port", options.master_port or default.port or (PORT if nnodes > 1 else 0), 0, 65535)
    if nnodes > 1 and port == 0:
        raise UserError(
            "--master_port=0 means any free port, which other nodes cannot know: give the same on all nodes"
        )
    return _Nodes(nnodes, node, addr or "127.0.0.1", port, str(default.gpus or 1))


def _program(rest: Sequence[str]) -> tuple[str, ...]:
    if rest[0] == "-m" and len(rest) < 2:
        raise UserError("-m names no module: write -m package.module")
    if rest[0] != "-m" and not os.path.isfile(rest[0]):
        raise UserError(f"there is no script {rest[0]!r}: flags of tfdist.train begin with --, a script is a file")
    return (sys.executable, *rest)


def _train_flags(rest: Sequence[str]) -> _TrainFlags:
    """Parses the flags of `tfdist.train`, so that a typo shows once and here."""
    import dataclasses

    from absl import flags

    from tfdist import config
    from tfdist.config import runtime_options
    from tfdist.config.commands import command_line

    runtime_options.define_flags()
    before, sys.argv = sys.argv, ["tfdist.train", *rest]  # config_flags reads the overrides there
    try:
        command_line.parse(sys.argv)
    finally:
        sys.argv = before
    experiment, where = validation.validate(flags.FLAGS.config), runtime_options.from_flags(flags.FLAGS)
    return _TrainFlags(config.flat(experiment), dataclasses.asdict(where), runtime_options.workdir(experiment, where))


def _divide(nproc: str, devices: str, environ: Mapping[str, str]) -> _Shares:
    """Divides the GPUs of this machine among its workers."""
    names: Sequence[str] = ()
    order: dict[str, str] = {}
    if devices != "none" and nproc != "1":
        survey = gpus.survey()
        selection = gpus.select(devices, survey, environ)
        if selection.opaque:
            names = [e.strip() for e in environ["CUDA_VISIBLE_DEVICES"].split(",")]
        else:
            names, order = [str(g.number) for g in selection.gpus], {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        if survey.problem:
            aside.info(survey.problem)
    count = max(1, len(names)) if nproc == "auto" else _whole("--nproc_per_node", nproc, 1)
    if count == 1 or not names:
        return _Shares(count, ({},) * count)
    each = len(names) // count
    if each * count != len(names):
        raise UserError(
            f"{len(names)} GPU{'s' * (len(names) > 1)} ({', '.join(names)}) cannot be divided evenly among {count} "
            "workers: change --nproc_per_node, choose some with CUDA_VISIBLE_DEVICES or the train flag --devices, "
            "or use the CPU with --devices=none"
        )
    parts = [",".join(names[i * each : (i + 1) * each]) for i in range(count)]
    return _Shares(count, tuple({**order, "CUDA_VISIBLE_DEVICES": part} for part in parts))


def _whole(name: str, value: str | int, least: int, most: float = math.inf) -> int:
    text = str(value)
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        limits = f"of at least {least}" if most == math.inf else f"from {least} to {most:g}"
        also = ", or auto" if name == "--nproc_per_node" else ""
        raise UserError(f"{name} must be a whole number {limits}{also}, got {text}")
    return int(text)


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"{name} must be a positive number of seconds, got {text}")
    return value


def dry_run(plan: node_agent.RoundPlan, environ: Mapping[str, str]) -> str:
    """Returns each worker of this node as a line for a shell, under a comment."""
    port = plan.port
    if plan.nnodes == 1:
        with node_links.listen(plan.addr, plan.port) as listener:
            port = listener.getsockname()[1]
    world, first = plan.nnodes * plan.nproc, plan.node * plan.nproc
    assumed = f", if each of {plan.nnodes} nodes has as many" if plan.nnodes > 1 else ""
    this = node_agent.Round(0, world, first, port, salt="")
    kept = node_agent.inherited(environ)
    lines = []
    for local_rank in range(plan.nproc):
        given = node_agent.variables(plan, this, local_rank) | {"TFDIST_SECRET": ""}  # others may read what is printed
        unset = [f"-u {name}" for name in sorted(environ) if name not in kept and name not in given]
        assigned = [f"{name}={shlex.quote(value)}" for name, value in given.items() if value]
        lines.append(f"# rank {first + local_rank} of {world}{assumed}; TFDIST_SECRET is not shown")
        lines.append(" ".join(["env", *unset, *assigned, shlex.join(plan.command)]))
    return "\n".join(lines)


def _run(argv: Sequence[str]) -> int:
    options, rest = parse(argv)
    plan = make_plan(options, rest, os.environ)
    if options.dry_run:
        print(dry_run(plan, os.environ))
        return 0
    with Events() as events:
        if plan.node:
            return node_agent.follow(plan, events, Screen())
        return coordinator.Coordinator(plan, events, Screen()).run()


def main() -> None:
    """Runs `python -m tfdist.launch`."""
    standard_streams.fill()
    try:
        sys.exit(_run(sys.argv[1:]))
    except UserError as error:
        print(f"tfdist: error: {shown(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("tfdist: interrupted, nothing was started", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
