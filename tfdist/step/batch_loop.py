"""The loop over global batches within a call, what it adds up from batch to batch, and the logs of an epoch."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.cluster.peers import Peers
from tfdist.data.batch_layout import Batch, Layout, ReplicaBatch, fetch, host_slices
from tfdist.data.spec import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.keras_bridge import keras_internals, metrics
from tfdist.step.replica import Replica, seconds_now


class CallResult(NamedTuple):
    """What a call that trains or measures gives of its global batches, as tensors."""

    sums: tf.Tensor  # loss values times examples, the total first and then each part, float64 [1 + parts]
    examples: tf.Tensor  # how many examples there were, float64 []
    nonfinite: tf.Tensor  # number of the first batch with a loss that is not finite; -1 for none
    done: tf.Tensor  # how many batches there were, int32 []
    metrics: dict[str, tf.Tensor]  # the metrics' results so far, by name
    measures: tf.Tensor  # seconds waiting for input, in the all-reduce; last gradient norm; float64 [3]


class LoopState(NamedTuple):
    """The state of the loop between two global batches."""

    i: tf.Tensor  # number of the next batch, an int32 scalar
    sums: tf.Tensor  # as in `CallResult`, and so are `examples` and `nonfinite`
    examples: tf.Tensor
    nonfinite: tf.Tensor
    more: tf.Tensor  # whether there may be another batch, a bool scalar
    waited: tf.Tensor  # seconds this worker waited for input, float64
    reduced: tf.Tensor  # seconds its first replica spent in the all-reduce, float64
    norm: tf.Tensor  # norm of the last gradient, float64
    ended: tf.Tensor  # when the last batch was done, in seconds since 1970


class StepOutput(NamedTuple):
    """The output of one replica for one global batch."""

    losses: tf.Tensor  # [1 + outputs], the same on every replica
    seconds: tf.Tensor | None = None  # seconds that the all-reduce took here
    norm: tf.Tensor | None = None  # norm of the gradient


def batch_loop(replica: Replica, layout: Layout, losses: int | None, step: Callable) -> Callable[..., CallResult]:
    """Makes a function of a feed and two batch numbers, to be compiled, that loops over these global batches.

    Args:
      losses: number of loss values of `step`; None for any number, of which the last batch's are kept and none summed.
      step: `step(batch, is_last)` does the work of one replica for one global batch and returns a `StepOutput`.

    Returns:
      `call(feed, first, last, sums=None)`; the sums, if given, are those to which it adds.
    """
    distribution = replica.distribution

    def call(feed: tuple, first: tf.Tensor, last: tf.Tensor, sums: tf.Tensor | None = None) -> CallResult:
        alone = len(feed) == 2  # as `train_on_batch` gives it, which returns what is then in all metrics
        if alone and keras_internals.RESETS_ON_BATCH:
            metrics.reset(replica.model, distribution)
        # A data set in memory never waits for input: its order comes from Python.
        waits = distribution.timed and len(feed) == 1

        def body(*entries: tf.Tensor) -> LoopState:
            state = LoopState(*entries)
            more, take = next_batch(feed, state.i, layout, distribution)
            if waits:
                now = seconds_now(more)
                with tf.control_dependencies([now]):  # or a busy executor reads that clock after the batch's sums
                    more = tf.identity(more)
            waited = tf.maximum(now - state.ended, 0.0) if waits else None

            def work() -> LoopState:
                graph = tf.compat.v1.get_default_graph()
                before = len(graph.get_operations()) if waits else 0
                batch = take()
                arguments = per_replica(distribution, layout, batch), tf.equal(state.i + 1, last)
                output: StepOutput = distribution.local(distribution.run(step, arguments))[0]
                count = tf.cast(batch.count, tf.float64)
                finite = tf.math.is_finite(output.losses[0]) | tf.equal(count, 0.0)  # a mean of no rows is NaN
                values = tf.cast(output.losses, tf.float64)
                ended = state.ended
                if waits:  # a loss is there long before the operations that change something have run
                    traced = graph.get_operations()[before:]
                    writes = [op for op in traced if op.op_def.is_stateful and op.type != "ReadVariableOp"]
                    ended = seconds_now(finite, *writes)
                return LoopState(
                    i=state.i + 1,
                    sums=values if losses is None else state.sums + tf.math.multiply_no_nan(values, count),
                    examples=state.examples + count,
                    nonfinite=tf.where(tf.logical_or(finite, state.nonfinite >= 0), state.nonfinite, state.i),
                    more=tf.constant(True),
                    waited=state.waited if waited is None else state.waited + waited,
                    reduced=state.reduced if output.seconds is None else state.reduced + output.seconds,
                    norm=state.norm if output.norm is None else tf.cast(output.norm, tf.float64),
                    ended=ended,
                )

            return work() if more is True else tf.cond(more, work, lambda: state._replace(more=more))

        zero = tf.zeros([], tf.float64)
        start = LoopState(
            i=first,
            sums=tf.zeros([losses or 0], tf.float64) if sums is None else sums,
            examples=zero,
            nonfinite=tf.constant(-1),
            more=tf.constant(True),
            waited=zero,
            reduced=zero,
            norm=zero,
            ended=seconds_now(),
        )
        if alone:
            end = body(*start)
        else:
            end = tf.while_loop(
                lambda *entries: tf.logical_and(LoopState(*entries).i < last, LoopState(*entries).more),
                body,
                start,
                shape_invariants=LoopState(*(entry.shape for entry in start))._replace(sums=tf.TensorShape([losses])),
                parallel_iterations=1 if distribution.workers > 1 else 10,  # two would have one name in flight twice
            )
        if losses is not None:
            metrics.add_losses(replica.model, distribution, end.sums, end.examples, running=sums is not None)
        return CallResult(
            sums=end.sums,
            examples=end.examples,
            nonfinite=end.nonfinite,
            done=end.i - first,
            metrics=metrics.results(replica.model, distribution, alone or losses is None),
            measures=tf.stack([end.waited, end.reduced, end.norm]),
        )

    return call


def per_replica(distribution: Distribution, layout: Layout, batch: Batch) -> ReplicaBatch:
    """Returns the argument of `Distribution.run` from which each replica takes its rows of a global batch."""
    return distribution.per_replica(host_slices(batch, layout)) if layout.static else batch


_ENDED = "the data ends on some workers alone"
_TOLD = re.compile(rf"{_ENDED}\] \[([01 ]+)\] \[?(\d+)")


def next_batch(
    feed: tuple, i: tf.Tensor, layout: Layout, distribution: Distribution
) -> tuple[bool | tf.Tensor, Callable[[], Batch]]:
    """Returns the same as `fetch`.

    Data of unknown length may end earlier on one worker than on others. It would leave the loop while they wait for its
    gradients: silently over a ring, and adding whatever it sums next through shared memory. So workers compare first,
    which fails in this case on all of them. It costs a small all-reduce for each batch.
    """
    more, take = fetch(feed, i, layout)
    if more is True or not layout.ends_anywhere or distribution.workers == 1:
        return more, take
    mine = tf.one_hot(distribution.rank, distribution.workers) * tf.cast(more, tf.float32)
    have = distribution.local(distribution.run(lambda: distribution.all_sum([mine])[0], ()))[0] > 0
    alike = tf.reduce_all(tf.equal(have, more))
    check = tf.debugging.Assert(alike, [_ENDED, tf.cast(have, tf.int32), i], summarize=distribution.workers)
    with tf.control_dependencies([check]):
        return tf.identity(more), take


def uneven_end(error: str, update: int | None, peers: Peers) -> str:
    """Returns a line that explains an error of `next_batch`, for `update` see `explained`; empty for other errors."""
    match = _TOLD.search(error)
    if not match:
        return ""
    told = list(zip(match[1].split(), (f"{rank} ({host})" for rank, host in enumerate(peers.hosts))))
    workers = [[name for more, name in told if more == one] for one in "01"]
    ended, on = (f"worker{'s' * (len(w) > 1)} {', '.join(w)}" for w in workers)
    where = "earlier" if update is None else f"after update {update + int(match[2])}"
    return f"the data of {ended} ended {where}, that of {on} goes on: give all workers the same batches"


class LogNames:
    """What the logs of a model's own step are, known when it has been traced."""

    def __init__(self) -> None:
        self.plain: list[str] = []  # names of the values of its own, in the order of `CallResult.sums[1:]`
        self.of_metrics: dict[str, str | list[str]] = {}  # by logged name, those in `CallResult.metrics`


class Totals:
    """Adds the sums of calls up to the logs of an epoch, in float64.

    Args:
      model: whose metrics average the losses, too. What is in them is added to, as of a callback's evaluation.
      names: of the parts of the loss.
      sums, examples: what an interrupted epoch has come to, as in `CallResult`.
    """

    def __init__(
        self, model: keras.Model, distribution: Distribution, names: list[str], sums: Sequence[float], examples: float
    ):
        self._losses = functools.partial(metrics.losses, model, distribution)
        self._names = ["loss", *names]
        own = [*map(id, model.metrics)]  # which a model may list without those of Keras for the losses
        self._shown = self._names if id(keras_internals.loss_metrics(model)[0]) in own else []
        self.sums, self.examples = np.array(sums), examples
        metrics.set_losses(model, distribution, sums, examples)
        self._resets = metrics.resets(model)
        self._seen = self._resets() if len(sums) else -1
        self.refresh()

    def arguments(self) -> tuple[tf.Tensor, ...]:
        """Returns the sums to which a call adds: added up call by call, their last bits would be a matter of time."""
        return (tf.constant(self.sums),)

    def add(self, result: CallResult) -> dict[str, Any]:
        """Adds a call, and returns the loss values and metrics of the epoch so far, by name."""
        self.sums = result.sums.numpy()
        self.examples += float(result.examples)
        return self.logs(result.metrics)

    def logs(self, results: dict[str, tf.Tensor]) -> dict[str, Any]:
        """Returns the loss values so far beside these results of metrics, by name."""
        losses = self.sums / max(self.examples, 1.0)
        return {**dict(zip(self._shown, losses.tolist())), **{k: as_python(v) for k, v in results.items()}}

    def refresh(self) -> bool:
        """Goes on, as Keras, from what a callback has left in the metrics; returns whether one has changed them."""
        if self._resets() == self._seen:
            return False
        totals, counts = self._losses().T[:, : len(self._names)]
        self._seen, added_to = self._resets(), self.sums
        # What a check has put back is in float32, whose last bit would depend on the number of workers.
        if counts[0] != self.examples or not len(added_to) or not np.allclose(added_to, totals, rtol=1e-6, atol=0):
            self.examples = float(counts[0])
            self.sums = totals / np.maximum(counts, 1.0) * self.examples
        return True


class LastLogs(Totals):
    """Takes the logs that a model's own step has given for the last batch: there is nothing to add up."""

    def __init__(self, model: keras.Model, names: LogNames, examples: float):
        self._log_names, self._resets = names, metrics.resets(model)
        self._seen, self._alike = self._resets(), True
        self.sums, self.examples = np.zeros(0), examples

    def arguments(self) -> tuple[()]:
        """Returns nothing: a call is given its batches alone."""
        return ()

    def logs(self, results: dict[str, tf.Tensor]) -> dict[str, Any]:
        """Returns the logs by name; as in Keras the metrics' results where the names are the same."""
        values = {name: as_python(tensor) for name, tensor in results.items()}
        plain = dict(zip(self._log_names.plain, self.sums[1:].tolist()))
        self._alike = {*plain, *self._log_names.of_metrics} == set(values)
        if self._alike:
            return values
        # As by `pythonify_logs` of Keras: a metric that has several results, as the compiled ones, gives each by its
        # name; validation would else give its own in the place of the training's.
        logs: dict[str, Any] = {}
        for name, known in sorted({**dict.fromkeys(plain), **self._log_names.of_metrics}.items()):
            if isinstance(known, list):
                logs |= {key: values[key] for key in known}
            else:
                logs[name] = plain[name] if known is None else values[known]
        return logs

    def refresh(self) -> bool:
        """Returns whether a callback has changed the metrics, and the logs with them; see `logs`."""
        before, self._seen = self._seen, self._resets()
        return before != self._seen and self._alike


def as_python(tensor: tf.Tensor) -> float | np.ndarray:
    value = tensor.numpy()
    return float(value) if value.ndim == 0 else value


def computed_from(tensor: tf.Tensor, values: Sequence[Structure]) -> bool:
    """Returns whether a tensor of a graph is computed from one of these values."""
    if not hasattr(tensor, "graph"):
        return False
    leaves = [leaf for value in values for leaf in keras.tree.flatten(value)]
    known = {leaf.name for leaf in leaves if getattr(leaf, "graph", None) is tensor.graph}
    seen, ahead = set[str](), [tensor]
    while ahead:
        before = ahead.pop()
        if before.name in known:
            return True
        if before.op.name not in seen:
            seen.add(before.op.name)
            ahead += before.op.inputs
    return False
