"""Whether this TensorFlow has code for these GPUs, and CUDA's libraries that load. No TensorFlow."""

from __future__ import annotations

import contextlib
import ctypes
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tfdist.distributed import child_process, gpus
from tfdist.doctor.check import Finding, fail, ok, warn
from tfdist.errors import UserError, one_line

_SONAMES = {
    "12": ("libcudart.so.12", "libcublas.so.12", "libcublasLt.so.12", "libcufft.so.11", "libcusolver.so.11",
           "libcusparse.so.12"),
    "13": ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13", "libcufft.so.12", "libcusolver.so.12",
           "libcusparse.so.12"),
}  # fmt: skip
"""Libraries that TensorFlow loads before it lists a GPU, by CUDA's major version: without one of them it sees none."""


class Capability(NamedTuple):
    """Compute capability of a GPU, such as 8.9."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


def capabilities(timeout: float = gpus.TIMEOUT_S) -> dict[int, Capability]:
    """Asks the driver for the compute capability of each GPU, by its number; drivers before 2021 do not tell."""
    command = ["nvidia-smi", "--query-gpu=index,compute_cap", "--format=csv,noheader"]
    told = ""
    with contextlib.suppress(OSError):
        done = child_process.answer(command, timeout)
        told = done.stdout if done else ""
    found = re.findall(r"^\s*(\d{1,4}),\s*(\d{1,3})\.(\d{1,3})\s*$", told, re.MULTILINE)
    return {int(number): Capability(int(major), int(minor)) for number, major, minor in found}


def code(built_for: Sequence[str], survey: gpus.Survey, found: Mapping[int, Capability]) -> list[Finding]:
    """Checks whether TensorFlow was built for the GPUs that the driver lists, with their capabilities as far as known.

    Code for 8.0 (`sm_80`) runs on 8.9, too, but not on 9.0. An intermediate form (`compute_90`) can be compiled for all
    later ones when the program starts, which within a generation is a matter of course, but for GPUs of the next one
    takes half an hour, and often ends with an error.
    """
    matches = [match for text in built_for if (match := re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", text))]
    versions = [(match[1], Capability(int(match[2]), int(match[3]))) for match in matches]
    if not versions:
        return []
    known = ", ".join(map(str, sorted({version for _, version in versions})))
    none: list[str] = []
    later: list[str] = []
    for gpu in survey.gpus:
        mine = found.get(gpu.number)
        if mine is None or any(mine.major == v.major and mine >= v for _, v in versions):
            continue
        state = later if any(kind == "compute" and mine >= v for kind, v in versions) else none
        state.append(f"GPU {gpu.number} ({gpu.name}, compute capability {mine})")
    others = "or train on other GPUs with --devices"
    checks = []
    if none:
        what = f"this TensorFlow has no code for {few(none)}: it was built for {known}"
        checks.append(fail(what, f"use a TensorFlow built for it, {others}"))
    if later:
        what = (
            f"{few(later)} is newer than this TensorFlow, which was built for {known}: it compiles its "
            "code at the start, for half an hour or more, or ends with CUDA_ERROR_INVALID_PTX"
        )
        fix = f"use a newer TensorFlow, tf-nightly or NVIDIA's container, {others}"
        checks.append(warn(what, fix))
    return checks or ([ok(f"this TensorFlow was built for {known}")] if found else [])


def few(names: Sequence[str]) -> str:
    """Names the first three of many."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# -- libraries, asked in the process that has TensorFlow ---------------------------------


def needed(cuda: str, cudnn: str) -> tuple[str, ...]:
    """Returns the names of the libraries that TensorFlow loads; none for a CUDA that nobody has looked at."""
    names = _SONAMES.get(cuda.partition(".")[0], ())
    major = cudnn.partition(".")[0]
    return (*names, f"libcudnn.so.{major}") if names and major.isdigit() else names


def pip_folders(paths: Iterable[str] | None = None) -> list[pathlib.Path]:
    """Returns where pip puts CUDA's libraries, beside TensorFlow, which looks there first."""
    places = sys.path if paths is None else paths
    return [folder for place in places for folder in sorted(pathlib.Path(place).glob("nvidia/*/lib"))]


def unloadable(names: Iterable[str], folders: Sequence[pathlib.Path]) -> tuple[str, ...]:
    """Loads each library by name, as TensorFlow does, and returns those that do not, each with the reason.

    They may be in these folders besides the system's own places and LD_LIBRARY_PATH.
    """
    problems = []
    for name in names:
        there = [folder / name for folder in folders if (folder / name).exists()]
        reason = ""
        for path in [*map(str, there), name]:
            try:
                ctypes.CDLL(path)
                reason = ""
                break
            except OSError as error:
                reason = reason or one_line(error, 160)
        if reason:
            missing = "No such file" in reason and not there
            problems.append(f"{name} (not found)" if missing else f"{name} ({reason.removeprefix(name + ': ')})")
    return tuple(problems)


def usable(survey: gpus.Survey, environ: Mapping[str, str]) -> gpus.Survey:
    """Returns the GPUs that this process may use: what is hidden needs no code."""
    with contextlib.suppress(UserError):
        return gpus.Survey(gpus.select("all", survey, environ).gpus)
    return survey
