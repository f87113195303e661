"""The loop over global batches within a call: what is added up from batch to batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfdist.data import static_rows
from tfdist.data.batch_layout import Batch, Layout
from tfdist.distributed.distribution import Distribution
from tfdist.keras_bridge import metrics
from tfdist.step import graph_clock
from tfdist.step.next_batch import next_batch
from tfdist.step.replica import Replica
from tfdist.step.results import CallResult


class LoopState(NamedTuple):
    """What the loop hands from one global batch to the next."""

    i: tf.Tensor
    """Number of the next batch, an int32 scalar."""
    sums: tf.Tensor
    """As in `CallResult`."""
    examples: tf.Tensor
    """As in `CallResult`."""
    nonfinite: tf.Tensor
    """As in `CallResult`."""
    more: tf.Tensor
    """Whether there may be another batch, a bool scalar."""
    measures: tf.Tensor
    """As in `CallResult`."""
    ended: tf.Tensor
    """When the last batch was done, in seconds since 1970."""

    @classmethod
    def start(cls, first: tf.Tensor, losses: int | None, sums: tf.Tensor | None) -> LoopState:
        """Returns the state before the batch with the number `first`, for this number of loss values; None for any.

        Args:
          sums: to go on with; zeros if not given.
        """
        return cls(
            i=first,
            sums=tf.zeros([losses or 0], tf.float64) if sums is None else sums,
            examples=tf.zeros([], tf.float64),
            nonfinite=tf.constant(-1),
            more=tf.constant(True),
            measures=tf.zeros([3], tf.float64),
            ended=graph_clock.now(),
        )

    def shapes(self, any_losses: bool) -> LoopState:
        """Returns the shapes that the tensors keep; of the sums none, where the number of losses is not known yet."""
        shapes = LoopState(*(tensor.shape for tensor in self))
        return shapes._replace(sums=tf.TensorShape([None])) if any_losses else shapes


class StepOutput(NamedTuple):
    """What one replica gives for one global batch. It travels as one vector, since one is what a replica can return."""

    losses: tf.Tensor
    """[1 + outputs], the same on every replica."""
    measures: tf.Tensor
    """Seconds that the all-reduce took here and the norm of the gradient, [2]; [0] where neither was taken."""

    @staticmethod
    def packed(
        losses: tf.Tensor, seconds: tf.Tensor | None, norm: tf.Tensor | None, dtype: tf.DType = tf.float64
    ) -> tf.Tensor:
        """Returns the losses [n], and behind them [2] the measures if there is one of them; all of `dtype` then."""
        if seconds is None and norm is None:
            return losses
        none = tf.zeros([], dtype)
        measures = tf.stack([none if seconds is None else seconds, none if norm is None else tf.cast(norm, dtype)])
        return tf.concat([tf.cast(losses, dtype), measures], 0)

    @classmethod
    def unpacked(cls, values: tf.Tensor, losses: int | None) -> StepOutput:
        """Takes apart what `packed` has put together with this number of losses; None for no measures."""
        if losses is None or values.shape[0] == losses:
            return cls(values, tf.zeros([0], values.dtype))
        return cls(values[:losses], values[losses:])


def _run(distribution: Distribution, layout: Layout, one: Callable, batch: Batch, is_last: tf.Tensor) -> tf.Tensor:
    """Lets all replicas do their work for a global batch; returns what this worker's first one gives."""
    of_replica = distribution.per_replica(static_rows.given(batch, layout)) if layout.static else batch
    return distribution.local(distribution.run(one, (of_replica, is_last)))[0]


def batch_loop(replica: Replica, layout: Layout, losses: int | None, one: Callable) -> Callable[..., CallResult]:
    """Makes a function of a feed and two batch numbers, to be compiled, that goes over these global batches.

    Args:
      losses: how many values `one` gives before its measures. None for values of which the last batch's are kept, and
        none are added up.
      one: `one(batch, is_last)` does the work of one replica for one global batch, a `replica.Taken`, and returns a
        `StepOutput.packed`.

    Returns:
      `call(feed, first, last, sums=None)`; the sums, if given, are those to which it adds.
    """
    distribution = replica.distribution

    def call(feed: tuple, first: tf.Tensor, last: tf.Tensor, sums: tf.Tensor | None = None) -> CallResult:
        def body(*entries: tf.Tensor) -> LoopState:
            state = LoopState(*entries)
            more, take = next_batch(feed, state.i, layout, distribution)
            waited = graph_clock.wait(state.ended, more) if replica.timed and graph_clock.can_wait(feed) else None

            def work() -> LoopState:
                before = graph_clock.count()
                batch = take()
                is_last = tf.equal(state.i + 1, last)
                output = StepOutput.unpacked(_run(distribution, layout, one, batch, is_last), losses)
                weight = tf.cast(batch.count, tf.float64)
                finite, values = tf.math.is_finite(output.losses[0]), tf.cast(output.losses, tf.float64)
                return LoopState(
                    i=state.i + 1,
                    sums=values if losses is None else state.sums + values * weight,
                    examples=state.examples + weight,
                    nonfinite=tf.where(tf.logical_or(finite, state.nonfinite >= 0), state.nonfinite, state.i),
                    more=tf.constant(True),
                    measures=graph_clock.add(state.measures, waited, tf.cast(output.measures, tf.float64)),
                    ended=state.ended if waited is None else graph_clock.now(finite, *graph_clock.changes(before)),
                )

            if more is True:
                return work()
            return tf.cond(more, work, lambda: state._replace(more=more))

        start = LoopState.start(first, losses, sums)
        end = tf.while_loop(
            lambda *entries: tf.logical_and(LoopState(*entries).i < last, LoopState(*entries).more),
            body,
            start,
            shape_invariants=start.shapes(any_losses=losses is None),
            parallel_iterations=distribution.concurrent_iterations,
        )
        return CallResult(
            sums=end.sums,
            examples=end.examples,
            nonfinite=end.nonfinite,
            done=end.i - first,
            metrics=metrics.results(replica.model, distribution, losses is None),
            measures=end.measures,
        )

    return call
