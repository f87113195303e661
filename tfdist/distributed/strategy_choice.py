"""Chooses a strategy, with the reason, from what the process can see. No TensorFlow."""

import dataclasses
from collections.abc import Mapping

from tfdist.cluster.discovery import HOROVODRUN, Cluster
from tfdist.config.runtime_options import PlacementOptions
from tfdist.distributed import tpu_host
from tfdist.distributed.gpus import Selection
from tfdist.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class StrategyChoice:
    """A strategy by name, and the reason in words for a person."""

    name: str
    reason: str
    replicas: int  # replicas in this process, as far as known without TensorFlow


def choose(
    options: PlacementOptions, selection: Selection, cluster: Cluster, environ: Mapping[str, str]
) -> StrategyChoice:
    """Applies the rules of `--strategy=auto`, or checks an explicit choice; raises UserError if it cannot run here."""
    virtual = options.virtual_devices
    devices = virtual or max(1, len(selection.gpus))
    what = f"{virtual} virtual CPU devices" if virtual else f"{len(selection.gpus)} GPUs" if selection.gpus else "1 CPU"
    name, reason = options.strategy, "asked for"
    if name == "auto":
        name, reason = _automatic(devices, what, options, cluster, environ)
    if name == "tpu" and cluster.size > 1:
        raise UserError(
            f"--strategy=tpu drives all cores from one process and there are {cluster.size} workers ({cluster.source})",
            "start one process",
        )
    if name == "tpu" and (problem := tpu_host.problem()):
        raise UserError(f"--strategy=tpu cannot run here: {problem}")
    if name in ("default", "mirrored") and cluster.size > 1:
        what = f"--strategy={name} trains in one process and there are {cluster.size} workers ({cluster.source})"
        raise UserError(what, "use --strategy=multi_worker, or start one process")
    if name == "multi_worker" and cluster.source == HOROVODRUN:
        what = "--strategy=multi_worker under horovodrun has no addresses"
        raise UserError(what, "use --strategy=horovod, or python -m tfdist.launch")
    if name == "horovod" and devices > 1:
        raise UserError(
            f"--strategy=horovod uses one device per process, this one has {what}",
            "start as many processes, or pick one with --devices",
        )
    if name == "mirrored" and devices < 2 and not selection.opaque:
        what = f"--strategy=mirrored needs at least 2 devices, found 1 ({'1 GPU' if selection.gpus else 'the CPU'})"
        raise UserError(what, "use --virtual_devices=2 to split the CPU, or --strategy=default")
    return StrategyChoice(name, reason, devices if name in ("mirrored", "multi_worker") else 1)


def _automatic(
    devices: int, what: str, options: PlacementOptions, cluster: Cluster, environ: Mapping[str, str]
) -> tuple[str, str]:
    if cluster.source == HOROVODRUN:
        return "horovod", "started by horovodrun (HOROVOD_RANK is set)"
    if cluster.size > 1:
        return "multi_worker", f"there are {cluster.size} workers ({cluster.source})"
    if options.virtual_devices:  # somebody asks for this machine's CPU, whatever else there is
        return ("mirrored" if devices > 1 else "default"), f"{what} here"
    if options.tpu != "local":
        return "tpu", f"--tpu={options.tpu} asks for it"
    without = ""
    if options.devices == "all":  # else somebody asks for GPUs, or for the CPU
        hint = tpu_host.hint(environ)
        problem = tpu_host.problem() if hint else ""
        if hint and not problem:
            return "tpu", f"{hint} says that there is a TPU"
        without = f"; not tpu, though {hint} says that there is one: {problem}" if hint else ""
    return ("mirrored" if devices > 1 else "default"), f"{what} here{without}"
