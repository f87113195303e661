"""`train_on_batch`, `test_on_batch` and `predict_on_batch` of Keras: one global batch, one compiled function.

Scripts call them in loops, again and again, so that all that can be prepared is, at the first call after `compile()`.
"""

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoints import training_state
from tfdist.config.runtime_options import checked_keywords
from tfdist.data import arrays, python_batches, sources
from tfdist.data.spec import Structure
from tfdist.distributed import connect
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals, layer_state, metrics, preconditions, zero
from tfdist.step import step_calls
from tfdist.step.batch_loop import CallResult, as_python
from tfdist.verification import equivalence_check
from tfdist.verification.replica_sync_check import ReplicaSyncCheck

_ANY = 1 << 30  # batch of a layout whose functions take any number of examples


@checked_keywords
def train_on_batch(
    model: keras.Model,
    x: Structure,
    y: Structure = None,
    sample_weight: Structure = None,
    class_weight: Mapping[int, float] | None = None,
    return_dict: bool = False,
    *,
    distribution: Distribution | None = None,
    virtual_replicas: int = 0,
    check_agreement: str = "auto",
) -> Any:
    """Makes one update of a compiled model with one global batch, as `model.train_on_batch` does.

    Args:
      x, y, sample_weight: of all rows; every worker gives the same ones, and computes those of its replicas.
      class_weight: weight of the examples of each class.
      return_dict: return values by name, and not in Keras' order.
      distribution, virtual_replicas: as for `fit`.
      check_agreement: as for `fit`, at the first call.

    Raises:
      UserError: the model, data or arguments do not fit together.
      TrainingError: a worker is lost, or the replicas have come apart.
    """
    if class_weight is not None and sample_weight is not None:
        raise UserError("sample_weight and class_weight both weigh the examples", "give one of them")
    columns = _columns((x, y, sample_weight))
    if class_weight is not None:
        columns = sources.weigh_classes(arrays.Arrays(columns), class_weight, model.loss).columns or ()
    return _logs(model, "train", columns, _Options(distribution, virtual_replicas, check_agreement), return_dict)


@checked_keywords
def test_on_batch(
    model: keras.Model,
    x: Structure,
    y: Structure = None,
    sample_weight: Structure = None,
    return_dict: bool = False,
    *,
    distribution: Distribution | None = None,
    virtual_replicas: int = 0,
    check_agreement: str = "auto",
) -> Any:
    """Measures one global batch, as `model.test_on_batch` does; for arguments and errors see `train_on_batch`."""
    columns = _columns((x, y, sample_weight))
    return _logs(model, "test", columns, _Options(distribution, virtual_replicas, check_agreement), return_dict)


@checked_keywords
def predict_on_batch(
    model: keras.Model,
    x: Structure,
    *,
    distribution: Distribution | None = None,
    virtual_replicas: int = 0,
    check_agreement: str = "auto",
) -> Structure:
    """Returns the model's outputs for one global batch, NumPy arrays, as `model.predict_on_batch` does."""
    columns = _columns((x,))
    run = _prepared(model, "predict", columns, _Options(distribution, virtual_replicas, check_agreement))
    outputs, _ = run(columns)
    return keras.tree.map_structure(lambda output: output.numpy(), outputs)


def _columns(data: tuple) -> tuple:
    """Returns (x,), (x, y) or (x, y, weight), tensors in the memory of the host, in Keras' type of numbers."""
    floats = keras.config.floatx()

    def column(value: object) -> tf.Tensor:
        if isinstance(value, tf.Tensor):
            return tf.cast(value, floats) if value.dtype.is_floating else value
        array = python_batches.array(value)
        return arrays.tensor(array.astype(floats, copy=False) if array.dtype.kind == "f" else array)

    return keras.tree.map_structure(column, python_batches.without_missing(data))


class _Options(NamedTuple):
    """As for `fit`."""

    distribution: Distribution | None
    virtual_replicas: int
    check_agreement: str


def _logs(model: keras.Model, kind: str, columns: tuple, options: _Options, return_dict: bool) -> Any:
    run = _prepared(model, kind, columns, options)
    result = CallResult(*run(columns))
    logs = run.totals.add(result) if run.totals else {k: as_python(value) for k, value in result.metrics.items()}
    return logs if return_dict else keras_internals.metrics_in_order(model, logs)


_PREPARED: weakref.WeakKeyDictionary[keras.Model, dict[str, "_OnBatch"]] = weakref.WeakKeyDictionary()
"""By `train`, `test` or `predict`, of each model."""


def _prepared(model: keras.Model, kind: str, columns: tuple, options: _Options) -> "_OnBatch":
    """Returns what was prepared for these calls since the model was compiled."""
    distribution = options.distribution or connect.current(model.distribute_strategy)
    prepared = _PREPARED.setdefault(model, {})
    parts = step_calls.compiled_parts(model, distribution)
    key = (distribution.jit, options.virtual_replicas, *step_calls.functions_of_keras(model), *map(id, parts))
    if kind not in prepared or prepared[kind].key != key:
        prepared[kind] = _OnBatch(model, kind, columns, distribution, options)
        prepared[kind].key, prepared[kind].owners = key, parts
    return prepared[kind]


class _Batch(arrays.Arrays):
    """The first batch as a source."""

    bare = None


class _OnBatch:
    """Calls of one kind for a model, as it is compiled.

    What is trained is decided by the first one, as in Keras: a GAN's discriminator may be frozen afterwards.
    """

    key: tuple[object, ...]  # what it was made for
    owners: tuple  # of the ids in it; held, or other objects could take them

    def __init__(self, model: keras.Model, kind: str, columns: tuple, distribution: Distribution, options: _Options):
        preconditions.among("check_agreement", options.check_agreement, equivalence_check.CHOICES)
        virtual, self.kind, self._bare = options.virtual_replicas, kind, False if kind == "predict" else None
        if kind != "predict":
            preconditions.model_fits(model, distribution, 1, virtual)
        else:
            preconditions.scope(model, distribution, virtual)
        source = _Batch(keras.tree.map_structure(np.asarray, columns))
        self._first = source.size
        self._layout = sources.layout_of(source, source.size, distribution, 1, least=False, virtual_replicas=virtual)
        self.step = step = step_calls.step_of(model, distribution, source, kind == "predict", source.size)
        step.replica.bare = self._bare
        self._sync_check = ReplicaSyncCheck(distribution, optimizers=kind == "train")
        averaged: list[keras.Variable] = []
        if kind == "train":
            self._prepare_training(source, options)
            averaged = layer_state.averaged(model) if distribution.replicas > 1 and not virtual else []
        else:
            layer_state.average_statistics(model, distribution, virtual)
            equivalence_check.check_forward(step, kind, source, options.check_agreement, virtual)
        self._average = layer_state.averaging(averaged, distribution)
        if kind != "predict":
            preconditions.targets(model, step.output_shape, source)
            self.totals = step.totals(kind) if step.own_steps[kind] else None
        # By shapes and types of a batch: the function, the number of examples, and the rows of this worker, if several.
        self._functions: dict[tuple, tuple[Callable, tf.Tensor, slice | None]] = {}
        self._late = False  # whether a metric has created variables while it was traced, after the reset
        self._batches = tf.constant(0), tf.constant(1)  # from and to which batch of a feed
        self._calls = 0
        self._repeated = equivalence_check.RepeatedCheck(step, kind, options.check_agreement, virtual)

    def _prepare_training(self, source: sources.Source, options: _Options) -> None:
        step, model, distribution = self.step, self.step.model, self.step.distribution
        zero.ready(model, distribution, 0)
        step_calls.trains(model)
        step.prepare_training()
        training_state.separate_streams(model, distribution, apart=not options.virtual_replicas)
        with layer_state.unchanged(training_state.gathered_variables(model)):
            equivalence_check.check_training(step, source, options.check_agreement, options.virtual_replicas)

    def __call__(self, columns: tuple) -> tuple:
        """Returns what the compiled function returns for a batch, see `Step.compiled`."""
        step, leaves, batch = self.step, keras.tree.flatten(columns), columns
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        step.replica.bare = self._bare
        call, count, rows = self._functions.get(shapes) or self._function(shapes, columns)
        self._compare(leaves)
        if self.kind != "predict":
            metrics.count_reset(step.model)  # or it goes unseen by a `fit` whose callback this is
        if rows:
            columns = keras.tree.map_structure(lambda tensor: tensor[rows], columns)
        if self._late:
            step.reset()
        arguments = ((columns, count), *self._batches[: 1 if self.kind == "predict" else 2])
        updates = self._calls - 1 if self.kind == "train" else None
        variables = None if id(call) in step.warm else len(step.model.metrics_variables)
        result = step_calls.run(step, call, arguments, None, updates)
        if variables is not None and variables != len(step.model.metrics_variables):
            self._late = keras_internals.RESETS_ON_BATCH
        self._repeated.after(1, lambda: batch)
        self._average()  # somebody may read or save the statistics at any time
        return result

    def _function(self, shapes: tuple, columns: tuple) -> tuple[Callable, tf.Tensor, slice | None]:
        """Returns the compiled function for a batch: one for as many rows as the first has, one for any others."""
        step, layout, size = self.step, self._layout, arrays.Arrays(columns).size
        if self._functions and self.kind == "train":
            step_calls.trains(step.model)  # what is traced now would train what is trainable now
        static = layout.static or (size == self._first and (size % layout.replicas == 0 or step.runs_own[self.kind]))
        batch = size if static else 1 << (size - 1).bit_length() if layout.local else _ANY
        layout = dataclasses.replace(layout, batch=batch, none_empty=static and size >= layout.replicas, full=static)
        if self.kind != "predict":
            step.check_batches(self.kind, layout, [size])
        call, rows = step.compiled(self.kind, layout), None
        if layout.local:
            (own,) = layout.worker_positions(size)
            rows = slice(own[0], own[-1] + 1) if own.size else slice(1)
            call = call if static else _for_any_rows(call, columns)
        self._functions[shapes] = call, tf.constant(size), rows
        return self._functions[shapes]

    def _compare(self, leaves: list[tf.Tensor]) -> None:
        """Compares each batch of all workers, since it may be the last, and from time to time their weights."""
        self._calls += 1
        distribution = self.step.distribution
        if distribution.workers > 1:
            facts = {"checksum": arrays.crc(leaves)}
            fix = "give all workers the same, of which each takes its own rows, and seed random numbers alike"
            distribution.peers.check_same(facts, f"{self.kind}_on_batch {self._calls}", "batches", fix)
        self._sync_check.check_if_due(self.step.model, self._calls)


def _for_any_rows(call: Any, columns: tuple) -> Callable:
    """Returns a function that is traced once for any number of rows, at the same call on all workers.

    Traced for the rows of its own, one worker may have a trace where another one makes one, whose sums are others.
    """
    anything = lambda tensor: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)
    traced: list[object] = []

    def traced_call(data: tuple, *batches: tf.Tensor) -> tuple:
        if not traced:
            general = keras.tree.map_structure(anything, columns), tf.TensorSpec([], tf.int32)
            traced.append(call.get_concrete_function(general, *batches))
        return call(data, *batches)

    return traced_call
