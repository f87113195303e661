"""Which CPU kernels TensorFlow is asked for, and which it takes."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import training_cases

import tfdist
from tfdist.checkpoints import training_run
from tfdist.config import cpu_kernels
from tfdist.errors import UserError

OTHER = {"onednn": "eigen", "eigen": "onednn"}
HERE = cpu_kernels.in_use()
TAKEN = [("auto", None, "onednn"), ("auto", "0", "eigen"), ("eigen", None, "eigen"), ("onednn", "0", "onednn")]


@pytest.fixture
def avx2(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "cpu_flags", lambda: {"avx2"})


@pytest.mark.parametrize("kernels, value, asked", [
    ("auto", None, "1"),
    ("auto", "", "1"),
    ("auto", "0", "0"),
    ("auto", "False", "False"),
    ("auto", "1", "1"),
    ("eigen", "1", "0"),
    ("onednn", "0", "1"),
])  # fmt: skip
def test_what_is_asked_for(avx2, kernels, value, asked):
    environ = {} if value is None else {cpu_kernels.VARIABLE: value}
    cpu_kernels.ask_for(kernels, environ)
    assert environ == {cpu_kernels.VARIABLE: asked}
    assert cpu_kernels.wanted(environ) == ("onednn" if asked == "1" else "eigen")


def test_a_cpu_without_avx2_is_left_to_tensorflow(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "cpu_flags", set)
    environ = {}
    cpu_kernels.ask_for("auto", environ)
    assert environ == {}


CONNECTED = """
import sys, {first} tfdist
from tfdist.config import cpu_kernels
tfdist.connect("default", **{options})
print(cpu_kernels.in_use())
"""


@pytest.mark.whole
@pytest.mark.parametrize("kernels, variable, taken", TAKEN)
def test_what_tensorflow_takes(kernels, variable, taken):
    if "avx2" not in cpu_kernels.cpu_flags():
        pytest.skip("this CPU has no AVX2")
    environ = {k: v for k, v in os.environ.items() if k != cpu_kernels.VARIABLE}
    environ |= {} if variable is None else {cpu_kernels.VARIABLE: variable}
    program = CONNECTED.format(first="", options={"cpu_kernels": kernels})
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == taken
    assert "oneDNN custom operations" not in done.stderr


@pytest.mark.whole
def test_tensorflow_imported_before_keeps_its_kernels_and_that_is_said():
    if "avx2" not in cpu_kernels.cpu_flags():
        pytest.skip("this CPU has no AVX2")
    if "avx512_vnni" in cpu_kernels.cpu_flags():
        pytest.skip("TensorFlow itself takes oneDNN's kernels on this CPU")
    environ = {k: v for k, v in os.environ.items() if k != cpu_kernels.VARIABLE}
    program = CONNECTED.format(first="tensorflow,", options={})
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "eigen"
    assert "TensorFlow was imported before tfdist.connect()" in done.stdout + done.stderr


def test_the_other_kind_comes_too_late():
    message = f"^cpu_kernels={OTHER[HERE]} cannot be had: .* set TF_ENABLE_ONEDNN_OPTS={int(HERE == 'eigen')} before"
    with pytest.raises(UserError, match=message):
        tfdist.connect("default", cpu_kernels=OTHER[HERE])


def test_nan_is_not_lost_in_a_relu(connect):
    """As oneDNN's fused kernels lose it: neither data nor weights that are NaN would be seen in the loss."""
    assert connect(1)
    ones, bias = tf.ones((3, 3, 1, 2)), tf.zeros(2)
    images = tf.fill((2, 8, 8, 1), np.nan)
    dense = tf.function(lambda x: tf.nn.relu(tf.nn.bias_add(x @ tf.ones((8, 2)), bias)))
    convolution = tf.function(lambda x: tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, ones, 1, "SAME"), bias)))
    assert np.isnan(dense(tf.reshape(images, (16, 8)))).all() and np.isnan(convolution(images)).all()


@pytest.mark.whole
def test_a_resume_with_other_kernels_says_so(connect, said, tmp_path, monkeypatch):
    def fit(epochs):
        model = training_cases.compiled(keras.Sequential([keras.Input((2,)), keras.layers.Dense(5)]))
        kept = tfdist.Checkpoints(tmp_path, every="1 epoch")
        options = {"epochs": epochs, "verbose": 0, "check_agreement": "off", "checkpoints": kept}
        tfdist.fit(model, np.ones((4, 2), np.float32), np.ones(4), distribution=connect(1), **options)
        return [line for line in said if "--cpu_kernels" in line]

    assert fit(1) == fit(2) == []
    monkeypatch.setattr(training_run.cpu_kernels, "in_use", lambda: OTHER[HERE])
    told = f"the checkpoint was made with --cpu_kernels={HERE} and this run has {OTHER[HERE]}"
    assert fit(3) == [f"{told}: it goes on, and agrees to rounding"]


@pytest.mark.whole
def test_a_run_tells_its_kernels_and_keeps_them(run, tmp_path):
    """As `environment.json` and the state of a checkpoint."""
    done = run("tfdist.train", "--config.train.epochs=1", "--workdir=here", "--cpu_kernels=eigen", real=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "here/environment.json").read_text())["cpu_kernels"] == "eigen"
    (state,) = (tmp_path / "here/checkpoints").glob("*/state.json")
    assert json.loads(state.read_text())["cpu_kernels"] == "eigen"
