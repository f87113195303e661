"""Arrays as tensors, without the copies that can be left out.

`tf.convert_to_tensor` copies an array, and for a moment has it twice: 1 GB of examples took 3 GB. A tensor can also lie
where the array does, if it begins where TensorFlow's kernels want it, and if nobody changes it meanwhile.
"""

from __future__ import annotations

import mmap

import numpy as np
import tensorflow as tf

ALIGNMENT = 64
"""Bytes: EIGEN_MAX_ALIGN_BYTES with AVX-512. A kernel ends the process over a tensor that begins elsewhere."""
LARGEST_ITEM = 8
"""Bytes of a number that TensorFlow knows, of those that are not complex."""
SMALL = 1 << 20
"""Arrays of fewer bytes are copied as TensorFlow does it."""


class _Memory:
    """An array that NumPy takes to be writable, since DLPack knows of no other; TensorFlow does not write to inputs."""

    def __init__(self, array: np.ndarray):
        self._array = array  # kept as long as the tensor
        about = array.__array_interface__
        self.__array_interface__ = {**about, "data": (about["data"][0], False)}


def tensor(array: object) -> tf.Tensor:
    """Returns an array as a tensor in the memory of the host.

    An array that nobody can write to, such as a file that is mapped with `np.load(path, mmap_mode="r")`, is not copied
    where it begins at a multiple of 64 bytes. Any other is copied once.
    """
    with tf.device("CPU:0"):
        if not isinstance(array, np.ndarray) or array.nbytes < SMALL or array.dtype.kind not in "fiu":
            return tf.convert_to_tensor(array)
        if array.dtype.itemsize > LARGEST_ITEM:
            return tf.convert_to_tensor(array)  # which refuses it in its own words
        fits = array.flags.c_contiguous and array.dtype.isnative and array.ctypes.data % ALIGNMENT == 0
        return _alias(array if fits and _is_constant(array) else _aligned(array))


def _is_constant(array: np.ndarray) -> bool:
    """Whether neither this array nor one of which it is a part can be written to."""
    base: object = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return False
        base = base.base
    return base is None or isinstance(base, mmap.mmap)


def _aligned(array: np.ndarray) -> np.ndarray:
    memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    copy = memory[start : start + array.nbytes].view(array.dtype.newbyteorder("=")).reshape(array.shape)
    copy[...] = array
    return copy


def _alias(array: np.ndarray) -> tf.Tensor:
    """Returns a tensor in the memory of an array, which lives as long as the tensor does."""
    return tf.experimental.dlpack.from_dlpack(np.asarray(_Memory(array)).__dlpack__())
