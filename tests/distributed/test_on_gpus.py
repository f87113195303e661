"""Real GPUs train as Keras does on the CPU; skipped where there is none, as on the machines of CI."""

import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY

pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(
        not shutil.which("nvidia-smi") or subprocess.run(["nvidia-smi"], capture_output=True).returncode != 0,
        reason="no GPU here",
    ),
]


@pytest.mark.parametrize("precision,bound", [("float64", 1e-12), ("float32", 1e-6)])
@pytest.mark.parametrize("name", ["mlp", "convolutions", "gpt", "lstm"])
def test_a_gpu_trains_as_keras_on_the_cpu(tmp_path, name, precision, bound):
    ends = {}
    for world in ("keras", "one", "two"):
        child = [sys.executable, REPOSITORY / "tests" / "support" / "gpu_world.py", world, name, precision]
        done = subprocess.run([*child, tmp_path / world], capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-2000:]
        ends[world] = np.load(tmp_path / f"{world}.npz")
    size = np.linalg.norm(ends["keras"]["after"])
    assert np.linalg.norm(ends["keras"]["after"] - ends["keras"]["before"]) / size > 0.01  # it has learned
    for world in ("one", "two"):
        np.testing.assert_array_equal(ends[world]["before"], ends["keras"]["before"])
        assert np.linalg.norm(ends[world]["after"] - ends["keras"]["after"]) / size < bound
        np.testing.assert_allclose(ends[world]["losses"], ends["keras"]["losses"], rtol=100 * bound)
