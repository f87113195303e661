"""The launcher's flags, and the plan that they and the machine give: which workers to start, and how."""

import argparse
import dataclasses
import json
import os
import pathlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from absl import flags

from tfdist import __version__, config
from tfdist.cluster import env_vars
from tfdist.config import buckets, field_syntax, runtime_options, validation
from tfdist.config.commands import command_line
from tfdist.config.messages import aside
from tfdist.distributed import gpus
from tfdist.errors import UserError
from tfdist.launch import machines, node_agent
from tfdist.launch.machines import JOIN_S, SCALE_S

_ROWS = json.loads(pathlib.Path(__file__).with_name("options.json").read_text())
_NUMBERS = {"PORT": env_vars.PORT, "JOIN_S": JOIN_S, "SCALE_S": SCALE_S}
OPTIONS = {name: (metavar, text.format_map(_NUMBERS)) for name, (metavar, text) in _ROWS.items()}
"""The flags that `tfdist run` has, too: by their names, what they take, and what they are for."""
_OWN = ("devices", "workdir", "threads", "progress", "start_timeout", "stall_timeout")  # may differ between nodes


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m tfdist.launch",
        usage="%(prog)s [flags] -- [train flags | script | -m module ...]",
        description="Starts the workers of a run, here and (with one launcher on each) on other machines, "
        "shows what they print, and ends them all when one fails.",
        epilog="--flag-name may be written for --flag_name. A platform's variables (PET_*, MLP_*, "
        "SM_HOSTS, SKYPILOT_*, JOB_COMPLETION_INDEX) are the defaults. Across machines the environment "
        "variable TFDIST_SECRET, the same on all of them, keeps others from joining.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28, width=80),
    )
    add = parser.add_argument
    for name, (metavar, text) in OPTIONS.items():
        add(f"--{name}", metavar=metavar, help=text, default="0" if name == "max_restarts" else None)
    add("--start_timeout", metavar="SECONDS", default="120", help="Time to wait for the other machines (default 120).")
    add("--log_dir", metavar="DIR", help="Keep what each rank prints there (default WORKDIR/logs; none for a script).")
    add("--insecure", action="store_true", help="Connect machines without TFDIST_SECRET: the network must be private.")
    add("--version", action="version", version=f"tfdist {__version__}", help="Print the version.")
    add("--dry_run", action="store_true", help="Print command and environment of each worker, and start nothing.")
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the launcher's flags; returns them with the arguments after `--`, or raises UserError."""
    own, rest = list(argv), []
    if "--" in own:
        end = own.index("--")
        own, rest = own[:end], own[end + 1 :]
    parser = _parser()
    for i, argument in enumerate(own):
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            own[i] = name[:2] + name[2:].replace("-", "_") + equals + value
    options, unknown = parser.parse_known_args(own)
    if unknown:
        name = unknown[0].lstrip("-").partition("=")[0]
        if not unknown[0].startswith("-"):
            what = f"unexpected argument {unknown[0]!r}: a script, as the flags of tfdist.train, stands after --"
            raise UserError(what)
        if name.partition(".")[0] in ("config", *runtime_options.HELP):
            raise UserError(f"--{name} is a flag of tfdist.train", "write it after --")
        known = tuple(sorted(vars(options)))
        begins = [k for k in known if k.startswith(name)]
        raise UserError(f"unknown flag --{name}{field_syntax.suggest(begins[0] if len(begins) == 1 else name, known)}")
    return options, rest


def make_plan(options: argparse.Namespace, rest: Sequence[str], environ: Mapping[str, str]) -> node_agent.LaunchPlan:
    """Checks everything that can be checked before a worker starts, or raises UserError."""
    max_restarts = machines.whole("--max_restarts", options.max_restarts, 0)
    start_timeout = machines.seconds("--start_timeout", options.start_timeout)
    nodes = machines.find(options, environ, start_timeout)
    facts: dict[str, Any] = {
        "the version of tfdist": __version__,
        "--nnodes": nodes.size.partition("=")[2],
        "--max_restarts": max_restarts,
    }
    workdir, held, devices = "", "", "all"
    field_syntax.check_local("--log_dir", options.log_dir or "")
    own_program = bool(rest) and (not rest[0].startswith("-") or rest[0] == "-m")
    if own_program:
        if rest[0] == "-m" and len(rest) < 2:
            raise UserError("-m names no module", "write -m package.module")
        if rest[0] != "-m" and not os.path.isfile(rest[0]):
            raise UserError(f"there is no script {rest[0]!r}: flags of tfdist.train begin with --, a script is a file")
        command: tuple[str, ...] = (sys.executable, *rest)
        facts["the command"] = shlex.join(rest)
    else:
        rest = list(rest)
        command = (sys.executable, "-m", "tfdist.train", *rest)
        experiment, where, workdir = _train_flags(rest)
        held = "" if where.dry_run else workdir
        if where.insecure:
            what = "--insecure after -- would change nothing, since workers get a secret"
            raise UserError(what, "write it before --")
        facts |= {f"--{name}": value for name, value in config.flat(experiment).items()}
        facts |= {f"--{name}": value for name, value in dataclasses.asdict(where).items() if name not in _OWN}
        devices = "none" if where.uses_cpu else where.devices
    nproc, shares = _divide(options.nproc_per_node or nodes.nproc, devices, environ)
    if not own_program and (nproc > 1 or nodes.max > 1) and where.strategy not in ("auto", "multi_worker"):
        instead = "start it with horovodrun" if where.strategy == "horovod" else "start python -m tfdist.train"
        what = f"--strategy={where.strategy} is not for workers of tfdist.launch"
        raise UserError(what, f"{instead}, or use --strategy=multi_worker")
    if nodes.elastic and not own_program:
        _check_elastic(experiment, where.requeue, nodes, nproc)
    if any(shares) and devices != "all" and not own_program:
        command += ("--devices=all",)  # of those that the launcher has selected
    log_dir = os.path.expanduser(options.log_dir or "")
    if workdir and not log_dir:  # on this machine: a bucket cannot append
        log_dir = os.path.join(str(buckets.copy_of(workdir)) if buckets.is_url(workdir) else workdir, "logs")
    received, secret = json.loads(json.dumps(facts, default=str)), machines.secret(nodes, options.insecure, environ)
    return node_agent.LaunchPlan(
        command, nproc, nodes, max_restarts, start_timeout, shares, received, held, log_dir, secret
    )


def _check_elastic(experiment: config.Experiment, requeue: bool, nodes: machines.Nodes, nproc: int) -> None:
    """Raises UserError for options that do not go with an elastic job."""
    if requeue:
        what = "--requeue after -- would put the whole job into the queue whenever a node joins or leaves"
        raise UserError(what, f"leave it out, or give --nnodes one number instead of {nodes.size.partition('=')[2]}")
    if experiment.checkpoint.every == "off":
        raise UserError(f"{nodes.size} needs checkpoints to go on from, and checkpoint.every=off", "set it to a time")
    train, workers = experiment.train, nodes.max * nproc
    field, given, needed = "batch_size", train.batch_size, workers * train.accumulate
    if train.virtual_replicas:
        field, given, needed = "virtual_replicas", train.virtual_replicas, workers
    if given < needed:
        what = f"{nodes.size} may become {workers} workers, too many for train.{field}={given}"
        raise UserError(what, f"use at least {needed}, or fewer nodes")


def _train_flags(rest: Sequence[str]) -> tuple[config.Experiment, runtime_options.Environment, str]:
    """Parses the flags of `tfdist.train`, so that a typo shows once and here; returns the run folder, too."""
    runtime_options.define_flags()
    before, sys.argv = sys.argv, ["tfdist.train", *rest]  # config_flags reads the overrides there
    try:
        command_line.parse(sys.argv)
    finally:
        sys.argv = before
    experiment, where = validation.validate(flags.FLAGS.config), runtime_options.from_flags(flags.FLAGS)
    return experiment, where, runtime_options.workdir(experiment, where)


def _divide(nproc: str, devices: str, environ: Mapping[str, str]) -> tuple[int, tuple[Mapping[str, str], ...]]:
    """Returns how many workers this machine has, and the variables by which each gets its part of the GPUs."""
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
    count = max(1, len(names)) if nproc == "auto" else machines.whole("--nproc_per_node", nproc, 1)
    if count == 1 or not names:
        return count, ({},) * count
    each = len(names) // count
    if each * count != len(names):
        raise UserError(
            f"{len(names)} GPU{'s' * (len(names) > 1)} ({', '.join(names)}) cannot be divided evenly among {count} "
            "workers",
            "change --nproc_per_node, choose some with CUDA_VISIBLE_DEVICES or the train flag --devices, "
            "or use the CPU with --devices=none",
        )
    parts = [",".join(names[i * each : (i + 1) * each]) for i in range(count)]
    return count, tuple({**order, "CUDA_VISIBLE_DEVICES": part} for part in parts)
