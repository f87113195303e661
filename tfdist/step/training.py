"""The compiled function that trains: one update for each global batch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfdist.data.batch_layout import Layout, ReplicaBatch
from tfdist.distributed.collectives import sum_in_order
from tfdist.keras_bridge import batch_norm, keras_internals, optimizer_update
from tfdist.step.batch_loop import CallResult, StepOutput, batch_loop
from tfdist.step.global_sums import global_sums
from tfdist.step.replica import Replica


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of one compiled training function."""

    full: bool = False  # the global batches are known to be full and to divide evenly: then all shapes are known
    reduce_dtype: str = "float32"  # type in which gradients travel between replicas
    norm: bool = False  # compute the gradient norm of the last update
    factors: tuple[float, ...] = ()
    """Learning rate multiplier of each trainable variable, as `layerwise_rates` gives them; none for 1."""


def training_call(replica: Replica, layout: Layout, losses: int, options: TrainingOptions) -> Callable[..., CallResult]:
    """Makes `call(feed, first, last, sums=None)`, which makes an update of each of these global batches.

    Args:
      losses: loss values of an update, the total included.
    """
    optimizer_update.check(replica.model.optimizer)

    def call(feed: tuple, first: tf.Tensor, last: tf.Tensor, sums: tf.Tensor | None = None) -> CallResult:
        with train_step(replica, layout, options) as step:
            return batch_loop(replica, layout, losses, step)(feed, first, last, sums)

    return tf.function(call, autograph=False, reduce_retracing=True)


@contextlib.contextmanager
def train_step(
    replica: Replica, layout: Layout, options: TrainingOptions
) -> Iterator[Callable[[ReplicaBatch, tf.Tensor], StepOutput]]:
    """Yields the function that makes one update on one replica, while it is traced.

    It takes a replica's batch, and whether this is the last update of a call, a bool scalar.
    """
    model = replica.model
    variables = model.trainable_variables
    with (
        optimizer_update.owned(
            model.optimizer, variables, options.factors, keras_internals.in_float16(model)
        ) as optimizer,
        replica.tracing(),
        keras_internals.sums_in_order() if layout.virtual else contextlib.nullcontext(),
        batch_norm.fused(None if replica.jit else model),  # XLA fuses by itself
    ):

        def step(batch: ReplicaBatch, is_last: tf.Tensor) -> StepOutput:
            count = layout.batch if options.full else replica.count(layout, batch)
            scale = optimizer.loss_scale()
            total = global_sums(replica, layout, batch, count, True, scale, options.reduce_dtype)
            # The same on every replica, so they are counted once, after the all-reduce.
            penalties, penalty_grads = replica.objective.penalties_with_gradients()
            gradients = total.sums.gradients()
            norm = _gradient_norm(gradients, scale, is_last, replica.totals) if options.norm else None
            optimizer.apply(gradients, variables, penalty_grads, total.own_grads)
            return StepOutput(total.sums.losses(penalties), total.seconds, norm)

        yield step


def _gradient_norm(
    gradients: list[tf.Tensor | None], scale: tf.Tensor | None, is_last: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
    """Returns the norm over all gradients, before clipping and without regularizers; 0 unless `is_last`.

    Args:
      scale: loss scale that is still in the gradients, or None.
      dtype: of the result, and of the sum over the gradients.
    """

    def norm() -> tf.Tensor:
        squares = [tf.cast(tf.nn.l2_loss(g), dtype) for g in gradients if g is not None]
        total = tf.sqrt(2.0 * sum_in_order(squares)) if squares else tf.zeros([], dtype)
        return total if scale is None else total / tf.cast(scale, dtype)

    return tf.cond(is_last, norm, lambda: tf.zeros([], dtype))
