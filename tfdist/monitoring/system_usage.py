"""What a process takes of its machine, looked at beside the training. No TensorFlow."""

from __future__ import annotations

import math
import resource
import threading
from collections.abc import Callable
from typing import TypedDict

import psutil

from tfdist.distributed import gpus

EVERY_S = 5.0
"""Seconds between two looks; nvidia-smi alone takes a tenth of one."""


class GpuSample(TypedDict):
    """What one GPU does at a moment; None for what its driver does not tell."""

    number: int
    """Its number in the driver."""
    load: float | None
    """Share of the time in which it is busy, in [0, 1]."""
    memory_used: float | None
    """MiB."""
    memory_total: float | None
    """MiB."""


class Sample(TypedDict):
    """What a process takes of its machine at a moment."""

    cpu: float
    """Cores that are busy with it."""
    memory: int
    """Bytes."""
    gpus: list[GpuSample]


def peak_memory() -> int:
    """Returns the most bytes that this process has held in the machine's memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Usage:
    """Samples cores, memory and GPUs in a thread of its own, so that a driver that is slow holds nothing up.

    Args:
      numbers: GPUs to look at, as the driver numbers them.
      survey: asks the driver.
    """

    def __init__(self, numbers: tuple[int, ...], survey: Callable[[], gpus.Survey] = gpus.survey):
        self._numbers, self._survey = numbers, survey
        self._process = psutil.Process()
        self._latest: Sample = {"cpu": 0.0, "memory": 0, "gpus": []}
        self._over = threading.Event()
        self._process.cpu_percent()  # the next one is over the time since this one
        self._thread = threading.Thread(target=self._watch, name="tfdist usage", daemon=True)

    def start(self) -> None:
        self._look()
        if self._numbers:
            self._thread.start()

    def latest(self) -> Sample:
        """Returns the newest sample."""
        if not self._numbers:
            self._look()  # two files of /proc
        return self._latest.copy()

    def stop(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            self._look()

    def _look(self) -> None:
        gpus_there = self._survey().gpus if self._numbers else ()
        self._latest = {
            "cpu": self._process.cpu_percent() / 100,
            "memory": self._process.memory_info().rss,
            "gpus": [
                {
                    "number": g.number,
                    "load": _known(g.load),
                    "memory_used": _known(g.memory_used),
                    "memory_total": _known(g.memory_total),
                }
                for g in gpus_there
                if g.number in self._numbers
            ],
        }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
