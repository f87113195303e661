"""A plan on paper: a table that fits into 80 columns, the same as Markdown, and as a record. No TensorFlow."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tfdist import __version__, config
from tfdist.config.runtime_options import Environment
from tfdist.plan import scaling
from tfdist.plan.cost import Compute, HostSums, Machines, NetworkLink, Prediction
from tfdist.plan.quantities import in_bits, in_bytes, in_time
from tfdist.plan.scaling import Variant

if TYPE_CHECKING:
    from tfdist.plan.workload import MeasuredUpdates

RECORD = "plan.json"
NONE = "-"
LEGEND = (
    "each: examples of the worker that has the most. effic.: the speed over that of one worker, by worker. "
    "sums: part of an update that is spent on nothing but the exchange."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What is to be planned."""

    nodes: tuple[int, ...]
    nproc_per_node: int
    link: NetworkLink
    environment: Environment
    """In which updates are measured."""
    seconds: float
    """How long to measure updates of each size."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScalingPlan:
    """What was measured, and what is predicted from it."""

    experiment: config.Experiment
    request: Request
    machines: Machines
    variants: tuple[Variant, ...]
    measured: tuple[MeasuredUpdates, ...]
    rows: tuple[tuple[Prediction | None, ...], ...]
    """For each number of machines, a prediction for each variant; None where the batch is too small."""
    verdict: str

    def title(self) -> str:
        """Returns what this is, in one line."""
        link = self.request.link
        return (
            f"PREDICTION for {self.experiment.name}: multi_worker on CPUs, {self.request.nproc_per_node} a machine, "
            f"{in_bits(link.bits_per_second)} and {in_time(link.latency)} between machines"
        )

    def notes(self) -> list[str]:
        """Returns what was measured, and what the columns mean."""
        compute, job = self.machines.compute, self.variants[0].job
        work = self.machines.work[job.dtype]
        inner = f", {len(job.in_passes)} more inside the passes of each micro-batch" if job.in_passes else ""
        return [
            f"Measured: an update takes {in_time(compute.update)} + {in_time(compute.micro)} by micro-batch + "
            f"{in_time(compute.example)} by example, --threads={self.request.environment.threads} "
            f"(within {100 * worst(compute, self.measured):.0f} % of each measurement).",
            f"A message of the ring takes {in_time(work.step_seconds)} and {1e9 * work.byte_seconds:.2g} ns a byte "
            f"without a network. An update sums {in_bytes(job.size)} in {len(job.messages)} messages{inner}. "
            f"Each of them takes {in_time(self.machines.sum_seconds)} more where two workers train, which wait for "
            "each other.",
            *([self._in_memory(self.machines.host)] if self.machines.host else []),
            LEGEND,
        ]

    def _in_memory(self, host: HostSums) -> str:
        work = host.work[self.variants[0].job.dtype]
        return (
            f"Workers of one machine alone sum in its memory: {in_time(work.step_seconds)} for a sum and "
            f"{1e9 * work.byte_seconds:.2g} ns a byte of two workers, and {in_time(host.sum_seconds)} more where they "
            "train."
        )

    def head(self) -> list[str]:
        """Returns the names of the columns."""
        names = ["nodes", "each", "updates/s", "effic.", "sums"]
        for variant in self.variants[1:]:
            names += [f"{variant.name}: {'examples/s' if variant.other_training else 'updates/s'}", "effic."]
        return names

    def cells(self) -> list[list[str]]:
        """Returns a row of the table for each number of machines."""
        lines = []
        for nodes, row in zip(self.request.nodes, self.rows):
            first = row[0]
            if first is None:
                line = [str(nodes), NONE, "no examples", NONE, NONE]
            else:
                share = first.exposed / first.seconds
                line = [str(nodes), str(first.rows), _rate(first.updates_per_second)]
                line += [f"{first.efficiency:.2f}", f"{share:.0%}"]
            for variant, prediction in zip(self.variants[1:], row[1:]):
                if prediction is None:
                    line += [NONE, NONE]
                    continue
                rate = prediction.examples_per_second if variant.other_training else prediction.updates_per_second
                line += [_rate(rate), f"{prediction.efficiency:.2f}"]
            lines.append(line)
        return lines

    def show(self) -> None:
        """Prints everything, no line longer than the console is wide."""
        console = Console(highlight=False, emoji=False)
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        for name in self.head():
            table.add_column(name, justify="right", overflow="fold")
        for cells in self.cells():
            table.add_row(*cells)
        console.print(self.title(), markup=False, style="bold")
        console.print()
        console.print(table)
        console.print()
        for line in self.notes():
            console.print(line, markup=False, style="dim")
        console.print()
        console.print(f"{self.verdict}.", markup=False)

    def markdown(self) -> str:
        """Returns the same as Markdown."""
        head, cells = self.head(), self.cells()
        table = "\n".join("| " + " | ".join(row) + " |" for row in (head, ["--:"] * len(head), *cells))
        return "\n\n".join([f"# {self.title()}", f"{self.verdict}.", table, *self.notes()]) + "\n"

    def record(self) -> dict[str, Any]:
        """Returns everything as it is written to `plan.json`."""
        rows = [
            {
                "nodes": nodes,
                **{v.name: None if p is None else dataclasses.asdict(p) for v, p in zip(self.variants, row)},
            }
            for nodes, row in zip(self.request.nodes, self.rows)
        ]
        return {
            "prediction": True,
            "experiment": config.flat(self.experiment),
            "request": dataclasses.asdict(self.request),
            "environment": {"host": platform.node(), "python": platform.python_version(), "tfdist": __version__},
            "measured": [dataclasses.asdict(m) for m in self.measured],
            "compute": dataclasses.asdict(self.machines.compute),
            "sum_seconds": self.machines.sum_seconds,
            "work": {dtype: dataclasses.asdict(work) for dtype, work in self.machines.work.items()},
            "host": self.machines.host and dataclasses.asdict(self.machines.host),
            "variants": [dataclasses.asdict(variant) for variant in self.variants],
            "rows": rows,
            "verdict": self.verdict,
        }


def make(
    experiment: config.Experiment,
    wanted: Request,
    machines: Machines,
    variants: Sequence[Variant],
    measured: Sequence[MeasuredUpdates],
) -> ScalingPlan:
    """Predicts each variant on each number of machines.

    Args:
      variants: what the experiment asks for, and then what could be used in its place.
    """
    rows = tuple(tuple(machines.predict(v.job, nodes) for v in variants) for nodes in wanted.nodes)
    verdict = scaling.verdict(machines, variants)
    return ScalingPlan(experiment, wanted, machines, tuple(variants), tuple(measured), rows, verdict)


def worst(compute: Compute, measured: Sequence[MeasuredUpdates]) -> float:
    """Returns by how much the line through the measurements is wrong at most, in relation to each."""
    return max(abs(compute.seconds(m.examples, m.accumulate) / m.seconds - 1) for m in measured)


def _rate(value: float) -> str:
    """Returns a rate with three digits at least."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
