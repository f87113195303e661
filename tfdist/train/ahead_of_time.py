"""`--dry_run --topology=...`: compiles the update of a prepared experiment for devices that are not here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tfdist.config import field_syntax
from tfdist.config.messages import logger, sized
from tfdist.config.runtime_options import Environment
from tfdist.distributed import connect
from tfdist.distributed.strategy_choice import StrategyChoice
from tfdist.errors import UserError
from tfdist.topology import compiler, environment, known

if TYPE_CHECKING:
    from tfdist.distributed.distribution import Distribution
    from tfdist.topology.program import Program
    from tfdist.train.preparation import Preparation

TRIES = 6  # compilations that each of the two searches may take; a deep network takes minutes for one
FINENESS = 16  # the largest batch is searched with this relative precision


class Fit(NamedTuple):
    """Alternatives that fit."""

    batch: int  # the largest global batch that fits, 0 for none
    too_many: int  # the smallest one that does not
    accumulate: int  # micro-batches with which the requested batch fits, 0 where none were found


def largest_fit(
    needs: Callable[[int, int], float], batch: int, replicas: int, accumulate: int, used: float, limit: float
) -> Fit:
    """Searches for alternatives to a batch that needs `used` bytes of a device and has `limit`.

    `needs` compiles for a batch and a number of micro-batches, and returns the bytes per device.
    """
    parts = replicas * accumulate
    fits, too_many = 0, -(-batch // parts)
    step = max(1, too_many // FINENESS)
    guess = int(too_many * limit / used)  # memory grows no faster than the batch
    for _ in range(TRIES):
        if too_many - fits <= step:
            break
        middle = min(max(guess, fits + 1), too_many - 1)
        if needs(middle * parts, accumulate) <= limit:
            fits = middle
        else:
            too_many = middle
        guess = (fits + too_many) // 2
    micro = accumulate * max(2, -(-batch // (fits * parts))) if fits else 2 * accumulate
    tries = (micro * 2**i for i in range(TRIES))
    enough = (m for m in tries if m <= batch // replicas and needs(batch, m) <= limit)
    return Fit(fits * parts, too_many * parts, next(enough, 0))


def check(where: Environment, batch: int) -> None:
    """Raises UserError for an unknown topology, or one whose compilers are missing; before anything is prepared."""
    if not where.topology:
        return
    topology = known.find(where.topology)
    environment.python(topology.compilers, f"--topology={topology.name}")
    if not batch:
        what = "train.batch_size=auto looks for a batch on this machine"
        raise UserError(what, "give a number, and --topology names the largest that fits where that one does not")


def locate(where: Environment) -> connect.Placement:
    """Returns `connect.locate`; with `--topology`, for this machine's CPU and as many replicas as the topology has."""
    if not where.topology:
        return connect.locate(where)
    topology = known.find(where.topology)
    placement = connect.locate(dataclasses.replace(where, strategy="default", devices="none"))
    reason = f"--topology={topology.name} is compiled for, and nothing is trained"
    return dataclasses.replace(placement, choice=StrategyChoice("default", reason, topology.replicas))


def create(placement: connect.Placement, topology: str, facts: dict[str, str]) -> Distribution:
    """Starts TensorFlow, as `connect.create`; with `--topology`, returns the strategy of a program for it."""
    distribution = connect.create(placement, facts)
    if not topology:
        return distribution
    from tfdist.topology import program

    spec = known.find(topology)
    device = "TPU" if spec.compilers == "tpu" else "GPU"
    return program.distribution(spec.replicas, device, placement.choice.reason)


def rehearse(prepared: Preparation, distribution: Distribution, name: str) -> list[str]:
    """Compiles the update, and returns the compiler's figures as lines for a terminal.

    Raises UserError if it does not fit, with alternatives that do, or cannot be compiled; TrainingError if the compiler
    fails.
    """
    from tfdist.keras_bridge import preconditions

    topology, train = known.find(name), prepared.experiment.train
    exported = _export(prepared, distribution, train.batch_size, train.accumulate)
    result = compiler.compiled(exported, topology)
    if result.needs <= topology.memory:
        bound = roofline(_counted(result, prepared, exported.rows), train.batch_size, train.precision, topology)
        notes = []
        if topology.compilers == "cuda":
            text = "this is what XLA needs (--jit=on), not TensorFlow's own kernels (--jit=off)"
            if topology.replicas > 1 and preconditions.synchronizes(prepared.model):
                text += "; synchronized BatchNorm runs without XLA on several GPUs"
            notes = [f"  {'note':<12} {text}"]
        return [*lines(result, exported.rows, topology), *bound, *notes]

    def needs(batch: int, accumulate: int) -> float:
        logger.info(f"it does not fit: trying a batch of {batch} in {accumulate} micro-batches")
        return compiler.compiled(_export(prepared, distribution, batch, accumulate), topology).needs

    fit = largest_fit(
        needs, train.batch_size, topology.replicas, train.accumulate, max(1, result.needs), topology.memory
    )
    raise UserError(refusal(topology, train.batch_size, train.accumulate, result.needs, fit))


def refusal(topology: known.Topology, batch: int, accumulate: int, needs: int, fit: Fit) -> str:
    """Returns the error message for an update that does not fit, with alternatives that do."""
    micro = f" and train.accumulate={accumulate}" if accumulate > 1 else ""
    text = (
        f"an update with train.batch_size={batch}{micro} needs {sized(needs)} of each {topology.device} of "
        f"{topology.name}, which has {sized(topology.memory)}: "
    )
    ways = [f"use train.batch_size={fit.batch}, the largest seen to fit ({fit.too_many} do not)"] if fit.batch else []
    ways += [f"train.accumulate={fit.accumulate}"] if fit.accumulate else []
    return text + (", or ".join(ways) or "no batch fits, use a smaller model")


def lines(result: compiler.Compiled, rows: int, topology: known.Topology) -> list[str]:
    """Returns the compiler's figures of an update that fits."""
    count = f"{topology.replicas} x {topology.device}"
    flops = f", {result.flops / 1e9:,.1f} GFLOP per update and device" if result.flops else ""
    sums = f"{result.all_reduces} all-reduce{'s' * (result.all_reduces != 1)}"
    exchanged = f"{sums} of {sized(result.exchanged)} per update"
    rest = f"temporaries {sized(result.temporaries)}, output {sized(result.outputs)} besides, code {sized(result.code)}"
    texts = [
        ("topology", f"{topology.name}: {count}, {rows} rows on each"),
        ("compiled", f"in {result.seconds:.1f} s{flops}"),
        ("fits", f"{sized(result.needs)} of {sized(topology.memory)} per device: arguments {sized(result.arguments)},"),
        ("", rest),
        ("exchange", exchanged if topology.replicas > 1 else "none, there is one replica"),
    ]
    return [f"  {name:<12} {text}" for name, text in texts]


def _counted(result: compiler.Compiled, prepared: Preparation, rows: int) -> compiler.Compiled:
    """Returns a compiler's figures, with lower bounds of those that it does not count, as the one for GPUs."""
    from tfdist.monitoring import flops

    if result.flops and result.traffic:
        return result
    products = flops.per_example(prepared.model, prepared.data.train.specs[0]) or 0
    return dataclasses.replace(
        result, flops=result.flops or products * rows, traffic=result.traffic or result.arguments + result.outputs
    )


def roofline(result: compiler.Compiled, batch: int, precision: str, topology: known.Topology) -> list[str]:
    """Returns an upper bound of the speed (Williams, Waterman and Patterson, *Roofline*, 2009), as a line.

    An update takes at least as long as its FLOPs, its memory traffic or its all-reduces (a ring: `2 (W - 1) / W` times
    the bytes) take at the peak of the data sheet, if all three overlap. No line if the compiler has counted none of
    them, or the peak of a GPU at this precision is not known.
    """
    from tfdist.monitoring import flops

    peak = topology.flops or flops.peak(topology.device, precision)
    if not peak or not result.flops or not result.traffic:
        return []
    ring = 2 * (topology.replicas - 1) / topology.replicas * result.exchanged
    seconds = {
        "FLOPs": result.flops / peak,
        "memory": result.traffic / topology.bandwidth,
        "all-reduce": ring / topology.link,
    }
    binding = max(seconds, key=lambda part: seconds[part])
    bound = 1e3 * seconds.pop(binding)
    rest = ", ".join(f"{part} {1e3 * s:.3g}" for part, s in seconds.items() if s)
    return [f"  {'bound':<12} at most {1e3 * batch / bound:,.0f} examples/s, by {binding} ({bound:.3g} ms; {rest})"]


def _export(prepared: Preparation, distribution: Distribution, batch: int, accumulate: int) -> Program:
    """Returns the program of an update of this experiment, as in `fit`."""
    from tfdist.data import sources
    from tfdist.keras_bridge import preconditions
    from tfdist.models import layerwise_rates
    from tfdist.topology import program

    model, optimizer, source = prepared.model, prepared.experiment.optimizer, prepared.data.train
    preconditions.model_fits(model, distribution, accumulate)
    if prepared.class_weights:
        source = sources.weigh_classes(source, prepared.class_weights)
    factors = layerwise_rates.factors(model, field_syntax.layer_rates(optimizer), optimizer.layer_decay)
    return program.export(model, source, distribution, batch, accumulate, optimizer.reduce_dtype, tuple(factors))
