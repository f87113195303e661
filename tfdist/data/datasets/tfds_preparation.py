"""Prepares data sets of TFDS: finds their builders, and downloads what is not there yet, or says why it cannot."""

from __future__ import annotations

import contextlib
import difflib
import io
import logging
import os
import pathlib
import re
import socket
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator

import tensorflow as tf
import tensorflow_datasets as tfds

from tfdist import config
from tfdist.config import local_files
from tfdist.errors import UserError, one_line, shown

BY_NUMBER = tfds.core.FileFormat.ARRAY_RECORD
"""The format that TFDS reads by number."""
LIMIT_S = 24 * 3600.0
"""How long another run may take to prepare a data set."""
_RESOLVING = threading.Lock()


def prepared(data: config.Data, memory: float, prepare: bool) -> tfds.core.DatasetBuilder:
    """Returns the builder of `data.name`, whose files are there.

    What is prepared here and will not fit into memory is written as `array_record`.

    Args:
      memory: bytes that a split may take when `data.cache` is `auto`.
      prepare: False to refuse one that would have to be downloaded first, and to leave nothing behind.

    Raises:
      UserError: unknown name, or data that would have to be downloaded and cannot be.
    """
    _quieten()
    builder = _builder(data.name, os.path.expanduser(data.data_dir) or None)
    there, own = os.path.isdir(builder.data_dir), type(builder).__module__.startswith("tfdist.")
    if not (prepare or there or own):
        raise UserError(
            f"data set {data.name!r} is not in {builder.data_dir} yet, and a dry run downloads nothing: "
            "leave out --dry_run, or prepare it first"
        )
    if not (prepare or there):  # the one of tfdist's takes no download, and goes with this process
        builder = _builder(data.name, str(local_files.temporary_folder()))
        _prepare(builder, data.name, _will_not_fit(builder, data.cache, memory))
    elif not there:
        with _alone(str(builder.data_dir_root), data.name):
            if os.path.isdir(builder.data_dir):  # meanwhile another run has prepared it
                return _builder(data.name, os.path.expanduser(data.data_dir) or None)
            _prepare(builder, data.name, _will_not_fit(builder, data.cache, memory))
    return builder


@contextlib.contextmanager
def _alone(folder: str, name: str) -> Iterator[None]:
    """Lets one run at a time prepare a data set: of several, TFDS lets all but the first one fail at their end."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # TFDS has more to say of a folder that cannot be written
            if "://" not in folder:
                os.makedirs(folder, exist_ok=True)
                lock = pathlib.Path(folder, f".{re.sub(r'[^A-Za-z0-9]+', '_', name)}.lock")
                stack.enter_context(local_files.locked(lock, f"another run that prepares {name}", LIMIT_S))
        yield


def is_fixed(features: tfds.features.FeatureConnector) -> bool:
    """Whether these features have the same shape in all examples."""
    return all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(features.get_tensor_spec()))


def _builder(name: str, data_dir: str | None) -> tfds.core.DatasetBuilder:
    if name == "digits":
        from tfdist.data.datasets import digits  # noqa: F401  registers the builder with TFDS
    try:
        with _importing_no_features(name):
            return tfds.builder(name, data_dir=data_dir)
    except UserError:
        raise
    except tfds.core.DatasetNotFoundError:
        names = (*config.DATASETS, *tfds.list_builders(with_community_datasets=False))
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}? Else" if near else "see https://www.tensorflow.org/datasets/catalog, or"
        raise UserError(f"unknown data.name {name!r}: {hint} write package.module:function") from None
    except ValueError as error:
        kind, colon, _ = name.partition(":")
        near = difflib.get_close_matches(kind, config.FILES, n=1) if colon else []
        hint = f": did you mean {near[0]}:?" if near else f": {_line(error)}"
        raise UserError(f"data.name={name!r} is not accepted by TFDS{hint}") from None
    except Exception as error:  # TFDS lets through whatever reading damaged files raises
        raise UserError(
            f"data set {name!r} cannot be opened: {_line(error)}: correct the .json files in its folder, or delete "
            "it to prepare the data set again"
        ) from error


@contextlib.contextmanager
def _importing_no_features(name: str) -> Iterator[None]:
    """Refuses features of other packages: TFDS imports every module that the files of a data set name for a feature.

    Both a run folder and a data set may be somebody else's. What is imported already may be used.
    """
    connector = tfds.features.FeatureConnector
    with _RESOLVING:
        resolve = vars(connector)["cls_from_name"]

        def known(cls: type, class_name: str) -> type:
            module = str(class_name).rpartition(".")[0]
            if module and module not in sys.modules and not module.startswith("tensorflow_datasets."):
                raise UserError(
                    f"the data set {name!r} has a feature of class {_line(class_name, 80)!r}, and only those of TFDS "
                    "are imported: return the data set from a function that imports it, "
                    "data.name=package.module:function"
                )
            return resolve.__get__(None, cls)(class_name)

        connector.cls_from_name = classmethod(known)
        try:
            yield
        finally:
            connector.cls_from_name = resolve


def _prepare(builder: tfds.core.DatasetBuilder, name: str, by_number: bool) -> None:
    """Downloads and prepares, which TFDS does atomically."""
    by_hand, folder = builder.MANUAL_DOWNLOAD_INSTRUCTIONS, os.path.join(builder.data_dir_root, "downloads", "manual")
    if by_hand and not (os.path.isdir(folder) and os.listdir(folder)):
        raise UserError(
            f"data set {name!r} has to be downloaded by hand, from {builder.info.homepage}, into {folder}: "
            f"{_line(by_hand, 600)}"
        )
    command = f"tfds build {name}" + " --file_format=array_record" * by_number
    elsewhere = f"run `{command}` where there is a network, copy what it makes, and set data.data_dir"
    if host := _unreachable(builder):
        raise UserError(
            f"data set {name!r} is not in {builder.data_dir} and cannot be downloaded: {host} is not found: {elsewhere}"
        )
    print(f"tfdist: preparing the data set {name} in {shown(builder.data_dir)}", flush=True)
    kind = {"file_format": BY_NUMBER} if by_number else {}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare(**kind)
    except Exception as error:  # TFDS lets through whatever its downloads raise
        if isinstance(error, OSError) and error.filename:
            raise UserError(f"data.data_dir is not usable: {_line(error)}: choose another folder") from error
        if by_hand:
            elsewhere = f"put into {folder} what TFDS asks for: {_line(by_hand, 600)}"
        raise UserError(
            f"data set {name!r} cannot be prepared in {builder.data_dir}: {_line(error)}: {elsewhere}"
        ) from error


def _unreachable(builder: tfds.core.DatasetBuilder) -> str:
    """Names a host that downloads need, when there is no network at all; TFDS itself tries for three minutes."""
    hosts = {urllib.parse.urlsplit(url).hostname for url in builder.url_infos or {}} - {None}
    have = os.path.join(builder.data_dir_root, "downloads")  # TFDS takes what was downloaded once
    if not hosts or urllib.request.getproxies() or (os.path.isdir(have) and os.listdir(have)):
        return ""
    for host in sorted({*hosts, "storage.googleapis.com"}):  # where TFDS has copies of some
        with contextlib.suppress(OSError):
            socket.getaddrinfo(host, 443)
            return ""
    return min(hosts)


def _will_not_fit(builder: tfds.core.DatasetBuilder, cache: str, memory: float) -> bool:
    """Whether a set that is not prepared yet, and so of unknown size, is one to read by number."""
    if cache != "auto":
        return cache == "stream"
    # What is downloaded is at least compressed; images of all sizes are not kept in memory at all.
    known = sum(info.size for info in (builder.url_infos or {}).values() if info.size)
    return not is_fixed(builder.info.features) or known > memory


def _quieten() -> None:
    tfds.disable_progress_bar()
    logging.getLogger("absl").addFilter(_quiet)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # a warning of three lines for each retry of a download


def _quiet(record: logging.LogRecord) -> bool:
    """Lets TFDS' chatter about folders and file formats pass only when it is a warning."""
    return record.levelno >= logging.WARNING or "tensorflow_datasets" not in record.pathname


def _line(error: BaseException | str, length: int = 300) -> str:
    return one_line(error, length) or type(error).__name__
