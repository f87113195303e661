"""What can go wrong in a call of a compiled function, in words that a person can act on."""

from __future__ import annotations

import re

import tensorflow as tf

from tfdist.cluster.peers import Peers
from tfdist.data.protocol import Feed
from tfdist.data.records import REPAIR
from tfdist.distributed import shared_memory_sum
from tfdist.errors import TrainingError, UserError, one_line
from tfdist.step import next_batch
from tfdist.step.step import NO_BATCH


class EndOfData(Exception):  # noqa: N818  an event and no error
    """There is no further batch."""


class OutOfMemory(TrainingError):  # noqa: N818
    """A device has not had the memory for an update; the weights may be between two updates."""


class NotFinite(TrainingError):  # noqa: N818
    """The loss is NaN or infinite since an update.

    Args:
      loss: of the epoch so far.
      update, epoch: where it came about, counted from 0 as in `Position`; people count from 1.
    """

    def __init__(self, loss: float, update: int, epoch: int):
        super().__init__(
            f"the loss is {loss} since update {update + 1} (epoch {epoch + 1}): "
            "try a lower learning rate, warm-up, or gradient clipping, and look for NaN in the data"
        )
        self.update = update


def explained(
    error: tf.errors.OpError | UnicodeDecodeError, feed: Feed | None, update: int | None, peers: Peers
) -> Exception:
    """Returns the error to raise instead of TensorFlow's.

    Args:
      feed: what the call has read.
      update: updates made so far; None where a call makes none.
      peers: the workers.

    Returns:
      EndOfData: a data set of unknown length has no more batches.
      UserError: the data does not fit.
      PeerError: another worker is lost.
      OutOfMemory: there is not enough memory for an update.
      TrainingError: anything else that TensorFlow reports.
    """
    if NO_BATCH in str(error):
        return EndOfData()
    ended = next_batch.complaint(str(error), update, peers)
    if ended:
        return UserError(ended)
    for pattern, advice in _COMPLAINTS:
        complaint = re.search(pattern, str(error))
        if complaint:
            return UserError(f"{complaint[0]}{advice}")
    if feed and (isinstance(error, UnicodeDecodeError) or _IN_PIPELINE.search(str(error))):
        unreadable = feed.first_unreadable()
        if unreadable:
            return UserError(f"{unreadable}: {REPAIR}")
    if isinstance(error, tf.errors.ResourceExhaustedError) and re.search("OOM|[Mm]emory|alloc", str(error)):
        return _out_of_memory(error, update)
    return cause(error, peers)


def _out_of_memory(error: tf.errors.ResourceExhaustedError, update: int | None) -> TrainingError:
    text = one_line(error)
    tensor = re.search(r"allocating tensor with shape\[[\d,]*\]", text)
    text = f"out of memory ({tensor[0] if tensor else text[:200]})"
    if update is None:
        return TrainingError(f"{text}: measure with a smaller batch (eval.batch_size)")
    return OutOfMemory(text)


def cause(error: tf.errors.OpError | UnicodeDecodeError, peers: Peers) -> TrainingError:
    """Returns what an error of TensorFlow means: a lost worker, if the others know of one and it may be that."""
    text = one_line(error)
    mine = isinstance(error, _OWN_FAULTS) and not re.search("[Cc]ollective|Horovod", text)
    if not mine and peers.verdict():
        return peers.error()
    return TrainingError(text[:400])


_OWN_FAULTS = (
    tf.errors.FailedPreconditionError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnimplementedError,
)
"""Without a word of a collective in them, these have nothing to do with the other workers."""
_IN_PIPELINE = re.compile("IteratorGetNext|OptionalGetValue")
_COMPLAINTS = (
    (
        shared_memory_sum.OUT_OF_STEP.format(r"\d+", r"\d+"),
        ": what layers, losses and steps sum with all_reduce must not depend on the worker",
    ),
    (r"a batch of the data set is larger than the first one \(.*?\)", ": make the first batch the largest"),
    (
        r"Received a label value of .*? outside the valid range of \[.*?\)",
        ": correct the labels or the model's last layer",
    ),
)
