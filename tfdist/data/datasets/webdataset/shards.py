"""Tar files as an index: where each file in them begins, found by one look at their headers. No TensorFlow."""

from __future__ import annotations

import glob
import mmap
import os
import re
import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from tfdist.config import field_syntax
from tfdist.data import splits
from tfdist.errors import UserError, one_line

_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")
"""How files of gzip, bzip2, xz and zstd begin."""
_PIECE = 1 << 20
_OCTAL = re.compile(rb"[0-7]+")


class Member(NamedTuple):
    """A file in a tar file."""

    name: str
    offset: int
    """Where its bytes begin in the tar file."""
    size: int


class Listing(NamedTuple):
    """What a tar file holds."""

    samples: dict[str, dict[str, Member]]
    """By key, then by extension, in the order of the file."""
    problem: str
    """What is wrong from some place on, or nothing."""


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
                raise UserError(f"{what}: there is no file {part}: correct the numbers in braces, or bring it here")
            found += matching
    paths = sorted({f for f in found if os.path.isfile(f)})
    if not paths:
        raise UserError(f"{what} has no files: give a tar file, a folder, or a pattern such as train-{{000..009}}.tar")
    return splits.by_file_name(paths)


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
                    raise UserError(f"{path} has {member.name} twice: give each example a key of its own")
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
                f"{path} is compressed, and what is compressed cannot be read by number: unpack it to a plain .tar"
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
                raise UserError(f"{path} is no tar file: give files of webdataset.TarWriter, or of tar") from None
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
            raise UserError(f"{self._path}: {found.name} is a link or no plain file: write it as a file")
        return Member(found.name, found.offset_data, found.size), tar.offset

    def _only_zeros_from(self, at: int, size: int) -> bool:
        """Whether the file ends as tar files do: by blocks of zeros, and nothing behind them."""
        self._file.seek(at)
        while piece := self._file.read(_PIECE):
            if piece.strip(b"\0"):
                return False
        return size - at >= tarfile.BLOCKSIZE


def _plain(header: bytes) -> Member | None:
    """Returns the name and the size of a file whose header is all by itself, and intact; else None."""
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
