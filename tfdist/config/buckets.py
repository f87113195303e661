"""Folders in buckets, such as `s3://bucket/run1`, by way of fsspec: its packages know the services and their keys.

An object is there whole or not at all, but there is no rename, no lock and no appending. What fails is tried again, a
bounded number of times; then it is a `BucketError`, which is an `OSError` as that of a broken disk is. No TensorFlow.

Data are downloaded once, to the user's cache, and read there as any others. What is downloaded is named by all names,
sizes and tags of the objects, so other content is downloaded anew.
"""

import contextlib
import dataclasses
import fnmatch
import hashlib
import importlib.util
import json
import logging
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tfdist import config
from tfdist.config import field_syntax, local_files
from tfdist.config.messages import logger
from tfdist.errors import UserError, one_line, printable

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

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

    name = property(lambda self: self.url.rpartition("/")[2])
    """Returns the last part of the URL."""

    def beside(self, name: str) -> "Bucket":
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

        def listed(system: "AbstractFileSystem") -> dict[str, Entry]:
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

    def move(self, names: Iterable[str], target: "Bucket", renamed: Callable[[str], str] = str) -> None:
        """Moves objects within the service: copies all, renamed if need be, and then deletes them in order."""
        names = list(names)
        for name in names:
            pair = self.place(name), target.place(renamed(name))
            self._tried(name, lambda system, pair=pair: system.cp_file(*pair))  # type: ignore[misc]
        self.delete(names)

    def place(self, name: str) -> str:
        """Returns the URL of an object in it."""
        return f"{self.url}/{name}"

    def _system(self) -> "AbstractFileSystem":
        if self._opened is None:
            import fsspec

            # One layer that tries again is enough: this one, or that of gcsfs, which cannot be turned off.
            once = {"config_kwargs": {"retries": {"total_max_attempts": 1}}} if self._scheme == "s3" else {}
            self._opened = fsspec.filesystem(self._scheme, use_listings_cache=False, **once)
            if self._scheme == "s3":
                self._opened.retries = 1
            logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it tells each failure with a traceback
        return self._opened

    def _tried(
        self, name: str, action: "Callable[[AbstractFileSystem], T]", waits: tuple[float, ...] | None = None
    ) -> T:
        left = [] if self._scheme == "gs" else list(WAITS_S if waits is None else waits)
        while True:
            try:
                return action(self._system())
            except FileNotFoundError as error:
                why = "no such object" if name in str(error) else _reason(error)
                if "/upload/storage/" in str(error):  # where gcsfs wanted to write: what else could be missing there
                    why = "the specified bucket does not exist"
                raise MissingError(self.place(name), why) from None
            except Exception as error:  # each service has its own
                if isinstance(error, OSError) and isinstance(error.filename, str) and error.filename.startswith("/"):
                    raise  # it is this machine's disk that could not be read or written
                if not left or {kind.__name__ for kind in type(error).__mro__} & set(_FINAL):
                    raise BucketError(self.place(name), _reason(error)) from None
            time.sleep(left.pop(0))


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else error
    return printable(one_line(text).strip(" .") or type(error).__name__, 160)


LIMIT_S = 24 * 3600.0  # limit for another run's download of the same files


def data_here(data: config.Data, download: bool = True) -> config.Data:
    """Returns the same data with paths on this machine; `download=False` refuses what is not data_here yet."""
    files = field_syntax.files(data.name)
    if files:
        kind, path = files
        local_path = local_copy(path, f"data.name={data.name}", download, braces=kind == "webdataset")
        return dataclasses.replace(data, name=f"{kind}:{local_path}")
    # TFDS itself reads gs://, through TensorFlow.
    if not is_url(data.data_dir) or data.data_dir.startswith("gs://") or field_syntax.is_reference(data.name):
        return data
    name = re.split("[:/]", data.name)[0]
    prepared = local_copy(f"{data.data_dir.rstrip('/')}/{name}", f"data.data_dir={data.data_dir}", download)
    return dataclasses.replace(data, data_dir=os.path.dirname(prepared))


def local_copy(path: str, what: str, download: bool = True, braces: bool = False) -> str:
    """Returns where a file, a folder, or the files of a pattern are on this machine; what is no URL, as it is.

    Args:
      path: of which braces, if `braces`, are part of a pattern, see `field_syntax.expanded`.
      what: the field and its value, for messages.
      download: False to refuse what is not data_here yet.
    """
    if not is_url(path):
        return path
    path = path.rstrip("/")
    fixed = re.split(r"[*\[{]" if braces else r"[*\[]", path)[0]
    above = fixed.rpartition("/")[0]
    pattern, bucket = path[len(above) + 1 :], Bucket(above)
    try:
        listed = bucket.listing("" if fixed != path else pattern)
    except BucketError as error:
        what = f"{what} cannot be read ({error.strerror})"
        raise UserError(what, "check the network, your keys and the URL") from None
    patterns = [
        re.compile(fnmatch.translate(p)) for p in (field_syntax.expanded(what, pattern) if braces else [pattern])
    ]
    objects = {n: e for n, e in listed.items() if fixed == path or any(p.match(n) for p in patterns)}
    objects = {n: e for n, e in objects.items() if not {"..", ".", ""} & set(n.split("/"))}
    if not objects:
        raise UserError(f"{what} has no files", "give the URL of a file, a folder or a pattern that has some")
    base = local_files.cache("data")
    content = [above, [[name, entry.size, entry.tag] for name, entry in sorted(objects.items())]]
    folder = base / hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    if not folder.is_dir():
        if not download:
            raise UserError(f"{what} is not in {base} yet, and a dry run downloads nothing", "leave out --dry_run")
        try:
            base.mkdir(parents=True, exist_ok=True)
            with local_files.locked(base / f".{folder.name}.lock", f"another run that downloads {path}", LIMIT_S):
                if not folder.is_dir():
                    _download(bucket, objects, folder)
        except BucketError as error:
            raise UserError(f"{error} ({what})", "check the network, your keys and the URL") from None
        except OSError as error:
            what = f"{what} cannot be downloaded to {base} ({error.strerror or error})"
            raise UserError(what, "free that disk, or set XDG_CACHE_HOME to a folder on another one") from None
    return str(folder / pattern)


def _download(bucket: Bucket, objects: dict[str, Entry], folder: pathlib.Path) -> None:
    """Downloads objects into a folder, which appears when all of them are there."""
    size = sum(entry.size for entry in objects.values())
    count = f"{len(objects):,} file{'s' * (len(objects) > 1)}"
    logger.info(f"downloading {count}, {size / 1e6:,.1f} MB, from {bucket.url} to {folder}")
    temporary = folder.with_name(f".{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        for name, entry in objects.items():
            bucket.get(name, temporary / name)
            received = (temporary / name).stat().st_size
            if received != entry.size:
                raise BucketError(f"{bucket.url}/{name}", f"it has {received} bytes and was listed with {entry.size}")
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
