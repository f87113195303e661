"""TFRecord files read by number: where each record begins, found by one look at their lengths.

The checksum of a length is compared when a file is indexed, that of a record when it is read.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import glob
import mmap
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

import google_crc32c
import numpy as np

from tfdist.data.splits import by_file_name
from tfdist.errors import UserError

_THREADS = 16
_HEAD = struct.Struct("<QI")
"""Length of a record and the check of that length; the check of its bytes follows the record."""
_CHECK = struct.Struct("<I")
"""The check of a record's bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Index:
    """Byte ranges of several files, one file after the other."""

    paths: tuple[str, ...]
    files: np.ndarray
    """int32 [records], places in `paths`."""
    offsets: np.ndarray
    """int64 [records], where a record's bytes begin."""
    lengths: np.ndarray
    """int64 [records]."""
    broken: tuple[str, ...]
    """Files that are cut off or damaged: where, and what is wrong. Records before that place are good."""

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Reads the bytes of records by number: object [n]."""
        records = np.empty(len(rows), object)
        for i, row in enumerate(rows):
            path, length = self.paths[self.files[row]], int(self.lengths[row])
            file = os.open(path, os.O_RDONLY)
            try:
                found = os.pread(file, length + self._behind(), int(self.offsets[row]))
            finally:
                os.close(file)
            if len(found) < length + self._behind():
                raise OSError(f"{path} has become shorter since the run began")
            records[i] = self._checked(found)
        return records

    def _behind(self) -> int:
        """Returns how many bytes are to be read behind each record."""
        return 0

    def _checked(self, found: bytes) -> bytes:
        """Returns the record in what was read of it and behind it."""
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class TFRecordIndex(Index):
    """Records of several TFRecord files, compared with their checksums as they are read."""

    numbers: np.ndarray
    """int64 [records], the number of each in its file."""

    def name(self, row: int) -> str:
        """Names a record in a message."""
        return f"record {self.numbers[row]} of {self.paths[self.files[row]]}"

    def _behind(self) -> int:
        return _CHECK.size

    def _checked(self, found: bytes) -> bytes:
        record = found[: -_CHECK.size]
        if not _is_whole(record, found[-_CHECK.size :]):
            raise OSError("its bytes do not match their checksum (CRC-32C)")
        return record


def files(path: str) -> dict[str, list[str]]:
    """Finds the files of each split, sorted, see `splits.by_file_name`.

    Args:
      path: a file, a pattern, or a folder, of which all files count but hidden ones.
    """
    path = os.path.expanduser(path)
    pattern = os.path.join(glob.escape(path), "*") if os.path.isdir(path) else path
    paths = sorted(f for f in glob.glob(pattern, recursive=True) if os.path.isfile(f))
    if not paths:
        raise UserError(
            f"data.name=tfrecord:{path} has no files: give a file, a folder, or a pattern such as *.tfrecord"
        )
    return by_file_name(paths)


def index(paths: Sequence[str], thorough: bool = False) -> TFRecordIndex:
    """Finds the records of all files.

    Args:
      paths: the files.
      thorough: read all records now, and leave out those that do not match their checksums. Else bytes of records are
        not read, and one that is damaged ends whatever reads it.

    Raises:
      UserError: a file that is compressed, or no TFRecord file at all.
    """
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        scans = list(pool.map(lambda path: _scan(path, thorough), paths))
    parts = [np.full(len(scan.offsets), i, np.int32) for i, scan in enumerate(scans)]
    return TFRecordIndex(
        tuple(paths),
        np.concatenate(parts),
        np.concatenate([scan.offsets for scan in scans]),
        np.concatenate([scan.lengths for scan in scans]),
        tuple(problem for scan in scans for problem in scan.problems),
        np.concatenate([scan.numbers for scan in scans]),
    )


class _Scan(NamedTuple):
    """What one file holds."""

    offsets: np.ndarray
    """int64 [records], where a record's bytes begin."""
    lengths: np.ndarray
    """int64 [records]."""
    numbers: np.ndarray
    """int64 [records], the number of each in the file."""
    problems: tuple[str, ...]
    """What is wrong with single records, and from some place on."""


def _scan(path: str, thorough: bool) -> _Scan:
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if whole is None:
        return _Scan(*(np.zeros(0, np.int64),) * 3, (f"{path} is empty",))
    with whole:
        if whole[:2] == b"\x1f\x8b":
            raise UserError(
                f"{path} is compressed with GZIP, which cannot be read by number: "
                "write it again with tf.io.TFRecordWriter(path), which does not compress"
            )
        offsets, lengths, checks, at = [], [], [], 0
        while at + _HEAD.size <= size:
            length, check = _HEAD.unpack_from(whole, at)
            if at + _HEAD.size + length + 4 > size:
                break
            offsets.append(at + _HEAD.size)
            lengths.append(length)
            checks.append(check)
            at += _HEAD.size + length + 4
        wrong = np.flatnonzero(_masked_crc(np.array(lengths, np.uint64)) != np.array(checks, np.uint32))
        good = int(wrong[0]) if len(wrong) else len(offsets)
        head = whole[: _HEAD.size]
        damaged = _damaged(whole, offsets[:good], lengths[:good]) if thorough else []
    if not good and (
        len(head) < _HEAD.size or _masked_crc(np.frombuffer(head[:8], np.uint64))[0] != _HEAD.unpack(head)[1]
    ):
        raise UserError(f"{path} is no TFRecord file, or is compressed: give files of tf.io.TFRecordWriter")
    problems = []
    if damaged:
        more = f" and {len(damaged) - 1:,} more of its records do" if len(damaged) > 1 else " does"
        problems.append(f"record {damaged[0]} of {path}{more} not match the checksum (CRC-32C)")
    if good < len(offsets):
        problems.append(f"{path} is damaged at byte {offsets[good] - _HEAD.size:,}, behind {good:,} good records")
    elif at != size:
        problems.append(f"{path} is cut off behind {good:,} records")
    kept = np.delete(np.arange(good), np.array(damaged, np.int64))
    return _Scan(np.array(offsets, np.int64)[kept], np.array(lengths, np.int64)[kept], kept, tuple(problems))


def _damaged(whole: mmap.mmap, offsets: list[int], lengths: list[int]) -> list[int]:
    """Returns the numbers of the records whose bytes do not match their checksums."""
    damaged = []
    for number, (offset, length) in enumerate(zip(offsets, lengths)):
        end = offset + length
        if not _is_whole(whole[offset:end], whole[end : end + _CHECK.size]):
            damaged.append(number)
    return damaged


def _is_whole(record: bytes, check: bytes) -> bool:
    """Returns whether the bytes of a record have the masked CRC-32C that was written behind them."""
    crc = google_crc32c.value(record)
    return _CHECK.pack(((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF) == check


def _table() -> np.ndarray:
    """Returns the CRC-32C (Castagnoli, 1993) of each byte, reflected."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1).astype(np.uint32)
    return table


_CRC = _table()


def _masked_crc(lengths: np.ndarray) -> np.ndarray:
    """Returns the check that TFRecord has for each length [n] of 8 bytes."""
    crc = np.full(len(lengths), 0xFFFFFFFF, np.uint32)
    for i in range(8):
        byte = (lengths >> np.uint64(8 * i)).astype(np.uint32)
        crc = _CRC[(crc ^ byte) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    crc = ~crc
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)
