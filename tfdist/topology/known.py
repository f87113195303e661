"""The topologies that `--topology` knows: how many devices of which kind, and what one of them has. No TensorFlow."""

import dataclasses
import json
import pathlib
import re
import string
from typing import Any

from tfdist.config import field_syntax
from tfdist.errors import UserError

MOST_GPUS = 8  # GPUs of one machine; `multi_worker` compiles the program of one of them, which this does not describe
_TARGET = string.Template(pathlib.Path(__file__).with_name("gpu_target.txt").read_text())
GPUS: dict[str, dict[str, Any]] = json.loads(pathlib.Path(__file__).with_name("gpus.json").read_text())
"""What XLA's compiler asks of a GPU, from NVIDIA's data sheets and its table of compute capabilities, by the name that
stands before the number of them: `name` as the driver gives it; bytes of `memory` that a program can use, and of the
second-level `cache`; `cores`, streaming multiprocessors, each with `units` of float32, at most so many `threads`, and
bytes of `shared` memory, of which a block can have 1 kB less; bytes per second from its memory (`bandwidth`) and to the
other GPUs of a machine, one way (`link`: NVLink, or PCIe where there is none); `clock` in GHz, boosted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """Devices of one kind, of which each is a replica."""

    name: str
    compilers: str  # which environment compiles for it: `tpu` or `cuda`
    replicas: int
    device: str  # one of them, in words
    memory: int  # bytes of one of them
    shape: str  # what the compiler calls the whole, such as `v5e:2x4`
    bandwidth: float  # bytes per second from the memory of one
    link: float  # bytes per second from one to the others
    flops: float | None = None
    """FLOP/s of one at most, in bfloat16, as a TPU multiplies float32, too; None for a GPU, where precision decides."""
    target: str = ""  # a GPU, as XLA describes it


_ROWS = json.loads(pathlib.Path(__file__).with_name("tpus.json").read_text())
TPUS = {name: Topology(name, "tpu", **row) for name, row in _ROWS.items()}
"""TPUs of one host, by Google Cloud's names, of which v5p-8 counts cores, two of a device; from its data sheets."""


def find(name: str) -> Topology:
    """Returns a topology by its name; raises `UserError` where there is none."""
    if name in TPUS:
        return TPUS[name]
    match = re.fullmatch(r"(.+?)x([1-9]\d*)", name)
    gpu = GPUS.get(match[1]) if match else None
    if match is None or gpu is None or int(match[2]) > MOST_GPUS:
        hint = field_syntax.suggest(name, (*TPUS, *(f"{gpu}x{MOST_GPUS}" for gpu in GPUS)))
        raise UserError(f"unknown --topology={name}{hint}, where a GPU's number goes from x1 to x{MOST_GPUS}")
    size, (major, minor) = int(match[2]), gpu["capability"]
    numbers = gpu | {"bandwidth": int(gpu["bandwidth"]), "optin": gpu["shared"] - 1024}
    target = _TARGET.substitute(numbers, major=major, minor=minor)
    of_one = gpu["name"], gpu["memory"], f"1x1x{size}", gpu["bandwidth"], gpu["link"]
    return Topology(name, "cuda", size, *of_one, target=target)
