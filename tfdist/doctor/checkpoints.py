"""A run folder and its checkpoints, every byte of them read. No TensorFlow."""

from __future__ import annotations

import dataclasses
import pathlib
import time

from tfdist.checkpoints import files, integrity, storage
from tfdist.checkpoints.bucket_folder import BucketFolder
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.config import buckets
from tfdist.doctor.check import Check, fail, ok
from tfdist.doctor.disk import size
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
    """Verifies all checkpoints of a folder, the newest first.

    Raises:
      UserError: the folder is there and cannot be read.
    """
    findings: list[Finding] = []
    for path in files.newest_first(folder):
        size, epochs, begun, problem = None, None, None, ""
        try:
            size = files.verify(path)
            position = files.read_state(path)["position"]
            epochs, begun = position["epoch"], position["begun"]
        except files.DamagedError as error:
            problem = str(error)
        try:
            written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        except OSError:  # a run that goes on has just deleted it as one too many
            continue
        first = not problem and not any(f.next for f in findings)
        findings.append(Finding(str(path), files.update_of(path), epochs, begun, size, written, problem, first))
    return findings


def of_bucket(url: str) -> list[Finding]:
    """Downloads all checkpoints of a run folder in a bucket, and verifies them.

    Raises:
      UserError: the bucket cannot be read.
    """
    folder, kept = storage.at(f"{url.rstrip('/')}/checkpoints")
    kept.begin()
    for path in files.newest_first(folder):
        kept.fetch(path)
    found = [(kept.shown(pathlib.Path(finding.path)), finding) for finding in examine(folder)]
    return [dataclasses.replace(finding, path=path, written="in the bucket") for path, finding in found]


def checks(folder: str, findings: list[Finding]) -> list[Check]:
    """Makes a finding of each checkpoint."""
    valid = sum(not f.problem for f in findings)
    fix = "a resume leaves it out" if valid else "none is left: copy one back, or start over with --resume=never"
    return [_check(f, fix) for f in findings] or [ok("checkpoints", f"there are none in {folder}")]


def _check(f: Finding, fix: str) -> Check:
    if f.problem:
        return fail("checkpoint", f"{f.path}: {f.problem} ({f.written})", fix)
    done = f"after {f.epochs} epochs{f' and {f.begun} updates' if f.begun else ''}, {size(f.bytes or 0)}, {f.written}"
    return ok("checkpoint", f"{f.path}: {done}{' <- a resume goes on from here' if f.next else ''}")


def run_files(workdir: str, findings: list[Finding]) -> list[Check]:
    """Compares the files of a run folder with `result.json`, and with the newest valid checkpoint.

    Args:
      findings: its checkpoints.

    Raises:
      UserError: the bucket cannot be read.
    """
    folder = BucketFolder(workdir, writes=False) if buckets.is_url(workdir) else RunFolder(workdir, writes=False)
    if isinstance(folder, BucketFolder):
        folder.create()
        folder.need("model.keras")
    problems = integrity.problems(folder.path)
    newest = next((f for f in findings if f.next), None)
    if newest:
        path = folder.checkpoints / pathlib.Path(newest.path).name
        try:
            integrity.check_state(folder.path, files.read_state(path), path.name)
        except (files.DamagedError, UserError) as error:
            problems.append(error.what if isinstance(error, UserError) else str(error))
    if problems:
        return [fail("run folder", f"{workdir}: {problem}", integrity.REPAIR) for problem in dict.fromkeys(problems)]
    listed = integrity.read_result(folder.path).get("files", {})
    if not listed:
        return [ok("run folder", f"{workdir} has no checksums of its files: no run of this version has ended there")]
    return [ok("run folder", f"{workdir}: {', '.join(sorted(listed))} are as the run wrote them")]


def newest_size(folder: pathlib.Path) -> int:
    """Returns the bytes of the newest checkpoint, valid or not; 0 without one."""
    try:
        return next((sum(f.stat().st_size for f in p.iterdir()) for p in files.newest_first(folder)), 0)
    except (OSError, UserError):  # `examine` says so
        return 0
