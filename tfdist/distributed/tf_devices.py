"""The first module to touch TensorFlow: threads, logical devices, memory growth."""

import functools
import os
import resource
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tfdist.config.commands import standard_streams
from tfdist.config.runtime_options import PlacementOptions
from tfdist.distributed import gpus
from tfdist.errors import UserError

_SIGNS = ("dlopen", "cuInit", "libcud", "cuda drivers", "driver version", "CUDA_ERROR", "Skipping registering")
LEAST_ADDRESS_SPACE = 4_000_000_000  # bytes with which a small model trains on two cores


def prepare(
    options: PlacementOptions, survey: gpus.Survey, selection: gpus.Selection, local_size: int = 1
) -> tuple[str, ...]:
    """Configures TensorFlow for this process, of which there are `local_size` on this host to share its cores.

    Returns TensorFlow's names of the devices that replicas may use (`GPU:0`, `CPU:1`), of one kind; raises UserError.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:  # it would end in C++, or wait for ever
        what = f"ulimit -v allows {limit / 1e9:.1f} GB of address space, and TensorFlow needs 4 GB or more"
        raise UserError(what, "raise it, or run ulimit -v unlimited")
    if not (options.virtual_devices and not survey.gpus):
        gpus.apply(selection)
    tf, seen, said = start()
    wanted = len(selection.gpus)
    if len(seen) < wanted:  # else it would train on the CPU in silence
        raise UserError(
            f"the driver lists {wanted} usable GPU{'s' * (wanted > 1)} ({selection.gpus[0].name}) "
            f"and TensorFlow sees {len(seen)}{f' ({said[0].strip()})' if said else ''}",
            "install TensorFlow with CUDA (pip install 'tfdist[cuda]'), "
            "or train on the CPU with --strategy=default --devices=none",
        )
    virtual, threads = options.virtual_devices, options.threads
    if threads is None and local_size > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // local_size)
    if threads is not None:
        # Operations of all logical CPUs share one inter-op pool: with one thread they would take turns.
        config, pools = tf.config.threading, (threads, threads * (virtual or 1))
        if (config.get_intra_op_parallelism_threads(), config.get_inter_op_parallelism_threads()) != pools:
            _configure(lambda: config.set_intra_op_parallelism_threads(pools[0]), f"--threads={threads}")
            _configure(lambda: config.set_inter_op_parallelism_threads(pools[1]), f"--threads={threads}")
    if seen and not virtual and options.devices != "none":
        for device in seen:
            _configure(functools.partial(tf.config.experimental.set_memory_growth, device, True), "GPU memory growth")
        return tuple(f"GPU:{i}" for i in range(len(seen)))
    if virtual and virtual > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        have = tf.config.get_logical_device_configuration(cpu) or [None]
        if len(have) < virtual:  # TensorFlow allows it once, before its first op
            split = [tf.config.LogicalDeviceConfiguration() for _ in range(virtual)]
            change = functools.partial(tf.config.set_logical_device_configuration, cpu, split)
            _configure(change, f"--virtual_devices={virtual}")
    return tuple(f"CPU:{i}" for i in range(virtual or 1))


def start() -> tuple[ModuleType, list[Any], list[str]]:
    """Imports TensorFlow and lists its GPUs; returns the lines, too, that it prints of why it does not see one."""
    with standard_streams.held_back() as kept:
        import tensorflow as tf

        seen = tf.config.list_physical_devices("GPU")
        kept.seek(0)
        printed = kept.read().decode(errors="replace").splitlines()
        return tf, seen, [line.partition("] ")[2] or line for line in printed if any(s in line for s in _SIGNS)]


def _configure(action: Callable[[], object], what: str) -> None:
    """Changes a setting of TensorFlow; raises UserError when it has started."""
    try:
        action()
    except RuntimeError:
        what = f"{what} comes too late, TensorFlow has already started in this process"
        raise UserError(what, "call tfdist.connect() before anything else, or start a new process") from None
