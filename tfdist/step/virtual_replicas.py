"""Virtual replicas: each device computes its own one after the other, and the sums depend on no order.

One compiled function computes all virtual replicas, given a number. So the same operations see the same shapes on any
number of devices, and their results are the same bit for bit; `ExactSum` adds them up.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist.data.batch_layout import Layout, MicroBatch, ReplicaBatch, with_shape
from tfdist.data.spec import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals, layer_state
from tfdist.keras_bridge.keras_internals import read_copy, write_copy
from tfdist.step.exact_sum import ExactSum
from tfdist.step.replica import Replica, StepSums, timed


class VirtualState:
    """The state of a model before a global batch, during each virtual replica, and after all; in replica context.

    Averages that layers keep, as BatchNorm does, become what they were plus the mean of the changes; what they count,
    and what metrics sum up, grows by the sum. A random generator gets a state for each virtual replica from its own,
    which advances by one if any has drawn.
    """

    def __init__(self, model: keras.Model, layout: Layout):
        fixed = {id(v) for v in keras_internals.fixed_variables(model)}
        of_losses = {id(v) for metric in keras_internals.loss_metrics(model) if metric for v in metric.variables}
        sums = {id(v): v for v in model.metrics_variables if id(v) not in of_losses}
        rest = [v for v in model.non_trainable_variables if id(v) not in fixed | of_losses and id(v) not in sums]
        self._sums = list(sums.values())
        self._seeds = [v for v in rest if keras_internals.is_seed(v)]
        self._kept = [v for v in rest if not keras_internals.is_seed(v)]
        for variable in (*self._kept, *self._sums):
            dtype = tf.as_dtype(variable.dtype)
            if not (dtype.is_floating or dtype.is_integer):
                what = f"virtual replicas cannot add up {variable.path}, which is {dtype.name}"
                raise UserError(what, "leave virtual_replicas out")
        self._parts = layout.replicas * layout.accumulate
        # Outside of the virtual replicas, where nothing has changed yet.
        self._before = {id(v): read_copy(v.value) for v in (*self._sums, *self._seeds, *self._kept)}
        # The states of each generator, [replicas, 2]: none follows another.
        draw = functools.partial(tf.random.stateless_uniform, [self._parts, 2], dtype=tf.uint32, alg="philox")
        seeds = [tf.cast(self._before[id(v)], tf.int64) for v in self._seeds]
        self._streams = [draw(seed, minval=None, maxval=None) for seed in seeds]

    def begin(self, part: tf.Tensor) -> set[int]:
        """Sets the state for a virtual replica of this number among all micro-batches, while its graph is traced.

        Returns the ids of the tensors that represent these variables in that graph.
        """
        for variable, stream in zip(self._seeds, self._streams):
            write_copy(variable.value, tf.cast(stream[part], self._before[id(variable)].dtype))
        for variable in self._kept:
            write_copy(variable.value, self._before[id(variable)])
        for variable in self._sums:
            write_copy(variable.value, tf.zeros_like(self._before[id(variable)]))
        graph = tf.compat.v1.get_default_graph()
        return {id(graph.capture(v.value.handle)) for v in (*self._seeds, *self._kept, *self._sums)}

    def changes(self, part: tf.Tensor) -> list[tf.Tensor]:
        """Returns the changes of a virtual replica, to be added up over all."""
        changes = [read_copy(v.value) for v in self._sums]
        changes += [read_copy(v.value) - self._before[id(v)] for v in self._kept]
        return [*changes, *self.drawn(part)]

    def drawn(self, part: tf.Tensor) -> list[tf.Tensor]:
        """Returns for each random generator 1 if the virtual replica has drawn, else 0."""
        states = [tf.cast(read_copy(v.value), tf.uint32) for v in self._seeds]
        moved = [tf.not_equal(now, stream[part]) for now, stream in zip(states, self._streams)]
        return [tf.cast(tf.reduce_any(m), tf.int64) for m in moved]

    def end(self, changes: Sequence[tf.Tensor], examples: tf.Tensor | int, distribution: Distribution) -> None:
        """Sets the state after all virtual replicas, of which those without any of the examples have changed nothing.

        `changes`: the sums of `changes`.
        """
        remaining = iter(changes)
        first = tf.equal(distribution.replica_id(), 0)
        parts = tf.minimum(examples, self._parts)
        for variable in self._sums:  # which are read as the sum over the replicas
            before, change = self._before[id(variable)], next(remaining)
            write_copy(variable.value, before + tf.where(first, change, tf.zeros_like(change)))
        for variable in self._kept:
            before, change = self._before[id(variable)], next(remaining)
            mean = change / tf.cast(parts, change.dtype) if change.dtype.is_floating else change
            write_copy(variable.value, before + mean)
        self._move_on(list(remaining))

    def put_back(self, drawn: Sequence[tf.Tensor]) -> None:
        """Sets the state after a prediction, which changes nothing but random generators, by the sums of `drawn`."""
        for variable in (*self._sums, *self._kept):
            write_copy(variable.value, self._before[id(variable)])
        self._move_on(drawn)

    def _move_on(self, drawn: Sequence[tf.Tensor]) -> None:
        for variable, times in zip(self._seeds, drawn):
            before = self._before[id(variable)]
            write_copy(variable.value, tf.stack([before[0], before[1] + tf.cast(tf.minimum(times, 1), before.dtype)]))


def _check_graph(graph: tf.Graph, own: set[int]) -> None:
    """Refuses operations that depend on the device of a virtual replica, or on what that has computed before.

    `own`: ids of the tensors in its graph that are variables of `VirtualState`.
    """
    kinds = layer_state.kinds_of(graph)
    for kind in layer_state.drawing(kinds):
        raise UserError(
            f"the model draws random numbers by TensorFlow's {kind}, which depend on the device",
            "draw them by keras.random with a keras.random.SeedGenerator that is an attribute of the layer, or leave "
            "virtual_replicas out",
        )
    for kind in sorted(kinds & layer_state.PYTHON):
        raise UserError(
            f"the model calls Python ({kind}), whose random numbers and counts would depend on the device",
            "use tf.numpy_function(..., stateful=False) if it has none, or leave virtual_replicas out",
        )
    if any(id(variable) not in own for variable in _written(graph)):
        raise UserError(
            "a forward pass changes a variable that is not state of a layer or metric (a trained weight, or that of "
            "a keras.random call without a seed), which cannot be added up over replicas",
            "make it a weight with "
            "trainable=False, give the call a SeedGenerator of the layer, or leave virtual_replicas out",
        )


def _written(graph: tf.Graph) -> Iterator[tf.Tensor]:
    """Yields the variables that are changed in a graph, or in a branch, a loop or a function that it calls."""
    handles = {id(variable.handle) for variable in graph.variables}
    variables = {id(inner) for outer, inner in graph.captures if id(outer) in handles}
    for op in graph.get_operations():
        if op.type.startswith(layer_state.WRITES):
            yield op.inputs[0]
            continue
        only_read = keras_internals.only_read(op)
        if only_read is not None:  # which may have tables among its resources, too
            yield from (t for i, t in enumerate(op.inputs) if id(t) in variables and i not in only_read)


class _Partial(NamedTuple):
    """The partial results of the virtual replicas of one replica, as `ExactSum.term` returns them."""

    kept: list[tf.TensorArray]  # tensors of every virtual replica
    tops: list[tf.Tensor]  # the maximum over the virtual replicas of other tensors
    whole: tf.Tensor  # the sum of integers
    number: tf.Tensor | int  # virtual replicas of this replica, in all micro-batches


def exact_sums(
    replica: Replica,
    layout: Layout,
    batch: ReplicaBatch,
    count: tf.Tensor | int,
    sums_of: Callable[[MicroBatch], StepSums],
    clock: bool,
) -> tuple[StepSums, tf.Tensor | None]:
    """Runs `sums_of` for all virtual replicas, and sums exactly, also what metrics and states of layers have become.

    Returns:
      The sums, and the seconds this replica spent in the all-reduce; None without a clock.
    """
    distribution = replica.distribution
    state = VirtualState(replica.model, layout)
    traced: list[tuple[StepSums, ExactSum]] = []

    def work(rows: MicroBatch, part: tf.Tensor) -> tuple:
        sums = sums_of(rows)
        # The gradients of an embedding do not know their shape.
        variables = replica.model.trainable_variables
        present = [variables[i] for group in sums.present for i, has_gradient in enumerate(group) if has_gradient]
        gradients = [with_shape(g, v.shape) for g, v in zip(sums.grads, present, strict=True)]
        # Each scalar has a unit of its own: losses and counts may be far apart.
        values = [*gradients, *tf.unstack(sums.scalars), *state.changes(part)]
        exact = ExactSum(values, layout.replicas * layout.accumulate)
        traced[:] = [(sums, exact)]
        return exact.term(values)

    partial = _over_own(replica, layout, batch, count, state, work)
    sums, exact = traced[0]
    totals, seconds = timed(
        lambda tensors: exact.total(distribution, *partial._replace(whole=tensors[0])),
        [partial.whole, *partial.tops, *(array.flow for array in partial.kept)],
        clock,
    )
    gradients = len(sums.grads)
    behind = gradients + sums.scalars.shape[0]
    state.end(totals[behind:], count, distribution)
    return sums.with_tensors([*totals[:gradients], tf.stack(totals[gradients:behind])]), seconds


def outputs(
    replica: Replica,
    layout: Layout,
    batch: ReplicaBatch,
    count: tf.Tensor | int,
    predict: Callable[[MicroBatch], Structure],
) -> Structure:
    """Returns what `predict` returns for each of this replica's virtual replicas, tensors [rows, ...], concatenated."""
    state = VirtualState(replica.model, layout)
    traced: list[Structure] = []

    def work(rows: MicroBatch, part: tf.Tensor) -> tuple:
        traced[:] = [keras.tree.map_structure(lambda t: t[: rows.size], predict(rows))]
        drawn = state.drawn(part)
        return keras.tree.flatten(traced[0]), [], tf.stack(drawn) if drawn else tf.zeros([0], tf.int64)

    partial = _over_own(replica, layout, batch, count, state, work)
    state.put_back(tf.unstack(partial.whole))
    return keras.tree.pack_sequence_as(traced[0], [array.concat() for array in partial.kept])


def _over_own(
    replica: Replica,
    layout: Layout,
    batch: ReplicaBatch,
    count: tf.Tensor | int,
    state: VirtualState,
    work: Callable[[MicroBatch, tf.Tensor], tuple],
) -> _Partial:
    """Lets one compiled function do the work for each of this replica's virtual replicas.

    `work`: of the rows and the number among all micro-batches, returns the first three fields of `_Partial` for it.
    """
    written: set[int] = set()

    def one(micro: tf.Tensor, virtual: tf.Tensor) -> tuple:
        part = micro * layout.replicas + virtual
        written.update(state.begin(part))
        return work(replica.micro_batch(layout, batch, count, micro, virtual), part)

    number = tf.TensorSpec([], tf.int32)
    compiled = tf.function(one, autograph=False, input_signature=[number, number]).get_concrete_function()
    _check_graph(compiled.graph, written)
    kept, tops, whole = compiled.structured_outputs
    own = layout.of_device(replica.distribution.replicas, replica.distribution.replica_id())
    rounds = own.size * layout.accumulate
    arrays = [tf.TensorArray(t.dtype, rounds, element_shape=t.shape, infer_shape=False) for t in kept]

    def body(i: tf.Tensor, arrays: list, tops: list, whole: tf.Tensor) -> tuple:
        micro, virtual = (i // own.size, i % own.size) if layout.accumulate > 1 else (tf.constant(0), i)
        now_kept, now_tops, now_whole = compiled(micro, own.start + virtual)
        arrays = [array.write(i, value) for array, value in zip(arrays, now_kept)]
        return i + 1, arrays, [tf.maximum(a, b) for a, b in zip(tops, now_tops)], whole + now_whole

    start = tf.constant(0), arrays, [tf.zeros(t.shape, t.dtype) for t in tops], tf.zeros(whole.shape, whole.dtype)
    _, arrays, tops, whole = tf.while_loop(lambda i, *_: i < rounds, body, start, parallel_iterations=1)
    return _Partial(arrays, tops, whole, rounds)
