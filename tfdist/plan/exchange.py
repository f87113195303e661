"""What a sum over workers costs this machine, measured with two workers and no network between them. No TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.launch.notebook import launch
from tfdist.plan import exchange_probe
from tfdist.plan.cost import MessageWork, crossings


def measure(threads: int, dtypes: Sequence[str]) -> dict[str, MessageWork]:
    """Starts two workers that sum tensors over the ring, and returns what that costs each of them, by type.

    Args:
      threads: of each worker.
      dtypes: types in which tensors travel.

    Raises:
      TrainingError: they have failed.
    """
    return works(
        launch(exchange_probe.samples, "ring", threads, tuple(dtypes), nproc=2, show=False)[0].sums,
        messages=crossings(2),
    )


def measure_in_memory(threads: int, dtypes: Sequence[str]) -> dict[str, MessageWork] | None:
    """Does the same in the memory of this machine; returns None where its workers cannot share any."""
    samples = launch(exchange_probe.samples, "auto", threads, tuple(dtypes), nproc=2, show=False)[0]
    return works(samples.sums, messages=1) if samples.communication == "shared memory" else None


def works(samples: Sequence[Mapping[str, Any]], messages: int) -> dict[str, MessageWork]:
    """Returns the cost of a message by type, from sums of two workers, who send each other as many bytes as there are.

    Args:
      messages: of a sum that follow each other.
    """
    found = {}
    for dtype in dict.fromkeys(sample["dtype"] for sample in samples):
        own = sorted((s for s in samples if s["dtype"] == dtype), key=lambda s: s["bytes"])
        least, most = own[0], own[-1]
        size = most["bytes"] - least["bytes"]
        found[dtype] = MessageWork(
            step_seconds=least["seconds"] / messages,
            byte_seconds=max(0.0, most["seconds"] - least["seconds"]) / size,
        )
    return found
