"""The doctor's checks of GPUs, packages and workers, one by one: each is made to fail for real, and to pass."""

import json
import os
import shutil
import sys
import threading
import time

import psutil
import pytest
from support.doctor_findings import of, one
from support.nvidia_drivers import FOUR, printing

from tfdist.config.runtime_options import PlacementOptions
from tfdist.distributed import gpus, horovod_install
from tfdist.doctor import check as check_lib
from tfdist.doctor import machine, tensorflow_probe, workers
from tfdist.errors import UserError

pytest_plugins = ("support.nvidia_drivers",)  # its fixture

GPUS = tuple(gpus.parse_line(line) for line in FOUR.splitlines())
TF_CONFIG = {"cluster": {"chief": ["a:1"], "worker": ["b:2", "c:3"]}, "task": {"type": "worker", "index": 0}}

# -- many at once ---------------------------------------------------------------


def test_a_task_that_hangs_or_breaks_does_not_take_the_others_with_it():
    def refuse():
        raise UserError("--x=1 is wrong", "use 2")

    tasks = [
        check_lib.Check("hangs", threading.Event().wait, "pull the plug"),
        check_lib.Check("breaks", lambda: 1 / 0),
        check_lib.Check("refuses", refuse),
        check_lib.Check("works", lambda: [check_lib.ok("yes")]),
    ]
    hangs, breaks, refuses, works = check_lib.run(tasks, time.monotonic() + 0.5)
    assert (hangs.status, hangs.fix) == ("warn", "pull the plug") and "no answer within" in hangs.finding
    assert (
        breaks.status == "warn" and "this check itself failed (ZeroDivisionError: division by zero)" in breaks.finding
    )
    assert (refuses.status, refuses.finding, refuses.fix) == ("fail", "--x=1 is wrong", "use 2")
    assert works.status == "ok"
    assert check_lib.worst([works, hangs]) == "warn" and check_lib.worst([hangs, refuses]) == "fail"
    assert check_lib.worst([]) == "ok"


def test_what_others_say_cannot_move_the_cursor():
    check = check_lib.warn("a\x1b[2Jb\nc", "d\x07")
    assert (check.finding, check.fix) == ("a?[2Jb c", "d?")


# -- GPUs -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, status, text",
    [
        (printing(FOUR), "ok", "4 GPUs, driver 550.1"),
        (printing(FOUR.replace("90, 16000, 12000, 4000", "[N/A], [N/A], [N/A], [N/A]")), "warn",
         "does not tell load or memory of GPU 0"),
        (printing(FOUR.replace("1, GPU-bbb, 0,", "Unable to determine the device handle")), "warn",
         "3 GPUs, driver 550.1; nvidia-smi said"),
        (printing("NVIDIA-SMI has failed because it could not communicate with the driver.", 9), "fail",
         "failed with code 9: NVIDIA-SMI has"),
        ("exec sleep 1000", "fail", "nvidia-smi gave no answer within 0.3 s"),
        (printing("No devices were found"), "ok", "no NVIDIA GPU here"),
    ],
)  # fmt: skip
def test_driver(driver, body, status, text):
    driver(body)
    one(tensorflow_probe.driver(gpus.survey(timeout=0.3 if "sleep" in body else 30)), status, text)


@pytest.fixture(scope="module")
def answer():
    """What the TensorFlow that is installed here says."""
    return tensorflow_probe.ask({k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}, 240)


@pytest.mark.parametrize(
    "said, environ, status, text, fix",
    [
        (dict(gpus=("T4",) * 4), {}, "ok", "sees 4 GPUs", ""),
        (dict(gpus=("T4",) * 2), {"CUDA_VISIBLE_DEVICES": "0,3"}, "warn", "CUDA_VISIBLE_DEVICES=0,3 hides GPU 1, 2",
         "unset CUDA_VISIBLE_DEVICES"),
        (dict(gpus=("T4",)), {"CUDA_VISIBLE_DEVICES": "MIG-1"}, "ok", "sees 1 of the slices", ""),
        (dict(cuda=""), {}, "fail", "sees 0 of 4 usable GPUs: this wheel was built without CUDA",
         "pip uninstall -y tensorflow-cpu"),
        (dict(said=("Cannot dlopen some GPU libraries.",)), {}, "fail", "CUDA's libraries do not load",
         "pip install 'tfdist[cuda]'"),
        (dict(said=("CUDA driver version is insufficient for CUDA runtime version",)), {}, "fail",
         "the driver is too old", "update the driver"),
        (dict(said=("failed call to cuInit: CUDA_ERROR_UNKNOWN",)), {}, "fail", "CUDA does not start",
         "nvidia-modprobe"),
        (dict(said=("Could not find cuda drivers on your machine",)), {}, "fail", "libcuda.so.1 is not found",
         "--gpus all"),
        (dict(said=("something new",)), {}, "fail", "something new", "pip install"),
        (dict(), {}, "fail", "it does not say why", "pip install"),
    ],
)  # fmt: skip
def test_why_tensorflow_does_not_see_them(said, environ, status, text, fix):
    given = tensorflow_probe.Answer(**{"version": "2.21.0", "keras": "3.15.1", "cuda": "12.5.1", **said})
    one(tensorflow_probe.tensorflow(given, gpus.Survey(GPUS), environ), status, text, fix)


def test_unlike_gpus_numbered_fastest_first():
    mixed = (*GPUS[:3], gpus.parse_line("3, GPU-ddd, 5, 16000, 10, 15990, 550.1, H100"))
    environ = {"CUDA_VISIBLE_DEVICES": "0"}
    checks = tensorflow_probe.tensorflow(tensorflow_probe.Answer("2.21.0", "3.15.1"), gpus.Survey(mixed), environ)
    one(checks, "fail", "counts unlike GPUs fastest first", "set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    assert tensorflow_probe.names(tensorflow_probe.Answer(gpus=("x",)), gpus.Survey(mixed), environ) == {}


@pytest.mark.parametrize(
    "code, status, text, fix",
    [
        ("raise ImportError('numpy has moved')", "fail", "cannot be imported (ImportError: numpy has moved)",
         "pip install --force-reinstall"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "fail", "ended with SIGILL: this processor lacks",
         "use another machine"),
        ("import threading; threading.Event().wait()", "warn", "no answer from TensorFlow within 2 s",
         "--time_limit=60"),
    ],
)  # fmt: skip
def test_a_tensorflow_that_does_not_start(code, status, text, fix, tmp_path):
    (tmp_path / "tensorflow.py").write_text(code)
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    given = tensorflow_probe.ask(environ, 2 if status == "warn" else 60)
    one(tensorflow_probe.tensorflow(given, gpus.Survey(), {}), status, text, fix)
    assert not [p for p in psutil.Process().children() if "tfdist.doctor.tensorflow_probe" in p.cmdline()]


# -- packages -------------------------------------------------------------------


def installed(folder, name, version, requires=()):
    """What pip leaves of a package."""
    made = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    made.mkdir()
    lines = [
        "Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires),
    ]  # fmt: skip
    (made / "METADATA").write_text("\n".join(lines) + "\n")


def test_two_wheels_of_tensorflow(tmp_path, monkeypatch):
    installed(tmp_path, "tensorflow-tpu", "2.19.1")
    monkeypatch.syspath_prepend(tmp_path)
    fix = "pip uninstall -y tensorflow tensorflow-tpu, then pip install the one"
    one(machine.conflicts(), "fail", "and tensorflow-tpu 2.19.1 write over each other", fix)


def test_a_keras_that_is_too_new_and_another_that_is_missing(tmp_path, monkeypatch):
    installed(tmp_path, "tfdist", "0.1.0", ["keras<4,>=3.10", "tensorflow<2.22", "rich; extra == 'x'", "psutil"])
    installed(tmp_path, "keras", "4.0.0")
    installed(tmp_path, "tensorflow-cpu", "2.21.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    keras, missing = machine.conflicts()
    one([keras], "fail", "keras 4.0.0 is installed, tfdist needs keras<4,>=3.10", "pip install 'keras<4,>=3.10'")
    one([missing], "fail", "psutil is not installed", "pip install 'psutil'")
    assert machine.versions()["tensorflow-cpu"] == "2.21.0"


def test_a_tfdist_that_pip_does_not_know(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    one(machine.conflicts(), "warn", "tfdist is not installed by pip", "pip install -e .")


@pytest.mark.parametrize(
    "environ, file, status, text, fix",
    [
        ({}, None, "ok", "on TensorFlow", ""),
        ({"KERAS_BACKEND": "jax"}, None, "fail", "KERAS_BACKEND says that Keras runs on jax", "unset KERAS_BACKEND"),
        ({}, '{"backend": "torch"}', "fail", "keras.json says that Keras runs on torch",
         'write "backend": "tensorflow"'),
        ({"KERAS_BACKEND": "tensorflow"}, '{"backend": "torch"}', "ok", "on TensorFlow", ""),
        ({}, "no JSON", "ok", "on TensorFlow", ""),
        ({}, "[" * 100_000, "ok", "on TensorFlow", ""),
        ({"TF_USE_LEGACY_KERAS": "1"}, None, "warn", "old Keras 2", "unset TF_USE_LEGACY_KERAS"),
    ],
)  # fmt: skip
def test_what_keras_runs_on(environ, file, status, text, fix, tmp_path):
    if file:
        (tmp_path / "keras.json").write_text(file)
    one(machine.backend({"KERAS_HOME": str(tmp_path), **environ}), status, text, fix)


def test_horovod(tmp_path, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "horovod"
    (folder / "tensorflow").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "tensorflow" / f"mpi_lib{horovod_install.python()}").write_text("")
    one(machine.horovod(needed=True), "ok", "was built for this TensorFlow")
    (folder / "metadata.json").write_text('{"tensorflow": "2.10.0"}')
    one(machine.horovod(needed=True), "fail", "built for TensorFlow 2.10.0", "python -m tfdist.horovod_build")
    one(machine.horovod(needed=False), "warn", "only --strategy=horovod minds", "python -m tfdist.horovod_build")
    shutil.rmtree(folder)
    installed(tmp_path, "tensorflow", "2.21.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    one(machine.horovod(needed=False), "ok", "Horovod is not installed, which only --strategy=horovod would need")
    one(machine.horovod(needed=True), "fail", "Horovod is not installed", "python -m tfdist.horovod_build")


# -- workers and strategy -------------------------------------------------------


def place(environ=None, gpus_here=(), **environment):
    return workers.find(PlacementOptions(**environment), gpus.Survey(gpus_here), environ or {})


def test_a_strategy_that_cannot_run_here():
    found = place(strategy="mirrored")
    one(of(found.findings, "strategy"), "fail", "needs at least 2 devices", "use --virtual_devices=2 to split the CPU")
    assert found.choice is None and found.others["default"] == "it would run"
    assert found.others["auto"] == "it would pick default, because 1 CPU here"
    found = place(gpus_here=GPUS, devices="7")
    one(of(found.findings, "strategy"), "fail", "there is no device 7", "")
    found = place({"TPU_NAME": "local"})
    text = "default, because 1 CPU here; not tpu, though TPU_NAME says that there is one: TensorFlow 2"
    one(of(found.findings, "strategy"), "ok", text)


def test_tf_config_is_explained():
    found = place({"TF_CONFIG": json.dumps(TF_CONFIG)})
    text = "this is worker 1 of 3 by TF_CONFIG; they meet at a:1; in order of rank: a:1, b:2, c:3"
    one(of(found.findings, "workers"), "ok", text)
    one(of(found.findings, "open ports"), "warn", "listens on all interfaces without authentication", "private network")
    one(of(found.findings, "secret"), "fail", "connect to a:1 without a secret", "set TFDIST_SECRET to the same")
    assert not of(place({"TF_CONFIG": json.dumps(TF_CONFIG)}, insecure=True).findings, "secret")
    assert found.choice.name == "multi_worker" and "there are 3 workers (TF_CONFIG)" in found.others["default"]
