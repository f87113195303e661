"""`python -m tfdist.doctor`, run as a person runs it."""

import json
import os
import pathlib
import re
import signal
import time
import uuid

import psutil
import pytest
from support import many_commands, network_hosts
from support.nvidia_drivers import FOUR, printing

from tfdist.checkpoints import files

pytest_plugins = "support.nvidia_drivers"  # its fixtures


@pytest.fixture
def no_tensorflow(tmp_path):
    """A folder that, first on PYTHONPATH, makes the import of TensorFlow fail at once."""
    (tmp_path / "poison").mkdir()
    (tmp_path / "poison" / "tensorflow.py").write_text("raise ImportError('tensorflow was imported')\n")
    return str(tmp_path / "poison")


def saved(folder, *updates):
    """Checkpoints as a run writes them, with little in them."""

    def tensors(prefix):
        pathlib.Path(f"{prefix}.index").write_bytes(b"tensors")

    for update in updates:
        place = {"update": update, "epoch": update // 10, "begun": update % 10}
        state = {"position": place, "best": {}, "run": {}, "replicas": 1, "strategy": "default", "experiment": {}}
        state |= {"callbacks": {}, "history": {}, "epochs": []}
        files.write(folder / "checkpoints", update, state, tensors)
    return folder


def found(done):
    """The checks of `--json`, by name."""
    return {c["name"]: c for c in json.loads(done.stdout)["checks"]}


BAD_INPUT = [
    (["--wokdir=x"], "unknown flag --wokdir: did you mean --workdir=x?"),
    (["--progress=none"], "unknown flag --progress"),
    (["here"], "unexpected argument 'here': flags are written --name=value"),
    (["--strategy=mirored"], "flag --strategy=mirored: value should be one of"),
    (["--config.data.nam=x"], "unknown config field --config.data.nam: did you mean 'name'?"),
    (["--time_limit=0"], "--time_limit must be a positive number of seconds, got 0"),
    (["--master_port=65536"], "--master_port=65536 is not a port: use a number from 1 to 65535"),
]  # fmt: skip


def test_wrong_flags(tmp_path):
    many_commands.refuses("tfdist.doctor", BAD_INPUT, tmp_path)


def test_all_is_well(run, tmp_path, port):
    """With the real TensorFlow, on whatever machine this is; and nothing is changed."""
    folder = saved(tmp_path / "run", 10, 25)
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")}
    done = run("tfdist.doctor", "--workdir=run", f"--master_port={port}", "--time_limit=200")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("host ") and any(line.startswith("strategy ") for line in lines)
    assert any(re.match(r"ok    tensorflow: TensorFlow 2\.\d+\.\d+ with Keras 3\.", line) for line in lines)
    assert f"ok    port {port}: free on all interfaces" in lines
    ours = [line for line in lines if line.startswith("ok    checkpoint: ")]
    assert ours[0].startswith("ok    checkpoint: run/checkpoints/25: after 2 epochs and 5 updates, ")
    assert ours[0].endswith(" <- a resume goes on from here") and "resume" not in ours[1]
    assert not any(line.startswith("fail") for line in lines)
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")} == before
    assert folder.exists()


@pytest.mark.whole
def test_gpus_that_tensorflow_does_not_see(run, driver, tmp_path, no_tensorflow):
    folder = driver(printing(FOUR.replace("90, 16000, 12000", "[N/A], 16000, 12000")))
    environ = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    done = run("tfdist.doctor", "--json", path=no_tensorflow, **environ)
    assert (done.returncode, done.stderr) == (2, "")
    report = json.loads(done.stdout)
    assert (report["status"], report["strategy"]["name"]) == ("fail", "mirrored")
    assert [(g["number"], g["load"], g["memory_used"], g["tensorflow"]) for g in report["gpus"]] == [
        (0, None, 12000, None),
        (1, 0, 10, None),
        (2, 0.5, 8000, None),
        (3, 0.05, 10, None),
    ]
    assert (
        found(done)["tensorflow"]["finding"] == "TensorFlow cannot be imported (ImportError: tensorflow was imported)"
    )
    plain = run("tfdist.doctor", path=no_tensorflow, **environ).stdout.splitlines()
    assert "GPU 0: Tesla T4, 12,000 of 16,000 MiB used, load ? %, driver 550.1, TensorFlow did not answer" in plain
    cpu = run("tfdist.doctor", "--json", "--strategy=default", "--devices=none", path=no_tensorflow, **environ)
    assert json.loads(cpu.stdout)["strategy"]["reason"] == "asked for"


def test_a_damaged_checkpoint(run, tmp_path, no_tensorflow):
    folder = saved(tmp_path / "run", 10, 20)
    state = folder / "checkpoints" / "20" / "state.json"
    state.write_bytes(state.read_bytes()[:-1] + b" ")
    done = run("tfdist.doctor", "--workdir=run", "--json", path=no_tensorflow)
    newest, older = (c for c in json.loads(done.stdout)["checks"] if c["name"] == "checkpoint")
    assert (
        newest["status"] == "fail" and "run/checkpoints/20: state.json has changed: its checksum" in newest["finding"]
    )
    assert newest["fix"] == "a resume leaves it out" and older["status"] == "ok"
    assert [(f["update"], f["next"]) for f in json.loads(done.stdout)["checkpoints"]] == [(20, False), (10, True)]
    (folder / "checkpoints" / "10" / "manifest.json").write_text("{}")
    done = run("tfdist.doctor", "--workdir=run", path=no_tensorflow)
    assert done.returncode == 2 and done.stdout.count("fix: none is left: copy one back, or start over with") == 2


@pytest.mark.whole
def test_folders_without_checkpoints(run, tmp_path, no_tensorflow):
    (tmp_path / "file").write_text("")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "checkpoints").write_text("")
    for folder, status, text in [
        ("nowhere/yet", "ok", "there are none in nowhere/yet/checkpoints"),
        ("odd", "fail", "odd/checkpoints cannot be read (Not a directory)"),
    ]:
        done = run("tfdist.doctor", f"--workdir={folder}", "--json", path=no_tensorflow)
        check = found(done)["checkpoints"]
        assert (check["status"], check["finding"]) == (status, text)
    assert found(done)["disk"]["status"] != "fail"
    done = run("tfdist.doctor", "--workdir=file/below", "--json", path=no_tensorflow)
    assert "is a file" in found(done)["disk"]["finding"] and done.returncode == 2


@pytest.mark.whole
def test_the_block_for_a_bug_report_names_nobody(run, tmp_path, no_tensorflow):
    home = tmp_path / "home" / "alice"
    folder = saved(home / "run", 10)
    (folder / "checkpoints" / "10" / "state.json").unlink()
    environ = {"HOME": str(home), "LOGNAME": "alice", "TFDIST_SECRET": "hushhush", "KERAS_BACKEND": "alice"}
    environ["TF_CONFIG"] = '{"cluster": {"hushhush": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
    done = run("tfdist.doctor", f"--workdir={folder}", path=no_tensorflow, **environ)
    block = done.stdout.split("```\n")[1]
    assert "alice" not in block and "hushhush" not in block
    assert "fail  checkpoint: ~/run/checkpoints/10: state.json: no such file or directory" in block
    assert "fail  tensorflow: TensorFlow cannot be imported" in block
    assert "TF_CONFIG's cluster has '<secret>', and tfdist knows chief and worker" in block
    assert "Keras runs on <user>," in block
    assert re.match(r"python 3\.\d+\.\d+, tfdist \d", block) and "\nok " not in block


def left(mark):
    """What still runs of a command that has ended, once what was killed is gone."""
    psutil.wait_procs(network_hosts.marked(mark), timeout=10)
    return network_hosts.marked(mark)


@pytest.mark.whole
def test_nothing_that_hangs_is_waited_for(run, driver, tmp_path, no_tensorflow):
    """Neither the driver nor TensorFlow ever answers."""
    folder, mark = driver("exec sleep 100000"), uuid.uuid4().hex
    (tmp_path / "poison" / "tensorflow.py").write_text("import threading; threading.Event().wait()\n")
    environ = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "TEST_MARK": mark}
    done = run("tfdist.doctor", "--time_limit=3", "--json", path=no_tensorflow, **environ)
    checks = found(done)
    assert checks["driver"]["finding"] == "nvidia-smi gave no answer within 1.2 s"
    # On a slow machine the probe has not come to TensorFlow by then.
    assert re.fullmatch("no answer (from TensorFlow )?within 2 s", checks["tensorflow"]["finding"])
    assert done.returncode == 2 and done.stderr == "" and not left(mark)


def test_ctrl_c(run, tmp_path, no_tensorflow):
    (tmp_path / "poison" / "tensorflow.py").write_text("import threading; threading.Event().wait()\n")
    mark = uuid.uuid4().hex
    process = run("tfdist.doctor", "--time_limit=600", path=no_tensorflow, popen=True, TEST_MARK=mark)
    end = time.monotonic() + 60
    while not psutil.Process(process.pid).children():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "tfdist: interrupted, nothing was changed\n")
    assert not left(mark)
