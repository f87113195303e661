"""Sums over replicas: what travels together in an all-reduce, and in which order a process adds up its own."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.distributed.distribution import Distribution

WORDS = 1 << 22  # 64-bit words per broadcast to the other workers
BUCKET_BYTES = 1 << 20
"""Tensors below this size travel together: each collective costs a round of messages. Larger ones go alone, so that
they start while the backward pass still computes, and are not copied into a bucket (benchmarks/README.md)."""
INTEGERS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}  # by their bytes


def bucketed(
    tensors: list[tf.Tensor], reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> list[tf.Tensor]:
    """Sums dense tensors of static shape through `reduce`, the small ones of each dtype in buckets of about this size.

    With `bucket_bytes=0` each goes alone.
    """
    alone: list[list[int]] = []
    buckets: list[list[int]] = []
    open_buckets: dict[tf.DType, list[int]] = {}
    # The backward pass makes the last layers' gradients first: their transfer must not queue behind the first layers'.
    for i in reversed(range(len(tensors))):
        size = _bytes(tensors[i])
        if size is None or size >= bucket_bytes:
            alone.append([i])
            continue
        bucket = open_buckets.get(tensors[i].dtype)
        if bucket is None or sum(_bytes(tensors[k]) or 0 for k in bucket) + size > max(bucket_bytes, size):
            bucket = open_buckets[tensors[i].dtype] = []
            buckets.append(bucket)
        bucket.append(i)
    buckets = alone + buckets
    packed = [
        tf.concat([tf.reshape(tensors[i], [-1]) for i in bucket], 0) if len(bucket) > 1 else tensors[bucket[0]]
        for bucket in buckets
    ]
    result = list(tensors)
    for bucket, total in zip(buckets, _each_dtype(packed, reduce)):
        if len(bucket) == 1:
            result[bucket[0]] = total
            continue
        sizes = [tensors[i].shape.num_elements() for i in bucket]
        for i, part in zip(bucket, tf.split(total, sizes)):
            result[i] = tf.reshape(part, tensors[i].shape)
    return result


@functools.cache
def mend_variables(is_chief: bool) -> None:
    """Lets variables of replicas be used outside of them, in callbacks and after a training, as on one device.

    What is assigned to a sum of integers is the sum from then on; TensorFlow gives each replica a part of it, and
    five halves of a confusion matrix are not an integer. A tape gives gradients of weights, with those of the first.
    """
    from tensorflow.python.distribute import values, values_util

    divided, of_replica = values_util.on_read_assign_cross_replica, values.DistributedVariable.handle.fget

    def assign(variable: Any, value: Any, read_value: bool = True) -> Any:
        if variable.dtype not in INTEGERS.values() or variable.aggregation != tf.VariableAggregation.SUM:
            return divided(variable, value, read_value)
        for i, copy in enumerate(variable.values):
            copy.assign(tf.zeros_like(copy) if i or not is_chief else tf.cast(value, copy.dtype))
        return variable

    def handle(variable: Any) -> tf.Tensor:
        outside = values_util.get_current_replica_id_as_int() is None
        return variable.values[0].handle if outside else of_replica(variable)

    values_util.on_read_assign_cross_replica = assign
    values.DistributedVariable.handle = property(handle)


def together(tensors: list[tf.Tensor]) -> bool:
    """Returns whether tensors are so small that `bucketed` sends those of a type together, unless told otherwise."""
    sizes = [_bytes(t) for t in tensors]
    return None not in sizes and sum(size or 0 for size in sizes) < BUCKET_BYTES


def _each_dtype(tensors: list[tf.Tensor], reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]]) -> list[tf.Tensor]:
    """Gives `reduce` tensors of one type at a time: Horovod groups no others, TensorFlow would pack them into one."""
    sums = list(tensors)
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        own = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        for i, total in zip(own, reduce([tensors[i] for i in own])):
            sums[i] = total
    return sums


def _bytes(tensor: tf.Tensor) -> int | None:
    """Returns the bytes of a tensor; None if its shape is not known."""
    elements = tensor.shape.num_elements()
    return None if elements is None else elements * tensor.dtype.size


def shrunk(gradients: list[tf.Tensor], dtype: str) -> list[tf.Tensor]:
    """Casts floating-point gradients to the type in which they travel; those of a smaller type stay as they are."""
    small = tf.dtypes.as_dtype(dtype)
    return [tf.cast(g, small) if g.dtype.size > small.size else g for g in gradients]


def sum_in_order(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Adds up tensors of one shape and type, always from first to last.

    `tf.add_n` begins with whichever tensor's memory it may reuse, which depends on who else still reads them at that
    moment: three replicas gave another last bit now and then. Of two the order makes no difference.
    """
    return tf.add_n(tensors) if len(tensors) < 3 else tf.reduce_sum(tf.stack(tensors), 0)


def isolated_sum(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Adds two tensors whose sum is added to others: of a chain of `+`, Grappler makes one `tf.add_n`."""
    return tf.reduce_sum(tf.stack([a, b]), 0)


def broadcast_bits(distribution: Distribution, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Sums arrays bit by bit over the workers, of which all but one have zeros in a place.

    Bits are added as integers, which is exact for every type, minus zero and NaN included.
    """
    if distribution.workers == 1:
        return arrays
    raw = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)
    words, parts = np.frombuffer(raw + bytes(-len(raw) % 8), np.int64), []
    for start in range(0, len(words), WORDS):
        with distribution.peers.during("call"):
            parts.append(_summing(distribution)(tf.constant(words[start : start + WORDS])).numpy().tobytes())
    data, results, at = bytearray().join(parts), [], 0  # which scripts may write into, as into those of Keras
    for a in arrays:
        results.append(np.frombuffer(data, a.dtype, a.size, at).reshape(a.shape))
        at += a.nbytes
    return results


@functools.cache
def _summing(distribution: Distribution) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a compiled function that sums int64 [n] over the first replicas of all workers."""

    def one(part):
        first = tf.equal(distribution.replica_id(), distribution.first)
        return distribution.all_sum([tf.where(first, part, tf.zeros_like(part))])[0]

    def call(part):
        return distribution.local(distribution.run(one, (part,)))[0]

    # Not with unknown sizes: tensors are packed for the all-reduce by size.
    return tf.function(call, autograph=False)


def gathered_slices(slices: list[tf.Tensor], distribution: Distribution) -> list[tf.Tensor]:
    """Concatenates flat tensors [size] of all replicas to [replicas * size], the small ones of each type in one go."""
    replicas = distribution.replicas
    large = [i for i, s in enumerate(slices) if (_bytes(s) or 0) * replicas >= BUCKET_BYTES]
    small = {i: slices[i].dtype for i in range(len(slices)) if i not in large}
    groups = [*([i] for i in large), *([i for i in small if small[i] == dtype] for dtype in {*small.values()})]
    packed = [tf.concat([slices[i] for i in group], 0) for group in groups]
    wholes = list(slices)
    for group, whole in zip(groups, distribution.all_gather(packed)):
        rows = tf.reshape(whole, [replicas, -1])
        for i, part in zip(group, tf.split(rows, [slices[i].shape[0] for i in group], 1)):
            wholes[i] = tf.reshape(part, [-1])
    return wholes


def gather_by_sum(
    slices: list[tf.Tensor], all_sum: Callable[[list[tf.Tensor]], list[tf.Tensor]], replica: tf.Tensor, replicas: int
) -> list[tf.Tensor]:
    """Concatenates flat tensors of all replicas, by a sum of zeros and their bits: as a number, -0.0 would be 0.0."""
    places = []
    for own in slices:
        known = tf.int64 if own.dtype.size == 8 else tf.int32  # to collectives
        bits, size = tf.cast(tf.bitcast(own, INTEGERS[own.dtype.size]), known), own.shape[0]
        place = tf.pad(bits, [[replica * size, (replicas - 1 - replica) * size]])
        place.set_shape([replicas * size])
        places.append(place)
    sums = all_sum(places)
    return [tf.bitcast(tf.cast(t, INTEGERS[s.dtype.size]), s.dtype) for t, s in zip(sums, slices)]
