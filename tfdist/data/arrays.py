"""Examples in memory, and how the compiled step reads them: out of tables, by row numbers."""

import dataclasses
import math
import mmap
import zlib

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.batch_layout import Layout, unpack
from tfdist.data.protocol import Feed, FeedCall, Source, order, spread
from tfdist.data.records import UNREADABLE, RecordFeed, Records, checksum_of_labels
from tfdist.data.spec import Structure
from tfdist.errors import UserError

ALIGNMENT = 64  # bytes, EIGEN_MAX_ALIGN_BYTES with AVX-512: a kernel ends the process over a tensor elsewhere
_LARGEST_ITEM = 8  # bytes of a number that TensorFlow knows, of those that are not complex
_SMALL = 1 << 20  # arrays of fewer bytes are copied as TensorFlow does it
_DECODED = 256  # examples that are decoded together on their way into memory
_COMPARED = 256  # numbers, and sums of all, of inputs, targets and weights each that workers compare, to rounding
_PIECE = 1 << 18  # numbers that are summed up together
_SHADES = 1e6  # unit of the sums of images of integers: ten shades are rounding
_LEAST = 0.1  # least unit of the other sums, per number: what is smaller may be the rounding of larger ones


@dataclasses.dataclass(frozen=True, slots=True)
class Arrays(Source):
    """Examples in memory: (x,), (x, y) or (x, y, weight), each a structure of arrays [examples, ...].

    `exact`: `crc` of the numbers that they were made from, where no machine rounds those; None: of pixels, as they are.
    """

    columns: tuple
    exact: int | None = None
    size: int = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        lengths = [[len(a) for a in keras.tree.flatten(column)] for column in self.columns]
        sizes = {length for each in lengths for length in each}
        if len(sizes) != 1:
            got = ", ".join(f"{n} {' and '.join(map(str, {*a}))}" for n, a in zip(("x", "y", "weights"), lengths))
            fix = "of a list that is one input, give numpy.array(list)" if len(lengths[0]) > 1 else ""
            raise UserError(f"x, y and weights must have one entry per example each, got lengths {got}", fix)
        if sizes == {0}:
            raise UserError("the data set is empty", "give it at least one example")
        object.__setattr__(self, "size", sizes.pop())

    specs = property(lambda self: self.columns)
    bare = property(lambda self: not isinstance(self.columns[0], tuple | list))

    def facts(self) -> dict[str, object]:
        elements = keras.tree.map_structure(lambda a: f"{a.shape[1:]} {a.dtype}", self.columns)
        targets = [y for y in keras.tree.flatten(self.targets) if isinstance(y, np.ndarray) and y.dtype.kind in "iub"]
        facts: dict[str, object] = {"kind": "examples", "examples": self.size, "elements": str(elements)}
        facts["checksum of targets"] = checksum_of_labels(*targets)
        for name, part in zip(("an input", "a target", "a weight"), unpack(self.columns)):
            columns = [column for column in keras.tree.flatten(part) if column is not None]
            each = max(1, _COMPARED // max(1, len(columns)))
            values: list = []
            for column in columns[:_COMPARED]:  # evenly spread over it
                width = math.prod(column.shape[1:])
                places = np.unique(np.linspace(0, len(column) * width - 1, each).astype(np.int64)) if width else ()
                values += [np.asarray(column[place // width]).reshape(-1)[place % width] for place in places]
            is_number = lambda value: np.issubdtype(np.asarray(value).dtype, np.number)
            facts[name] = [float(value) if is_number(value) else str(value)[:40] for value in values]
        return facts

    def contents(self) -> dict[str, object]:
        contents: dict[str, object] = {}
        for name, part in zip(("inputs", "targets", "weights"), unpack(self.columns)):
            columns = [np.asarray(column) for column in keras.tree.flatten(part) if column is not None]
            # Resized images are rounded to integers, a few of them to other ones on other machines.
            rounded = [c.dtype.kind == "f" or (name == "inputs" and c.dtype == np.uint8) for c in columns]
            digests = [_digest(c, max(1, _COMPARED // len(columns)), r) for c, r in zip(columns, rounded)]
            contents[f"checksum of all {name}"] = [checksum for checksum, _ in digests]
            contents[f"a sum over all {name}"] = [1.0, *(number for _, sums in digests for number in sums)]
            floats = [c for c in columns if c.dtype.kind == "f"]
            squashed = [_digest(c, max(1, _COMPARED // len(columns)), True, squash=True)[1] for c in floats]
            contents[f"a squashed sum over all {name}"] = [1.0, *(number for sums in squashed for number in sums)]
        pixels = [c for c in keras.tree.flatten(self.columns) if getattr(c, "dtype", None) == np.uint8]
        return contents | {"checksum of all numbers": crc(pixels) if self.exact is None else self.exact}

    def requested_batch(self, batch: int | None, default: int | None = None, steps: int | None = None) -> int | None:
        batch = default if batch is None else batch
        return -(-self.size // steps) if batch is None and steps else batch

    def feed(self, layout: Layout, shuffle: int | None = None, seed: int | None = None, across: bool = False) -> Feed:
        return ArrayFeed(self, layout, shuffle)

    def first_rows(self, count: int) -> tuple:
        return self._part(slice(count)).columns

    def spread_rows(self, count: int) -> tuple:
        rows = spread(self.size, count)
        return keras.tree.map_structure(lambda a: tf.convert_to_tensor(a[rows]), self.columns)

    def class_counts(self, classes: int) -> np.ndarray:
        return np.bincount(np.reshape(self.columns[1], [-1]), minlength=classes)

    def map_targets(self, function) -> "Arrays":
        columns = function(*self.columns)
        return Arrays(tuple(c.numpy() if isinstance(c, tf.Tensor) else c for c in columns), self.exact)

    def by_number(self, field: str) -> Records:
        table = keras.tree.map_structure(tensor, self.columns)
        read = lambda rows: keras.tree.map_structure(lambda t: tf.gather(t, rows), table)
        y = self.targets
        classes = isinstance(y, np.ndarray) and np.issubdtype(y.dtype, np.integer) and y[0].size == 1
        labels = y.reshape(-1) if classes else None
        return Records(self.size, read, lambda stored, seed: stored, labels=labels, stored=self.contents)

    def split(self, fraction: float) -> "tuple[Arrays, Arrays]":
        first = math.floor(self.size * (1.0 - fraction)) if 0 < fraction < 1 else 0
        if not 0 < first < self.size:
            what = f"validation_split={fraction} leaves nothing of {self.size} examples on one side"
            raise UserError(what, "use another part of 1")
        return self._part(slice(first)), self._part(slice(first, None))

    def _part(self, rows: slice) -> "Arrays":
        return Arrays(keras.tree.map_structure(lambda a: a[rows], self.columns), self.exact)


def crc(rows: Structure, checksum: int = 0) -> int:
    """Returns a checksum of the bytes of tensors or arrays, which goes on from another."""
    for tensor in keras.tree.flatten(rows):
        array = np.asarray(tensor)
        content = repr(array.tolist()).encode() if array.dtype == object else array.ravel().view(np.uint8).data
        checksum = zlib.crc32(content, checksum)
    return checksum


def _digest(column: np.ndarray, count: int, rounded: bool, squash: bool = False) -> tuple[int, list[float]]:
    """Returns a checksum of a whole column; if it is `rounded`, at most `count` sums instead, which rounding leaves.

    A sum is over the numbers of one feature or a few, with weights of random signs, in units of their norm: so it shows
    a row among many, and small numbers beside large ones; those of one feature, if large ones are made 1 by `squash`.
    NaN and infinity count in the checksum.
    """
    width = max(1, math.prod(column.shape[1:]))
    count = count // width * width or count
    checksum, sums, squares = 0, np.zeros(count), np.zeros(count)
    generator, rows = np.random.Generator(np.random.Philox(0)), max(1, _PIECE // width)
    for piece in (column[start : start + rows] for start in range(0, len(column), rows)):
        if not rounded:
            checksum = crc(piece, checksum)
            continue
        table = np.zeros([-(-piece.size // count), count])
        table.reshape(-1)[: piece.size] = piece.reshape(-1)
        odd = ~np.isfinite(table)
        if odd.any():
            checksum = zlib.crc32(odd * (2 + (table > 0) - (table < 0)), checksum)
            table[odd] = 0
        if squash:
            table /= 1 + np.abs(table)
        weights = generator.uniform(-1, 1, len(table))
        sums += np.einsum("i,ij->j", weights + np.sign(weights), table)
        squares += np.einsum("ij,ij->j", table, table)
    norms = np.sqrt(squares)
    least = _LEAST * min(math.sqrt(column.size / count), norms.max()) or 1.0
    units = _SHADES if column.dtype == np.uint8 else np.maximum(norms, least)
    return checksum, (sums / units).tolist() if rounded else []


def in_memory(source: Records) -> Arrays:
    """Decodes all examples once, and keeps them."""
    spec = source.specs
    columns = keras.tree.map_structure(
        lambda s: np.empty([source.size, *s.shape[1:]], s.dtype.as_numpy_dtype), tuple(spec)
    )
    row = 0
    try:
        for batch in source.in_order(_DECODED):
            for column, part in zip(keras.tree.flatten(columns), keras.tree.flatten(batch)):
                column[row : row + len(part)] = part
            row += len(part)
    except UNREADABLE:
        feed = RecordFeed(source, Layout(_DECODED, 1, 1))
        feed.next(row // _DECODED, 1)
        if unreadable := feed.first_unreadable():
            raise UserError(unreadable, "remove it, or write it anew") from None
        raise
    return Arrays(columns, 0)


def size_in_memory(source: Records) -> int:
    """Returns the bytes that `in_memory` takes."""
    specs = tf.nest.flatten(source.specs)
    return source.size * sum(int(np.prod(s.shape[1:])) * s.dtype.size for s in specs)


class ArrayFeed(Feed):
    """Reads global batches out of tables in memory, by row numbers; `shuffle` is the seed of the order, or None."""

    def __init__(self, source: Arrays, layout: Layout, shuffle: int | None = None):
        self._layout = layout
        self._size = source.size
        self._seed = shuffle
        # On the host, since a data set may be larger than a GPU's memory.
        self._table = keras.tree.map_structure(tensor, source.columns)
        self.batches: int = -(-self._size // layout.batch)
        self._full = self._size // layout.batch if layout.even else 0
        self._rows: tuple[int, tuple] = (-1, ())
        self._counts = np.full(self.batches, layout.batch, np.int32)
        self._counts[-1] = self._size - (self.batches - 1) * layout.batch

    def next(self, update: int, limit: int) -> FeedCall:
        epoch, first = divmod(update, self.batches)
        last, full = min(first + limit, self.batches), first < self._full
        if full:
            last = min(last, self._full)
        return FeedCall((self._table, *self._of_epoch(epoch)), first, last, full)

    def same_length(self, update: int) -> tuple[int, int]:
        first, full = update % self.batches, self._size // self._layout.batch
        return int(self._counts[first]), full - first if first < full else 1

    def whole_batch(self, update: int) -> tuple:
        epoch, number = divmod(update, self.batches)
        rows, counts = self._of_epoch(epoch)
        return keras.tree.map_structure(lambda t: tf.gather(t, rows[number, : counts[number]]), self._table)

    def _of_epoch(self, epoch: int) -> tuple:
        """Returns [batches, layout.batch] row numbers of the global batches, -1 behind the last, and their lengths."""
        if self._seed is None:
            epoch = 0
        if self._rows[0] != epoch:
            batch = self._layout.batch
            rows = np.arange(self._size, dtype=np.int32) if self._seed is None else order(self._seed, epoch, self._size)
            rows = np.pad(rows, (0, self.batches * batch - self._size), constant_values=-1).reshape(-1, batch)
            with tf.device("CPU:0"):
                self._rows = epoch, (tf.convert_to_tensor(rows), tf.convert_to_tensor(self._counts))
        return self._rows[1]


class _Memory:
    """An array that NumPy takes to be writable, since DLPack knows of no other; TensorFlow does not write to inputs."""

    def __init__(self, array: np.ndarray):
        self._array = array  # kept as long as the tensor
        about = array.__array_interface__
        self.__array_interface__ = {**about, "data": (about["data"][0], False)}


def tensor(array: object) -> tf.Tensor:
    """Returns an array as a tensor in the memory of the host, without the copies that can be left out.

    `tf.convert_to_tensor` copies an array, and for a moment has it twice: 1 GB of examples took 3 GB. A read-only array
    that begins at a multiple of 64 bytes, as TensorFlow's kernels require, such as a file that is mapped with
    `np.load(path, mmap_mode="r")`, is not copied at all. Any other is copied once.
    """
    with tf.device("CPU:0"):
        if not isinstance(array, np.ndarray) or array.nbytes < _SMALL or array.dtype.kind not in "fiu":
            return tf.convert_to_tensor(array)
        if array.dtype.itemsize > _LARGEST_ITEM:
            return tf.convert_to_tensor(array)  # which refuses it in its own words
        fits = array.flags.c_contiguous and array.dtype.isnative and array.ctypes.data % ALIGNMENT == 0
        aligned = array
        if not (fits and _is_constant(array)):
            memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
            start = -memory.ctypes.data % ALIGNMENT
            aligned = memory[start : start + array.nbytes].view(array.dtype.newbyteorder("=")).reshape(array.shape)
            aligned[...] = array
        return tf.experimental.dlpack.from_dlpack(np.asarray(_Memory(aligned)).__dlpack__())


def _is_constant(array: np.ndarray) -> bool:
    """Returns whether neither this array nor one of which it is a part can be written to."""
    base: object = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return False
        base = base.base
    return base is None or isinstance(base, mmap.mmap)
