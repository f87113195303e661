"""A process from the fork server is one as `subprocess` starts it: its output, its end, its place, its result."""

import json
import os
import pathlib
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
SEEN = """\
import os, signal, sys
print(sys.path, sys.argv, sys.orig_argv, sys.executable, os.getcwd(), sorted(globals()))
print(__name__, __doc__, __spec__ and __spec__.name)
print(os.getppid(), os.getpgid(0) == os.getpgid(os.getppid()), os.getsid(0) == os.getpid())
print(sorted(os.listdir("/proc/self/fd")), [os.get_inheritable(n) for n in range(3)])
for s in (sys.stdin, sys.stdout, sys.stderr):
    print(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.fileno())
    print(s is getattr(sys, f"__{s.name[1:-1]}__"))
print([signal.getsignal(n) for n in sorted(signal.valid_signals())], signal.pthread_sigmask(signal.SIG_BLOCK, []))
print(open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)))
given = [line for line in open("/proc/self/environ").read().split(chr(0)) if line]
print(sorted(given), sorted(os.environ.items() - {line.partition("=")[::2] for line in given} - set_by_loading))
print(os.popen("env | grep MARK").read())
"""
PROGRAMS = [
    ["-c", "print('hello', end='')"],
    ["-c", "raise ValueError('ß')"],
    ["-c", "def f(): raise KeyError(1)\ntry: f()\nexcept KeyError: 1 / 0"],
    ["-c", "this is no Python"],
    ["-c", "raise KeyboardInterrupt"],
    ["-c", "import sys; sys.exit()"],
    ["-c", "import sys; sys.exit(7)"],
    ["-c", "import sys; sys.exit('goodbye')"],
    ["-c", "import os; print('never shown'); os._exit(3)"],
    ["-c", "import os, signal; print('a', flush=True); os.kill(os.getpid(), signal.SIGTERM)"],
    ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"],
    ["-c", "import atexit; atexit.register(print, 'last'); print('first'); raise RuntimeError"],
    ["-c", "import sys; sys.excepthook = lambda *a: print('mine', a[0], a[2].tb_lineno); 1 / 0"],
    ["-c", "import threading; threading.Timer(0, print, ['from a thread']).start()"],
    ["-c", "import sys; print(sys.stdin.read().upper(), len(sys.argv))", "a", "b c"],
    ["-c", "import logging, absl.logging; logging.warning('w'); absl.logging.error('e')"],
    ["-m", "nowhere.at.all"],
    ["-m", "module", "--flag=1"],
    ["-m", "package"],
    ["-m", "package.part"],
    ["script.py", "one"],
    ["./script.py"],
    ["-m", "tfdist.train", "--config.model.name=cm"],
]
"""What each does is the same with a fresh interpreter, byte for byte."""


@pytest.fixture
def folder(tmp_path):
    for name in ("script.py", "module.py", "package/part.py", "package/__main__.py", "package/__init__.py"):
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"start_new_session": True},
        {"env": {"PYTHONPATH": f"relative{os.pathsep}{REPOSITORY}{os.pathsep}relative", "MARK": "1"}},
        {"env": {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "ascii:replace"}},
        {"env": {"PYTHONIOENCODING": "latin-1"}},
        {"stderr": processes.STDOUT, "stdin": processes.DEVNULL},
    ],
    ids=["plain", "session", "path", "direct", "encoding", "streams"],
)
def test_what_a_program_sees(options, folder):
    if "env" in options:  # beside the variables of now, not of when this file was collected
        options = {"env": os.environ | options["env"]}
    made = ("TF2_BEHAVIOR", "ENABLE_RUNTIME_UPTIME_TELEMETRY", "TPU_ML_PLATFORM", "TPU_ML_PLATFORM_VERSION")
    made = {(name, os.environ[name]) for name in (*made, "HDF5_PLUGIN_PATH") if name in os.environ}
    (folder / "seen.py").write_text(f"set_by_loading = {made}\n{SEEN}")
    for words in (["seen.py", "--flag"], ["-m", "seen"]):
        forked, real = both(*words, cwd=folder, **options)
        assert forked[0] == 0
        for ours, theirs in zip(forked[1].decode().splitlines(), real[1].decode().splitlines(), strict=True):
            differing = set(re.split(r"(?:', '|\[\"|\"\])", ours)) ^ set(re.split(r"(?:', '|\[\"|\"\])", theirs))
            assert ours == theirs, differing
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


def test_signals_that_this_process_ignores_or_blocks_stay_so():
    code = "import signal; print(signal.getsignal(signal.SIGUSR1), signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        forked, real = both("-c", code)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGUSR1, before)
    assert forked == real and real[1].startswith(b"1 ") and b"SIGUSR2" in real[1]


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


def test_errors_of_the_start_are_those_of_subprocess(tmp_path):
    with pytest.raises(FileNotFoundError):
        processes.Popen([sys.executable, "-c", "pass"], cwd=tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        processes.Popen([str(tmp_path / "python"), "-c", "pass"])
    assert processes.run([sys.executable, "missing.py"], capture_output=True).returncode == 2
    with pytest.raises(processes.CalledProcessError):
        processes.run([sys.executable, "-c", "exit(1)"], check=True)
    with pytest.raises(processes.TimeoutExpired):
        processes.run([sys.executable, "-c", "import signal; signal.pause()"], timeout=0.01)


def test_two_children_draw_other_numbers():
    code = "import random, numpy, keras; print(random.random(), numpy.random.random(), keras.random.uniform([1]))"
    assert len({processes.run([sys.executable, "-c", code], capture_output=True).stdout for _ in range(2)}) == 2


OWNER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from support import processes
process = processes.Popen([sys.executable, "-c", "import signal; signal.pause()"])
assert process.forked
mine = [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent(p) == os.getpid()]
print(os.getpid(), process.pid, *mine, flush=True)
import signal; signal.pause()
"""


@pytest.mark.whole
def test_nothing_outlives_the_process_that_has_asked(tmp_path):
    """Not even SIGKILL leaves the server or its children behind."""
    parent = (
        "def parent(p):\n    try: return int(open(f'/proc/{p}/stat').read().rpartition(')')[2].split()[1])\n    "
        "except OSError: return 0\n"
    )
    (tmp_path / "owner.py").write_text(parent + OWNER)
    words = [sys.executable, str(tmp_path / "owner.py"), str(pathlib.Path(__file__).parents[1])]
    owner = processes.Popen(words, stdout=processes.PIPE, text=True, real=True)
    family = [psutil.Process(int(word)) for word in owner.stdout.readline().split()]
    assert len({process.pid for process in family}) == 3  # with the server
    owner.kill()
    owner.communicate()
    _, alive = psutil.wait_procs(family, timeout=LIMIT_S)
    assert not alive


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


@pytest.mark.whole
def test_a_training_comes_to_the_same_bits(tmp_path, tfds_dir):
    flags = ["--config.model.name=mlp", "--config.train.epochs=2", "--config.optimizer.warmup=0%", "--threads=1"]
    environ = os.environ | ENVIRON | {"TFDS_DATA_DIR": str(tfds_dir)}
    results = []
    for name in ("forked", "real"):
        words = [sys.executable, "-m", "tfdist.train", *flags, "--virtual_devices=2", f"--workdir={name}"]
        done = processes.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, real=name == "real")
        assert done.returncode == 0, done.stderr
        results.append(json.loads((tmp_path / name / "result.json").read_text()))
    forked, real = results
    assert forked["weights_sha256"] == real["weights_sha256"]
    assert (forked["history"], forked["evaluation"]) == (real["history"], real["evaluation"])
    assert forked.keys() == real.keys()
