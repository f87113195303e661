"""What the tests of `tfdist.launch` share: real launchers, and workers that do as they are told without TensorFlow."""

import collections
import contextlib
import os
import pathlib
import re
import signal
import socket
import sys
import threading
import uuid

import psutil
import pytest
from conftest import REPOSITORY

from support import processes
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


class Launcher:
    """A running command, `python -m tfdist.launch` unless told otherwise, whose lines are read as they come."""

    def __init__(self, arguments, env, cwd, module="tfdist.launch", host=()):
        self.process = processes.Popen(
            [*host, sys.executable, "-m", module, *map(str, arguments)],
            cwd=cwd, env=env, stdout=processes.PIPE, stderr=processes.PIPE, text=True, errors="replace", real=True,
        )  # fmt: skip
        self.out, self.err = [], []
        self._news = threading.Condition()
        self._threads = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, pipe, lines):
        for line in pipe:
            with self._news:
                lines.append(line.rstrip("\n"))
                self._news.notify_all()

    def until(self, text):
        """Waits for a line with `text` in it and returns that line."""

        def found():
            return next((line for line in [*self.out, *self.err] if text in line), None)

        with self._news:
            assert self._news.wait_for(found, TIMEOUT_S), f"{text!r} never came: {self.out} {self.err}"
            return found()

    def signal(self, number):
        self.process.send_signal(number)

    def end(self):
        """Exit code, once it has ended."""
        code = self.process.wait(TIMEOUT_S)
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        return code

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

    def start(*arguments, host=(), module="tfdist.launch", **environ):
        """Starts one, on a host if the words that let it run there are given."""
        env = {k: v for k, v in os.environ.items() if not drop.match(k)}
        env |= {"PYTHONPATH": str(REPOSITORY), "TEST_MARK": mark, "TF_CPP_MIN_LOG_LEVEL": "2"} | environ
        started.append(Launcher(arguments, env, tmp_path, module, host))
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


__all__ = ["TIMEOUT_S", "Launcher", "account", "free_port", "launch", "let_go_on", "marked", "pipes", "signal"]
