"""The first module to touch TensorFlow: whether it starts at all, threads, logical devices, memory growth.

Flags of XLA's, or a limit of the address space, may make TensorFlow end its process in C++, where nobody can say why.
There it is tried in a child first, `python -m tfdist.distributed.tf_devices on|off LIMIT`, which takes seconds.
"""

import functools
import os
import re
import resource
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from tfdist.cluster import standard_error
from tfdist.config.runtime_options import PlacementOptions
from tfdist.distributed import child_process, gpus
from tfdist.errors import UserError, one_line

if TYPE_CHECKING:
    import tensorflow as tf

_ALWAYS_READ = ("TF_XLA_FLAGS", "TF_JITRT_FLAGS")  # when it starts; XLA_FLAGS is read when XLA first compiles
_OF_FLAGS = re.compile(r"[EF]\d{4} \S+ +\d+ (?:command_line_flags|parse_flags_from_env)\.cc:\d+\] ")
"""Beginning of a log line of TensorFlow's about a flag that it cannot read."""
_LIMIT_S = 120.0  # until a child counts as one that cannot end: with too little memory, threads may wait
_A_RUN = 1_500_000_000  # bytes of a small run besides TensorFlow: Keras, threads that read data, a model


def prepare(
    options: PlacementOptions, survey: gpus.Survey, selection: gpus.Selection, local_size: int = 1
) -> tuple[str, ...]:
    """Configures TensorFlow for this process, of which there are `local_size` on this host to share its cores.

    Returns TensorFlow's names of the devices that replicas may use (`GPU:0`, `CPU:1`), of one kind; raises UserError.
    """
    if not (options.virtual_devices and not survey.gpus):
        gpus.apply(selection)
    tf, seen, said = start()
    wanted = len(selection.gpus)
    if len(seen) < wanted:  # else it would train on the CPU in silence
        signs = ("dlopen", "cuInit", "libcud", "cuda drivers", "driver version")
        reasons = [line.partition("] ")[2] or line for line in said.splitlines() if any(s in line for s in signs)]
        raise UserError(
            f"the driver lists {wanted} usable GPU{'s' * (wanted > 1)} ({selection.gpus[0].name}) "
            f"and TensorFlow sees {len(seen)}{f' ({reasons[-1].strip()})' if reasons else ''}",
            "install TensorFlow with CUDA (pip install 'tfdist[cuda]'), "
            "or train on the CPU with --strategy=default --devices=none",
        )
    virtual = options.virtual_devices
    threads = options.threads
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


def start() -> "tuple[ModuleType, list[tf.config.PhysicalDevice], str]":
    """Imports TensorFlow and lists its GPUs; returns what it prints, too, which tells why it does not see one."""
    with standard_error.kept() as kept:
        import tensorflow as tf

        seen = tf.config.list_physical_devices("GPU")
        kept.seek(0)
        return tf, seen, kept.read().decode(errors="replace")


def _configure(action: Callable[[], object], what: str) -> None:
    """Changes a setting of TensorFlow; raises UserError when it has started."""
    try:
        action()
    except RuntimeError:
        raise UserError(
            f"{what} comes too late, TensorFlow has already started in this process",
            "call tfdist.connect() before anything else, or start a new process",
        ) from None


def check_starts(compiles: bool, environ: Mapping[str, str]) -> None:
    """Raises UserError if TensorFlow, and XLA if it `compiles`, would end this process, for a variable or a limit."""
    names = [name for name in (*_ALWAYS_READ, *(["XLA_FLAGS"] if compiles else [])) if environ.get(name)]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        limit = 0
    if not names and not limit:
        return
    reason = _tried(compiles, limit, environ)
    if not reason:
        return
    flag = _OF_FLAGS.match(reason)
    if names and (flag or not limit):
        reason = _OF_FLAGS.sub("", reason)
        guilty = [name for name in names if re.search(rf"\b{name}\b", reason)] or names
        given = " ".join(f"{name}={environ[name]}" for name in guilty)
        raise UserError(f"{given} cannot be used ({reason})", f"correct or unset {' and '.join(guilty)}")
    raise UserError(
        f"ulimit -v allows {limit / 1e9:.1f} GB of address space, too little for TensorFlow and a small model "
        f"({reason})",
        "raise it, or run ulimit -v unlimited",
    )


def _tried(compiles: bool, limit: int, environ: Mapping[str, str]) -> str:
    """Returns why TensorFlow does not start in a child, or an empty string."""
    if limit and limit <= _A_RUN:
        return f"they take more than {_A_RUN / 1e9:.1f} GB"
    words = ["on" if compiles else "off", str(limit - _A_RUN if limit else 0)]
    quiet = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}  # what GPUs are for is not tried
    done = child_process.answer([sys.executable, "-m", __name__, *words], _LIMIT_S, {**environ, **quiet})
    if done is None:
        return f"TensorFlow does not start within {_LIMIT_S:g} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.splitlines()
    flags = filter(_OF_FLAGS.match, lines)
    errors = (line for line in reversed(lines) if re.search(r"Error\b|what\(\)", line))
    return one_line(next(flags, None) or next(errors, f"exit code {done.returncode}"), 300)


def main() -> None:
    """Starts TensorFlow with as much address space as it may have."""
    compiles, limit = sys.argv[1] == "on", int(sys.argv[2])
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    import tensorflow as tf

    tf.function(lambda x: x @ x, jit_compile=compiles)(tf.ones((2, 2)))


if __name__ == "__main__":
    main()
