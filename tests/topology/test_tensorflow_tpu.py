"""What TensorFlow for TPUs does here, where there is no TPU: `make topology-check`, which installs it."""

import pytest
from conftest import REPOSITORY
from support import processes

FOR_TPUS = REPOSITORY / ".venv-tpu/bin/python"
pytestmark = [
    pytest.mark.topology,
    pytest.mark.skipif(not FOR_TPUS.exists(), reason="no tensorflow-tpu: make topology-check"),
]


@pytest.fixture
def train(tmp_path):
    def run(*arguments, **environ):
        command = [str(FOR_TPUS), "-m", "tfdist.train", "--config=digits_mlp", "--config.train.epochs=1", *arguments]
        keep = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
        return processes.run(
            command, cwd=tmp_path, env=keep | environ, capture_output=True, text=True, timeout=120, real=True
        )

    return run


def test_a_tpu_that_is_asked_for_is_refused_in_one_line(train):
    done = train("--strategy=tpu")
    assert done.returncode == 2 and not done.stdout, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("tfdist: error: --tpu=local cannot be used: TensorFlow finds no TPU here: choose a runtime")


def test_auto_trains_on_the_cpu_where_a_variable_tells_of_a_tpu(train):
    done = train(TPU_NAME="local", TPU_SKIP_MDS_QUERY="1")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "WARNING: --tpu=local cannot be used: TensorFlow finds no TPU here" in said
    assert "not tpu, though TPU_NAME says that there is a TPU: it has not started" in said


def test_without_a_sign_nothing_is_said_of_a_tpu(train):
    done = train()
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "TPU" not in said and "strategy default" in said, said
