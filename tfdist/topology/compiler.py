"""Has a program compiled for devices that are not here, in a process of the compilers' own environment. No TensorFlow.

That environment is made on demand in a cache folder, and never in the user's.
"""

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfdist.config import local_files
from tfdist.config.messages import logger
from tfdist.distributed import child_process
from tfdist.errors import TrainingError, UserError, one_line
from tfdist.topology.known import Topology

if TYPE_CHECKING:
    from tfdist.topology.program import Program

LIMIT_S = 3600.0  # seconds for one compilation; a deep network takes minutes on two slow cores
_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_BITS = {"pred": 8, "bf16": 16}


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """What a compiler says of an update, for one device; all zero but `needs` where it gave up for want of memory."""

    needs: int  # bytes at one time, the sum of the next four
    arguments: int = 0
    temporaries: int = 0
    outputs: int = 0  # which take no argument's place
    code: int = 0
    seconds: float = 0.0
    flops: float = 0.0  # of the compiled update; 0 where the compiler does not count
    traffic: float = 0.0  # bytes from and to the device's memory; 0 where the compiler does not count
    all_reduces: int = 0
    exchanged: int = 0  # bytes of a replica that go through all-reduces


def compiled(program: "Program", topology: Topology) -> Compiled:
    """Compiles a program for a topology of as many devices as the program has replicas."""
    interpreter = python(topology.compilers, f"--topology={topology.name}")
    with tempfile.TemporaryDirectory(prefix="tfdist-topology-") as folder:
        path = pathlib.Path(folder, "program.mlir")
        path.write_text(program.text)
        work = {**dataclasses.asdict(topology), "program": str(path), "aliases": program.aliases}
        words = [str(interpreter), "-s", str(pathlib.Path(__file__).with_name("compile_child.py"))]
        # In a folder of its own: the TPU compiler may leave files.
        done = child_process.answer(words, LIMIT_S, json.dumps(work), cwd=folder)
    if done is None:
        raise TrainingError(f"the compiler for {topology.name} took more than {LIMIT_S:g} s")
    lines = done.stdout.splitlines()
    if not lines:
        said = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        ended = f"exit code {done.returncode}: {said[0][:300] if said else 'no message'}"
        raise TrainingError(f"the compiler for {topology.name} ended without an answer ({ended})")
    return understood(json.loads(lines[-1]), topology)


def understood(answer: dict[str, Any], topology: Topology) -> Compiled:
    """Reads what the child has answered."""
    if error := answer.get("error"):
        if "RESOURCE_EXHAUSTED" not in error and "Ran out of memory" not in error:
            raise UserError(f"the compiler for {topology.name} cannot compile this update: {one_line(error, 400)}")
        used = re.search(r"[Uu]sed ([\d.]+)([BKMGT]?) of", error)
        return Compiled(needs=max(int(float(used[1]) * _UNITS[used[2]]) if used else 0, topology.memory + 1))
    memory = answer["memory"]
    parts = memory["argument"], memory["temp"], max(0, memory["output"] - memory["alias"]), memory["generated_code"]
    counted = answer["seconds"], answer["flops"], answer["traffic"]
    return Compiled(sum(parts), *parts, *counted, *all_reduces(answer["all_reduces"]))


def all_reduces(lines: Sequence[str]) -> tuple[int, int]:
    """Returns how many all-reduces there are in lines of HLO, and the bytes that go through them.

    A line is like `%a = (f32[3]{0}, f32[2,2]{1,0}) all-reduce(%b, %c), replica_groups=...`. Where an all-reduce starts
    in one instruction and is done in another, the first one counts.
    """
    number = total = 0
    for line in lines:
        if found := re.search(r"= (.*?) all-reduce(?:-start)?\(", line):
            number += 1
            # A layout such as {1,0:T(8,128)} has no [..] in it.
            for dtype, sides in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", found[1]):
                bits = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype) or 8)
                total += math.prod(int(side) for side in sides.split(",") if side) * bits // 8
    return number, total


KINDS = ("tpu", "cuda")
PLACE = "TFDIST_TOPOLOGY"  # the environment variable that names another folder than the one below the user's cache
INSTALL_LIMIT_S = 3600.0  # seconds of waiting for another installation: half a gigabyte comes over the network


def requirements(kind: str) -> pathlib.Path:
    """Returns the file that pins the packages of an environment, with their digests."""
    return pathlib.Path(__file__).with_name(f"{kind}.txt")


def folder(kind: str) -> pathlib.Path:
    """Returns where an environment is or would be; other pins make another folder."""
    digest = hashlib.sha256(requirements(kind).read_bytes()).hexdigest()[:12]
    return pathlib.Path(os.environ.get(PLACE) or local_files.cache("topology")).absolute() / f"{kind}-{digest}"


def is_there(kind: str) -> bool:
    """Whether an environment is complete."""
    return (folder(kind) / "ready").exists()


def python(kind: str, asker: str) -> pathlib.Path:
    """Returns the interpreter of an environment, for a flag that needs it; raises `UserError` where there is none."""
    if not is_there(kind):
        fix = f"run python -m tfdist.topology --install={kind}"
        raise UserError(f"{asker} needs the compilers for {kind}, which are not installed", fix)
    return folder(kind) / "bin" / "python"


def install(kind: str) -> str:
    """Makes an environment unless it is there; returns what is there, in words."""
    place = folder(kind)
    if is_there(kind):
        return f"the compilers for {kind} are already in {place}"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = place.with_suffix(".lock")
        lock.touch()
    except OSError as error:
        what = f"{place.parent} cannot be written ({error.strerror})"
        raise UserError(what, f"set {PLACE} to another folder") from None
    with local_files.locked(lock, f"another installation in {place}", INSTALL_LIMIT_S):
        if is_there(kind):  # somebody else's, after a wait
            return f"the compilers for {kind} are already in {place}"
        logger.info(f"installing the compilers for {kind} in {place}")
        shutil.rmtree(place, ignore_errors=True)  # of an installation that was ended
        if _run(sys.executable, "-m", "venv", "--without-pip", place):
            raise UserError(f"{sys.executable} cannot make a virtual environment", "install its venv module")
        pip = (sys.executable, "-m", "pip", "--python", place / "bin" / "python", "--no-input")
        pinned = ("--require-hashes", "--only-binary", ":all:", "--requirement", requirements(kind))
        if _run(*pip, "install", "--disable-pip-version-check", *pinned):
            needs = (
                f"Linux on x86_64, a network and Python 3.11 or newer, which may be another one with the same {PLACE}"
            )
            raise UserError(f"pip cannot install the compilers for {kind}: they need {needs}")
        if _run(place / "bin" / "python", "-c", "import jax"):
            raise TrainingError(f"the compilers for {kind} do not run: what they say is above")
        (place / "ready").touch()
    return f"the compilers for {kind} are in {place}"


def _run(*arguments: object) -> int:
    """Runs a program to its end on this terminal; returns its exit code."""
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    return subprocess.run([str(word) for word in arguments], env=environ, stdin=subprocess.DEVNULL).returncode
