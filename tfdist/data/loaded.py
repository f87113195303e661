"""A data set that has been loaded, and its arrays in memory once for all workers of a host.

One worker loads them, the others map its memory, which is sealed against changes, or have their own where they cannot.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import mmap
import os

import numpy as np
import tensorflow as tf

from tfdist.config import host_memory
from tfdist.data import spec_file
from tfdist.data.arrays import ALIGNMENT, Arrays
from tfdist.data.protocol import Source
from tfdist.data.sources import check_labels
from tfdist.data.spec import Spec, Structure
from tfdist.errors import UserError

SMALLEST = 1 << 24  # arrays that take fewer bytes together are not worth it


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Loaded:
    """Both splits of a data set and their description."""

    train: Source
    eval: Source
    examples: int  # examples in the training split
    spec: Spec
    numbers: np.ndarray | None = None  # of the examples in `eval`, on the chief, if they are not 0, 1, 2, ...

    def __repr__(self):
        classes = f", {self.spec.classes} classes" if self.spec.classes else ""
        size = getattr(self.eval, "size", None)
        tested = "" if size is None else f", {size:,} to evaluate"
        return (
            f"<Loaded: {self.examples:,} examples to train{tested}, {list(self.spec.shape)} {self.spec.dtype}{classes}>"
        )


def described(train: Source, evaluation: Source) -> Loaded:
    """Describes two splits of which nothing is known but what they hold; refuses streams of batches."""
    if train.size is None:
        what = "a data function must return arrays, or its number of examples stays unknown"
        raise UserError(what, "return NumPy arrays, or use the Python API (tfdist.fit) with a tf.data.Dataset")
    if evaluation.reader.once:
        what = "a data function returned a generator, which can be read once"
        raise UserError(what, "return a keras.utils.PyDataset")
    classes, maximum = None, 1.0
    first = tf.nest.flatten(train.specs[0])[0]
    shape, dtype = tuple(first.shape[1:]), np.dtype(getattr(first.dtype, "as_numpy_dtype", first.dtype))
    if train.columns is None:
        maximum = 255.0 if dtype == np.uint8 else 1.0
    elif dtype.kind in "fui":
        maximum = float(first.max()) or 1.0
    y = train.targets if train.labels is None else train.labels
    if y is not None and not tf.nest.is_nested(y) and np.issubdtype(y.dtype, np.integer):
        classes = int(y.max()) + 1
        for source in (train, evaluation):
            targets = source.targets if source.labels is None else source.labels
            if targets is not None and not tf.nest.is_nested(targets):
                check_labels(targets, classes, "the data set")
    return Loaded(train, evaluation, train.size, Spec(shape, dtype.name, classes, maximum))


class SharedTables:
    """Arrays that a worker offers to the others of its host; closed when they have mapped them."""

    def __init__(self) -> None:
        self._memory: host_memory.Offer | None = None

    def offer(self, loaded: Loaded) -> tuple[Loaded, host_memory.Note | None]:
        """Moves the arrays to memory that others can map; returns the data that lies there, and where that is.

        Data that is small, is not all arrays of numbers, or cannot be moved stays where it is, without a note.
        """
        arrays: list[np.ndarray] = []
        try:
            columns = [(_numbered(s, arrays), getattr(s, "exact", None)) for s in (loaded.train, loaded.eval)]
        except TypeError:
            return loaded, None
        if sum(array.nbytes for array in arrays) < SMALLEST:
            return loaded, None
        about = {"columns": columns, "examples": loaded.examples, "spec": dataclasses.asdict(loaded.spec)}
        try:
            note = self._written(about, arrays)
        except (OSError, TypeError):  # no memory, a kernel without it, or a description that JSON cannot hold
            self.close()
            return loaded, None
        return dataclasses.replace(take(note) or loaded, numbers=loaded.numbers), note

    def close(self) -> None:
        """Gives up the place at which others find the memory; what they have mapped stays."""
        if self._memory:
            self._memory.close()

    def _written(self, about: dict[str, object], arrays: list[np.ndarray]) -> host_memory.Note:
        """Writes each array to a place at which `arrays.tensor` takes it, and on a last line what is where."""
        self._memory, kinds = host_memory.Offer("data"), []
        with contextlib.closing(os.fdopen(os.dup(self._memory.fileno()), "wb")) as file:
            for array in arrays:
                place = math.ceil(file.tell() / ALIGNMENT) * ALIGNMENT
                file.seek(place)
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                kinds.append((array.dtype.str, array.shape, place))
            file.write(b"\n" + json.dumps({**about, "arrays": kinds}).encode())
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(self._memory.fileno(), fcntl.F_ADD_SEALS, seals)
        return self._memory.note()


def take(note: host_memory.Note) -> Loaded | None:
    """Returns the data that a worker of this host has offered; None if its memory cannot be seen from here."""
    file = host_memory.opened(note)
    if file is None:
        return None
    with file:
        try:
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except OSError:
            return None
    about = json.loads(memory[memory.rfind(b"\n") :])
    arrays = [np.ndarray(tuple(shape), np.dtype(dtype), memory, place) for dtype, shape, place in about["arrays"]]
    train, evaluation = (Arrays(tuple(_filled(p, arrays) for p in parts), exact) for parts, exact in about["columns"])
    return Loaded(train, evaluation, about["examples"], spec_file.made(about["spec"]))


def _numbered(source: Source, arrays: list[np.ndarray]) -> list[object]:
    """Adds a source's arrays to the list; returns its columns with their numbers instead, or raises TypeError."""
    if source.columns is None:
        raise TypeError

    def number(part: Structure) -> object:
        if isinstance(part, dict) and all(isinstance(key, str) for key in part):
            return {key: number(value) for key, value in part.items()}
        if type(part) in (tuple, list):
            return [type(part).__name__, *map(number, part)]
        if type(part) is not np.ndarray or part.dtype.kind not in "fiub":
            raise TypeError
        if np.dtype(part.dtype.str) != part.dtype:  # of another library, such as float8
            raise TypeError
        arrays.append(part)
        return len(arrays) - 1

    return [number(column) for column in source.columns]


def _filled(column: object, arrays: list[np.ndarray]) -> Structure:
    """Returns a column, by what `_numbered` has made of it."""
    match column:
        case dict():
            return {key: _filled(value, arrays) for key, value in column.items()}
        case [kind, *parts]:
            filled = [_filled(part, arrays) for part in parts]
            return tuple(filled) if kind == "tuple" else filled
    return arrays[column]  # type: ignore[call-overload]
