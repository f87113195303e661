"""What a build of Horovod needs from the machine: found, or missing in one line with the fix. No TensorFlow."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping

from tfdist.distributed.horovod_install import Build
from tfdist.errors import UserError

PLACES = (
    "HOROVOD_BUILD_ARCH_FLAGS", "HOROVOD_BUILD_CUDA_CC_LIST", "HOROVOD_CUDA_HOME",
    "HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB", "HOROVOD_NCCL_LINK",
)  # fmt: skip
"""Horovod's own variables that say where things are and for which processor, not what to build."""

_FLAGS = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CUDAFLAGS", *PLACES)
_EXTRA = "pip install 'tfdist[horovod]'"


@dataclasses.dataclass(frozen=True, slots=True)
class Tools:
    """The programs of a build."""

    path: str
    environ: Mapping[str, str]  # variables that make Horovod's build use the programs that were found
    identity: tuple[str, ...]  # what the binary depends on: machine, versions and flags


def find(wanted: Build, environ: Mapping[str, str] = os.environ) -> Tools:
    """Returns the programs that the build needs; raises one `UserError` that names all that are missing."""
    # The cmake of the extra lies beside the interpreter, which need not be on PATH.
    path = os.pathsep.join([sysconfig.get_path("scripts"), environ.get("PATH", os.defpath)])
    need = _Needs(path)
    use = {
        "CXX": environ.get("CXX") or need.program("c++", "g++", "clang++"),
        "CC": environ.get("CC") or need.program("cc", "gcc", "clang"),
        "HOROVOD_CMAKE": environ.get("HOROVOD_CMAKE") or need.program("cmake"),
    }
    text = "#include <string_view>\n#if __cplusplus < 201703L\n#error\n#endif\nstd::string_view tfdist_says_yes;\n"
    preprocess = [*shlex.split(use["CXX"]), "-std=c++17", "-E", "-x", "c++", "-"]
    need.check(use["CXX"] and "tfdist_says_yes" in _output(preprocess, path, text), "a C++17 compiler", apt="g++")
    need.check(use["CC"], "a C compiler", apt="gcc")
    need.check(need.program("make"), "make", apt="make")
    cmake = re.search(r"version (\d+)\.(\d+)", _output([use["HOROVOD_CMAKE"], "--version"]))
    need.check(cmake and (int(cmake[1]), int(cmake[2])) >= (3, 13), "cmake 3.13 or newer", _EXTRA)
    need.check(importlib.util.find_spec("pip"), "pip", "python -m ensurepip")
    need.check(wanted.tensorflow.version, "TensorFlow", "pip install tensorflow")
    marker = pathlib.Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")  # pip refuses to install: PEP 668
    managed = sys.prefix == sys.base_prefix and marker.exists() and "PIP_BREAK_SYSTEM_PACKAGES" not in environ
    need.check(not managed, "a virtual environment (this Python is the system's)", "python3 -m venv .venv")
    words: list[str] = []
    with contextlib.suppress(OSError):
        words = pathlib.Path("/proc/cpuinfo").read_text(errors="replace").split()
    identity = [
        "-".join([platform.machine(), *platform.libc_ver()]),
        # Horovod is compiled for these: a processor without them stops at an illegal instruction.
        *(feature for feature in ("avx", "f16c", "fma") if feature in words),
        _output([*shlex.split(use["CXX"]), "-dumpversion"]).split(".")[0],
    ]
    if "MPI" in wanted.operations:
        mpi = need.program("mpicxx") and need.program("mpirun")
        need.check(mpi, "MPI (mpicxx, mpirun)", apt="openmpi-bin libopenmpi-dev")
        identity += [_output(["mpicxx", "-show"], path), _output(["mpirun", "--version"], path)]
    if "NCCL" in wanted.operations:
        cuda, nccl = _cuda(environ, need), _nccl(environ)
        need.check(cuda, "the CUDA toolkit (nvcc)", "set HOROVOD_CUDA_HOME to its folder")
        need.check(nccl, "NCCL (nccl.h)", "set HOROVOD_NCCL_HOME to its folder", apt="libnccl-dev")
        use |= {"HOROVOD_CUDA_HOME": cuda}
        identity += [_output([os.path.join(cuda, "bin", "nvcc"), "--version"]), nccl]
    need.complain()
    identity += [f"{name}={environ.get(name, '')}" for name in _FLAGS]
    return Tools(path, use, tuple(identity))


class _Needs:
    """What is missing, collected so that one line tells all."""

    def __init__(self, path: str):
        self._path = path
        self._missing: list[str] = []
        self._packages: list[str] = []
        self._fixes: list[str] = []

    def program(self, *names: str) -> str:
        """Returns the path of the first of these programs that is there; empty if there is none."""
        return next(filter(None, (shutil.which(name, path=self._path) for name in names)), "")

    def check(self, there: object, what: str, fix: str = "", apt: str = "") -> None:
        """Notes what is missing unless it is there; a command or hint, or Debian's packages, help."""
        if there:
            return
        self._missing.append(what)
        self._packages += [apt] if apt else []
        self._fixes += [fix] if fix else []

    def complain(self) -> None:
        """Raises UserError where anything is missing."""
        if self._missing:
            apt = [f"apt-get install {' '.join(self._packages)}"] if self._packages else []
            fixes = "; ".join(dict.fromkeys([*apt, *self._fixes]))
            raise UserError(f"Horovod cannot be built without {', '.join(self._missing)}", fixes)


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


def _cuda(environ: Mapping[str, str], need: _Needs) -> str:
    """Returns the folder of the CUDA toolkit; empty if there is none."""
    nvcc = need.program("nvcc")
    on_path = os.path.dirname(os.path.dirname(os.path.realpath(nvcc))) if nvcc else ""
    named = environ.get("HOROVOD_CUDA_HOME")
    places = (named,) if named else (environ.get("CUDA_HOME"), on_path, "/usr/local/cuda")
    return next((p for p in places if p and os.path.isfile(os.path.join(p, "bin", "nvcc"))), "")


def _nccl(environ: Mapping[str, str]) -> str:
    """Returns the version lines of NCCL's header; empty if there is none."""
    home, include = environ.get("HOROVOD_NCCL_HOME"), environ.get("HOROVOD_NCCL_INCLUDE")
    places = (include, home and os.path.join(home, "include"), "/usr/include", "/usr/local/include")
    for place in (*places, "/usr/local/cuda/include"):
        header = pathlib.Path(place or "/nonexistent", "nccl.h")
        if header.is_file():
            return " ".join(re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH) \d+", header.read_text(errors="replace")))
    return ""
