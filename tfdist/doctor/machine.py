"""The machine without its GPUs: cores, memory, shared memory, disk, Python packages. No TensorFlow."""

import contextlib
import dataclasses
import math
import os
import pathlib
import platform
import shutil
import time
from collections.abc import Mapping
from importlib import metadata

import psutil
from packaging.requirements import Requirement

from tfdist import __version__
from tfdist.config import packages
from tfdist.config.buckets import Bucket, BucketError
from tfdist.config.messages import sized
from tfdist.config.packages import version
from tfdist.distributed import horovod_install, tpu_host
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
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return MachineFacts(platform.node(), system, len(os.sched_getaffinity(0)), quota, total, free)


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
    if not os.access(there, os.W_OK | os.X_OK):
        return [fail(f"this user may not write in {there}", "mend permissions or mount, or choose another --workdir")]
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


SHOWN = ("tensorflow", "keras", "horovod", "tensorflow-datasets", "numpy")
WHEELS = tuple(n + kind for n in ("tensorflow", "tf-nightly") for kind in ("", "-cpu", "-gpu", "-rocm", "-tpu"))
"""All of them install the same folder `tensorflow`; what was installed last has written over the others."""
KERAS = ("keras", "keras-nightly")


def versions() -> dict[str, str]:
    """Returns the versions that a bug report has to name, as far as installed."""
    installed = {"python": platform.python_version(), "tfdist": __version__}
    installed |= _installed(SHOWN)
    return installed if "tensorflow" in installed else installed | _installed(WHEELS)


def conflicts() -> list[Finding]:
    """Looks for packages that install the same folder, and versions outside of what tfdist was made for."""
    checks = []
    for names, folder in ((WHEELS, "tensorflow"), (KERAS, "keras")):
        if len(there := _installed(names)) > 1:
            named = " and ".join(f"{name} {version}" for name, version in there.items())
            fix = f"pip uninstall -y {' '.join(there)}, then pip install the one for your devices"
            checks.append(fail(f"{named} write over each other: both install the folder {folder}", fix))
    try:
        listed = [Requirement(text) for text in metadata.requires("tfdist") or ()]
    except metadata.PackageNotFoundError:
        fix = "pip install -e . in tfdist's folder"
        return [*checks, warn("tfdist is not installed by pip, so nobody knows what it needs", fix)]
    needs = [need for need in listed if not need.marker or need.marker.evaluate({"extra": ""})]
    checks += [check for need in needs for check in _unfit(need)]
    return checks or [ok(f"all {len(needs)} that tfdist needs fit, and none is there twice")]


def _unfit(need: Requirement) -> list[Finding]:
    wanted, have = f"{need.name}{need.specifier}", version(need.name)
    if need.name == "tensorflow":  # tensorflow-tpu and tensorflow-gpu are TensorFlow too
        have = horovod_install.tensorflow().version or next(iter(_installed(WHEELS).values()), "")
    if have and need.specifier.contains(have, prereleases=True):
        return []
    is_there = f"{have} is installed" if have else "is not installed"
    return [fail(f"{need.name} {is_there}, tfdist needs {wanted}", f"pip install '{wanted}'")]


def backend(environ: Mapping[str, str]) -> list[Finding]:
    """Checks whether Keras will run on TensorFlow: a variable or a file in the home folder can send it elsewhere."""
    found = packages.backend(environ)
    if found.name != "tensorflow":
        what = f"{found.chosen_by} says that Keras runs on {found.name}, tfdist needs TensorFlow"
        return [fail(what, found.fix)]
    if environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        what = "TF_USE_LEGACY_KERAS makes tf.keras the old Keras 2, whose models and layers tfdist cannot train"
        return [warn(what, "unset TF_USE_LEGACY_KERAS, or import keras instead of tf.keras")]
    return [ok(f"Keras {version('keras') or 'is not installed; it would run'} on TensorFlow")]


def horovod(needed: bool) -> list[Finding]:
    """Checks whether the installed Horovod was built for the installed TensorFlow; `needed` by this run."""
    problem = horovod_install.problem()
    if not problem:
        operations = horovod_install.installed()
        what = f" ({', '.join(operations.operations)})" if operations else ""
        return [ok(f"Horovod {version('horovod')}{what} was built for this TensorFlow")]
    what, _, fix = problem.rpartition(": ")
    if needed:
        return [fail(what, fix)]
    if "is not installed" in what:
        return [ok(f"{what}, which only --strategy=horovod would need")]
    return [warn(f"{what}; only --strategy=horovod minds", fix)]


def tpu(environ: Mapping[str, str]) -> list[Finding]:
    """Checks whether the installed TensorFlow can use a TPU; says nothing where nothing says that there is one."""
    hint, problem = tpu_host.hint(environ), tpu_host.problem()
    if not hint:
        return []
    if problem:
        what, _, fix = problem.rpartition(": ")
        return [warn(f"{hint} says that there is a TPU; {what}", fix)]
    return [ok(f"{hint} says that there is a TPU, and this TensorFlow has support; only a run can start it")]


def _installed(names: tuple[str, ...]) -> dict[str, str]:
    return {name: found for name in names if (found := version(name))}
