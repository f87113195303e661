"""One finding of the doctor, and many of them found at once, each within its time."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable

from tfdist.errors import UserError

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """What was looked at and what was found."""

    name: str
    status: str
    """`ok`, `warn` or `fail`."""
    finding: str
    fix: str = ""
    """What to change; empty if nothing is wrong."""

    def __post_init__(self):
        # Drivers, peers and files say part of this: it must not move the cursor or begin a line of its own.
        for field in ("finding", "fix"):
            line = " ".join(getattr(self, field).split())
            object.__setattr__(self, field, "".join(c if c.isprintable() else "?" for c in line))


def ok(name: str, finding: str) -> Check:
    """Makes a finding with which nothing is wrong."""
    return Check(name, OK, finding)


def warn(name: str, finding: str, fix: str) -> Check:
    """Makes a finding that may cost time or trouble."""
    return Check(name, WARN, finding, fix)


def fail(name: str, finding: str, fix: str) -> Check:
    """Makes a finding with which a run would fail."""
    return Check(name, FAIL, finding, fix)


def refused(name: str, error: UserError) -> Check:
    """Makes a finding of what a run would refuse; the half of its message that says what to change is the fix."""
    return fail(name, error.what, error.fix or "see python -m tfdist.train --help")


def worst(checks: Iterable[Check]) -> str:
    """Returns the worst status of all; `ok` without any."""
    return max((c.status for c in checks), key=(OK, WARN, FAIL).index, default=OK)


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A check that has still to be made."""

    name: str
    work: Callable[[], list[Check]]
    fix: str = "run it again, or give it more time with --time_limit"
    """What to do when it does not come to an end."""


def run(tasks: list[Task], until: float) -> list[Check]:
    """Does all tasks at once and waits for none beyond `until` (of `time.monotonic`).

    Returns:
      Their findings, in the order of the tasks; one that hangs is a warning.
    """
    done: queue.Queue[tuple[int, list[Check]]] = queue.Queue()
    begun = time.monotonic()

    def do(number: int, task: Task) -> None:
        try:
            checks = task.work()
        except UserError as error:
            checks = [refused(task.name, error)]
        except Exception as error:  # one check that breaks must not hide the others
            what = f"this check itself failed ({type(error).__name__}: {error})"
            checks = [warn(task.name, what, "tell the authors of tfdist, with the block for bug reports")]
        done.put((number, checks))

    for number, task in enumerate(tasks):
        # Not a pool: it would wait at exit for a thread that hangs in a system call.
        threading.Thread(target=do, args=(number, task), daemon=True).start()
    results: dict[int, list[Check]] = {}
    while len(results) < len(tasks):
        try:
            number, checks = done.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            break
        results[number] = checks
    given = until - begun
    late = {n: [warn(t.name, f"no answer within {given:.0f} s", t.fix)] for n, t in enumerate(tasks)}
    return [check for number in range(len(tasks)) for check in (late | results)[number]]
