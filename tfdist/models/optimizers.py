"""The optimizer of an experiment: name, schedule, clipping, averaging."""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from tfdist import config
from tfdist.config import field_syntax, user_functions
from tfdist.config.schedule import Plan
from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals
from tfdist.models import layerwise_rates

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
    options["learning_rate"] = rate(experiment, plan)
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
    matched = {i for pattern in patterns for i in layerwise_rates.matching(model, pattern, "optimizer.decay_exclude")}
    if matched:
        keras_internals.inner_optimizer(model.optimizer).exclude_from_weight_decay(
            [model.trainable_variables[i] for i in sorted(matched)]
        )


def rate(experiment: config.Experiment, plan: Plan) -> float | LearningRateSchedule:
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
