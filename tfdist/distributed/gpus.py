"""The GPUs as the driver sees them, and which of them this process may use. No TensorFlow.

GPUtil trusts nvidia-smi with everything: no time limit, no look at the return code, one odd line fails the list, NaN
never counts as available. So only its record of a GPU is used.
"""

import dataclasses
import math
import os
import shutil
from collections.abc import Mapping

from tfdist.config.field_syntax import float_or_nan
from tfdist.distributed import child_process
from tfdist.errors import UserError, one_line, printable

TIMEOUT_S = 10.0
_QUERY = "index,uuid,utilization.gpu,memory.total,memory.used,memory.free,driver_version,name"


@dataclasses.dataclass(frozen=True, slots=True)
class DriverGPU:
    """One GPU as the driver lists it. Memory in MiB, load in [0, 1]; NaN where the driver will not say."""

    number: int
    uuid: str
    name: str
    load: float
    memory_used: float
    memory_total: float
    driver: str


@dataclasses.dataclass(frozen=True, slots=True)
class Survey:
    """All GPUs of the machine in the driver's order (PCI), and what went wrong while asking."""

    gpus: tuple[DriverGPU, ...] = ()
    problem: str = ""  # why the list is empty or short, in words for a person; empty if nothing is wrong


def survey(timeout: float = TIMEOUT_S) -> Survey:
    """Asks nvidia-smi, if it is there; never raises and never waits longer than `timeout` seconds, or one more."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Survey()
    try:
        done = child_process.answer([program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"], timeout)
    except OSError as error:
        return Survey(problem=f"nvidia-smi cannot be started: {error}")
    if done is None:
        return Survey(problem=f"nvidia-smi gave no answer within {timeout:g} s")
    output = (done.stdout.strip() or done.stderr.strip()).splitlines()
    if done.returncode:
        return Survey(problem=f"nvidia-smi failed with code {done.returncode}: {_short(output) or 'no message'}")
    gpus, bad = [], []
    for line in filter(None, map(str.strip, output)):
        gpu = parse_line(line)
        if gpu is not None:
            gpus.append(gpu)
        elif "no devices were found" not in line.lower():
            bad.append(line)
    problem = f"nvidia-smi said what is not a GPU: {_short(bad)}" if bad else ""
    return Survey(tuple(sorted(gpus, key=lambda g: g.number)), problem)


def _short(lines: list[str]) -> str:
    """Returns what a driver has said at the length of a message, whatever it has said."""
    return printable(one_line("; ".join(lines)), 160)


def parse_line(line: str) -> DriverGPU | None:
    """Reads one line of nvidia-smi's CSV; returns None if it does not describe a GPU."""
    fields = [f.strip() for f in line.split(",")]
    if len(fields) != len(_QUERY.split(",")) or not fields[0].isdigit():
        return None
    number, uuid, load, total, used, _, driver, name = fields
    share, used_mib, total_mib = map(float_or_nan, (load, used, total))  # "[N/A]", "[Not Supported]", "ERR!"
    return DriverGPU(int(number), uuid, name, share / 100, used_mib, total_mib, driver)


def least_used(gpus: tuple[DriverGPU, ...], count: int) -> tuple[DriverGPU, ...]:
    """Returns the `count` least used GPUs, by memory and then load, in order of their numbers.

    GPUtil's `getAvailability` says which are fit for use; those whose state is unknown come last instead of never.
    """
    if count > len(gpus):
        raise UserError(f"--devices=idle:{count} asks for {count} GPUs, found {len(gpus)}", "ask for fewer")
    # GPUtil is imported where it is used: it pulls in distutils, 0.2 s that a run without GPUs need not pay.
    import GPUtil

    nan = math.nan  # also for a total memory of 0, by which GPUtil divides
    of = lambda g: (g.number, g.uuid, g.load, g.memory_total or nan, g.memory_used, nan, g.driver, g.name)
    records = [GPUtil.GPU(*of(g), "", "", "", nan) for g in gpus]
    fit = GPUtil.getAvailability(records, maxLoad=1.01, maxMemory=1.01, includeNan=False)
    last = lambda value: math.inf if math.isnan(value) else value
    order = sorted(
        range(len(gpus)), key=lambda i: (not fit[i], last(records[i].memoryUtil), last(records[i].load), gpus[i].number)
    )
    return tuple(sorted((gpus[i] for i in order[:count]), key=lambda g: g.number))


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """The GPUs this process shall use, before TensorFlow has seen any."""

    gpus: tuple[DriverGPU, ...]
    visible: str | None  # value for CUDA_VISIBLE_DEVICES, or None to leave it as it is
    opaque: bool = False  # CUDA_VISIBLE_DEVICES names MIG slices, which nvidia-smi's list of GPUs cannot number

    def describe(self) -> str:
        """Returns the map from the driver's numbers to TensorFlow's, for people bitten by renumbering."""
        return ", ".join(f"driver {g.number} ({g.name}) -> GPU:{i}" for i, g in enumerate(self.gpus))


def select(devices: str, listed: Survey, environ: Mapping[str, str]) -> Selection:
    """Applies `--devices` (`all`, `none`, `0,3` or `idle:2`) to what the driver lists; raises UserError."""
    if devices == "none":
        return Selection((), "-1")
    inherited = environ.get("CUDA_VISIBLE_DEVICES")
    usable = _inherited(listed.gpus, inherited, environ.get("CUDA_DEVICE_ORDER"))
    if usable is None:
        if devices != "all":
            what = f"--devices={devices} cannot be combined with CUDA_VISIBLE_DEVICES={inherited}"
            raise UserError(what, "choose with one of the two")
        return Selection((), None, opaque=True)
    if devices == "all":
        chosen = usable
    elif devices.startswith("idle:"):
        if listed.problem and not usable:
            raise UserError(f"--devices={devices} needs the driver's list of GPUs: {listed.problem}")
        chosen = least_used(usable, int(devices.removeprefix("idle:")))
    else:
        chosen = tuple(_by_number(int(n), listed, usable, inherited) for n in devices.split(","))
    if not listed.gpus:
        return Selection((), None)
    return Selection(chosen, ",".join(str(g.number) for g in chosen) or "-1")


def _by_number(number: int, listed: Survey, usable: tuple[DriverGPU, ...], inherited: str | None) -> DriverGPU:
    for gpu in usable:
        if gpu.number == number:
            return gpu
    if any(g.number == number for g in listed.gpus):
        raise UserError(f"device {number} is hidden by CUDA_VISIBLE_DEVICES={inherited}", "unset it, or choose another")
    known = ", ".join(str(g.number) for g in listed.gpus) or f"none{f' ({listed.problem})' if listed.problem else ''}"
    raise UserError(f"there is no device {number}: the driver lists {known}")


def _inherited(gpus: tuple[DriverGPU, ...], visible: str | None, order: str | None) -> tuple[DriverGPU, ...] | None:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves, up to the first unknown entry; None for MIG slices."""
    if visible is None:
        return gpus
    left: list[DriverGPU] = []
    for entry in filter(None, (e.strip() for e in visible.split(","))):
        if entry.startswith("MIG"):
            return None
        if entry.isdigit() and order != "PCI_BUS_ID" and len({g.name for g in gpus}) > 1:
            what = f"CUDA_VISIBLE_DEVICES={visible} counts unlike GPUs fastest first, not as the driver does"
            raise UserError(what, "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name them by UUID")
        match = [g for g in gpus if (g.number == int(entry) if entry.isdigit() else g.uuid.startswith(entry))]
        if len(match) != 1:
            break
        left.append(match[0])
    return tuple(left)


def share(selection: Selection, local_rank: int, local_size: int) -> Selection:
    """Returns the part of a host's GPUs that belongs to one of its workers.

    With fewer GPUs than workers, each was given its own already (by srun --gpus-per-task), and keeps it.
    """
    count = len(selection.gpus) // local_size
    if local_size == 1 or not count:
        return selection
    own = selection.gpus[local_rank * count : (local_rank + 1) * count]
    return Selection(own, ",".join(str(g.number) for g in own))


def apply(selection: Selection) -> None:
    """Sets the process environment; must come before TensorFlow first touches CUDA."""
    if selection.visible is not None:
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # CUDA's own default is fastest first
        os.environ["CUDA_VISIBLE_DEVICES"] = selection.visible
