"""The compiled functions that train, measure and predict; the latter two change only metrics and random generators."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfdist.data.batch_layout import Layout, MicroBatch, ReplicaBatch, unpack
from tfdist.data.spec import Structure
from tfdist.distributed import collectives
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.keras_bridge import batch_norm, gathering, keras_internals, layer_state, optimizer_update, preconditions
from tfdist.keras_bridge.zero import SlicedState
from tfdist.step import virtual_replicas
from tfdist.step.batch_loop import CallResult, StepOutput, batch_loop, next_batch, per_replica
from tfdist.step.replica import Replica, StepSums, timed

NO_BATCH = "no batch left"  # message of a prediction behind the last batch of a data set of unknown length


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of one compiled training function."""

    reduce_dtype: str = "float32"  # type in which gradients travel between replicas
    norm: bool = False  # compute the gradient norm of the last update
    factors: tuple[float, ...] = ()
    """Learning rate multiplier of each trainable variable, as `optimizers.layer_factors` gives them; none for 1."""
    sliced: SlicedState | None = None  # the optimizer's state, where replicas have slices of it


def training_call(replica: Replica, layout: Layout, losses: int, options: TrainingOptions) -> Callable[..., CallResult]:
    """Makes `call(feed, first, last, sums=None)`, which makes an update of each of these global batches.

    `losses`: loss values of an update, the total included.
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
    model, totals = replica.model, replica.totals
    optimizer = optimizer_update.OwnedOptimizer(
        model.optimizer, model.trainable_variables, options.factors, keras_internals.in_float16(model), options.sliced
    )
    with (
        optimizer.tracing(),
        replica.tracing(),
        keras_internals.sums_in_order() if layout.virtual else contextlib.nullcontext(),
        batch_norm.fused(None if replica.jit else model),  # XLA fuses by itself
    ):

        def step(batch: ReplicaBatch, is_last: tf.Tensor) -> StepOutput:
            scale = optimizer.loss_scale()
            sums, seconds, own = global_sums(replica, layout, batch, True, scale, options.reduce_dtype)
            # The same on every replica, so they are counted once, after the all-reduce.
            penalties, penalty_grads = replica.objective.penalties_with_gradients()
            gradients = sums.gradients()

            def norm() -> tf.Tensor:
                # Before clipping and without regularizers; the loss scale is still in the gradients.
                squares = [tf.cast(tf.nn.l2_loss(g), totals) for g in gradients if g is not None]
                total = tf.sqrt(2.0 * collectives.sum_in_order(squares)) if squares else tf.zeros([], totals)
                return total if scale is None else total / tf.cast(scale, totals)

            norm_at_end = tf.cond(is_last, norm, lambda: tf.zeros([], totals)) if options.norm else None
            # Once these exist, no backward pass reads a weight; sums that travel together come all at once.
            after = sums.grads if collectives.together(own) else own
            optimizer.apply(gradients, penalty_grads, after)
            return StepOutput(sums.losses(penalties), seconds, norm_at_end)

        yield step


def evaluation_call(replica: Replica, layout: Layout, losses: int) -> Callable[..., CallResult]:
    """Makes `call(feed, first, last, sums=None)`, which measures these global batches, with so many loss values."""

    def step(batch: ReplicaBatch, is_last: tf.Tensor) -> StepOutput:
        sums, *_ = global_sums(replica, layout, batch, training=False)
        return StepOutput(sums.losses(replica.objective.penalties()))

    def call(feed: tuple, first: tf.Tensor, last: tf.Tensor, sums: tf.Tensor | None = None) -> CallResult:
        with replica.tracing():
            return batch_loop(replica, layout, losses, step)(feed, first, last, sums)

    return tf.function(call, autograph=False, reduce_retracing=True)


def prediction_call(replica: Replica, layout: Layout, with_targets: bool = False) -> Callable[..., tuple]:
    """Makes `call(feed, i)`, which predicts global batch `i`.

    It returns the outputs, tensors [rows, ...] in order, and the number of rows; with targets, (outputs, targets), ()
    where there are none, in place of the outputs.
    """
    distribution, step = replica.distribution, prediction_step(replica, layout, with_targets)

    def call(feed: tuple, i: tf.Tensor) -> tuple[Structure, tf.Tensor]:
        more, take = next_batch(feed, i, layout, distribution)
        with tf.control_dependencies([] if more is True else [tf.debugging.Assert(more, [NO_BATCH])]):
            batch = take()
        with replica.calling():
            outputs = distribution.run(step, (per_replica(distribution, layout, batch),))
        return joined(distribution, layout, outputs), batch.count

    return tf.function(call, autograph=False, reduce_retracing=True)


def prediction_step(replica: Replica, layout: Layout, with_targets: bool) -> Callable[[ReplicaBatch], Structure]:
    """Makes the function that predicts the rows of one replica; it runs in replica context."""

    def predict(rows: MicroBatch) -> Structure:
        _, y, _ = unpack(rows.data)
        outputs = replica.predict(rows.data)
        if layout.local and any(leaf.dtype == tf.string for leaf in keras.tree.flatten(outputs)):
            what = "the model returns text, which cannot be gathered from several workers"  # no collective takes any
            raise UserError(what, "predict the numbers and look the text up outside of the model, or use one worker")
        return (outputs, () if y is None else y) if with_targets else outputs

    def step(batch: ReplicaBatch) -> Structure:
        distribution, count = replica.distribution, replica.count(layout, batch)
        if layout.virtual:
            outputs = virtual_replicas.outputs(replica, layout, batch, count, predict)
            return gathering.of_virtual_replicas(distribution, outputs, layout, count) if layout.local else outputs
        rows = replica.micro_batch(layout, batch, count)
        outputs = predict(rows)
        if layout.local:  # every replica then has them all
            return gathering.gathered(distribution, outputs, rows)
        if layout.replicas == 1 or layout.static:
            return outputs
        return keras.tree.map_structure(lambda t: t[: rows.size] if t.shape.rank else t[None], outputs)

    return step


def joined(distribution: Distribution, layout: Layout, of_replicas: Structure) -> Structure:
    """Returns the outputs for a global batch, given those that `prediction_step` returns on each replica."""
    outputs = distribution.local(of_replicas)
    if layout.local:
        return outputs[0]
    if layout.static:
        sizes = [layout.of_replica(layout.batch, 0, replica).size for replica in range(layout.replicas)]
        outputs = tuple(
            keras.tree.map_structure(lambda t, size=size: t[:size], output) for output, size in zip(outputs, sizes)
        )
    return keras.tree.map_structure(lambda *o: tf.concat(o, 0), *outputs)


def global_sums(
    replica: Replica,
    layout: Layout,
    batch: ReplicaBatch,
    training: bool,
    scale: tf.Tensor | None = None,
    reduce_dtype: str = "float32",
) -> tuple[StepSums, tf.Tensor | None, list[tf.Tensor]]:
    """Runs forward, and for training backward, over a global batch, updates the metrics, and sums over all replicas.

    Args:
      scale: factor of a `LossScaleOptimizer` on the loss; None for 1.
      reduce_dtype: type in which gradients travel between replicas; loss sums keep theirs.

    Returns:
      The sums, the same on every replica; seconds from this replica's last gradient to the last sum, None where there
      is no clock; this replica's gradients before the all-reduce.
    """
    distribution = replica.distribution
    count = replica.count(layout, batch)
    clock = training and distribution.timed and distribution.replicas > 1
    sums_of = functools.partial(replica.sums, count=count, training=training, scale=scale)

    def all_reduce(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if reduce_dtype == "float32" or distribution.replicas == 1:
            return distribution.all_sum(tensors)
        *grads, scalars = tensors
        *totals, scalars = distribution.all_sum([*collectives.shrunk(grads, reduce_dtype), scalars])
        return [*(tf.cast(total, g.dtype) for total, g in zip(totals, grads)), scalars]

    if layout.virtual:
        sums, seconds = virtual_replicas.exact_sums(replica, layout, batch, count, sums_of, clock)
        return sums, seconds, sums.grads
    if layout.accumulate > 1:
        sums = _accumulated(replica, layout, lambda micro: sums_of(replica.micro_batch(layout, batch, count, micro)))
    else:
        rows = replica.micro_batch(layout, batch, count)
        sums = sums_of(rows)
        if training and rows.present is not None:
            layer_state.share(replica.model, distribution, rows.present)
    own_grads = sums.grads
    totals, seconds = timed(all_reduce, sums.tensors(), clock)
    return sums.with_tensors(totals), seconds, own_grads


def _accumulated(replica: Replica, layout: Layout, sums_of: Callable[[tf.Tensor | int], StepSums]) -> StepSums:
    """Adds up the sums of all micro-batches of this replica."""
    sums = sums_of(0)
    # Synchronized BatchNorm reduces inside the forward pass, which a replica's while loop cannot.
    if replica.distribution.replicas > 1 and preconditions.synchronizes(replica.model):
        for micro in range(1, layout.accumulate):
            sums = sums.plus(sums_of(micro).tensors(), collectives.isolated_sum)
        return sums

    def body(micro: tf.Tensor, tensors: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        return micro + 1, sums.with_tensors(tensors).plus(sums_of(micro).tensors()).tensors()

    _, tensors = tf.while_loop(lambda micro, _: micro < layout.accumulate, body, (tf.constant(1), sums.tensors()))
    return sums.with_tensors(tensors)
