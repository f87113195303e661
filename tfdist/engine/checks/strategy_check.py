"""A proof on the user's own model, before its first update: one replica alone and all of them compute the same.

The first few rows of the data, a number that does not divide evenly, go forward and backward through one replica that
has them all, and through all replicas that share them. Losses, metrics and the gradient must agree to rounding.
With shards it is these that share them, on one replica too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoints import training_state
from tfdist.config.messages import logger
from tfdist.data import static_rows
from tfdist.data.batch_layout import Batch, Layout
from tfdist.data.static_rows import Given
from tfdist.data.structures import Structure
from tfdist.distributed.distribution import Distribution
from tfdist.engine.checks import passed_checks
from tfdist.engine.step import metrics, own_step_call
from tfdist.engine.step.replica import Replica, Taken
from tfdist.engine.step.results import LogNames
from tfdist.engine.step.shards.shard_loop import ShardLoop
from tfdist.engine.step.step import Step
from tfdist.engine.tracing import layer_state
from tfdist.errors import UserError
from tfdist.models import freezing, keras_internals

CHOICES = ("auto", "on", "off")
_STATE = "the variable"
ROUNDING = 1e-5
"""Relative difference that is rounding in any model; deep ones have more, which is measured."""
OF_HALF_PRECISION = {"float16": 5e-3, "bfloat16": 5e-2}
"""The same for models that compute in these types: about ten times the distance of two neighbouring numbers."""
LOOSEST = 1e-3
"""Where rounding alone makes more than this, nothing can be told."""


class Computed(NamedTuple):
    """What some rows give."""

    values: dict[str, np.ndarray]
    """Losses, logs, metrics, and what a layer keeps, by what they are called in a message."""
    gradient: list[np.ndarray]
    """One array per weight that has one."""

    def is_finite(self) -> bool:
        """Returns whether there is no NaN and no infinity in it."""
        return all(np.isfinite(array).all() for array in (*self.values.values(), *self.gradient))

    def distance(self, other: Computed) -> dict[str, float]:
        """Returns relative differences by name; of the gradient the norm over all weights.

        By weight it would raise false alarms: biases that change nothing are pure rounding.
        """
        distances = {name: _relative([value], [other.values[name]]) for name, value in self.values.items()}
        if self.gradient:
            distances["the gradient"] = _relative(self.gradient, other.gradient)
        return distances


def check(step: Step, choice: str, shards: int = 0) -> None:
    """Stops a training that would not be what it is on one replica, before its first update.

    Args:
      step: of the compiled model, prepared for training.
      choice: `on`, `off`, or `auto` to leave out models that have passed before.
      shards: of a batch, which are then compared with the whole of it; 0 for none.

    Raises:
      UserError: the replicas, or shards, disagree; it names the part of the model.
    """
    rows, distribution = step.sample_rows, step.distribution
    if choice == "off" or (distribution.replicas == 1 and not shards) or rows is None:
        return
    mark = passed_checks.fingerprint(step.model, distribution, rows, shards) if choice == "auto" else ""
    known = bool(mark) and passed_checks.is_known(mark)
    if all(distribution.peers.gather("whether the model has been checked", known)):
        return
    start = time.perf_counter()
    with distribution.peers.during("compiling"):
        checked = _Check(step, rows, shards)
        alone, turned, shared = checked.alone(), checked.alone(backwards=True), checked.shared()
    seconds = time.perf_counter() - start
    noise, distances = alone.distance(turned), alone.distance(shared)
    rounding = _rounding(step.model)
    if not alone.is_finite() or 20 * max(noise.values(), default=0.0) > max(LOOSEST, 4 * rounding):
        logger.info(f"not checked whether {checked.both} agree: {_unclear(alone, noise)}")
        return
    limit = max(rounding, 20 * max(noise.values(), default=0.0))
    wrong = [name for name, distance in distances.items() if not distance <= limit]
    if wrong:
        raise UserError(_complaint(step, wrong, distances, checked))
    if mark:
        passed_checks.remember(mark)
    told = {"loss": max((d for n, d in distances.items() if n != "the gradient"), default=0.0)}
    told["gradient"] = distances.get("the gradient", 0.0)
    numbers = ", ".join(f"{name} {value:.0e}" for name, value in told.items())
    logger.info(f"checked: {checked.both} agree on this model, {numbers} ({seconds:.1f} s)")


def _rounding(model: keras.Model) -> float:
    types = {layer.compute_dtype for layer in keras_internals.flat_layers(model)}
    return max(OF_HALF_PRECISION.get(kind, ROUNDING) for kind in types)


def _unclear(alone: Computed, noise: dict[str, float]) -> str:
    """Returns why nothing can be told."""
    if not alone.is_finite():
        return "loss, metrics or gradient are not finite"
    name = max(noise, key=noise.__getitem__)
    return f"the model draws random numbers of its own, or rounding alone changes {name} by {noise[name]:.0e}"


class _Check:
    """The functions that compute the same rows in two ways."""

    def __init__(self, step: Step, rows: tuple[Structure, ...], shards: int):
        self._step, self._rows, self.shards = step, rows, shards
        self._distribution = step.distribution
        parts = shards or self._distribution.replicas
        self.both = f"a batch and its {shards} shards" if shards else f"1 and {parts} replicas"
        """What is compared."""
        least = int(keras.tree.flatten(rows)[0].shape[0])
        self._count = least - (least % parts == 0)
        if self._distribution.static_shapes and step.own_step("train"):  # which must see no filler
            self._count = least - least % self._distribution.replicas or least
        self.adding: list[str] = []
        """The layers that call `add_loss`."""
        self._compiled: dict[bool, Callable] = {}

    def alone(self, backwards: bool = False) -> Computed:
        """Computes all rows on every replica, as if it were the only one; backwards in the opposite order."""
        return self._run(True, backwards)

    def shared(self) -> Computed:
        """Computes the rows on the replicas that share them."""
        return self._run(False, False)

    def _run(self, alone: bool, backwards: bool) -> Computed:
        if alone not in self._compiled:
            self._compiled[alone] = tf.function(self._traced(alone), autograph=False)
        order = tf.range(self._count)[::-1] if backwards else tf.range(self._count)
        with _unchanged(self._step):
            self._step.reset()
            values, gradient = self._compiled[alone](order)
        return Computed(
            {name: np.asarray(value, np.float64) for name, value in values.items()},
            [np.asarray(g, np.float64) for g in gradient],
        )

    def _traced(self, alone: bool) -> Callable:
        model, distribution = self._step.model, self._distribution
        own = self._step.own_step("train")
        replica = self._step.replica
        if alone:
            replica = Replica(model, _single(distribution), jit=False)
            replica.bare = self._step.replica.bare
        static = distribution.static_shapes
        if self.shards and not alone:
            layout = Layout(self._count, self.shards, 1, shards=True)
        else:
            layout = Layout(self._count, replica.distribution.replicas, 1, static=static)

        def one(taken: Given | tf.Tensor) -> tuple[dict[str, tf.Tensor], list[tf.Tensor]]:
            batch = taken if isinstance(taken, Given) else Batch(self._rows, taken, tf.size(taken))
            if alone:  # which has all that a metric begins with
                for metric in model.metrics:
                    metric.reset_state()
            values, gradient = (self._own if own else self._compiled_pass)(replica, layout, batch)
            if alone:
                values.update(_named(metrics.of_replica(model, bool(own))))
            values.update(self._kept(replica))
            return values, gradient

        def call(order: tf.Tensor) -> tuple[dict[str, tf.Tensor], list[tf.Tensor]]:
            of_replicas = order
            if static:
                given = static_rows.given(Batch(self._rows, order, tf.size(order)), layout)
                of_replicas = given[0] if alone else distribution.per_replica(given)
            single = keras_internals.one_replica_in_sync() if alone else contextlib.nullcontext()
            still = _still(model, bool(self.shards))
            with replica.tracing(), single, own_step_call.recording(model, bool(own)), still:
                values, gradient = distribution.run(one, (of_replicas,))
            first = lambda value: distribution.local(value)[0]
            values, gradient = {n: first(v) for n, v in values.items()}, [first(g) for g in gradient]
            if not alone:
                values.update(_named(metrics.results(model, distribution, bool(own))))
            return values, gradient

        return call

    def _compiled_pass(self, replica: Replica, layout: Layout, batch: Taken) -> tuple[dict, list[tf.Tensor]]:
        model = self._step.model
        count = replica.count(layout, batch)
        if layout.shards:
            payload = ShardLoop(replica, layout).run(batch, count, True).payload
        else:
            rows = replica.take(layout, batch, count)
            payload, outputs = replica.passes(rows, count, True)
            self.adding = keras_internals.adding_losses(model)
            metrics.update(model, replica.distribution, rows, outputs)
            payload = payload.with_tensors(replica.distribution.all_sum(payload.tensors()))
        values = payload.by_part()
        return values, [g for g in payload.gradients() if g is not None]

    def _kept(self, replica: Replica) -> dict[str, tf.Tensor]:
        """Returns what the pass has made of the variables that no optimizer writes.

        Statistics are averaged over the replicas before anybody looks at them, so a layer that counts its examples, or
        sums them up, has another state than on one replica. A weight that a step of the user's own assigns has the
        gradient of one replica's rows.
        """
        model = self._step.model
        alike = [*freezing.fixed(model), *model.trainable_variables] if self._step.own_step("train") else []
        gathered = training_state.gathered_variables(model)
        means = [tf.cast(tf.convert_to_tensor(v.value), replica.totals) for v in gathered]
        if means:  # TensorFlow cannot reduce nothing
            means = replica.distribution.all_sum(means)
        kept = {v.path: total / replica.distribution.replicas for v, total in zip(gathered, means)}
        kept.update({v.path: tf.convert_to_tensor(v.value) for v in alike})
        return {f"{_STATE} {path!r}": value for path, value in kept.items()}

    def _own(self, replica: Replica, layout: Layout, batch: Taken) -> tuple[dict, list[tf.Tensor]]:
        count, names = replica.count(layout, batch), LogNames()
        logs = own_step_call.run_step(replica, "train_step", replica.take(layout, batch, count), count, names)
        values = {f"log {name!r}": logs[1 + i] for i, name in enumerate(names.plain)}
        return values, own_step_call.recorded()


def _named(results: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {f"metric {name!r}": value for name, value in results.items()}


def _single(distribution: Distribution) -> Distribution:
    """Returns the same, with which a replica believes itself to be the only one."""
    return dataclasses.replace(
        distribution,
        replicas=1,
        devices=distribution.devices[:1],
        all_sum=lambda tensors: tensors,
        replica_id=lambda: 0,
    )


def _relative(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    if any(a.shape != b.shape for a, b in zip(ours, theirs, strict=True)):
        return np.inf
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(ours, theirs))
    if same:
        return 0.0
    size = np.sqrt(sum(np.square(a).sum() for a in ours))
    return float(np.sqrt(sum(np.square(a - b).sum() for a, b in zip(ours, theirs))) / max(size, 1e-6))


def _complaint(step: Step, wrong: list[str], distances: dict[str, float], checked: _Check) -> str:
    model = step.model
    wrong = sorted(wrong, key=lambda name: not name.startswith(_STATE))  # a loss may differ since a layer's state does
    how = f"{checked.both} disagree on this model: {wrong[0]} differs by {distances[wrong[0]]:.0e}"
    otherwise = "or accept it with --check_agreement=off"
    own = step.own_step("train")
    alone = [layer.name for layer in keras_internals.flat_layers(model) if _normalizes_alone(layer)]
    if alone and not checked.shards and any(not name.startswith("metric") for name in wrong):
        return (
            f"{how}, since layer {alone[0]!r} normalizes with the rows of its own replica: make it "
            f"BatchNormalization(synchronized=True), or freeze it (trainable=False), {otherwise}"
        )
    if wrong[0].startswith(_STATE) and checked.shards:
        return (
            f"{how} after an update, since shards average the floats, and add up the whole numbers, that layers "
            f"change: leave shards out, {otherwise}"
        )
    if wrong[0].startswith(_STATE):
        return f"{how} after an update: add it up over the replicas (tf.distribute.get_replica_context()), {otherwise}"
    if own:
        return (
            f"{how}: what {own} of {type(model).__name__} computes is no mean over examples; make it one, {otherwise}"
        )
    if wrong[0] == "add_loss":
        return f"{how}, which layer {', '.join(checked.adding)} gives: make it a mean over the examples, {otherwise}"
    if wrong[0].startswith("metric"):
        return f"{how}: leave it out, {otherwise}"
    return f"{how}: use a loss with a value per example, {otherwise}"


def _normalizes_alone(layer: keras.Layer) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized and layer.trainable


@contextlib.contextmanager
def _unchanged(step: Step) -> Iterator[None]:
    """Gives all that a step may write back, after it, what it had, on every replica; optimizers do nothing in it."""
    model = step.model
    written = model.variables if step.own_step("train") else model.non_trainable_variables
    variables = {id(v): v for v in [*written, *model.metrics_variables]}
    with layer_state.unchanged(list(variables.values())):
        yield


@contextlib.contextmanager
def _still(model: keras.Model, shards: bool) -> Iterator[None]:
    """Lets random layers, within it, pass on what they get: a mask has the shape of a replica's rows.

    With shards BatchNorm predicts, which normalizes each of them by itself.
    """
    kinds = [keras_internals.is_random, *([_normalizes_alone] if shards else [])]
    layers = [layer for layer in keras_internals.flat_layers(model) if any(kind(layer) for kind in kinds)]
    passing = lambda theirs: lambda *a, **k: theirs(*a, **{**k, "training": False})
    with keras_internals.calls({layer: passing(layer.call) for layer in layers}):
        yield
