"""`tfdist.launch(function)`: runs a function in several workers of this machine, for notebooks."""

from __future__ import annotations

import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from tfdist.cluster import env_vars
from tfdist.config import messages
from tfdist.distributed import child_process
from tfdist.errors import TrainingError, UserError, one_line, printable

T = TypeVar("T")
WORK, RESULT, ERROR = "work.pickle", "{rank}.result", "{rank}.error"
"""Files in the folder that the workers share with the process that started them."""


def launch(function: Callable[..., T], *args: Any, nproc: int = 2, show: bool = True) -> list[T]:
    """Runs a function in several workers of this machine, and returns their results by rank.

    For notebooks. The function calls `tfdist.connect("multi_worker")` and creates model and data itself, since it runs
    in other processes. Their output appears as with `tfdist.launch` on the command line. A failure or an interrupt ends
    all of them.

    Args:
      function: a function, also of a cell, or a lambda.
      *args: what it is called with; a copy of each travels to the workers.
      nproc: how many workers; GPUs of this machine are divided among them.
      show: whether what they print appears here.

    Raises:
      UserError: function or arguments cannot be sent to another process, or the workers cannot be started.
      TrainingError: the function has failed, or what it returned cannot be sent back.
    """
    import cloudpickle

    if not callable(function):
        raise UserError(
            f"tfdist.launch() runs a function, got {type(function).__name__}", "give one, then its arguments"
        )
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise UserError(f"nproc must be a whole number of at least 1, got {nproc!r}")
    try:
        work = cloudpickle.dumps((function, args))
    except Exception as error:  # whatever the objects that it refers to raise
        raise UserError(
            f"{_name(function)} cannot be sent to workers ({one_line(error, 200)})",
            "make model, data and distribution inside of it",
        ) from error
    with tempfile.TemporaryDirectory(prefix="tfdist-launch-") as name:
        folder = pathlib.Path(name)
        (folder / WORK).write_bytes(work)
        code = _run(folder, nproc, show)
        errors = [path for rank in range(nproc) if (path := folder / ERROR.format(rank=rank)).exists()]
        if errors:
            first = min(errors, key=lambda path: path.stat().st_mtime_ns)  # others may have failed since it did
            raise TrainingError(f"{_name(function)} has failed on rank {first.stem}: {first.read_text()}")
        if code:
            raise TrainingError(f"{_name(function)} has ended with code {code}: the workers' last lines say why")
        results = []
        for rank in range(nproc):
            try:
                results.append(pickle.loads((folder / RESULT.format(rank=rank)).read_bytes()))
            except FileNotFoundError:
                raise TrainingError(
                    f"{_name(function)} has ended rank {rank} without returning: leave out sys.exit and os._exit"
                ) from None
            except Exception as error:  # whatever the objects in it raise
                raise TrainingError(
                    f"what {_name(function)} returned on rank {rank} cannot be loaded here ({one_line(error, 200)}): "
                    "return numbers"
                ) from error
        return results


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _run(folder: pathlib.Path, nproc: int, show: bool) -> int:
    """Starts the launcher, shows what it and its workers print, and returns its exit code."""
    command = [sys.executable, "-m", "tfdist.launch", "--nnodes=1", f"--nproc_per_node={nproc}"]
    command += ["--", "-m", "tfdist.launch.notebook", str(folder)]
    # What this process can import, they can.
    path = os.pathsep.join([*filter(None, sys.path)])
    launcher = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # Whatever job this process is part of, these workers are of this machine alone.
        env=env_vars.without(os.environ, env_vars.CLUSTER) | {"PYTHONPATH": path},
        start_new_session=True,  # or an interrupt of a notebook's kernel would reach it twice
        preexec_fn=child_process.end_with_the_parent(),
    )
    assert launcher.stdout is not None
    interrupted = False
    while True:
        try:
            for line in launcher.stdout:
                if show:
                    print(line, end="", flush=True)
            code = launcher.wait()
            break
        except KeyboardInterrupt:
            launcher.send_signal(signal.SIGKILL if interrupted else signal.SIGINT)
            interrupted = True
    if interrupted:
        raise KeyboardInterrupt
    return code


def _work(folder: pathlib.Path, rank: int) -> int:
    """Runs one worker: calls the function and saves what it returns; returns the exit code."""
    import cloudpickle

    messages.chief_only(rank == 0)
    try:
        function, args = pickle.loads((folder / WORK).read_bytes())
        result = function(*args)
    except Exception as error:  # whatever the user's function raises
        if not isinstance(error, UserError):  # which says in a line what to change
            traceback.print_exc()
        return _failed(folder, rank, f"{type(error).__name__}: {_text(error)}")
    try:
        content = cloudpickle.dumps(result)
    except Exception as error:  # whatever its objects raise
        return _failed(folder, rank, f"what it returned cannot be sent back ({_text(error)}): return numbers")
    (folder / RESULT.format(rank=rank)).write_bytes(content)
    return 0


def _text(error: Exception) -> str:
    try:
        return one_line(error, 400)
    except Exception as another:  # of its __str__
        return f"its text cannot be made, {type(another).__name__}"


def _failed(folder: pathlib.Path, rank: int, line: str) -> int:
    (folder / ERROR.format(rank=rank)).write_text(printable(line, 1000), errors="backslashreplace")
    return 1


if __name__ == "__main__":
    sys.exit(_work(pathlib.Path(sys.argv[1]), int(os.environ["RANK"])))
