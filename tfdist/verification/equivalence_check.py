"""Refuses a model that replicas, virtual replicas or micro-batches would not train or measure as one device does.

Before the first update, the first few rows of the data, a number that does not divide evenly, go forward and backward
through one replica that has them all, and through the parts that share them. Losses, metrics and the gradient must
agree to rounding. Evaluations and predictions are checked forward, unless a training has been. Models that have passed
are recorded in the user's cache, if all of their code is Keras', so that only a new one pays for it. Other code may
compute something across a batch for rare rows or for later weights only: its check is repeated on later batches.
"""

import contextlib
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.config import local_files
from tfdist.config.messages import logger
from tfdist.data.arrays import crc
from tfdist.data.protocol import Source
from tfdist.data.spec import Structure
from tfdist.errors import UserError, one_line
from tfdist.keras_bridge import batch_norm, keras_internals, layer_state, preconditions
from tfdist.keras_bridge.loss import SAMPLE_ROWS
from tfdist.keras_bridge.setups import fingerprint, may_be_rare, runs_own
from tfdist.step import step_calls
from tfdist.step.step import Step
from tfdist.verification import disagreement
from tfdist.verification.equivalence_probe import METRIC, STATE, Comparison, EquivalenceProbe, ProbeResult

CHOICES = ("auto", "on", "off")
MICRO_BATCHES = 2  # into which the rows are divided with `accumulate`, whatever that is
ROUNDING = 1e-5  # relative difference that is rounding in any model; deep ones have more, which is measured
ROUNDING_OF_HALF_PRECISION = {"float16": 5e-3, "bfloat16": 5e-2}
"""The same for models that compute in these types: about ten times the distance of two neighboring numbers."""
MOST_ROUNDING = 1e-3  # where rounding alone makes more than this, the comparison is inconclusive
NO_ROUNDING, NO_ROUNDING_IN_FLOAT64 = 0.05, 1e-4
"""Relative changes that rounding never makes if the same rows give the same again; in float64 of the gradient, too."""
LARGE = 1e4  # factor of gradients by which a step of the user's own is seen to clip those of some rows only
_VERB = {"train": "agree on", "test": "agree on measuring", "predict": "agree on predicting with"}


def passed_folder() -> pathlib.Path:
    """Returns the folder of the user's cache that records which models have passed."""
    return local_files.cache("checked")


def check_training(step: Step, source: Source, choice: str, virtual_replicas: int = 0, accumulate: int = 1) -> None:
    """Refuses, before its first update, a training that would not be what it is on one replica.

    Args:
      step: of the compiled model, prepared for training.
      source: the data, of which the step has sample rows.
      choice: `on`, `off`, or `auto` to leave out models that have passed before.
      virtual_replicas, accumulate: virtual replicas (0 for none), or several micro-batches, compared with the batch.

    Raises:
      UserError: the replicas, virtual replicas or micro-batches disagree; it names the part of the model.
    """
    if choice == "off":
        return
    if step.sample_rows is None:
        return _refuse_by_structure(step, _comparisons(step, "train", virtual_replicas))
    for comparison in _comparisons(step, "train", virtual_replicas, accumulate):
        _agree_on_rows(step, source, comparison, choice)


def check_forward(
    step: Step, kind: str, source: Source, choice: str, virtual_replicas: int = 0, within_fit: bool = False
) -> None:
    """Refuses, before its first batch, an evaluation or a prediction that would not be what it is on one replica.

    Args:
      kind: `test` or `predict`.
      source, choice, virtual_replicas: as for `check_training`.
      within_fit: whether it belongs to a training, with as many inputs, targets and weights, that has been checked:
        enough for all but code of the user's own, which may compute something else where it does not train.
    """
    if choice == "off" or step.sample_rows is None or (within_fit and not may_be_rare(step.model, "test")):
        return
    inputs_only = kind == "predict" and not preconditions.replaced(step.model, preconditions.PREDICTION)
    for comparison in _comparisons(step, kind, virtual_replicas):
        _agree_on_rows(step, source, comparison, choice, 1 if inputs_only else None)


def _agree_on_rows(step: Step, source: Source, comparison: Comparison, choice: str, entries: int | None = None) -> None:
    """Compares a few rows, or more of what may depend on what is rare, such as a count of masked targets."""
    more = not keras_internals.fixed_batch(step.model) and may_be_rare(step.model, comparison.kind)
    if more and _agree(step, step.rows_of(source, step.more_rows)[:entries], comparison, choice) is not None:
        return
    _agree(step, step.rows_of(source)[:entries], comparison, choice)


class RepeatedCheck:
    """Repeats a check that has passed on batches of a training or an evaluation, with the weights that it has then.

    After 1, 2, 3, 5, 8, 12, ... batches, half as many more each time, so that it costs less and less; of models with
    code of the user's own, or operations that may mix rows, alone. After 1, 3, 12, 41, ... and at the end it takes all
    rows: a capacity may be larger than a few. The validation of a training repeats the check of that.

    `kind`: `train`, `test` or `predict`; `choice`, `virtual_replicas`, `accumulate`: as for `check_training`.
    """

    def __init__(self, step: Step, kind: str, choice: str, virtual_replicas: int = 0, accumulate: int = 1):
        self._step, self._kind = step, kind
        self._parts = step.distribution.workers * accumulate  # of a batch, of which a worker computes one at a time
        comparisons = _comparisons(step, kind, virtual_replicas, accumulate) if choice != "off" else []
        self.probes: dict[Comparison, EquivalenceProbe] = {}
        for comparison in comparisons:
            alike = {comparison, comparison._replace(kind="train")} if kind == "test" else {comparison}
            probes = [probe for (passed, _), probe in step.checked.items() if probe and passed in alike]
            self.probes |= {comparison: probes[-1]} if probes else {}
        if not self.probes:
            return
        calls, done, checked, whole = step.repeats.get(kind, (0, 0, 0, 0))
        calls += 1
        begins = calls & (calls - 1) == 0  # calls 1, 2, 4, 8, ..., whose data may be others, begin anew
        step.repeats[kind] = (calls, 0, 0, 0) if begins else (calls, done, checked, whole)

    def after(self, batches: int, rows_of_last: Callable[[], tuple | None], last: bool = False) -> None:
        """Checks again if it is time.

        Args:
          batches: number of those computed since the call before.
          rows_of_last: returns the whole of the last of them, or of one shortly before; None if none is kept.
          last: whether there will be no more.

        Raises:
          UserError: the parts of such a batch do not give what the whole does.
        """
        if not self.probes:
            return
        calls, done, checked, whole = self._step.repeats[self._kind]
        done += batches
        due = 2 * done >= 3 * checked or (last and 4 * done >= 5 * checked)
        wholly = due and (done >= 3 * whole or last)
        self._step.repeats[self._kind] = calls, done, done if due else checked, done if wholly else whole
        if not due or done == checked:
            return
        rows, number, distribution = rows_of_last() or (), self._step.more_rows, self._step.distribution
        available = int(keras.tree.flatten(rows)[0].shape[0]) if rows else 0
        if wholly and not distribution.static_shapes:
            # A worker's memory suffices for its own part of a batch, and most likely for some of them.
            number = max(number, min(available, 4 * -(-available // self._parts)))
        number = min(distribution.peers.gather("the number of rows to check", min(number, self._step.most_rows)))
        if number < SAMPLE_ROWS:  # no memory for as few
            return
        for comparison, probe in self.probes.items():
            known = available > 0 and probe.look_at(rows, number)
            checksum = crc(probe.rows) if known else 0
            if len(set(distribution.peers.gather("the rows to check", checksum))) == 1:
                self._repeat(comparison, probe, done, available)

    def _repeat(self, comparison: Comparison, probe: EquivalenceProbe, done: int, available: int) -> None:
        groups, peers = probe.some_rows()[1:], self._step.distribution.peers  # of single rows
        try:
            with peers.during("compiling"):
                whole = None
                with contextlib.suppress(tf.errors.ResourceExhaustedError):
                    whole = probe.run(True)
                # One worker alone may lack the memory: the others would wait for it in a sum.
                if not all(peers.gather("whether memory suffices to check", whole is not None)) or whole is None:
                    raise tf.errors.ResourceExhaustedError(None, None, "of a worker")
                (distances,) = _of_all_workers(probe, whole.distance(probe.run(False)))
                suspect = not max(distances.values(), default=0.0) <= ROUNDING
                some = [groups[done % len(groups)]] if groups else []
                outcome = _of_some_rows(probe, [[*range(probe.count)], *some] if suspect else some)
        except tf.errors.OpError as error:  # of rows that cannot be computed alone: the batch itself has been
            if isinstance(error, tf.errors.ResourceExhaustedError):  # which TensorFlow waits 10 s for
                self._step.most_rows = probe.count // 2
            return
        apart = outcome.disagreements() if outcome else {}
        if available == 1:  # of which a metric may be rounding over rounding, as R2Score is
            apart = {name: distance for name, distance in apart.items() if not name.startswith(METRIC)}
        if apart:
            one, many = ("update", "updates") if self._kind == "train" else ("batch", "batches")
            found = f"found after {done} {one if done == 1 else many}"
            message = disagreement.message(self._step, probe.rows, comparison, apart, probe.adding)
            raise UserError(f"{found}: {message}")


def _comparisons(step: Step, kind: str, virtual_replicas: int, accumulate: int = 1) -> list[Comparison]:
    if virtual_replicas:
        return [Comparison(kind, "virtual replicas", virtual_replicas)]
    replicas = step.distribution.replicas
    comparisons = [Comparison(kind, "replicas", replicas)] if replicas > 1 else []
    return comparisons + ([Comparison(kind, "micro-batches", MICRO_BATCHES)] if accumulate > 1 else [])


class _Outcome(NamedTuple):
    """The same rows computed in both ways."""

    whole: ProbeResult
    noise: dict[str, float]  # relative differences that the order of the rows alone makes
    distances: dict[str, float]  # relative differences of the two ways
    limit: float  # relative difference that counts as none
    is_conclusive: bool  # whether a difference would show in spite of rounding and random numbers

    @classmethod
    def of(cls, probe: EquivalenceProbe, some: Sequence[int] = ()) -> "_Outcome":
        """Computes all rows, or some, in both ways, and as a whole in the opposite order."""
        whole, backwards = probe.run(True, some=some), probe.run(True, backwards=True, some=some)
        parts, rounding = probe.run(False, some=some), _rounding(probe.model)
        distances = whole.distance(parts)
        if probe.own_training:  # which may clip what is as large in other rows
            whole_large = probe.run(True, factor=LARGE, some=some)
            parts_large = probe.run(False, factor=LARGE, some=some)
            if whole_large.is_finite() and whole_large.gradient:
                distances[disagreement.LARGE_GRADIENT] = whole_large.distance(parts_large)["the gradient"]
        noise, distances = _of_all_workers(probe, whole.distance(backwards), distances)
        most = 20 * max(noise.values(), default=0.0)
        conclusive = whole.is_finite() and most <= max(MOST_ROUNDING, 4 * rounding)
        return cls(whole, noise, distances, max(rounding, most), conclusive)

    def disagreements(self) -> dict[str, float]:
        """Returns what differs by more than rounding."""
        return {name: distance for name, distance in self.distances.items() if not distance <= self.limit}


def _of_all_workers(probe: EquivalenceProbe, *differences: dict[str, float]) -> list[dict[str, float]]:
    """Returns the largest of each on any worker: where they decide otherwise, one waits in a sum that no other has."""
    given = probe.step.distribution.peers.gather("relative differences", differences)
    return [{name: max(worker[i][name] for worker in given) for name in own} for i, own in enumerate(differences)]


def _rounding(model: keras.Model) -> float:
    """Returns the relative difference that is rounding in the types that the layers compute in."""
    types = {layer.compute_dtype for layer in keras_internals.flat_layers(model)}
    return max(ROUNDING_OF_HALF_PRECISION.get(kind, ROUNDING) for kind in types)


def _agree_op_by_op(step: Step, rows: tuple[Structure, ...], comparison: Comparison) -> _Outcome | None:
    """Compares without tracing, which takes several times as long, and in float64 where rounding is large.

    Returns:
      What has been computed where both ways agree on all workers. None where they do not, which the compiled functions
      must show, too, and where some code is the user's own, which may compute something else where it is traced.
    """
    if step.distribution.static_shapes or tf.config.functions_run_eagerly() or runs_own(step.model, comparison.kind):
        return None
    for precise in (contextlib.nullcontext(), keras_internals.computing_in(step.model, "float64")):
        outcome = None
        with contextlib.suppress(ValueError, TypeError, tf.errors.OpError):  # of which the compiled functions say more
            with precise:
                probe, rounding = EquivalenceProbe(step, rows, comparison, keras_only=True), _rounding(step.model)
                whole = probe.run(True)
                distances = whole.distance(probe.run(False))
            agrees = whole.is_finite() and bool(max(distances.values(), default=0.0) <= rounding)
            outcome = agrees, _Outcome(whole, {}, distances, rounding, True)
        # Together: the last bits of workers may differ, and one that went on alone would wait for the others.
        found = step.distribution.peers.gather("whether replicas agree", outcome and outcome[0])
        if None in found:
            return None
        if all(found) and outcome:
            return outcome[1]
    return None


def _of_some_rows(probe: EquivalenceProbe, groups: list[list[int]]) -> _Outcome | None:
    """Returns where some rows alone disagree, in float64, too, if that can be computed; else None."""
    for some in groups:
        try:
            outcome = _Outcome.of(probe, some)
        except tf.errors.InvalidArgumentError:  # a loss that picks some of the rows needs more
            continue
        if outcome.whole.is_finite() and (outcome.disagreements() or not outcome.is_conclusive):
            # As late in a training, or of a few rows, gradients may cancel each other, and rounding be large.
            exact = _compare_in_float64(probe, some)
            if exact is None and outcome.is_conclusive:
                exact = outcome._replace(limit=max(outcome.limit, MOST_ROUNDING))
            if exact and exact.disagreements():
                return exact
    return None


def _compare_in_float64(probe: EquivalenceProbe, some: Sequence[int] = ()) -> _Outcome | None:
    """Compares again with hardly any rounding, as deep networks need it; None where that is inconclusive, too."""
    try:
        with keras_internals.computing_in(probe.model, "float64"):
            probe = EquivalenceProbe(probe.step, probe.rows, probe.comparison)
            outcome = _Outcome.of(probe, some)
            return outcome if outcome.is_conclusive else _by_order(probe, outcome, NO_ROUNDING_IN_FLOAT64, some)
    except (ValueError, TypeError, tf.errors.OpError):  # of a layer that is written for one type
        return None


def _by_order(probe: EquivalenceProbe, outcome: _Outcome, least: float, some: Sequence[int]) -> _Outcome | None:
    """Returns what differs since the order of the rows decides, as with a capacity; None where it may be random."""
    random, kept = probe.draws_random_numbers(), outcome.whole.values if least == NO_ROUNDING else outcome.noise
    # Without random numbers, what is another the next time follows a state, as of a layer that keeps the last rows.
    names = [name for name in kept if outcome.noise[name] > least and not (random and name.startswith(STATE))]
    distances = {name: outcome.distances[name] for name in names if outcome.distances[name] > least}
    again = probe.run(True, times=2, some=some) if random and distances else outcome.whole
    (repeated,) = _of_all_workers(probe, outcome.whole.distance(again))
    if not distances or not outcome.whole.is_finite() or max(repeated.values()) > ROUNDING:
        return None
    return outcome._replace(distances=distances, limit=least, is_conclusive=True)


def _refuse_by_structure(step: Step, comparisons: Sequence[Comparison], whole: ProbeResult | None = None) -> None:
    """Refuses what is known to differ between replicas, where numbers cannot show it.

    `whole`: what one replica has computed, if it has: a layer called with `training=False` kept its statistics.
    """
    for comparison in comparisons:
        if (comparison.kind, comparison.parts) != ("train", "replicas"):
            continue
        for layer in batch_norm.normalizing_alone(step.model):
            kept = whole.values.get(f"{STATE} {layer.moving_mean.path!r}") if whole and layer.built else None
            if kept is None or layer.momentum == 1 or not np.array_equal(kept, np.asarray(layer.moving_mean)):
                reason = disagreement.batch_norm_reason(layer, comparison)
                raise UserError(f"{comparison} would train different models: {reason}")


def _agree(step: Step, rows: tuple[Structure, ...], comparison: Comparison, choice: str) -> bool | None:
    """Compares on all workers; returns whether both ways agree, now or before, and None where memory does not suffice.

    It is False where that is inconclusive, too.
    """
    if step.by_rows:
        raise UserError(
            f"{disagreement.found(comparison)}: its output depends on how many rows a batch has, as of a matrix of "
            "their similarities",
            "use --strategy=default with whole batches, or accept it with --check_agreement=off",
        )
    distribution = step.distribution
    mark = fingerprint(step.model, distribution, rows, comparison.kind, str(comparison)) if choice == "auto" else ""
    key = comparison._replace(divides=False, as_given=False), len(rows)
    passed = choice == "auto" and (key in step.checked or bool(mark and (passed_folder() / mark).exists()))
    states = distribution.peers.gather("whether the model has been checked", [passed, crc(rows)])
    if all(passed for passed, _ in states):
        step.checked.setdefault(key)
        return True
    if any(checksum != states[0][1] for _, checksum in states):
        # Of no use to compare them. If it is not only their inputs that are random, the first batches will say so.
        _refuse_by_structure(step, [comparison])
        why = "the workers have read other inputs, as is right only where each draws random changes of the same data"
        logger.info(f"WARNING: not checked whether {comparison} agree: {why}")
        return False
    if comparison.kind == "train":  # which takes longest, up to half a minute of deep networks
        logger.info(f"checking whether {comparison} agree on this model")
    start = time.perf_counter()
    own = runs_own(step.model, comparison.kind)
    rare = may_be_rare(step.model, comparison.kind)
    varied = not (own or comparison.as_given)
    given, (rows, differ) = rows, _differing_rows(rows) if varied else (rows, own)
    probe = EquivalenceProbe(step, rows, comparison)
    try:
        with (
            distribution.peers.during("compiling"),
            step_calls.eagerly(step.model.run_eagerly),
            _without_zero_weights(step.model) if varied else contextlib.nullcontext(),
        ):
            outcome = _agree_op_by_op(step, rows, comparison) or _Outcome.of(probe)
            if outcome.is_conclusive and not outcome.disagreements() and rare:
                outcome = _of_some_rows(probe, probe.some_rows()) or outcome
            if not outcome.is_conclusive:
                exact = _compare_in_float64(probe)
                exact = exact or _by_order(probe, outcome, NO_ROUNDING, ())
                # Where the order of the rows decides, as with a capacity, the parts may agree by chance in one of them.
                others = [np.random.default_rng(n).permutation(probe.count).tolist() for n in range(4 * rare)]
                outcome = exact or _of_some_rows(probe, others) or outcome
    except tf.errors.ResourceExhaustedError:
        _refuse_by_structure(step, [comparison])
        return None  # the first batch will say more
    except (ValueError, TypeError, tf.errors.OpError) as error:
        if varied:
            return _agree(step, given, comparison._replace(as_given=True), choice)
        if not comparison.divides and (comparison.parts == "micro-batches" or not probe.computed_whole):
            return _agree(step, rows, comparison._replace(divides=True), choice)
        of_rows = tf.errors.InvalidArgumentError if probe.computed_whole else tf.errors.OpError  # not of a lost worker
        if comparison.kind == "train" and not isinstance(error, of_rows):
            raise
        if probe.computed_whole:
            why = f"it cannot be computed from parts of a batch ({type(error).__name__}: {one_line(error, 200)})"
            instead = f"make it depend on each row alone, {disagreement.fix(comparison)}"
            raise UserError(f"{disagreement.found(comparison)}: {why}", instead) from error
        _refuse_by_structure(step, [comparison])
        # The batches may have a shape that these few rows have not; what is wrong with those, too, they will say.
        logger.info(f"WARNING: not checked whether {comparison} agree: {type(error).__name__}: {one_line(error, 200)}")
        return False
    seconds = time.perf_counter() - start
    if varied and not outcome.whole.is_finite():  # noise in a logarithm, say
        return _agree(step, given, comparison._replace(as_given=True), choice)
    if not outcome.is_conclusive:
        _refuse_by_structure(step, [comparison], outcome.whole)
        logger.info(f"WARNING: not checked whether {comparison} agree: {_inconclusive_reason(probe, outcome)}")
        return False
    if disagreements := outcome.disagreements():
        raise UserError(disagreement.message(step, rows, comparison, disagreements, probe.adding))
    if mark and differ:
        with contextlib.suppress(OSError):  # without a writable cache it is checked again
            passed_folder().mkdir(parents=True, exist_ok=True)
            (passed_folder() / mark).touch()
    step.checked[key] = probe if not step.model.run_eagerly and (rare or not differ) else None
    most = max((d for n, d in outcome.distances.items() if n != "the gradient"), default=0.0)
    numbers = f"{'outputs' if comparison.kind == 'predict' else 'loss'} {most:.0e}"
    if comparison.kind == "train":
        numbers += f", gradient {outcome.distances.get('the gradient', 0.0):.0e}"
    logger.info(f"checked: {comparison} {_VERB[comparison.kind]} this model, {numbers} ({seconds:.1f} s)")
    return True


def _differing_rows(rows: tuple[Structure, ...]) -> tuple[tuple[Structure, ...], bool]:
    """Adds noise to floating inputs that are the same in all rows, as of blank images, on which all models agree.

    Returns also whether rows differ now. Blank integers stay: later batches show what a model makes of them.
    """
    random = np.random.default_rng(0)  # the same on all workers

    def differing(leaf: tf.Tensor) -> tf.Tensor:
        return leaf + random.normal(size=leaf.shape) if leaf.dtype.is_floating and _is_blank(leaf) else leaf

    x = keras.tree.map_structure(differing, rows[0])
    return (x, *rows[1:]), not all(map(_is_blank, keras.tree.flatten(x)))


def _is_blank(leaf: tf.Tensor) -> bool:
    rows = np.asarray(leaf) if isinstance(leaf, tf.Tensor) else np.arange(2)  # sparse ones are taken to differ
    return bool((rows == rows[:1]).all())


@contextlib.contextmanager
def _without_zero_weights(model: keras.Model) -> Iterator[None]:
    """Gives weights that are all zero other values meanwhile: what is behind a gate that is closed would not show."""
    zeros = [v for v in model.weights if keras.backend.is_float_dtype(v.dtype) and not np.any(v)]
    random, before = np.random.default_rng(0), layer_state.Snapshot(zeros)
    try:
        for variable in zeros:
            variable.assign(random.uniform(0.1, 0.5, variable.shape))  # positive, as a variance has to be
        yield
    finally:
        before.put_back()


def _inconclusive_reason(probe: EquivalenceProbe, outcome: _Outcome) -> str:
    if not outcome.whole.is_finite():
        return "loss, metrics or gradient are not finite"
    repeated = outcome.whole.distance(probe.run(True, times=2))
    # The state of layers moves on with each pass, random or not.
    if any(distance > ROUNDING for name, distance in repeated.items() if not name.startswith(STATE)):
        return "the model draws random numbers of its own"
    name = max(outcome.noise, key=outcome.noise.__getitem__)
    return f"rounding alone changes {name} by {outcome.noise[name]:.0e}"
