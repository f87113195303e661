"""A comparison as a picture: examples per second of each run, and efficiency by replicas."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfdist.compare.results import Row
from tfdist.config import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {  # Okabe and Ito's, which people with any colour vision can tell apart
    "default": "#555555",
    "mirrored": "#0072B2",
    "multi_worker": "#D55E00",
    "horovod": "#009E73",
    "tpu": "#CC79A7",
}
MARKERS = {"default": "o", "mirrored": "s", "multi_worker": "^", "horovod": "D", "tpu": "v"}
_GREY = "#666666"


def draw(path: pathlib.Path, title: str, rows: Sequence[Row], caption: str) -> None:
    """Writes a PNG.

    Raises:
      OSError: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 1.9 + 0.42 * max(5, len(rows))), dpi=120, width_ratios=[3, 2], layout="constrained"
    )
    figure.suptitle(title, fontsize=13)
    figure.supxlabel(caption, fontsize=8, color=_GREY)
    _throughput(left, rows)
    _efficiency(right, rows)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    try:
        with atomic_file.replacing(path) as temporary:
            figure.savefig(temporary, format="png")
    finally:
        pyplot.close(figure)


def _throughput(axes: Axes, rows: Sequence[Row]) -> None:
    """Draws a bar for each run."""
    most = max((row.examples_per_second or 0 for row in rows), default=0) or 1
    for i, row in enumerate(rows):
        rate = row.examples_per_second
        if rate is None:
            axes.text(
                0.01 * most, i, f"no figures ({row.status})", va="center", fontsize=9, color=_GREY, style="italic"
            )
            continue
        wrong = row.weights == "different"
        axes.barh(i, rate, height=0.62, color="white" if wrong else COLOURS[row.strategy],
                  edgecolor=COLOURS[row.strategy], hatch="////" if wrong else None, linewidth=1)  # fmt: skip
        text = f"{rate:,.0f}" + ("  OTHER WEIGHTS" if wrong else "")
        axes.text(rate + 0.01 * most, i, text, va="center", fontsize=9, color="#B00000" if wrong else "black")
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.22 * most)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("examples per second")
    axes.tick_params(axis="y", length=0)


def _efficiency(axes: Axes, rows: Sequence[Row]) -> None:
    """Draws a line for each strategy, over the number of replicas."""
    known = [row for row in rows if row.efficiency is not None and row.weights != "different"]
    axes.axhline(1.0, color=_GREY, linewidth=1, linestyle=":")
    axes.annotate("all that can be had", (1, 1), (0, 3), ("axes fraction", "data"), "offset points",
                  ha="right", fontsize=8, color=_GREY)  # fmt: skip
    for strategy in dict.fromkeys(row.strategy for row in known):
        own = sorted((row for row in known if row.strategy == strategy), key=lambda row: row.replicas)
        start = [] if own[0].replicas == 1 else [(1, 1.0)]  # the reference
        points = start + [(row.replicas, row.efficiency or 0.0) for row in own]
        axes.plot(*zip(*points), color=COLOURS[strategy], marker=MARKERS[strategy], markersize=7,
                  linewidth=2, label=strategy, alpha=0.9)  # fmt: skip
        crowded = [(row.replicas, row.efficiency or 0.0) for row in own if row.oversubscribed]
        if crowded:
            axes.plot(*zip(*crowded), linestyle="", marker=MARKERS[strategy], markersize=7,
                      markerfacecolor="white", markeredgecolor=COLOURS[strategy])  # fmt: skip
    counts = sorted({1, *(row.replicas for row in known)})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlim(0.85, 1.18 * counts[-1])
    axes.set_ylim(0, max([1.15, *(1.1 * (row.efficiency or 0) for row in known)]))
    axes.set_xlabel("replicas")
    hollow = " (hollow: fewer cores than threads)" * any(row.oversubscribed for row in known)
    axes.set_ylabel(f"efficiency{hollow}", fontsize=9)
    axes.legend(frameon=False, fontsize=9, loc="lower left")
