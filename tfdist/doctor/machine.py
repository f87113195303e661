"""The machine without its GPUs: cores, memory, shared memory, open files. No TensorFlow."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import platform
import shutil
from collections.abc import Mapping

import psutil

from tfdist.config import cpu_kernels
from tfdist.doctor.check import Check, fail, ok, warn

_GIB = 1 << 30
SHM = pathlib.Path("/dev/shm")
CGROUP = pathlib.Path("/sys/fs/cgroup")
LEAST_MEMORY = _GIB
LEAST_SHM = 512 << 20
"""NCCL takes some 10 MB for each pair of GPUs there; Docker gives a container 64 MB in all."""


@dataclasses.dataclass(frozen=True, slots=True)
class MachineFacts:
    """What this process may use of the machine."""

    host: str
    system: str
    cores: int
    """Cores that this process may run on."""
    quota: float | None
    """Cores that the limit of a container or job leaves it; None without a limit."""
    memory_total: int
    """Bytes, of the container or job where it has a limit."""
    memory_free: int


def groups(root: pathlib.Path = CGROUP, own: pathlib.Path = pathlib.Path("/proc/self/cgroup")) -> list[pathlib.Path]:
    """Folders with the limits of this process (cgroup 2): its own group and all above it, since each holds."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    inner = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    folder = root / inner
    return [folder, *(p for p in folder.parents if root in (p, *p.parents))]


def look(limits: list[pathlib.Path]) -> MachineFacts:
    """Looks at this machine.

    Args:
      limits: what `groups` finds.
    """
    memory = psutil.virtual_memory()
    total, free, quota = memory.total, memory.available, None
    for folder in limits:
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None:
            total, free = min(total, int(limit)), min(free, int(max(0.0, limit - (used or 0.0))))
        share = _quota(folder / "cpu.max")
        quota = share if quota is None or (share is not None and share < quota) else quota
    return MachineFacts(
        host=platform.node(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)),
        quota=quota,
        memory_total=total,
        memory_free=free,
    )


def cores(machine: MachineFacts) -> list[Check]:
    """Checks for a limit of a container or job, of which TensorFlow takes no notice: it starts a thread per core."""
    count = f"{machine.cores} core{'s' * (machine.cores > 1)}"
    if machine.quota is None or machine.quota >= machine.cores:
        return [ok("cores", f"{count} for this process")]
    share = f"this container or job may use {machine.quota:g} of {count}, and TensorFlow starts threads for all"
    return [warn("cores", share, f"train with --threads={max(1, int(machine.quota))}")]


def kernels(sets: tuple[str, ...], environ: Mapping[str, str]) -> list[Check]:
    """Tells which CPU kernels a training will compute with, and which faster ones the CPU could do.

    Args:
      sets: what `cpu_kernels.instruction_sets` finds.
    """
    asked = dict(environ)
    cpu_kernels.ask_for("auto", asked)
    kind = {"onednn": "oneDNN's kernels", "eigen": "Eigen's kernels"}[cpu_kernels.wanted(asked)]
    has = f"{', '.join(sets) or 'neither AVX2 nor AVX-512'}: training computes with {kind}"
    if "AVX2" in sets and cpu_kernels.wanted(asked) == "eigen":
        variable = f"{cpu_kernels.VARIABLE}={environ[cpu_kernels.VARIABLE]}"
        return [warn("cpu", f"{has}, as {variable} asks; oneDNN's are mostly faster", f"unset {cpu_kernels.VARIABLE}")]
    if {"AMX BF16", "AVX-512 BF16"} & set(sets):
        has += "; train.precision=mixed_bfloat16 has instructions of its own here"
    return [ok("cpu", has)]


def memory(machine: MachineFacts, least: float = LEAST_MEMORY) -> list[Check]:
    """Checks whether there is room for TensorFlow, which takes half a gigabyte before it has done anything."""
    room = f"{machine.memory_free / _GIB:.1f} of {machine.memory_total / _GIB:.1f} GiB free"
    if machine.memory_free < least:
        return [warn("memory", room, "end other programs, or train with data.cache=stream and smaller batches")]
    return [ok("memory", room)]


def shared_memory(folder: pathlib.Path = SHM, least: float = LEAST_SHM) -> list[Check]:
    """Checks /dev/shm, through which NCCL exchanges gradients between the GPUs of a machine."""
    fix = "docker run --shm-size=2g, or in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return [warn("shared memory", f"{folder} cannot be used ({error.strerror}); NCCL needs it", fix)]
    room = f"{usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free in {folder}"
    if usage.free < least:
        return [warn("shared memory", f"{room}; NCCL between several GPUs needs more", fix)]
    return [ok("shared memory", room)]


def open_files(soft: int, hard: int, workers: int) -> list[Check]:
    """Checks the limit of file descriptors: shards, a connection to each worker, and TensorFlow's own need some.

    Args:
      soft: what holds now, as `resource.getrlimit` says; -1 for no limit.
      hard: to what a user may raise it.
    """
    unlimited = soft == -1
    limit = "any number of open files" if unlimited else f"{soft:,} open files"
    need = 256 if workers == 1 else 1024
    to = "ulimit -n 65536" if hard == -1 or hard >= 65536 else f"ulimit -n {hard}"
    if hard != -1 and hard < need:
        to = "ask for a higher limit (LimitNOFILE of a service, docker run --ulimit nofile=65536)"
    if not unlimited and soft < 128:
        return [fail("open files", f"only {limit}, which TensorFlow alone needs", to)]
    if not unlimited and soft < need:
        return [warn("open files", f"only {limit}; data sets of many files and many workers need more", to)]
    return [ok("open files", limit)]


def _number(path: pathlib.Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # no container, or "max"
        return None


def _quota(path: pathlib.Path) -> float | None:
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
