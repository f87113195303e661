"""What an error says of a model on which replicas disagree: the part that does, and the fix."""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.spec import Structure
from tfdist.keras_bridge import batch_norm, keras_internals, layer_state, preconditions, row_mixing
from tfdist.step.step import Step
from tfdist.verification.equivalence_probe import METRIC, OUTPUT, STATE, Comparison

LARGE_GRADIENT = "the gradient of a large loss"
_ACROSS_ROWS = 1e-3  # relative difference of a layer's outputs that is more than rounding


def message(
    step: Step, rows: tuple[Structure, ...], comparison: Comparison, disagreements: dict[str, float], adding: list[str]
) -> str:
    """Returns the line that names the part of the model that disagrees, and the fix.

    `disagreements`: names of values, and by how much they differ; `adding`: the layers that call `add_loss`.
    """
    model, kind, accept = step.model, comparison.kind, fix(comparison)
    # A loss may differ since a layer's state does, and a metric since the outputs do.
    rank = lambda name: 0 if name.startswith(STATE) else 2 if name.startswith(METRIC) else 1
    first = min(disagreements, key=rank)
    most = disagreements[first]
    by = f"by {most:.0e}" if np.isfinite(most) else "in its shape, or is infinite on one side"
    start = f"{found(comparison)}: {first} differs {by}"
    alone = batch_norm.normalizing_alone(model)
    beyond_metrics = any(not name.startswith(METRIC) for name in disagreements)
    if kind == "train" and alone and comparison.parts == "replicas" and beyond_metrics:
        return f"{start}, since {batch_norm_reason(alone[0], comparison)}"
    if first.startswith(STATE):
        after = "after an update" if kind == "train" else "after it"
        if comparison.parts == "virtual replicas":
            return (
                f"{start} {after}, since virtual replicas average the floats, and add up the integers, that "
                f"layers change: leave virtual_replicas out, {accept}"
            )
        return f"{start} {after}: add it up over the replicas (tf.distribute.get_replica_context()), {accept}"
    own = "" if kind == "predict" else step.own_steps[kind]
    if first == LARGE_GRADIENT:
        return (
            f"{start}: {own} of {type(model).__name__} changes gradients by their size, as a clip does, before they "
            f"are summed; give the optimizer global_clipnorm or clipnorm instead, {accept}"
        )
    if own and kind == "train":
        return (
            f"{start}: what {own} of {type(model).__name__} computes is not a mean over examples; make it one, {accept}"
        )
    if first == "add_loss":
        return f"{start}, which layer {', '.join(adding)} gives: make it a mean over the examples, {accept}"
    if first.startswith(METRIC):
        return f"{start}: leave it out, {accept}"
    searched = (_layer_across_rows(step, rows[0], seed) for seed in range(4))  # in some orders they may agree
    if layer := row_mixing.operation(model) or next(filter(None, searched), ""):
        return f"{start}, since layer {layer!r} looks at the other rows of a batch: change that, {accept}"
    if own:
        return f"{start}: what {own} of {type(model).__name__} gives is not a mean over examples; make it one, {accept}"
    if first.startswith(OUTPUT):
        method = preconditions.replaced(model, preconditions.PREDICTION)
        whose = f"{method} of {type(model).__name__}" if method else "the model"
        return f"{start}: {whose} looks at the other rows of a batch; change that, {accept}"
    return f"{start}: use a loss with a value per example, {accept}"


def found(comparison: Comparison) -> str:
    """Returns what does not agree, in which computation."""
    context = {"train": "", "test": " in an evaluation", "predict": " in a prediction"}
    return f"{comparison} disagree on this model{context[comparison.kind]}"


def batch_norm_reason(layer: keras.Layer, comparison: Comparison) -> str:
    """Returns why a layer that is not synchronized makes replicas differ, and the fix."""
    return (
        f"layer {layer.name!r} normalizes with the rows of its own replica: call tfdist.synchronize_batch_norm(model) "
        f"before compile(), or freeze it (trainable=False), {fix(comparison)}"
    )


def fix(comparison: Comparison) -> str:
    """Returns how to accept a disagreement, or to go without what is compared."""
    accept = "or accept it with --check_agreement=off"
    if comparison.parts == "micro-batches":
        return f"leave accumulate out, {accept}"
    if comparison.kind == "train":
        return accept
    instead = "leave virtual_replicas out" if comparison.parts == "virtual replicas" else "use --strategy=default"
    return f"{instead}, {accept}"


def _layer_across_rows(step: Step, x: Structure, seed: int) -> str:
    """Returns the first layer whose output for a row depends on the rows beside it; an empty string if there is none.

    It is searched for in Python, op by op: only a model that is refused pays for that.
    """
    model = step.model
    try:
        with (
            step.distribution.scope(),
            layer_state.unchanged([*model.non_trainable_variables, *model.metrics_variables]),
        ):
            count = keras.tree.flatten(x)[0].shape[0]
            order = np.random.default_rng(seed).permutation(count) if seed else np.arange(count)
            x = keras.tree.map_structure(lambda t: tf.gather(t, order), x)
            whole = _layer_outputs(step, x)
            part = _layer_outputs(step, keras.tree.map_structure(lambda t: t[count // 2 :], x))
    except Exception:  # whatever a layer of the user's own may do outside of a replica
        return ""
    for (name, all_rows), (_, last_rows) in zip(whole, part):  # cumulative sums of the first need no others
        for a, b in zip(all_rows, last_rows):
            if a.shape[:1] == b.shape[:1] or a[-len(b) :].shape != b.shape or a.dtype.kind not in "fc":
                continue
            if np.linalg.norm(a[-len(b) :] - b) > _ACROSS_ROWS * max(float(np.linalg.norm(b)), 1e-6):
                return name
    return ""


def _layer_outputs(step: Step, x: Structure) -> list[tuple[str, list[np.ndarray]]]:
    """Returns the floating outputs of each layer by name, inner layers before the outer one."""
    outputs_by_layer: list[tuple[str, list[np.ndarray]]] = []

    def recording(layer: keras.Layer) -> Callable:
        original = layer.call

        def call(*args: object, **kwargs: object) -> Structure:
            outputs = original(*args, **kwargs)
            leaves = [leaf for leaf in keras.tree.flatten(outputs) if tf.is_tensor(leaf) and leaf.dtype.is_floating]
            outputs_by_layer.append((layer.name, [np.asarray(leaf, np.float64) for leaf in leaves]))
            return outputs

        return call

    layers = keras_internals.flat_layers(step.model, include_self=False)
    with keras_internals.replaced("call", [(layer, recording(layer)) for layer in layers]):
        step.replica.forward(x, training=False)
    return outputs_by_layer
