"""A test of learning rates as a picture: the loss over the rate."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfdist.config import atomic_file

if TYPE_CHECKING:
    from tfdist.train.rate_range import Point

_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#666666"  # Okabe and Ito's
_ABOVE = 1.3
"""Share of the loss's fall that is shown above where it began; a loss that grows would push all else to the floor."""


def draw(path: pathlib.Path, name: str, points: Sequence[Point], suggested: float | None) -> None:
    """Writes a PNG.

    Args:
      suggested: the rate to begin with, if there is one.

    Raises:
      OSError: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    rates, means = [point.rate for point in points], [point.smoothed for point in points]
    axes.plot(rates, [point.loss for point in points], color=_GREY, alpha=0.35, linewidth=1, label="loss of the batch")
    axes.plot(rates, means, color=_BLUE, linewidth=2, label="smoothed")
    if suggested is not None:
        axes.axvline(suggested, color=_ORANGE, linewidth=1.5, linestyle="--", label=f"to begin with: {suggested:g}")
    lowest, first = min(means), max(means[: max(1, len(means) // 4)])
    room = max(abs(first - lowest), 1e-12)
    axes.set_ylim(lowest - 0.1 * room, lowest + (1 + _ABOVE) * room)
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    axes.set_title(f"{name}: {len(points)} updates with a growing learning rate", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    try:
        with atomic_file.replacing(path) as temporary:
            figure.savefig(temporary, format="png")
    finally:
        pyplot.close(figure)
