"""What a compiled update can see of itself: how long it waits for input and for other replicas, and its gradient.

A clock in a graph is an operation that runs when what it depends on is there.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.distributed.collectives import sum_in_order


def now(*after: tf.Tensor | tf.Operation) -> tf.Tensor:
    """Returns seconds since 1970 as float64, read once the tensors `after` are there, and the operations have run."""
    with tf.control_dependencies(list(after)):
        return tf.timestamp()


def count() -> int:
    """Returns how many operations the graph has that is being traced."""
    return len(tf.compat.v1.get_default_graph().get_operations())


def changes(since: int) -> list[tf.Operation]:
    """Returns the operations traced since `count` that change something: a loss is there long before they have run."""
    operations = tf.compat.v1.get_default_graph().get_operations()[since:]
    return [op for op in operations if op.op_def.is_stateful and op.type != "ReadVariableOp"]


def can_wait(feed: tuple) -> bool:
    """Returns whether a feed can let an update wait; a data set in memory cannot, whose order comes from Python."""
    return len(feed) == 1


def wait(ended: tf.Tensor, more: tf.Tensor) -> tf.Tensor:
    """Returns seconds from the end of the last update until there was a next batch; 0 if it was there before."""
    return tf.maximum(now(more) - ended, 0.0)


def after(time: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Returns `tensor` once the clock has been read. Else a busy executor may read it any time later."""
    with tf.control_dependencies([time]):
        return tf.identity(tensor)


def norm(
    gradients: list[tf.Tensor | None], scale: tf.Tensor | None, wanted: tf.Tensor, dtype: tf.DType = tf.float64
) -> tf.Tensor:
    """Returns the norm over all gradients, before any clipping and without regularisers; 0 if not wanted.

    Args:
      scale: loss scale that is still in the gradients, or None.
      wanted: bool scalar; where it is False, nothing is computed.
      dtype: of the result, and of the sum over the gradients.
    """

    def take() -> tf.Tensor:
        squares = [tf.cast(tf.nn.l2_loss(g), dtype) for g in gradients if g is not None]
        total = tf.sqrt(2.0 * sum_in_order(squares)) if squares else tf.zeros([], dtype)
        return total if scale is None else total / tf.cast(scale, dtype)

    return tf.cond(wanted, take, lambda: tf.zeros([], dtype))


def add(measures: tf.Tensor, waited: tf.Tensor | None, seen: tf.Tensor) -> tf.Tensor:
    """Adds an update's measures up.

    Args:
      measures: those of the call so far, as in `CallResult`.
      waited: seconds for input, or None if that is not known.
      seen: those of the update, as in `StepOutput`.

    Returns:
      The sums of the seconds, and the last norm, float64 [3].
    """
    if waited is None and seen.shape[0] == 0:
        return measures
    none = tf.zeros([1], tf.float64)
    times = tf.concat([none if waited is None else waited[None], seen[:1] if seen.shape[0] else none], 0)
    return tf.concat([measures[:2] + times, seen[1:] if seen.shape[0] else none], 0)
