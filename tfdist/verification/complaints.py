"""What is said of a model on which replicas, shards or micro-batches disagree: which part it is, and what helps."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.structures import Structure
from tfdist.keras_bridge import batch_norm, keras_internals, layer_state, own_steps
from tfdist.step.step import Step
from tfdist.verification.computed import METRIC, OUTPUT, STATE
from tfdist.verification.two_ways import Question

_PLACE = {"train": "", "test": " in an evaluation", "predict": " in a prediction"}
_APART = 1e-3
"""Relative difference of a layer's outputs that is no rounding."""


def of(step: Step, rows: tuple[Structure, ...], question: Question, wrong: dict[str, float], adding: list[str]) -> str:
    """Returns the line that says what differs.

    Args:
      rows: that were computed.
      wrong: what differs, and by how much.
      adding: the layers that call `add_loss`.
    """
    model, kind = step.model, question.kind
    # A loss may differ since a layer's state does, and a metric since the outputs do.
    rank = lambda name: 0 if name.startswith(STATE) else 2 if name.startswith(METRIC) else 1
    first = min(wrong, key=rank)
    how = f"{question} disagree on this model{_PLACE[kind]}: {first} differs by {wrong[first]:.0e}"
    otherwise = _otherwise(question)
    alone = batch_norm.normalizing_alone(model)
    if kind == "train" and alone and question.parts == "replicas" and any(not n.startswith(METRIC) for n in wrong):
        return f"{how}, since {_of_batch_norm(alone[0], otherwise)}"
    if first.startswith(STATE):
        return f"{how} {_of_state(question)}, {otherwise}"
    own = "" if kind == "predict" else step.own_step(kind)
    if own and kind == "train":
        return (
            f"{how}: what {own} of {type(model).__name__} computes is no mean over examples; make it one, {otherwise}"
        )
    if first == "add_loss":
        return f"{how}, which layer {', '.join(adding)} gives: make it a mean over the examples, {otherwise}"
    if first.startswith(METRIC):
        return f"{how}: leave it out, {otherwise}"
    across = _looking_across(step, rows)
    if across:
        return f"{how}, since layer {across!r} looks at the other rows of a batch: change that, {otherwise}"
    if own:
        return f"{how}: what {own} of {type(model).__name__} gives is no mean over examples; make it one, {otherwise}"
    if first.startswith(OUTPUT):
        method = own_steps.replaced(model, own_steps.PREDICTION)
        whose = f"{method} of {type(model).__name__}" if method else "the model"
        return f"{how}: {whose} looks at the other rows of a batch; change that, {otherwise}"
    return f"{how}: use a loss with a value per example, {otherwise}"


def of_batch_norm(question: Question, layer: keras.Layer) -> str:
    """Returns the line that says that a layer's statistics are those of a replica, where no number shows it."""
    return f"{question} would train different models: {_of_batch_norm(layer, _otherwise(question))}"


def _of_batch_norm(layer: keras.Layer, otherwise: str) -> str:
    return (
        f"layer {layer.name!r} normalizes with the rows of its own replica: call tfdist.synchronize_batch_norm(model) "
        f"before compile(), or freeze it (trainable=False), {otherwise}"
    )


def of_order(question: Question, name: str, distance: float) -> str:
    """Returns the line that says that a value depends on the order of the rows.

    Args:
      name: of the value.
      distance: by which it changes.
    """
    return (
        f"{question} disagree on this model{_PLACE[question.kind]}: {name} differs by {distance:.0e} if the rows of a "
        f"batch come in the opposite order: make it depend on each row alone, {_otherwise(question)}"
    )


def _otherwise(question: Question) -> str:
    accepted = "or accept it with --check_agreement=off"
    if question.parts == "micro-batches":
        return f"leave accumulate out, {accepted}"
    if question.kind == "train":
        return accepted
    return f"{'leave shards out' if question.parts == 'shards' else 'use --strategy=default'}, {accepted}"


def _of_state(question: Question) -> str:
    after = "after an update" if question.kind == "train" else "after it"
    if question.parts == "shards":
        return (
            f"{after}, since shards average the floats, and add up the whole numbers, that layers change: "
            "leave shards out"
        )
    return f"{after}: add it up over the replicas (tf.distribute.get_replica_context())"


def _looking_across(step: Step, rows: tuple[Structure, ...]) -> str:
    """Returns the first layer whose output for a row depends on the rows beside it; an empty string if none is found.

    It is looked for by Python, op by op: only a model that is refused pays for that.
    """
    model = step.model
    half = max(1, int(keras.tree.flatten(rows)[0].shape[0]) // 2)
    try:
        variables = {id(v): v for v in [*model.non_trainable_variables, *model.metrics_variables]}
        with step.distribution.scope(), layer_state.unchanged(list(variables.values())):
            whole = _outputs(step, rows[0])
            part = _outputs(step, keras.tree.map_structure(lambda t: t[:half], rows[0]))
    except Exception:  # whatever a layer of the user's own may do outside of a replica
        return ""
    for (name, all_rows), (_, first_rows) in zip(whole, part):
        for a, b in zip(all_rows, first_rows):
            if a.shape[:1] == b.shape[:1] or a[: len(b)].shape != b.shape or a.dtype.kind not in "fc":
                continue
            if np.linalg.norm(a[: len(b)] - b) > _APART * max(float(np.linalg.norm(b)), 1e-6):
                return name
    return ""


def _outputs(step: Step, x: Structure) -> list[tuple[str, list[np.ndarray]]]:
    """Returns what each layer gives, those within another before that."""
    found: list[tuple[str, list[np.ndarray]]] = []

    def noting(layer: keras.Layer) -> Callable:
        theirs = layer.call

        def call(*args: object, **kwargs: object) -> Structure:
            outputs = theirs(*args, **kwargs)
            leaves = [leaf for leaf in keras.tree.flatten(outputs) if tf.is_tensor(leaf)]
            found.append((layer.name, [np.asarray(leaf, np.float64) for leaf in leaves if leaf.dtype.is_floating]))
            return outputs

        return call

    layers = keras_internals.flat_layers(step.model, include_self=False)
    with keras_internals.calls({layer: noting(layer) for layer in layers}):
        step.replica.forward(x, training=False)
    return found
