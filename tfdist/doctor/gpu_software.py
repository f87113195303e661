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
from tfdist.doctor.check import Check, fail, ok, warn
from tfdist.errors import UserError, one_line

_SONAMES = {
    "12": ("libcudart.so.12", "libcublas.so.12", "libcublasLt.so.12", "libcufft.so.11", "libcusolver.so.11",
           "libcusparse.so.12"),
    "13": ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13", "libcufft.so.12", "libcusolver.so.12",
           "libcusparse.so.12"),
}  # fmt: skip
"""Libraries that TensorFlow loads before it lists a GPU, by CUDA's major version: without one of them it sees none."""
_FEW = 3
"""Libraries that a message names."""


class Capability(NamedTuple):
    """Compute capability of a GPU, such as 8.9."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


def capabilities(timeout: float = gpus.TIMEOUT_S) -> dict[int, Capability]:
    """Asks the driver for the compute capability of each GPU, by its number; drivers before 2021 do not tell."""
    command = ["nvidia-smi", "--query-gpu=index,compute_cap", "--format=csv,noheader"]
    try:
        done = child_process.answer(command, timeout)
    except OSError:
        return {}
    if done is None:
        return {}
    found = re.findall(r"^\s*(\d{1,4}),\s*(\d{1,3})\.(\d{1,3})\s*$", done.stdout, re.MULTILINE)
    return {int(number): Capability(int(major), int(minor)) for number, major, minor in found}


def code(built_for: Sequence[str], survey: gpus.Survey, found: Mapping[int, Capability]) -> list[Check]:
    """Checks whether TensorFlow was built for these GPUs.

    Code for 8.0 (`sm_80`) runs on 8.9, too, but not on 9.0. An intermediate form (`compute_90`) can be compiled for all
    later ones when the program starts, which within a generation is a matter of course, but for GPUs of the next one
    takes half an hour, and often ends with an error.

    Args:
      built_for: what TensorFlow says of itself.
      survey: which GPUs the driver lists.
      found: their capabilities, as far as the driver tells.
    """
    made = {kind: _versions(built_for, kind) for kind in ("sm", "compute")}
    if not made["sm"] and not made["compute"]:
        return []
    known = ", ".join(map(str, sorted({*made["sm"], *made["compute"]})))
    by_state: dict[str, list[str]] = {"later": [], "none": []}
    for gpu in survey.gpus:
        mine = found.get(gpu.number)
        if mine is None or any(mine.major == v.major and mine >= v for v in (*made["sm"], *made["compute"])):
            continue
        state = "later" if any(mine >= v for v in made["compute"]) else "none"
        by_state[state].append(f"GPU {gpu.number} ({gpu.name}, compute capability {mine})")
    others = "or train on other GPUs with --devices"
    checks = []
    if by_state["none"]:
        what = f"this TensorFlow has no code for {few(by_state['none'])}: it was built for {known}"
        checks.append(fail("gpu code", what, f"use a TensorFlow built for it, {others}"))
    if by_state["later"]:
        what = (
            f"{few(by_state['later'])} is newer than this TensorFlow, which was built for {known}: it compiles its "
            "code at the start, for half an hour or more, or ends with CUDA_ERROR_INVALID_PTX"
        )
        fix = f"use a newer TensorFlow, tf-nightly or NVIDIA's container, {others}"
        checks.append(warn("gpu code", what, fix))
    return checks or ([ok("gpu code", f"this TensorFlow was built for {known}")] if found else [])


def _versions(built_for: Iterable[str], kind: str) -> list[Capability]:
    found = [re.fullmatch(rf"{kind}_(\d+)(\d)[a-z]?", text) for text in built_for]
    return [Capability(int(match[1]), int(match[2])) for match in found if match]


def few(names: Sequence[str]) -> str:
    """Names the first few of many."""
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(names[:_FEW]) + more


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

    Args:
      folders: where they may be besides the system's own places and LD_LIBRARY_PATH.
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
