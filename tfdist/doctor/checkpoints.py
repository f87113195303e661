"""A run folder and its checkpoints, every byte of them read. No TensorFlow."""

import dataclasses
import os
import pathlib
import time

from tfdist.checkpoints import bucket_folder, files, integrity
from tfdist.checkpoints.bucket_folder import BucketFolder
from tfdist.config import buckets
from tfdist.config.messages import sized
from tfdist.doctor.check import Finding, fail, ok
from tfdist.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint; None is what a damaged one does not tell."""

    path: str
    update: int
    epochs: int | None  # that were complete
    begun: int | None  # updates of the next one
    bytes: int | None
    written: str
    problem: str  # why it cannot be used, or nothing
    next: bool  # a resume would use this one


def examine(folder: str | os.PathLike) -> list[Checkpoint]:
    """Verifies all checkpoints of a folder or URL, the newest first; raises `UserError` where it cannot be read."""
    here, storage = bucket_folder.checkpoints_at(folder)
    storage.begin()
    found: list[Checkpoint] = []
    for path in files.newest_first(here):
        storage.fetch(path)
        size, epochs, begun, problem = None, None, None, ""
        try:
            size, position = files.verify(path), files.read_state(path)["position"]
            epochs, begun = position["epoch"], position["begun"]
        except files.DamagedError as error:
            problem = str(error)
        try:
            written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
            if buckets.is_url(os.fspath(folder)):
                written = "in the bucket"
        except OSError:  # a run that goes on has just deleted it as one too many
            continue
        first = not problem and not any(c.next for c in found)
        name, update = storage.shown(path), files.update_of(path)
        found.append(Checkpoint(name, update, epochs, begun, size, written, problem, first))
    return found


def checks(folder: str, found: list[Checkpoint]) -> list[Finding]:
    valid = any(not c.problem for c in found)
    fix = "a resume leaves it out" if valid else "none is left: copy one back, or start over with --resume=never"
    findings = []
    for c in found:
        if c.problem:
            findings.append(fail(f"{c.path}: {c.problem} ({c.written})", fix, "checkpoint"))
            continue
        done = f"after {c.epochs} epochs{f' and {c.begun} updates' if c.begun else ''}, {sized(c.bytes or 0)}"
        text = f"{c.path}: {done}, {c.written}{' <- a resume goes on from here' if c.next else ''}"
        findings.append(ok(text, "checkpoint"))
    return findings or [ok(f"there are none in {folder}")]


def run_files(workdir: str, found: list[Checkpoint]) -> list[Finding]:
    """Compares the files of a run folder with `result.json`, and with the newest valid one of its checkpoints."""
    folder = bucket_folder.opened(workdir, writes=False)
    if isinstance(folder, BucketFolder):
        folder.create()
        folder.need("model.keras")
    problems, newest = integrity.problems(folder.path), next((c for c in found if c.next), None)
    if newest:
        path = folder.checkpoints / pathlib.Path(newest.path).name
        try:
            integrity.check_state(folder.path, files.read_state(path), path.name)
        except (files.DamagedError, UserError) as error:
            problems.append(error.what if isinstance(error, UserError) else str(error))
    if problems:
        return [fail(f"{workdir}: {problem}", integrity.REPAIR) for problem in dict.fromkeys(problems)]
    listed = integrity.read_result(folder.path).get("files", {})
    if not listed:
        return [ok(f"{workdir} has no checksums of its files: no run of this version has ended there")]
    return [ok(f"{workdir}: {', '.join(sorted(listed))} are as the run wrote them")]


def newest_size(folder: pathlib.Path) -> int:
    """Returns the bytes of the newest checkpoint, valid or not; 0 without one."""
    try:
        return next((sum(f.stat().st_size for f in p.iterdir()) for p in files.newest_first(folder)), 0)
    except (OSError, UserError):  # `examine` says so
        return 0
