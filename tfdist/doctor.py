"""Examines a run folder: `python -m tfdist.doctor --workdir=runs/digits`. It changes nothing.

Lists the checkpoints, reads every byte of them, and says which one a resume
would use. Exit codes: 0 all is well, or there is nothing yet; 2 something is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import time
from typing import Any

from absl import flags

from tfdist import checkpoint, command
from tfdist.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One checkpoint."""

    path: str
    update: int
    epochs: int | None
    """Epochs that were complete."""
    begun: int | None
    """Updates of the next one."""
    bytes: int | None
    written: str
    problem: str
    """Why it cannot be used, or nothing."""
    next: bool
    """Whether a resume would use this one."""


def examine(folder: pathlib.Path) -> list[Finding]:
    """Verifies all checkpoints of a folder, the newest first."""
    findings: list[Finding] = []
    for path in checkpoint.found(folder):
        size, epochs, begun, problem = None, None, None, ""
        try:
            size = checkpoint.verify(path)
            position = checkpoint.read_state(path)["position"]
            epochs, begun = position["epoch"], position["begun"]
        except checkpoint.DamagedError as error:
            problem = str(error)
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        first = not problem and not any(f.next for f in findings)
        findings.append(Finding(str(path), checkpoint.update_of(path), epochs, begun, size, written, problem, first))
    return findings


def _lines(findings: list[Finding]) -> list[str]:
    lines = []
    for f in findings:
        done = f"{f.epochs} epochs{f' and {f.begun} updates' if f.begun else ''}, {_size(f.bytes or 0)}"
        what = f"fail  {f.path}  {f.problem}" if f.problem else f"ok    {f.path}  after {done}"
        lines.append(f"{what}, {f.written}{'  <- a resume goes on from here' if f.next else ''}")
    return lines


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


def _run(argv: list[str]) -> int:
    del argv
    workdir = pathlib.Path(os.path.expanduser(flags.FLAGS.workdir))
    if not flags.FLAGS.workdir:
        raise UserError("--workdir is missing: give the folder of a run, such as runs/digits")
    if not workdir.is_dir():
        raise UserError(f"--workdir={workdir} does not exist: give the folder of a run")
    try:
        findings = examine(workdir / "checkpoints")
    except OSError as error:
        raise UserError(
            f"{workdir / 'checkpoints'} cannot be read ({error.strerror}): correct its permissions"
        ) from None
    report: dict[str, Any] = {"workdir": str(workdir), "checkpoints": [dataclasses.asdict(f) for f in findings]}
    if flags.FLAGS.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(_lines(findings) or [f"no checkpoints in {workdir}"]))
    bad = sum(bool(f.problem) for f in findings)
    if bad and not flags.FLAGS.json:
        fix = "a resume leaves it out" if len(findings) > bad else "none is left: copy one back, or --resume=never"
        print(f"tfdist: {bad} of {len(findings)} checkpoints damaged: {fix}", file=sys.stderr)
    return 2 if bad else 0


def main() -> None:
    """Entry point of `python -m tfdist.doctor`."""
    flags.DEFINE_string("workdir", "", "Folder of a run, such as runs/digits.")
    flags.DEFINE_bool("json", False, "Print the findings as JSON.")
    command.main(_run, command.parse_own, "interrupted")


if __name__ == "__main__":
    main()
