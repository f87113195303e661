"""Worlds of several processes on this machine, for tests that compare what their workers end with."""

import json
import os
import pathlib
import pickle
import shutil
import socket
import sys

from support import processes

HERE = pathlib.Path(__file__).parent

WORLDS = {
    "multi_worker 1": ("multi_worker", 1, {}), "multi_worker 2": ("multi_worker", 2, {}),
    "multi_worker 2 by ring": ("multi_worker", 2, {"communication": "ring"}), "multi_worker 3": ("multi_worker", 3, {}),
    "multi_worker 2 x 2 devices": ("multi_worker", 2, {"virtual_devices": 2}), "horovod 2": ("horovod", 2, {}),
    "horovod 3": ("horovod", 3, {}),
}  # fmt: skip
"""Strategy, workers and options of each."""


def asked(request, names, **given):
    """Which of these names the tests of this session ask for, with the given values of other parameters."""
    cells = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    return [name for name in names if any(cell.items() >= {"name": name, **given}.items() for cell in cells)]


def outcomes(folder, strategy, workers, kind, names, **options):
    """Runs `world_worker.py` on all workers, by hand or by horovodrun; returns what each ends with, by name.

    The workers have half a minute for each name, and half an hour for all else.
    """
    env = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    env |= {"PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE.parent.parent}", "TF_CPP_MIN_LOG_LEVEL": "2"}
    env["CONNECT"] = json.dumps({"strategy": strategy, "threads": 1, "start_timeout": 120, **options})
    command = [sys.executable, str(HERE / "world_worker.py"), str(folder), kind, *names]
    if strategy == "horovod":
        runner = shutil.which("horovodrun", path=str(pathlib.Path(sys.executable).parent))
        assert runner, "Horovod is not built: run python -m tfdist.horovod_build"
        launches = [([runner, "--gloo", "-np", str(workers), *command], env)]
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(workers)}
        launches = [(command, env | world | {"RANK": str(rank)}) for rank in range(workers)]
    running = []
    try:
        for number, (words, environ) in enumerate(launches):
            with open(folder / f"{number}.log", "wb") as log:
                running.append(processes.Popen(words, env=environ, stdout=log, stderr=log))
        codes = [process.wait(1800 + 30 * len(names)) for process in running]
    finally:
        for process in running:
            process.kill()
    assert codes == [0] * len(codes), "\n".join(p.read_text()[-3000:] for p in sorted(folder.glob("*.log")))
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(workers)]
