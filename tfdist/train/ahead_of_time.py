"""`--dry_run --topology=...`: compiles the update of a prepared experiment for devices that are not here."""

import dataclasses
from typing import TYPE_CHECKING

from tfdist import config
from tfdist.config import field_syntax
from tfdist.config.messages import sized
from tfdist.config.runtime_options import Environment
from tfdist.distributed import connect
from tfdist.errors import UserError
from tfdist.topology import compiler, known

if TYPE_CHECKING:
    from tfdist.distributed.distribution import Distribution
    from tfdist.topology.program import Program
    from tfdist.train.preparation import Preparation


def check(where: Environment) -> None:
    """Raises UserError for an unknown topology, or one whose compilers are missing; before anything is prepared."""
    if not where.topology:
        return
    topology = known.find(where.topology)
    compiler.python(topology.compilers, f"--topology={topology.name}")


def locate(where: Environment) -> connect.Placement:
    """Returns `connect.locate`; with `--topology`, for this machine's CPU and as many replicas as the topology has."""
    if not where.topology:
        return connect.locate(where)
    topology = known.find(where.topology)
    placement = connect.locate(dataclasses.replace(where, strategy="default", devices="none"))
    reason = f"--topology={topology.name} is compiled for, and nothing is trained"
    return dataclasses.replace(placement, choice=connect.StrategyChoice("default", reason, topology.replicas))


def create(placement: connect.Placement, topology: str, facts: dict[str, str]) -> "Distribution":
    """Starts TensorFlow, as `connect.create`; with `--topology`, returns the strategy of a program for it."""
    distribution = connect.create(placement, facts)
    if not topology:
        return distribution
    from tfdist.topology import program

    spec = known.find(topology)
    device = "TPU" if spec.compilers == "tpu" else "GPU"
    return program.distribution(spec.replicas, device, placement.choice.reason)


def rehearse(prepared: "Preparation", distribution: "Distribution", name: str) -> list[str]:
    """Compiles the update, and returns the compiler's figures as lines for a terminal.

    Raises UserError if it does not fit or cannot be compiled; TrainingError if the compiler fails.
    """
    from tfdist.keras_bridge import preconditions

    topology, train = known.find(name), prepared.experiment.train
    exported = _export(prepared, distribution)
    result = compiler.compiled(exported, topology)
    check_fits(result.needs, topology, train)
    bound = roofline(_counted(result, prepared, exported.rows), train.batch_size, train.precision, topology)
    notes = []
    if topology.compilers == "cuda":
        text = "this is what XLA needs (--jit=on), not TensorFlow's own kernels (--jit=off)"
        if topology.replicas > 1 and preconditions.synchronizes(prepared.model):
            text += "; synchronized BatchNorm runs without XLA on several GPUs"
        notes = [f"  {'note':<12} {text}"]
    return [*lines(result, exported.rows, topology), *bound, *notes]


def check_fits(needs: int, topology: known.Topology, train: config.Train) -> None:
    """Raises UserError if an update needs more bytes of each device than that has."""
    if needs > topology.memory:
        micro = f" and train.accumulate={train.accumulate}" if train.accumulate > 1 else ""
        what = (
            f"an update with train.batch_size={train.batch_size}{micro} needs {sized(needs)} of each "
            f"{topology.device} of {topology.name}, which has {sized(topology.memory)}"
        )
        raise UserError(what, "lower train.batch_size, raise train.accumulate, or use a smaller model")


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


def _counted(result: compiler.Compiled, prepared: "Preparation", rows: int) -> compiler.Compiled:
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


def _export(prepared: "Preparation", distribution: "Distribution") -> "Program":
    """Returns the program of an update of this experiment, as in `fit`."""
    from tfdist.data import sources
    from tfdist.keras_bridge import preconditions
    from tfdist.models import optimizers
    from tfdist.topology import program

    train, optimizer = prepared.experiment.train, prepared.experiment.optimizer
    model, source = prepared.model, prepared.data.train
    preconditions.model_fits(model, distribution, train.accumulate)
    if prepared.class_weights:
        source = sources.weigh_classes(source, prepared.class_weights)
    factors = optimizers.layer_factors(model, field_syntax.layer_rates(optimizer), optimizer.layer_decay)
    sizes = train.batch_size, train.accumulate
    return program.export(model, source, distribution, *sizes, optimizer.reduce_dtype, tuple(factors))
