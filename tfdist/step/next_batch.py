"""The next global batch of a feed, or the end of the data, which all workers must find at the same batch."""

from __future__ import annotations

import re
from collections.abc import Callable

import tensorflow as tf

from tfdist.cluster.peers import Peers
from tfdist.data.batch_layout import Batch, Layout, fetch
from tfdist.distributed.distribution import Distribution

_ENDED = "the data ends on some workers alone"
_TOLD = re.compile(rf"{_ENDED}\] \[([01 ]+)\] \[?(\d+)")


def next_batch(
    feed: tuple, i: tf.Tensor, layout: Layout, distribution: Distribution
) -> tuple[bool | tf.Tensor, Callable[[], Batch]]:
    """Returns the same as `fetch`.

    Data of unknown length may end earlier on one worker than on others. It would leave the loop while they wait for its
    gradients: without a word over a ring, and with whatever it sums next through shared memory. So workers ask each
    other first, which fails in this case on all of them. It costs a small all-reduce for each batch.
    """
    more, take = fetch(feed, i, layout)
    if more is True or not layout.ends_anywhere or distribution.workers == 1:
        return more, take
    mine = tf.one_hot(distribution.rank, distribution.workers) * tf.cast(more, tf.float32)
    have = distribution.local(distribution.run(lambda: distribution.all_sum([mine])[0], ()))[0] > 0
    alike = tf.reduce_all(tf.equal(have, more))
    told = [_ENDED, tf.cast(have, tf.int32), i]
    check = tf.debugging.Assert(alike, told, summarize=distribution.workers)
    with tf.control_dependencies([check]):
        return tf.identity(more), take


def complaint(error: str, update: int | None, peers: Peers) -> str:
    """Returns what is wrong if an error is of `next_batch`, in a line; else "".

    Args:
      update: updates made before the call; None where it makes none.
    """
    told = _TOLD.search(error)
    if not told:
        return ""
    workers: dict[str, list[str]] = {"0": [], "1": []}
    for rank, more in enumerate(told[1].split()):
        workers[more].append(f"{rank} ({peers.hosts[rank]})")
    ended, on = (f"worker{'s' * (len(w) > 1)} {', '.join(w)}" for w in workers.values())
    where = "earlier" if update is None else f"after update {update + int(told[2])}"
    return f"the data of {ended} ended {where}, that of {on} goes on: give all workers the same batches"
