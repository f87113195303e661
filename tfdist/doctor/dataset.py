"""Whether the files of the data set are there. Neither TFDS nor TensorFlow."""

import contextlib
import glob
import importlib.machinery
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Mapping

from tfdist import config
from tfdist.config import buckets, field_syntax
from tfdist.doctor import machine
from tfdist.doctor.check import Finding, fail, ok, warn
from tfdist.errors import UserError

_VERSION = re.compile(r"\d+\.\d+\.\d+$")


def check(data: config.Data, environ: Mapping[str, str]) -> list[Finding]:
    """Looks for the data set of an experiment."""
    if data.name in ("synthetic", "stdlib_text"):
        return [ok(f"{data.name} is made by each run, nothing has to be prepared")]
    files = field_syntax.files(data.name)
    if files:
        return _files(*files)
    if field_syntax.is_reference(data.name):
        return _function(data.name)
    base = data.data_dir or environ.get("TFDS_DATA_DIR") or os.path.join("~", "tensorflow_datasets")
    name, _, version = data.name.partition(":")
    folder = pathlib.Path(os.path.expanduser(base), name)
    there = []
    with contextlib.suppress(OSError):
        # The configuration of a data set that has several is a folder between name and version. TFDS takes the newest,
        # and renames a folder to its version when all is written.
        candidates = [p for pattern in ("*", "*/*") for p in folder.glob(pattern) if _VERSION.match(p.name)]
        there = [p for p in candidates if p.is_dir() and (not version or p.name == version)]
    newest = max(there, key=lambda p: [int(n) for n in p.name.split(".")], default=None)
    if newest:
        return [ok(f"{data.name} is prepared in {newest}, which only a run looks into")]
    above = machine.nearest(folder)
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        what = f"{data.name} is not prepared, and {above} cannot be written"
        return [fail(what, "set data.data_dir or TFDS_DATA_DIR to a folder of yours")]
    if data.name == "digits":
        return [ok(f"digits is not prepared yet: the first run does so in {folder}, in a second")]
    what = f"{data.name} is not prepared in {folder}: the first run downloads it, if TFDS knows it"
    return [warn(what, "train once where there is a network, or set data.data_dir to where it is")]


def _files(kind: str, pattern: str) -> list[Finding]:
    """Checks only that the files are there: a run looks into them."""
    if buckets.is_url(pattern):
        return [ok(f"{kind} files in a bucket, which only a run downloads: {pattern}")]
    path = os.path.expanduser(pattern)
    if kind == "image_folder":
        if not os.path.isdir(path):
            return [fail(f"there is no folder {path}", "give data.name the path of a folder of images")]
        return [ok(f"images in {path}, which only a run looks at")]
    if kind in ("hf", "webdataset") and importlib.util.find_spec("datasets") is None:
        return [fail(f"{kind}:{pattern} needs a package that is not installed", "pip install datasets")]
    if kind == "hf":
        return _of_hugging_face(pattern, path)
    braces = kind == "webdataset" and not os.path.exists(path)
    try:
        patterns = field_syntax.expanded("data.name", path) if braces else [path]
    except UserError as error:
        return [fail(str(error), "correct the braces in data.name")]
    found = [glob.glob(part, recursive=True) for part in patterns]
    if missing := [part for part, there in zip(patterns, found) if not there]:
        return [fail(f"there is no file {missing[0]}", "correct the path in data.name")]
    paths = [one for there in found for one in there]
    return [ok(f"{len(paths):,} {kind} file{'s' * (len(paths) > 1)}: {path}")]


def _of_hugging_face(name: str, path: str) -> list[Finding]:
    """Checks of a folder that it is there; the Hub is not asked."""
    if os.path.isdir(path):
        return [ok(f"a data set of Hugging Face in {path}, which only a run looks at")]
    if name.startswith(("/", ".", "~")):
        return [fail(f"there is no folder {path}", "give data.name a folder that save_to_disk has written")]
    return [ok(f"{name} of the Hugging Face Hub, or of its cache, which only a run asks")]


def _function(reference: str) -> list[Finding]:
    """Checks that Python would find a function, which is not even imported: it may do anything."""
    package = reference.partition(":")[0].partition(".")[0]
    if package in sys.modules or importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path]):
        return [ok(f"made by {reference}, which only a run calls")]
    fix = "correct data.name, go to the folder of that file, or add it to PYTHONPATH"
    return [fail(f"data.name={reference!r} names a package {package!r} that Python does not find", fix)]
