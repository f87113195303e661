"""Room and speed of the disk under a run folder. Leaves nothing behind, not even when it is killed. No TensorFlow."""

from __future__ import annotations

import os
import pathlib
import tempfile
import time

from tfdist.config.buckets import Bucket, BucketError
from tfdist.doctor.check import Check, fail, ok, warn

_MB = 1_000_000
LEAST = 100 * _MB
"""Below this a run may not even get its model and one checkpoint written."""
ENOUGH = 2_000 * _MB
SLOW = 20 * _MB
"""Bytes a second; a checkpoint of a gigabyte then takes a minute."""
PROBE = 32 * _MB
PROBE_S = 1.5


def nearest(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder itself, or the nearest one above it that exists."""
    folder = pathlib.Path(os.path.abspath(folder))
    return next(p for p in (folder, *folder.parents) if os.path.lexists(p))


def room(folder: pathlib.Path, checkpoint: int = 0, keep: int = 1, least: int = LEAST) -> list[Check]:
    """Checks whether there is room for a run in a folder that need not exist yet.

    Args:
      checkpoint: bytes of the newest checkpoint that is there.
      keep: how many of them will be kept.
    """
    there = nearest(folder)
    if not there.is_dir():
        return [fail("disk", f"{there} is a file, and {folder} would have to be below it", "choose another --workdir")]
    try:
        usage = os.statvfs(there)
    except OSError as error:
        return [fail("disk", f"{there} cannot be looked at ({error.strerror})", "choose another --workdir")]
    free = usage.f_bavail * usage.f_frsize
    free_space = f"{size(free)} free at {there}"
    if usage.f_flag & os.ST_RDONLY:
        return [fail("disk", f"{there} is mounted read-only", "choose another --workdir, or mount it for writing")]
    if not os.access(there, os.W_OK | os.X_OK):
        return [
            fail("disk", f"this user may not write in {there}", "correct its permissions, or choose another --workdir")
        ]
    if usage.f_files and not usage.f_favail:
        return [fail("disk", f"no file can be made at {there}: its inodes are used up", "delete files there")]
    need = checkpoint * (keep + 1)  # the next one is written before the oldest goes
    if free < least or free < checkpoint:
        return [fail("disk", f"only {free_space}", "free some, or choose another --workdir")]
    if free < need:
        what = f"{free_space}, and {keep} checkpoints like the newest take {size(need)} with the one being written"
        return [warn("disk", what, "free some, or lower checkpoint.keep")]
    if free < ENOUGH:
        return [warn("disk", f"only {free_space}", "free some, or choose another --workdir")]
    return [ok("disk", free_space)]


def speed(folder: pathlib.Path, slow: float = SLOW) -> list[Check]:
    """Writes a file without a name, synced to the disk, and takes the time."""
    there = nearest(folder)
    try:
        written, seconds = _write(there)
    except OSError as error:
        fix = "free or repair that disk, or choose another --workdir"
        return [fail("write speed", f"nothing can be written in {there} ({error.strerror or error})", fix)]
    rate = written / seconds
    pace = f"{size(rate)}/s at {there}"
    if rate < slow:
        fix = "put --workdir on a local disk, or save less often (checkpoint.every)"
        return [warn("write speed", f"only {pace}; checkpoints will be slow", fix)]
    return [ok("write speed", pace)]


def _write(folder: pathlib.Path) -> tuple[int, float]:
    """Writes a file, and returns bytes written and seconds taken."""
    block = os.urandom(_MB)  # some file systems compress
    written, begun = 0, time.perf_counter()
    with tempfile.TemporaryFile(dir=folder, prefix=".tfdist-doctor-") as file:
        while written < PROBE and time.perf_counter() - begun < PROBE_S:
            file.write(block)
            file.flush()
            written += len(block)
        os.fsync(file.fileno())
        return written, time.perf_counter() - begun


def bucket(url: str) -> list[Check]:
    """Lists a folder in a bucket, and takes the time; whether it can be written only a run tries."""
    begun = time.perf_counter()
    try:
        objects = Bucket(url).listing()
    except BucketError as error:
        fix = "check the network, your keys (environment or profile) and that URL"
        return [fail("bucket", f"{error.place} cannot be listed ({error.strerror})", fix)]
    seconds = time.perf_counter() - begun
    total = size(sum(entry.size for entry in objects.values()))
    return [ok("bucket", f"{url} can be read: {len(objects):,} objects, {total}, listed in {seconds:.2f} s")]


def size(count: float) -> str:
    """Returns a number of bytes as a person reads it."""
    if count >= 1e9:
        return f"{count / 1e9:,.1f} GB"
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"
