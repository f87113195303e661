"""A process from the fork server is one as `subprocess` starts it: its output, its end, its place, its result."""

import os
import re
import signal
import sys

import psutil
import pytest
from conftest import REPOSITORY

from support import processes

ENVIRON = {"PYTHONPATH": str(REPOSITORY)}
LIMIT_S = 120
"""For any process here; no test depends on how fast it is."""

SCRIPT = """\
import sys
def fail():
    print("out", sys.argv, __name__, __file__)
    print("err", file=sys.stderr)
    raise ValueError("no good")
fail()
"""
PROGRAMS = [
    ["-c", "raise ValueError('ß')"],
    ["-c", "this is no Python"],
    ["-c", "import sys; sys.exit('goodbye')"],
    ["-c", "import os, signal; print('a', flush=True); os.kill(os.getpid(), signal.SIGTERM)"],
    ["-c", "import atexit; atexit.register(print, 'last'); print('first'); raise RuntimeError"],
    ["-c", "import sys; print(sys.stdin.read().upper(), len(sys.argv))", "a", "b c"],
    ["-c", "import logging, absl.logging; logging.warning('w'); absl.logging.error('e')"],
    ["-m", "nowhere.at.all"],
    ["-m", "package.part"],
    ["./script.py"],
    ["-m", "tfdist.train", "--config.model.name=cm"],
]
"""What each does is the same with a fresh interpreter, byte for byte."""


@pytest.fixture
def folder(tmp_path):
    for name in ("script.py", "package/part.py", "package/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "__init__" in name else SCRIPT)
    return tmp_path


def both(*words, **options):
    """What a forked process comes to, and what a real one does."""
    found = []
    for real in (False, True):
        kwargs = dict(stdin=processes.PIPE, stdout=processes.PIPE, stderr=processes.PIPE, real=real) | options
        process = processes.Popen([sys.executable, *words], **kwargs)
        assert process.forked is not real
        out, err = process.communicate(b"given", timeout=LIMIT_S)
        found.append((process.returncode, re.sub(rb"\b%d\b" % process.pid, b"PID", out), err))
    return found


@pytest.mark.parametrize("words", PROGRAMS, ids=lambda words: " ".join(words)[:50])
def test_what_a_program_comes_to(words, folder):
    forked, real = both(*words, cwd=folder, env=os.environ | ENVIRON)
    assert forked == real


def test_files_are_passed_on_and_others_are_not(folder):
    reading, writing = os.pipe()
    other = os.dup(writing)
    os.set_inheritable(other, True)
    code = f"import os; os.write({writing}, b'through'); print(os.path.exists('/proc/self/fd/{other}'))"
    for end in both("-c", code, pass_fds=[writing]):
        assert end == (0, b"False\n", b"")
    assert os.read(reading, 100) == b"throughthrough"
    for fd in (reading, writing, other):
        os.close(fd)


def waiting(**options):
    """A forked process that has said that it runs."""
    words = [sys.executable, "-c", "print('up', flush=True); import signal; signal.pause()"]
    process = processes.Popen(words, stdout=processes.PIPE, text=True, **options)
    assert process.forked and process.stdout.readline() == "up\n"
    return process


def test_it_is_a_child_that_signals_reach():
    process = waiting()
    assert psutil.Process(process.pid).ppid() == os.getpid()
    process.send_signal(signal.SIGSTOP)
    found = os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert (found.si_code, found.si_status) == (os.CLD_STOPPED, signal.SIGSTOP)
    with pytest.raises(processes.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGCONT)
    for number, code in ((signal.SIGTERM, -15), (signal.SIGKILL, -9), (signal.SIGINT, -2)):
        process.send_signal(number)
        assert process.wait(LIMIT_S) == code and process.poll() == code
        assert not psutil.pid_exists(process.pid)  # nor a zombie
        process.stdout.close()
        process = waiting(stderr=processes.DEVNULL)
    os.killpg(os.getpgid(process.pid), 0)
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    "words, options",
    [
        (["-S", "-c", "pass"], {}),
        (["-m", "numpy"], {}),
        (["-m", "tfdist.doctor", "--help"], {"env": {**os.environ, **ENVIRON}}),
        (["-c", "pass"], {"env": {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}}),
        (["-c", "pass"], {"env": {**os.environ, "PYTHONHASHSEED": "1"}}),
        (["-c", "pass"], {"env": {**os.environ, "PYTHONPATH": "poison"}}),
        (["-m", "script"], {"cwd": "poison"}),
        (["poison/script.py"], {}),
        (["-c", "pass"], {"preexec_fn": lambda: None}),
        (["-c", "pass"], {"close_fds": False}),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_needs_a_fresh_interpreter_has_one(words, options, tmp_path, monkeypatch):
    (tmp_path / "poison").mkdir()
    (tmp_path / "poison" / "keras.py").write_text("raise AssertionError")
    (tmp_path / "poison" / "script.py").write_text("")
    monkeypatch.chdir(tmp_path)
    process = processes.Popen([sys.executable, *words], stdout=processes.PIPE, stderr=processes.PIPE, **options)
    process.communicate(timeout=LIMIT_S)
    assert not process.forked


def test_a_launcher_gets_a_server_of_its_own(tmp_path):
    """Its workers are its children: it sees how they end, and they end with it."""
    (tmp_path / "worker.py").write_text(
        "import os, signal, sys\nprint('parent', os.getppid(), 'keras' in sys.modules, os.getsid(0) == "
        "os.getpid(), flush=True)\n"
        "if os.environ['RANK'] == '0':\n"
        "    open('said', 'w').close()\n"
        "    signal.pause()\n"
        "open('said').close()  # else the launcher may end the other one before it has printed\n"
        "os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    os.mkfifo(tmp_path / "said")
    words = [sys.executable, "-m", "tfdist.launch", "--nproc_per_node=2", "--", "worker.py"]
    done = processes.Popen(
        words, cwd=tmp_path, env=os.environ | ENVIRON, text=True, stdout=processes.PIPE, stderr=processes.PIPE
    )
    out, err = done.communicate(timeout=LIMIT_S)
    assert done.forked and done.returncode == 128 + signal.SIGSEGV
    assert sorted(line for line in out.splitlines() if "parent" in line) == [
        f"[{rank}] parent {done.pid} True True" for rank in range(2)
    ]
    assert "was killed by SIGSEGV" in err
