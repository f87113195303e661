"""Samples a process' CPU, memory and GPU usage beside the training. No TensorFlow."""

from __future__ import annotations

import math
import resource
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import psutil

from tfdist.distributed import gpus

EVERY_S = 5.0  # seconds between two samples; nvidia-smi alone takes a tenth of one


# `cpu` in busy cores, `memory` in bytes, and `gpus`, each with its `number` in the driver, `load`, the share of time in
# which it is busy, and `memory_used` and `memory_total` in MiB: None for what the driver does not report.
Sample: TypeAlias = dict[str, Any]


def peak_memory() -> int:
    """Returns the peak resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Usage:
    """Samples cores, memory and the GPUs of these driver numbers in a thread, so that a slow driver delays nothing."""

    def __init__(self, numbers: tuple[int, ...], survey: Callable[[], gpus.Survey] = gpus.survey):
        self._numbers, self._survey = numbers, survey
        self._process = psutil.Process()
        self._latest: Sample = {"cpu": 0.0, "memory": 0, "gpus": []}
        self._over = threading.Event()
        self._process.cpu_percent()  # the next one is over the time since this one

    def start(self) -> None:
        self._sample()
        if self._numbers:
            threading.Thread(target=self._watch, name="tfdist usage", daemon=True).start()

    def latest(self) -> Sample:
        """Returns the newest sample."""
        if not self._numbers:
            self._sample()  # two files of /proc
        return self._latest.copy()

    def stop(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            self._sample()

    def _sample(self) -> None:
        known = lambda value: None if math.isnan(value) else value
        fields = ("number", "load", "memory_used", "memory_total")
        samples = [
            {field: known(getattr(gpu, field)) for field in fields}
            for gpu in (self._survey().gpus if self._numbers else ())
            if gpu.number in self._numbers
        ]
        memory = self._process.memory_info().rss
        self._latest = {"cpu": self._process.cpu_percent() / 100, "memory": memory, "gpus": samples}
