"""What tests of GPUs share: a real executable named nvidia-smi that answers as drivers do, and a module `pynvml` that
does. There is no GPU here.
"""

import os
import stat

import pytest

FOUR = """\
0, GPU-aaa, 90, 16000, 12000, 4000, 550.1, Tesla T4
1, GPU-bbb, 0, 16000, 10, 15990, 550.1, Tesla T4
2, GPU-ccc, 50, 16000, 8000, 8000, 550.1, Tesla T4
3, GPU-ddd, 5, 16000, 10, 15990, 550.1, Tesla T4
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Puts an `nvidia-smi` with the given shell body first on PATH."""

    def install(body):
        path = tmp_path / "bin" / "nvidia-smi"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
        return path.parent

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


PYNVML = """\
import collections, os, sys, time
NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_DRIVER_NOT_LOADED = 3, 9
NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_GPU_IS_LOST = 12, 15
nvmlMemory_v2 = 0x2000028
Memory, Rates = collections.namedtuple("Memory", "total used"), collections.namedtuple("Rates", "gpu memory")
GPUS = [("GPU-aaa", 90, 12000), ("GPU-bbb", 0, 10), ("GPU-ccc", 50, 8000), ("GPU-ddd", 5, 10)]
class NVMLError(Exception):
    def __init__(self, value):
        self.value = value
    def __str__(self):
        return f"error {self.value}"
def nvmlInit(): pass
def nvmlSystemGetDriverVersion(): return "550.1"
def nvmlDeviceGetCount(): return len(GPUS)
def nvmlDeviceGetHandleByIndex(i): return i
def nvmlDeviceGetUUID(i): return GPUS[i][0]
def nvmlDeviceGetName(i): return "Tesla T4"
def nvmlDeviceGetMemoryInfo(i, version=None): return Memory(16000 << 20, (GPUS[i][2] + (0 if version else 300)) << 20)
def nvmlDeviceGetUtilizationRates(i): return Rates(GPUS[i][1], 0)
"""
"""A module as `nvidia-ml-py` has it, with the GPUs of `FOUR`."""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Puts a `pynvml` first on Python's path: `PYNVML`, and then what is given."""

    def install(more=""):
        path = tmp_path / "lib" / "pynvml.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(PYNVML + more)
        monkeypatch.syspath_prepend(path.parent)

    return install


def printing(text, code=0):
    return f"cat <<'END'\n{text.rstrip()}\nEND\nexit {code}"
