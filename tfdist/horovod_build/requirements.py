"""What a build of Horovod needs from the machine: found, or missing in one line with the fix. No TensorFlow."""

import dataclasses
import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping

from tfdist.config import packages as installed
from tfdist.distributed.horovod_install import Build
from tfdist.errors import UserError

PLACES = (
    "HOROVOD_BUILD_ARCH_FLAGS", "HOROVOD_BUILD_CUDA_CC_LIST", "HOROVOD_CUDA_HOME",
    "HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB", "HOROVOD_NCCL_LINK",
)  # fmt: skip
"""Horovod's own variables that say where things are and for which processor, not what to build."""

_PACKAGES = ("setuptools", "wheel", "cloudpickle", "packaging", "psutil", "pyyaml")  # to build Horovod, and to run it
_EXTRA = "pip install 'tfdist[horovod]'"


@dataclasses.dataclass(frozen=True, slots=True)
class Tools:
    """The programs of a build."""

    path: str
    environ: Mapping[str, str]  # variables that make Horovod's build use the programs that were found


def find(wanted: Build, environ: Mapping[str, str] = os.environ) -> Tools:
    """Returns the programs that the build needs; raises one `UserError` that names all that are missing."""
    # The cmake of the extra lies beside the interpreter, which need not be on PATH.
    path = os.pathsep.join([sysconfig.get_path("scripts"), environ.get("PATH", os.defpath)])
    program = lambda *names: next(filter(None, (shutil.which(name, path=path) for name in names)), "")
    missing: list[str] = []
    packages: list[str] = []
    fixes: list[str] = []

    def need(there: object, what: str, fix: str = "", apt: str = "") -> None:
        """Notes what is missing unless it is there; a command or hint, or Debian's packages, help."""
        if not there:
            missing.append(what)
            packages.extend(filter(None, [apt]))
            fixes.extend(filter(None, [fix]))

    use = {
        "CXX": environ.get("CXX") or program("c++", "g++", "clang++"),
        "CC": environ.get("CC") or program("cc", "gcc", "clang"),
        "HOROVOD_CMAKE": environ.get("HOROVOD_CMAKE") or program("cmake"),
    }
    text = "#include <string_view>\n#if __cplusplus < 201703L\n#error\n#endif\nstd::string_view tfdist_says_yes;\n"
    preprocess = [*shlex.split(use["CXX"]), "-std=c++17", "-E", "-x", "c++", "-"]
    need(use["CXX"] and "tfdist_says_yes" in _output(preprocess, path, text), "a C++17 compiler", apt="g++")
    need(use["CC"], "a C compiler", apt="gcc")
    need(program("make"), "make", apt="make")
    cmake = re.search(r"version (\d+)\.(\d+)", _output([use["HOROVOD_CMAKE"], "--version"]))
    need(cmake and (int(cmake[1]), int(cmake[2])) >= (3, 13), "cmake 3.13 or newer", _EXTRA)
    need(importlib.util.find_spec("pip"), "pip", "python -m ensurepip")
    for package in _PACKAGES:
        need(installed.version(package), package, _EXTRA)
    need(wanted.tensorflow.version, "TensorFlow", "pip install tensorflow")
    marker = pathlib.Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")  # pip refuses to install: PEP 668
    managed = sys.prefix == sys.base_prefix and marker.exists() and "PIP_BREAK_SYSTEM_PACKAGES" not in environ
    need(not managed, "a virtual environment (this Python is the system's)", "python3 -m venv .venv")
    if "MPI" in wanted.operations:
        mpi = program("mpicxx") and program("mpirun")
        need(mpi, "MPI (mpicxx, mpirun)", apt="openmpi-bin libopenmpi-dev")
    if "NCCL" in wanted.operations:
        cuda = _cuda(environ, program("nvcc"))
        need(cuda, "the CUDA toolkit (nvcc)", "set HOROVOD_CUDA_HOME to its folder")
        need(_has_nccl(environ), "NCCL (nccl.h)", "set HOROVOD_NCCL_HOME to its folder", apt="libnccl-dev")
        use |= {"HOROVOD_CUDA_HOME": cuda}
    if missing:
        installs = [f"apt-get install {' '.join(packages)}"] if packages else []
        fix = "; ".join(dict.fromkeys([*installs, *fixes]))
        raise UserError(f"Horovod cannot be built without {', '.join(missing)}", fix)
    return Tools(path, use)


def _output(command: list[str], path: str = "", text: str = "") -> str:
    """Returns what a program prints; empty if it cannot run or fails."""
    try:
        done = subprocess.run(
            [shutil.which(command[0], path=path or None) or command[0], *command[1:]],
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            env={**os.environ, "PATH": path} if path else None,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _cuda(environ: Mapping[str, str], nvcc: str) -> str:
    """Returns the folder of the CUDA toolkit; empty if there is none."""
    on_path = os.path.dirname(os.path.dirname(os.path.realpath(nvcc))) if nvcc else ""
    named = environ.get("HOROVOD_CUDA_HOME")
    places = (named,) if named else (environ.get("CUDA_HOME"), on_path, "/usr/local/cuda")
    return next((p for p in places if p and os.path.isfile(os.path.join(p, "bin", "nvcc"))), "")


def _has_nccl(environ: Mapping[str, str]) -> bool:
    """Returns whether NCCL's header is where Horovod looks for it."""
    home, include = environ.get("HOROVOD_NCCL_HOME"), environ.get("HOROVOD_NCCL_INCLUDE")
    named = (include, os.path.join(home, "include")) if home else (include,)
    places = (*named, "/usr/include", "/usr/local/include", "/usr/local/cuda/include")
    return any(os.path.isfile(os.path.join(place, "nccl.h")) for place in places if place)
