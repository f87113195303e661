"""Folders in buckets, such as `s3://bucket/run1`, by way of fsspec: its packages know the services and their keys.

An object is there whole or not at all, but there is no rename, no lock and no appending. What fails is tried again, a
bounded number of times; then it is a `BucketError`, which is an `OSError` as that of a broken disk is. No TensorFlow.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tfdist.config import field_syntax, local_files
from tfdist.errors import UserError, one_line, printable

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem  # which need not be installed

T = TypeVar("T")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "memory": "fsspec"}  # package that reads each scheme
EXTRAS = {"s3": "tfdist[s3]", "gs": "tfdist[gcs]", "memory": "fsspec"}  # requirement for pip
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between two attempts; as many and one are made
_FINAL = ("PermissionError", "NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")
"""Classes of errors that another attempt meets as well."""
_TAGS = ("ETag", "etag", "md5Hash", "generation", "created")
"""Fields that change with an object's content, by the names of the services."""


class BucketError(OSError):
    """Something in a bucket, at `place`, could not be read or written, after all attempts; `why` in a few words."""

    def __init__(self, place: str, why: str):
        super().__init__(None, why, place)
        self.place, self.strerror = place, why

    def __str__(self) -> str:
        return f"{self.place}: {self.strerror}"


class MissingError(BucketError):
    """There is no such object."""


class Entry(NamedTuple):
    """An object as a listing tells of it."""

    size: int
    tag: str  # another one when the content is another one


def is_url(path: str) -> bool:
    """Returns whether a path is in a bucket of a supported kind."""
    return path.partition("://")[0] in PACKAGES and "://" in path


def check(field: str, path: str) -> None:
    """Checks a path, which may be in a bucket."""
    if not is_url(path):
        field_syntax.check_local(field, path, tuple(PACKAGES))
        return
    scheme, _, rest = path.partition("://")
    if re.search(r"[@?#\x00-\x1f]", rest):
        what = f"{field}={path} has more than a bucket and a folder"
        raise UserError(what, "leave out '@', '?' and '#'; keys are taken from the environment or a profile")
    parts = rest.removesuffix("/").split("/")
    if len(parts) < 2 or not all(parts) or {".", ".."} & set(parts):
        raise UserError(f"{field}={path} names no folder in a bucket", f"write {scheme}://bucket/folder")
    package = PACKAGES[scheme]
    if importlib.util.find_spec(package) is None:
        what = f"{field}={path} needs the package {package}, which is not installed"
        raise UserError(what, f"pip install '{EXTRAS[scheme]}'")


def copy_of(url: str) -> pathlib.Path:
    """Returns where the machine that writes to a folder in a bucket has its copy, which may not exist."""
    url = url.rstrip("/")
    return local_files.cache("buckets", hashlib.sha256(url.encode()).hexdigest()[:16], url.rpartition("/")[2])


class Bucket:
    """A folder in a bucket, by its URL, which `check` has passed."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._scheme = url.partition("://")[0]
        self._opened: AbstractFileSystem | None = None

    @property
    def name(self) -> str:
        """Returns the last part of the URL."""
        return self.url.rpartition("/")[2]

    def beside(self, name: str) -> Bucket:
        """Returns another folder next to this one."""
        return Bucket(f"{self.url.rpartition('/')[0]}/{name}")

    def put(self, path: pathlib.Path, name: str, waits: tuple[float, ...] | None = None) -> None:
        """Writes a file to an object below the folder; `waits` are the seconds between attempts, if not `WAITS_S`."""
        os.stat(path)  # else nobody could tell which of both is missing
        self._tried(name, lambda system: system.put_file(str(path), self.place(name)), waits)

    def put_bytes(self, content: bytes, name: str, waits: tuple[float, ...] | None = None) -> None:
        """Writes an object; the arguments and errors are those of `put`."""
        self._tried(name, lambda system: system.pipe_file(self.place(name), content), waits)

    def get(self, name: str, path: pathlib.Path) -> None:
        """Reads an object into a file, which appears whole or not at all; MissingError if there is no such object."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with local_files.replacing(path) as temporary:
            # With headers, gcsfs asks for the whole object at once. Else it first asks what is there, 36 times where a
            # service is away, and then asks on: it would keep a program waiting for minutes.
            once: dict[str, object] = {"headers": {}} if self._scheme == "gs" else {}
            self._tried(name, lambda system: system.get_file(self.place(name), str(temporary), **once))

    def get_bytes(self, name: str, waits: tuple[float, ...] | None = None) -> bytes:
        """Returns the content of an object; the errors are those of `get`."""
        return self._tried(name, lambda system: bytes(system.cat_file(self.place(name))), waits)

    def listing(self, below: str = "") -> dict[str, Entry]:
        """Returns all objects of the folder, or of one below it, by their names in the folder itself."""
        root = self.place("")

        def listed(system: AbstractFileSystem) -> dict[str, Entry]:
            from fsspec.core import strip_protocol

            system.invalidate_cache()
            found = system.find(root + below, detail=True)
            inside = {str(strip_protocol(f"{self._scheme}://{path}")): about for path, about in found.items()}
            prefix = str(strip_protocol(root)).rstrip("/") + "/"
            return {
                path.removeprefix(prefix): Entry(
                    int(about.get("size") or 0), next((str(about[name]) for name in _TAGS if about.get(name)), "")
                )
                for path, about in inside.items()
                if path.startswith(prefix) and not path.endswith("/")
            }

        try:
            return self._tried(below, listed)
        except MissingError:  # as some services say of a folder without objects
            return {}

    def delete(self, names: Iterable[str], waits: tuple[float, ...] | None = None) -> None:
        """Deletes objects in their order; those that are not there are left out."""
        for name in names:
            place = self.place(name)
            with contextlib.suppress(MissingError):
                self._tried(name, lambda system, place=place: system.rm_file(place), waits)  # type: ignore[misc]

    def move(self, names: Iterable[str], target: Bucket, renamed: Callable[[str], str] = str) -> None:
        """Moves objects within the service: copies all, renamed if need be, and then deletes them in order."""
        names = list(names)
        for name in names:
            pair = self.place(name), target.place(renamed(name))
            self._tried(name, lambda system, pair=pair: system.cp_file(*pair))  # type: ignore[misc]
        self.delete(names)

    def place(self, name: str) -> str:
        """Returns the URL of an object in it."""
        return f"{self.url}/{name}"

    def _system(self) -> AbstractFileSystem:
        if self._opened is None:
            import fsspec

            # One layer that tries again is enough: this one, or that of gcsfs, which cannot be turned off.
            once = {"config_kwargs": {"retries": {"total_max_attempts": 1}}} if self._scheme == "s3" else {}
            self._opened = fsspec.filesystem(self._scheme, use_listings_cache=False, **once)
            if self._scheme == "s3":
                self._opened.retries = 1
            logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it tells each failure with a traceback
        return self._opened

    def _tried(self, name: str, action: Callable[[AbstractFileSystem], T], waits: tuple[float, ...] | None = None) -> T:
        left = [] if self._scheme == "gs" else list(WAITS_S if waits is None else waits)
        while True:
            try:
                return action(self._system())
            except FileNotFoundError as error:
                raise MissingError(self.place(name), _missing(name, error)) from None
            except Exception as error:  # each service has its own
                if isinstance(error, OSError) and isinstance(error.filename, str) and error.filename.startswith("/"):
                    raise  # it is this machine's disk that could not be read or written
                if not left or {kind.__name__ for kind in type(error).__mro__} & set(_FINAL):
                    raise BucketError(self.place(name), _reason(error)) from None
            time.sleep(left.pop(0))


def _missing(name: str, error: Exception) -> str:
    if "/upload/storage/" in str(error):  # where gcsfs wanted to write: what else could be missing there
        return "the specified bucket does not exist"
    return "no such object" if name in str(error) else _reason(error)


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else error
    return printable(one_line(text).strip(" .") or type(error).__name__, 160)
