"""The first module to touch TensorFlow: threads, logical devices, memory growth."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from tfdist.cluster import standard_error
from tfdist.config.runtime_options import PlacementOptions
from tfdist.distributed import gpus, strategy_choice
from tfdist.errors import UserError

if TYPE_CHECKING:
    import tensorflow as tf


@dataclasses.dataclass(frozen=True, slots=True)
class Devices:
    """The devices that replicas may use, by TensorFlow name (`GPU:0`, `CPU:1`)."""

    names: tuple[str, ...]

    @property
    def kind(self) -> str:
        """`GPU` or `CPU`."""
        return self.names[0].partition(":")[0]


def prepare(options: PlacementOptions, survey: gpus.Survey, selection: gpus.Selection, local_size: int = 1) -> Devices:
    """Configures TensorFlow for this process.

    Args:
      local_size: workers on this host, which share its cores.

    Raises:
      UserError: GPUs that TensorFlow does not see, or a process that has
        already started TensorFlow with other settings.
    """
    if not (options.virtual_devices and not survey.gpus):
        gpus.apply(selection)
    tf, seen, said = start()
    strategy_choice.check_visible(selection, len(seen), options, said)
    virtual = options.virtual_devices
    threads = options.threads
    if threads is None and local_size > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // local_size)
    if threads is not None:
        # Operations of all logical CPUs share one inter-op pool: with one thread they would take turns.
        _threads(tf, threads, threads * (virtual or 1))
    if seen and not virtual and options.devices != "none":
        for device in seen:
            _configure(functools.partial(tf.config.experimental.set_memory_growth, device, True), "GPU memory growth")
        return Devices(tuple(f"GPU:{i}" for i in range(len(seen))))
    if virtual and virtual > 1:
        _split_cpu(tf, virtual)
    return Devices(tuple(f"CPU:{i}" for i in range(virtual or 1)))


class Started(NamedTuple):
    """TensorFlow, imported."""

    tf: ModuleType
    gpus: list[tf.config.PhysicalDevice]
    printed: str
    """What it printed meanwhile, which tells why it does not see a GPU."""


def start() -> Started:
    """Imports TensorFlow and lists its GPUs."""
    with standard_error.kept() as kept:
        import tensorflow as tf

        seen = tf.config.list_physical_devices("GPU")
        kept.seek(0)
        return Started(tf, seen, kept.read().decode(errors="replace"))


def _threads(tf: ModuleType, intra: int, inter: int) -> None:
    config = tf.config.threading
    if (config.get_intra_op_parallelism_threads(), config.get_inter_op_parallelism_threads()) == (intra, inter):
        return
    _configure(lambda: config.set_intra_op_parallelism_threads(intra), f"--threads={intra}")
    _configure(lambda: config.set_inter_op_parallelism_threads(inter), f"--threads={intra}")


def _split_cpu(tf: ModuleType, count: int) -> None:
    """Makes at least `count` logical CPUs; TensorFlow allows it once, before its first op."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    have = tf.config.get_logical_device_configuration(cpu) or [None]
    if len(have) >= count:
        return
    split = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    _configure(lambda: tf.config.set_logical_device_configuration(cpu, split), f"--virtual_devices={count}")


def _configure(action: Callable[[], object], what: str) -> None:
    """Changes a setting of TensorFlow; raises UserError when it has started."""
    try:
        action()
    except RuntimeError:
        raise UserError(
            f"{what} comes too late, TensorFlow has already started in this process: "
            "call tfdist.connect() before anything else, or start a new process"
        ) from None
