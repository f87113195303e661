"""A few rows of the data, computed in two ways: by one replica that has them all, and by the parts that share them.

The number of rows does not divide evenly. Nothing of what is computed stays in the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoints import training_state
from tfdist.data import static_rows
from tfdist.data.batch_layout import Batch, Layout
from tfdist.data.static_rows import Given
from tfdist.data.structures import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.keras_bridge import batch_norm, freezing, keras_internals, layer_state, metrics, random_layers
from tfdist.step import own_step_call, prediction_call
from tfdist.step.replica import Replica, Taken
from tfdist.step.results import LogNames
from tfdist.step.shards.shard_loop import ShardLoop
from tfdist.step.step import Step
from tfdist.verification import computed
from tfdist.verification.computed import METRIC, OUTPUT, STATE, Computed


class Question(NamedTuple):
    """What is compared with the work of one replica on a whole batch."""

    kind: str
    """Of what is computed: `train`, `test` or `predict`."""
    parts: str
    """What shares the rows: `replicas`, `shards` or `micro-batches`."""
    number: int
    """Of the parts."""

    def __str__(self) -> str:
        return (
            f"1 and {self.number} replicas"
            if self.parts == "replicas"
            else f"a batch and its {self.number} {self.parts}"
        )


class _Function(NamedTuple):
    """One of the two ways."""

    call: Callable
    """Given the order of the rows, it returns values and gradient."""
    others: list[tf.Variable]
    """What it may write besides what `_unchanged` knows: weights to train, which SpectralNormalization sets, and what
    is none of the model's, such as the generator of all calls of keras.random without a seed."""


class TwoWays:
    """The functions that compute the same rows in two ways.

    Args:
      step: of the model.
      rows: (x, y, weight), as far as they are needed.
      question: what is compared.
    """

    def __init__(self, step: Step, rows: tuple[Structure, ...], question: Question):
        self._step, self._rows, self._question = step, rows, question
        self.model = step.model
        self._distribution = step.distribution
        self._training = question.kind == "train"
        self._own = "" if question.kind == "predict" else step.own_step(question.kind)
        least = int(keras.tree.flatten(rows)[0].shape[0])
        self._count = least - (least % question.number == 0)
        if self._distribution.static_shapes and self._own:  # which must see no filler
            self._count = least - least % self._distribution.replicas or least
        self.adding: list[str] = []
        """The layers that call `add_loss`."""
        self._compiled: dict[bool, _Function] = {}

    def alone(self, backwards: bool = False) -> Computed:
        """Computes all rows on every replica, as if it were the only one; backwards in the opposite order."""
        return self._run(True, backwards)

    def again(self) -> Computed:
        """Computes the same as `alone` a second time, where random generators have moved on."""
        return self._run(True, False, times=2)

    def shared(self) -> Computed:
        """Computes the rows in the parts that share them."""
        return self._run(False, False)

    def _run(self, alone: bool, backwards: bool, times: int = 1) -> Computed:
        order = tf.range(self._count)[::-1] if backwards else tf.range(self._count)
        with self._unchanged():
            function = self._function(alone)
            before = [variable.numpy() for variable in function.others]
            try:
                for _ in range(times):
                    if self._question.kind != "predict":
                        self._step.reset()
                    values, gradient = function.call(order)
            finally:
                for variable, value in zip(function.others, before):
                    variable.assign(value)
        arrays = {name: computed.array(value) for name, value in values.items()}
        if backwards:
            arrays.update({name: value[::-1] for name, value in arrays.items() if name.startswith(OUTPUT)})
        return Computed(arrays, [computed.array(g) for g in gradient])

    def _function(self, alone: bool) -> _Function:
        if alone in self._compiled:
            return self._compiled[alone]
        model = self._step.model
        call = tf.function(self._traced(alone), autograph=False)
        trained = [] if self._own else [c for v in model.trainable_variables for c in training_state.copies(v)]
        if tf.config.functions_run_eagerly():
            others = trained
        else:
            # As in a training, the graph does not know how many rows there are, unless all shapes must be known: Keras
            # takes what has one column and as many rows as another tensor has columns for a bias (keras.ops.add).
            rows = self._count if self._distribution.static_shapes else None
            call = call.get_concrete_function(tf.TensorSpec([rows], tf.int32))
            known = {id(c) for v in [*model.variables, *model.metrics_variables] for c in training_state.copies(v)}
            others = [v for v in call.graph.variables if id(v) not in known]
            others += _writable(call.graph, trained)
        self._compiled[alone] = _Function(call, others)
        return self._compiled[alone]

    def _layout(self, alone: bool) -> Layout:
        question, distribution = self._question, self._distribution
        if alone or question.parts == "micro-batches":
            micro = 1 if alone else question.number
            return Layout(self._count, 1, micro, static=distribution.static_shapes)
        if question.parts == "shards":
            layout = Layout(self._count, question.number, 1, shards=True)
        else:
            layout = Layout(self._count, question.number, 1, static=distribution.static_shapes)
        if question.kind != "predict" or distribution.workers == 1:
            return layout
        # Outputs are gathered over the workers, which wants to know who has which.
        here = len(distribution.devices)
        if not layout.shards:
            return dataclasses.replace(layout, first=distribution.first, local=here)
        first = layout.of_device(distribution.replicas, distribution.first)
        last = layout.of_device(distribution.replicas, distribution.first + here - 1)
        return dataclasses.replace(layout, first=first.start, local=last.start + last.rows - first.start)

    def _traced(self, alone: bool) -> Callable:
        model, distribution, question = self._step.model, self._distribution, self._question
        replica, single = self._step.replica, alone or question.parts == "micro-batches"
        if single:
            bare, replica = replica.bare, Replica(model, _single(distribution), jit=False)
            replica.bare = bare
        layout = self._layout(alone)
        predicted = prediction_call.rows_predicted(replica, layout)

        def one(taken: Given | tf.Tensor) -> Any:
            batch = taken if isinstance(taken, Given) else Batch(self._rows, taken, tf.size(taken))
            if question.kind == "predict":
                return predicted(batch)
            if single:  # which has all that a metric begins with
                for metric in model.metrics:
                    metric.reset_state()
            values, gradient = (self._own_step if self._own else self._compiled_pass)(replica, layout, batch)
            if single:
                values.update(_named(metrics.of_replica(model, bool(self._own))))
            values.update(self._kept(replica))
            return values, gradient

        def call(order: tf.Tensor) -> tuple[dict[str, tf.Tensor], list[tf.Tensor]]:
            of_replicas = order
            if layout.static:
                given = static_rows.given(Batch(self._rows, order, tf.size(order)), layout)
                of_replicas = given[0] if single else distribution.per_replica(given)
            first = lambda value: distribution.local(value)[0]
            with contextlib.ExitStack() as changes:
                changes.enter_context(replica.tracing())
                changes.enter_context(keras_internals.one_replica_in_sync() if single else contextlib.nullcontext())
                changes.enter_context(own_step_call.recording(model, bool(self._own)))
                # Of a batch that is taken apart on one replica, too, BatchNorm would normalize each part.
                apart = question.parts != "replicas" and self._training
                changes.enter_context(random_layers.held(model, batch_norm.batch_norms(model) if apart else ()))
                results = distribution.run(one, (of_replicas,))
            if question.kind == "predict":
                outputs = keras.tree.map_structure(first, results) if single else None
                outputs = prediction_call.joined(distribution, layout, results) if outputs is None else outputs
                return {f"{OUTPUT} {name}": o for name, o in self._output_names(outputs)}, []
            values, gradient = results
            values, gradient = {n: first(v) for n, v in values.items()}, [first(g) for g in gradient]
            if not single:
                values.update(_named(metrics.results(model, distribution, bool(self._own))))
            return values, gradient

        return call

    def _output_names(self, outputs: Structure) -> list[tuple[str, tf.Tensor]]:
        """Returns the outputs beside what a message calls them: Keras' names, or their number."""
        leaves = keras.tree.flatten(outputs)
        names = getattr(self._step.model, "output_names", None) or []
        return (
            list(zip((f"{name!r}" for name in names), leaves))
            if len(names) == len(leaves)
            else [(f"{i}", leaf) for i, leaf in enumerate(leaves)]
        )

    def _compiled_pass(self, replica: Replica, layout: Layout, batch: Taken) -> tuple[dict, list[tf.Tensor]]:
        model = self._step.model
        count = replica.count(layout, batch)
        if layout.shards:
            payload = ShardLoop(replica, layout).run(batch, count, self._training).payload
        else:
            sums: list[tf.Tensor] = []
            for micro in range(layout.accumulate):
                rows = replica.take(layout, batch, count, micro)
                payload, outputs = replica.passes(rows, count, self._training)
                self.adding = keras_internals.adding_losses(model)
                metrics.update(model, replica.distribution, rows, outputs)
                sums = payload.plus(sums).tensors() if sums else payload.tensors()
            payload = payload.with_tensors(replica.distribution.all_sum(sums))
        return payload.by_part(), [g for g in payload.gradients() if g is not None]

    def _kept(self, replica: Replica) -> dict[str, tf.Tensor]:
        """Returns what the pass has made of the variables that no optimizer writes.

        Statistics are averaged over the replicas before anybody looks at them, so a layer that counts its examples, or
        sums them up, has another state than on one replica. A weight that a step of the user's own assigns has the
        gradient of one replica's rows. Micro-batches are calls of their own to a layer, which may count them.
        """
        model = self._step.model
        if self._question.parts == "micro-batches":
            return {}
        alike = [*freezing.fixed(model), *model.trainable_variables] if self._training and self._own else []
        gathered = training_state.gathered_variables(model)
        means = [tf.cast(tf.convert_to_tensor(v.value), replica.totals) for v in gathered]
        if means:  # TensorFlow cannot reduce nothing
            means = replica.distribution.all_sum(means)
        kept = {v.path: total / replica.distribution.replicas for v, total in zip(gathered, means)}
        kept.update({v.path: tf.convert_to_tensor(v.value) for v in alike})
        return {f"{STATE} {path!r}": value for path, value in kept.items()}

    def _own_step(self, replica: Replica, layout: Layout, batch: Taken) -> tuple[dict, list[tf.Tensor]]:
        count, names = replica.count(layout, batch), LogNames()
        method = {"train": "train_step", "test": "test_step"}[self._question.kind]
        logs = own_step_call.run_step(replica, method, replica.take(layout, batch, count), count, names)
        values = {f"log {name!r}": logs[1 + i] for i, name in enumerate(names.plain)}
        return values, own_step_call.recorded()

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Gives all that a step may write back, after it, what it had, on every replica; optimizers do nothing in it.

        What Python draws from its own generators is drawn again, too.
        """
        model = self._step.model
        frozen = set() if self._own else {id(v) for v in freezing.fixed(model)}  # which may be gigabytes
        written = model.variables if self._own else model.non_trainable_variables
        variables = {id(v): v for v in [*written, *model.metrics_variables] if id(v) not in frozen}
        of_numpy, of_python = np.random.get_state(), random.getstate()
        try:
            with layer_state.unchanged(list(variables.values())):
                yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)


_READING = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"}
"""Operations that write nothing to the variable that they are given."""


def _writable(graph: tf.Graph, variables: list[tf.Variable]) -> list[tf.Variable]:
    """Returns which of these a graph may write: those that go to more than an operation that reads.

    All weights would be gigabytes to keep, for each replica.
    """
    of_handle = {id(v.handle): v for v in variables}
    captured = [(of_handle.get(id(outer)), inner) for outer, inner in graph.captures]
    return [v for v, inner in captured if v is not None and any(o.type not in _READING for o in inner.consumers())]


def _named(results: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {f"{METRIC} {name!r}": value for name, value in results.items()}


def _single(distribution: Distribution) -> Distribution:
    """Returns the same, with which a replica believes itself to be the only one."""
    return dataclasses.replace(
        distribution,
        replicas=1,
        devices=distribution.devices[:1],
        all_sum=lambda tensors: tensors,
        replica_id=lambda: 0,
    )
