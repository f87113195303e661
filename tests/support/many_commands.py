"""Runs a command many times from one interpreter, which forks for each: for tables of arguments that end it at once.

The modules of the command are loaded before the first fork, so that only what depends on the arguments is done again.
It must not load TensorFlow, which does not survive a fork.
"""

import atexit
import contextlib
import json
import os
import pathlib
import runpy
import subprocess
import sys
from importlib import import_module

REPOSITORY = pathlib.Path(__file__).parent.parent.parent


def run(module, each, cwd, environ, path):
    """Runs `python -m MODULE` with each list of arguments; returns what `subprocess.run` would, one for each."""
    env = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "TF_CONFIG")}
    env |= {"PYTHONPATH": path, **environ}
    asked = json.dumps([module, each])
    words = [sys.executable, __file__]
    done = subprocess.run(words, input=asked, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, check=True)
    ends = json.loads(done.stdout)
    return [subprocess.CompletedProcess(arguments, *end) for arguments, end in zip(each, ends, strict=True)]


def refuses(module, table, cwd, path="", **environ):
    """Fails unless the command refuses each list of arguments in one line, which has the message beside them."""
    path = os.pathsep.join([*filter(None, [path]), str(REPOSITORY)])
    done = run(module, [arguments for arguments, _ in table], cwd, environ, path)
    for end, (_, message) in zip(done, table, strict=True):
        assert (end.returncode, end.stdout) == (2, "") and end.stderr.startswith("tfdist: error: "), end
        assert message in end.stderr and end.stderr.count("\n") == 1, end


def main():
    module, each = json.load(sys.stdin)
    sys.path[0] = os.getcwd()  # as -m does
    import_module(f"{module}.__main__")
    ends = []
    for arguments in each:
        files = out, err, names = [os.memfd_create(name) for name in ("out", "err", "names")]
        child = os.fork()
        if child == 0:
            os.dup2(out, 1)
            os.dup2(err, 2)
            sys.argv = [module, *arguments]
            del sys.modules[f"{module}.__main__"]
            atexit.register(lambda names=names: os.write(names, "\n".join(sys.modules).encode()))
            return runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = [os.pread(file, os.fstat(file).st_size, 0).decode() for file in files]
        for file in files:
            os.close(file)
        ends.append([code, *said[:2]])
        _load(said[2].split())
    json.dump(ends, sys.stdout)


def _load(names):
    """Loads what a command has loaded on its way, for those that come after it."""
    for name in names:
        if name not in sys.modules and name != "__mp_main__":
            with contextlib.suppress(ImportError):  # made by a module, and no file
                import_module(name)
    assert "tensorflow" not in sys.modules


if __name__ == "__main__":
    main()
