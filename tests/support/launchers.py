"""What the tests of `tfdist.launch` share: real launchers, and workers that do as they are told without TensorFlow."""

import collections
import contextlib
import os
import pathlib
import re
import socket
import sys
import uuid

import psutil
import pytest
from conftest import REPOSITORY

from support import processes
from support.running import Running
from tfdist.launch import plan as launch_plan

TIMEOUT_S = 60
"""For what a launcher does at once; no test depends on how fast it is."""

ACTOR = r'''
"""A worker. Arguments are RANK=step;step;... or *=..., each step NAME or NAME:VALUE; see below."""
import os, signal, socket, subprocess, sys
rank, attempt = os.environ["RANK"], os.environ["TFDIST_ATTEMPT"]
held = []
def hold(value):
    while True:
        signal.pause()
def lost(value):
    """What a worker of tfdist does when it misses another one: the rank, then why."""
    from tfdist.cluster import exit_record
    rank, _, why = value.partition(" ")
    exit_record.leave(exit_record.LostWorker(int(rank), why))
def saved(*_):
    print("saved", flush=True)
    os._exit(143)
steps = {
    "say": lambda v: print(v, flush=True),
    "err": lambda v: print(v, file=sys.stderr, flush=True),
    "env": lambda v: print(*(f"{n}={os.environ.get(n)}" for n in v.split("+")), flush=True),
    "count": lambda v: [print(f"line {i}") for i in range(int(v))],
    "exit": lambda v: os._exit(int(v)),
    "kill": lambda v: os.kill(os.getpid(), getattr(signal, v)),
    "raise": lambda v: exec("raise RuntimeError(v)", {"v": v}),
    "hold": hold,
    "lost": lost,
    "polite": lambda v: signal.signal(signal.SIGTERM, saved),
    "deaf": lambda v: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    # Named pipes put the steps of several workers in order: `open` and `meet` go on together,
    # `last` goes on when the process that has done `open` is gone.
    "open": lambda v: held.append(os.open(v, os.O_WRONLY)),
    "meet": lambda v: os.close(os.open(v, os.O_RDONLY)),
    "last": lambda v: os.read(os.open(v, os.O_RDONLY), 1),
    "child": lambda v: held.append(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])),
    "once": lambda v: os._exit(0) if os.path.exists(v) else open(v, "x").close(),
    "first": lambda v: attempt == "0" or os._exit(0),
}
for argument in sys.argv[1:]:
    who, _, what = argument.partition("=")
    if who in (rank, "*"):
        for step in what.split(";"):
            name, _, value = step.partition(":")
            steps[name](value)
sys.stdout.flush()
'''

MEET = '''
"""A worker: rank 0 takes one connection of rank 1 at the socket that it was given."""
import os, socket
from tfdist.cluster import wire
at, secret = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), os.environ["TFDIST_SECRET"]
if os.environ["RANK"] == "0":
    listener = socket.socket(fileno=int(os.environ["TFDIST_MEETING_FD"]))
    assert listener.getsockname()[1] == at[1], listener
    print(wire.accept(listener.accept()[0], secret).receive(30))
else:
    assert "TFDIST_MEETING_FD" not in os.environ
    wire.connect(*at, secret, timeout=30).send({"rank": os.environ["RANK"]})
'''


class Launcher(Running):
    """A running command, `python -m tfdist.launch` unless told otherwise."""

    def __init__(self, arguments, env, cwd, module="tfdist.launch", host=(), real=True):
        words = [*host, sys.executable, "-m", module, *arguments]
        super().__init__(words, TIMEOUT_S, processes.PIPE, cwd=cwd, env=env, real=real)

    def signal(self, number):
        self.process.send_signal(number)

    def said(self, prefix=""):
        """Lines of standard output that begin with `prefix`, without it."""
        return [line.removeprefix(prefix) for line in self.out if line.startswith(prefix)]


@pytest.fixture
def launch(tmp_path):
    """Starts launchers in an empty folder with `actor.py` in it; afterwards no process of theirs may be left."""
    mark = uuid.uuid4().hex
    started = []
    (tmp_path / "actor.py").write_text(ACTOR)
    drop = re.compile(
        "CUDA_VISIBLE_DEVICES|TF_CONFIG|MLP_|PET_|SM_|SKYPILOT_|JOB_COMPLETION_INDEX|NPROC_PER_NODE|TFDIST_|HOROVOD_|TORCHELASTIC_|RANK$|WORLD_SIZE$"
    )

    def start(*arguments, host=(), module="tfdist.launch", real=True, **environ):
        """Starts one, on a host if the words that let it run there are given."""
        env = {k: v for k, v in os.environ.items() if not drop.match(k)}
        env |= {"PYTHONPATH": str(REPOSITORY), "TEST_MARK": mark, "TF_CPP_MIN_LOG_LEVEL": "2"} | environ
        started.append(Launcher(arguments, env, tmp_path, module, host, real))
        return started[-1]

    start.mark = mark
    yield start
    for launcher in started:
        if launcher.process.poll() is None:
            launcher.process.kill()
            launcher.process.wait(TIMEOUT_S)
    let_go_on(mark)
    psutil.wait_procs(marked(mark), timeout=TIMEOUT_S)  # the kernel ends the workers of a launcher that was killed
    left = marked(mark)
    accounts = [account(process.pid) for process in left]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    assert not left, "\n".join(["processes are left:", *accounts])


def let_go_on(mark):
    """Lets workers go on that were stopped before their programs began, once their launchers are gone.

    They may have been too early to ask the kernel for an end with the launcher. They find out by themselves that it is
    gone, but not while they are stopped.
    """
    for process in marked(mark):
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED and "tfdist.launch" in process.cmdline():
                process.resume()


TOLD = re.compile("(Name|State|PPid|NSpid|SigPnd|ShdPnd|SigBlk|SigIgn|SigCgt):")
"""Lines of /proc/PID/status that tell why a process does not end."""


def account(pid):
    """Returns what a process is, whose child it is, and what it and its threads wait for, in lines for a person."""

    def read(path):
        try:
            return pathlib.Path(f"/proc/{path}").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError as error:
            return f"({error.strerror})"

    status = [" ".join(line.split()) for line in read(f"{pid}/status").splitlines() if TOLD.match(line)]
    # After the name, which may hold anything: state, parent, group, session.
    state, parent, group, session, *_ = [*read(f"{pid}/stat").rpartition(")")[2].split(), *"????"]
    waits = collections.Counter(
        f"{read(f'{pid}/task/{task}/wchan')} in call {read(f'{pid}/task/{task}/syscall').partition(' ')[0]}"
        for task in (os.listdir(f"/proc/{pid}/task") if state != "?" else ())
    )
    return "\n  ".join(
        [
            f"process {pid} of group {group}, session {session}: {read(f'{pid}/cmdline')[:300]}",
            f"its parent {parent}: {read(f'{parent}/cmdline')[:300]}",
            f"its children: {read(f'{pid}/task/{pid}/children') or 'none'}",
            "; ".join(status),
            *(f"{number} of its threads wait at {where}" for where, number in waits.items()),
            *read(f"{pid}/stack").splitlines(),
        ]
    )


def marked(mark):
    """Living processes with the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TEST_MARK") == mark:
                found.append(process)
    return found


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Makes the plan of a launch of `actor.py`, without starting anything."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "actor.py").write_text("")
    return lambda *arguments, **environ: launch_plan.make_plan(*launch_plan.parse(arguments), environ)


def pipes(folder, *names):
    for name in names:
        os.mkfifo(folder / name)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
