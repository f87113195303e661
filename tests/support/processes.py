"""How tests start processes: as `subprocess` does, but that Python's come from a fork server where that is the same.

`real=True` asks for a fresh interpreter all the same. It is for tests of how a command starts: how long it takes, what
it loads, what it prints while it loads, what it needs of memory.
"""

import atexit
import inspect
import os
import socket
import subprocess
import sys
import tempfile
from subprocess import DEVNULL, PIPE, STDOUT, CalledProcessError, CompletedProcess, TimeoutExpired

from support import asking

_TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PROGRAM = (
    "import sys; sys.path.insert(1, sys.argv[2]); from support import fork_server; fork_server.main(int(sys.argv[1]))"
)
_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)
_servers = {}
_environ = {}


def settle():
    """Takes the environment of now for the fork server: the test that starts it may have changed it for itself."""
    _environ.update(os.environ)


def restore():
    """Puts variables back that a library has set meanwhile, and that would ask for fresh interpreters from now on."""
    before, now = asking.early(_environ), asking.early(os.environ)
    for name in now.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def server():
    """The fork server of this process, or None where there can be none; the first call starts it."""
    if os.getpid() not in _servers:
        _servers[os.getpid()] = _start() if sys.platform.startswith("linux") else None
    return _servers[os.getpid()]


def _start():
    environ = {name: value for name, value in (_environ or os.environ).items() if name != "PYTHONPATH"}
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as said:
        with theirs:
            words = [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), _TESTS, "x" * asking.ROOM["words"]]
            room = {"ROOM": "x" * asking.ROOM["environ"]}
            started = subprocess.Popen(
                words, env=environ | room, pass_fds=[theirs.fileno()], stdin=DEVNULL, stdout=said, stderr=said
            )
        told, _ = asking.receive(ours)
        if told is None:
            said.seek(0)
            raise RuntimeError(f"the fork server has not started: {said.read().decode()}")
    modules, idle = told
    assert idle, "TensorFlow has begun something while it was loaded, so it cannot be forked"

    def end():
        ours.close()
        started.wait()

    atexit.register(end)
    return asking.Server(ours, environ, modules, binds=True)


class Popen(subprocess.Popen):
    """`subprocess.Popen`, whose process is a child of this one in either way.

    Args:
      real: whether it has to be a fresh interpreter.
    """

    def __init__(self, *arguments, real=False, **named):
        self.forked = False
        self._real = real
        super().__init__(*arguments, **named)

    def _execute_child(self, *arguments):
        original = subprocess.Popen._execute_child
        if self._real:
            return original(self, *arguments)
        return asking.execute_child(server, original, _SIGNATURE, self, arguments)


def run(*arguments, input=None, capture_output=False, timeout=None, check=False, **named):
    """`subprocess.run`."""
    if capture_output:
        named |= dict(stdout=PIPE, stderr=PIPE)
    if input is not None:
        named["stdin"] = PIPE
    with Popen(*arguments, **named) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
        if check and process.returncode:
            raise CalledProcessError(process.returncode, process.args, out, err)
    return CompletedProcess(process.args, process.returncode, out, err)


__all__ = ["DEVNULL", "PIPE", "STDOUT", "Popen", "TimeoutExpired", "run", "server"]
