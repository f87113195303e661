"""Signs of a TPU on this machine, and whether its TensorFlow can use one, from files and pip's records alone.

No TensorFlow. Whether there is a TPU is known only when its system has been started, see `strategies.tpu`.
"""

import contextlib
import glob
import importlib.util
import os
import pathlib
import re
from collections.abc import Mapping, MutableMapping

from tfdist.config import packages

VARIABLES = ("TPU_NAME", "TPU_CONFIG", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "COLAB_TPU_ADDR")
"""any says that there is one"""
_NODES = "/dev/accel[0-9]*"  # of TPUs up to v4; /dev/accel/ is a folder of Linux' own for accelerators of others
_VFIO = "/dev/vfio/[0-9]*"  # of TPUs from v5e on, and of what else is passed through to a virtual machine
_BESIDE_VFIO = re.compile("TPU_ACCELERATOR_TYPE|TPU_WORKER_ID|TPU_WORKER_HOSTNAMES|COLAB_TPU|KAGGLE_KERNEL_RUN_TYPE")
"""Variables that TPU machines, Colab and Kaggle set, and that say nothing without a device file."""
_PCI = "/sys/bus/pci/devices/*/vendor"
_GOOGLE = "0x1ae0"
_CHIPS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
"""PCI numbers of TPUs from v2 to v7, as JAX knows them; Google's network cards and disks have others."""
PACKAGES = {"2.18": "2.18.0", "2.19": "2.19.1", "2.20": "2.20.0 libtpu==0.0.14"}
"""By version of TensorFlow, the newest tensorflow-tpu; none for 2.21. 2.20.0 names no libtpu, the others do."""
_NEWEST_LIBTPU = (0, 0, 30)
"""with tensorflow-tpu 2.20.0, whose import ended the process beside 0.0.32.1 and 0.0.35 to 0.0.52"""
_WHEELS = ("tensorflow-tpu", "tf-nightly-tpu")
_XLA_FLAGS = (
    "--tf_mlir_enable_mlir_bridge=true",
    "--tf_mlir_enable_convert_control_to_data_outputs_pass=true",
    "--tf_mlir_enable_merge_control_flow_pass=true",
)


def hint(environ: Mapping[str, str]) -> str:
    """Returns what suggests a TPU, or an empty string; a wrong guess is costly, so the signs are strict.

    An installed libtpu is none: it is there on any machine for which somebody compiles ahead of time.
    """
    for name in VARIABLES:
        if environ.get(name):
            return name
    nodes = sorted(glob.glob(_NODES))
    if nodes:
        return nodes[0]
    if _has_chip():
        return "a PCI device of Google's"
    if glob.glob(_VFIO) and any(_BESIDE_VFIO.match(name) for name in environ):
        return "/dev/vfio with TPU variables"
    return ""


def has_device() -> bool:
    """Returns whether there is a device file or a chip that may be a TPU, and not just a variable."""
    return bool(glob.glob(_NODES) or glob.glob(_VFIO)) or _has_chip()


def _has_chip() -> bool:
    for vendor in map(pathlib.Path, glob.glob(_PCI)):
        with contextlib.suppress(OSError):  # a device that has just gone
            if vendor.read_text().strip() == _GOOGLE and vendor.with_name("device").read_text().strip() in _CHIPS:
                return True
    return False


def problem() -> str:
    """Returns why the installed TensorFlow cannot use a TPU and what to install, or an empty string."""
    if any(map(packages.version, _WHEELS)):
        return unusable() if _libtpu() else f"libtpu, the driver in Python's packages, is missing: {install_line()}"
    have = packages.version("tensorflow") or packages.version("tensorflow-cpu")
    if not have:
        return f"TensorFlow for TPUs is not installed: {install_line()}"
    none = "" if _release(have) in PACKAGES else f", and for {_release(have)} there is none"
    return f"TensorFlow {have} is installed without support for TPUs, which tensorflow-tpu has{none}: {install_line()}"


def unusable() -> str:
    """Returns why the installed TensorFlow for TPUs cannot even be imported and what to install, or an empty string.

    Its import ends the process, without a word where TensorFlow's log is off.
    """
    mine, library = packages.version("tensorflow-tpu"), packages.version("libtpu")
    if _release(mine) != "2.20" or tuple(map(int, re.findall(r"\d+", library)[:3])) <= _NEWEST_LIBTPU:
        return ""
    return f"libtpu {library} is too new for tensorflow-tpu {mine}, whose import would fail: pip install libtpu==0.0.14"


def install_line() -> str:
    """Returns the command that installs TensorFlow for TPUs, in the version at hand where there is one."""
    have = _release(next(filter(None, map(packages.version, ("tensorflow", "tensorflow-cpu", *_WHEELS))), ""))
    package = PACKAGES.get(have, list(PACKAGES.values())[-1])
    # All install the folder tensorflow, and what is uninstalled later would take it along.
    return f"pip uninstall -y tensorflow tensorflow-cpu tensorflow-tpu && pip install tensorflow-tpu=={package}"


def prepare(environ: MutableMapping[str, str]) -> None:
    """Sets what TensorFlow reads when it is imported, to find TPUs through PJRT; what is set already stays."""
    library = _libtpu()
    if not library:
        return
    environ.setdefault("PJRT_DEVICE", "TPU")
    environ.setdefault("NEXT_PLUGGABLE_DEVICE_USE_C_API", "true")
    environ.setdefault("TF_PLUGGABLE_DEVICE_LIBRARY_PATH", library)
    given = environ.get("TF_XLA_FLAGS", "")
    missing = [flag for flag in _XLA_FLAGS if flag.partition("=")[0] not in given]
    environ["TF_XLA_FLAGS"] = " ".join(filter(None, [given, *missing]))


def keep_from_asking(environ: MutableMapping[str, str]) -> None:
    """Keeps libtpu from asking the Cloud about a TPU, thirty times per variable, where there is no sign of one."""
    if any(map(packages.version, _WHEELS)) and not hint(environ):
        environ.setdefault("TPU_SKIP_MDS_QUERY", "1")


def _libtpu() -> str:
    """Returns where libtpu is, or an empty string."""
    found = importlib.util.find_spec("libtpu")
    folders = found.submodule_search_locations if found else None
    return next((path for f in folders or () if os.path.exists(path := os.path.join(f, "libtpu.so"))), "")


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])
