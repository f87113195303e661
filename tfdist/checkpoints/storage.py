"""Storage of a folder of checkpoints: the disk alone, or a bucket of which the folder is a copy.

A bucket has no rename. Therefore `manifest.json` is written last, and a checkpoint without one does not count. Whatever
is in the folder is in the bucket, too; of a checkpoint in the bucket, only the manifest is here until it is read.
No TensorFlow.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator

from tfdist.checkpoints import files
from tfdist.config import buckets, local_files
from tfdist.config.buckets import Bucket, BucketError, MissingError
from tfdist.errors import UserError


class Disk:
    """A folder on a file system, with nothing behind it. The base class of all storage."""

    def begin(self) -> None:
        """Lists in the folder which checkpoints exist; called once, before anything is read."""

    def shown(self, path: pathlib.Path) -> str:
        """Returns a path below the folder as a user would write it."""
        return str(path)

    def publish(self, written: pathlib.Path, name: str) -> None:
        """Makes a checkpoint outlive this machine, before it gets its name; raises OSError if that is not possible.

        Args:
          written: the folder with all its files.
          name: that it is going to have.
        """

    def fetch(self, path: pathlib.Path) -> None:
        """Brings all files of a checkpoint into its folder; raises UserError if they cannot be read."""

    def prune(self, keep: set[str]) -> None:
        """Deletes all checkpoints but those of these names."""

    def set_aside(self, path: pathlib.Path, moved: pathlib.Path) -> None:
        """Renames a checkpoint, which has been renamed in the folder; raises UserError if that is not possible."""


DISK = Disk()


class BucketStorage(Disk):
    """A folder of checkpoints that are kept in a bucket.

    Args:
      folder: the copy on this machine.
      bucket: where they are kept.
      first: called before anything of a checkpoint is written, and before its manifest is; an error of it prevents
        that.
    """

    def __init__(self, folder: pathlib.Path, bucket: Bucket, first: Callable[[], None] = lambda: None):
        self._folder, self._bucket, self._first = folder, bucket, first
        self._begun = False
        self._complete: set[str] = set()
        """Names of the checkpoints whose files are all here."""

    def shown(self, path: pathlib.Path) -> str:
        inside = path.relative_to(self._folder).as_posix() if path.is_relative_to(self._folder) else ""
        return f"{self._bucket.url}/{inside}".rstrip("/.")

    def begin(self) -> None:
        """Downloads the manifests; other files of a checkpoint are kept if its manifest is the same."""
        if self._begun:
            return
        self._begun = True
        with self._user_errors():
            names = {name.partition("/")[0] for name in self._bucket.listing() if name.endswith(f"/{files.MANIFEST}")}
            for path in files.newest_first(self._folder):
                if path.name not in names:
                    shutil.rmtree(path, ignore_errors=True)
            for name in sorted(filter(files.is_name, names)):
                with contextlib.suppress(MissingError):  # a run that goes on has just deleted it
                    manifest = self._bucket.get_bytes(f"{name}/{files.MANIFEST}")
                    file = self._folder / name / files.MANIFEST
                    try:
                        same = local_files.content(file) == manifest
                    except OSError:
                        same = False
                    if not same:
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
            except files.DamagedError:
                self._download(path)
        self._complete.add(path.name)

    def _download(self, path: pathlib.Path) -> None:
        """Downloads all files in the manifest; verifying them reports what is missing."""
        try:
            names = json.loads(local_files.content(path / files.MANIFEST))["files"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return
        with self._user_errors():
            for name in filter(files.is_inside, names):
                with contextlib.suppress(MissingError):
                    self._bucket.get(f"{path.name}/{name}", path / name)

    def prune(self, keep: set[str]) -> None:
        with contextlib.suppress(BucketError):  # the next one deletes them
            folders = {name: name.partition("/")[0] for name in self._bucket.listing() if "/" in name}
            old = [name for name, folder in folders.items() if files.is_name(folder) and folder not in keep]
            self._bucket.delete(_manifests_first(old), waits=())

    def set_aside(self, path: pathlib.Path, moved: pathlib.Path) -> None:
        with self._user_errors("be changed"):
            names = _manifests_first(self._bucket.listing(path.name))
            self._bucket.move(names, self._bucket, lambda name: f"{moved.name}/{name.partition('/')[2]}")

    @contextlib.contextmanager
    def _user_errors(self, what: str = "be read") -> Iterator[None]:
        try:
            yield
        except BucketError as error:
            raise UserError(
                f"{self._bucket.url} cannot {what} ({error.strerror})", "check the network, your keys and that folder"
            ) from None
        except OSError as error:
            raise UserError(f"{self._folder} cannot be written ({error.strerror or error})", "free that disk") from None


def _manifests_first(names: Iterable[str]) -> list[str]:
    """Sorts objects for deletion so that half of them do not look like a checkpoint."""
    return sorted(names, key=lambda name: (not name.endswith(f"/{files.MANIFEST}"), name))


def at(folder: str | os.PathLike) -> tuple[pathlib.Path, Disk]:
    """Returns the path of a folder of checkpoints on this machine, and its storage.

    Args:
      folder: a path, or a URL as `buckets.check` has passed it, of which this process then has a copy.
    """
    text = os.fspath(folder)
    if not buckets.is_url(text):
        return pathlib.Path(text), DISK
    copy = local_files.temporary_folder()
    return copy, BucketStorage(copy, Bucket(text))
