"""What a sum over workers costs this machine, measured with two workers and no network between them. No TensorFlow."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.distributed.child_process import end_with_the_parent
from tfdist.distributed.job import env_vars
from tfdist.errors import TrainingError
from tfdist.plan.cost import UpdateWork

_LIMIT_S = 300.0
_SAID = re.compile(r"tfdist: (?:error|failed): (.+)")


def measure(threads: int, dtypes: Sequence[str]) -> dict[str, UpdateWork]:
    """Starts two workers that sum tensors, and returns what that costs each of them, by type.

    Args:
      threads: of each worker.
      dtypes: types in which tensors travel.

    Raises:
      TrainingError: they have failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "samples.json"
        words = ["--nproc_per_node=2", "--", "-m", "tfdist.plan.exchange_probe", str(path), str(threads), *dtypes]
        # Importing all of tfdist here and there takes the same folder: `-m` looks in the current one.
        paths = [entry for entry in sys.path if entry]
        environ = env_vars.without(os.environ, env_vars.CLUSTER) | {"PYTHONPATH": os.pathsep.join(paths)}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tfdist.launch", *words],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_LIMIT_S,
                preexec_fn=end_with_the_parent(),
            )
        except subprocess.TimeoutExpired:
            raise TrainingError(f"two workers that sum tensors here were not done after {_LIMIT_S:.0f} s") from None
        if done.returncode or not path.exists():
            said = _SAID.findall(done.stdout)
            why = said[-1] if said else f"exit code {done.returncode}"
            raise TrainingError(f"two workers that sum tensors here have failed: {why}")
        return works(json.loads(path.read_text()))


def works(samples: Sequence[Mapping[str, Any]]) -> dict[str, UpdateWork]:
    """Returns the cost of a message by type, from sums of two workers: two steps, and as many bytes as there are."""
    found = {}
    for dtype in dict.fromkeys(sample["dtype"] for sample in samples):
        own = sorted((s for s in samples if s["dtype"] == dtype), key=lambda s: s["bytes"])
        least, most = own[0], own[-1]
        size = most["bytes"] - least["bytes"]
        found[dtype] = UpdateWork(
            step_seconds=least["seconds"] / 2,
            byte_seconds=max(0.0, most["seconds"] - least["seconds"]) / size,
        )
    return found
