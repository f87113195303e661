"""A run folder in a bucket: `--workdir=s3://bucket/run1`. No TensorFlow.

A run appends to files, renames and locks them, which no bucket can. So the chief writes to a copy on its own machine,
and uploads what is new with each checkpoint and at the end. The bucket alone counts: at the start the records of the
run are downloaded, and nothing that a killed process has left in the copy is used but whole checkpoints, which are
compared with their manifest. There is no lock across machines either: a run writes its name to the bucket when it
begins, and one that finds another name there stops.
"""

import contextlib
import itertools
import os
import pathlib
import platform
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator

from tfdist.checkpoints import files
from tfdist.checkpoints.folder_lock import LOCK, first_line
from tfdist.checkpoints.run_folder import LOGS, RESTORED, RunFolder
from tfdist.config import buckets, local_files
from tfdist.config.buckets import Bucket, BucketError, MissingError
from tfdist.config.messages import logger
from tfdist.errors import TrainingError, UserError

# Files of the earlier run that a resumed run needs, besides its checkpoints.
RECORDS = (*RESTORED, "accumulate.json", "history.jsonl", "timeline.jsonl", "result.json")
CHECK = "check the network, your keys and that folder"
# Stands after the owner in a lock that the launcher lends, once one of its workers has written it to the bucket.
_CLAIMED = b"claimed\n"
_BUSY_S = 5.0  # that the last words of a run wait for an upload in progress


class BucketStorage(files.Disk):
    """Checkpoints in a bucket, of which `folder` is a copy on this machine.

    A bucket has no rename. Therefore `manifest.json` is written last, and a checkpoint without one does not count.
    Whatever is in the folder is in the bucket, too; of a checkpoint in the bucket, only the manifest is here until it
    is read. `first` is called before anything of a checkpoint is written and before its manifest; an error stops that.
    """

    def __init__(self, folder: pathlib.Path, bucket: Bucket, first: Callable[[], None] = lambda: None):
        self._folder, self._bucket, self._first = folder, bucket, first
        self._begun = False
        self._complete: set[str] = set()  # names of the checkpoints whose files are all here

    def shown(self, path: pathlib.Path) -> str:
        inside = path.relative_to(self._folder).as_posix() if path.is_relative_to(self._folder) else ""
        return f"{self._bucket.url}/{inside}".rstrip("/.")

    def begin(self) -> None:
        """Downloads the manifests; other files of a checkpoint are kept if its manifest is the same."""
        if self._begun:
            return
        self._begun = True
        with self._user_errors():
            listed = self._bucket.listing()
            names = {name.partition("/")[0] for name in listed if name.endswith(f"/{files.MANIFEST}")}
            used = max((files.update_of(self._folder / name) for name in filter(files.is_name, names)), default=-1)
            for name in sorted({name.partition("/")[0] for name in listed} - names):
                if files.is_name(name) and files.update_of(self._folder / name) > used:
                    why = f"{files.MANIFEST}, which is uploaded last, is missing"
                    logger.info(f"WARNING: checkpoint {self.shown(self._folder / name)} is not used: {why}")
            for path in files.newest_first(self._folder):
                if path.name not in names:
                    shutil.rmtree(path, ignore_errors=True)
            for name in sorted(filter(files.is_name, names)):
                file, before = self._folder / name / files.MANIFEST, None
                with contextlib.suppress(MissingError):  # a run that goes on has just deleted it
                    manifest = self._bucket.get_bytes(f"{name}/{files.MANIFEST}")
                    with contextlib.suppress(OSError):
                        before = local_files.content(file)
                    if before != manifest:
                        shutil.rmtree(file.parent, ignore_errors=True)
                        file.parent.mkdir(parents=True)
                        file.write_bytes(manifest)

    def publish(self, written: pathlib.Path, name: str) -> None:
        self._first()  # else a run that has lost the folder would overwrite files of the one that has it
        for path in sorted(path for path in written.iterdir() if path.name != files.MANIFEST):
            self._bucket.put(path, f"{name}/{path.name}")
        self._first()
        self._bucket.put(written / files.MANIFEST, f"{name}/{files.MANIFEST}")
        self._complete.add(name)
        with contextlib.suppress(BucketError):  # it is for users
            self._bucket.put_bytes(f"{name}\n".encode(), files.LATEST)

    def fetch(self, path: pathlib.Path) -> None:
        if path.name in self._complete:
            return
        for _ in range(2):  # what has arrived damaged may be whole in the bucket
            try:
                files.verify(path)
                return
            except files.DamagedError:  # the next one to verify it reports what is missing
                names = (local_files.read_object(path / files.MANIFEST) or {}).get("files")
                with self._user_errors():
                    for name in filter(files.is_inside, names if isinstance(names, dict) else ()):
                        with contextlib.suppress(MissingError):
                            self._bucket.get(f"{path.name}/{name}", path / name)
        self._complete.add(path.name)

    def prune(self, keep: set[str]) -> None:
        with contextlib.suppress(BucketError):  # the next one deletes them
            folders = {name: name.partition("/")[0] for name in self._bucket.listing() if "/" in name}
            old = [name for name, folder in folders.items() if files.is_name(folder) and folder not in keep]
            self._bucket.delete(_deletion_order(old), waits=())

    def set_aside(self, path: pathlib.Path, moved: pathlib.Path) -> None:
        with self._user_errors("be changed"):
            names = _deletion_order(self._bucket.listing(path.name))
            self._bucket.move(names, self._bucket, lambda name: f"{moved.name}/{name.partition('/')[2]}")

    @contextlib.contextmanager
    def _user_errors(self, what: str = "be read") -> Iterator[None]:
        try:
            yield
        except BucketError as error:
            raise UserError(f"{self._bucket.url} cannot {what} ({error.strerror})", CHECK) from None
        except OSError as error:
            raise UserError(f"{self._folder} cannot be written ({error.strerror or error})", "free that disk") from None


class BucketFolder(RunFolder):
    """A run folder in a bucket.

    Args:
      url: as `buckets.check` has passed it.
      writes: False for workers other than the chief, and for readers.
      reads: False for workers that do not even read: they have an empty folder.
    """

    def __init__(self, url: str, writes: bool, reads: bool = True):
        self._bucket = Bucket(url)
        copy = buckets.copy_of(url) if writes or not reads else local_files.temporary_folder() / self._bucket.name
        super().__init__(str(copy if writes or reads else copy.with_name(".none")), writes, self._bucket.url)
        if writes or reads:
            bucket = Bucket(f"{self.name}/{self.checkpoints.name}")
            self.storage = BucketStorage(self.checkpoints, bucket, self._upload)
        self._reads = reads
        self.lock.owner += f"{secrets.token_hex(16)}\n".encode()
        self._claimed = self._lost = False
        self._claimed_before = False  # an earlier worker of the same launcher has written the owner to the bucket
        self._uploading = threading.RLock()
        self._uploaded: dict[str, tuple[int, int]] = {}  # `_version` of each file as the bucket has it

    def forget(self) -> None:
        super().forget()
        self._claimed = False

    def create(self) -> None:
        """Takes the folder for this run alone, and downloads what an earlier one has left there."""
        if not self.writes:
            if self._reads:
                self._download()
            return
        self.reserve()
        try:
            self._claim()
            self._download()
        except BaseException:
            self.release()
            raise

    def reserve(self) -> None:
        """Makes the copy if it is missing, and locks it for this run, without access to the bucket."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise self._no_copy(error) from None
        self.lock.acquire()
        self.lock.owner, mark, _ = self.lock.owner.partition(_CLAIMED)
        self._claimed_before = bool(mark)

    def could_be_created(self) -> None:
        """Nothing more: `create` has read the bucket, and only writing would show whether it can be written."""

    def _no_copy(self, error: OSError) -> UserError:
        return UserError(
            f"the copy of --workdir={self.name} in {self.path} cannot be written ({error.strerror or error})",
            "set XDG_CACHE_HOME to a folder on another disk",
        )

    def _claim(self) -> None:
        """Writes this run's name to the bucket, unless another run has since an earlier worker of this launcher."""
        owner, before = self.lock.owner, b""
        try:
            with contextlib.suppress(MissingError):
                before = self._bucket.get_bytes(LOCK)
            if self._claimed_before and before not in (b"", owner):
                raise self.lock.in_use(before)
            self._bucket.put_bytes(owner, LOCK)
        except BucketError as error:
            raise UserError(f"--workdir={self.name} cannot be written ({error.strerror})", CHECK) from None
        self._claimed = True
        if self.lock.borrowed and self.lock.descriptor is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self.lock.descriptor, _CLAIMED, len(owner))
        earlier = first_line(before)
        if before and not earlier.endswith(f" on {platform.node()}"):  # one of this host has ended: it has no lock
            logger.info(f"{self.name} was last taken by {earlier}: if that run is still alive, it stops now")

    def _download(self) -> None:
        """Downloads the records and the manifests of the checkpoints; whatever else is in the copy is deleted."""
        try:
            for path in self.path.iterdir() if self.path.exists() else []:
                if path.name not in (LOCK, LOGS, self.checkpoints.name):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            objects = self._bucket.listing()
            for name in RECORDS:
                if name in objects:
                    self.need(name)
        except BucketError as error:
            raise UserError(f"--workdir={self.name} cannot be read ({error.strerror})", CHECK) from None
        except OSError as error:
            raise self._no_copy(error) from None
        self.storage.begin()

    def need(self, name: str) -> None:
        """Downloads a file, if it exists; raises BucketError if it cannot be read."""
        with contextlib.suppress(MissingError):
            self._bucket.get(name, self.path / name)
            self._uploaded[name] = _version(self.path / name)

    def push(self, patient: bool = True) -> None:
        """Uploads what has changed; TrainingError if that is not possible, or another run has taken the folder."""
        if not self.writes or not self._claimed:
            return
        try:
            self._upload(None if patient else ())
        except BucketError as error:
            raise TrainingError(
                f"{error.place} cannot be written ({error.strerror}): {CHECK}; the run's files are in {self.path} "
                "until the next run begins"
            ) from None

    def _upload(self, waits: tuple[float, ...] | None = None) -> None:
        """Uploads what has changed; raises BucketError if another run has taken the folder."""
        if not self._uploading.acquire(timeout=-1 if waits is None else _BUSY_S):
            raise BucketError(self.name, "another upload is in progress")
        try:
            if self._lost:
                raise BucketError(self.name, "another run has taken it")
            try:
                owner = self._bucket.get_bytes(LOCK, waits)
            except MissingError:
                owner = self.lock.owner
                self._bucket.put_bytes(owner, LOCK, waits)
                self._uploaded.clear()
                logger.info(f"WARNING: {self.name} was deleted while this run went on: its records are written again")
            if owner != self.lock.owner:
                self._lost = True
                raise BucketError(self.name, f"another run, {first_line(owner)}, has taken it")
            for name, path in self._changed():
                with contextlib.suppress(FileNotFoundError):
                    version = _version(path)
                    self._bucket.put(path, name, waits)
                    self._uploaded[name] = version
        finally:
            self._uploading.release()

    def _changed(self) -> list[tuple[str, pathlib.Path]]:
        """Returns the files that differ from the bucket's, by their names there; the result comes last."""
        changed = []
        for folder, folders, names in os.walk(self.path):
            inside = pathlib.Path(folder).relative_to(self.path)
            folders[:] = [n for n in folders if (inside / n).as_posix() not in (LOGS, self.checkpoints.name)]
            for name in (inside / n for n in names if not n.startswith(".")):
                with contextlib.suppress(OSError):
                    if _version(self.path / name) != self._uploaded.get(name.as_posix()):
                        changed.append((name.as_posix(), self.path / name))
        return sorted(changed, key=lambda pair: (pair[0] == "result.json", pair[0]))

    def remove(self, name: str) -> None:
        """Deletes a file, here and in the bucket; raises TrainingError if it cannot be deleted."""
        super().remove(name)
        if self._uploaded.pop(name, None):
            with self._writing(name):
                self._bucket.delete([name])

    def _restore(self) -> None:
        if self._lost:
            raise TrainingError(f"another run has taken {self.name} while this one went on: give each its own folder")
        super()._restore()

    def set_aside(self) -> str | None:
        """Copies an earlier run within the bucket, and deletes what was copied; returns where it is now."""
        if not self.writes or not self.holds_run:
            return None
        try:
            names = (f"{self._bucket.name}.{i}" for i in itertools.count(1))
            aside = next(bucket for bucket in map(self._bucket.beside, names) if not bucket.listing())
            self._bucket.move(_deletion_order(set(self._bucket.listing()) - {LOCK}), aside)
        except BucketError as error:
            what = f"the earlier run in --workdir={self.name} cannot be set aside ({error.strerror})"
            raise UserError(what, "choose another --workdir, or move the earlier run yourself") from None
        self._uploaded.clear()
        self._empty()
        return aside.url

    def release(self) -> None:
        """Releases the folder; the copy is deleted if the bucket has all of it."""
        if self._claimed and not self._lost:
            with contextlib.suppress(BucketError):
                if self._bucket.get_bytes(LOCK, ()) == self.lock.owner:
                    self._bucket.delete([LOCK], ())
        if self._claimed and not self._changed() and not files.is_being_written(self.checkpoints):
            self._empty()
        self._claimed = False
        super().release()
        if self.writes:
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


def checkpoints_at(folder: str | os.PathLike) -> tuple[pathlib.Path, files.Disk]:
    """Returns the path of a folder of checkpoints on this machine, and its storage; it may be a URL that is checked."""
    text = os.fspath(folder)
    if not buckets.is_url(text):
        return pathlib.Path(text), files.DISK
    copy = local_files.temporary_folder()
    return copy, BucketStorage(copy, Bucket(text))


def _version(path: pathlib.Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _deletion_order(names: Iterable[str]) -> list[str]:
    """Sorts objects so that no half-deleted checkpoint or run looks whole: manifests first, the result last."""
    rank = lambda name: 0 if name.endswith(f"/{files.MANIFEST}") else 2 if name == "result.json" else 1
    return sorted(names, key=lambda name: (rank(name), name))
