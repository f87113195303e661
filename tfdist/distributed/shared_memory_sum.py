"""Sums over the workers of one host through memory that they have in common. No TensorFlow.

TensorFlow's ring sends through gRPC, at 0.3 GB/s where a memory copy makes 10. Here each worker writes its array into a
slot of its own, a piece that fits the processor's cache at a time, says so, and adds up all slots in order of rank: the
same bits for all. It has two slots, in turn: who has written a piece has read the one before, so that a piece needs one
wait. Others must see writes in the order in which they were made: on x86 they do, elsewhere Python cannot ask for it.
"""

import contextlib
import math
import mmap
import os
import platform
import sys
import threading
import time
import zlib
from collections.abc import Iterator

import numpy as np

from tfdist.cluster import addresses
from tfdist.cluster.peers import Peers
from tfdist.config import host_memory


class LostWorkerError(RuntimeError):
    """A sum waits for a worker that is lost; in a graph, TensorFlow makes an error of its own of it."""


PIECE = 1 << 18  # bytes of a slot
MOST = 8  # workers. Each reads what all have written; beyond, a ring moves less.
_LINE = 64  # bytes that a processor sends another one at a time; and the alignment that TensorFlow wants of an array
_HEADER = 1 << 12
_LOOKS = 2000  # looks at another worker, about 100 microseconds, before others may have the processor
_YIELD_S = 1e-3  # after so many seconds it sleeps between looks, for a part of what it has waited so far
_SLEEP_PART = 0.05
_LONGEST_SLEEP_S = 5e-3
OUT_OF_STEP = "worker {} sums other tensors than worker {}, or in another order"


class OutOfStepError(RuntimeError):
    """The workers do not sum the same."""


class SharedMemorySum:
    """Sums arrays over workers that all call it for the same arrays in the same order.

    `memory` has `_bytes(peers.size)` bytes, which all have in common, all zero but for its first `_LINE`.
    """

    def __init__(self, peers: Peers, memory: mmap.mmap):
        self._peers = peers
        self._rank, self._size = peers.rank, peers.size
        line = _LINE // 8
        # What each worker says: how many pieces it has written, and of which array the last two were.
        at = memoryview(memory)[_LINE : _LINE * (1 + self._size)].cast("q")
        self._said = [at[r * line : (r + 1) * line] for r in range(self._size)]
        self._others = [r for r in range(self._size) if r != self._rank]
        self._slots = np.ndarray((self._size, 2, PIECE), np.uint8, memory, _HEADER)
        self._pieces = 0
        self._results: dict[int, list[np.ndarray]] = {}  # by the bits of the size, since shapes change
        self._lock = threading.Lock()

    def sum(self, key: int, array: np.ndarray) -> np.ndarray:
        """Sums a contiguous array, of one shape and type on all workers; uses memory again that nobody holds.

        Args:
          key: what this array is; the same on all workers, and another one for another array.

        Raises:
          OutOfStepError: another worker sums something else.
          RuntimeError: another worker is lost.
        """
        with self._lock, np.errstate(all="ignore"):
            result = self._result(array.shape, array.dtype)
            total = result.reshape(-1)
            for begin, slots in self._pieces_of(key, array):
                here = total[begin : begin + slots.shape[1]]
                np.add(slots[0], slots[1], out=here)
                for rank in range(2, self._size):
                    np.add(here, slots[rank], out=here)
            return result

    def gather(self, key: int, array: np.ndarray) -> np.ndarray:
        """Concatenates flat arrays of all workers in order of rank; for arguments and errors see `sum`."""
        with self._lock:
            result = self._result((self._size, array.size), array.dtype)
            for begin, slots in self._pieces_of(key, array):
                result[:, begin : begin + slots.shape[1]] = slots
            return result.reshape(-1)

    def _pieces_of(self, key: int, array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yields where each piece of an array begins, and what all workers have written of it: [workers, elements]."""
        about = zlib.crc32(f"{array.dtype.str} {array.dtype.name} {array.shape}".encode())
        kind = (key << 32 | about) & (1 << 63) - 1
        own, step = array.reshape(-1), PIECE // array.itemsize
        for begin in range(0, max(1, own.size), step):  # a piece even of nothing, as others may have something
            yield begin, self._exchanged(kind, own[begin : begin + step])

    def _exchanged(self, kind: int, own: np.ndarray) -> np.ndarray:
        self._pieces += 1
        turn = self._pieces & 1
        slots = self._slots[:, turn, : own.nbytes].view(own.dtype)
        slots[self._rank] = own
        said = self._said[self._rank]
        said[1 + turn] = kind
        said[0] = self._pieces  # after the rest
        for rank in self._others:
            if self._said[rank][0] < self._pieces:
                self._wait_for(rank)
            if self._said[rank][1 + turn] != kind:
                raise OutOfStepError(OUT_OF_STEP.format(max(rank, self._rank), min(rank, self._rank)))
        return slots

    def _wait_for(self, rank: int) -> None:
        """Waits until another worker has written as many pieces as this one."""
        said, pieces = self._said[rank], self._pieces
        for _ in range(_LOOKS):
            if said[0] >= pieces:
                return
        begun = time.perf_counter()
        while said[0] < pieces:
            waited = time.perf_counter() - begun
            if waited < _YIELD_S:
                os.sched_yield()
                time.sleep(0)  # which lets other threads of Python go on
                continue
            if self._peers.failure:
                raise LostWorkerError(f"a collective sum has lost worker {rank}")
            time.sleep(min(waited * _SLEEP_PART, _LONGEST_SLEEP_S))

    def _result(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns an array that nobody holds. New memory for each would cost as much as the sum: it must be zeroed."""
        size = dtype.itemsize * math.prod(shape)
        rooms = self._results.setdefault(size.bit_length(), [])
        # A result holds its room, of which it is a part.
        room = next((room for room in rooms if sys.getrefcount(room) == _FREE), None)
        if room is None:
            # Pages that nothing is ever written to take no memory.
            room = np.empty((1 << size.bit_length()) + _LINE, np.uint8)
            rooms.append(room)
        begin = -room.ctypes.data % _LINE
        return room[begin : begin + size].view(dtype).reshape(shape)


_ROOMS = [np.empty(1)]
_FREE = next(sys.getrefcount(room) for room in _ROOMS)  # as in `_result`, of a room that nobody else holds


def _bytes(workers: int) -> int:
    return _HEADER + workers * 2 * PIECE


def between(peers: Peers) -> SharedMemorySum | None:
    """Returns what sums over the workers, which all call this; None if they cannot have memory in common."""
    hosts = {addresses.split(address).host for address in peers.addresses}
    if not 2 <= peers.size <= MOST or len(hosts) > 1 or len(set(peers.hosts)) > 1:
        return None
    offer, memory = _offered(_bytes(peers.size)) if peers.rank == 0 else (None, None)
    note = peers.gather("the memory in which workers sum", offer.note() if offer else None)[0]
    file = host_memory.opened(note, writing=True) if note and peers.rank > 0 else None
    if file:
        with file, contextlib.suppress(OSError):
            memory = mmap.mmap(file.fileno(), int(note["size"]))
    everybody = all(peers.gather("whether all workers see that memory", memory is not None))
    if offer:
        offer.close()
    return SharedMemorySum(peers, memory) if memory and everybody else None


def _offered(size: int) -> tuple[host_memory.Offer | None, mmap.mmap | None]:
    """Returns new memory and its place; None for both where there is none, or where it would not do."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None, None
    offer = None
    try:
        offer = host_memory.Offer("sum")
        os.posix_fallocate(offer.fileno(), 0, size)  # else a lack of memory would end the process in the middle
        return offer, mmap.mmap(offer.fileno(), size)
    except OSError:
        if offer:
            offer.close()
        return None, None
