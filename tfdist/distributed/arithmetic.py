"""Facts besides the experiment that decide about the last bit: with virtual replicas, workers must agree on them."""

import os
from collections.abc import Mapping

from tfdist.config import cpu_kernels
from tfdist.distributed.distribution import Distribution

INSTRUCTIONS = ("avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "sve")
"""For which TensorFlow and its libraries have code of their own, as Linux names them."""


def facts(distribution: Distribution) -> dict[str, str]:
    """Returns what decides about the last bit on this worker, by names for people."""
    import keras
    import tensorflow as tf

    threads = tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))
    found = {
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "threads per replica": str(threads),
        "CPU kernels": cpu_kernels.in_use(),
        "instructions": " ".join(name for name in INSTRUCTIONS if name in cpu_kernels.cpu_flags()),
        "XLA": distribution.jit,
    }
    seen = tf.config.list_physical_devices("GPU") if distribution.device_kind == "GPU" else []
    names = {str(tf.config.experimental.get_device_details(device).get("device_name")) for device in seen}
    return {**found, **({"GPU": ", ".join(sorted(names))} if names else {})}


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Returns what differs between two of `facts`, in words."""
    return [
        f"{name} {there.get(name, 'unknown')} there and {here.get(name, 'unknown')} here"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    ]
