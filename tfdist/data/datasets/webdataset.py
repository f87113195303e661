"""`webdataset:/pattern`: tar files by WebDataset's convention, read by number, without that package.

Targets are read at once, inputs when they are needed, from where they lie in the tar files.
"""

import concurrent.futures
import glob
import io
import json
import mmap
import os
import re
import tarfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.config.field_syntax import Options, expanded
from tfdist.data import image_decoding
from tfdist.data.datasets import examples
from tfdist.data.datasets.examples import ByteRanges, Parts
from tfdist.data.loaded import Loaded
from tfdist.data.spec import Spec
from tfdist.data.splits import by_file_name, named, select
from tfdist.errors import UserError, one_line

_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")  # first bytes of gzip, bzip2, xz and zstd files
_OPTIONS = ("x", "y", "weight", "field", "classes", "classify", "channels", "max_pixels")
_IMAGES = ("jpg", "jpeg", "png", "gif", "bmp")
_TARGETS = ("cls", "txt", "json", "npy")
_THREADS = 16
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

    The path is a file, a folder, or a pattern with braces or wildcards: `train-{000..009}.tar`, `train-*.tar`.
    """
    what = f"data.name=webdataset:{path}"
    path = os.path.expanduser(path)
    found = []
    if os.path.isdir(path):
        # What is compressed is found, too, and refused then.
        found = [f for end in ("*.tar*", "*.tgz") for f in glob.glob(os.path.join(glob.escape(path), end))]
    else:
        for part in [path] if os.path.isfile(path) else expanded("data.name", path):
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
    """
    samples: dict[str, dict[str, Member]] = {}
    problems: list[str] = []
    try:
        with open(path, "rb") as file:
            for member in _members(path, file, problems):
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
    return Listing(samples, "".join(problems))


def _members(path: str, file: BinaryIO, problems: list[str]) -> Iterator[Member]:
    """Yields the files of a tar file, and adds what is wrong with it to `problems`, if anything.

    `tarfile` takes a damaged header behind the first for the end of the file, and says nothing. It is asked only where
    a header is not the plain one of a file: it takes four times as long, and there may be millions of them.
    """
    size = os.fstat(file.fileno()).st_size
    if file.read(max(map(len, _PACKED))).startswith(_PACKED):
        what = f"{path} is compressed, and what is compressed cannot be read by number"
        raise UserError(what, "unpack it to a plain .tar")
    file.seek(0)
    count, at, plain = 0, 0, True
    try:
        with (
            tarfile.open(fileobj=file, mode="r:") as tar,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole,
        ):
            while at < size:
                header = whole[at : at + tarfile.BLOCKSIZE]
                member = _plain(header, at) if plain else None
                if member is not None:
                    following = member.offset + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                else:
                    plain = plain and header[156:157] != tarfile.XGLTYPE  # it changes all that follow
                    file.seek(at)
                    found = tarfile.TarInfo.fromtarfile(tar)  # fails at the end, where there is no header
                    following = tar.offset
                    if not (found.isdir() or found.isreg()) or found.issparse():
                        raise UserError(f"{path}: {found.name} is a link or no plain file", "write it as a file")
                    member = None if found.isdir() else Member(found.name, found.offset_data, found.size)
                if member is not None and member.offset + member.size > size:
                    break
                at = following
                if member is not None:
                    yield member
                    count += 1
    except tarfile.TarError:
        if not count:
            raise UserError(f"{path} is no tar file", "give files of webdataset.TarWriter, or of tar") from None
    file.seek(at)  # where blocks of zeros must begin, and nothing behind them
    if size - at < tarfile.BLOCKSIZE or any(piece.strip(b"\0") for piece in iter(lambda: file.read(_PIECE), b"")):
        problems.append(f"{path} is cut off or damaged at byte {at:,}, behind {count:,} good files")


def _plain(header: bytes, at: int) -> Member | None:
    """Returns the file behind a header at this place, if that is plain and intact; else None."""
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
    return Member(name.decode("utf-8", "surrogateescape"), at + tarfile.BLOCKSIZE, int(size, 8))


def _kind(extension: str) -> str:
    """Returns what a file is, by the last part of its extension: `png` of `left.png`."""
    return extension.rpartition(".")[2]


def _chosen(extensions: Collection[str], options: Options, what: str) -> list[str]:
    """Returns the extensions of input, target and, where it is asked for, weight, of those of the first sample."""
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
    """Returns the numbers in a target's file, where `field` is the entry of a JSON object, or nothing.

    Raises:
      ValueError: saying what else is in it.
    """
    kind = _kind(extension)
    if kind == "npy":
        return _array(content)
    try:
        if kind == "json":
            value = json.loads(content)
            if isinstance(value, dict) and not field:
                raise ValueError(f"an object: say data.options=field=NAME, of {', '.join(value)}")
            if field and (not isinstance(value, dict) or field not in value):
                raise ValueError(f"no {field!r} in it")
            value = value[field] if field else value
        elif b"_" in content:  # which Python leaves out
            raise ValueError(f"{one_line(content.decode(errors='replace'), 40)!r}")
        else:
            whole = kind == "cls" or (float(content).is_integer() and content.strip().lstrip(b"+-").isdigit())
            value = int(content) if whole else float(content)
        numbers = np.asarray(value)
        if numbers.dtype.kind not in "fiub":
            raise ValueError(f"no number: {one_line(value, 40)!r}")
    except RecursionError:  # of the parser, or of whatever walks through what it has let pass
        raise ValueError("its brackets are nested too deeply") from None
    return numbers


def _array(content: bytes) -> np.ndarray:
    """Returns the array of numbers in a `.npy` file, which is never unpickled, as `_number` does."""
    try:
        found = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # a damaged file can fail anywhere in NumPy
        raise ValueError(f"no array of NumPy: {one_line(error, 80)}") from None
    if found.dtype.kind not in "fiub":
        raise ValueError(f"values of type {found.dtype}")
    return found


def _name(ranges: ByteRanges, row: int) -> str:
    """Names a sample in a message; reads the headers of its tar file again."""
    path, offset = ranges.paths[ranges.files[row]], int(ranges.offsets[row])
    members = (m for sample in listing(path).samples.values() for m in sample.values())
    return next((f"{m.name} in {path}" for m in members if m.offset == offset), f"a file in {path}")


def load(path: str, splits: Mapping[str, str], options: Options, skip: bool, free: bool) -> Loaded:
    """Finds the samples of both splits, and reads their targets and the first input.

    Args:
      options: `x=NAME, y=NAME` and `weight=NAME`, extensions, where it is not plain which; `field=NAME` of a target in
        a `.json` file; `channels=1` for images that are not to be RGB; `max_pixels`; `classes` and `classify`, see
        `examples.targets_and_weights`.
      skip: leave out samples without an input or a target, and what lies behind damage, instead of refusing them.
    """
    what = f"webdataset:{path}"
    examples.check_options(options, _OPTIONS, ("x", "y", "weight", "field"))
    by_split = files(path)
    needed = {name: by_split[name] for name in by_split if name in named(splits.values())}
    names = _columns([p for paths in needed.values() for p in paths], options)
    scanned = {name: _samples(paths, names, options.get("field", ""), skip) for name, paths in needed.items()}
    sizes = {name: len(scanned[name][0].files) if name in scanned else 0 for name in by_split}
    selected = [select(text, sizes, field, what) for field, text in splits.items()]
    columns = [
        [np.concatenate(c) for c in zip(*([table[rows] for table in scanned[name][1]] for name, rows in part))]
        for part in selected
    ]
    *tables, classes = examples.targets_and_weights(columns, options, what)
    parts = [Parts([(scanned[name][0], rows) for name, rows in part]) for part in selected]
    (ranges, _), rows = scanned[selected[0][0][0]], selected[0][0][1]
    content = ranges.read(rows[:1])[0]
    first = lambda read: examples.first_input(read, lambda: _name(ranges, int(rows[0])))
    if _kind(names[0]) == "npy":
        array = first(lambda: _array(content))
        dtype, shape = np.dtype(keras.config.floatx()) if array.dtype.kind == "f" else array.dtype, array.shape or (1,)
        spec = Spec(shape, dtype.name, classes, 255.0 if dtype == np.uint8 else 1.0)

        def arrays(ranges: ByteRanges, rows: np.ndarray) -> np.ndarray:
            made = [_array(content) for content in ranges.read(rows)]
            for other in made:
                if other.shape != array.shape or other.dtype != array.dtype:
                    was, now = (f"{a.dtype} {list(a.shape)}" for a in (array, other))
                    raise ValueError(f"it is {now}, and the first is {was}")
            return np.reshape(made, (len(made), *shape))

        reads, decode = [part.reader(arrays, dtype, shape) for part in parts], lambda x: x
    else:
        pictures = image_decoding.Pictures.of(options)
        shape = tuple(first(lambda: pictures.decode(tf.constant(content))).shape)
        spec = Spec(shape, "uint8", classes, 255.0)
        reads, decode = [part.reader(ByteRanges.read) for part in parts], pictures.decoder(None if free else shape)
    train, evaluation = (
        examples.records(read, decode, table, part.namer(_name)) for part, read, table in zip(parts, reads, tables)
    )
    return Loaded(train, evaluation, train.size, spec)


def _columns(paths: Sequence[str], options: Options) -> list[str]:
    """Returns the extensions of input, target and weight, by the first sample that there is."""
    for path in paths:
        for key, sample in listing(path).samples.items():
            return _chosen(list(sample), options, f"{key} in {path}")
    raise UserError(f"{' and '.join(paths[:3])} {'have' if len(paths) > 1 else 'has'} no samples", "give others")


def _samples(paths: Sequence[str], names: Sequence[str], field: str, skip: bool) -> tuple[ByteRanges, list[np.ndarray]]:
    """Returns the inputs in tar files, and their targets and weights; says what is left out, or refuses it.

    Args:
      names: extensions of input, target and weight.
      field: of a target in a JSON object.
    """
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        scans = list(pool.map(lambda path: _scan(path, names, field), paths))
    examples.report_damage([problem for _, problems in scans for problem in problems], skip)
    samples = [sample for usable, _ in scans for sample in usable]
    tables = []
    for column, name in enumerate(names[1:]):
        values = [values[column] for *_, values in samples]
        if shapes := {value.shape for value in values} - {values[0].shape if values else ()}:
            what = f"{paths[0]}: .{name} has shape {list(values[0].shape)} at first and {list(min(shapes))} later"
            raise UserError(what, "make them alike")
        tables.append(np.stack(values) if values else np.zeros(0))
    files = np.repeat(np.arange(len(scans), dtype=np.int32), [len(usable) for usable, _ in scans])
    offsets, lengths = (np.array([sample[i] for sample in samples], np.int64) for i in (0, 1))
    return ByteRanges(tuple(paths), files, offsets, lengths), tables


def _scan(path: str, names: Sequence[str], field: str) -> tuple[list[tuple[int, int, list[np.ndarray]]], list[str]]:
    """Returns of each usable sample the input's offset and size, its target and weight; and what is wrong elsewhere."""
    samples: list[tuple[int, int, list[np.ndarray]]] = []
    problems: list[str] = []
    listed = listing(path)
    with open(path, "rb") as file:
        for key, sample in listed.samples.items():
            if missing := [name for name in names if name not in sample]:
                listed_files = ", ".join(f".{extension}" for extension in sample)
                problems.append(f"{key} in {path} has no .{missing[0]} (it has {listed_files})")
                continue
            values = []
            for column, name in enumerate(names[1:]):
                content = os.pread(file.fileno(), sample[name].size, sample[name].offset)
                try:
                    values.append(_number(content, name, "" if column else field))
                except ValueError as error:
                    problems.append(f"{key}.{name} in {path} holds no number: {one_line(error, 80).rstrip('.')}")
                    break
            else:
                samples.append((sample[names[0]].offset, sample[names[0]].size, values))
    return samples, problems + [listed.problem] * bool(listed.problem)
