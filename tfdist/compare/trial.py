"""The runs of a comparison: each a command in processes of its own, that must be over in time. No TensorFlow.

Commands are worked out first (`plan`, pure) and started second (`run`).
"""

import dataclasses
import os
import pathlib
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from absl.flags import FlagValues

from tfdist import config
from tfdist.cluster import env_vars
from tfdist.config import messages
from tfdist.distributed import child_process, gpus, horovod_install

TICK_S = 0.5  # how often whoever watches hears that a run goes on
LOG = "output.log"
_READ = 1 << 20  # bytes at the end of a log in which the reason for a failure is looked for
_SAID = re.compile(r"tfdist: (error|failed): (.+)")
_RAISED = re.compile(r"^(?:\[[\d,]+\](?:<\w+>:)? ?)?((?:\w+\.)*\w*(?:Error|Exception)(?:: .+)?)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """The cores and GPUs on which replicas can be placed."""

    cores: int  # that this process may use
    gpus: tuple[str, ...] = ()  # entries for CUDA_VISIBLE_DEVICES; none: the CPU is used

    def default_replicas(self, threads: int) -> tuple[int, ...]:
        """Returns 2, 4, 8, ... and all that there are, by these threads each; a CPU can always be split in two."""
        most = len(self.gpus) or max(2, self.cores // threads)
        return tuple(sorted({most, *(n for n in (2**i for i in range(1, 12)) if n <= most)}))

    def describe(self) -> str:
        if self.gpus:
            return f"{len(self.gpus)} GPU{'s' * (len(self.gpus) > 1)}"
        return f"{self.cores} CPU core{'s' * (self.cores > 1)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How all runs of a comparison are made, alike but for strategy and replicas."""

    strategies: tuple[str, ...]
    replicas: tuple[int, ...]
    threads: int | None  # per replica; None for TensorFlow's own choice
    jit: str
    devices: str
    time_limit: float
    machine: Hardware


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    name: str
    strategy: str
    replicas: int
    threads: int | None  # per replica; None for TensorFlow's own choice
    command: tuple[str, ...]
    folder: pathlib.Path
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)  # besides that of this process
    unavailable: str = ""  # why it cannot run here, where that is known before

    def shell(self) -> str:
        """Returns the command as a line for a shell."""
        given = [f"{name}={value}" for name, value in self.environ.items()]
        return messages.shell([*(["env", *given] if given else []), *self.command])


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    status: str  # `completed`, `unavailable` (it says that the input or the environment is wrong) or `failed`
    seconds: float
    reason: str = ""  # why it did not complete, in one line


def find_hardware(devices: str, environ: Mapping[str, str]) -> Hardware:
    """Looks which cores and GPUs there are; `devices` is the flag of `tfdist.train`."""
    cores = len(os.sched_getaffinity(0))
    if devices == "none":
        return Hardware(cores)
    selection = gpus.select(devices, gpus.survey(), environ)
    if selection.opaque:
        return Hardware(cores, tuple(e.strip() for e in environ["CUDA_VISIBLE_DEVICES"].split(",")))
    return Hardware(cores, tuple(str(gpu.number) for gpu in selection.gpus))


def config_flags(values: FlagValues, changed: Mapping[str, str]) -> list[str]:
    """Returns the flags of `tfdist.train` for the experiment that was given here, with some fields changed."""
    fields = config.flat(values.config)
    given = {name: fields[name] for name in values if name.startswith("config.") and values[name].present}
    path = getattr(values["config"], "config_filename", "")
    file = [f"--config={path}"] if values["config"].present else []
    return [*file, *(f"--{name}={value}" for name, value in {**given, **changed}.items())]


def plan(settings: Settings, folder: pathlib.Path, flags: Sequence[str]) -> list[Trial]:
    """Returns all runs of a comparison, the reference first, which is `default` on one device.

    On a CPU the whole of it under `default` is a row too, as what one would use instead.
    """
    wanted: list[tuple[str, int]] = [("default", 1)]
    for strategy in (s for s in settings.strategies if s != "default"):
        least = {"mirrored": 2}.get(strategy, 1)
        wanted += [(strategy, n) for n in ((1,) if strategy == "tpu" else settings.replicas) if n >= least]
    trials = [make(settings, strategy, n, folder, flags) for strategy, n in wanted]
    cores, threads = settings.machine.cores, settings.threads
    if "default" in settings.strategies and not settings.machine.gpus and threads is not None and threads < cores:
        whole = dataclasses.replace(settings, threads=cores)
        trials.insert(1, make(whole, "default", 1, folder, flags, f"default, {cores} cores"))
    return trials


def make(
    settings: Settings, strategy: str, replicas: int, folder: pathlib.Path, flags: Sequence[str], name: str = ""
) -> Trial:
    """Returns one run as a command that leaves its results below `folder`."""
    machine, threads = settings.machine, settings.threads
    name = name or (strategy if strategy == "tpu" else f"{strategy} {replicas}")
    own = folder / re.sub(r"\W+", "-", name)
    environ, unavailable = {}, ""
    # What differs is to be found here, and not refused before.
    train = [f"--strategy={strategy}", "--check_agreement=off", *flags, f"--workdir={own}"]
    if threads is not None:
        train.append(f"--threads={threads}")
    if machine.gpus:
        environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[:replicas])}
        if replicas > len(machine.gpus):
            unavailable = f"it needs {replicas} GPUs, found {len(machine.gpus)}"
    elif strategy != "tpu":
        train.append("--devices=none")
    match strategy:
        case "mirrored" if not machine.gpus:
            command = [sys.executable, "-m", "tfdist.train", *train, f"--virtual_devices={replicas}"]
        case "multi_worker":
            machine_alone = ["--nnodes=1", f"--nproc_per_node={replicas}"]
            command = [sys.executable, "-m", "tfdist.launch", *machine_alone, "--", *train]
        case "horovod":
            runner = shutil.which("horovodrun", path=os.path.dirname(sys.executable)) or shutil.which("horovodrun")
            missing = "" if runner else "horovodrun is not on PATH: run python -m tfdist.horovod_build"
            unavailable = horovod_install.problem() or missing or unavailable
            command = [runner or "horovodrun", "-np", str(replicas), sys.executable, "-m", "tfdist.train", *train]
        case _:
            command = [sys.executable, "-m", "tfdist.train", *train]
    return Trial(name, strategy, replicas, threads, tuple(command), own, environ, unavailable)


def run(trial: Trial, limit: float, tick: Callable[[float], None] = lambda seconds: None) -> Outcome:
    """Runs a trial to its end, which comes after `limit` seconds at the latest; calls `tick` with the seconds so far.

    Whatever ends this function, no process of the trial outlives it.
    """
    trial.folder.mkdir(parents=True, exist_ok=True)
    log, start = trial.folder / LOG, time.monotonic()
    environ = env_vars.without(os.environ, env_vars.CLUSTER) | dict(trial.environ)
    tick(0.0)
    with open(log, "wb") as output:
        try:
            code = child_process.run(trial.command, limit, TICK_S, tick, stdout=output, env=environ)
        except OSError as error:
            return Outcome("failed", 0.0, f"{trial.command[0]} cannot be started: {error.strerror}")
    seconds = time.monotonic() - start
    if code is None:
        return Outcome("failed", seconds, f"it was not over after {limit:g} s (--time_limit)")
    if code == 0:
        return Outcome("completed", seconds)
    status, reason = _failure(log, code)
    return Outcome(status, seconds, reason)


def _failure(log: pathlib.Path, code: int) -> tuple[str, str]:
    """Returns the status of a run that failed, and why: tfdist's own line in its log, an exception or the last line."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - _READ))
        text = file.read().decode(errors="replace")
    said, raised = _SAID.search(text), _RAISED.search(text)
    if said:  # which tells what is wrong where horovodrun makes another exit code of it
        return "unavailable" if said[1] == "error" else "failed", said[2].strip()
    if raised:
        return "failed", raised[1].strip()
    if code < 0:
        return "failed", f"it was killed by {signal.Signals(-code).name}"
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    return "failed", f"it ended with exit code {code}{f': {last}' if last else ''}"
