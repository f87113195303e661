"""Where TensorFlow would abort without a word of tfdist's, a child tries it before."""

import resource
import subprocess

import pytest

from tfdist.distributed import child_process, tf_devices
from tfdist.errors import UserError

UNKNOWN = "F0000 00:00:1.5    42 parse_flags_from_env.cc:234] Unknown flag in {}: --banana"


@pytest.fixture
def child(monkeypatch):
    """Lets the child end so; returns the words of those that were started."""
    started, end = [], {"returncode": 0, "stderr": ""}

    def answer(words, timeout, environ):
        started.append(words[-2:])
        return subprocess.CompletedProcess(words, end["returncode"], "", end["stderr"]) if end else None

    def ends(returncode, stderr=""):
        end.update(returncode=returncode, stderr=stderr)
        return started

    ends.started, ends.hangs = started, end.clear
    monkeypatch.setattr(child_process, "answer", answer)
    return ends


def limited(monkeypatch, size):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (size, size))


def test_nothing_is_tried_where_nothing_is_set(child, monkeypatch):
    limited(monkeypatch, resource.RLIM_INFINITY)
    tf_devices.check_starts(True, {"XLA_FLAGS": ""})
    tf_devices.check_starts(False, {"XLA_FLAGS": "--xla_dump_to=x"})  # nothing is compiled, so nobody reads it
    assert not child.started
    tf_devices.check_starts(True, {"XLA_FLAGS": "--xla_dump_to=x"})
    tf_devices.check_starts(False, {"TF_XLA_FLAGS": "--tf_xla_auto_jit=0"})
    assert child.started == [["on", "0"], ["off", "0"]]


@pytest.mark.parametrize("name", ["XLA_FLAGS", "TF_XLA_FLAGS"])
def test_a_flag_that_xla_does_not_know(name, child, monkeypatch):
    limited(monkeypatch, resource.RLIM_INFINITY)
    child(1, f"a line\n{UNKNOWN.format(name)}\n")
    said = rf"^{name}=--banana cannot be used \(Unknown flag in {name}: --banana\): correct or unset {name}$"
    with pytest.raises(UserError, match=said):
        tf_devices.check_starts(True, {"XLA_FLAGS": "--good", "TF_XLA_FLAGS": "--good", name: "--banana"})


@pytest.mark.parametrize(
    "size, stderr, reason",
    [
        (3_072_000_000, "MemoryError\n", "MemoryError"),
        (3_072_000_000, "  what():  std::bad_alloc\n  @ 0x7f cfunction_call\n", r"what\(\): std::bad_alloc"),
        (3_072_000_000, None, "TensorFlow does not start within 120 s"),
        (1_000_000, "", "they take more than 1.5 GB"),
    ],
)
def test_too_little_address_space(size, stderr, reason, child, monkeypatch):
    limited(monkeypatch, size)
    child(-6, stderr)
    if stderr is None:
        child.hangs()
    said = rf"ulimit -v allows {size / 1e9:.1f} GB of address space, too little .* \({reason}\): raise it, or run"
    with pytest.raises(UserError, match=said):
        tf_devices.check_starts(True, {"XLA_FLAGS": "--good"})
    assert size < 1e9 or child.started == [["on", "1572000000"]]


@pytest.mark.whole
def test_real_flags(run, tmp_path):
    done = run("tfdist.train", "--jit=on", real=True, XLA_FLAGS="--banana")
    message = "XLA_FLAGS=--banana cannot be used (Unknown flag in XLA_FLAGS: --banana): correct or unset XLA_FLAGS"
    assert (done.returncode, done.stderr) == (2, f"tfdist: error: {message}\n")


@pytest.mark.whole
def test_a_real_limit(run, tmp_path):
    """The limit is set by what starts the command: Python's tests would keep it."""
    start = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_AS, (3_072_000_000,) * 2); "
    start += "os.execv(sys.executable, [sys.executable, '-m', 'tfdist.train'])"
    (tmp_path / "start.py").write_text(start)
    done = run("start", real=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("tfdist: error: ulimit -v allows 3.1 GB of address space, too little for TensorFlow")
