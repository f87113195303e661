"""The content of `environment.json`: strategy, devices, hosts and versions of a run."""

from __future__ import annotations

import dataclasses
import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING

from tfdist.config import cpu_kernels
from tfdist.distributed.distribution import Distribution

if TYPE_CHECKING:
    from tfdist.config.runtime_options import Environment
    from tfdist.distributed.connect import Placement


def environment(distribution: Distribution, placement: Placement, options: Environment) -> dict[str, object]:
    """Returns the strategy and why, the devices, the hosts and the versions.

    Args:
      placement: where it ran.
      options: the flags of the run; those of `placement` count where they differ.
    """
    return {
        "strategy": distribution.name,
        "reason": distribution.reason,
        "devices": list(distribution.devices),
        "replicas": distribution.replicas,
        "workers": distribution.workers,
        "hosts": list(distribution.peers.hosts),
        "found_by": placement.cluster.source,
        "communication": distribution.communication,
        "jit": distribution.jit,
        "gpus": [dataclasses.asdict(g) for g in placement.survey.gpus],
        "driver_problem": placement.survey.problem,
        "flags": {**dataclasses.asdict(options), **dataclasses.asdict(placement.options)},
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "cpu_instructions": list(cpu_kernels.instruction_sets()),
        "cpu_kernels": cpu_kernels.in_use(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of what decides about the numbers."""
    by_name = {"python": platform.python_version()}
    for name in ("tfdist", "tensorflow", "keras", "tensorflow-datasets", "numpy"):
        try:
            by_name[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            by_name[name] = "unknown"
    return by_name
