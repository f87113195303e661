"""A folder of 20,000 JPEGs: the memory of a run does not grow with the files, and the training does not wait for them.

`make faults` runs it; it takes minutes.
"""

import importlib.util
import json
import os
import pathlib
import sys

import pytest
from conftest import REPOSITORY
from support import processes

pytestmark = pytest.mark.faults

ALLOWED_MB = 80
"""Decoded, 20,000 images of 64x64 would be 246 MB."""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Folders of few and of many pictures."""
    spec = importlib.util.spec_from_file_location("made_pictures", REPOSITORY / "benchmarks" / "made_pictures.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return {count: made.make(tmp_path_factory.mktemp("pictures"), count) for count in (2_000, 20_000)}


def trained(root, updates, out, *flags):
    """Peak of resident memory in MB, and the result, of a run of the command."""
    command = [
        sys.executable, "-m", "tfdist.train", f"--config.data.name=image_folder:{root}", f"--workdir={out}",
        "--config.data.train_split=train[200:]", "--config.data.eval_split=train[:200]", "--config.data.image_size=64",
        "--config.model.name=conv_bn", "--config.model.options=channels=(16, 32)", "--config.train.batch_size=64",
        "--config.train.epochs=0", f"--config.train.steps={updates}", "--config.optimizer.warmup=5%",
        "--strategy=default", "--progress=none", *flags,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with open(f"{out}.log", "w") as log:
        process = processes.Popen(command, env=env, stdout=log, stderr=log, real=True)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, pathlib.Path(f"{out}.log").read_text()
    return usage.ru_maxrss / 1024, json.loads((out / "result.json").read_text())


def test_memory_and_waiting(pictures, tmp_path, capsys):
    updates = -(-19_800 // 64)
    few, _ = trained(pictures[2_000], updates, tmp_path / "few", "--config.data.cache=stream")
    many, result = trained(pictures[20_000], updates, tmp_path / "many", "--config.data.cache=stream")
    share = result["time"]["input"] / sum(result["time"].values())
    with capsys.disabled():
        speed = f"{result['examples_per_second']:,.0f} examples/s"
        print(f"\n2,000 JPEGs: {few:,.0f} MB; 20,000: {many:,.0f} MB, input {100 * share:.1f} % of the time, {speed}")
    assert many - few < ALLOWED_MB
    assert share < 0.2
    assert result["evaluation"]["accuracy"] > 0.9


def test_the_comparison_can_fail(pictures, tmp_path):
    """Held in memory, they are seen."""
    few, _ = trained(pictures[2_000], 5, tmp_path / "few", "--config.data.cache=stream")
    held, _ = trained(pictures[20_000], 5, tmp_path / "held", "--config.data.cache=memory")
    assert held - few > ALLOWED_MB
