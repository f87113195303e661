"""What stands behind a folder of checkpoints: nothing but the disk, or a bucket of which the folder is a copy.

In a bucket there is no rename. Therefore `manifest.json` is written last, and a checkpoint without one is none. What is
in the folder is in the bucket, too, except that only the manifest of a checkpoint is here until somebody reads it.
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
from tfdist.config import buckets, regular_file, temporary_folder
from tfdist.config.buckets import Bucket, BucketError, MissingError
from tfdist.errors import UserError


class Disk:
    """A folder on a file system: there is nothing else to do. The base class of all storage."""

    def begin(self) -> None:
        """Makes known in the folder what there is; called once, before anything is read."""

    def shown(self, path: pathlib.Path) -> str:
        """Returns a path below the folder as a person would write it."""
        return str(path)

    def publish(self, written: pathlib.Path, name: str) -> None:
        """Makes a checkpoint outlive this machine, before it gets its name.

        Args:
          written: the folder with all its files.
          name: that it is going to have.

        Raises:
          OSError: that is not possible.
        """

    def fetch(self, path: pathlib.Path) -> None:
        """Brings all files of a checkpoint into its folder.

        Raises:
          UserError: they cannot be had, though they may be there.
        """

    def prune(self, keep: set[str]) -> None:
        """Deletes all checkpoints but those of these names."""

    def set_aside(self, path: pathlib.Path, moved: pathlib.Path) -> None:
        """Renames a checkpoint, which has been renamed in the folder.

        Raises:
          UserError: that is not possible.
        """


DISK = Disk()


class BucketStorage(Disk):
    """A folder of checkpoints that are kept in a bucket.

    Args:
      folder: the copy on this machine.
      bucket: where they are kept.
      first: called before anything of a checkpoint is written, and before its manifest is; what it raises stands
        against that.
    """

    def __init__(self, folder: pathlib.Path, bucket: Bucket, first: Callable[[], None] = lambda: None):
        self._folder, self._bucket, self._first = folder, bucket, first
        self._begun = False
        self._here: set[str] = set()
        """Names of the checkpoints whose files this process has written."""

    def shown(self, path: pathlib.Path) -> str:
        inside = path.relative_to(self._folder).as_posix() if path.is_relative_to(self._folder) else ""
        return f"{self._bucket.url}/{inside}".rstrip("/.")

    def begin(self) -> None:
        """Reads the manifests of all checkpoints that have one; the rest of a checkpoint stays if it is its own.

        Raises:
          UserError: the bucket cannot be read.
        """
        if self._begun:
            return
        self._begun = True
        with self._reading():
            there = {name.partition("/")[0] for name in self._bucket.listing() if name.endswith(f"/{files.MANIFEST}")}
            for path in files.found(self._folder):
                if path.name not in there:
                    shutil.rmtree(path, ignore_errors=True)
            for name in sorted(filter(files.is_name, there)):
                with contextlib.suppress(MissingError):  # a run that goes on has just deleted it
                    content = self._bucket.get_bytes(f"{name}/{files.MANIFEST}")
                    self._expect(self._folder / name, content)

    @staticmethod
    def _expect(path: pathlib.Path, manifest: bytes) -> None:
        """Makes a folder for a checkpoint, of which no other files may be there than those of this manifest."""
        file = path / files.MANIFEST
        try:
            same = regular_file.content(file) == manifest
        except OSError:
            same = False
        if not same:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            file.write_bytes(manifest)

    def publish(self, written: pathlib.Path, name: str) -> None:
        self._first()  # else a run that has lost the folder would write over files of the one that has it
        for path in sorted(path for path in written.iterdir() if path.name != files.MANIFEST):
            self._bucket.put(path, f"{name}/{path.name}")
        self._first()
        self._bucket.put(written / files.MANIFEST, f"{name}/{files.MANIFEST}")
        self._here.add(name)
        with contextlib.suppress(BucketError):  # it is for people
            self._bucket.put_bytes(f"{name}\n".encode(), files.LATEST)

    def fetch(self, path: pathlib.Path) -> None:
        if path.name in self._here:
            return
        for _ in range(2):  # what has arrived damaged may be whole in the bucket
            try:
                files.verify(path)
                return
            except files.DamagedError:
                self._download(path)
        self._here.add(path.name)

    def _download(self, path: pathlib.Path) -> None:
        """Reads all files that the manifest tells of; who reads them says what is missing."""
        try:
            wanted = json.loads(regular_file.content(path / files.MANIFEST))["files"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return
        with self._reading():
            for name in filter(files.is_inside, wanted):
                with contextlib.suppress(MissingError):
                    self._bucket.get(f"{path.name}/{name}", path / name)

    def prune(self, keep: set[str]) -> None:
        with contextlib.suppress(BucketError):  # the next one deletes them
            folders = {name: name.partition("/")[0] for name in self._bucket.listing() if "/" in name}
            old = [name for name, folder in folders.items() if files.is_name(folder) and folder not in keep]
            self._bucket.delete(_manifests_first(old), waits=())

    def set_aside(self, path: pathlib.Path, moved: pathlib.Path) -> None:
        with self._reading("be changed"):
            names = _manifests_first(self._bucket.listing(path.name))
            self._bucket.move(names, self._bucket, lambda name: f"{moved.name}/{name.partition('/')[2]}")

    @contextlib.contextmanager
    def _reading(self, what: str = "be read") -> Iterator[None]:
        try:
            yield
        except BucketError as error:
            raise UserError(
                f"{self._bucket.url} cannot {what} ({error.strerror}): check the network, your keys and that folder"
            ) from None
        except OSError as error:
            raise UserError(f"{self._folder} cannot be written ({error.strerror or error}): free that disk") from None


def _manifests_first(names: Iterable[str]) -> list[str]:
    """Sorts objects so that half of them do not look like a checkpoint."""
    return sorted(names, key=lambda name: (not name.endswith(f"/{files.MANIFEST}"), name))


def at(folder: str | os.PathLike) -> tuple[pathlib.Path, Disk]:
    """Returns where the checkpoints of a folder are on this machine, and what stands behind that.

    Args:
      folder: a path, or a URL as `buckets.check` has passed it, of which this process then has a copy.
    """
    text = os.fspath(folder)
    if not buckets.is_url(text):
        return pathlib.Path(text), DISK
    copy = temporary_folder.make()
    return copy, BucketStorage(copy, Bucket(text))
