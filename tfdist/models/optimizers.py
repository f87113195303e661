"""The optimizer of an experiment: name, schedule, clipping, averaging, and learning rates by layer."""

import contextlib
import dataclasses
import fnmatch
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from tfdist import config
from tfdist.config import field_syntax, user_functions
from tfdist.config.schedule import Plan
from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals

_CLASSES = {name.lower(): name for name in dir(keras.optimizers) if name[0].isupper()}


def build(experiment: config.Experiment, plan: Plan) -> keras.optimizers.Optimizer:
    """Builds the Keras optimizer; call it inside the strategy's scope."""
    wanted = experiment.optimizer
    options: dict[str, Any] = field_syntax.options("optimizer.options", wanted.options)
    if wanted.weight_decay:
        options["weight_decay"] = wanted.weight_decay
    if wanted.clip_norm:
        options["global_clipnorm"] = wanted.clip_norm
    if wanted.ema_momentum:
        options |= {"use_ema": True, "ema_momentum": wanted.ema_momentum}
    if field_syntax.is_reference(wanted.name):
        function = user_functions.resolve("optimizer.name", wanted.name)
    else:
        function = getattr(keras.optimizers, _CLASSES[wanted.name])
    if not plan.rate:
        own = inspect.signature(function).parameters.get("learning_rate")
        if own is None or not isinstance(own.default, (int, float)):
            what = f"optimizer.name={wanted.name!r} has no learning rate by default"
            raise UserError(what, "set optimizer.learning_rate")
        plan = dataclasses.replace(plan, rate=own.default)
    options["learning_rate"] = rate(plan)
    try:
        optimizer = user_functions.call("optimizer.options", function, options)
    except (TypeError, ValueError) as error:  # Keras' optimizers take **kwargs and complain by themselves
        raise UserError(f"optimizer.options={wanted.options!r} does not fit {wanted.name}: {error}") from error
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UserError(f"optimizer.name={wanted.name!r} must return a Keras optimizer, got {type(optimizer).__name__}")
    return optimizer


def exclude(model: keras.Model, wanted: config.Optimizer) -> None:
    """Keeps weight decay from what `optimizer.decay_exclude` names; before the optimizer is built."""
    patterns = [pattern.strip() for pattern in wanted.decay_exclude.split(",") if pattern.strip()]
    matched = {i for pattern in patterns for i in matching(model, pattern, "optimizer.decay_exclude")}
    if matched:
        keras_internals.inner_optimizer(model.optimizer).exclude_from_weight_decay(
            [model.trainable_variables[i] for i in sorted(matched)]
        )


def rate(plan: Plan) -> float | LearningRateSchedule:
    """Returns the learning rate, a number or a schedule over updates."""
    decay, warmup, peak = plan.decay, plan.warmup, plan.rate
    if decay.kind == "constant" and not warmup:
        return peak
    # Up from zero; a rate scaled up for a large batch starts at what the small one had (Goyal et al., 2017).
    start = plan.base_rate if peak > plan.base_rate else 0.0
    after: LearningRateSchedule
    match decay.kind:
        case "constant" | "cosine":
            # A cosine that ends where it begins (alpha=1) is a constant.
            warm = {"warmup_target": peak, "warmup_steps": warmup} if warmup else {}
            return keras.optimizers.schedules.CosineDecay(
                initial_learning_rate=start if warm else peak,
                decay_steps=plan.updates - warmup,
                alpha=1.0 if decay.kind == "constant" else decay.end,
                **warm,
            )
        case "linear":
            # The line goes on to the left of the warm-up's end, to where Keras' own begins.
            slope = peak * (1 - decay.end) / (plan.updates - warmup)
            after = keras.optimizers.schedules.PolynomialDecay(
                initial_learning_rate=peak + slope * warmup,
                decay_steps=plan.updates,
                end_learning_rate=peak * decay.end,
            )
        case "step":
            after = keras.optimizers.schedules.PiecewiseConstantDecay(
                boundaries=[b - 1 for b in decay.boundaries],  # Keras' are the last steps of the old rate
                values=[peak * decay.factor**i for i in range(len(decay.boundaries) + 1)],
            )
        case "exponential":
            after = keras.optimizers.schedules.ExponentialDecay(
                initial_learning_rate=peak * decay.factor ** (-warmup / decay.every),
                decay_steps=decay.every,
                decay_rate=decay.factor,
            )
    return WarmUp(after, start, peak, warmup) if warmup else after


class WarmUp(LearningRateSchedule):
    """A line from `start` up to `peak` over `updates`, then a schedule of Keras that has no warm-up of its own."""

    def __init__(self, after: LearningRateSchedule, start: float, peak: float, updates: int):
        self.after, self._start, self._peak, self._updates = after, start, peak, updates

    def __call__(self, step: keras.Variable | tf.Tensor | int) -> tf.Tensor:
        """Returns the rate of update `step`, counted from 0."""
        after = self.after(step)
        done = keras.ops.cast(step, after.dtype)
        line = self._start + (self._peak - self._start) * (done / self._updates)
        return keras.ops.where(done < self._updates, line, after)

    def get_config(self) -> dict[str, object]:
        """Refuses, as a file with this schedule would need tfdist to load."""
        raise NotImplementedError("save the model within optimizers.portable(model), which plain Keras can load")


@contextlib.contextmanager
def portable(model: keras.Model) -> Iterator[None]:
    """Lets the model be saved, within it, to load without tfdist: with Keras' part of a `WarmUp`, the same after it."""
    optimizer = keras_internals.inner_optimizer(model.optimizer)
    schedule = keras_internals.rate_setting(optimizer)
    if not isinstance(schedule, WarmUp):
        yield
        return
    optimizer.learning_rate = schedule.after
    try:
        yield
    finally:
        optimizer.learning_rate = schedule


Named: TypeAlias = tuple[keras.Layer, tuple[str, ...]]
_BLOCK = re.compile(r"^.*(?:block|layer)_?\d+[a-z]?(?=_)")
_SMALLEST = 1e-6  # share of the learning rate below which a layer does not move in float32


def layer_factors(model: keras.Model, rates: Mapping[str, float], decay: float = 1.0) -> tuple[float, ...]:
    """Computes the factor on learning rate and decoupled weight decay of each trainable variable; none if all are 1.

    Args:
      model: built.
      rates: factor by a pattern (`head*`) for names or paths of layers or variables; the last match counts.
      decay: factor between a layer and the one below it (Clark et al., *ELECTRA*, 2020; Bao et al., *BEiT*, 2021):
        1 for the layer next to the output. Layers that are named as parts of a block (`block3_conv`) count as one, so
        does a layer made of layers; embeddings and weights of the model itself are the lowest together.
    """
    for name, value in {**rates, "layer_decay": decay}.items():
        if not 0 < value < float("inf"):
            raise UserError(f"the learning rate of {name!r} is multiplied by {value:g}", "give a positive number")
    variables = model.trainable_variables
    by_depth = _by_depth(model, variables, decay)
    depths = set(by_depth)
    if min(depths, default=1.0) < _SMALLEST:
        raise UserError(
            f"a decay of {decay:g} over {len(depths)} layers and blocks leaves the lowest {min(depths):.1g} of the "
            "learning rate, and so nothing",
            f"choose it nearer to 1, such as {1e-3 ** (1 / len(depths)):.3g}",
        )
    by_name = [1.0] * len(variables)
    for pattern, factor in rates.items():
        for i in matching(model, pattern, "learning rates"):
            by_name[i] = factor
    both = [depth * factor for depth, factor in zip(by_depth, by_name)]
    return () if all(f == 1 for f in both) else tuple(both)


def matching(model: keras.Model, pattern: str, what: str) -> list[int]:
    """Returns the indices of the trainable variables that match a pattern; `what` names its purpose in messages."""
    matched = []
    for i, (variable, chain) in enumerate(zip(model.trainable_variables, _chains(model))):
        paths = ["/".join(chain[: end + 1]) for end in range(len(chain))]
        if any(fnmatch.fnmatchcase(name, pattern) for name in {*chain, *paths, variable.path}):
            matched.append(i)
    if not matched:
        # Of each variable its layer, or its own name if it is of the model itself.
        nearest = dict.fromkeys(chain[-2:][0] for chain in _chains(model))
        known = field_syntax.suggest(pattern.strip("*?"), tuple(nearest))
        raise UserError(f"{what}: {pattern!r} matches nothing that is trained{known}")
    return matched


def with_weights(layer: keras.Layer, names: tuple[str, ...] = ()) -> Iterator[Named]:
    """Yields the layers that own weights, with their names and those of the layers around them, from the inside out."""
    for inner in keras_internals.flat_layers(layer, include_self=False, recursive=False):
        around = (inner.name, *names)
        if keras_internals.own_variables(inner):
            yield inner, around
        yield from with_weights(inner, around)


def _chains(model: keras.Model) -> list[tuple[str, ...]]:
    """The names of the layers that each trainable variable is in, from the outermost on, and its own behind them."""
    own = keras_internals.own_variables
    around = {id(variable): names[::-1] for layer, names in with_weights(model) for variable in own(layer)}
    return [(*around.get(id(variable), ()), variable.name) for variable in model.trainable_variables]


def _by_depth(model: keras.Model, variables: list[keras.Variable], decay: float) -> list[float]:
    """The factor of each variable by its distance from the output."""
    if decay == 1:
        return [1.0] * len(variables)
    units: dict[str, set[int]] = {"": set()}
    """Variables by layer or block, from the input to the output; the first is the lowest."""

    def walk(part: keras.Model, path: str) -> None:
        for layer in part.layers:
            block = _BLOCK.match(layer.name)
            unit = f"{path}/{block[0] if block else layer.name}"
            if isinstance(layer, keras.Model):
                walk(layer, unit)
            elif layer.weights:
                lowest = "embed" in type(layer).__name__.lower()
                units.setdefault("" if lowest else unit, set()).update(id(v) for v in layer.weights)

    walk(model, "")
    placed = set().union(*units.values())
    units[""].update(id(v) for v in variables if id(v) not in placed)
    order = [ids for ids in units.values() if ids]
    depth = {i: len(order) - 1 - place for place, ids in enumerate(order) for i in ids}
    return [decay ** depth[id(v)] for v in variables]
