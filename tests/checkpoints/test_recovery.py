"""Runs that are killed, stopped, moved or robbed of their disk, as commands: they end as if nothing had happened."""

import contextlib
import json
import os
import random
import shlex
import signal
import sys
import time

import keras
import numpy as np
import psutil
import pytest
from support import network_hosts, processes, undisturbed_runs
from support.small_disks import mounted  # noqa: F401  a fixture
from support.undisturbed_runs import HOROVODRUN, LAUNCH, TRAIN, WAYS, result

pytest_plugins = ("support.network_hosts",)  # its fixtures
FLAGS = [
    *("--config.model.name=mlp", "--config.model.options=dropout=0.1", "--config.train.epochs=8"),
    *("--config.train.steps_per_call=2", "--config.checkpoint.every=7 steps", "--config.optimizer.name=adam"),
    *("--config.optimizer.options=", "--config.optimizer.learning_rate=0.003"),
    *("--threads=1", "--progress=plain", "--workdir=run"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tfds_dir):
    """What the undisturbed run under each way ends with."""
    return undisturbed_runs.ends(FLAGS, tmp_path_factory, tfds_dir)


def kill(program, chance):
    """SIGKILL to one of its processes, or to all at once."""
    family = program.family()
    if not family:
        return
    if chance.random() < 0.5:
        workers = [p for p in family if "tfdist.train" in " ".join(_words(p))] or family
        family = [chance.choice(workers)]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _words(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("way, count", [("default", 10), ("mirrored", 7), ("multi_worker", 5), ("horovod", 5)])
def test_killed_at_random_moments(way, count, seed, start, tmp_path, whole):
    """A run that is killed again and again, and started again each time, ends as one that is not."""
    expected, chance, done = whole(way), random.Random(seed), 0
    program = None
    for _ in range(10 * count):
        program = start(*WAYS[way], *FLAGS)
        if done == count:
            break
        try:  # a moment between the start of the process and a little after its usual end
            program.process.wait(chance.uniform(0, 2 + expected["seconds_to_first_update"] + expected["seconds"]))
        except processes.TimeoutExpired:
            kill(program, chance)
            done += 1
        program.end()
        _, alive = psutil.wait_procs(network_hosts.marked(start.mark), timeout=network_hosts.GONE_S)
        assert not alive, program.text
    assert program.end() == 0, program.text
    found = result(tmp_path)
    assert found["weights_sha256"] == expected["weights_sha256"], program.text
    assert found["history"] == expected["history"]
    assert found["evaluation"] == expected["evaluation"]
    assert found["updates"] == expected["updates"] and found["examples_seen"] == expected["examples_seen"]
    lines = [json.loads(line) for line in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    assert [line.get("epoch") for line in lines] == [*range(1, 9), None]
    assert done == count


@pytest.mark.faults
def test_killed_before_the_first_checkpoint(start, tmp_path, whole):
    """It begins anew, and history.jsonl has each epoch once: by hand, and when the launcher starts it again."""
    rare = "--config.checkpoint.every=1000 steps"

    def epochs():
        lines = (tmp_path / "run/history.jsonl").read_text().splitlines()
        return [json.loads(line).get("epoch") for line in lines]

    program = start(*WAYS["default"], *FLAGS, rare)
    program.until("epoch 2/8")
    program.family()[0].kill()
    program.end()
    again = start(*WAYS["default"], *FLAGS, rare)
    assert again.end() == 0, again.text
    assert "the earlier run in run is now in run.1" in again.text
    assert epochs() == [*range(1, 9), None] and (tmp_path / "run.1/history.jsonl").exists()
    assert result(tmp_path)["history"] == whole("default")["history"]

    words = [*LAUNCH, "--nproc_per_node=1", "--max_restarts=1", "--", "--strategy=default"]
    launched = start(*words, *FLAGS, rare)
    launched.until("epoch 2/8")
    next(p for p in network_hosts.marked(start.mark) if "tfdist.train" in " ".join(_words(p))).kill()
    assert launched.end() == 0, launched.text
    assert epochs() == [*range(1, 9), None] and result(tmp_path)["restarts"] == 1


def test_killed_while_a_checkpoint_is_being_written(start, hooked, tmp_path, tfds_dir):
    command = [*WAYS["default"], *FLAGS, "--config.train.epochs=1", "--notensorboard"]
    path = network_hosts.clean(tfds_dir)["PYTHONPATH"]
    killed = start(*command, **hooked("checkpoint", "SIGKILL", 0, path))
    assert killed.end() == -signal.SIGKILL, killed.text
    half_written = lambda: list((tmp_path / "run/checkpoints").glob(".*.*"))
    assert half_written(), killed.text
    for program in start(*command), start(*command, "--workdir=whole"):
        assert program.end() == 0, program.text
    found, expected = result(tmp_path), json.loads((tmp_path / "whole/result.json").read_text())
    assert found["resumed_from"] == 7 and found["history"] == expected["history"]
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert not half_written(), "what was left half written is still there"


def stop(program, number=signal.SIGTERM):
    """A signal to the program itself, which `timeout` may stand before."""
    program.family()[0].send_signal(number)


@pytest.mark.faults
def test_moved_from_world_to_world_in_mid_epoch(start, tmp_path, whole):
    """The tail of 45 examples is uneven everywhere; no dropout, whose streams depend on the world."""
    plain = [f for f in FLAGS if "dropout" not in f]
    reference = start(*WAYS["default"], *plain, "--workdir=whole")
    assert reference.end() == 0, reference.text
    chain = [
        (WAYS["default"], 2),
        ([*TRAIN, "--strategy=mirrored", "--virtual_devices=4"], 3),
        (WAYS["multi_worker"], 4),
        ([HOROVODRUN, "--gloo", "-np", "3", *TRAIN, "--strategy=horovod"], 6),
    ]
    for words, epoch in chain:
        program = start(*words, *plain)
        program.until(f"epoch {epoch}/8")
        stop(program)
        code = program.end()
        assert "preempted" in program.text or "horovod" in words[0], program.text
        assert code == 143 or "horovod" in words[0], program.text
    program = start(*WAYS["default"], *plain)
    assert program.end() == 0, program.text
    found, expected = result(tmp_path), json.loads((tmp_path / "whole/result.json").read_text())
    assert found["resumed_from"] > 6 * 30 - 15
    ours, theirs = (
        np.concatenate([w.ravel() for w in keras.saving.load_model(tmp_path / f / "model.keras").get_weights()])
        for f in ("run", "whole")
    )
    assert np.linalg.norm(ours - theirs) < 1e-6 * np.linalg.norm(theirs)
    for name, values in expected["history"].items():
        assert found["history"][name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.whole
def test_a_killed_worker_is_restarted_from_the_newest_checkpoint(start, tmp_path, whole):
    words = [*LAUNCH, "--nproc_per_node=2", "--max_restarts=2", "--", "--strategy=multi_worker"]
    program = start(*words, *FLAGS)
    program.until("epoch 3/8")
    workers = [p for p in network_hosts.marked(start.mark) if "tfdist.train" in " ".join(_words(p))]
    workers[-1].kill()
    assert program.end() == 0, program.text
    found = result(tmp_path)
    assert found["restarts"] == 1 and found["resumed_from"] >= 56
    assert found["weights_sha256"] == whole("multi_worker")["weights_sha256"]
    assert found["history"] == whole("multi_worker")["history"]


@pytest.mark.whole
def test_sigusr1_saves_and_requeues_the_job(start, tmp_path):
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin/scontrol"  # stands for Slurm's
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    # Of a job, and no task of it: it is one process.
    program = start(*WAYS["default"], *FLAGS, "--requeue", PATH=path, SLURM_JOB_ID="42")
    program.until("epoch 2/8")
    stop(program, signal.SIGUSR1)
    assert program.end() == 143, program.text
    assert "preempted" in program.text and "job 42 is in the queue again" in program.text
    assert (tmp_path / "asked").read_text() == "requeue 42\n"
    assert result(tmp_path)["status"] == "preempted"
    assert "stopped by SIGUSR1" in result(tmp_path)["reason"]


@pytest.mark.faults
def test_slurm_requeues_the_job(slurm, hosts, start, tmp_path):
    """The real Slurm: the job is pending once more, and what it has done is on the disk."""
    environ = {"SLURM_CONF": str(slurm)}
    job = tmp_path / "job.sh"
    words = [*WAYS["default"], *FLAGS, "--config.train.epochs=100000", "--requeue"]
    job.write_text(f"#!/bin/sh\nexec srun {shlex.join(words)} > {tmp_path}/output 2>&1\n")
    options = ["--requeue", "--open-mode=append", f"--chdir={tmp_path}", "--output=batch"]
    submitted = start(*hosts.on("h1"), "sbatch", "--parsable", *options, job, **environ)
    assert submitted.end() == 0, submitted.text
    number = submitted.lines[-1]

    def ask(*words):
        program = start(*hosts.on("h1"), *words, **environ)
        program.end()
        return program.text

    end = time.monotonic() + network_hosts.LIMIT_S
    said = lambda: (tmp_path / "output").read_text() if (tmp_path / "output").exists() else ""
    while "epoch      2/" not in said():
        assert time.monotonic() < end, said() + ask("scontrol", "show", "job", number)
    ask("scancel", "--signal=USR1", number)
    while not {"Restarts=1", "JobState=PENDING"} <= {*ask("scontrol", "show", "job", number).split()}:
        assert time.monotonic() < end, said()
    assert "stopped by SIGUSR1" in result(tmp_path)["reason"] and f"job {number} is in the queue again" in said()
    assert start(sys.executable, "-m", "tfdist.doctor", "--workdir=run").end() == 0
    ask("scancel", number)


LOAD = """
import sys, numpy as np, keras
model = keras.saving.load_model("run/model.keras")
assert "tfdist" not in sys.modules
x = np.random.default_rng(0).random((5, 8, 8, 1)).astype("float32")
np.save("foreign", model.predict(x, verbose=0))
"""
OURS = LOAD.replace('assert "tfdist" not in sys.modules', "import tfdist").replace(
    'np.save("foreign", model.predict(x, verbose=0))', 'np.save("ours", tfdist.predict(model, x))'
)


@pytest.mark.whole
def test_a_whole_life_of_a_run_folder(start, tmp_path, whole):
    """Complete, asked for again, of another experiment, begun anew, damaged."""
    expected = whole("default")
    first = start(*WAYS["default"], *FLAGS)
    assert first.end() == 0, first.text
    for code in (LOAD, OURS):  # plain Keras reads the model
        reader = start(sys.executable, "-c", code)
        assert reader.end() == 0, reader.text
    np.testing.assert_allclose(np.load(tmp_path / "foreign.npy"), np.load(tmp_path / "ours.npy"), rtol=1e-5, atol=1e-6)

    again = start(*WAYS["default"], *FLAGS, "--resume=require")
    assert again.end() == 0, again.text
    assert "resuming after update 240 from run/checkpoints/240" in again.text
    found = result(tmp_path)
    assert found["resumed_from"] == 240 and found["history"] == expected["history"]
    assert found["weights_sha256"] == expected["weights_sha256"]

    other = start(*WAYS["default"], *FLAGS, "--config.train.epochs=9", "--config.seed=3")
    assert other.end() == 2
    assert other.lines[-1].startswith(
        "tfdist: error: run is of another experiment (config.seed is 0 there and 3 here; "
        "config.train.epochs is 8 there and 9 here): choose another --workdir"
    )
    longer = start(*WAYS["default"], *FLAGS, "--config.train.epochs=9", "--resume_changed")
    assert longer.end() == 0, longer.text
    assert result(tmp_path)["updates"] == 270 and len(result(tmp_path)["history"]["loss"]) == 9

    examined = start(sys.executable, "-m", "tfdist.doctor", "--workdir=run")
    assert examined.end() == 0 and "<- a resume goes on from here" in examined.text
    for path in (tmp_path / "run/checkpoints").glob("*/state.json"):
        path.write_text(path.read_text()[:-1] + " ")
    examined = start(sys.executable, "-m", "tfdist.doctor", "--workdir=run")
    assert examined.end() == 2 and "state.json has changed: its checksum is wrong" in examined.text
    refused = start(*WAYS["default"], *FLAGS, "--config.train.epochs=9", "--resume=require")
    assert refused.end() == 2
    assert "none of the 3 checkpoints in run/checkpoints is valid" in refused.lines[-1]
    anew = start(*WAYS["default"], *FLAGS, "--resume=never")
    assert anew.end() == 0, anew.text
    assert "the earlier run in run is now in run.1" in anew.text
    assert result(tmp_path)["weights_sha256"] == expected["weights_sha256"]
    assert len(list((tmp_path / "run.1/checkpoints").iterdir())) >= 3


@pytest.mark.whole
def test_a_folder_that_is_removed_in_mid_run_is_made_anew(start, tmp_path, whole):
    program = start(*WAYS["default"], *FLAGS)
    program.until("epoch 2/8")
    (tmp_path / "run").rename(tmp_path / "gone")
    assert program.end() == 0, program.text
    assert result(tmp_path)["weights_sha256"] == whole("default")["weights_sha256"]
    assert (tmp_path / "run/checkpoints/240/manifest.json").exists()


@pytest.mark.whole
def test_a_full_disk_costs_no_checkpoint_that_was_there(mounted, start, tmp_path, whole):  # noqa: F811
    ballast = mounted(tmp_path / "run", "size=400k") / "ballast"
    program = start(*WAYS["default"], *FLAGS)
    program.until("epoch 2/8")
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert program.end() == 1, program.text
    warning = next(line for line in program.lines if "WARNING: the checkpoint after update" in line)
    assert "training goes on, the one of update" in warning
    assert any(line.startswith("epoch 8/8") for line in program.lines)
    assert program.lines[-1].startswith("tfdist: failed: ")
    ballast.unlink()
    again = start(*WAYS["default"], *FLAGS)
    assert again.end() == 0, again.text
    assert 0 < result(tmp_path)["resumed_from"] < 240
    assert result(tmp_path)["weights_sha256"] == whole("default")["weights_sha256"]
    assert result(tmp_path)["history"] == whole("default")["history"]
