"""The machine without its GPUs: cores, memory, shared memory, disk. No TensorFlow."""

import contextlib
import dataclasses
import math
import os
import pathlib
import platform
import shutil
import time

import psutil

from tfdist.config.buckets import Bucket, BucketError
from tfdist.config.messages import sized
from tfdist.doctor.check import Finding, fail, ok, warn

_GIB = 1 << 30
SHM = pathlib.Path("/dev/shm")
CGROUP = pathlib.Path("/sys/fs/cgroup")
LEAST_MEMORY = _GIB
LEAST_SHM = 512 << 20  # NCCL takes some 10 MB for each pair of GPUs there; Docker gives a container 64 MB in all
LEAST_DISK = 100_000_000  # below this a run may not even get its model and one checkpoint written
ENOUGH_DISK = 2_000_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class MachineFacts:
    """What this process may use of the machine, or of the container or job where that has a limit."""

    host: str
    system: str
    cores: int
    quota: float | None  # cores, None without a limit
    memory_total: int  # bytes
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
    """Looks at this machine; `limits` are those that `groups` finds."""
    memory = psutil.virtual_memory()
    total, free, quota = memory.total, memory.available, None
    for folder in limits:
        with contextlib.suppress(OSError, ValueError):  # no container, or "max"
            limit = int((folder / "memory.max").read_text())
            total = min(total, limit)
            free = min(free, max(0, limit - int((folder / "memory.current").read_text())))
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            share, period = map(int, (folder / "cpu.max").read_text().split())
            quota = min(share / period, quota or math.inf)
    return MachineFacts(
        host=platform.node(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)),
        quota=quota,
        memory_total=total,
        memory_free=free,
    )


def cores(machine: MachineFacts) -> list[Finding]:
    """Checks for a limit of a container or job, of which TensorFlow takes no notice: it starts a thread per core."""
    count = f"{machine.cores} core{'s' * (machine.cores > 1)}"
    if machine.quota is None or machine.quota >= machine.cores:
        return [ok(f"{count} for this process")]
    share = f"this container or job may use {machine.quota:g} of {count}, and TensorFlow starts threads for all"
    return [warn(share, f"train with --threads={max(1, int(machine.quota))}")]


def memory(machine: MachineFacts, least: float = LEAST_MEMORY) -> list[Finding]:
    """Checks whether there is room for TensorFlow, which takes half a gigabyte before it has done anything."""
    room = f"{machine.memory_free / _GIB:.1f} of {machine.memory_total / _GIB:.1f} GiB free"
    if machine.memory_free < least:
        return [warn(room, "end other programs, or train with data.cache=stream and smaller batches")]
    return [ok(room)]


def shared_memory(folder: pathlib.Path = SHM, least: float = LEAST_SHM) -> list[Finding]:
    """Checks /dev/shm, through which NCCL exchanges gradients between the GPUs of a machine."""
    fix = "docker run --shm-size=2g, or in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return [warn(f"{folder} cannot be used ({error.strerror}); NCCL needs it", fix)]
    room = f"{usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free in {folder}"
    if usage.free < least:
        return [warn(f"{room}; NCCL between several GPUs needs more", fix)]
    return [ok(room)]


def nearest(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder itself, or the nearest one above it that exists."""
    folder = pathlib.Path(os.path.abspath(folder))
    return next(p for p in (folder, *folder.parents) if os.path.lexists(p))


def room(folder: pathlib.Path, checkpoint: int = 0, keep: int = 1, least: int = LEAST_DISK) -> list[Finding]:
    """Checks whether there is room for a run that keeps so many checkpoints of so many bytes."""
    there = nearest(folder)
    if not there.is_dir():
        return [fail(f"{there} is a file, and {folder} would have to be below it", "choose another --workdir")]
    try:
        usage = os.statvfs(there)
    except OSError as error:
        return [fail(f"{there} cannot be looked at ({error.strerror})", "choose another --workdir")]
    free = usage.f_bavail * usage.f_frsize
    free_space = f"{sized(free)} free at {there}"
    if usage.f_flag & os.ST_RDONLY:
        return [fail(f"{there} is mounted read-only", "choose another --workdir, or mount it for writing")]
    if not os.access(there, os.W_OK | os.X_OK):
        return [fail(f"this user may not write in {there}", "correct its permissions, or choose another --workdir")]
    if usage.f_files and not usage.f_favail:
        return [fail(f"no file can be made at {there}: its inodes are used up", "delete files there")]
    need = checkpoint * (keep + 1)  # the next one is written before the oldest goes
    if free < least or free < checkpoint:
        return [fail(f"only {free_space}", "free some, or choose another --workdir")]
    if free < need:
        what = f"{free_space}, and {keep} checkpoints like the newest take {sized(need)} with the one being written"
        return [warn(what, "free some, or lower checkpoint.keep")]
    if free < ENOUGH_DISK:
        return [warn(f"only {free_space}", "free some, or choose another --workdir")]
    return [ok(free_space)]


def bucket(url: str) -> list[Finding]:
    """Lists a folder in a bucket, and takes the time; whether it can be written only a run tries."""
    begun = time.perf_counter()
    try:
        objects = Bucket(url).listing()
    except BucketError as error:
        fix = "check the network, your keys (environment or profile) and that URL"
        return [fail(f"{error.place} cannot be listed ({error.strerror})", fix)]
    seconds = time.perf_counter() - begun
    total = sized(sum(entry.size for entry in objects.values()))
    return [ok(f"{url} can be read: {len(objects):,} objects, {total}, listed in {seconds:.2f} s")]
