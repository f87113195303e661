"""`webdataset:/pattern`: tar files by WebDataset's convention, read by number, without that package.

Targets are read at once, inputs when they are needed, from where they lie in the tar files.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import glob
import io
import json
import mmap
import os
import re
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfdist.config import field_syntax
from tfdist.config.field_syntax import Options
from tfdist.data import image_decoding
from tfdist.data.datasets import examples
from tfdist.data.datasets.examples import ByteRanges, Rows
from tfdist.data.loaded import Loaded
from tfdist.data.records import reason
from tfdist.data.sources import Records
from tfdist.data.spec import Spec
from tfdist.data.splits import by_file_name, named, select
from tfdist.errors import UserError, one_line

_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")  # first bytes of gzip, bzip2, xz and zstd files
_PIECE = 1 << 20
_OCTAL = re.compile(rb"[0-7]+")


class Member(NamedTuple):
    """A file in a tar file."""

    name: str
    offset: int  # offset of its bytes in the tar file
    size: int


class Listing(NamedTuple):
    """The samples of a tar file."""

    samples: dict[str, dict[str, Member]]  # by key, then by extension, in the order of the file
    problem: str  # damage from some place on, or ""


def files(path: str) -> dict[str, list[str]]:
    """Finds the tar files of each split, sorted, see `splits.by_file_name`.

    Args:
      path: a file, a folder, or a pattern with braces or wildcards: `train-{000..009}.tar`, `train-*.tar`.

    Raises:
      UserError: there is none, or one of those that braces name is not there.
    """
    what = f"data.name=webdataset:{path}"
    path = os.path.expanduser(path)
    found = []
    if os.path.isdir(path):
        # What is compressed is found, too, and refused then.
        found = [f for end in ("*.tar*", "*.tgz") for f in glob.glob(os.path.join(glob.escape(path), end))]
    else:
        for part in [path] if os.path.isfile(path) else field_syntax.expanded("data.name", path):
            matching = glob.glob(part, recursive=True)
            if not matching and part != path and not glob.has_magic(part):
                raise UserError(f"{what}: there is no file {part}", "correct the numbers in braces, or bring it here")
            found += matching
    paths = sorted({f for f in found if os.path.isfile(f)})
    if not paths:
        raise UserError(f"{what} has no files", "give a tar file, a folder, or a pattern such as train-{000..009}.tar")
    return by_file_name(paths)


def listing(path: str) -> Listing:
    """Lists the samples of a tar file.

    As in WebDataset, the key of a sample is the path of its files up to the first dot of their names, and the rest is
    their extension, in lower case. Files without a key or an extension, such as hidden ones, belong to no sample.

    Raises:
      UserError: it cannot be read by number, is no tar file, or holds a file twice.
    """
    samples: dict[str, dict[str, Member]] = {}
    try:
        with open(path, "rb") as file:
            members = _Members(path, file)
            for member in members:
                folder, slash, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                if not (stem and extension):
                    continue
                sample = samples.setdefault(folder + slash + stem, {})
                if extension.lower() in sample:
                    raise UserError(f"{path} has {member.name} twice", "give each example a key of its own")
                sample[extension.lower()] = member
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or one_line(error, 100)}") from None
    return Listing(samples, members.problem)


class _Members:
    """Goes over the files of a tar file; then `problem` says what is wrong with it, if anything.

    `tarfile` takes a damaged header behind the first for the end of the file, and says nothing. It is asked only where
    a header is not the plain one of a file: it takes four times as long, and there may be millions of them.
    """

    def __init__(self, path: str, file: BinaryIO):
        self._path, self._file, self.problem = path, file, ""

    def __iter__(self) -> Iterator[Member]:
        path, size = self._path, os.fstat(self._file.fileno()).st_size
        begin = self._file.read(max(map(len, _PACKED)))
        if begin.startswith(_PACKED):
            raise UserError(
                f"{path} is compressed, and what is compressed cannot be read by number", "unpack it to a plain .tar"
            )
        self._file.seek(0)
        count, at, plain = 0, 0, True
        try:
            with (
                tarfile.open(fileobj=self._file, mode="r:") as tar,
                mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as whole,
            ):
                while at < size:
                    header = whole[at : at + tarfile.BLOCKSIZE]
                    found = _plain(header) if plain else None
                    if found is None:
                        plain = plain and header[156:157] != tarfile.XGLTYPE  # it changes all that follow
                        found, following = self._asked(tar, at)
                    else:
                        found = found._replace(offset=at + tarfile.BLOCKSIZE)
                        following = found.offset + -(-found.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                    if found is not None and found.offset + found.size > size:
                        break
                    at = following
                    if found is not None:
                        yield found
                        count += 1
        except tarfile.TarError:
            if not count:
                raise UserError(f"{path} is no tar file", "give files of webdataset.TarWriter, or of tar") from None
        if not self._only_zeros_from(at, size):
            self.problem = f"{path} is cut off or damaged at byte {at:,}, behind {count:,} good files"

    def _asked(self, tar: tarfile.TarFile, at: int) -> tuple[Member | None, int]:
        """Returns what `tarfile` finds at a place, nothing for a folder, and where it goes on.

        Raises:
          TarError: there is no header, as at the end.
        """
        self._file.seek(at)
        found = tarfile.TarInfo.fromtarfile(tar)
        if found.isdir():
            return None, tar.offset
        if not found.isreg() or found.issparse():
            raise UserError(f"{self._path}: {found.name} is a link or no plain file", "write it as a file")
        return Member(found.name, found.offset_data, found.size), tar.offset

    def _only_zeros_from(self, at: int, size: int) -> bool:
        """Returns whether the file ends as tar files do: by blocks of zeros, and nothing behind them."""
        self._file.seek(at)
        while piece := self._file.read(_PIECE):
            if piece.strip(b"\0"):
                return False
        return size - at >= tarfile.BLOCKSIZE


def _plain(header: bytes) -> Member | None:
    """Returns the name and the size of a file whose header is plain and intact; else None."""
    if len(header) < tarfile.BLOCKSIZE or header[156:157] != tarfile.REGTYPE:
        return None
    size, check = header[124:136].strip(b" \0"), header[148:156].strip(b" \0")
    if not (_OCTAL.fullmatch(size) and _OCTAL.fullmatch(check)):
        return None
    if int(check, 8) != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        return None
    name = header[:100].partition(b"\0")[0]
    if header[257:265] == tarfile.POSIX_MAGIC and header[345]:
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return Member(name.decode("utf-8", "surrogateescape"), 0, int(size, 8))


_OPTIONS = ("x", "y", "weight", "field", "classes", "classify", "channels", "max_pixels")
_IMAGES = ("jpg", "jpeg", "png", "gif", "bmp")
_TARGETS = ("cls", "txt", "json", "npy")


def _kind(extension: str) -> str:
    """Returns what a file is, by the last part of its extension: `png` of `left.png`."""
    return extension.rpartition(".")[2]


def _chosen(extensions: Collection[str], options: Options, what: str) -> list[str]:
    """Returns the extensions of the input, the target and, where it is asked for, the weight.

    Args:
      extensions: those of the first sample.
      options: `x`, `y` and `weight` name extensions where it is not plain which.
      what: the first sample, for messages.
    """
    listed = ", ".join(f".{extension}" for extension in extensions)
    names = []
    for column, usual in (
        ("x", [e for e in extensions if _kind(e) in _IMAGES] or [e for e in extensions if _kind(e) == "npy"]),
        ("y", [e for e in extensions if e == "cls"]),
    ):
        name = options.get(column, "").lstrip(".").lower()
        if not name and len(usual) != 1:
            raise UserError(
                f"{what} does not tell which file is {column}", f"say data.options={column}=NAME, of {listed}"
            )
        names.append(name or usual[0])
    names += [options["weight"].lstrip(".").lower()] if "weight" in options else []
    for name in names:
        if name not in extensions:
            raise UserError(f"data.options: there is no .{name} in {what}: it has {listed}")
    if _kind(names[0]) not in (*_IMAGES, "npy"):
        raise UserError(f"{what}: .{names[0]} is no input: only {', '.join(_IMAGES)} and npy can be trained on")
    for name in names[1:]:
        if _kind(name) not in _TARGETS:
            raise UserError(f"{what}: .{name} is no target: only {', '.join(_TARGETS)} hold numbers")
    if "field" in options and _kind(names[1]) != "json":
        raise UserError(f"data.options: field={options['field']} is for .json files, and the target is .{names[1]}")
    if _kind(names[0]) == "npy" and (wrong := [o for o in ("channels", "max_pixels") if o in options]):
        raise UserError(f"data.options: {wrong[0]} is for images, and the input is .{names[0]}")
    return names


def _number(content: bytes, extension: str, field: str = "") -> np.ndarray:
    """Returns the numbers in a target's file.

    Args:
      extension: `cls` holds a whole number, `txt` any number, `json` numbers, `npy` an array.
      field: the entry of a JSON object, or nothing.

    Raises:
      ValueError: saying what else is in it.
    """
    if _kind(extension) == "npy":
        return _array(content)
    try:
        value = _value(content, extension, field)
        found = np.asarray(value)
        if found.dtype.kind not in "fiub":
            raise ValueError(f"no number: {one_line(value, 40)!r}")
    except RecursionError:  # of the parser, or of whatever walks through what it has let pass
        raise ValueError("its brackets are nested too deeply") from None
    return found


def _value(content: bytes, extension: str, field: str) -> object:
    """Returns what a text holds, see `_number`."""
    if _kind(extension) == "json":
        value = json.loads(content)
        if isinstance(value, dict) and not field:
            raise ValueError(f"an object: say data.options=field=NAME, of {', '.join(value)}")
        if field and (not isinstance(value, dict) or field not in value):
            raise ValueError(f"no {field!r} in it")
        return value[field] if field else value
    if b"_" in content:  # which Python leaves out
        raise ValueError(f"{one_line(content.decode(errors='replace'), 40)!r}")
    if _kind(extension) == "cls":
        return int(content)
    value = float(content)
    return int(content) if value.is_integer() and content.strip().lstrip(b"+-").isdigit() else value


def _array(content: bytes) -> np.ndarray:
    """Returns the array of numbers in a `.npy` file, which is never unpickled.

    Raises:
      ValueError: saying what else is in it.
    """
    try:
        found = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # a damaged file can fail anywhere in NumPy
        raise ValueError(f"no array of NumPy: {one_line(error, 80)}") from None
    if found.dtype.kind not in "fiub":
        raise ValueError(f"values of type {found.dtype}")
    return found


T = TypeVar("T")
_THREADS = 16
_NAMED = 3


def _name(ranges: ByteRanges, row: int) -> str:
    """Names a sample in a message; reads the headers of its tar file again."""
    path, offset = ranges.paths[ranges.files[row]], int(ranges.offsets[row])
    members = (m for sample in listing(path).samples.values() for m in sample.values())
    return next((f"{m.name} in {path}" for m in members if m.offset == offset), f"a file in {path}")


def load(path: str, splits: Mapping[str, str], options: Options, skip: bool, free: bool) -> Loaded:
    """Finds the samples of both splits, and reads their targets and the first input.

    Args:
      path: a file, a folder or a pattern, see `files`.
      splits: those for training and evaluation, by the field that asks for each.
      options: `x=NAME, y=NAME` and `weight=NAME`, extensions, where it is not plain which; `field=NAME` of a target in
        a `.json` file; `channels=1` for images that are not to be RGB; `max_pixels`; `classes` and `classify`, see
        `examples.targets_and_weights`.
      skip: leave out samples without an input or a target, and what lies behind damage, instead of refusing them.
      free: images are made one size later; otherwise all must have the size of the first.

    Raises:
      UserError: no files or samples, or some that cannot be trained on.
    """
    what = f"webdataset:{path}"
    examples.check_options(options, _OPTIONS, ("x", "y", "weight", "field"))
    by_split = files(path)
    needed = {name: by_split[name] for name in by_split if name in named(splits.values())}
    names = _columns([p for paths in needed.values() for p in paths], options)
    scanned = {name: _samples(paths, names, options.get("field", ""), skip) for name, paths in needed.items()}
    sizes = {name: len(scanned[name][0].files) if name in scanned else 0 for name in by_split}
    parts = [[(*scanned[name], rows) for name, rows in select(t, sizes, f, what)] for f, t in splits.items()]
    columns = [
        [np.concatenate(c) for c in zip(*([table[rows] for table in tables] for _, tables, rows in part))]
        for part in parts
    ]
    *tables, classes = examples.targets_and_weights(columns, options, what)
    ranges, _, rows = parts[0][0]
    content = ranges.read(rows[:1])[0]
    first = lambda read: _first(read, lambda: _name(ranges, int(rows[0])))
    if _kind(names[0]) == "npy":
        array = first(lambda: _array(content))
        dtype = np.dtype(keras.config.floatx()) if array.dtype.kind == "f" else array.dtype
        train, evaluation = (_arrays(part, table, array, dtype) for part, table in zip(parts, tables))
        spec = Spec(array.shape or (1,), dtype.name, classes, 255.0 if dtype == np.uint8 else 1.0)
    else:
        pictures = image_decoding.Pictures.of(options)
        shape = first(lambda: tuple(int(n) for n in pictures.decode(tf.constant(content)).shape))
        decode = pictures.decoder(None if free else shape)
        train, evaluation = (
            _records(part, examples.stored_reader(_getter(part), tf.string), decode, table)
            for part, table in zip(parts, tables)
        )
        spec = Spec(shape, "uint8", classes, 255.0)
    return Loaded(train, evaluation, train.size, spec)


_Part = tuple[ByteRanges, list[np.ndarray], np.ndarray]
"""The inputs of a split, its targets and weights, and which of its rows are used."""


def _columns(paths: Sequence[str], options: Options) -> list[str]:
    """Returns the extensions of input, target and weight, by the first sample that there is."""
    for path in paths:
        for key, sample in listing(path).samples.items():
            return _chosen(list(sample), options, f"{key} in {path}")
    raise UserError(f"{' and '.join(paths[:_NAMED])} {'have' if len(paths) > 1 else 'has'} no samples", "give others")


def _samples(paths: Sequence[str], names: Sequence[str], field: str, skip: bool) -> tuple[ByteRanges, list[np.ndarray]]:
    """Looks into tar files, and says what is left out of them or refuses them.

    Args:
      names: extensions of input, target and weight.
      field: of a target in a JSON object.
    """
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        scans = list(pool.map(lambda path: _scan(path, names, field), paths))
    examples.report_damage([problem for scan in scans for problem in scan.problems], skip)
    tables = []
    for column, name in enumerate(names[1:]):
        values = [value for scan in scans for value in scan.values[column]]
        if shapes := {value.shape for value in values} - {values[0].shape if values else ()}:
            raise UserError(
                f"{paths[0]}: .{name} has shape {list(values[0].shape)} at first and {list(min(shapes))} later",
                "make them alike",
            )
        tables.append(np.stack(values) if values else np.zeros(0))
    parts = [np.full(len(scan.offsets), i, np.int32) for i, scan in enumerate(scans)]
    offsets = np.array([n for scan in scans for n in scan.offsets], np.int64)
    lengths = np.array([n for scan in scans for n in scan.lengths], np.int64)
    return ByteRanges(tuple(paths), np.concatenate(parts), offsets, lengths), tables


@dataclasses.dataclass(slots=True)
class _TarScan:
    """The usable samples of one tar file."""

    offsets: list[int]
    lengths: list[int]
    values: list[list[np.ndarray]]  # of targets and weights
    problems: list[str]


def _scan(path: str, names: Sequence[str], field: str) -> _TarScan:
    listed = listing(path)
    scan = _TarScan([], [], [[] for _ in names[1:]], [])
    with open(path, "rb") as file:
        for key, sample in listed.samples.items():
            if missing := [name for name in names if name not in sample]:
                listed_files = ", ".join(f".{extension}" for extension in sample)
                scan.problems.append(f"{key} in {path} has no .{missing[0]} (it has {listed_files})")
                continue
            found = []
            for column, name in enumerate(names[1:]):
                content = os.pread(file.fileno(), sample[name].size, sample[name].offset)
                try:
                    found.append(_number(content, name, "" if column else field))
                except ValueError as error:
                    scan.problems.append(f"{key}.{name} in {path} holds no number: {one_line(error, 80).rstrip('.')}")
                    break
            else:
                scan.offsets.append(sample[names[0]].offset)
                scan.lengths.append(sample[names[0]].size)
                for values, value in zip(scan.values, found):
                    values.append(value)
    scan.problems += [listed.problem] if listed.problem else []
    return scan


def _first(read: Callable[[], T], name: Callable[[], str]) -> T:
    """Reads the first input, which an error names."""
    try:
        return read()
    except tf.errors.OpError as error:
        why = reason(error)
    except ValueError as error:
        why = one_line(error, 80).rstrip(".")
    raise UserError(f"{name()} cannot be decoded: {why}")


def _getter(parts: Sequence[_Part]) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that reads the bytes of inputs by number."""
    places = Rows([rows for *_, rows in parts])

    def get(numbers: np.ndarray) -> np.ndarray:
        contents = np.empty(len(numbers), object)
        for part, which, rows in places.by_part(numbers):
            contents[which] = parts[part][0].read(rows)
        return contents

    return get


def _arrays(parts: Sequence[_Part], tables: list[np.ndarray], first: np.ndarray, dtype: np.dtype) -> Records:
    """Returns a source of `.npy` files."""
    shape, contents = first.shape or (1,), _getter(parts)

    def get(numbers: np.ndarray) -> np.ndarray:
        arrays = np.empty([len(numbers), *shape], dtype)
        for i, content in enumerate(contents(numbers)):
            array = _array(content)
            if array.shape != first.shape or array.dtype != first.dtype:
                was, now = (f"{a.dtype} {list(a.shape)}" for a in (first, array))
                raise ValueError(f"it is {now}, and the first is {was}")
            arrays[i] = array
        return arrays

    return _records(parts, examples.stored_reader(get, dtype, shape), lambda x: x, tables)


def _records(parts: Sequence[_Part], read: Callable, decode: Callable, tables: list[np.ndarray]) -> Records:
    places = Rows([rows for *_, rows in parts])

    def name(number: int) -> str:
        part, row = places.place(number)
        return _name(parts[part][0], row)

    return examples.records(read, decode, tables, name)
