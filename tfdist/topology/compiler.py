"""Has a program compiled for devices that are not here, in a process of the compilers' own environment."""

import dataclasses
import json
import math
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfdist.distributed.child_process import end_with_the_parent
from tfdist.errors import TrainingError, UserError, one_line
from tfdist.topology import environment
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
    interpreter = environment.python(topology.compilers, f"--topology={topology.name}")
    with tempfile.TemporaryDirectory(prefix="tfdist-topology-") as folder:
        path = pathlib.Path(folder, "program.mlir")
        path.write_text(program.text)
        work = {**dataclasses.asdict(topology), "program": str(path), "aliases": program.aliases}
        try:
            done = subprocess.run(
                [str(interpreter), "-s", str(pathlib.Path(__file__).with_name("compile_child.py"))],
                input=json.dumps(work).encode(),
                capture_output=True,
                timeout=LIMIT_S,
                cwd=folder,  # the TPU compiler may leave files
                preexec_fn=end_with_the_parent(),
            )
        except subprocess.TimeoutExpired:
            raise TrainingError(f"the compiler for {topology.name} took more than {LIMIT_S:g} s") from None
    lines = done.stdout.decode(errors="replace").splitlines()
    if not lines:
        said = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()][-1:]
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
