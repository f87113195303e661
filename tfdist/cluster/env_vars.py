"""Names and parsing of the environment variables that describe a job. No TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfdist.cluster.addresses import checked_host, checked_port, join
from tfdist.errors import UserError, one_line

ROUNDS = "TFDIST_ROUNDS"
"""Variable in which the launcher lists earlier attempts for the chief (see `monitoring.recorder.Segments`)."""
FOLDER_LOCK = "TFDIST_FOLDER_LOCK_FD"
"""Variable with the descriptor through which the launcher lends the chief the run folder's lock."""
EXIT_RECORD = "TFDIST_EXIT_RECORD"  # variable with the path of the exit record (see `exit_record`)
HOLD = "TFDIST_HOLD_RANDOM_LAYERS"
"""Variable by which `tfdist.compare` trains its check with random layers disabled; no trained model results."""
_OWN = ("TFDIST_MEETING_FD", ROUNDS, FOLDER_LOCK, EXIT_RECORD)
OTHER_LAUNCHERS = ("TF_CONFIG", "TORCHELASTIC_RUN_ID", "HOROVOD_", *_OWN)
"""Prefixes of variables by which a worker would take another launcher for the one that starts it."""
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
    """Reads a whole number of at least `least`, or raises UserError."""
    text = environ[name]
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or int(text) < least:
        raise UserError(f"{name}={text} is not a whole number of at least {least}", "correct it")
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
