"""A run folder in a bucket: `--workdir=s3://bucket/run1`. No TensorFlow.

A run appends to files, renames and locks them, which no bucket can. So the chief writes to a copy on its own machine,
and what is new there goes to the bucket with each checkpoint and at the end. The bucket alone counts: at the start the
records of the run come from there, and nothing that a killed process has left in the copy but whole checkpoints, which
are compared with their manifest. There is no lock across machines either: who begins writes its name to the bucket, and
a run that finds another name there stops.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import platform
import secrets
import shutil
import threading

from tfdist.checkpoints import files, storage
from tfdist.checkpoints.run_folder import LOCK, LOGS, RunFolder
from tfdist.config import buckets, temporary_folder
from tfdist.config.buckets import Bucket, BucketError, MissingError
from tfdist.config.messages import logger
from tfdist.errors import TrainingError, UserError

RECORDS = (
    "experiment.json", "experiment.mark", "environment.json", "data.json", "accumulate.json", "history.jsonl",
    "timeline.jsonl", "result.json",
)  # fmt: skip
"""What a run that goes on needs of the one before, besides its checkpoints."""
CHECK = "check the network, your keys and that folder"
_CLAIMED = b"claimed\n"
"""Stands after the owner in a lock that the launcher lends, once one of its workers has written it to the bucket."""
_BUSY_S = 5.0
"""How long the last words of a run wait for an upload that is under way."""


class BucketFolder(RunFolder):
    """A run folder in a bucket.

    Args:
      url: as `buckets.check` has passed it.
      writes: False for workers other than the chief, and for those who look only.
      reads: False for those who do not even look: they have an empty folder.
    """

    def __init__(self, url: str, writes: bool, reads: bool = True):
        self._bucket = Bucket(url)
        copy = buckets.copy_of(url) if writes or not reads else temporary_folder.make() / self._bucket.name
        super().__init__(str(copy if writes or reads else copy.with_name(".none")), writes)
        self.name = self._bucket.url
        if writes or reads:
            kept = Bucket(f"{self.name}/{self.checkpoints.name}")
            self.storage = storage.BucketStorage(self.checkpoints, kept, self._send)
        self._reads = reads
        self._owner = f"process {os.getpid()} on {platform.node()}\n{secrets.token_hex(16)}\n".encode()
        self._claimed = self._lost = False
        self._claimed_before = False
        """An earlier worker of the same launcher has written the owner to the bucket."""
        self._sending = threading.RLock()
        self._sent: dict[str, tuple[int, int]] = {}
        """Size and time of change of each file as the bucket has it."""

    def forget(self) -> None:
        super().forget()
        self._claimed = False

    # -- the beginning ------------------------------------------------------

    def create(self) -> None:
        """Takes the folder for this run alone, and brings what an earlier one has left there.

        Raises:
          UserError: bucket or copy cannot be used, or another run on this machine has it.
        """
        if not self._writes:
            if self._reads:
                self._fetch()
            return
        self.reserve()
        try:
            self._claim()
            self._fetch()
        except BaseException:
            self.release()
            raise

    def reserve(self) -> None:
        """Makes the copy if it is missing, and takes it for this run alone, without a look into the bucket.

        Raises:
          UserError: the copy cannot be made, or another run on this machine has it.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise self._no_copy(error) from None
        self._take()
        self._owner, mark, _ = self._owner.partition(_CLAIMED)
        self._claimed_before = bool(mark)

    def could_be_created(self) -> None:
        """Nothing more: `create` has looked into the bucket, and whether it can be written only writing would tell."""

    def _no_copy(self, error: OSError) -> UserError:
        return UserError(
            f"the copy of --workdir={self.name} in {self.path} cannot be written ({error.strerror or error}): "
            "set XDG_CACHE_HOME to a folder on another disk"
        )

    def _claim(self) -> None:
        """Writes this run's name to the bucket, in the place of that of an earlier one.

        Raises:
          UserError: that cannot be done, or another run has done it since an earlier worker of this launcher.
        """
        try:
            try:
                before = self._bucket.get_bytes(LOCK)
            except MissingError:
                before = b""
            if self._claimed_before and before not in (b"", self._owner):
                raise self._in_use(before)
            self._bucket.put_bytes(self._owner, LOCK)
        except BucketError as error:
            raise UserError(f"--workdir={self.name} cannot be written ({error.strerror}): {CHECK}") from None
        self._claimed = True
        if self._borrowed and self._lock is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._lock, _CLAIMED, len(self._owner))
        if before and not _who(before).endswith(f" on {platform.node()}"):  # which has died: it has no lock here
            logger.info(f"{self.name} was last taken by {_who(before)}: if that run still lives, it stops now")

    def _fetch(self) -> None:
        """Brings the records and the manifests of the checkpoints; what else is in the copy goes."""
        try:
            for path in self.path.iterdir() if self.path.exists() else []:
                if path.name not in (LOCK, LOGS, self.checkpoints.name):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            there = self._bucket.listing()
            for name in RECORDS:
                if name in there:
                    self.need(name)
        except BucketError as error:
            raise UserError(f"--workdir={self.name} cannot be read ({error.strerror}): {CHECK}") from None
        except OSError as error:
            raise self._no_copy(error) from None
        self.storage.begin()

    def need(self, name: str) -> None:
        """Brings a file, if it is there.

        Raises:
          BucketError: it cannot be read.
        """
        with contextlib.suppress(MissingError):
            self._bucket.get(name, self.path / name)
            self._sent[name] = _state(self.path / name)

    # -- what is written ----------------------------------------------------

    def push(self, patient: bool = True) -> None:
        """Brings to the bucket what has changed.

        Args:
          patient: try again what fails; False for the last words of a run.

        Raises:
          TrainingError: that is not possible, or another run has taken the folder.
        """
        if not self._writes or not self._claimed:
            return
        try:
            self._send(None if patient else ())
        except BucketError as error:
            raise TrainingError(
                f"{error.place} cannot be written ({error.strerror}): {CHECK}; what the run has left is in {self.path} "
                "until the next one begins"
            ) from None

    def _send(self, waits: tuple[float, ...] | None = None) -> None:
        if not self._sending.acquire(timeout=-1 if waits is None else _BUSY_S):
            raise BucketError(self.name, "another upload is under way")
        try:
            self._guard(waits)
            for name, path in self._unsent():
                with contextlib.suppress(FileNotFoundError):
                    state = _state(path)
                    self._bucket.put(path, name, waits)
                    self._sent[name] = state
        finally:
            self._sending.release()

    def _guard(self, waits: tuple[float, ...] | None) -> None:
        """Makes sure that the folder is still this run's."""
        if self._lost:
            raise BucketError(self.name, "another run has taken it")
        try:
            owner = self._bucket.get_bytes(LOCK, waits)
        except MissingError:
            self._bucket.put_bytes(self._owner, LOCK, waits)
            self._sent.clear()
            logger.info(f"WARNING: {self.name} was deleted while this run went on: its records are written again")
            return
        if owner != self._owner:
            self._lost = True
            raise BucketError(self.name, f"another run, {_who(owner)}, has taken it")

    def _unsent(self) -> list[tuple[str, pathlib.Path]]:
        """Returns the files that the bucket does not have so, by their names there; the result comes last."""
        found = []
        for folder, folders, names in os.walk(self.path):
            inside = pathlib.Path(folder).relative_to(self.path)
            folders[:] = [n for n in folders if (inside / n).as_posix() not in (LOGS, self.checkpoints.name)]
            for name in (inside / n for n in names if not n.startswith(".")):
                with contextlib.suppress(OSError):
                    if _state(self.path / name) != self._sent.get(name.as_posix()):
                        found.append((name.as_posix(), self.path / name))
        return sorted(found, key=lambda pair: (pair[0] == "result.json", pair[0]))

    def remove(self, name: str) -> None:
        """Deletes a file, here and in the bucket.

        Raises:
          TrainingError: it cannot be deleted.
        """
        super().remove(name)
        if self._sent.pop(name, None):
            with self._writing(name):
                self._bucket.delete([name])

    def _make_whole(self) -> None:
        if self._lost:
            raise TrainingError(f"another run has taken {self.name} while this one went on: give each its own folder")
        super()._make_whole()

    # -- the end ------------------------------------------------------------

    def set_aside(self) -> str | None:
        """Copies an earlier run within the bucket, and deletes what was copied.

        Returns:
          Where the earlier run went, or None.

        Raises:
          UserError: that is not possible.
        """
        if not self._writes or not self.holds_run:
            return None
        try:
            names = (f"{self._bucket.name}.{i}" for i in itertools.count(1))
            aside = next(bucket for bucket in map(self._bucket.beside, names) if not bucket.listing())
            # The result goes last: half a run that has ended must not look like one that has not.
            every = sorted(set(self._bucket.listing()) - {LOCK}, key=_for_deletion)
            self._bucket.move(every, aside)
        except BucketError as error:
            raise UserError(
                f"the earlier run in --workdir={self.name} cannot be set aside ({error.strerror}): "
                "choose another --workdir, or move the earlier run yourself"
            ) from None
        self._sent.clear()
        self._empty()
        return aside.url

    def release(self) -> None:
        """Lets others have the folder; the copy goes if the bucket has all of it."""
        if self._claimed and not self._lost:
            with contextlib.suppress(BucketError):
                if self._bucket.get_bytes(LOCK, ()) == self._owner:
                    self._bucket.delete([LOCK], ())
        if self._claimed and not self._unsent() and not files.is_being_written(self.checkpoints):
            self._empty()
        self._claimed = False
        super().release()
        if self._writes:
            with contextlib.suppress(OSError):
                self.path.rmdir()
                self.path.parent.rmdir()

    def _empty(self) -> None:
        """Deletes the copy, but for the launcher's logs and the lock."""
        with contextlib.suppress(OSError):
            for path in self.path.iterdir():
                if path.name not in (LOCK, LOGS):
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def opened(workdir: str, writes: bool, reads: bool = True) -> RunFolder:
    """Returns the run folder of `--workdir`, wherever that is; the arguments are those of `BucketFolder`."""
    return BucketFolder(workdir, writes, reads) if buckets.is_url(workdir) else RunFolder(workdir, writes)


def _who(owner: bytes) -> str:
    line = owner.decode(errors="replace").partition("\n")[0]
    return "".join(c for c in line if c.isprintable())[:100]


def _state(path: pathlib.Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_size, about.st_mtime_ns


def _for_deletion(name: str) -> tuple[int, str]:
    manifest = name.startswith("checkpoints/") and name.endswith(f"/{files.MANIFEST}")
    return 0 if manifest else 2 if name == "result.json" else 1, name
