"""What a compiled update can see of itself: how long it waits for input and for other replicas, and its gradient.

A clock in a graph is an operation that runs when what it depends on is there.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def now(*after: Any) -> Any:
    """Seconds since 1970 as float64, once the tensors `after` are there, and the operations have run."""
    with tf.control_dependencies(list(after)):
        return tf.timestamp()


def count() -> int:
    """Operations in the graph that is being traced."""
    return len(tf.compat.v1.get_default_graph().get_operations())


def changes(since: int) -> list:
    """The operations traced since `count` that change something: a loss is there long before they have run."""
    operations = tf.compat.v1.get_default_graph().get_operations()[since:]
    return [op for op in operations if op.op_def.is_stateful and op.type != "ReadVariableOp"]


def can_wait(feed: tuple) -> bool:
    """Whether there is anything to wait for: of a data set in memory only its order, and that comes from Python."""
    return len(feed) == 1


def wait(ended: Any, more: Any) -> Any:
    """Seconds from the end of the last update until there was a next batch; none if it was there before."""
    return tf.maximum(now(more) - ended, 0.0)


def after(time: Any, tensor: Any) -> Any:
    """`tensor`, once the clock has been read. Else a busy executor may read it any time later."""
    with tf.control_dependencies([time]):
        return tf.identity(tensor)


def norm(gradients: list, scale: Any, wanted: Any) -> Any:
    """Norm over all gradients, before any clipping and without regularisers; 0 where it is not wanted.

    Args:
      scale: loss scale that is still in the gradients, or None.
      wanted: bool scalar; the others are not paid for.
    """

    def take() -> Any:
        squares = [tf.cast(tf.nn.l2_loss(g), tf.float64) for g in gradients if g is not None]
        found = tf.sqrt(2.0 * tf.add_n(squares)) if squares else tf.zeros([], tf.float64)
        return found if scale is None else found / tf.cast(scale, tf.float64)

    return tf.cond(wanted, take, lambda: tf.zeros([], tf.float64))


def beside(losses: Any, seconds: Any, norm: Any) -> Any:
    """`losses` [n], and behind them [2] what was watched, if anything was."""
    if seconds is None and norm is None:
        return losses
    none = tf.zeros([], tf.float64)
    watched = tf.stack([none if seconds is None else seconds, none if norm is None else norm])
    return tf.concat([tf.cast(losses, tf.float64), watched], 0)


def add(watched: Any, waited: Any, seen: Any) -> Any:
    """`watched` [3] (see `Step._loop`) after one more update.

    Args:
      waited: for input, or None if that is not known.
      seen: what stood behind the losses, [2] or [0].
    """
    if waited is None and seen.shape[0] == 0:
        return watched
    none = tf.zeros([1], tf.float64)
    times = tf.concat([none if waited is None else waited[None], seen[:1] if seen.shape[0] else none], 0)
    return tf.concat([watched[:2] + times, seen[1:] if seen.shape[0] else none], 0)
