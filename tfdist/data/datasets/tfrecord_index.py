"""TFRecord files read by number: where each record begins, found by one look at their lengths."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import glob
import mmap
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfdist.data.splits import by_file_name
from tfdist.errors import UserError

_THREADS = 16
_HEAD = struct.Struct("<QI")
"""Length of a record and the check of that length; another check of 4 bytes follows the record."""


@dataclasses.dataclass(frozen=True, slots=True)
class Index:
    """Records of several files, one file after the other."""

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
                records[i] = os.pread(file, length, int(self.offsets[row]))
            finally:
                os.close(file)
            if len(records[i]) < length:
                raise OSError(f"{path} has become shorter since the run began")
        return records

    def name(self, row: int) -> str:
        """Names a record in a message."""
        number = row - int(np.searchsorted(self.files, self.files[row]))
        return f"record {number} of {self.paths[self.files[row]]}"


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


def index(paths: Sequence[str]) -> Index:
    """Finds the records of all files; bytes of records are not read.

    Raises:
      UserError: a file that is compressed, or no TFRecord file at all.
    """
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        scans = list(pool.map(_scan, paths))
    parts = [np.full(len(scan.offsets), i, np.int32) for i, scan in enumerate(scans)]
    return Index(
        tuple(paths),
        np.concatenate(parts),
        np.concatenate([scan.offsets for scan in scans]),
        np.concatenate([scan.lengths for scan in scans]),
        tuple(scan.problem for scan in scans if scan.problem),
    )


class _Scan(NamedTuple):
    """What one file holds."""

    offsets: np.ndarray
    """int64 [records], where a record's bytes begin."""
    lengths: np.ndarray
    """int64 [records]."""
    problem: str
    """What is wrong from some place on, or nothing."""


def _scan(path: str) -> _Scan:
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if whole is None:
        return _Scan(np.zeros(0, np.int64), np.zeros(0, np.int64), f"{path} is empty")
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
    if not good and (
        len(head) < _HEAD.size or _masked_crc(np.frombuffer(head[:8], np.uint64))[0] != _HEAD.unpack(head)[1]
    ):
        raise UserError(f"{path} is no TFRecord file, or is compressed: give files of tf.io.TFRecordWriter")
    problem = ""
    if good < len(offsets):
        problem = f"{path} is damaged at byte {offsets[good] - _HEAD.size:,}, behind {good:,} good records"
    elif at != size:
        problem = f"{path} is cut off behind {good:,} records"
    return _Scan(np.array(offsets[:good], np.int64), np.array(lengths[:good], np.int64), problem)


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
