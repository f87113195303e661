"""Data in buckets: files are downloaded once, to the user's cache, and read there as any others. No TensorFlow.

What is downloaded is named by all names, sizes and tags of the objects, so other content is downloaded anew.
"""

import dataclasses
import fnmatch
import hashlib
import json
import os
import pathlib
import re
import shutil

from tfdist import config
from tfdist.config import buckets, field_syntax, local_files
from tfdist.config.buckets import Bucket, BucketError, Entry
from tfdist.config.messages import logger
from tfdist.errors import UserError

LIMIT_S = 24 * 3600.0  # limit for another run's download of the same files


def here(data: config.Data, download: bool = True) -> config.Data:
    """Returns the same data with paths on this machine; `download=False` refuses what is not here yet."""
    files = field_syntax.files(data.name)
    if files:
        kind, path = files
        local_path = local(path, f"data.name={data.name}", download, braces=kind == "webdataset")
        return dataclasses.replace(data, name=f"{kind}:{local_path}")
    # TFDS itself reads gs://, through TensorFlow.
    if not buckets.is_url(data.data_dir) or data.data_dir.startswith("gs://") or field_syntax.is_reference(data.name):
        return data
    name = re.split("[:/]", data.name)[0]
    prepared = local(f"{data.data_dir.rstrip('/')}/{name}", f"data.data_dir={data.data_dir}", download)
    return dataclasses.replace(data, data_dir=os.path.dirname(prepared))


def local(path: str, what: str, download: bool = True, braces: bool = False) -> str:
    """Returns where a file, a folder, or the files of a pattern are on this machine; what is no URL, as it is.

    Args:
      path: of which braces, if `braces`, are part of a pattern, see `field_syntax.expanded`.
      what: the field and its value, for messages.
      download: False to refuse what is not here yet.
    """
    if not buckets.is_url(path):
        return path
    path = path.rstrip("/")
    fixed = re.split(r"[*\[{]" if braces else r"[*\[]", path)[0]
    above = fixed.rpartition("/")[0]
    pattern = path[len(above) + 1 :]
    bucket = Bucket(above)
    try:
        listed = bucket.listing("" if fixed != path else pattern)
    except BucketError as error:
        raise UserError(
            f"{what} cannot be read ({error.strerror})", "check the network, your keys and the URL"
        ) from None
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
            raise UserError(
                f"{what} cannot be downloaded to {base} ({error.strerror or error})",
                "free that disk, or set XDG_CACHE_HOME to a folder on another one",
            ) from None
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
