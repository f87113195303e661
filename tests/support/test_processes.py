"""A process from the fork server is one as `subprocess` starts it: its output, its end, its place, its result."""

import os
import re
import sys

import pytest
from conftest import REPOSITORY

from support import processes
from support.covering import first

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
    ["-c", "import sys; print(sys.stdin.read().upper(), len(sys.argv))", "a", "b c"], ["-m", "package.part"],
    ["-c", "import os, signal; print('a', flush=True); os.kill(os.getpid(), signal.SIGTERM)"],
    ["-m", "tfdist.train", "--config.model.name=cm"], ["-c", "raise ValueError('ß')"], ["-c", "this is no Python"],
    ["-c", "import sys; sys.exit('goodbye')"],
    ["-c", "import atexit; atexit.register(print, 'last'); print('first'); raise RuntimeError"],
    ["-c", "import logging, absl.logging; logging.warning('w'); absl.logging.error('e')"], ["-m", "nowhere.at.all"],
    ["./script.py"],
]  # fmt: skip
"""What each does is the same with a fresh interpreter, byte for byte; the first four are of `make test`."""


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


@pytest.mark.parametrize("words", first(4, PROGRAMS), ids=lambda words: " ".join(words)[:50])
def test_what_a_program_comes_to(words, folder):
    forked, real = both(*words, cwd=folder, env=os.environ | ENVIRON)
    assert forked == real
