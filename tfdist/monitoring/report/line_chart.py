"""Line charts as inline SVG in the colors of the page, readable without a script.

Horizontal positions are percentages and text has a fixed size, so that a chart is as legible on a phone as on a wide
screen. The lines themselves are in an inner SVG that is stretched to fit.
"""

import collections
import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from matplotlib import ticker

from tfdist.monitoring.report.html import Html, join, tag

POINTS = 500  # a line is thinned to about this number
HEIGHT = 190  # of the plot in pixels, without its labels
_MARKS = 200  # checkpoints that are marked at most, and other events


class Line(NamedTuple):
    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]  # None is a gap
    color: int = 1  # 1 to 6, as the page defines them
    faint: bool = False  # drawn thin, behind the others

    @property
    def known(self) -> list[float]:
        return [y for y in self.ys if y is not None]


class Mark(NamedTuple):
    """An event at one point of the axis."""

    x: float
    kind: str  # `checkpoint`, a tick at the bottom; `resumed`, `rollback` or `other`, a line from top to bottom


class Axis(NamedTuple):
    """An axis from `low` to `high`, with the positions of its labels."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Returns the position of a value, from 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def value(number: float) -> str:
    """Formats a metric, as precise as on the terminal: `0.9806`, `12.346`, `1.2e-07`."""
    size = abs(number)
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{number:.4g}"
    return f"{number:,.{max(0, 5 - len(str(int(size))))}f}"


def short(number: float) -> str:
    """Formats any other measurement, with three digits or more: `0.00352`, `75.1`, `5,860`."""
    return f"{number:,.0f}" if 100 <= abs(number) < 1e7 else f"{number:.3g}"


def plot(
    title: str,
    lines: Sequence[Line],
    across: str = "updates",
    unit: str = "",
    from_zero: bool = False,
    marks: Sequence[Mark] = (),
    note: str = "",
    text: Callable[[float], str] = short,
) -> Html:
    """Draws a chart with title, legend, axes and read-out; empty when there are no values.

    Args:
      across: label of the horizontal axis.
      unit: of the values.
      note: a sentence below.
      text: formats the values in the legend.
    """
    lines = [line for line in lines if line.known]
    if not lines:
        return Html("")
    marks = [m if m.kind in ("checkpoint", "resumed", "rollback") else m._replace(kind="other") for m in marks]
    xs = [x for line in lines for x in line.xs] + [mark.x for mark in marks]
    wide = linear(min(0.0, *xs), max(xs), 5, tight=True)
    high = vertical([y for line in lines for y in line.known], from_zero)
    unit = ", ".join(filter(None, (unit, "log scale" if high.log else "")))
    texts = [label(tick) for tick in high.ticks]
    left, summaries = f"--left:{max(3.1, 0.6 * max(len(t) for t in texts)):.1f}em", []
    for line in lines:
        first, last, low, most = (text(y) for y in (line.known[0], line.known[-1], min(line.known), max(line.known)))
        summaries.append(f"{line.name}: from {first} to {last}, lowest {low}, highest {most}")
    pairs = [zip(*thin(line.xs, line.ys)) for line in lines]
    lines = [line._replace(xs=xs, ys=ys) for line, (xs, ys) in zip(lines, pairs)]
    svg = tag(
        "svg",
        tag("title", f"{title} over {across}"),
        tag("desc", "; ".join(summaries) + (f". {note}" if note else "")),
        *(_grid(wide, high, texts), _curves(wide, high, lines, marks), _dots(wide, high, lines)),
        role="img",
        width="100%",
        height=HEIGHT,
    )
    brief = lambda values: [value and float(f"{value:.7g}") for value in values]
    curves = [{"n": v.name, "c": v.color, "x": brief(v.xs), "y": brief(v.ys)} for v in lines]
    return tag(
        "figure",
        tag("figcaption", tag("b", title), " ", tag("span", unit, class_="unit"), _legend(lines, marks, text)),
        tag("div", svg, class_="plot", style=left),
        tag("div", across, class_="across"),
        tag("p", note, class_="note") if note else "",
        class_="chart",
        data_lines=json.dumps(curves, separators=(",", ":")),  # for the read-out, which a script shows
        data_from=f"{wide.low:.8g}",
        data_to=f"{wide.high:.8g}",
        data_across=across,
    )


def linear(low: float, high: float, count: int, tight: bool = False) -> Axis:
    """Returns an axis with about `count` round labels; `tight` ends it with the values, else it ends with a label."""
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low, high = (low - pad, high + pad) if not tight else (low - 0.5, high + 0.5)
    ticks = [*map(float, ticker.MaxNLocator(count, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high))]
    if tight:
        return Axis(low, high, tuple(tick for tick in ticks if low <= tick <= high))
    return Axis(ticks[0], ticks[-1], tuple(ticks))


def vertical(ys: Sequence[float], from_zero: bool) -> Axis:
    """Returns a linear axis, or a logarithmic one where positive values span more than two powers of ten."""
    low, high = min(ys), max(ys)
    if not from_zero and low > 0 and high / low > 100:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        every = -(-len(powers) // 7)
        return Axis(10.0 ** powers[0], 10.0 ** powers[-1], tuple(10.0**p for p in powers[::every]), log=True)
    return linear(min(0.0, low) if from_zero else low, high, 4)


def thin(xs: Sequence[float], ys: Sequence[float | None], points: int = POINTS) -> list[tuple[float, float | None]]:
    """Thins a curve; the lowest and the highest point of every stretch are kept, and the first gap."""
    pairs = list(zip(xs, ys))
    if len(pairs) <= points:
        return pairs
    size = -(-len(pairs) // (points // 3))
    kept: list[tuple[float, float | None]] = []
    for start in range(0, len(pairs), size):
        piece = list(enumerate(pairs[start : start + size], start))
        known = [(y, i) for i, (_, y) in piece if y is not None]
        chosen = [i for i, (_, y) in piece if y is None][:1]
        if known:
            chosen += [min(known)[1], max(known)[1]]
        kept += [pairs[i] for i in sorted(set(chosen))]
    return kept if kept[-1] == pairs[-1] else [*kept, pairs[-1]]


def label(value: float) -> str:
    """Formats a value on an axis: `0.05`, `1,200`, `25k`, `1.5M`, `1e-6`."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e15 or size < 1e-4:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+", "e")
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit * (10 if letter == "k" else 1):
            return f"{value / unit:.4g}{letter}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def _grid(wide: Axis, high: Axis, texts: list[str]) -> Html:
    parts = []
    for tick, text in zip(high.ticks, texts):
        y = f"{100 * (1 - high.share(tick)):.2f}%"
        parts.append(tag("line", x1="0", x2="100%", y1=y, y2=y, class_="grid"))
        parts.append(tag("text", text, x=-7, y=y, dy="0.35em", text_anchor="end"))
    for tick in wide.ticks:
        share = wide.share(tick)
        x = f"{100 * share:.2f}%"
        anchor = "end" if share > 0.97 else "middle"
        parts.append(tag("line", x1=x, x2=x, y1=HEIGHT, y2=HEIGHT + 4, class_="axis"))
        parts.append(tag("text", label(tick), x=x, y=HEIGHT + 17, text_anchor=anchor))
    parts.append(tag("line", x1="0", x2="100%", y1=HEIGHT, y2=HEIGHT, class_="axis"))
    return join(*parts)


def _curves(wide: Axis, high: Axis, lines: Sequence[Line], marks: Sequence[Mark]) -> Html:
    """Draws the stretched part: the marks and, above them, the lines, the faint ones first."""
    place = lambda share: f"{1000 * share:.1f}".removesuffix(".0")
    parts, ticks = [], [mark for mark in marks if mark.kind == "checkpoint"]
    rules = [mark for mark in marks if mark.kind != "checkpoint"]
    for mark in [*ticks[:: -(-len(ticks) // _MARKS) or 1], *rules[:_MARKS]]:
        x, top = place(wide.share(mark.x)), 955 if mark.kind == "checkpoint" else 0
        parts.append(tag("line", x1=x, x2=x, y1=top, y2=1000, class_=f"mark {mark.kind}"))
    for line in sorted(lines, key=lambda line: not line.faint):
        for defined, group in itertools.groupby(zip(line.xs, line.ys), lambda point: point[1] is not None):
            run = list(group)
            if defined and len(run) > 1:
                points = (f"{place(wide.share(x))},{place(1 - high.share(y))}" for x, y in run if y is not None)
                style = f"line c{line.color}{' faint' * line.faint}"
                parts.append(tag("polyline", points=" ".join(points), class_=style))
    box = {"viewBox": "0 0 1000 1000", "preserveAspectRatio": "none", "width": "100%", "height": "100%"}
    return tag("svg", *parts, **box, overflow="visible", aria_hidden="true")


def _dots(wide: Axis, high: Axis, lines: Sequence[Line]) -> Html:
    """Draws the points themselves, where they are few or stand alone."""
    parts = []
    for line in lines:
        padded, few = [None, *line.ys, None], len(line.xs) <= 40 and not line.faint
        for i, (x, y) in enumerate(zip(line.xs, line.ys)):
            if y is not None and (few or (padded[i] is None and padded[i + 2] is None)):
                x_at, y_at = f"{100 * wide.share(x):.2f}%", f"{100 * (1 - high.share(y)):.2f}%"
                parts.append(tag("circle", cx=x_at, cy=y_at, r=2.2, class_=f"dot c{line.color}"))
    return join(*parts)


def _legend(lines: Sequence[Line], marks: Sequence[Mark], text: Callable[[float], str]) -> Html:
    entries = []
    for line in lines:
        key = tag("i", class_=f"key c{line.color}{' faint' * line.faint}")
        entries.append(tag("span", key, line.name, " ", tag("b", text(line.known[-1]))))
    for kind, count in collections.Counter(mark.kind for mark in marks).items():
        entries.append(tag("span", tag("i", class_=f"key mark {kind}"), kind, f" ({count})" if count > 1 else ""))
    return tag("span", *entries, class_="legend")
