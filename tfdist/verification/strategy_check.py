"""A proof on the user's own model, before its first update: one replica alone and all of them compute the same.

The first few rows of the data, a number that does not divide evenly, go forward and backward through one replica that
has them all, and through all replicas that share them. Losses, metrics and the gradient must agree to rounding.
With shards it is these that share them, on one replica too, and with `accumulate` micro-batches. What only measures or
predicts is checked forward, if no training has been.
"""

from __future__ import annotations

import inspect
import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.config.messages import logger
from tfdist.data.structures import Structure
from tfdist.errors import UserError, one_line
from tfdist.keras_bridge import batch_norm, keras_internals, own_steps
from tfdist.step import step_calls
from tfdist.step.step import Step
from tfdist.verification import complaints, passed_checks
from tfdist.verification.computed import METRIC, STATE, Computed
from tfdist.verification.two_ways import Question, TwoWays

CHOICES = ("auto", "on", "off")
MICRO_BATCHES = 2
"""Into which the rows are divided with `accumulate`, whatever that is."""
ROUNDING = 1e-5
"""Relative difference that is rounding in any model; deep ones have more, which is measured."""
OF_HALF_PRECISION = {"float16": 5e-3, "bfloat16": 5e-2}
"""The same for models that compute in these types: about ten times the distance of two neighbouring numbers."""
LOOSEST = 1e-3
"""Where rounding alone makes more than this, nothing can be told."""
NO_ROUNDING = 0.05
"""Nor does rounding make so much of a loss, a metric or an output, if the same rows give the same again."""
_VERB = {"train": "agree on", "test": "agree on measuring", "predict": "agree on predicting with"}


def check(step: Step, choice: str, shards: int = 0, accumulate: int = 1) -> None:
    """Stops a training that would not be what it is on one replica, before its first update.

    Args:
      step: of the compiled model, prepared for training.
      choice: `on`, `off`, or `auto` to leave out models that have passed before.
      shards: of a batch, which are then compared with the whole of it; 0 for none.
      accumulate: micro-batches of an update, which are compared with the whole batch if there are several.

    Raises:
      UserError: the replicas, shards or micro-batches disagree; it names the part of the model.
    """
    if choice == "off":
        return
    if step.sample_rows is None:
        return _refuse_by_structure(step, _questions(step, "train", shards))
    for question in _questions(step, "train", shards, accumulate):
        if _ask(step, step.sample_rows, question, choice) and question.parts != "micro-batches":
            _answers_others(step, question, choice == "auto")


def check_forward(
    step: Step, kind: str, choice: str, shards: int = 0, entries: int = 3, within_fit: bool = False
) -> None:
    """Stops an evaluation or a prediction that would not be what it is on one replica, before its first batch.

    Args:
      step: of the model.
      kind: `test` or `predict`.
      choice, shards: as for `check`.
      entries: of inputs, targets and weights, how many a model's own step is given.
      within_fit: whether it belongs to a training that has been checked.

    Raises:
      UserError: the replicas, or shards, disagree; it names the part of the model.
    """
    if choice == "off" or step.sample_rows is None:
        return
    rows = _needed(step, step.sample_rows[:entries], kind)
    if within_fit and _trains_as_it_measures(step):
        return
    for question in _questions(step, kind, shards):
        known = choice == "auto" and question in step.agreed
        if _ask(step, rows, question, choice, known):
            step.agreed.add(question)


def _questions(step: Step, kind: str, shards: int, accumulate: int = 1) -> list[Question]:
    if shards:
        return [Question(kind, "shards", shards)]
    replicas = step.distribution.replicas
    questions = [Question(kind, "replicas", replicas)] if replicas > 1 else []
    return questions + ([Question(kind, "micro-batches", MICRO_BATCHES)] if accumulate > 1 else [])


def _needed(step: Step, rows: tuple[Structure, ...], kind: str) -> tuple[Structure, ...]:
    alone = kind == "predict" and not own_steps.replaced(step.model, own_steps.PREDICTION)
    return rows[:1] if alone else rows


def _answers_others(step: Step, question: Question, remembered: bool) -> None:
    """Notes what need not be checked any more, since a training that has passed computes it, too.

    Args:
      remembered: whether also for later processes.
    """
    model = step.model
    if not _trains_as_it_measures(step):
        return
    compiled = keras_internals.compiled_loss(model)
    losses = len(keras_internals.loss_entries(compiled)) if compiled else 0
    every = losses and losses == step.outputs and not own_steps.replaced(model, own_steps.PREDICTION)
    for kind in ("test", "predict") if every else ("test",):
        other = question._replace(kind=kind)
        step.agreed.add(other)
        rows = _needed(step, step.sample_rows or (), kind)
        mark = passed_checks.fingerprint(model, step.distribution, rows, other) if remembered else ""
        if mark:
            passed_checks.remember(mark)


def _trains_as_it_measures(step: Step) -> bool:
    """Whether no code of the user's own is told if it trains: it could compute something else where it does not."""
    if step.own_step("train") or step.own_step("test"):
        return False
    layers = keras_internals.flat_layers(step.model)
    known = lambda layer: (layer.call.__module__ or "").startswith(("keras.", "tfdist."))
    own = [layer for layer in layers if not known(layer)]
    return not any("training" in inspect.signature(layer.call).parameters for layer in own)


class _Comparison(NamedTuple):
    """The same rows computed in both ways."""

    alone: Computed
    noise: dict[str, float]
    """What the order of the rows alone changes."""
    distances: dict[str, float]
    """What the two ways differ by."""
    rounding: float
    """Relative difference that is none."""

    @property
    def is_clear(self) -> bool:
        """Whether a difference would show in spite of rounding and random numbers."""
        return self.alone.is_finite() and 20 * max(self.noise.values(), default=0.0) <= max(LOOSEST, 4 * self.rounding)

    def wrong(self) -> dict[str, float]:
        """Returns what differs by more than rounding."""
        limit = max(self.rounding, 20 * max(self.noise.values(), default=0.0))
        return {name: distance for name, distance in self.distances.items() if not distance <= limit}


def _compare(ways: TwoWays) -> _Comparison:
    alone, turned, shared = ways.alone(), ways.alone(backwards=True), ways.shared()
    return _Comparison(alone, alone.distance(turned), alone.distance(shared), _rounding(ways.model))


def _compare_in_float64(step: Step, rows: tuple[Structure, ...], question: Question) -> _Comparison | None:
    """Compares again with hardly any rounding, as deep networks need it; None where that tells nothing more."""
    try:
        with keras_internals.computing_in(step.model, "float64"):
            result = _compare(TwoWays(step, rows, question))
    except (ValueError, TypeError, tf.errors.OpError):  # of a layer that is written for one type
        return None
    return result if result.is_clear else None


def _refuse_by_structure(step: Step, questions: Sequence[Question], alone: Computed | None = None) -> None:
    """Refuses what is known to differ between replicas, where numbers cannot tell.

    Args:
      alone: what one replica has computed, if it has: a layer called with `training=False` kept its statistics.

    Raises:
      UserError: a BatchNormalization layer trains with the rows of its own replica.
    """
    for question in questions:
        if (question.kind, question.parts) != ("train", "replicas"):
            continue
        for layer in batch_norm.normalizing_alone(step.model):
            kept = alone.values.get(f"{STATE} {layer.moving_mean.path!r}") if alone and layer.built else None
            if kept is None or layer.momentum == 1 or not np.array_equal(kept, np.asarray(layer.moving_mean)):
                raise UserError(complaints.of_batch_norm(question, layer))


def _ask(step: Step, rows: tuple[Structure, ...], question: Question, choice: str, known: bool = False) -> bool:
    """Compares; returns whether both have been found to agree, now or before.

    Args:
      known: whether this process knows that they do.

    Raises:
      UserError: they do not.
    """
    distribution = step.distribution
    mark = passed_checks.fingerprint(step.model, distribution, rows, question) if choice == "auto" else ""
    known = known or (bool(mark) and passed_checks.is_known(mark))
    told_by = distribution.peers.gather("whether the model has been checked", [known, _checksum(rows)])
    if all(known for known, _ in told_by):
        return True
    if any(checksum != told_by[0][1] for _, checksum in told_by):
        # Of no use to compare them. If it is not only their inputs that are random, the first batches will say so.
        _refuse_by_structure(step, [question])
        logger.info(f"WARNING: not checked whether {question} agree: the workers have read other rows")
        return False
    start = time.perf_counter()
    ways = TwoWays(step, rows, question)
    repeated: dict[str, float] = {}
    try:
        with distribution.peers.during("compiling"), step_calls.eagerly(step.model):
            result = _compare(ways)
            if not result.is_clear:
                result = _compare_in_float64(step, rows, question) or result
            if not result.is_clear and result.alone.is_finite():
                repeated = result.alone.distance(ways.again())
    except tf.errors.ResourceExhaustedError:
        _refuse_by_structure(step, [question])
        return False  # of which the first batch will say more
    except (ValueError, TypeError, tf.errors.OpError) as error:
        if question.kind == "train":
            raise
        # The batches may have a shape that these few rows have not; what is wrong with those, too, they will say.
        logger.info(f"WARNING: not checked whether {question} agree: {type(error).__name__}: {one_line(error, 200)}")
        return False
    seconds = time.perf_counter() - start
    if not result.is_clear:
        _refuse_by_structure(step, [question], result.alone)
        ordered = _depends_on_order(result, repeated) if repeated else ""
        if ordered:
            raise UserError(complaints.of_order(question, ordered, result.noise[ordered]))
        logger.info(f"WARNING: not checked whether {question} agree: {_unclear(result, repeated)}")
        return False
    distances, wrong = result.distances, result.wrong()
    if wrong:
        raise UserError(complaints.of(step, rows, question, wrong, ways.adding))
    if mark:
        passed_checks.remember(mark)
    numbers = ", ".join(f"{name} {value:.0e}" for name, value in _summary(question, distances).items())
    logger.info(f"checked: {question} {_VERB[question.kind]} this model, {numbers} ({seconds:.1f} s)")
    return True


def _checksum(rows: tuple[Structure, ...]) -> int:
    checksum = 0
    for tensor in keras.tree.flatten(rows):
        array = np.asarray(tensor)
        checksum = zlib.crc32(repr(array.tolist()).encode() if array.dtype == object else array.tobytes(), checksum)
    return checksum


def _summary(question: Question, distances: dict[str, float]) -> dict[str, float]:
    most = max((d for n, d in distances.items() if n != "the gradient"), default=0.0)
    if question.kind == "train":
        return {"loss": most, "gradient": distances.get("the gradient", 0.0)}
    return {"loss" if question.kind == "test" else "outputs": most}


def _depends_on_order(result: _Comparison, repeated: dict[str, float]) -> str:
    """Returns which value changes with the order of the rows, where nothing random does; or an empty string.

    Args:
      repeated: differences of the same rows in the same order.
    """
    if _is_random(repeated):
        return ""
    alone, noise = result.alone, result.noise
    sure = {name: noise[name] for name in alone.values if not name.startswith(STATE) and noise[name] > NO_ROUNDING}
    first = [name for name in sure if not name.startswith(METRIC)]
    return first[0] if first else next(iter(sure), "")


def _rounding(model: keras.Model) -> float:
    types = {layer.compute_dtype for layer in keras_internals.flat_layers(model)}
    return max(OF_HALF_PRECISION.get(kind, ROUNDING) for kind in types)


def _unclear(result: _Comparison, repeated: dict[str, float]) -> str:
    """Returns why nothing can be told."""
    if not result.alone.is_finite():
        return "loss, metrics or gradient are not finite"
    # What layers keep moves on with each pass, drawn or not.
    if _is_random({name: distance for name, distance in repeated.items() if not name.startswith(STATE)}):
        return "the model draws random numbers of its own"
    name = max(result.noise, key=result.noise.__getitem__)
    return f"rounding alone changes {name} by {result.noise[name]:.0e}"


def _is_random(repeated: dict[str, float]) -> bool:
    return any(distance > ROUNDING for distance in repeated.values())
