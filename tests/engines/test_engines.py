"""Ray, KerasTuner, Optuna and KerasHub, in an environment of their own: `make engines`, which installs it."""

import os
import re
import tempfile

import keras
import numpy as np
import pytest
from conftest import REPOSITORY
from support import processes

ENVIRONMENT = REPOSITORY / ".venv-engines"
HERE = REPOSITORY / "tests/engines"
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not (ENVIRONMENT / "ready").exists(), reason="no .venv-engines: make engines"),
]
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?|-?\d+e-\d+")


def run(folder, tfds_dir, *words, **environ):
    """Runs the environment's Python to its end, in an empty folder; returns its output."""
    folder.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "TF_CONFIG")}
    env |= {"TFDS_DATA_DIR": str(tfds_dir), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY), **environ}
    pipes = dict(stdout=processes.PIPE, stderr=processes.PIPE, text=True, timeout=1200)
    done = processes.run([str(ENVIRONMENT / "bin/python"), *map(str, words)], cwd=folder, env=env, real=True, **pipes)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def results(output):
    """The lines of results that a script has printed, as text without their numbers, and the numbers."""
    lines = "\n".join(re.findall(r"^(?:\[0\] )?(result .*)", output, re.MULTILINE))
    return NUMBER.sub("#", lines), [float(number) for number in NUMBER.findall(lines)]


@pytest.fixture(scope="module")
def by_keras(tmp_path_factory, tfds_dir):
    """What a script prints by Keras alone, each run once."""
    known = {}

    def get(script):
        if script not in known:
            known[script] = results(run(tmp_path_factory.mktemp("keras") / "run", tfds_dir, HERE / script))
        return known[script]

    return get


@pytest.mark.parametrize("where", ["--virtual_devices=2", "--nproc_per_node=2"])
@pytest.mark.parametrize("script", ["tuners.py", "hub.py"])
def test_a_library_that_trains_with_keras_comes_out_as_with_keras(script, where, by_keras, tfds_dir, tmp_path):
    text, numbers = results(run(tmp_path / "run", tfds_dir, "-m", "tfdist", "run", where, HERE / script))
    expected_text, expected = by_keras(script)
    assert len(numbers) > 40 and text == expected_text
    np.testing.assert_allclose(numbers, expected, rtol=1e-5, atol=1e-5)


def test_a_worker_of_ray_that_is_killed_goes_on_with_the_weights_of_one_process(tfds_dir, tmp_path):
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:  # for names of sockets
        environ = {"RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
        path = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "examples", HERE)))
        output = run(tmp_path / "run", tfds_dir, "-m", "ray_killed", PYTHONPATH=path, **environ)
    ended = [(tmp_path / f"run/on{workers}.txt").read_text().split(maxsplit=1) for workers in (1, 2)]
    weights = [keras.models.load_model(f"{folder}/model.keras").get_weights() for _, folder in ended]
    for one, both in zip(*weights, strict=True):
        np.testing.assert_allclose(one, both, rtol=0, atol=1e-6)
    np.testing.assert_allclose(*(float(loss) for loss, _ in ended), rtol=1e-6)
    notes = [(tmp_path / f"run/runs/on2/rank{rank}.txt").read_text().split() for rank in (0, 1)]
    secrets = [list(dict.fromkeys(each[2::3])) for each in notes]
    assert secrets[0] == secrets[1] and [len(secret) for secret in secrets[0]] == [32, 32], "one for each start"
    pids, updates = notes[1][::3], [int(update) for update in notes[1][1::3]]
    begin = pids.count(pids[0])
    assert updates[:begin] == list(range(1, 16)) and updates[begin:] == list(range(updates[begin], 47))
    assert 1 < updates[begin] <= 16 and f"resuming after update {updates[begin] - 1} from" in output
