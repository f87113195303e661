"""The experiment on one device of this machine: how long its updates take, and what they would send."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from tfdist import config
from tfdist.config import field_syntax, schedule
from tfdist.config.messages import logger
from tfdist.data import class_weights, sources
from tfdist.data.datasets import registry
from tfdist.distributed import collectives
from tfdist.distributed.distribution import Distribution
from tfdist.engine import fit
from tfdist.engine.callbacks.callback import Callback
from tfdist.engine.timing import Call
from tfdist.errors import Interrupted, UserError
from tfdist.models import build as models
from tfdist.models import keras_internals, optimizers
from tfdist.plan.cost import Compute, Epoch, Job, compute_of

if TYPE_CHECKING:
    from tfdist.data.loaded import Loaded

SHARES = (1, 4, 16)
"""By what the batch is divided for the batch sizes that are measured."""
LARGER = 4
"""By what batch and micro-batches are multiplied for the other training that a plan shows."""
_EPOCHS = 1 << 30
"""More than the time allows."""
_CALLS = 3
"""How many calls in which nothing is compiled are measured at least."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredUpdates:
    """Updates of one kind on one device."""

    examples: float
    accumulate: int
    seconds: float
    """The median of the calls."""
    spread: float
    """How far apart the quarters of the calls are, in relation to the median."""
    updates: int


class _Clock(Callback):
    """Notes how long the updates of each call took, from the first call on in which nothing was compiled."""

    def __init__(self, seconds: float):
        super().__init__()
        self._limit = seconds
        self._begun: float | None = None
        self.calls: list[Call] = []

    def on_call(self, call: Call) -> None:
        if call.steady:
            self._begun = self._begun or time.monotonic()
            self.calls.append(call)

    def reason(self) -> str:
        """Says so when enough was measured, for `should_stop`."""
        enough = self._begun is not None and time.monotonic() - self._begun > self._limit
        return "measured" if enough and len(self.calls) > _CALLS else ""


class Workload:
    """The experiment's model and data, on a device that has been started.

    Raises:
      UserError: the experiment cannot be used.
    """

    def __init__(self, experiment: config.Experiment, distribution: Distribution):
        self._experiment, self._distribution = experiment, distribution
        models.set_precision(experiment.train.precision)
        data = registry.load(experiment, True)
        with distribution.scope():
            self._model = models.build(experiment, data.spec)
            optimizer = optimizers.build(experiment, schedule.make(experiment, data.examples, 1))
            data = models.compiled(self._model, optimizer, experiment, data)
            optimizers.exclude(self._model, experiment.optimizer)
        self._source = _with_any_batch(data)
        self._class_weights = class_weights.told(experiment.train.class_weight, data)

    def measure(self, examples: int, accumulate: int, seconds: float) -> MeasuredUpdates:
        """Trains with so many examples an update for about so many seconds."""
        wanted, clock = self._experiment.optimizer, _Clock(seconds)
        with contextlib.suppress(Interrupted):  # by the clock
            fit.fit(
                self._model,
                self._source,
                distribution=self._distribution,
                batch_size=examples,
                epochs=_EPOCHS,
                accumulate=accumulate,
                shuffle=self._experiment.data.shuffle,
                seed=self._experiment.seed,
                class_weight=self._class_weights,
                callbacks=[clock],
                learning_rates=field_syntax.layer_rates(wanted),
                layer_decay=wanted.layer_decay,
                check_agreement="off",
                should_stop=clock.reason,
                verbose=0,
            )
        # The first one was of another length, as the pace was not known yet.
        calls = clock.calls[1:]
        calls = [call for call in calls if call.examples == call.updates * examples] or calls
        each = sorted(call.spent.seconds / call.updates for call in calls)
        middle = statistics.median(each)
        found = MeasuredUpdates(
            examples=sum(c.examples for c in calls) / sum(c.updates for c in calls),
            accumulate=accumulate,
            seconds=middle,
            spread=(each[len(each) * 3 // 4] - each[len(each) // 4]) / middle,
            updates=sum(c.updates for c in calls),
        )
        micro = f" in {accumulate} micro-batches" if accumulate > 1 else ""
        logger.info(f"{found.examples:.4g} examples{micro}: {1e3 * middle:.3g} ms an update")
        return found

    def job(self, dtype: str, bucket_bytes: int) -> Job:
        """Returns what an update sends, with gradients in `dtype`."""
        train = self._experiment.train
        variables = [(tuple(v.shape), str(v.dtype)) for v in self._model.trainable_variables]
        sizes, ready = messages(variables, dtype, bucket_bytes)
        return Job(train.batch_size, train.accumulate, dtype, sizes, ready, self._inner(), self._epoch())

    def _epoch(self) -> Epoch:
        if not isinstance(self._source, sources.Arrays):
            return Epoch()
        full, rest = divmod(self._source.size, self._experiment.train.batch_size)
        return Epoch(full, rest > 0)

    def _inner(self) -> tuple[int, ...]:
        """Returns the bytes of the sums inside the passes: a layer's moments and count, and their gradient."""
        sizes = []
        for layer in keras_internals.flat_layers(self._model):
            if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized and layer.trainable:
                sizes += 2 * [4 * (2 * layer.moving_mean.shape[0] + 1)]
        return tuple(sizes)


def _with_any_batch(data: Loaded) -> sources.Source:
    """Returns the examples as a source that takes any batch size."""
    source = data.train
    if not isinstance(source, sources.Batches):
        return source
    columns = keras.tree.map_structure(np.asarray, sources.first_batch(source))
    rows = np.arange(min(1 << 14, max(256, data.examples)))
    return sources.Arrays(keras.tree.map_structure(lambda c: np.take(c, rows, 0, mode="wrap"), columns))


def messages(
    variables: Sequence[tuple[tuple[int, ...], str]], dtype: str, bucket_bytes: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Returns what an update sends, as `collectives.bucketed` makes it.

    Args:
      variables: shape and type of each trainable variable, those of the first layers first.
      dtype: type in which gradients travel, as `optimizer.reduce_dtype`.
      bucket_bytes: see `collectives.bucketed`.

    Returns:
      The bytes of each all-reduce, and the share of the backward pass after which it can begin: the pass is taken to go
      through the weights from the last to the first at one pace, which holds for layers that multiply by matrices.
    """
    sizes: list[int] = []
    ready: list[float] = []
    elements = [math.prod(shape) for shape, _ in variables]
    shares = np.cumsum(elements[::-1])[::-1] / max(1, sum(elements))

    def reduce(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        for tensor in tensors:
            sizes.append(tensor.shape.num_elements() * tensor.dtype.size)
            ready.append(max(there[name] for name in _sources(tensor.op) & there.keys()))
        return tensors

    with tf.Graph().as_default():
        gradients = [tf.compat.v1.placeholder(kind, shape) for shape, kind in variables]
        sent = gradients if dtype == "float32" else collectives.shrunk(gradients, dtype)
        sums = tf.compat.v1.placeholder(tf.float32, [4])  # of the losses and their counts, about
        there = {gradient.op.name: float(share) for gradient, share in zip(gradients, shares)} | {sums.op.name: 0.0}
        collectives.bucketed([*sent, sums], reduce, bucket_bytes)
    return tuple(sizes), tuple(ready)


def _sources(op: tf.Operation) -> set[str]:
    """Returns the names of an operation and of all that it depends on."""
    found, left = set(), [op]
    while left:
        one = left.pop()
        if one.name not in found:
            found.add(one.name)
            left += [tensor.op for tensor in one.inputs]
    return found


def measured_compute(
    workload: Workload, experiment: config.Experiment, seconds: float
) -> tuple[Compute, list[MeasuredUpdates]]:
    """Measures updates of several sizes, and returns what they cost and each of the measurements.

    Raises:
      UserError: the batch is too small to be divided.
    """
    batch, accumulate = experiment.train.batch_size, experiment.train.accumulate
    sizes = sorted({max(accumulate, batch // share) for share in SHARES}, reverse=True)
    if len(sizes) == 1:
        raise UserError(
            f"train.batch_size={batch} in {accumulate} micro-batches cannot be divided among workers: "
            "there is nothing to plan"
        )
    found = [workload.measure(size, accumulate, seconds) for size in sizes]
    more = None
    if batch >= LARGER * accumulate:
        found.append(workload.measure(batch, LARGER * accumulate, seconds))
        more = (found[-1].examples, found[-1].seconds, LARGER * accumulate)
    points = [(m.examples, m.seconds) for m in found if m.accumulate == accumulate]
    return compute_of(points, accumulate, more), found
