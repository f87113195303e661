"""Computes a few rows of the data in two ways: one replica has the whole batch, or its parts share it.

The number of rows does not divide evenly. Nothing of what is computed stays in the model.
"""

import contextlib
import dataclasses
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoints import training_state
from tfdist.config import user_functions
from tfdist.data.batch_layout import Batch, HostSlice, Layout, ReplicaBatch, host_slices
from tfdist.data.draws import written
from tfdist.data.spec import Structure
from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals, layer_state, metrics, preconditions
from tfdist.keras_bridge.loss import SAMPLE_ROWS
from tfdist.step import functions, own_step, step_calls
from tfdist.step.batch_loop import LogNames
from tfdist.step.replica import Replica
from tfdist.step.step import Step, spread_over

PIECE = 1 << 16  # numbers that are compared at a time
STATE, METRIC, OUTPUT = "the variable", "metric", "output"  # prefixes of the names of some values


class ProbeResult(NamedTuple):
    """Numbers computed from some rows."""

    values: dict[str, np.ndarray]  # losses, logs, metrics, outputs and the state of layers, by their names in messages
    gradient: list[np.ndarray]  # one array per weight that has one

    def is_finite(self) -> bool:
        """Returns whether all but the outputs, which a model may mean to be infinite, are finite."""
        values = [value for name, value in self.values.items() if not name.startswith(OUTPUT)]
        return all(np.isfinite(array).all() for array in (*values, *self.gradient))

    def distance(self, other: "ProbeResult") -> dict[str, float]:
        """Returns relative differences by name; of the gradient the norm over all weights.

        By weight it would raise false alarms: biases that change nothing are pure rounding.
        """
        distances = {name: _relative([value], [other.values[name]]) for name, value in self.values.items()}
        if self.gradient:
            distances["the gradient"] = _relative(self.gradient, other.gradient)
        return distances


def _as_array(value: tf.Tensor) -> np.ndarray:
    return np.asarray(tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value)


def _relative(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Returns the norm of the difference over that of `ours`, in float64, by pieces: gradients may be gigabytes."""
    size = apart = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape:
            return np.inf
        if a.dtype.kind in "OSU":
            apart += float((a != b).sum())
            size += a.size
            continue
        a, b = a.reshape(-1), b.reshape(-1)
        for start in range(0, a.size, PIECE):
            one, other = (array[start : start + PIECE].astype(np.float64) for array in (a, b))
            alike = (one == other) | (np.isnan(one) & np.isnan(other))  # infinities, too
            difference = np.where(alike, 0.0, one) - np.where(alike, 0.0, other)
            if not np.isfinite(difference).all():
                return np.inf
            apart += np.square(difference).sum()
            size += np.square(np.where(np.isfinite(one), one, 0.0)).sum()
    return float(np.sqrt(apart) / max(np.sqrt(size), 1e-6)) if apart else 0.0


class Comparison(NamedTuple):
    """Parts of a batch that are compared with one replica on the whole batch."""

    kind: str  # kind of computation: `train`, `test` or `predict`
    parts: str  # `replicas`, `virtual replicas` or `micro-batches`
    number: int  # number of the parts
    as_given: bool = False  # whether blank rows and weights stay as they are, since what they become gave no numbers
    divides: bool = False  # whether it divides the number of rows, as code needs it that takes a batch in equal parts

    def __str__(self) -> str:
        return f"{'1 and' if self.parts == 'replicas' else 'a batch and its'} {self.number} {self.parts}"


class _Function(NamedTuple):
    """The compiled function of one of the two ways."""

    call: Callable  # given the rows, their order and the factor of gradients, it returns values and gradient
    others: list[tf.Variable]
    """Variables that it may write besides those of `_unchanged`: weights to train, which SpectralNormalization sets,
    and some outside of the model, such as the generator of all calls of keras.random without a seed."""
    foreign: list[tf.Variable]
    """Those of them that it writes, that no object of Keras owns, and that are no state of a random generator."""


class EquivalenceProbe:
    """Computes the same rows, (x, y, weight) as far as needed, on one replica, and in the parts that share them.

    With `keras_only`, operation by operation: all code must be Keras', which computes the same where it is traced.
    With `on_each`, all rows are computed in parts on each device, or shared by all, and values are those of each.
    """

    def __init__(
        self,
        step: Step,
        rows: tuple[Structure, ...],
        comparison: Comparison,
        keras_only: bool = False,
        on_each: bool = False,
    ):
        self.step, self.rows, self.comparison, self._keras_only = step, rows, comparison, keras_only
        self._on_each = on_each
        self._distribution = step.distribution
        self._training = comparison.kind == "train"
        self._own = "" if comparison.kind == "predict" else step.own_steps[comparison.kind]
        self.own_training = bool(self._own) and self._training  # whether a step of its own makes an update
        self.adding: list[str] = []  # the layers that call `add_loss`
        self.computed_whole = False  # whether one replica has computed all rows
        self._full = False  # whether shapes tell the number of rows
        self._is_batch = False  # whether the rows are a whole batch, all of which count: code may ask how many they are
        self._gathered = training_state.gathered_variables(self.model)
        self._compiled: dict[tuple, _Function] = {}

    model = property(lambda self: self.step.model)  # a reference would keep it, since the step keeps the probe

    @property
    def count(self) -> int:
        """The number of rows that are computed."""
        comparison, available = self.comparison, int(keras.tree.flatten(self.rows)[0].shape[0])
        if self._distribution.static_shapes and self._own:  # which must see no filler
            return available - available % self._distribution.replicas or available
        rest = available % comparison.number
        if self._on_each:
            return available
        return available - (rest if comparison.divides else rest == 0 and not self._is_batch)

    def some_rows(self) -> list[list[int]]:
        """Returns rows that are to be computed alone, too, in parts as small as can be; none where shapes are static.

        A few show a maximum, or a count that ends, which has come to its end with more. A single row for each part
        shows a threshold that the mean over many rows is far from. What BatchNorm makes of so few is mostly rounding.
        """
        if self._distribution.static_shapes:
            return []
        number, parts = min(SAMPLE_ROWS - 1, self.count), min(self.comparison.number, self.count)
        number = number - number % parts or parts if self.comparison.divides else number
        few = np.linspace(0, self.count - 1, number).astype(int).tolist()
        single = [[(first + part * self.count // parts) % self.count for part in range(parts)] for first in range(4)]
        return [few] if keras_internals.batch_norms(self.model) else [few, *single]

    def draws_random_numbers(self) -> bool:
        """Returns whether the whole batch is computed with random numbers, or by Python, which may draw some."""
        graph = getattr(self._function(True, self.count).call, "graph", None)
        if graph is None:
            return True
        definition = graph.as_graph_def()
        nodes = [*definition.node, *(node for f in definition.library.function for node in f.node_def)]
        return any(word in node.op for node in nodes for word in ("Random", "PyFunc", "Multinomial"))

    def look_at(self, batch: tuple[Structure, ...], number: int) -> bool:
        """Goes on to so many rows of another batch; returns whether it can, as they have the shapes of those before."""
        try:
            self._is_batch = number == int(keras.tree.flatten(batch)[0].shape[0])
            rows = spread_over(batch[: len(self.rows)], number)
            keras.tree.assert_same_structure(rows, self.rows)
        except (ValueError, TypeError):
            return False
        alike = lambda a, b: a.shape[1:] == b.shape[1:] and a.dtype == b.dtype
        fits = all(map(alike, keras.tree.flatten(rows), keras.tree.flatten(self.rows)))
        self.rows = rows if fits else self.rows
        return fits

    def run(
        self, whole: bool, backwards: bool = False, times: int = 1, factor: float = 1.0, some: Sequence[int] = ()
    ) -> ProbeResult:
        """Computes all rows on every replica, as if it were the only one, or in the parts that share them.

        Args:
          some: only these rows, by number, if any.
          backwards: whether in the opposite order.
          times: returns the last of so many results, for which random generators have moved on.
          factor: of the gradients that a step of the user's own is given.
        """
        order = tf.constant(some or range(self.count), tf.int32)
        order = order[::-1] if backwards else order
        before: list[tuple[tf.Variable, np.ndarray]] = []
        counted = list[tuple[object, str, float]]()  # attributes of what the user has written that are numbers
        if tf.config.functions_run_eagerly():
            things = [*keras_internals.flat_layers(self.model), *keras_internals.compiled_with(self.model)]
            own = [thing for thing in things if user_functions.is_own(type(thing)) and hasattr(thing, "__dict__")]
            counted = [(t, name, n) for t in own for name, n in vars(t).items() if type(n) in (int, float)]
        try:
            with step_calls.eagerly(self._keras_only), self._unchanged():
                function = self._function(whole, len(order))
                before = [(variable, variable.numpy()) for variable in function.others]
                for _ in range(times):
                    if self.comparison.kind != "predict":
                        self.step.reset()
                    values, gradient = function.call(keras.tree.flatten(self.rows), order, tf.constant(factor))
                if self.comparison.parts != "micro-batches":  # see _kept
                    for variable in function.foreign:
                        values[f"{STATE} {_name(variable)!r}"] = tf.convert_to_tensor(variable)
        finally:
            for variable, value in before:
                variable.assign(value)
            moved = [entry for entry in counted if getattr(*entry[:2], entry[2]) != entry[2]]
            for owner, name, number in moved:
                setattr(owner, name, number)
            # TensorFlow has no line where replicas that count exchange other gradients.
            if moved and isinstance(sys.exc_info()[1], AssertionError | None):
                owner, name, _ = moved[0]
                raise UserError(
                    f"run_eagerly=True runs {type(owner).__name__} once for each of {self.comparison.number} "
                    f"{self.comparison.parts}, and it counts in Python ({name})",
                    "count in a variable (add_weight), compile without run_eagerly, or accept it with "
                    "--check_agreement=off",
                )
        self.computed_whole |= whole
        arrays = {name: _as_array(value) for name, value in values.items()}
        if backwards:
            arrays |= {name: value[::-1] for name, value in arrays.items() if value.ndim and name.startswith(OUTPUT)}
        return ProbeResult(arrays, [_as_array(g) for g in gradient])

    def _function(self, whole: bool, number: int) -> _Function:
        """Returns what computes so many rows."""
        model, layout = self.model, self._layout(whole, number if self._full else self.count)
        # As in a training whose batches differ, the graph does not know how many rows there are.
        is_open = not (layout.static or layout.virtual or layout.local or layout.full)
        key = whole, None if is_open else layout.batch
        if key in self._compiled:
            return self._compiled[key]
        call = tf.function(self._traced(whole, layout), autograph=False)
        trained = [] if self._own else [c for v in model.trainable_variables for c in keras_internals.copies(v)]
        foreign: list[tf.Variable] = []
        if tf.config.functions_run_eagerly():  # what Python writes is restored, and all weights may be gigabytes
            others = [] if self._keras_only else trained
        else:
            rows = tf.TensorSpec([layout.batch if layout.static or layout.full else None], tf.int32)
            leaves = keras.tree.flatten(self.rows)
            told = layout.full or layout.static or layout.virtual
            with layer_state.noting_writes() as writes, keras_internals.asking_rows() as asked:
                is_open |= layout.full  # the order says how many of them there are
                given = [tf.TensorSpec([None, *t.shape[1:]] if is_open else t.shape, t.dtype) for t in leaves]
                try:
                    call = call.get_concrete_function(given, rows, tf.TensorSpec([], tf.float32))
                except (TypeError, ValueError):
                    if not asked or told:
                        raise
            if asked and not told:
                self._full = True
                return self._function(whole, number)
            own_writes = layer_state.foreign(model, writes)
            known = {id(c) for v in [*model.variables, *model.metrics_variables] for c in keras_internals.copies(v)}
            others = [v for v in call.graph.variables if id(v) not in known]
            others += written(call.graph, trained)
            for write in own_writes:
                if len(write.threads) > 1:
                    step = {"train": "training", "test": "evaluation", "predict": "prediction"}[self.comparison.kind]
                    raise UserError(
                        f"the {step} step writes the variable {_name(write.variable)!r}, which belongs to no layer of "
                        f"the model, once for each of {self._distribution.replicas} replicas",
                        "create it in a layer with add_weight, or at least within the distribution's scope, or accept "
                        "it with --check_agreement=off",
                    )
                foreign.append(write.variable)
            others += [v for v in foreign if all(v is not other for other in others)]
        self._compiled[key] = _Function(call, others, foreign)
        return self._compiled[key]

    def _layout(self, whole: bool, number: int) -> Layout:
        comparison, distribution = self.comparison, self._distribution
        static = distribution.static_shapes
        if (whole and not self._on_each) or comparison.parts == "micro-batches":
            return Layout(number, 1, 1 if whole else comparison.number, static=static, full=self._full)
        virtual = comparison.parts == "virtual replicas"
        layout = Layout(number, comparison.number, 1, static=static and not virtual, virtual=virtual, full=self._full)
        if comparison.kind != "predict" or distribution.workers == 1:
            return layout
        # Outputs are gathered over the workers, which needs the rows of each.
        return layout.for_worker(distribution.replicas, distribution.first, len(distribution.devices))

    def _traced(self, whole: bool, layout: Layout) -> Callable:
        model, distribution, comparison = self.model, self._distribution, self.comparison
        replica, single = self.step.replica, whole or comparison.parts == "micro-batches"
        if single:
            one_device = distribution.devices[:1]  # with sums that are the identity
            same = dict[str, Any](replicas=1, devices=one_device, all_sum=lambda tensors: tensors, replica_id=lambda: 0)
            bare, replica = (
                replica.bare,
                Replica(model, dataclasses.replace(distribution, **same), jit=self._on_each and replica.jit),
            )
            replica.bare = bare
        predicted = functions.prediction_step(replica, layout, False) if comparison.kind == "predict" else None

        def one(leaves: list[tf.Tensor], taken: HostSlice | tf.Tensor) -> Any:
            rows = keras.tree.pack_sequence_as(self.rows, leaves)
            batch = taken if isinstance(taken, HostSlice) else Batch(rows, taken, tf.size(taken))
            if predicted:
                return predicted(batch)
            if single:  # which has all that a metric begins with
                for metric in model.metrics:
                    metric.reset_state()
            values, gradient = (self._own_step if self._own else self._compiled_pass)(replica, layout, batch)
            if single:
                results = metrics.of_replica(model, bool(self._own))
                values.update({f"{METRIC} {name!r}": value for name, value in results.items()})
            values.update(self._kept(replica))
            return values, gradient

        def call(leaves: list[tf.Tensor], order: tf.Tensor, factor: tf.Tensor) -> tuple[dict, list[tf.Tensor]]:
            of_replicas = order
            if layout.static:
                rows = keras.tree.pack_sequence_as(self.rows, leaves)
                given = host_slices(Batch(rows, order, tf.size(order)), layout)
                of_replicas = given[0] if single else distribution.per_replica(given)
            first = lambda value: distribution.local(value)[0]
            compared = first if not self._on_each else lambda value: tf.stack(distribution.local(value))
            with contextlib.ExitStack() as changes:
                changes.enter_context(replica.tracing())
                changes.enter_context(keras_internals.one_replica_in_sync() if single else contextlib.nullcontext())
                if self._own:
                    changes.enter_context(own_step.recording(model))
                    changes.enter_context(keras_internals.scaled_gradients(factor))
                # Of a batch that is taken apart on one replica, too, BatchNorm would normalize each part.
                apart = comparison.parts != "replicas" and self._training
                others = keras_internals.batch_norms(model) if apart else ()
                changes.enter_context(layer_state.inference_only(model, others))
                changes.enter_context(keras_internals.rows_draw_alike())
                results = distribution.run(one, (leaves, of_replicas))
            if comparison.kind == "predict":
                outputs = keras.tree.map_structure(first, results) if single else None
                outputs = functions.joined(distribution, layout, results) if outputs is None else outputs
                leaves, names = keras.tree.flatten(outputs), getattr(model, "output_names", None) or []
                labels = [repr(name) for name in names] if len(set(names)) == len(leaves) else range(len(leaves))
                return {f"{OUTPUT} {label}": leaf for label, leaf in zip(labels, leaves)}, []
            values, gradient = results
            values, gradient = keras.tree.map_structure(compared, (values, gradient))
            if not single:
                results = metrics.results(model, distribution, bool(self._own))
                values.update({f"{METRIC} {name!r}": value for name, value in results.items()})
            return values, gradient

        return call

    def _compiled_pass(self, replica: Replica, layout: Layout, batch: ReplicaBatch) -> tuple[dict, list[tf.Tensor]]:
        sums, *_ = functions.global_sums(replica, layout, batch, self._training)
        values = sums.by_term()
        if "add_loss" in values:
            self.adding = keras_internals.adding_losses(self.model)
        return values, [g for g in sums.gradients() if g is not None]

    def _kept(self, replica: Replica) -> dict[str, tf.Tensor]:
        """Returns the values after the pass of the variables that no optimizer writes.

        Statistics are averaged over the replicas before they are read, so a layer that counts its examples, or
        sums them up, has another state than on one replica. A weight that a step of the user's own assigns has the
        gradient of one replica's rows. Micro-batches are calls of their own to a layer, which may count them.
        """
        model = self.model
        if self.comparison.parts == "micro-batches":
            return {}
        means = [tf.cast(tf.convert_to_tensor(v.value), replica.totals) for v in self._gathered]
        if means:  # TensorFlow cannot reduce nothing
            means = replica.distribution.all_sum(means)
        kept = {v.path: total / replica.distribution.replicas for v, total in zip(self._gathered, means)}
        if self._training and self._own:
            alike = [*keras_internals.fixed_variables(model), *model.trainable_variables]
            alike += keras_internals.rate_variables(preconditions.optimizers(model)).values()
            kept.update({v.path: tf.convert_to_tensor(v.value) for v in alike})
        return {f"{STATE} {path!r}": value for path, value in kept.items()}

    def _own_step(self, replica: Replica, layout: Layout, batch: ReplicaBatch) -> tuple[dict, list[tf.Tensor]]:
        count, names = replica.count(layout, batch), LogNames()
        method = {"train": "train_step", "test": "test_step"}[self.comparison.kind]
        logs = own_step.run_step(replica, method, replica.micro_batch(layout, batch, count), count, names)
        values = {f"log {name!r}": logs[1 + i] for i, name in enumerate(names.plain)}
        return values, own_step.recorded()

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Restores, on every replica, all that a step may write, and the generators of Python and NumPy."""
        model = self.model
        written, frozen = model.variables, set[int]()
        if not self._own:  # what is frozen may be gigabytes
            written, frozen = model.non_trainable_variables, {*map(id, keras_internals.fixed_variables(model))}
        variables = {id(v): v for v in [*written, *model.metrics_variables] if id(v) not in frozen}
        of_numpy, of_python = np.random.get_state(), random.getstate()
        try:
            with layer_state.unchanged(list(variables.values())):
                yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)


def _name(variable: tf.Variable) -> str:
    return variable.name.partition(":")[0]
