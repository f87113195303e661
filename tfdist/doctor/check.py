"""A check of the doctor is a name and a function that returns findings; all are made at once, each within its time."""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from tfdist.distributed import child_process
from tfdist.errors import UserError

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor."""

    name: str  # of its check, which `run` adds where it is empty
    status: str
    finding: str
    fix: str = ""

    def __post_init__(self):
        # Drivers, peers and files say part of this: it must not move the cursor or begin a line of its own.
        for field in ("finding", "fix"):
            line = " ".join(getattr(self, field).split())
            object.__setattr__(self, field, "".join(c if c.isprintable() else "?" for c in line))


ok: Callable[..., Finding] = lambda finding, name="": Finding(name, OK, finding)
warn: Callable[..., Finding] = lambda finding, fix, name="": Finding(name, WARN, finding, fix)
fail: Callable[..., Finding] = lambda finding, fix, name="": Finding(name, FAIL, finding, fix)
"""Make findings with which nothing is wrong, that may cost time or trouble, and with which a run would fail."""


def refused(error: UserError, name: str = "") -> Finding:
    """Makes a finding of what a run would refuse; the half of its message that says what to change is the fix."""
    return fail(error.what, error.fix or "see python -m tfdist.train --help", name)


def worst(findings: Iterable[Finding]) -> str:
    """Returns the worst status of all; `ok` without any."""
    return max((f.status for f in findings), key=(OK, WARN, FAIL).index, default=OK)


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    name: str
    look: Callable[[], list[Finding]]
    fix: str = "run it again, or give it more time with --time_limit"  # where it does not come to an end


def run(checks: list[Check], until: float) -> list[Finding]:
    """Makes all checks at once and waits for none beyond `until` (of `time.monotonic`): one that hangs is a warning."""
    seconds, results = until - time.monotonic(), [child_process.later(check.look) for check in checks]
    concurrent.futures.wait(results, max(0.0, seconds))
    return [
        dataclasses.replace(finding, name=finding.name or check.name)
        for check, result in zip(checks, results)
        for finding in _findings(check, result, seconds)
    ]


def _findings(check: Check, result: Future[list[Finding]], seconds: float) -> list[Finding]:
    if not result.done():
        return [warn(f"no answer within {seconds:.0f} s", check.fix)]
    try:
        return result.result()
    except UserError as error:
        return [refused(error)]
    except Exception as error:  # one check that breaks must not hide the others
        what = f"this check itself failed ({type(error).__name__}: {error})"
        return [warn(what, "tell the authors of tfdist, with the block for bug reports")]
