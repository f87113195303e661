"""The kernels that TensorFlow computes with on a CPU: Eigen's, or oneDNN's, which it leaves off on many CPUs.

TensorFlow turns oneDNN on by itself on CPUs with AVX-512 VNNI and the like alone; with AVX2 it is ahead too
(docs/speed.md). It decides once, when it is imported, so whoever wants another kind must say so before.
"""

import functools
import os
import pathlib
from collections.abc import MutableMapping

from tfdist.errors import UserError

CHOICES = ("auto", "onednn", "eigen")
_CPUINFO = pathlib.Path("/proc/cpuinfo")
VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
_VALUES = {"onednn": "1", "eigen": "0"}


def ask_for(kernels: str = "auto", environ: MutableMapping[str, str] = os.environ) -> None:
    """Asks TensorFlow, if not imported yet, for kernels; `auto`: by the user's variable, else oneDNN with AVX2."""
    if kernels in _VALUES:
        environ[VARIABLE] = _VALUES[kernels]
    elif not environ.get(VARIABLE) and "avx2" in cpu_flags():
        environ[VARIABLE] = _VALUES["onednn"]


def wanted(environ: MutableMapping[str, str] = os.environ) -> str:
    """Returns the kind that TensorFlow takes when it is imported with these variables, as far as that can be told."""
    return "onednn" if environ.get(VARIABLE, "").lower() in ("1", "true") else "eigen"


def in_use() -> str:
    """Returns `onednn` or `eigen`: what TensorFlow, which this imports, computes with in this process."""
    import tensorflow as tf  # noqa: F401  which decides when it is imported

    try:
        # Nothing public tells it, and the variable may have been set after the import.
        from tensorflow.python.util._pywrap_util_port import IsMklEnabled
    except ImportError:
        return wanted()
    return "onednn" if IsMklEnabled() else "eigen"


def check(kernels: str) -> None:
    """Checks that TensorFlow, imported by now, has taken what was asked for."""
    if kernels in _VALUES and in_use() != kernels:
        raise UserError(
            f"--cpu_kernels={kernels} cannot be had: TensorFlow computes with the other kind, since it was imported "
            f"before or knows no other; set {VARIABLE}={_VALUES[kernels]} before Python starts, or leave it out"
        )


def keep_nan() -> None:
    """Keeps TensorFlow from fusing a ReLU into oneDNN's matrix product or convolution, which makes NaN a 0 there.

    A loss would stay finite over NaN in data or weights, and nothing would tell. A user's own setting is kept.
    """
    import tensorflow as tf

    if in_use() == "onednn" and "remapping" not in tf.config.optimizer.get_experimental_options():
        tf.config.optimizer.set_experimental_options({"remapping": False})


@functools.cache
def cpu_flags(cpuinfo: pathlib.Path = _CPUINFO) -> frozenset[str]:
    """Returns what this CPU can do, in Linux' words; nothing where Linux does not tell."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    known = (line.partition(":")[2].split() for line in lines if line.lower().startswith(("flags", "features")))
    return frozenset(next(known, []))
