"""Everything that follows from several inputs, worked out once: the plan of a run."""

import dataclasses
import math
import re
from typing import NamedTuple

from tfdist.config import Experiment
from tfdist.config.field_syntax import LARGEST, schedule_options
from tfdist.config.messages import logger
from tfdist.errors import UserError

_TIME = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(s|seconds?|min|minutes?|h|hours?)\s*$")
_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(%|steps?|updates?|epochs?|examples?)?\s*$")
_SHIPPED_WARMUP = "2 epochs"  # of the experiments that come with tfdist
_DURATIONS = re.compile(r"\d+(?:\.\d+)?\s*(?:%|[a-z]+)?")


class Aim(NamedTuple):
    """A metric, and which way it is better."""

    metric: str
    better: int  # +1 where more is better, -1 where less is


@dataclasses.dataclass(frozen=True, slots=True)
class Decay:
    """Decay of the learning rate from its peak at the end of the warm-up."""

    kind: str  # `constant`, `cosine`, `linear`, `step` or `exponential`
    end: float = 0.0  # share of the peak left at the end of the run (cosine, linear)
    boundaries: tuple[int, ...] = ()  # updates of the run after which it is multiplied by `factor` (step)
    factor: float = 0.1
    every: float = 1.0  # updates in which the rate is multiplied by `factor`, smoothly (exponential)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Integers of updates; nothing downstream knows other units."""

    examples: int  # examples per epoch
    global_batch: int
    accumulate: int
    replicas: int
    updates_per_epoch: int
    updates: int  # updates of the whole run
    epochs: int  # epochs begun; the last one is short when `train.steps` says so
    warmup: int  # updates of learning-rate warm-up
    decay: Decay
    eval_every: int  # epochs between evaluations
    base_rate: float  # learning rate as given, at which a scaled one starts its warm-up
    rate: float  # peak learning rate, scaled to the batch

    def describe(self) -> str:
        """Returns the plan in one line."""
        micro = f", {self.accumulate} micro-batches" if self.accumulate > 1 else ""
        split = f" on {self.replicas} replicas" if self.replicas > 1 else ""
        scaled = f", learning rate {self.base_rate:g} scaled to {self.rate:g}" if self.rate != self.base_rate else ""
        return (
            f"{self.updates} updates of {self.global_batch} examples{split}{micro}: "
            f"{self.epochs} epoch{'s' * (self.epochs > 1)} of {self.examples} examples{scaled}"
        )


def check_batch(
    batch: int, replicas: int, accumulate: int, what: str = "train.batch_size={}", virtual_replicas: int = 0
) -> None:
    """Raises UserError, which begins with `what`, unless every micro-batch of every replica gets an example."""
    parts = (virtual_replicas or replicas) * accumulate
    if batch < parts:
        why = f"{virtual_replicas} virtual replicas" if virtual_replicas else f"{replicas} replicas"
        why += f" x {accumulate} micro-batches" if accumulate > 1 else ""
        raise UserError(f"{what.format(batch)} is smaller than {why}", f"use at least {parts}")


def make(experiment: Experiment, examples: int, replicas: int) -> Plan:
    """Turns the durations of a validated experiment into updates, for so many training examples and replicas in all."""
    train = experiment.train
    check_batch(train.batch_size, replicas, train.accumulate, virtual_replicas=train.virtual_replicas)
    per_epoch = -(-examples // train.batch_size)
    updates = train.steps or train.epochs * per_epoch
    if updates > LARGEST:
        what = f"train.epochs={train.epochs} are {updates:,} updates of {train.batch_size} examples"
        raise UserError(f"{what}, more than {LARGEST:,}", "choose fewer")
    every = duration("eval.every", experiment.eval.every, per_epoch, train.batch_size, updates)
    if every % per_epoch:
        raise UserError(f"eval.every={experiment.eval.every!r} is not a whole number of epochs of {per_epoch} updates")
    optimizer, requested = experiment.optimizer, experiment.optimizer.warmup
    warmup = duration("optimizer.warmup", requested, per_epoch, train.batch_size, updates)
    if warmup >= updates and requested == _SHIPPED_WARMUP:  # as with --config.train.epochs=1
        warmup = updates // 10
        logger.info(f"the warm-up is {warmup} of {updates} updates: optimizer.warmup={requested!r} would leave none")
    # `linear` as in Goyal et al. (2017), `sqrt` as in Krizhevsky (2014).
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[optimizer.scale_learning_rate]
    return Plan(
        examples=examples,
        global_batch=train.batch_size,
        accumulate=train.accumulate,
        replicas=replicas,
        updates_per_epoch=per_epoch,
        updates=updates,
        epochs=-(-updates // per_epoch),
        warmup=warmup,
        decay=_decay(experiment, per_epoch, updates, warmup),
        eval_every=max(1, every // per_epoch),
        base_rate=optimizer.learning_rate,
        rate=optimizer.learning_rate * (train.batch_size / (optimizer.base_batch or 1)) ** power,
    )


def _decay(experiment: Experiment, per_epoch: int, updates: int, warmup: int) -> Decay:
    optimizer, batch = experiment.optimizer, experiment.train.batch_size
    options, field = schedule_options(optimizer), "optimizer.schedule_options"
    if warmup >= updates:
        what = f"optimizer.warmup={optimizer.warmup!r} is {warmup} updates of {updates}"
        raise UserError(what, "leave some for training")
    match optimizer.schedule:
        case "step":
            texts = _DURATIONS.findall(options["boundaries"])
            if "".join(texts).replace(" ", "") != options["boundaries"].replace(" ", ""):
                what = f"boundaries in {field}={options['boundaries']!r} are not understood"
                raise UserError(what, "write 30% 60% 80%")
            boundaries = tuple(duration(f"boundaries in {field}", text, per_epoch, batch, updates) for text in texts)
            ascend = list(boundaries) == sorted(set(boundaries))
            if not (ascend and max(warmup, 1) <= boundaries[0] <= boundaries[-1] < updates):
                raise UserError(
                    f"boundaries in {field} are updates {', '.join(map(str, boundaries))}: "
                    f"they must ascend from the end of the warm-up ({warmup}) to before the end of the run ({updates})"
                )
            return Decay("step", boundaries=boundaries, factor=options.get("factor", 0.1))
        case "exponential" if "every" in options:
            every = duration(f"every in {field}", options["every"], per_epoch, batch, updates)
            if not every:
                raise UserError(f"every in {field}={options['every']!r} is less than an update", "write more")
            return Decay("exponential", factor=options["factor"], every=every)
        case "exponential":
            return Decay("exponential", factor=options.get("end", 0.01), every=updates - warmup)
    return Decay(optimizer.schedule, options.get("end", 0.0))


def duration(field: str, text: str, per_epoch: int, batch: int, updates: int) -> int:
    """Returns the updates in `text`: `10`, `10 steps`, `0.5 epochs`, `2000 examples` or `5%` of the run."""
    match = _DURATION.match(text)
    if not match:
        raise UserError(f"{field}={text!r} is not a duration", "write 100 steps, 2 epochs, 5000 examples or 5%")
    number, unit = float(match[1]), (match[2] or "steps").rstrip("s")
    _check_largest(field, text, number)
    scale = {"%": updates / 100, "step": 1.0, "update": 1.0, "epoch": per_epoch, "example": 1 / batch}[unit]
    return round(number * scale)


def _check_largest(field: str, text: str, number: float) -> None:
    if number > LARGEST:
        raise UserError(f"{field}={text[:40]!r} is more than {LARGEST:,}", "write less")


def interval(text: str, per_epoch: int | None = 1, batch: int = 1) -> tuple[float, float]:
    """Parses `checkpoint.every`: `off`, a time (`60 seconds`) or a duration; `per_epoch` is None if unknown.

    Returns it in updates and in seconds, at least one of which is infinite.
    """
    if text == "off":
        return math.inf, math.inf
    field = "checkpoint.every"
    time = _TIME.match(text)
    if time:
        _check_largest(field, text, float(time[1]))
        return math.inf, float(time[1]) * {"s": 1, "m": 60, "h": 3600}[time[2][0]]
    known = _DURATION.match(text)
    unit = (known[2] or "steps").rstrip("s") if known else ""
    if not known or unit == "%":
        raise UserError(f"{field}={text!r} is not understood", "write 100 steps, 1 epoch, 60 seconds, 5 minutes or off")
    if unit == "epoch" and per_epoch is None:
        raise UserError(f"{field}={text!r} with data of unknown length", "write it in steps or seconds")
    every = duration(field, text, per_epoch or 1, batch, 0)
    if every < 1 and float(known[1]) == 0:
        raise UserError(f"{field}={text!r} is not an interval", "write off for none")
    return max(1, every), math.inf


def profiled(text: str, plan: Plan) -> tuple[int, int]:
    """Returns the first and last update of `--profile`, counted from 1; (0, 0) for none."""
    if not text:
        return 0, 0
    first, last = map(int, text.split(":"))
    if last > plan.updates:
        raise UserError(f"--profile={text} is beyond the run's {plan.updates} updates", "choose earlier ones")
    return first, last


_GROWS = re.compile(
    "acc|auc|precision|recall|f1|f_?beta|io_?u|top_|r2|similarity|correlation|sensitivity|specificity|true_"
)
_SHRINKS = re.compile(
    "error|entropy|hinge|divergence|poisson|log_?cosh|huber|perplexity|false_|(^|_)(mae|mse|mape|msle|rmse)(_|$)"
)
"""Patterns in names of metrics of which more, or less, is better."""


def better(text: str, field: str = "checkpoint.best") -> Aim:
    """Parses `checkpoint.best` or `train.monitor`, whose `min` or `max` may be left to a metric's name if it tells."""
    mode, _, name = text.strip().rpartition(" ")
    if mode not in ("", "min", "max"):
        raise UserError(f"{field}={text!r} is not understood", "write a metric, or min or max and a metric")
    if not mode and name:
        loss = name.endswith("loss")  # also of an output with any name
        grows, shrinks = not loss and bool(_GROWS.search(name)), loss or bool(_SHRINKS.search(name))
        if grows == shrinks:
            what = f"{field}={text!r} does not tell whether less or more of it is better"
            raise UserError(what, f"write min {name} or max {name}")
        mode = "max" if grows else "min"
    return Aim(name, 1 if mode == "max" else -1)
