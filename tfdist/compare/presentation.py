"""A comparison on paper: two tables that fit into 80 columns, for a terminal or as Markdown, and a picture."""

import pathlib
from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table

from tfdist.compare.results import PARTS, SIMPLEST, Row
from tfdist.config import local_files

NONE = "-"
WEIGHTS = {"identical": "same bits", "different": "DIFFERENT", "": NONE}
"""Results of a look at the weights that the table has other words for."""
AGREEMENT = ("run", "weights", "distance", "most of it in", "evaluation")
SPEED = ("run", "examples/s", "ratio", "effic.", "start s", "GB", "input", "comp.", "sum", "Python")
LEGEND = (
    "distance: |a-b| / |a| over all weights. ratio: to the first row's speed. effic.: ratio by replica. start s: to "
    "the first update. GB: peak of one process, or of its GPU. input to Python: where the time "
    "goes; comp. has the exchanges of synchronized BatchNorm in it."
)
_LEFT = ("run", "weights", "most of it in", "evaluation")


def agreement(rows: Iterable[Row]) -> list[list[str]]:
    """Returns cells under `AGREEMENT`; a run that was not completed has its status in place of the figures."""
    cells = []
    for row in rows:
        figures = [_number(row.distance, ".1e"), row.variable or NONE, _evaluation(row)]
        done = row.status == "completed"
        weights = WEIGHTS.get(row.weights, row.weights) if done else row.status
        cells.append([row.name, weights, *(figures if done else [NONE] * 3)])
    return cells


def speed(rows: Iterable[Row]) -> list[list[str]]:
    """Returns cells under `SPEED` for the runs that were completed."""
    cells = []
    for row in rows:
        if row.status == "completed":
            size = row.peak_device_memory_bytes or row.peak_memory_bytes
            efficiency = _number(row.efficiency, ".2f") + "*" * (row.oversubscribed and row.efficiency is not None)
            rates = [_number(row.examples_per_second, ",.0f"), _number(row.speedup, ".2f"), efficiency]
            costs = [_number(row.seconds_to_first_update, ".1f"), _number(size and size / 1e9, ".1f")]
            cells.append([row.name, *rates, *costs, *(_number(row.time.get(part), ".0%") for part in PARTS)])
    return cells


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _evaluation(row: Row) -> str:
    """Returns the metric that people look at, and how far it is from the reference's."""
    name = next((name for name in row.evaluation if name != "loss"), "loss")
    if row.evaluation.get(name) is None:
        return NONE
    apart = row.evaluation_difference.get(name)
    own = "" if row.weights == "reference" or apart is None else f" ({apart:+.4f})"
    return f"{name} {row.evaluation[name]:.4f}{own}"


def notes(rows: Sequence[Row], settings: str) -> list[str]:
    """Returns what one has to know to read the tables."""
    lines = [f"{row.name}: {row.status}: {row.reason}" for row in rows if row.status != "completed"]
    lines += [settings, LEGEND]
    if any(row.oversubscribed and row.efficiency is not None for row in rows):
        lines.append("* More threads than cores: the efficiency says nothing about the strategy.")
    return lines


def show(console: Console, rows: Sequence[Row], settings: str, verdict: Sequence[str]) -> None:
    """Prints everything, no line longer than the console is wide."""
    console.print(_table(AGREEMENT, agreement(rows)))
    console.print()
    console.print(_table(SPEED, speed(rows)))
    console.print()
    for line in notes(rows, settings):
        console.print(line, markup=False, style="dim")
    console.print()
    for line in verdict:
        console.print(line, markup=False, style="bold red" if "OTHER WEIGHTS" in line or "WRONG" in line else None)


def _table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    # No rules and no boxes: plain letters are right in every terminal, log and encoding.
    table = Table(box=None, padding=(0, 2 if head is AGREEMENT else 1, 0, 0), pad_edge=False, header_style="bold")
    for name in head:
        # Nothing is cut: what is too long goes on in the next line.
        justify: Literal["left", "right"] = "left" if name in _LEFT else "right"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name not in ("most of it in", "evaluation"))
    for row in cells:
        table.add_row(*row)
    return table


def markdown(title: str, rows: Sequence[Row], settings: str, verdict: Sequence[str]) -> str:
    """Returns the same as Markdown, to paste into an issue."""

    def table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
        align = [":--" if name in _LEFT else "--:" for name in head]
        return "\n".join("| " + " | ".join(row) + " |" for row in (head, align, *cells))

    paragraphs = [f"# {title}", "\n".join(f"* {line}" for line in verdict)]
    paragraphs += [table(AGREEMENT, agreement(rows)), table(SPEED, speed(rows)), "\n\n".join(notes(rows, settings))]
    return "\n\n".join(paragraphs) + "\n"


def draw(path: pathlib.Path, title: str, rows: Sequence[Row], caption: str) -> None:
    """Writes a PNG with a bar of throughput for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.style.use("tableau-colorblind10")
    figure, axes = pyplot.subplots(figsize=(9, 1.9 + 0.42 * max(5, len(rows))), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=13)
    figure.supxlabel(caption, fontsize=8, color="#666666")
    rates = [row.examples_per_second or 0 for row in rows]
    bars = axes.barh(range(len(rows)), rates, 0.62, color=[f"C{SIMPLEST.index(row.strategy)}" for row in rows])
    beside = lambda row, rate: f"{rate:,.0f}" + "  OTHER WEIGHTS" * (row.weights == "different")
    labels = [beside(*pair) if pair[1] else f"no figures ({pair[0].status})" for pair in zip(rows, rates)]
    axes.bar_label(bars, labels, padding=4, fontsize=9)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.3 * max(rates, default=0) or 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("examples per second")
    try:
        with local_files.replacing(path) as temporary:
            figure.savefig(temporary, format="png")
    finally:
        pyplot.close(figure)
