"""Where it runs: the environment, as absl flags and as a plain record."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

from absl import flags

from tfdist.config import Experiment, buckets, cpu_kernels
from tfdist.errors import UserError, printable

STRATEGIES = ("auto", "default", "mirrored", "multi_worker", "tpu", "horovod")
JIT = ("auto", "on", "off")
CHECK_AGREEMENT = ("auto", "on", "off")
PROGRESS = ("auto", "bar", "plain", "none")
COMMUNICATION = ("auto", "ring", "nccl")
RESUME = ("auto", "never", "require")
OF_A_RUN = (
    "workdir", "resume", "resume_changed", "requeue", "check_agreement", "progress", "tensorboard", "profile",
    "dry_run", "topology", "find_learning_rate",
)  # fmt: skip
"""Fields that mean something to what trains, or uses what was trained; not to how processes are connected."""
MOST_THREADS = 1024
"""Threads per device, and devices that a CPU is split into; tens of thousands take minutes to start, or all memory."""
MOST_PROFILED = 100
"""Updates in a profile; more make a trace that no browser opens."""


@dataclasses.dataclass(frozen=True, slots=True)
class Environment:
    """Values of the environment flags; see `define_flags` for what each means."""

    strategy: str = "auto"
    devices: str = "all"
    virtual_devices: int | None = None
    tpu: str = "local"
    workdir: str = ""
    resume: str = "auto"
    resume_changed: bool = False
    requeue: bool = False
    threads: int | None = None
    cpu_kernels: str = "auto"
    jit: str = "auto"
    check_agreement: str = "auto"
    progress: str = "auto"
    tensorboard: bool = True
    profile: str = ""
    dry_run: bool = False
    topology: str = ""
    find_learning_rate: bool = False
    communication: str = "auto"
    bucket_bytes: int | None = None
    insecure: bool = False
    start_timeout: float = 120.0
    stall_timeout: float = 600.0

    def __post_init__(self):
        choices = {"strategy": STRATEGIES, "jit": JIT, "progress": PROGRESS, "communication": COMMUNICATION}
        choices |= {"resume": RESUME, "check_agreement": CHECK_AGREEMENT, "cpu_kernels": cpu_kernels.CHOICES}
        for field, known in choices.items():
            value = getattr(self, field)
            if value not in known:
                raise UserError(f"unknown --{field}={value}: choose one of {', '.join(known)}")
        for field in ("virtual_devices", "threads"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UserError(f"--{field} must be a whole number of at least 1, got {value}")
            if value is not None and value > MOST_THREADS:
                raise UserError(f"--{field} must be at most {MOST_THREADS}, got {value}")
        for field in ("start_timeout", "stall_timeout"):
            if not getattr(self, field) > 0:
                raise UserError(f"--{field} must be a positive number of seconds, got {getattr(self, field)}")
        if self.bucket_bytes is not None and self.bucket_bytes < 0:
            raise UserError(f"--bucket_bytes must not be negative, got {self.bucket_bytes}")
        if self.resume == "never" and self.resume_changed:
            raise UserError("--resume=never and --resume_changed contradict each other: give one")
        if not re.fullmatch(r"all|none|idle:[1-9]\d*|\d+(,\d+)*", self.devices):
            raise UserError(
                f"--devices={self.devices} is not understood: use all, none, driver numbers such as 0,3, or idle:2"
            )
        buckets.check("--workdir", self.workdir)
        _check_utf8(self.workdir)
        self._check_profile()
        self._check_search()
        self._check_topology()
        self._check_tpu()
        numbers = self.devices.split(",")
        if len(set(numbers)) != len(numbers):
            raise UserError(f"--devices={self.devices} names a device twice: name each once")
        if self.virtual_devices and self.devices not in ("all", "none"):
            raise UserError(
                f"--virtual_devices={self.virtual_devices} splits the CPU and --devices={self.devices} picks GPUs: "
                "use one"
            )
        if self.virtual_devices and self.virtual_devices > 1 and self.strategy == "default":
            raise UserError(
                f"--strategy=default uses one device, --virtual_devices={self.virtual_devices} asks for more: "
                "use --strategy=mirrored"
            )

    def _check_search(self) -> None:
        asked = {"resume": self.resume == "require", "resume_changed": self.resume_changed, "requeue": self.requeue}
        asked |= {"profile": bool(self.profile), "dry_run": self.dry_run}
        if self.find_learning_rate and any(asked.values()):
            name = next(name for name, given in asked.items() if given)
            raise UserError(
                f"--find_learning_rate tests rates and trains nothing, so --{name} says nothing: leave it out"
            )

    def _check_topology(self) -> None:
        if not self.topology:
            return
        if not self.dry_run:
            raise UserError(f"--topology={self.topology} compiles for what is not here: give --dry_run with it")
        if self.strategy not in ("auto", "default") or self.devices not in ("all", "none") or self.virtual_devices:
            raise UserError(
                f"--topology={self.topology} says on which devices: leave out --strategy, --devices and "
                "--virtual_devices"
            )

    def _check_tpu(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,200}", self.tpu):
            raise UserError(f"--tpu={self.tpu} is not understood: use local, or the name of a TPU in the Cloud")
        if self.tpu != "local" and self.strategy not in ("auto", "tpu"):
            raise UserError(f"--tpu={self.tpu} asks for a TPU and --strategy={self.strategy} uses none: leave one out")
        if self.strategy != "tpu" and self.tpu == "local":
            return
        for field, given in (("virtual_devices", self.virtual_devices), ("devices", self.devices)):
            if given not in (None, "all"):
                raise UserError(f"--{field}={given} is for CPUs and GPUs, and a TPU is used as a whole: leave it out")
        if self.jit == "on":
            raise UserError("--jit=on is for CPUs and GPUs; a TPU compiles every step: leave it out")

    def _check_profile(self) -> None:
        if not self.profile:
            return
        bounds = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", self.profile)
        if not bounds or int(bounds[1]) > int(bounds[2]):
            raise UserError(
                f"--profile={self.profile} is not understood: write the first and the last update, such as 20:30"
            )
        count = int(bounds[2]) - int(bounds[1]) + 1
        if count > MOST_PROFILED:
            raise UserError(
                f"--profile={self.profile} is {count} updates, a trace that no browser opens: "
                f"choose at most {MOST_PROFILED}"
            )


def _check_utf8(workdir: str) -> None:
    """Refuses a folder that TensorFlow cannot name: training would reach its end without a single checkpoint."""
    try:
        os.path.expanduser(workdir).encode()
    except UnicodeEncodeError:
        name = printable(os.fsencode(workdir).decode(errors="backslashreplace"))
        raise UserError(f"--workdir={name} is not UTF-8, as TensorFlow's file names are: choose another name") from None


def define_flags() -> None:
    """Registers the environment flags with absl; called once per command."""
    defaults = Environment()
    _define_devices(defaults)
    _define_run(defaults)
    _define_workers(defaults)


def _define_devices(d: Environment) -> None:
    """Registers what says which devices compute, and with what."""
    flags.DEFINE_enum(
        "strategy", d.strategy, STRATEGIES, "How to distribute; auto picks by what this machine and job have."
    )
    flags.DEFINE_string(
        "devices",
        d.devices,
        "GPUs: all, none, numbers as the driver (nvidia-smi) counts, such as 0,3, or idle:2 for the two least used.",
    )
    flags.DEFINE_integer(
        "virtual_devices", d.virtual_devices, "Split the CPU into this many devices, to try mirrored without GPUs."
    )
    flags.DEFINE_string("tpu", d.tpu, "Which TPU: local for that of this machine, or the name of one in the Cloud.")
    flags.DEFINE_integer(
        "threads",
        d.threads,
        "Threads per device for TensorFlow; its own default if not given, 1 with train.virtual_replicas.",
    )
    flags.DEFINE_enum(
        "cpu_kernels",
        d.cpu_kernels,
        cpu_kernels.CHOICES,
        "What TensorFlow computes with on a CPU; auto: as TF_ENABLE_ONEDNN_OPTS says, else oneDNN with AVX2.",
    )
    flags.DEFINE_enum("jit", d.jit, JIT, "Compile forward and backward pass with XLA; auto: on GPUs, not on the CPU.")
    flags.DEFINE_enum(
        "check_agreement",
        d.check_agreement,
        CHECK_AGREEMENT,
        "Check first that 1 and all replicas agree on the model; auto: unless it has passed before.",
    )


def _define_run(d: Environment) -> None:
    """Registers what says where results go, how a run goes on, and what is shown of it."""
    flags.DEFINE_string(
        "workdir", d.workdir, "Folder for the results, or s3://bucket/folder; runs/<experiment name> if empty."
    )
    flags.DEFINE_enum(
        "resume", d.resume, RESUME, "Go on from the newest valid checkpoint of --workdir, or never: set it aside."
    )
    flags.DEFINE_bool(
        "resume_changed", d.resume_changed, "Resume, from the end of an epoch, though the experiment has changed."
    )
    flags.DEFINE_bool("requeue", d.requeue, "After a signal and the checkpoint, put this job back into Slurm's queue.")
    flags.DEFINE_enum(
        "progress", d.progress, PROGRESS, "Progress display; auto: a bar on a terminal, else plain lines."
    )
    flags.DEFINE_bool("tensorboard", d.tensorboard, "Write --workdir/tensorboard.")
    flags.DEFINE_string("profile", d.profile, "Trace the updates FROM:TO, for TensorBoard and as profile.txt.")
    flags.DEFINE_bool("dry_run", d.dry_run, "Print the plan, or why it could not run, and stop; writes nothing.")
    flags.DEFINE_string(
        "topology",
        d.topology,
        "With --dry_run: compile for these devices, which need not be here, such as v5e-8 or h100x8.",
    )
    flags.DEFINE_bool(
        "find_learning_rate",
        d.find_learning_rate,
        "Instead of training, let the rate grow over 200 updates, and write which ones can be used into --workdir.",
    )


def _define_workers(d: Environment) -> None:
    """Registers what several workers need to meet and to sum."""
    flags.DEFINE_enum(
        "communication",
        d.communication,
        COMMUNICATION,
        "How multi_worker sums: ring (gRPC) or nccl; auto: nccl between GPUs, between CPUs of one host its memory, "
        "else ring.",
    )
    flags.DEFINE_integer(
        "bucket_bytes",
        d.bucket_bytes,
        "Smaller tensors share a message of about this size between workers; 0: none do.",
    )
    flags.DEFINE_bool("insecure", d.insecure, "Let workers meet in a network without TFDIST_SECRET: it must be yours.")
    flags.DEFINE_float("start_timeout", d.start_timeout, "Seconds that workers wait for each other at the start.")
    flags.DEFINE_float("stall_timeout", d.stall_timeout, "Seconds without an update before a worker counts as stuck.")


def from_flags(values: flags.FlagValues) -> Environment:
    """Returns the environment that parsed flags describe; a command need not have all of them."""
    given: dict[str, Any] = {f.name: values[f.name].value for f in dataclasses.fields(Environment) if f.name in values}
    return Environment(**given)


def workdir(experiment: Experiment, where: Environment) -> str:
    """Returns the run folder of an experiment: `--workdir`, or one by the experiment's name."""
    return os.path.expanduser(where.workdir) or os.path.join("runs", experiment.name)
