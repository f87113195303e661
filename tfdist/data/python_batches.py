"""Batches that Python makes: by a `keras.utils.PyDataset`, a generator, or a loader of Grain or of torch.

As in Keras, the first two tell shapes and types: where their shapes differ, later ones may differ as well. They are not
lost. Types stay as they are; Keras' layers and losses cast what they are given.
"""

import collections
import concurrent.futures
import itertools
import multiprocessing
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.config.messages import logger
from tfdist.data.spec import Structure
from tfdist.errors import UserError

_TORCH = ("torch.utils.data", "DataLoader")
_LOOKED_AT = 2  # batches whose shapes and types are compared, as in Keras


class Reader:
    """Hooks and limits of a data set of batches; this one is for those that TensorFlow reads."""

    once = False  # it cannot be read from its beginning again
    alone = ""  # why several workers cannot read it, if so
    first: tuple | None = None  # its first batch as it is stored, if it has been looked at

    def cardinality(self, dataset: tf.data.Dataset) -> int:
        """Returns the batches of a pass, or one of TensorFlow's two constants for what is not a number."""
        return int(dataset.cardinality())

    def begin(self) -> None:
        """Is called when an epoch, an evaluation or a prediction begins to read."""

    def end(self) -> None:
        """Is called when it has read all, and as in Keras before the first epoch and before an evaluation."""

    def catch_up(self, epochs: int, update: int) -> None:
        """Is called before the first epoch of a training that goes on from `update`, after so many `epochs`."""
        self.end()
        for _ in range(epochs):
            self.begin()
            self.end()


class PythonReader(Reader):
    """Reads what can be iterated over, such as a loader of Grain or torch; `head` has its first batches."""

    def __init__(self, origin: Iterable, head: Iterable, alone: str = ""):
        looked_at = [columns(batch) for batch in head]
        if not looked_at:
            raise UserError("the data set is empty", "give it at least one batch")
        self.origin: Any = origin
        self.first = next((batch for batch in looked_at if len(keras.tree.flatten(batch)[0])), looked_at[0])
        self.alone = alone
        try:
            self._spec = keras.tree.map_structure(_spec, *looked_at)
        except (ValueError, TypeError) as error:
            raise UserError(f"the first two batches of the {type(origin).__name__} are not alike: {error}") from error

    def dataset(self) -> tf.data.Dataset:
        return tf.data.Dataset.from_generator(lambda: map(columns, self._batches()), output_signature=self._spec)

    def cardinality(self, dataset: tf.data.Dataset) -> int:
        # Of what Keras knows the length, too: of torch's loaders, unless they load a stream, and of none of Grain's.
        known = _comes_from(self.origin, *_TORCH) and hasattr(self.origin.dataset, "__len__")
        return len(self.origin) if known else tf.data.UNKNOWN_CARDINALITY

    def read_first(self) -> tuple:
        """Reads the first batch anew."""
        return columns(next(iter(self.origin)))

    def _batches(self) -> Iterator:
        return iter(self.origin)


class GeneratorReader(PythonReader):
    """Reads a generator, whose batches come once and in no other order."""

    once = True

    def __init__(self, generator: types.GeneratorType):
        head = list(itertools.islice(generator, _LOOKED_AT))
        super().__init__(generator, head)
        self._rest = itertools.chain(head, generator)

    def catch_up(self, epochs: int, update: int) -> None:
        if update:
            logger.info(
                f"WARNING: a generator has no index: its first {update} batches are read and left out, which is where "
                "the training was if it yields the same again"
            )

    def _batches(self) -> Iterator:
        return self._rest


class SequenceReader(PythonReader):
    """Reads a `keras.utils.PyDataset`, whose batches have numbers, with the threads or processes that it asks for."""

    def __init__(self, sequence: keras.utils.PyDataset):
        name = type(sequence).__name__
        try:
            self.size = sequence.num_batches
        except NotImplementedError as error:
            raise UserError(f"{name} has no length", "give it __len__, or num_batches = None") from error
        if sequence.max_queue_size < 1:
            raise UserError(f"max_queue_size of {name} must be at least 1, got {sequence.max_queue_size}")
        head = [sequence[i] for i in range(_LOOKED_AT if self.size is None else min(_LOOKED_AT, self.size))]
        forked = sequence.use_multiprocessing and sequence.workers > 0
        why = f"use_multiprocessing of {name} would fork a worker with its connections to the others"
        super().__init__(sequence, head, f"{why}: set it to False and have threads (workers=4)" if forked else "")
        self.numbers: Iterable[int] = range(self.size) if self.size is not None else range(2**63 - 1)
        """Numbers of the batches of the next reading, in order."""

    def cardinality(self, dataset: tf.data.Dataset) -> int:
        return tf.data.INFINITE_CARDINALITY if self.size is None else self.size

    def read_first(self) -> tuple:
        return columns(self.origin[0])

    def begin(self) -> None:
        self.origin.on_epoch_begin()
        if self.origin.num_batches != self.size:  # Keras would go on with the new one
            what = f"{type(self.origin).__name__} has {self.origin.num_batches} batches now and had {self.size} before"
            raise UserError(what, "give it as many in all epochs, also after its on_epoch_end")

    def end(self) -> None:
        self.origin.on_epoch_end()

    def _batches(self) -> Iterator:
        sequence, numbers = self.origin, self.numbers
        if sequence.use_multiprocessing and sequence.workers > 0:
            # With the start method that Python has by default, as Keras does.
            processes = concurrent.futures.ProcessPoolExecutor(
                sequence.workers, initializer=_hold, initargs=(sequence,), mp_context=multiprocessing.get_context()
            )
            return _in_order(processes, _held_batch, numbers, sequence.max_queue_size)
        if sequence.workers > 1:
            threads = concurrent.futures.ThreadPoolExecutor(sequence.workers)
            return _in_order(threads, sequence.__getitem__, numbers, sequence.max_queue_size)
        return map(sequence.__getitem__, numbers)


_held: list[keras.utils.PyDataset] = []  # the data set of a process of a pool


def _hold(sequence: keras.utils.PyDataset) -> None:
    _held[:] = [sequence]


def _held_batch(number: int) -> Structure:
    return _held[0][number]


def _in_order(
    pool: concurrent.futures.Executor, make: Callable[[int], Structure], numbers: Iterable[int], ahead: int
) -> Iterator[Structure]:
    """Yields the batches in their order, while a pool makes at most `ahead` of them; then ends the pool."""
    waiting: collections.deque[concurrent.futures.Future] = collections.deque()
    try:
        for number in numbers:
            waiting.append(pool.submit(make, number))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


TENSORFLOWS = Reader()  # the reader of all data sets that TensorFlow reads


def reader(data: Any) -> PythonReader | None:
    """Returns how `data` is read if Python makes its batches, else None. Imports neither Grain nor torch."""
    if isinstance(data, keras.utils.PyDataset):
        return SequenceReader(data)
    if isinstance(data, types.GeneratorType):
        return GeneratorReader(data)
    if _comes_from(data, *_TORCH):
        unseeded = _comes_from(getattr(data, "sampler", None), "torch.utils.data", "RandomSampler")
        unseeded = unseeded and data.generator is None and data.sampler.generator is None
        why = "the DataLoader would give each worker another order: give it a generator (torch.Generator) with a seed"
        return PythonReader(data, itertools.islice(data, _LOOKED_AT), why if unseeded else "")
    if _comes_from(data, "grain", "MapDataset", "IterDataset", "DataLoader"):
        return PythonReader(data, itertools.islice(data, _LOOKED_AT))
    return None


def _comes_from(data: object, module: str, *names: str) -> bool:
    return any(c.__module__.startswith(module) and c.__name__ in names for c in type(data).__mro__)


def columns(batch: Structure) -> tuple:
    """Returns a batch as (x,), (x, y) or (x, y, weight) of NumPy arrays: copies, since TensorFlow computes in place."""
    parts = without_missing(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,))
    if not 1 <= len(parts) <= 3:
        raise UserError(f"a batch is (x,), (x, y) or (x, y, weight), got {len(parts)} entries: nest the inputs in x")
    return keras.tree.lists_to_tuples(keras.tree.map_structure(lambda part: np.array(array(part)), parts))


def without_missing(parts: tuple) -> tuple:
    """Returns (x, y, weight) without a None at its end; refuses it without data, and weights without targets."""
    while parts and parts[-1] is None:
        parts = parts[:-1]
    if not parts:
        raise UserError("no data given (got None)", "give NumPy arrays, a tf.data.Dataset of batches, or a source")
    if len(parts) == 3 and parts[1] is None:
        raise UserError("sample weights without targets have nothing to weigh", "give y as well")
    if len(parts) == 3 and any(weight is None for weight in keras.tree.flatten(parts[2])):
        raise UserError("the sample weights of an output are None", "give ones, an array of the number of examples")
    return parts


def array(value: object) -> np.ndarray:
    """Returns a tensor, an array, or a frame of pandas or polars as an array; refuses Python objects."""
    kind = type(value).__name__
    if kind in ("RaggedTensor", "SparseTensor") or type(value).__module__.startswith("scipy.sparse"):
        raise UserError(f"a {kind} cannot be batched evenly", "make it dense (to_tensor, tf.sparse.to_dense, toarray)")
    try:
        made = value.numpy() if isinstance(value, tf.Tensor) else np.asarray(value)
    except ValueError as error:
        raise UserError(f"cannot train on {kind}, which is no rectangular array: {error}") from error
    if _comes_from(value, "pandas", "Series"):
        made = made[:, None]  # as in Keras; a Series of polars stays as it is there
    objects = made.dtype == object and not (made.size and isinstance(made.flat[0], (str, bytes)))
    if objects or made.ndim == 0:
        what = f"cannot train on {kind}{' of Python objects' * isinstance(value, np.ndarray) * objects}"
        instead = "NumPy arrays (of a list, numpy.array), batches of a tf.data.Dataset or torch.utils.data.DataLoader"
        raise UserError(what, f"give {instead}, or load_data(...).train")
    return made


def _spec(*arrays: np.ndarray) -> tf.TensorSpec:
    """Returns the shape and type that arrays of several batches have in common."""
    if len({a.ndim for a in arrays}) > 1:
        raise ValueError(f"arrays of {' and '.join(str(a.ndim) for a in arrays)} dimensions")
    shape = [sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*(a.shape[1:] for a in arrays))]
    dtype = tf.string if arrays[0].dtype.kind in "USO" else tf.as_dtype(arrays[0].dtype)
    return tf.TensorSpec([None, *shape], dtype)
