"""The `sitecustomize` of workers that meet with a fault at a moment: when that comes, one of them is hit.

The variable FAULT says `moment/fault/victim`. The moment is one in the program itself, so that no clock can miss it: of
the victim's own program where all workers have such a moment, else of the chief's, which then hits the victim, or of
that of the rank in FAULT_BY.
"""

import importlib.machinery
import os
import pathlib
import signal
import sys
import time

OF_THE_CHIEF = ("checkpoint", "report", "result")
"""Moments that the chief alone has."""
HIT = "hit"
"""The file that tells when."""
MID_EPOCH = 40
"""Updates after which the moments of a run under way come: two checkpoints are on the disk, or being written."""


class Fault:
    """What is to come."""

    def __init__(self, moment, kind, victim, rank, folder):
        self.moment, self._kind, self._victim, self._rank = moment, kind, victim, rank
        self._folder = pathlib.Path(folder)
        self._done = False

    @property
    def is_mine(self):
        """Whether this worker brings it about."""
        own = 0 if self.moment in OF_THE_CHIEF else self._victim
        return self._rank == int(os.environ.get("FAULT_BY", own))

    def hit(self):
        if self._done:
            return
        self._done = True
        pid = int((self._folder / f"pid-{self._victim}").read_text())
        (self._folder / HIT).write_text(str(time.time()))
        if self._kind == "disk":
            fill(self._folder / "run")
        elif self._kind == "network":
            (self._folder / "asked").write_text("x")  # pipes: the test unplugs the victim's host in between
            with open(self._folder / "done", "rb", buffering=0) as done:
                done.read(1)
        else:
            os.kill(pid, getattr(signal, self._kind))


def fill(disk):
    """Leaves no room."""
    with open(disk / "ballast", "wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


class _Finder:
    """Stands before all others, and sees each module before it is loaded."""

    def __init__(self, name, then):
        self._name, self._then = name, then

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        return self._then(path)


def when_loaded(name, change):
    """Calls `change` with a module as soon as it has been loaded."""

    def then(path):
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec

    sys.meta_path.insert(0, _Finder(name, then))


def before(owner, name, hit, when=lambda *arguments, **named: True):
    """Calls `hit` before a function of a module or class, at the first call that is meant."""
    original = getattr(owner, name)

    def changed(*arguments, **named):
        if when(*arguments, **named):
            hit()
        return original(*arguments, **named)

    setattr(owner, name, changed)


def counted(number):
    calls = []

    def is_it(*arguments, **named):
        calls.append(1)
        return len(calls) == number

    return is_it


def half_written(module, hit):
    """Hits when half of the second checkpoint has been written."""
    original, is_it = module.write, counted(2)

    def write(folder, update, state, tensors, *rest):
        def and_hit(prefix):
            tensors(prefix)
            if is_it():
                hit()

        return original(folder, update, state, and_hit, *rest)

    module.write = write


def arrange(fault):
    """Puts the hook in its place."""
    hit = fault.hit
    match fault.moment:
        case "import":
            sys.meta_path.insert(0, _Finder("tensorflow", lambda path: hit()))
        case "meeting":
            several = lambda cluster, *rest: cluster.size > 1 or "HOROVOD_RANK" not in os.environ
            when_loaded("tfdist.cluster.registration", lambda m: before(m, "meet", hit, several))
        case "first compile":
            when_loaded("tfdist.step.replica", lambda m: before(m.Replica, "passes", hit))
        case "training":
            late = lambda self, now, *rest: now.update >= MID_EPOCH
            when_loaded("tfdist.trainer.loop", lambda m: before(m.FitLoop, "_call", hit, late))
        case "evaluation":
            when_loaded("tfdist.trainer.evaluation", lambda m: before(m.Evaluation, "run", hit, counted(2)))
        case "checkpoint":
            when_loaded("tfdist.checkpoints.files", lambda m: half_written(m, hit))
        case "report":
            when_loaded("tfdist.monitoring.report.page", lambda m: before(m, "write", hit))
        case "result":
            last = lambda self, name, *rest: name == "result.json"
            when_loaded("tfdist.checkpoints.run_folder", lambda m: before(m.RunFolder, "write", hit, last))
        case _:
            raise ValueError(fault.moment)


def main():
    words = getattr(sys, "orig_argv", [])
    if "FAULT" not in os.environ or words[1:3] != ["-m", "tfdist.train"]:
        return  # a launcher, whose words may end with these
    rank = int(os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0")))
    folder = os.environ["FAULT_FOLDER"]
    moment, kind, victim = os.environ["FAULT"].split("/")
    (pathlib.Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    fault = Fault(moment, kind, int(victim), rank, folder)
    if fault.is_mine:
        arrange(fault)
