"""Choosing GPUs, as a driver lists them."""

import math
import os
import signal
import subprocess

import pytest
from support.nvidia_drivers import FOUR, printing

from tfdist.distributed import child_process, gpus
from tfdist.errors import UserError

pytest_plugins = ("support.nvidia_drivers",)  # its fixture


def test_four_gpus(driver):
    driver(printing("\n".join(reversed(FOUR.splitlines()))))
    found = gpus.survey()
    assert [g.number for g in found.gpus] == [0, 1, 2, 3]
    assert found.gpus[2] == gpus.DriverGPU(2, "GPU-ccc", "Tesla T4", 0.5, 8000, 16000, "550.1")
    assert found.problem == ""


def test_no_driver(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert gpus.survey() == gpus.Survey()


@pytest.mark.parametrize("body, problem", [
    (printing("NVIDIA-SMI has failed because it could not communicate with the driver.", 9),
     "failed with code 9: NVIDIA-SMI has"),
    (printing("Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost."),
     "is not a GPU: Unable to determine"),
    (printing("No devices were found"), ""),
    (printing("No devices were found", 6), "failed with code 6: No devices were found"),
    ("exit 127", "failed with code 127: no message"),
    ("printf '\\033[2J\\t<b>%4000d\\n%4000d' 1 2; exit 9", r"nvidia-smi failed with code 9: \x1b[2J <b> 1; 2"),
    ("printf '\\033[2J\\n'; seq 4000", r"is not a GPU: \x1b[2J; 1; 2; 3; 4; "),
])  # fmt: skip
def test_a_failing_driver_is_a_reason_and_no_crash(driver, body, problem):
    driver(body)
    found = gpus.survey()
    assert found.gpus == ()
    assert problem in found.problem and len(found.problem) < 250
    assert bool(problem) == bool(found.problem)


def test_a_driver_that_cannot_even_be_killed_is_given_up(driver, monkeypatch):
    """As a process that waits within the kernel; `subprocess.run` waits for it until it ends."""
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

        def kill(self):
            pass

    driver("exec sleep 60")
    monkeypatch.setattr(child_process.subprocess, "Popen", Popen)
    monkeypatch.setattr(child_process, "_KILL_S", 0.1)
    assert gpus.survey(timeout=0.2).problem == "nvidia-smi gave no answer within 0.2 s"
    (process,) = started
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_one_dead_gpu_does_not_hide_the_others(driver):
    lines = FOUR.splitlines()
    lines[1] = "Unable to determine the device handle for gpu 0000:5E:00.0: Unknown Error"
    driver(printing("\n".join(lines)))
    found = gpus.survey()
    assert [g.number for g in found.gpus] == [0, 2, 3]
    assert "Unknown Error" in found.problem


def test_idle_takes_the_least_used(driver):
    driver(printing(FOUR))
    selection = gpus.select("idle:2", gpus.survey(), {})
    assert selection.visible == "1,3"
    assert selection.describe() == "driver 1 (Tesla T4) -> GPU:0, driver 3 (Tesla T4) -> GPU:1"


@pytest.mark.parametrize(
    "line", ["1, GPU-bbb, [N/A], [N/A], [N/A], [N/A], 550.1, Tesla T4", "1, GPU-bbb, 0, 0, 0, 0, 550.1, Tesla T4"]
)
def test_idle_takes_what_the_driver_does_not_tell_of_last(driver, line):
    lines = FOUR.splitlines()
    lines[1] = line
    driver(printing("\n".join(lines)))
    found = gpus.survey()
    assert math.isnan(found.gpus[1].load) or found.gpus[1].memory_total == 0
    assert gpus.select("idle:1", found, {}).visible == "3"
    assert gpus.select("idle:4", found, {}).visible == "0,1,2,3"


@pytest.mark.parametrize("devices, environ, visible", [
    ("all", {}, "0,1,2,3"), ("0,3", {}, "0,3"), ("3,0", {}, "3,0"), ("none", {}, "-1"),
    ("all", {"CUDA_VISIBLE_DEVICES": "2,1"}, "2,1"), ("all", {"CUDA_VISIBLE_DEVICES": "GPU-ccc,GPU-aaa"}, "2,0"),
    ("1", {"CUDA_VISIBLE_DEVICES": "2,1"}, "1"), ("idle:1", {"CUDA_VISIBLE_DEVICES": "0,2"}, "2"),
    ("all", {"CUDA_VISIBLE_DEVICES": ""}, "-1"), ("all", {"CUDA_VISIBLE_DEVICES": "-1"}, "-1"),
    ("all", {"CUDA_VISIBLE_DEVICES": "1,9,2"}, "1"),  # as CUDA does: the list ends where it is wrong
])  # fmt: skip
def test_selection(driver, devices, environ, visible):
    driver(printing(FOUR))
    assert gpus.select(devices, gpus.survey(), environ).visible == visible


def test_mig_slices_are_left_alone(driver):
    driver(printing(FOUR))
    selection = gpus.select("all", gpus.survey(), {"CUDA_VISIBLE_DEVICES": "MIG-123"})
    assert selection.opaque and selection.visible is None


@pytest.mark.parametrize("devices, environ, message", [
    ("4", {}, "there is no device 4: the driver lists 0, 1, 2, 3"),
    ("0,3", {"CUDA_VISIBLE_DEVICES": "0"}, "device 3 is hidden by CUDA_VISIBLE_DEVICES=0: unset it"),
    ("idle:5", {}, "idle:5 asks for 5 GPUs, found 4: ask for fewer"),
    ("0", {"CUDA_VISIBLE_DEVICES": "MIG-123"}, "cannot be combined with CUDA_VISIBLE_DEVICES=MIG-123"),
])  # fmt: skip
def test_impossible_selections(driver, devices, environ, message):
    driver(printing(FOUR))
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        gpus.select(devices, gpus.survey(), environ)


def test_unlike_gpus_numbered_fastest_first_are_not_guessed_at(driver):
    driver(printing(FOUR.replace("550.1, Tesla T4", "550.1, H100", 1)))
    with pytest.raises(UserError, match="set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name them by UUID"):
        gpus.select("all", gpus.survey(), {"CUDA_VISIBLE_DEVICES": "0"})


def test_idle_with_a_failing_driver(driver):
    driver("exit 9")
    with pytest.raises(UserError, match="idle:2 needs the driver's list of GPUs: nvidia-smi failed with code 9"):
        gpus.select("idle:2", gpus.survey(), {})


def test_training_stops_when_tensorflow_sees_none_of_the_drivers_gpus(driver, run):
    """TensorFlow really looks here, and finds none."""
    folder = driver(printing(FOUR))
    done = run("tfdist.train", PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 2
    assert done.stderr.startswith("tfdist: error: the driver lists 4 usable GPUs (Tesla T4) and TensorFlow sees 0")
    assert done.stderr.rstrip().endswith("or train on the CPU with --strategy=default --devices=none")
    assert done.stderr.count("\n") == 1


@pytest.mark.whole
def test_training_on_the_cpu_of_a_gpu_machine_when_asked_for(driver, run):
    folder = driver(printing(FOUR))
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    fast = ["--config.model.name=mlp", "--config.train.epochs=1", "--config.optimizer.warmup=0%"]
    done = run("tfdist.train", "--strategy=default", "--devices=none", *fast, PATH=path)
    assert done.returncode == 0, done.stderr
    done = run("tfdist.train", "--virtual_devices=2", *fast, PATH=path)
    assert done.returncode == 0, done.stderr
