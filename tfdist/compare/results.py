"""What a comparison comes to: figures of each run against the reference, and a verdict in words. Pure values.

The reference is `default` on one device, with as many threads and the same XLA setting as each replica of the others.
*Speed-up* is examples per second against the reference, *efficiency* the speed-up by replica, at most 1.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.verification.weight_distance import Difference

PARTS = ("input", "compute", "all_reduce", "python")  # parts of the time in `result.json`
SIMPLEST = ("default", "mirrored", "multi_worker", "horovod", "tpu")
"""What needs least first: a process, several, another library."""
CLOSE = 0.05  # A strategy that is faster by no more than this is not worth being less simple
EVALUATION = 10.0
"""How much further than the weights what they are evaluated to may be apart, as in the tests of the promise."""
COUNTED = 1e-3  # the same for metrics: rounding may move an example, which they count, over the border of a class
BUSY = 0.25  # cores that other programs may take before it is said
SHORT_S = 1.0  # A speed that rests on less is rough
JUDGED = ("reference", "identical", "same", "checked")
"""Results of a look at the weights after which a strategy is known to train the same model."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One run; the names are those of `compare.json`. None where there is nothing to tell."""

    name: str
    strategy: str
    replicas: int
    threads: int | None  # per replica; None for TensorFlow's own choice
    command: str
    folder: str
    status: str  # `completed`, `unavailable` (it cannot run here) or `failed`
    reason: str = ""
    jit: str = ""
    others_busy: float | None = None  # cores that other programs kept busy just before the run
    seconds: float | None = None  # from the start of its processes to their end
    examples_per_second: float | None = None
    seconds_to_first_update: float | None = None
    peak_memory_bytes: int | None = None  # of the first process
    peak_device_memory_bytes: int | None = None
    steady_seconds: float | None = None  # of training without what is compiled on the way: the speed rests on these
    time: Mapping[str, float | None] = dataclasses.field(default_factory=dict)  # shares of these, by name of `PARTS`
    flops_share: float | None = None  # of what the devices can do at most, where that is known
    loss: tuple[float, ...] = ()  # by epoch
    evaluation: Mapping[str, float] = dataclasses.field(default_factory=dict)
    weights_sha256: str = ""
    oversubscribed: bool = False  # fewer cores than threads of all replicas
    speedup: float | None = None
    efficiency: float | None = None
    weights: str = ""
    """`reference`, `identical` (all bits), `same` (to rounding), `checked` (apart, and the same in the check),
    `different`, or empty if they were not compared."""
    why: str = ""  # what `weights` rests on, where that is not plain
    distance: float | None = None
    variable: str = ""  # where most of the distance is
    largest: float | None = None
    scale: float | None = None
    check_distance: float | None = None
    check_variable: str = ""
    evaluation_difference: Mapping[str, float] = dataclasses.field(default_factory=dict)


def measured(result: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields of a row, from the `result.json` and `environment.json` of its run."""
    spent = {name: seconds for name, seconds in (result.get("time") or {}).items() if name in PARTS}
    total = sum(seconds for seconds in spent.values() if seconds)
    copied = ("examples_per_second", "seconds_to_first_update", "peak_memory_bytes", "peak_device_memory_bytes",
              "flops_share", "weights_sha256")  # fmt: skip
    return {name: result[name] for name in copied if name in result} | {
        "evaluation": {  # by class, as F1Score gives it, under a name for each
            name + "".join(f"[{i}]" for i in place): value
            for name, values in result.get("evaluation", {}).items()
            for place, value in np.ndenumerate(np.array(values, object))
        },
        "jit": environment.get("jit", ""),
        "steady_seconds": total if spent else None,
        "time": {name: None if s is None else s / total for name, s in spent.items()} if total else {},
        "loss": tuple(math.nan if x is None else x for x in result.get("history", {}).get("loss", ())),
    }


def rated(row: Row, reference: Row, cores: int | None) -> Row:
    """Returns a row with its speed against the reference; `cores` is None where replicas are not on the CPU."""
    speedup = efficiency = None
    if row.examples_per_second and reference.examples_per_second:
        speedup = row.examples_per_second / reference.examples_per_second
        if row.threads == reference.threads and row.jit == reference.jit:  # else it compares two other things
            efficiency = speedup / row.replicas
    crowded = cores is not None and row.replicas * (row.threads or 1) > cores
    pairs = {name: (value, reference.evaluation.get(name, value)) for name, value in row.evaluation.items()}
    differences = {name: 0.0 if a == b else math.nan if None in (a, b) else a - b for name, (a, b) in pairs.items()}
    row = dataclasses.replace(row, speedup=speedup, efficiency=efficiency, oversubscribed=crowded)
    return dataclasses.replace(row, evaluation_difference=differences)


def judged(row: Row, reference: Row, difference: Difference, tolerance: float) -> Row:
    """Returns a row with what a look at its weights says; `different` until a check has said more.

    Tolerance 0, with virtual replicas, demands all bits, also of what was measured on the way.
    """
    distance = difference.distance
    size = lambda name: max(1.0, abs(row.evaluation.get(name) or 0.0))
    most = lambda name: max(EVALUATION * tolerance * size(name), COUNTED if name != "loss" else 0.0)
    apart = [(name, abs(by)) for name, by in row.evaluation_difference.items() if not abs(by) <= most(name)]  # NaN, too
    identical = row.weights_sha256 == reference.weights_sha256 and distance == 0
    verdict, why = "identical" if identical else "same", ""
    if not tolerance and not identical:
        why = "with train.virtual_replicas all bits must be the same"
    elif not tolerance and (row.loss != reference.loss or any(row.evaluation_difference.values())):
        why = "the weights are the same to the last bit, and the losses on the way or the evaluation are not"
    elif tolerance and not distance <= tolerance:  # NaN, too
        why = f"{distance:.1e} is more than {tolerance:g}"
    elif tolerance and (other := other_loss(row.loss, reference.loss, EVALUATION * tolerance)):
        why = other
    elif tolerance and apart:
        why = f"the same weights are evaluated to another {apart[0][0]} ({apart[0][1]:.1e} apart)"
    row = dataclasses.replace(row, weights="different" if why else verdict, why=why, variable=difference.variable)
    largest, scale = _finite(difference.largest), _finite(difference.scale)
    return dataclasses.replace(row, distance=_finite(distance), largest=largest, scale=scale)


def other_loss(losses: Sequence[float], expected: Sequence[float], tolerance: float) -> str:
    """Says in which epoch a loss is another than expected, "" if in none.

    Weights that hardly move, or large ones that are frozen, would hide by their norm that others are trained.
    """
    for epoch, (loss, other) in enumerate(itertools.zip_longest(losses, expected, fillvalue=math.nan), 1):
        if not (abs(loss - other) <= tolerance * max(1.0, abs(other)) or (math.isnan(loss) and math.isnan(other))):
            return f"the loss of epoch {epoch} is {loss:.9g} and not {other:.9g}"
    return ""


def checked(row: Row, difference: Difference, tolerance: float, updates: int, loss: str = "") -> Row:
    """Returns a row whose weights differ, with what the check in float64 says of it, which ran without the layers that
    by nature depend on the number of replicas; `loss` is what `other_loss` says of that."""
    row = dataclasses.replace(row, check_distance=_finite(difference.distance), check_variable=difference.variable)
    if not difference.distance <= tolerance:
        why = f"in float64, too, {difference.distance:.1e} after {updates} updates, most in {difference.variable}"
        return dataclasses.replace(row, why=why)
    if loss:
        return dataclasses.replace(row, why=f"in float64, too, {loss}")
    alike = "in float64, without random layers and with BatchNorm synchronized"
    why = f"{alike}, the first {updates} updates agree to {difference.distance:.0e}"
    return dataclasses.replace(row, weights="checked", why=why)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def best(rows: Iterable[Row]) -> Row:
    """Returns the fastest of those that can be used, or a simpler one that is hardly slower."""
    usable = [row for row in rows if row.weights in JUDGED and row.examples_per_second]
    fastest = max(row.examples_per_second or 0 for row in usable)
    near = [row for row in usable if (row.examples_per_second or 0) >= (1 - CLOSE) * fastest]
    return min(near, key=lambda row: (SIMPLEST.index(row.strategy), row.replicas, -(row.examples_per_second or 0)))


def verdict(rows: list[Row]) -> list[str]:
    """Returns what to take from a comparison, in sentences; the first is about the weights."""
    reference, others = rows[0], rows[1:]
    done = [row for row in others if row.weights]
    lines = [_different(row) for row in done if row.weights == "different"]
    alike = [row for row in done if row.weights in ("identical", "same")]
    if not done:
        lines.append(f"Nothing ran besides {reference.name}: there is nothing to compare.")
    elif len(alike) == len(done):
        lines.append(f"All end with the same weights{_closeness(alike)}.")
    elif alike:
        names = ", ".join(row.name for row in alike)
        lines.append(f"The same weights as {reference.name}: {names}{_closeness(alike)}.")
    same = "trains the same model, with weights"
    grown = [(row, row.distance or math.nan) for row in done if row.weights == "checked"]
    lines += [f"{row.name} {same} {distance:.0e} apart: {row.why}." for row, distance in grown]
    lines += [f"{row.name} failed: {row.reason}" for row in others if row.status == "failed"]
    if done and reference.examples_per_second:
        chosen = best(rows)
        if chosen is reference or chosen.speedup is None:
            lines.append("Use default on one device: nothing that trains the same model is faster here.")
        else:
            efficiency = f", efficiency {chosen.efficiency:.2f}" if chosen.efficiency is not None else ""
            share = f", {chosen.flops_share:.0%} of what the devices can do" if chosen.flops_share is not None else ""
            speed = f"{chosen.speedup:.2f} times the speed of {reference.name}{efficiency}{share}"
            lines.append(f"Use {chosen.name}: {speed}.")
        lines += _doubts([row for row in rows if row.examples_per_second])
    return lines


def _doubts(rows: Sequence[Row]) -> list[str]:
    """Says why the speeds may be wrong, in one sentence or none."""
    reasons, busy = [], max(row.others_busy or 0.0 for row in rows)
    if busy > BUSY:
        reasons.append(f"other programs kept up to {busy:.1f} cores busy")
    short = [row for row in rows if row.steady_seconds is not None and row.steady_seconds < SHORT_S]
    if short:
        row = min(short, key=lambda row: row.steady_seconds or 0.0)
        reasons.append(f"that of {row.name} rests on {row.steady_seconds:.2g} s (more train.epochs help)")
    return [f"The speeds are rough: {', and '.join(reasons)}."] if reasons else []


def _different(row: Row) -> str:
    if row.distance is None:
        return f"{row.name} ends with OTHER WEIGHTS, which are not finite ({row.variable}): do not use it."
    if row.distance == 0 or "evaluated" in row.why or "the loss of" in row.why:
        return f"{row.name} is WRONG: {row.why}: do not trust its figures."
    size = f", up to {row.largest:.2g} where weights are up to {row.scale:.2g}" if row.largest is not None else ""
    return (
        f"{row.name} ends with OTHER WEIGHTS: {row.distance:.1e} of their norm apart, most of it in "
        f"{row.variable}{size}; {row.why}. It does not train the same model: do not use it."
    )


def _closeness(rows: list[Row]) -> str:
    most = max(rows, key=lambda row: row.distance or 0.0)
    if not most.distance:
        return ", to the last bit"
    return f", {most.distance:.0e} of their norm apart at most ({most.variable}, {most.name})"


def exit_code(rows: list[Row]) -> int:
    """Returns 0 if all that ran end with the same, 1 if one does not or failed, 2 if there was nothing to compare."""
    others = rows[1:]
    if any(row.weights == "different" or row.status == "failed" for row in others):
        return 1
    return 0 if any(row.weights for row in others) else 2
