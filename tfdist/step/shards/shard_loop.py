"""A global batch in shards: each replica computes its own one after the other, and the sums depend on no order.

All shards are computed by one compiled function of the shard's number. So the same operations see the same shapes on
any number of replicas, and what they give is the same bit for bit; `ExactSum` adds it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist.data.batch_layout import Layout, Rows, with_shape
from tfdist.data.structures import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.keras_bridge import freezing, keras_internals, metrics
from tfdist.step import graph_clock
from tfdist.step.partial_sums import Payload
from tfdist.step.replica import Replica, Taken
from tfdist.step.shards.exact_sum import ExactSum


class ShardState:
    """The state of a model before a global batch, during each shard, and after all; in replica context.

    Averages that layers keep, as BatchNorm does, become what they were plus the mean of the shards' changes; what they
    count, and what metrics sum up, grows by the sum. A random generator gets a state for each shard from its own,
    which moves on by one if any shard has drawn.

    Raises:
      UserError: a variable is neither a float nor an integer.
    """

    def __init__(self, model: keras.Model, layout: Layout):
        fixed = {id(v) for v in freezing.fixed(model)}
        of_losses = {id(v) for metric in keras_internals.loss_metrics(model) if metric for v in metric.variables}
        sums = {id(v): v for v in model.metrics_variables if id(v) not in of_losses}
        rest = [v for v in model.non_trainable_variables if id(v) not in fixed | of_losses and id(v) not in sums]
        self._sums = list(sums.values())
        self._seeds = [v for v in rest if keras_internals.is_seed(v)]
        self._kept = [v for v in rest if not keras_internals.is_seed(v)]
        for variable in (*self._kept, *self._sums):
            dtype = tf.as_dtype(variable.dtype)
            if not (dtype.is_floating or dtype.is_integer):
                raise UserError(f"shards cannot add up {variable.path}, which is {dtype.name}: leave shards out")
        self._parts = layout.replicas * layout.accumulate
        # Outside of the shards, where nothing has changed yet.
        self._before = {id(v): _read(v) for v in (*self._sums, *self._seeds, *self._kept)}
        self._streams = [self._stream(self._before[id(v)]) for v in self._seeds]

    def _stream(self, state: tf.Tensor) -> tf.Tensor:
        """The state of a generator for each shard, [shards, 2]: drawn from its own, so that none follows another."""
        return tf.random.stateless_uniform(
            [self._parts, 2], tf.cast(state, tf.int64), minval=None, maxval=None, dtype=tf.uint32, alg="philox"
        )

    def begin(self, part: tf.Tensor) -> set[int]:
        """Sets the state for a shard, while its graph is traced.

        Args:
          part: its number among those of all micro-batches.

        Returns:
          The ids of the tensors that stand for these variables in that graph.
        """
        for variable, stream in zip(self._seeds, self._streams):
            _assign(variable, tf.cast(stream[part], self._before[id(variable)].dtype))
        for variable in self._kept:
            _assign(variable, self._before[id(variable)])
        for variable in self._sums:
            _assign(variable, tf.zeros_like(self._before[id(variable)]))
        graph = tf.compat.v1.get_default_graph()
        return {id(graph.capture(v.value.handle)) for v in (*self._seeds, *self._kept, *self._sums)}

    def changes(self, part: tf.Tensor) -> list[tf.Tensor]:
        """Returns what the shard has changed, to be added up over all shards; arguments as for `begin`."""
        changes = [_read(v) for v in self._sums]
        changes += [_read(v) - self._before[id(v)] for v in self._kept]
        return [*changes, *self.drawn(part)]

    def drawn(self, part: tf.Tensor) -> list[tf.Tensor]:
        """Returns for each random generator 1 if the shard has drawn from it, else 0; arguments as for `begin`."""
        states = [tf.cast(_read(v), tf.uint32) for v in self._seeds]
        moved = [tf.not_equal(now, stream[part]) for now, stream in zip(states, self._streams)]
        return [tf.cast(tf.reduce_any(m), tf.int64) for m in moved]

    def end(self, changes: Sequence[tf.Tensor], examples: tf.Tensor | int, distribution: Distribution) -> None:
        """Sets the state after all shards.

        Args:
          changes: the sums of what `changes` gave.
          examples: of the global batch; shards without any have changed nothing.
        """
        remaining = iter(changes)
        first = tf.equal(distribution.replica_id(), 0)
        shards = tf.minimum(examples, self._parts)
        for variable in self._sums:  # which are read as the sum over the replicas
            before, change = self._before[id(variable)], next(remaining)
            _assign(variable, before + tf.where(first, change, tf.zeros_like(change)))
        for variable in self._kept:
            before, change = self._before[id(variable)], next(remaining)
            mean = change / tf.cast(shards, change.dtype) if change.dtype.is_floating else change
            _assign(variable, before + mean)
        self._move_on(list(remaining))

    def put_back(self, drawn: Sequence[tf.Tensor]) -> None:
        """Sets the state after a prediction, which changes nothing but random generators.

        Args:
          drawn: sums of what `drawn` gave.
        """
        for variable in (*self._sums, *self._kept):
            _assign(variable, self._before[id(variable)])
        self._move_on(drawn)

    def _move_on(self, drawn: Sequence[tf.Tensor]) -> None:
        for variable, times in zip(self._seeds, drawn):
            before = self._before[id(variable)]
            _assign(variable, tf.stack([before[0], before[1] + tf.cast(tf.minimum(times, 1), before.dtype)]))


def _read(variable: keras.Variable) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=variable.value.handle, dtype=variable.value.dtype)


def _assign(variable: keras.Variable, value: tf.Tensor) -> None:
    # Not the variable's own assign, which would meet the other replicas: each writes its copy.
    tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=value)


RANDOM = (
    "AllCandidateSampler",
    "FixedUnigramCandidateSampler",
    "FractionalAvgPool",
    "FractionalMaxPool",
    "LearnedUnigramCandidateSampler",
    "LogUniformCandidateSampler",
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomCrop",
    "RandomGamma",
    "RandomPoisson",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "RngReadAndSkip",
    "RngSkip",
    "SampleDistortedBoundingBox",
    "SampleDistortedBoundingBoxV2",
    "StatefulRandomBinomial",
    "StatefulStandardNormal",
    "StatefulStandardNormalV2",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "StatefulUniformFullInt",
    "StatefulUniformInt",
    "ThreadUnsafeUnigramCandidateSampler",
    "TruncatedNormal",
    "UniformCandidateSampler",
)
"""Operations whose numbers depend on what a device has drawn before."""
PYTHON = ("EagerPyFunc", "PyFunc")
"""Operations that call Python, which may draw numbers and keep a state that no graph shows; `PyFuncStateless` promises
that it does not."""
_WRITES = ("Assign", "ResourceScatter")
"""How the names of operations begin that change a variable."""


def _check_graph(graph: tf.Graph, own: set[int]) -> None:
    """Refuses what would make a shard depend on the device that computes it, or on what that has computed before.

    Args:
      graph: of a shard.
      own: ids of the tensors in it that are variables which `ShardState` takes care of.

    Raises:
      UserError: naming what it is.
    """
    functions = graph.as_graph_def().library.function
    kinds = {op.type for op in graph.get_operations()} | {node.op for f in functions for node in f.node_def}
    for kind in sorted(kinds.intersection(RANDOM)):
        raise UserError(
            f"the model draws random numbers by TensorFlow's {kind}, which depend on the device: draw them by "
            "keras.random with a keras.random.SeedGenerator that is an attribute of the layer, or leave shards out"
        )
    for kind in sorted(kinds.intersection(PYTHON)):
        raise UserError(
            f"the model calls Python ({kind}), whose random numbers and counts would depend on the device: use "
            "tf.numpy_function(..., stateful=False) if it has none, or leave shards out"
        )
    if any(id(variable) not in own for variable in _written(graph)):
        raise UserError(
            "a forward pass changes a variable that is no state of a layer or metric (a trained weight, or that of "
            "a keras.random call without a seed), which cannot be added up over shards: make it a weight with "
            "trainable=False, give the call a SeedGenerator of the layer, or leave shards out"
        )


def _written(graph: tf.Graph) -> Iterator[tf.Tensor]:
    """Yields the variables that are changed in a graph, or in a branch, a loop or a function that it calls."""
    handles = {id(variable.handle) for variable in graph.variables}
    variables = {id(inner) for outer, inner in graph.captures if id(outer) in handles}
    for op in graph.get_operations():
        if op.type.startswith(_WRITES):
            yield op.inputs[0]
            continue
        only_read = keras_internals.only_read(op)
        if only_read is not None:  # which may have tables among its resources, too
            yield from (t for i, t in enumerate(op.inputs) if id(t) in variables and i not in only_read)


class ShardResult(NamedTuple):
    """What the shards of a global batch come to."""

    payload: Payload
    """The sums over all shards."""
    seconds: tf.Tensor | None
    """That this replica has spent with the sums; None where no clock is read."""


class _KeptOfShards(NamedTuple):
    """What the shards of one replica give."""

    each: list[tf.TensorArray]
    """Tensors of every shard."""
    most: list[tf.Tensor]
    """The maximum over the shards of other tensors."""
    sums: tf.Tensor
    """The sum of whole numbers."""
    number: tf.Tensor | int
    """Shards of this replica, in all micro-batches."""


class ShardLoop:
    """What one replica does with a global batch in shards; called in replica context, while a step is traced.

    Args:
      layout: with shards.
    """

    def __init__(self, replica: Replica, layout: Layout):
        self._replica, self._layout = replica, layout
        self._payload: Payload
        self._sum: ExactSum
        self._outputs: Structure = None
        self._own: set[int] = set()

    def run(
        self, batch: Taken, examples: tf.Tensor | int, training: bool, scale: tf.Tensor | None = None
    ) -> ShardResult:
        """Runs forward, and for training backward, over all shards, and updates metrics and states of layers.

        Args:
          batch: the global batch.
          examples: how many it has.
          scale: as for `Replica.passes`.

        Raises:
          UserError: the model draws random numbers, or changes variables, in a way that depends on the device.
        """
        replica, layout, distribution = self._replica, self._layout, self._replica.distribution
        state = ShardState(replica.model, layout)

        def work(micro: tf.Tensor, shard: tf.Tensor) -> tuple:
            part = micro * layout.replicas + shard
            self._own = state.begin(part)
            rows = replica.take(layout, batch, examples, micro, shard)
            self._payload, outputs = replica.passes(rows, examples, training, scale)
            metrics.update(replica.model, distribution, rows, outputs)
            # Each sum has a unit of its own: losses and counts may be far apart.
            values = [*self._gradients(), *tf.unstack(self._payload.sums), *state.changes(part)]
            self._sum = ExactSum(values, layout.replicas * layout.accumulate)
            return self._sum.term(values)

        kept = self._over_own(work)
        begun = None
        if distribution.times_sums:
            begun = graph_clock.now(*kept.most, kept.sums, *(array.flow for array in kept.each))
            kept = kept._replace(sums=graph_clock.after(begun, kept.sums))
        totals = self._sum.total(distribution, *kept)
        seconds = None if begun is None else graph_clock.now(*totals) - begun
        gradients = len(self._payload.grads)
        behind = gradients + self._payload.sums.shape[0]
        state.end(totals[behind:], examples, distribution)
        payload = self._payload.with_tensors([*totals[:gradients], tf.stack(totals[gradients:behind])])
        return ShardResult(payload, seconds)

    def _gradients(self) -> list[tf.Tensor]:
        """The gradients of a shard; those of an embedding do not know their shape."""
        variables = self._replica.model.trainable_variables
        present = [variables[i] for group in self._payload.layout for i, there in enumerate(group) if there]
        return [with_shape(g, v.shape) for g, v in zip(self._payload.grads, present, strict=True)]

    def outputs(self, batch: Taken, examples: tf.Tensor | int, of_rows: Callable[[Rows], Structure]) -> Structure:
        """Returns what `of_rows` makes of each of this replica's shards, tensors [rows, ...], behind each other."""
        layout = self._layout
        state = ShardState(self._replica.model, layout)

        def work(micro: tf.Tensor, shard: tf.Tensor) -> tuple:
            part = micro * layout.replicas + shard
            self._own = state.begin(part)
            rows = self._replica.take(layout, batch, examples, micro, shard)
            self._outputs = keras.tree.map_structure(lambda t: t[: rows.number], of_rows(rows))
            drawn = state.drawn(part)
            return keras.tree.flatten(self._outputs), [], tf.stack(drawn) if drawn else tf.zeros([0], tf.int64)

        kept = self._over_own(work)
        state.put_back(tf.unstack(kept.sums))
        return keras.tree.pack_sequence_as(self._outputs, [array.concat() for array in kept.each])

    def _over_own(self, work: Callable[[tf.Tensor, tf.Tensor], tuple]) -> _KeptOfShards:
        """Lets one compiled function do the work for each of this replica's shards.

        Args:
          work: of the numbers of micro-batch and shard, gives tensors of which each is kept, tensors of which the
            maximum is, and one of which the sum is.
        """
        replica, layout = self._replica, self._layout
        number = tf.TensorSpec([], tf.int32)
        compiled = tf.function(work, autograph=False, input_signature=[number, number]).get_concrete_function()
        _check_graph(compiled.graph, self._own)
        each, most, sums = compiled.structured_outputs
        own = layout.of_device(replica.distribution.replicas, replica.distribution.replica_id())
        rounds = own.rows * layout.accumulate
        arrays = [tf.TensorArray(t.dtype, rounds, element_shape=t.shape, infer_shape=False) for t in each]

        def body(i: tf.Tensor, arrays: list, most: list, sums: tf.Tensor) -> tuple:
            micro, shard = (i // own.rows, i % own.rows) if layout.accumulate > 1 else (tf.constant(0), i)
            now_each, now_most, now_sums = compiled(micro, own.start + shard)
            arrays = [array.write(i, value) for array, value in zip(arrays, now_each)]
            return i + 1, arrays, [tf.maximum(a, b) for a, b in zip(most, now_most)], sums + now_sums

        start = tf.constant(0), arrays, [tf.zeros(t.shape, t.dtype) for t in most], tf.zeros(sums.shape, sums.dtype)
        _, arrays, most, sums = tf.while_loop(lambda i, *_: i < rounds, body, start, parallel_iterations=1)
        return _KeptOfShards(arrays, most, sums, rounds)
