"""Runtime options, as flags, records and keyword arguments: where a command runs, what it shows, how it resumes."""

import dataclasses
import functools
import inspect
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from absl import flags

from tfdist.config import Experiment, buckets, cpu_kernels, current_name, field_syntax
from tfdist.errors import UserError, printable

STRATEGIES = ("auto", "default", "mirrored", "multi_worker", "tpu", "horovod")
JIT = ("auto", "on", "off")
RESUME = ("auto", "never", "require")
CHOICES = {
    "strategy": STRATEGIES,
    "jit": JIT,
    "progress": ("auto", "bar", "plain", "none"),
    "communication": ("auto", "ring", "nccl"),
    "resume": RESUME,
    "check_agreement": ("auto", "on", "off"),
    "cpu_kernels": cpu_kernels.CHOICES,
}
MOST_THREADS = 1024  # threads per device, or devices; tens of thousands take minutes to start, or all memory
MOST_PROFILED = 100  # updates in a profile; more make a trace that no browser opens


@dataclasses.dataclass(frozen=True)
class PlacementOptions:
    """Devices to use, and how processes are connected; see `runtime_options.json` for the fields."""

    strategy: str = "auto"
    devices: str = "all"
    virtual_devices: int | None = None
    tpu: str = "local"
    threads: int | None = None
    cpu_kernels: str = "auto"
    jit: str = "auto"
    communication: str = "auto"
    bucket_bytes: int | None = None
    insecure: bool = False
    start_timeout: float = 120.0
    stall_timeout: float = 600.0

    def __post_init__(self):
        _check_choices(self)
        for field in ("virtual_devices", "threads"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UserError(f"--{field} must be an integer of at least 1, got {value}")
            if value is not None and value > MOST_THREADS:
                raise UserError(f"--{field} must be at most {MOST_THREADS}, got {value}")
        for field in ("start_timeout", "stall_timeout"):
            if not getattr(self, field) > 0:
                raise UserError(f"--{field} must be a positive number of seconds, got {getattr(self, field)}")
        if self.bucket_bytes is not None and self.bucket_bytes < 0:
            raise UserError(f"--bucket_bytes must not be negative, got {self.bucket_bytes}")
        if not re.fullmatch(r"all|none|idle:[1-9]\d*|\d+(,\d+)*", self.devices):
            what = f"--devices={self.devices} is not understood"
            raise UserError(what, "use all, none, driver numbers such as 0,3, or idle:2")
        self._check_tpu()
        numbers = self.devices.split(",")
        if len(set(numbers)) != len(numbers):
            raise UserError(f"--devices={self.devices} names a device twice", "name each once")
        if self.virtual_devices and self.devices not in ("all", "none"):
            what = f"--virtual_devices={self.virtual_devices} splits the CPU and --devices={self.devices} picks GPUs"
            raise UserError(what, "use one")
        if self.virtual_devices and self.virtual_devices > 1 and self.strategy == "default":
            what = f"--strategy=default uses one device, --virtual_devices={self.virtual_devices} asks for more"
            raise UserError(what, "use --strategy=mirrored")
        for field, usual in (("communication", "auto"), ("bucket_bytes", None)):
            if (value := getattr(self, field)) != usual and self.strategy not in ("auto", "multi_worker"):
                what = f"--{field}={value} is for --strategy=multi_worker, got --strategy={self.strategy}"
                raise UserError(what, "leave it out")
        if self.communication == "nccl" and self.uses_cpu:
            raise UserError("--communication=nccl sums between GPUs, and CPUs are asked for", "leave it out")

    def _check_tpu(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,200}", self.tpu):
            raise UserError(f"--tpu={self.tpu} is not understood", "use local, or the name of a TPU in the Cloud")
        if self.tpu != "local" and self.strategy not in ("auto", "tpu"):
            what = f"--tpu={self.tpu} asks for a TPU and --strategy={self.strategy} uses none"
            raise UserError(what, "leave one out")
        if self.strategy != "tpu" and self.tpu == "local":
            return
        for field, given in (("virtual_devices", self.virtual_devices), ("devices", self.devices)):
            if given not in (None, "all"):
                raise UserError(f"--{field}={given} is for CPUs and GPUs, and a TPU is used as a whole", "leave it out")
        if self.jit == "on":
            raise UserError("--jit=on is for CPUs and GPUs; a TPU compiles every step", "leave it out")

    uses_cpu = property(lambda self: bool(self.virtual_devices) or self.devices == "none")
    """Whether GPUs are left alone."""


@dataclasses.dataclass(frozen=True)
class ResumeOptions:
    """Run folder, and whether to resume from it."""

    workdir: str = ""
    resume: str = "auto"
    resume_changed: bool = False
    requeue: bool = False

    def __post_init__(self):
        _check_choices(self)
        if self.resume == "never" and self.resume_changed:
            raise UserError("--resume=never and --resume_changed contradict each other", "give one")
        buckets.check("--workdir", self.workdir)
        try:  # TensorFlow could not name the folder: training would reach its end without a single checkpoint
            os.path.expanduser(self.workdir).encode()
        except UnicodeEncodeError:
            name = printable(os.fsencode(self.workdir).decode(errors="backslashreplace"))
            what = f"--workdir={name} is not UTF-8, as TensorFlow's file names are"
            raise UserError(what, "choose another name") from None


@dataclasses.dataclass(frozen=True)
class DisplayOptions:
    """Progress display and recordings of a run."""

    progress: str = "auto"
    tensorboard: bool = True
    profile: str = ""

    def __post_init__(self):
        _check_choices(self)
        if not self.profile:
            return
        bounds = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", self.profile)
        if not bounds or int(bounds[1]) > int(bounds[2]):
            what = f"--profile={self.profile} is not understood"
            raise UserError(what, "write the first and the last update, such as 20:30")
        count = int(bounds[2]) - int(bounds[1]) + 1
        if count > MOST_PROFILED:
            what = f"--profile={self.profile} is {count} updates, a trace that no browser opens"
            raise UserError(what, f"choose at most {MOST_PROFILED}")


@dataclasses.dataclass(frozen=True)
class Environment(DisplayOptions, ResumeOptions, PlacementOptions):
    """All runtime options of a training; functions take the part of them that they use."""

    check_agreement: str = "auto"
    dry_run: bool = False
    topology: str = ""

    def __post_init__(self):
        for part in (PlacementOptions, ResumeOptions, DisplayOptions):
            part.__post_init__(self)
        if not self.topology:
            return
        if not self.dry_run:
            raise UserError(f"--topology={self.topology} compiles ahead of time and requires --dry_run")
        if self.strategy not in ("auto", "default") or self.devices not in ("all", "none") or self.virtual_devices:
            what = f"--topology={self.topology} says on which devices"
            raise UserError(what, "leave out --strategy, --devices and --virtual_devices")


def names(options: type) -> tuple[str, ...]:
    """Returns the flags that a class of options has."""
    return tuple(field.name for field in dataclasses.fields(options))


def _check_choices(options: object) -> None:
    for field, choices in CHOICES.items():
        value = getattr(options, field, choices[0])
        if value not in choices:
            raise UserError(f"unknown --{field}={value}", f"choose one of {', '.join(choices)}")


HELP: dict[str, str] = json.loads(pathlib.Path(__file__).with_name("runtime_options.json").read_text())
"""Help text of each flag."""


def define_flags(names: Iterable[str] = HELP) -> None:
    """Registers the environment flags of these names with absl; called once per command."""
    for name in names:
        text, default = HELP[name], getattr(Environment(), name)
        if name in CHOICES:
            flags.DEFINE_enum(name, default, CHOICES[name], text)
        else:
            define: dict[type, Any] = {bool: flags.DEFINE_bool, str: flags.DEFINE_string, float: flags.DEFINE_float}
            define.get(type(default), flags.DEFINE_integer)(name, default, text)


def from_flags(values: flags.FlagValues) -> Environment:
    """Returns the environment that parsed flags describe; a command need not have all of them."""
    given: dict[str, Any] = {name: values[name].value for name in names(Environment) if name in values}
    return Environment(**given)


def workdir(experiment: Experiment, options: ResumeOptions) -> str:
    """Returns the run folder of an experiment: `--workdir`, or one by the experiment's name."""
    return os.path.expanduser(options.workdir) or os.path.join("runs", experiment.name)


_FLAG = re.compile(rf"--(?=(?:{'|'.join(names(PlacementOptions))}|check_agreement)\b)")
P = ParamSpec("P")
R = TypeVar("R")


def checked_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function suggest the right name of a misspelt argument, and name arguments as such in its errors."""
    parameters = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> R:
        try:
            for name in kwargs:
                if name not in parameters:
                    known = field_syntax.suggest(current_name(name), parameters)
                    raise UserError(f"{function.__name__}() has no option {name!r}{known}")
            return function(*args, **kwargs)
        except UserError as error:
            if not (flags.FLAGS.is_parsed() and "strategy" in flags.FLAGS):  # no command has been given
                error.what, error.fix = (_FLAG.sub("", text) for text in (error.what, error.fix))
            raise

    return wrapper
