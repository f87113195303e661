"""`tfdist.launch` on one machine, with real processes."""

import concurrent.futures
import io
import itertools
import json
import math
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from conftest import REPOSITORY
from support import many_commands
from support.covering import first
from support.launchers import MEET, TIMEOUT_S, account, launch, marked, pipes, planned  # noqa: F401  two are fixtures
from support.nvidia_drivers import driver, printing  # noqa: F401  driver is a fixture

from tfdist import config
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.cluster import wire
from tfdist.config import runtime_options
from tfdist.errors import UserError
from tfdist.launch import __main__ as launch_main
from tfdist.launch import plan as launch_plan
from tfdist.launch import worker_process
from tfdist.launch.failure_policy import AttemptOutcome

TWO = ("--nproc_per_node=2", "--")
ACT = (*TWO, "actor.py")


@pytest.mark.parametrize("arguments, code", first(6, [
    (["*=say:done"], 0), (["0=say:done", "1=exit:3"], 3), (["0=hold", "1=exit:3"], 3), (["0=hold", "1=exit:2"], 2),
    (["0=hold", "1=raise:broken"], 1), (["0=hold", "1=kill:SIGKILL"], 137), (["0=kill:SIGSEGV", "1=hold"], 139),
    (["0=hold", "1=kill:SIGTERM"], 143), (["*=exit:143"], 143), (["0=exit:0", "1=say:still here"], 0),
]), ids=lambda v: " ".join(v) if isinstance(v, list) else "")  # fmt: skip
def test_exit_codes(arguments, code, launch):  # noqa: F811
    launcher = launch(*ACT, *arguments)
    assert launcher.end() == code
    causes = [line for line in launcher.err if "root cause" in line]
    assert len(causes) == (code != 0 and arguments != ["*=exit:143"])  # where all have stopped in order


@pytest.mark.parametrize("step, how", [
    ("exit:7", "ended with exit code 7"),
    ("kill:SIGKILL", "was killed by SIGKILL, perhaps by the system for lack of memory"),
    ("kill:SIGABRT", "was killed by SIGABRT"),
])  # fmt: skip
def test_the_root_cause_has_rank_reason_and_last_lines(step, how, launch):  # noqa: F811
    launcher = launch(*ACT, "0=hold", f"1=count:30;err:that was it;{step}")
    launcher.end()
    first = next(i for i, line in enumerate(launcher.err) if "root cause" in line)
    assert re.fullmatch(
        rf"tfdist: root cause: rank 1 \(on {re.escape(socket.gethostname())}, process \d+\) {how}; its last lines:",
        launcher.err[first],
    )
    shown = [line.removeprefix("tfdist:   ") for line in launcher.err[first + 1 :]]
    assert len(shown) == 10 and set(shown) == {*(f"line {i}" for i in range(21, 30)), "that was it"}


def test_a_traceback_is_not_pushed_out_by_what_was_printed(launch):  # noqa: F811
    # More lines than a pipe holds: the last ones are read after the traceback.
    trace = "err:Traceback (most recent call last):;err:RuntimeError: the reason"
    launcher = launch(*ACT, "0=hold", f"1={trace};count:20000;exit:1")
    assert launcher.end() == 1
    assert launcher.err[-2:] == ["tfdist:   Traceback (most recent call last):", "tfdist:   RuntimeError: the reason"]


@pytest.mark.whole
def test_who_only_lost_another_is_not_the_root_cause(launch, tmp_path):  # noqa: F811
    pipes(tmp_path, "f")
    complains = "open:f;lost:1 (h), which ended;exit:1"
    launcher = launch(*ACT, f"0={complains}", "1=last:f;kill:SIGKILL")
    assert launcher.end() == 137
    assert "root cause: rank 1 " in launcher.until("root cause")
    # also if that one is silent, and has not ended
    launcher = launch(*ACT, "0=lost:1 (h) is silent;exit:1", "1=hold")
    assert launcher.end() == 1
    assert "root cause: rank 1 (h) is silent, as rank 0 has noticed" in launcher.until("root cause")
    # but what it only prints, as a program of another kind may, says nothing
    launcher = launch(*ACT, "0=err:tfdist: failed: lost worker 1 (h): silent for 10 s;exit:1", "1=hold")
    assert launcher.end() == 1
    assert "root cause: rank 0 " in launcher.until("root cause")
    # and it may have gone on without the other
    launcher = launch(*ACT, "0=lost:1 (h) is silent;exit:0", "1=exit:0")
    assert launcher.end() == 0


@pytest.mark.whole
def test_a_worker_that_never_comes_is_the_cause(launch, tmp_path):  # noqa: F811
    """Rank 1 of the real meeting, which waits elsewhere."""
    (tmp_path / "meets.py").write_text(
        "import os, signal, tfdist\n"
        "if os.environ['RANK'] == '1': signal.pause()\n"
        "tfdist.connect('multi_worker', start_timeout=1)\n"
    )
    launcher = launch(*TWO, "meets.py")
    assert launcher.end() == 1
    cause = launcher.until("root cause")
    assert re.search(r"rank 1 \(.*\) has not joined within 1 s, as rank 0 has noticed", cause)


def test_workers_that_ignore_sigterm_and_what_they_started_are_killed(launch, tmp_path):  # noqa: F811
    pipes(tmp_path, "f")
    launcher = launch(*ACT, "0=deaf;child;open:f;hold", "1=meet:f;exit:3")
    assert launcher.end() == 3
    assert marked(launch.mark) == []
    assert launcher.err[-1] == "tfdist: rank 0 had not ended when asked to, and was killed"


def test_what_a_worker_leaves_running_ends_with_it(launch):  # noqa: F811
    launcher = launch(*ACT, "*=child;say:done")
    assert launcher.end() == 0
    assert marked(launch.mark) == []
    assert sorted(launcher.out[-2:]) == ["[0] done", "[1] done"]


@pytest.mark.parametrize("number", first(1, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
def test_a_signal_is_passed_on_and_the_workers_save(number, launch, tmp_path):  # noqa: F811
    pipes(tmp_path, "a", "b")
    launcher = launch(*ACT, "0=polite;open:a;meet:b;say:both;hold", "1=polite;meet:a;open:b;hold")
    launcher.until("[0] both")
    launcher.signal(number)
    assert launcher.end() == 143
    assert launcher.said("[0] ") == ["both", "saved"] and launcher.said("[1] ") == ["saved"]
    assert f"tfdist: {number.name}: the workers stop after the update in progress" in launcher.err[0]
    assert len(launcher.err) == 1


def test_a_second_sigint_ends_at_once(launch, tmp_path):  # noqa: F811
    pipes(tmp_path, "a", "b")
    launcher = launch(*ACT, "0=deaf;open:a;meet:b;say:both;hold", "1=deaf;meet:a;open:b;hold")
    launcher.until("[0] both")
    launcher.signal(signal.SIGINT)
    launcher.until("SIGINT: the workers stop")
    launcher.signal(signal.SIGINT)
    assert launcher.end() == 130


def test_workers_have_sessions_of_their_own(launch):  # noqa: F811
    """So that a terminal's Ctrl-C, which goes to a whole group, reaches the launcher alone."""
    script = "import os; print(os.getsid(0) == os.getpgrp() == os.getpid())"
    launcher = launch(*TWO, "-m", "timeit", "-n1", "-r1", script)
    assert launcher.end() == 0
    assert launcher.said("[0] ")[0] == launcher.said("[1] ")[0] == "True"


def test_workers_do_not_outlive_a_launcher_that_is_killed(launch, tmp_path):  # noqa: F811
    pipes(tmp_path, "a", "b")
    launcher = launch(*ACT, "0=deaf;open:a;meet:b;say:both;hold", "1=deaf;meet:a;open:b;hold")
    launcher.until("[0] both")
    launcher.signal(signal.SIGKILL)
    assert launcher.end() == -signal.SIGKILL  # and the fixture sees to the rest


def test_a_worker_that_was_stopped_before_its_program_does_not_outlive_the_launcher_either(launch, tmp_path):  # noqa: F811
    """It could not ask the kernel for that yet. As soon as it goes on, it ends instead of becoming a worker."""
    stops = "import os, signal; os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGSTOP))"
    (tmp_path / "sitecustomize.py").write_text(stops)
    launcher = launch("--", "actor.py", "*=hold", PYTHONPATH=f"{tmp_path}{os.pathsep}{REPOSITORY}")
    told, end = "", time.monotonic() + TIMEOUT_S
    while "State: T (stopped)" not in told:
        assert time.monotonic() < end, told
        told = "".join(account(child.pid) for child in psutil.Process(launcher.process.pid).children())
    assert " -m tfdist.launch -- actor.py" in told.splitlines()[0]  # the worker, as a copy of the launcher
    assert " -m tfdist.launch -- actor.py" in told.splitlines()[1], told
    launcher.signal(signal.SIGKILL)
    launcher.process.wait(TIMEOUT_S)  # and the fixture lets the worker go on, and sees to the rest


def test_lines_never_mix_and_are_kept(launch, tmp_path):  # noqa: F811
    (tmp_path / "noisy.py").write_text(
        """
import os, sys
rank = os.environ["RANK"]
for i in range(3000):
    for piece in (f"{rank} ", f"{i} ", "x" * 50, "\\n"):
        os.write(1 + i % 2, piece.encode())
os.write(1, b"\\xff no text\\r\\n" + 200000 * b"y" + b" end without newline")
"""
    )
    launcher = launch("--nproc_per_node=2", "--log_dir=logs", "--", "noisy.py")
    assert launcher.end() == 0
    for rank in "01":
        expected = [f"{rank} {i} {'x' * 50}" for i in range(3000)]
        assert launcher.said(f"[{rank}] ")[:1500] == expected[0::2]
        assert [line.removeprefix(f"[{rank}] ") for line in launcher.err if line[1] == rank] == expected[1::2]
        odd, *long = launcher.said(f"[{rank}] ")[1500:]
        assert odd == "\ufffd no text" and len(long) > 1  # a line without an end must not fill the memory
        assert "".join(long) == 200000 * "y" + " end without newline"
        header, *kept = (tmp_path / "logs" / f"rank-{rank}.log").read_text(errors="replace").splitlines()
        assert re.fullmatch(r"--- attempt 0, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, \S+: .*python\S* noisy.py", header)
        assert sorted(kept) == sorted([*expected, odd, *long])
    first = (tmp_path / "logs" / "rank-1.log").read_text(errors="replace")
    assert launch("--log_dir=logs", "--nproc_per_node=2", "--", "actor.py", "1=say:again").end() == 0
    assert (tmp_path / "logs" / "rank-1.log").read_text(errors="replace").startswith(first)
    assert (tmp_path / "logs" / "rank-1.log").read_text(errors="replace").endswith("\nagain\n")


@pytest.mark.parametrize("blocking", [True, False])
def test_nothing_of_a_write_is_lost(blocking):
    """Neither with PYTHONUNBUFFERED, where signals cut writes short, nor on a non-blocking terminal."""
    readable, writable = os.pipe()
    os.set_blocking(writable, blocking)
    data = b"".join(b"%07d\n" % i for i in range(100_000))
    with (
        open(readable, "rb") as reader,
        concurrent.futures.ThreadPoolExecutor() as pool,
        io.TextIOWrapper(io.FileIO(writable, "w"), write_through=True) as stream,
    ):
        arrived = pool.submit(reader.read)
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        try:
            worker_process.Screen().write(data, stream)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        stream.close()
        assert arrived.result(TIMEOUT_S) == data


def test_a_reader_that_goes_away_does_not_end_the_run(launch, tmp_path):  # noqa: F811
    pipes(tmp_path, "f")
    launcher = launch(
        "--nproc_per_node=2", "--log_dir=logs", "--", "actor.py", "0=open:f;count:20000;say:end", "1=meet:f"
    )
    launcher.until("starting rank")
    fd = launcher.process.stdout.fileno()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, fd)  # closes the pipe that the launcher writes to
    os.close(null)
    assert launcher.end() == 0
    assert (tmp_path / "logs" / "rank-0.log").read_text().endswith("end\n")


def test_restarts_are_counted_and_meet_elsewhere(launch):  # noqa: F811
    show = "env:TFDIST_ATTEMPT+MASTER_PORT+TFDIST_SECRET"
    launcher = launch("--max_restarts=2", *ACT, f"0={show};hold", f"1={show};kill:SIGKILL")
    assert launcher.end() == 137
    notes = [line for line in launcher.out if line.startswith("tfdist: restart")]
    assert notes == ["tfdist: restart 1 of 2 in 1 s", "tfdist: restart 2 of 2 in 2 s"]
    rounds = launcher.said("[1] ")
    assert [r.split()[0] for r in rounds] == [f"TFDIST_ATTEMPT={i}" for i in range(3)]
    assert len({r.split()[2] for r in rounds}) == 3
    assert sum("root cause: rank 1" in line for line in launcher.err) == 3


def test_a_restart_can_succeed(launch):  # noqa: F811
    launcher = launch("--max_restarts=3", *ACT, "0=first;hold", "1=first;exit:1")
    assert launcher.end() == 0
    assert sum("restart" in line and " of 3 in" in line for line in launcher.out) == 1


@pytest.mark.parametrize("step", first(2, ["exit:2", "kill:SIGTERM", "exit:130", "exit:143"]))
def test_what_would_end_the_same_way_is_not_restarted(step, launch):  # noqa: F811
    launcher = launch("--max_restarts=3", *ACT, f"*={step}")
    assert launcher.end() in (2, 130, 143)
    assert not any("restart" in line for line in launcher.out)


def test_the_environment_of_the_workers(launch):  # noqa: F811
    names = "RANK+WORLD_SIZE+LOCAL_RANK+LOCAL_WORLD_SIZE+GROUP_RANK+MASTER_ADDR+TFDIST_ATTEMPT"
    removed = "TF_CONFIG+TORCHELASTIC_RUN_ID+HOROVOD_RANK"
    values = dict.fromkeys(removed.split("+"), "1")
    launcher = launch(*ACT, f"*=env:{names};env:{removed}+KEPT", KEPT="yes", RANK="7", **values)
    assert launcher.end() == 0
    for rank in "01":
        assert launcher.said(f"[{rank}] ") == [
            f"RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=2 GROUP_RANK=0 "
            "MASTER_ADDR=127.0.0.1 TFDIST_ATTEMPT=0",
            "TF_CONFIG=None TORCHELASTIC_RUN_ID=None HOROVOD_RANK=None KEPT=yes",
        ]


def test_a_given_port_is_used_and_a_taken_one_refused(launch):  # noqa: F811
    with wire.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        launcher = launch(f"--master_port={port}", *ACT, "*=env:MASTER_PORT")
        assert launcher.end() == 2
        assert launcher.err == [
            f"tfdist: error: --master_port={port} is taken on 127.0.0.1: choose another, the same on all nodes"
        ]
    launcher = launch(f"--master_port={port}", *ACT, "*=env:MASTER_PORT")
    assert launcher.end() == 0
    assert launcher.said("[1] ") == [f"MASTER_PORT={port}"]


BAD_INPUT = [
    (["--nproc=2"], "unknown flag --nproc: did you mean 'nproc_per_node'?"),
    (["--max_restart=2"], "unknown flag --max_restart: did you mean 'max_restarts'?"),
    (["--nproc_per_node"], "argument --nproc_per_node: expected one argument"),
    (["--config.train.epochs=3"], "--config.train.epochs is a flag of tfdist.train: write it after --"),
    (["--strategy=multi_worker"], "--strategy is a flag of tfdist.train: write it after --"),
    (["actor.py"], "unexpected argument 'actor.py': a script, as the flags of tfdist.train, stands after --"),
    (["--nproc_per_node=0"], "--nproc_per_node must be an integer of at least 1, or auto, got 0"),
    (["--nproc_per_node=gpu"], "--nproc_per_node must be an integer of at least 1, or auto, got gpu"),
    (["--nnodes=1:4"], "--nnodes=1:4 needs --master_addr: the address of node 0 in the network of the nodes"),
    (["--nnodes=2"], "--nnodes=2 needs --master_addr: the address of node 0"),
    (["--node_rank=1"], "--node_rank=1 does not exist with --nnodes=1: ranks of nodes count from 0 on"),
    (["--max_restarts=" + "9" * 5000], "--max_restarts must be an integer of at least 0, got " + "9" * 40),
    (["--master_port=70000"], "--master_port must be an integer from 0 to 65535, got 70000"),
    (["--nnodes=2", "--master_addr=127.0.0.1", "--master_port=0"], "--master_port=0 means any free port"),
    (["--max_restarts=-1"], "--max_restarts must be an integer of at least 0, got -1"),
    (["--start_timeout=soon"], "--start_timeout must be a positive number of seconds, got soon"),
    (["--start_timeout=0"], "--start_timeout must be a positive number of seconds, got 0"),
    (["--master_addr=203.0.113.1", "--", "actor.py"], "--master_addr=203.0.113.1 is not an address of this machine"),
    (["--master_addr=no.such.host.invalid", "--", "actor.py"], "--master_addr=no.such.host.invalid is not known"),
    (["--", "missing.py"], "there is no script 'missing.py': flags of tfdist.train begin with --"),
    (["--", "-m"], "-m names no module: write -m package.module"),
    (["--", "--confg=x"], "unknown flag --confg"),
    (["--", "--config.train.epoch=3"], "unknown config field --config.train.epoch: did you mean 'epochs'?"),
    (["--", "--config.train.batch_size=-1"], "train.batch_size must be at least 1, got -1"),
    (["--", "--devices=7"], "there is no device 7", ["--nproc_per_node=2"]),
    (["--", "--strategy=mirrored"],
     "--strategy=mirrored is not for workers of tfdist.launch: start python -m tfdist.train", ["--nproc_per_node=2"]),
    (["--", "--strategy=horovod"], "start it with horovodrun, or use --strategy=multi_worker", ["--nproc_per_node=2"]),
]  # fmt: skip


def test_bad_input_is_one_line_before_anything_starts(tmp_path):
    poison(tmp_path)
    (tmp_path / "actor.py").write_text("")
    table = [([*itertools.chain(*before), *arguments], message) for arguments, message, *before in BAD_INPUT]
    many_commands.refuses("tfdist.launch", table, tmp_path, PATH="/usr/bin:/bin")  # no driver, whatever the machine


def poison(folder):
    for name in ("tensorflow", "keras", "tensorflow_datasets"):
        (folder / f"{name}.py").write_text(f"raise AssertionError('{name} was imported')\n")


def test_a_run_folder_that_cannot_be_made(launch, tmp_path):  # noqa: F811
    (tmp_path / "file").write_text("")
    launcher = launch("--nproc_per_node=2", "--log_dir=file/logs", "--max_restarts=1", "--", "actor.py", "*=say:x")
    assert launcher.end() == 2
    assert "cannot start its workers: Not a directory: file/logs" in launcher.err[0] and len(launcher.err) == 1


FOUR = "".join(f"{i}, GPU-{i}, 0, 16000, 10, 15990, 550.1, Tesla T4\n" for i in range(4))


@pytest.fixture
def four_gpus(driver):  # noqa: F811
    driver(printing(FOUR))


@pytest.mark.parametrize(
    "nproc, environ, parts",
    first(3, [
        ("2", {}, ["0,1", "2,3"]),
        ("auto", {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-0"}, ["2", "0"]),
        ("2", {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, ["MIG-a", "MIG-b"]),
        ("4", {}, ["0", "1", "2", "3"]),
        ("auto", {}, ["0", "1", "2", "3"]),
        ("1", {}, ["None"]),  # it sees them all
        ("2", {"CUDA_VISIBLE_DEVICES": "3,1"}, ["3", "1"]),
        ("2", {"CUDA_VISIBLE_DEVICES": ""}, ["", ""]),
        ("auto", {"MLP_WORKER_NUM": "1", "MLP_WORKER_GPU": "2"}, ["0", "1", "2", "3"]),
    ]),
)  # fmt: skip
def test_gpus_are_divided(nproc, environ, parts, launch, four_gpus):  # noqa: F811
    launcher = launch(f"--nproc_per_node={nproc}", "--", "actor.py", "*=env:CUDA_VISIBLE_DEVICES", **environ)
    assert launcher.end() == 0, launcher.err
    for rank, part in enumerate(parts):
        assert launcher.said(f"[{rank}] ") == [f"CUDA_VISIBLE_DEVICES={part}"]
    assert launcher.said(f"[{len(parts)}] ") == []


@pytest.mark.parametrize("flags, visible, devices", first(2, [
    (["--devices=idle:2"], ["0", "1"], ["--devices=all"]), ([], ["0,1", "2,3"], []),
    (["--devices=3,1"], ["3", "1"], ["--devices=all"]), (["--devices=none"], [None, None], []),
    (["--virtual_devices=2"], [None, None], []),
]))  # fmt: skip
def test_devices_among_the_train_flags_are_divided(flags, visible, devices, launch, four_gpus):  # noqa: F811
    lines = dry(launch, "--nproc_per_node=2", "--dry_run", "--", *flags)
    assert [environ.get("CUDA_VISIBLE_DEVICES") for environ, _ in lines] == visible
    assert all(command == [sys.executable, "-m", "tfdist.train", *flags, *devices] for _, command in lines)
    assert all((environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID") == (visible[0] is not None) for environ, _ in lines)


@pytest.mark.parametrize("nproc, count", [("3", "4 GPUs (0, 1, 2, 3)"), ("8", "4 GPUs (0, 1, 2, 3)")])
def test_gpus_that_cannot_be_divided(nproc, count, launch, four_gpus):  # noqa: F811
    launcher = launch(f"--nproc_per_node={nproc}", "--", "actor.py")
    assert launcher.end() == 2
    assert f"error: {count} cannot be divided evenly among {nproc} workers" in launcher.err[0]
    assert len(launcher.err) == 1


def test_a_failing_driver_is_told_of(launch, driver):  # noqa: F811
    driver("exit 9")
    launcher = launch("--nproc_per_node=auto", "--", "actor.py", "*=env:WORLD_SIZE")
    assert launcher.end() == 0
    assert launcher.err == ["tfdist: nvidia-smi failed with code 9: no message"]
    assert launcher.said("[0] ") == ["WORLD_SIZE=1"]


def dry(launch, *arguments, **environ):  # noqa: F811
    """Environment and command of each line of a dry run, as a shell would read it."""
    launcher = launch(*arguments, **environ)
    assert launcher.end() == 0, launcher.err
    found = []
    for line in launcher.out[1::2]:
        words = shlex.split(line)
        assert words[0] == "env"
        program = words.index(sys.executable)
        found.append((dict(w.split("=", 1) for w in words[1:program] if "=" in w), words[program:]))
    assert all(line.startswith("# rank ") for line in launcher.out[0::2])
    return found


def test_dry_run_starts_nothing_and_can_be_pasted(launch, tmp_path):  # noqa: F811
    launcher = launch(
        "--nproc-per-node", "2", "--dry-run", "--", "actor.py", "*=env:RANK+TF_CONFIG+WORLD_SIZE", TF_CONFIG="{}"
    )
    assert launcher.end() == 0
    comments = [line for line in launcher.out if line.startswith("#")]
    assert comments == [f"# rank {rank} of 2; TFDIST_SECRET is not shown" for rank in range(2)]
    for rank, line in enumerate(launcher.out[1::2]):
        done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, env={"TF_CONFIG": "{}"})
        assert done.stdout == f"RANK={rank} TF_CONFIG=None WORLD_SIZE=2\n", done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["actor.py"]


def test_dry_run_of_one_node_of_several(launch):  # noqa: F811
    flags = ["--nnodes=3", "--node_rank=2", "--master_addr=n0", "--nproc_per_node=2", "--dry_run", "--"]
    flags += ["-m", "mine", "a b"]
    lines = dry(launch, *flags, TFDIST_SECRET="s3")  # which the workers inherit, and nobody reads over a shoulder
    for local_rank, (environ, command) in enumerate(lines):
        assert environ == {
            "RANK": str(4 + local_rank),
            "WORLD_SIZE": "6",
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "2",
            "MASTER_ADDR": "n0",
            "MASTER_PORT": "29500",
            "TFDIST_ATTEMPT": "0",
            "PYTHONUNBUFFERED": "1",
        }
        assert command == [sys.executable, "-m", "mine", "a b"]
    assert len(lines) == 2


PLATFORM = dict(
    MLP_WORKER_NUM="2", MLP_ROLE_INDEX="1", MLP_WORKER_GPU="3", MLP_WORKER_0_HOST="w0", MLP_WORKER_0_PORT="7777"
)


@pytest.mark.parametrize("flags, expected", [
    ([], dict(WORLD_SIZE="6", RANK="3", GROUP_RANK="1", MASTER_ADDR="w0", MASTER_PORT="7777")),
    (["--nproc_per_node=1", "--master_port=8888"], dict(WORLD_SIZE="2", RANK="1", MASTER_PORT="8888")),
    (["--nnodes=1"], dict(WORLD_SIZE="1", RANK="0", GROUP_RANK="0", MASTER_ADDR="127.0.0.1")),
])  # fmt: skip
def test_platform_variables_are_defaults(flags, expected, launch):  # noqa: F811
    environ, _ = dry(launch, *flags, "--dry_run", "--", "actor.py", **PLATFORM, TFDIST_SECRET="hush")[0]
    assert {name: environ[name] for name in expected} == expected


ONE_MACHINE = ["--nnodes=1", "--", "actor.py"]
TWO_MACHINES = ["--nnodes=2", "--master_addr=10.0.0.5", "--", "actor.py"]
LOOPBACK = ["--nnodes=2", "--master_addr=127.0.0.1", "--", "actor.py"]


@pytest.mark.parametrize("arguments, environ, secret", [
    (ONE_MACHINE, {}, ""),  # the launcher makes one for each start
    (LOOPBACK, {}, ""), (TWO_MACHINES, dict(TFDIST_SECRET="hush"), "hush"), (["--insecure", *TWO_MACHINES], {}, ""),
])  # fmt: skip
def test_who_needs_no_secret_or_has_one(arguments, environ, secret, planned):  # noqa: F811
    plan = planned(*arguments, **environ)
    assert plan.secret == secret
    assert "hush" not in repr(plan)


@pytest.mark.parametrize(
    "arguments, environ, message",
    [
        (TWO_MACHINES, {},
         "--nnodes=2 needs TFDIST_SECRET in the environment, since anyone who reaches 10.0.0.5 could"),
        (["--insecure", *TWO_MACHINES], dict(TFDIST_SECRET="hush"), "because TFDIST_SECRET is set: leave it out"),
        (["--insecure", *ONE_MACHINE], {}, "because with one machine the launcher makes a secret by itself: leave"),
        (["--nproc_per_node=2", "--", "--insecure"], {}, "--insecure after -- would change nothing, since workers"),
    ],
)  # fmt: skip
def test_who_needs_a_secret(arguments, environ, message, planned):  # noqa: F811
    with pytest.raises(UserError, match=re.escape(message)):
        planned(*arguments, **environ)


def test_the_secret_is_in_no_line_of_a_dry_run(planned):  # noqa: F811
    printed = launch_main.dry_run(planned(*TWO_MACHINES, TFDIST_SECRET="hush"), {"TFDIST_SECRET": "hush"})
    assert "hush" not in printed and "-u TFDIST_SECRET" not in printed and "TFDIST_SECRET is not shown" in printed


def exited(rank, code, lost=False, culprit=-1, complaint=""):
    told = dict(rank=rank, pid=1, host="h", code=code, lost=lost, lines=["x"], culprit=culprit, complaint=complaint)
    return 0, {"event": "exit", "exit": told}


SILENT = dict(lost=True, culprit=1, complaint="(h): silent for 10 s")
ENDED_TOO = dict(lost=True, culprit=0, complaint="(h): its process ended")


@pytest.mark.parametrize("story, text, lines", [
    # a stopped worker is alive: the others end because of it, one after the other or because of each other
    ([exited(2, 1, **SILENT), exited(0, 1, **SILENT)], "rank 1 (h): silent for 10 s, as rank 2 has noticed", 0),
    ([exited(2, 1, **ENDED_TOO), exited(0, 1, **SILENT)], "rank 1 (h): silent for 10 s, as rank 0 has noticed", 0),
    ([exited(0, 1, **SILENT)], "rank 1 (h): silent for 10 s, as rank 0 has noticed", 0),
    ([exited(0, 1, **SILENT), exited(1, -9)], "rank 1 (on h, process 1) was killed by SIGKILL", 1),
    ([exited(0, 1, **SILENT), exited(1, 1, **ENDED_TOO)], "rank 1 (h): silent for 10 s, as rank 0 has noticed", 0),
    ([exited(0, 1, lost=True)], "rank 0 (on h, process 1) ended with exit code 1", 1),  # it names nobody
])  # fmt: skip
def test_the_silent_one_is_the_cause(story, text, lines):
    outcome = AttemptOutcome({0: "node 0 (h)"})
    for news in story:
        outcome.hear(*news, 0.0)
    [order] = outcome.orders(outcome.deadline if outcome.deadline < math.inf else 0.0)
    assert order["order"] == "end" and order["text"].startswith(text) and len(order["lines"]) == lines
    assert outcome.code == (137 if story[-1][1]["exit"]["code"] == -9 else 1) and outcome.may_restart


def signalled(name="SIGINT", node=0):
    return node, {"event": "signal", "name": name}


LOST = 1, {"event": "lost", "line": "node 1 (h) is lost: closed"}
ENDED = 0, {"event": "ended"}


@pytest.mark.parametrize("story, orders, code, restart", [
    # what is heard at which second; what is ordered; exit code; whether it may be restarted
    ([(0, exited(0, 0)), (1, exited(1, 0))], [], 0, False), ([(0, exited(1, -9))], ["end"], 137, True),
    ([(0, exited(1, 2))], ["end"], 2, False),
    ([(0, exited(0, 1, lost=True)), (1.9, exited(1, -11))], ["end"], 139, True),  # outranked in time
    ([(0, exited(0, 1, lost=True)), (1.9, exited(1, 2))], ["end"], 2, False),
    ([(0, exited(0, 1, lost=True)), (1.9, LOST)], ["end"], 1, True),
    ([(0, exited(0, 1, lost=True)), (2.1, exited(1, -11))], ["end"], 1, True),  # too late
    ([(0, exited(0, 1, lost=True)), (1, exited(2, 1, lost=True)), (1.5, exited(1, 3))], ["end"], 3, True),
    ([(0, exited(1, 3)), (0.1, exited(0, -11))], ["end"], 3, True),  # the first of equals
    ([(0, exited(1, 3)), (5, exited(0, -9))], ["end", "say"], 3, True),  # it had to be killed
    ([(0, LOST)], ["end"], 1, True),
    ([(0, signalled()), (3, exited(0, 143)), (3, exited(1, 143))], ["say", "stop"], 143, False),
    ([(0, signalled("SIGTERM")), (3, exited(0, -15)), (3, exited(1, 143))], ["say", "stop"], 143, False),
    ([(0, signalled()), (3, exited(0, 0)), (3, exited(1, 0))], ["say", "stop"], 0, False),
    # others may save
    ([(0, signalled()), (3, exited(0, 1)), (4, exited(1, 143))], ["say", "stop", "end"], 1, False),
    ([(0, signalled()), (29, ENDED)], ["say", "stop"], 0, False),
    ([(0, signalled()), (31, exited(0, -9))], ["say", "stop", "kill", "say"], 137, False),
    ([(0, signalled()), (1, signalled()), (1, exited(0, -9))], ["say", "stop", "kill", "say"], 130, False),
    # srun tells all
    ([(0, signalled()), (1, signalled(node=1)), (2, exited(0, 143))], ["say", "stop"], 143, False),
    ([(0, signalled()), (1, signalled("SIGTERM")), (2, exited(0, 143))], ["say", "stop"], 143, False),
    ([(0, exited(0, 143)), (29, exited(1, 143))], [], 143, False),  # one was asked, all stop
    ([(0, exited(0, 143)), (31, exited(1, -9))], ["kill", "say"], 137, False),
    ([(0, exited(0, -15))], ["end"], 143, False), ([(0, exited(1, -9)), (1, signalled())], ["end", "say"], 137, False),
    ([(0, exited(1, -9)), (31, signalled())], ["end", "say", "say"], 137, False),  # not even SIGKILL helps
])  # fmt: skip
def test_whom_to_blame_and_what_to_do(story, orders, code, restart):
    """The decisions alone, by a clock that the test sets."""
    outcome = AttemptOutcome({0: "node 0 (h)", 1: "node 1 (h)"})
    given = []
    for now, news in story:
        while outcome.deadline <= now:
            given += outcome.orders(outcome.deadline)
        outcome.hear(*news, now)
        given += outcome.orders(now)
    given += outcome.summary()
    assert [o["order"] for o in given] == orders
    assert (outcome.code, outcome.may_restart) == (code, restart)


def test_a_full_disk_ends_the_log_and_not_the_run(capfd, tmp_path):
    """Linux has a device that is always full."""
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full on this system")
    start = worker_process.Start(
        0, [sys.executable, "-c", "print('line')"], dict(os.environ), log=pathlib.Path("/dev/full")
    )
    with worker_process.Events() as events:
        crew = worker_process.WorkerGroup([start], events, worker_process.Screen())
        exits = []
        while crew.alive:
            events.wait(min(1.0, crew.timeout()))
            exits += crew.poll()
    out, err = capfd.readouterr()
    assert [e.code for e in exits] == [0]
    assert out == "[0] line\n"
    assert err == "tfdist: /dev/full cannot be written (No space left on device): the log ends here\n"


HOLDER = """
import dataclasses
from tfdist.launch import __main__ as launcher
plan = launcher.make_plan
launcher.make_plan = lambda *arguments: dataclasses.replace(plan(*arguments), workdir="run")
launcher.main()
"""
WRITER = """
import os, signal, sys
from tfdist.checkpoints.run_folder import RunFolder
folder = RunFolder("run", writes=os.environ["RANK"] == "0")
folder.create()
folder.set_aside()
folder.append("history.jsonl", {})
print("took it", flush=True)
what = sys.argv[1:][int(os.environ["TFDIST_ATTEMPT"])]
if what == "hold":
    signal.pause()
elif what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
folder.release()
sys.exit(int(what))
"""


@pytest.fixture
def writer(launch, tmp_path):  # noqa: F811
    """Starts a launcher whose workers write to the run folder `run`, as those of `tfdist.train` do."""
    (tmp_path / "holder.py").write_text(HOLDER)
    (tmp_path / "writer.py").write_text(WRITER)
    path = f"{tmp_path}:{REPOSITORY}"
    return lambda *arguments: launch(*arguments, module="holder", PYTHONPATH=path, TFDIST_FOLDER_LOCK_FD="7")


def rival(path):
    """Another run that would have the folder."""
    folder = RunFolder(str(path))
    folder.create()
    folder.release()


@pytest.mark.whole
def test_the_run_folder_is_held_between_two_rounds(writer, tmp_path):
    """Each round's chief sets aside what the one before has left, as --resume=never does, and the lock stays."""
    launcher = writer("--max_restarts=2", "--", "writer.py", "kill", "3", "0")
    for restart in ("restart 1 of 2 in", "restart 2 of 2 in"):
        launcher.until(restart)
        with pytest.raises(UserError, match=rf"in use by another run \(process {launcher.process.pid} on "):
            rival(tmp_path / "run")
    assert launcher.end() == 0, launcher.err
    assert launcher.said("[0] ").count("took it") == 3
    assert [p.name for p in sorted(tmp_path.glob("run*/history.jsonl"))] == ["history.jsonl"] * 3
    assert list(tmp_path.glob("run*/.lock")) == []


def test_a_second_launcher_is_refused_before_it_starts_a_worker(writer):
    first = writer("--", "writer.py", "hold")
    first.until("took it")
    second = writer("--max_restarts=2", "--", "writer.py", "0", "0", "0")
    assert second.end() == 2 and second.out == []
    assert re.fullmatch(
        rf"tfdist: error: --workdir=run is in use by another run \(process {first.process.pid} on \S+\): wait for it, "
        "or choose another folder",
        "\n".join(second.err),
    )
    first.signal(signal.SIGTERM)
    first.end()
    assert writer("--", "writer.py", "0").end() == 0


def test_the_folder_of_a_rehearsal_is_not_held(planned, monkeypatch):  # noqa: F811
    for dry_run in (False, True):
        train = config.Experiment(), runtime_options.Environment(devices="none", dry_run=dry_run), "out"
        monkeypatch.setattr(launch_plan, "_train_flags", lambda rest, train=train: train)
        assert planned("--", "--workdir=out").workdir == ("" if dry_run else "out")


def test_the_lock_does_not_outlive_a_launcher_that_is_killed(writer, tmp_path):
    first = writer("--", "writer.py", "hold")
    first.until("took it")
    first.signal(signal.SIGKILL)
    first.process.wait()  # on a busy machine a signal takes its time
    again = writer("--", "writer.py", "0")  # at once: it waits until the kernel has ended the worker
    assert again.end() == 0, again.err
    first.end()
    rival(tmp_path / "run")


FAST = ["--config.model.name=mlp", "--config.optimizer.warmup=0%"]


@pytest.mark.whole
def test_training(launch, tmp_path, tfds_dir):  # noqa: F811
    """The children find the strategy by themselves; an earlier run is kept, and the logs of both stay together."""
    for _ in range(2):
        launcher = launch(*TWO, *FAST, "--config.train.epochs=1", "--workdir=out", TFDS_DATA_DIR=str(tfds_dir))
        assert launcher.end() == 0, launcher.err
    assert launcher.out[0] == "tfdist: starting rank 0 to 1 of 2 workers here; what they print is kept in out/logs"
    assert "[0] tfdist: the earlier run in out is now in out.1" in launcher.out
    for folder in (tmp_path / "out", tmp_path / "out.1"):
        result = json.loads((folder / "result.json").read_text())
        assert (result["status"], result["strategy"], result["workers"]) == ("completed", "multi_worker", 2)
    kept = (tmp_path / "out/logs/rank-0.log").read_text()
    assert kept.count("--- attempt") == 2 and kept.count("tfdist: completed: 30 updates") == 2


def test_ctrl_c_while_training_saves(launch, tmp_path, tfds_dir):  # noqa: F811
    flags = [*FAST, "--config.train.epochs=100000", "--workdir=out"]
    launcher = launch(*TWO, *flags, real=False, TFDS_DATA_DIR=str(tfds_dir))
    launcher.until(" 2/100000")
    launcher.signal(signal.SIGINT)
    assert launcher.end() == 143
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["status"] == "preempted" and (tmp_path / "out" / "model.keras").exists()
