"""The scripts of `examples/` end on two devices with the result that plain Keras ends with."""

import importlib.util
import os
import re
import sys

import numpy as np
import pytest
from conftest import REPOSITORY
from support import processes

ENVIRONMENT = REPOSITORY / ".venv-engines"
EXAMPLES = REPOSITORY / "examples"
ELSEWHERE = ("ray_train",)  # tests/engines
ENGINES = ("keras_hub_lora", "log_to_mlflow", "log_to_wandb", "tune_with_keras_tuner")
ONE_DEVICE = {"image_classification": ["--virtual_replicas=2"], "image_folder": []}
"""Those that draw masks or an order which Keras draws otherwise: compared with one device, with these flags."""
DISTANCE = {"variational_autoencoder": 0.05}  # each replica draws noise of its own, as with another seed
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
names = sorted({path.stem for path in EXAMPLES.glob("*.py")}.difference(ELSEWHERE))
skip = pytest.mark.skipif(not (ENVIRONMENT / "ready").exists(), reason="no .venv-engines: make engines")
marks = lambda name: [pytest.mark.engines, skip] if name in ENGINES else [pytest.mark.whole]


def result(name, folder, *command):
    """Runs an example in an empty folder; returns its last line without numbers, and the numbers."""
    python = ENVIRONMENT / "bin/python" if name in ENGINES else sys.executable
    path = os.pathsep.join(map(str, (REPOSITORY, EXAMPLES)))
    env = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "WANDB_SILENT": "true"}
    folder.mkdir()
    words = [str(python), *command, str(EXAMPLES / f"{name}.py")]
    if name == "csv_table":
        words = [*words[:-1], f"--config={words[-1]}"]
    pipes = dict(stdout=processes.PIPE, stderr=processes.PIPE, text=True, timeout=600)
    done = processes.run(words, cwd=folder, env=env, real=True, **pipes)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    last = (re.findall("evaluation: .*", done.stdout + done.stderr) or done.stdout.splitlines())[-1]
    return NUMBER.sub("#", last), [float(number) for number in NUMBER.findall(last)]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in names])
def test_an_example_ends_on_two_devices_as_on_one(name, tmp_path):
    if name == "grain_data" and importlib.util.find_spec("grain") is None:
        pytest.skip("Grain needs Python 3.11")
    how = ["-m", "tfdist", "train" if name == "csv_table" else "run", *ONE_DEVICE.get(name, [])]
    text, numbers = result(name, tmp_path / "both", *how, "--virtual_devices=2")
    expected = result(name, tmp_path / "keras", *([*how, "--strategy=default"] if name == "csv_table" else []))
    assert len(numbers) > 1 and text == expected[0]
    if name in ONE_DEVICE:
        expected = result(name, tmp_path / "one", *how, "--strategy=default")
    np.testing.assert_allclose(numbers, expected[1], rtol=DISTANCE.get(name, 1e-3))


def test_the_examples_are_short_and_listed():
    listed = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted([*names, *ELSEWHERE])
    for name in names:
        lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
        assert len(lines) < 60 and f"examples/{name}.py" in "\n".join(lines[:6]).replace("config=", "config=examples/")
