"""A plan as a picture: examples per second and efficiency over the number of machines."""

from __future__ import annotations

import pathlib

from tfdist.config import atomic_file
from tfdist.plan.report import ScalingPlan
from tfdist.plan.scaling import LEAST

_COLOURS = ("#0072B2", "#D55E00", "#009E73")  # Okabe and Ito's, which people with any colour vision can tell apart
_MARKERS = ("o", "s", "^")
_GREY = "#666666"


def draw(path: pathlib.Path, plan: ScalingPlan) -> None:
    """Writes a PNG.

    Raises:
      OSError: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), dpi=120, layout="constrained")
    figure.suptitle(plan.title(), fontsize=11)
    for i, variant in enumerate(plan.variants):
        known = [row[i] for row in plan.rows if row[i] is not None]
        nodes = [p.nodes for p in known if p]
        style = dict(color=_COLOURS[i], marker=_MARKERS[i], linewidth=2, label=variant.name)
        left.plot(nodes, [p.examples_per_second for p in known if p], **style)
        right.plot(nodes, [p.efficiency for p in known if p], **style)
    counts = plan.request.nodes
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.set_xlabel("machines")
    left.set_yscale("log")
    left.set_ylabel("examples per second")
    right.set_ylim(0, 1.1)
    right.set_ylabel("efficiency")
    right.axhline(LEAST, color=_GREY, linewidth=1, linestyle=":")
    left.legend(frameon=False, fontsize=9)
    try:
        with atomic_file.replacing(path) as temporary:
            figure.savefig(temporary, format="png")
    finally:
        pyplot.close(figure)
