"""From devices to a `Distribution`: the few operations in which the strategies differ."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any

from tfdist import detect, devices, gpus
from tfdist.environment import Environment
from tfdist.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class Distribution:
    """What the rest of tfdist knows about a strategy.

    `run`, `local` and `average` are called in cross-replica context, `all_sum`
    and `replica_id` inside the function given to `run`. On one replica every
    one of them is the identity, so callers never ask whether they are
    distributed.
    """

    name: str
    """Name as in `--strategy`: `default` or `mirrored`."""
    reason: str
    """Why this strategy, in words for a person."""
    strategy: Any
    """The `tf.distribute.Strategy` under whose scope variables are created."""
    replicas: int
    """Copies of the model over all workers."""
    workers: int
    """Processes."""
    rank: int
    """This process, 0 for the chief."""
    devices: tuple[str, ...]
    """TensorFlow names of this worker's devices, one per replica, e.g. `CPU:1`."""
    jit: str
    """Whether XLA compiles forward and backward pass: `on`, `off`, or `auto` for where the model allows it."""
    run: Callable[..., Any]
    """`run(fn, args)`: calls `fn(*args)` once per replica, returns per-replica values."""
    local: Callable[[Any], tuple]
    """This worker's values of a per-replica value, in order of replicas."""
    replica_id: Callable[[], Any]
    """Index of the current replica among all, an int or an int32 scalar."""
    all_sum: Callable[[list], list]
    """Sums each dense tensor of a list over all replicas."""
    average: Callable[[list], None]
    """Sets each floating-point variable to its mean over all replicas."""

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    def scope(self) -> contextlib.AbstractContextManager:
        """Context in which model, optimizer and metrics must be created."""
        return self.strategy.scope()


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """The answer to "where does this run", found without TensorFlow."""

    environment: Environment
    survey: gpus.Survey
    selection: gpus.Selection
    choice: detect.Choice


def locate(environment: Environment) -> Site:
    """Looks at GPUs and environment variables and chooses a strategy; takes no device.

    Raises:
      UserError: what was asked for cannot run here.
    """
    asks_for_cpu = environment.virtual_devices or environment.devices == "none"
    survey = gpus.Survey() if asks_for_cpu else gpus.survey()
    selection = gpus.select("none" if asks_for_cpu else environment.devices, survey, os.environ)
    return Site(environment, survey, selection, detect.choose(environment, selection, os.environ))


def create(site: Site) -> Distribution:
    """Starts TensorFlow on the chosen devices.

    Raises:
      UserError: TensorFlow does not see the devices, or was started before.
    """
    found = devices.prepare(site.environment, site.survey, site.selection)
    # XLA loses on the CPU: forward and backward at 0.5 to 1.0 of the plain loop (benchmarks/README.md).
    jit = "off" if site.environment.jit == "auto" and found.kind == "CPU" else site.environment.jit
    reason = site.choice.reason
    match site.choice.name:
        case "default":
            return default(reason, found.names[0], jit)
        case "mirrored":
            return mirrored(found.names, reason, jit)
        case name:
            raise UserError(f"--strategy={name} is not part of this version")


def connect(strategy: str = "auto", **environment: Any) -> Distribution:
    """Chooses and starts a strategy by the same rules as the command line.

    Must come before TensorFlow has done anything else in the process when it
    splits the CPU or sets threads.

    Args:
      strategy: `auto`, `default` or `mirrored`.
      **environment: the other environment flags, e.g. `virtual_devices=3`,
        `devices="0,1"`, `threads=4`, `jit="on"`.

    Returns:
      A `Distribution`; create the model under its `scope()`.

    Raises:
      UserError: the strategy or an option cannot be used here.
    """
    known = {f.name for f in dataclasses.fields(Environment)} - {"strategy", "workdir", "progress"}
    unknown = set(environment) - known
    if unknown:
        raise UserError(f"connect() has no option {sorted(unknown)[0]!r}: known are {', '.join(sorted(known))}")
    return create(locate(Environment(strategy=strategy, **environment)))


def default(reason: str, device: str = "CPU:0", jit: str = "off") -> Distribution:
    """One replica on one device: every collective returns its input."""
    import tensorflow as tf

    return Distribution(
        name="default",
        reason=reason,
        strategy=tf.distribute.get_strategy(),
        replicas=1,
        workers=1,
        rank=0,
        devices=(device,),
        jit=jit,
        run=lambda fn, args: fn(*args),
        local=lambda value: (value,),
        replica_id=lambda: 0,
        all_sum=lambda tensors: tensors,
        average=lambda variables: None,
    )


def mirrored(names: tuple[str, ...], reason: str, jit: str = "off") -> Distribution:
    """One replica per device of this process (`tf.distribute.MirroredStrategy`).

    Raises:
      UserError: fewer than two devices.
    """
    import tensorflow as tf

    if len(names) < 2:
        raise UserError(
            f"--strategy=mirrored needs at least 2 devices, found {len(names)} ({', '.join(names)}): "
            "use --virtual_devices=2 to split the CPU, or --strategy=default"
        )
    # Between CPUs of one process TensorFlow would choose its ring collective, which costs 0.7 to 0.4 of
    # the speed; adding up in one place needs no copies there. GPUs keep the default, NCCL.
    reduction = tf.distribute.ReductionToOneDevice() if names[0].startswith("CPU") else None
    strategy = tf.distribute.MirroredStrategy([f"/{name}" for name in names], cross_device_ops=reduction)

    def all_sum(tensors: list) -> list:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensors)

    def average(variables: list) -> None:
        for variable in variables:
            copies = getattr(variable.value, "values", (variable.value,))
            mean = tf.add_n([tf.identity(copy) for copy in copies]) / len(copies)
            for copy in copies:
                copy.assign(mean)

    return Distribution(
        name="mirrored",
        reason=reason,
        strategy=strategy,
        replicas=len(names),
        workers=1,
        rank=0,
        devices=names,
        jit=jit,
        run=lambda fn, args: strategy.run(fn, args=args),
        local=strategy.experimental_local_results,
        replica_id=lambda: tf.distribute.get_replica_context().replica_id_in_sync_group,
        all_sum=all_sum,
        average=average,
    )
