"""`sweep.html`: the table of a sweep and the curves of its best runs, as a page. No TensorFlow, no network."""

from __future__ import annotations

import os
import pathlib
import urllib.parse
from collections.abc import Sequence

from tfdist.config.schedule import Aim
from tfdist.monitoring.report import page, run_files
from tfdist.monitoring.report.html import Html, join, table, tag
from tfdist.monitoring.report.line_chart import Line, plot, value
from tfdist.sweep import results
from tfdist.sweep.results import SweepRow

CURVES = 6
"""Runs whose curves are drawn at most; a page has so many colours."""


def render(title: str, path: pathlib.Path, rows: Sequence[SweepRow], aim: Aim | None) -> str:
    """Returns the page.

    Args:
      path: the folder of the sweep.
      aim: the metric by which runs are compared, if there is one.
    """
    order = results.ranked(rows, aim)
    best = order[0] if order else None
    sentences = results.closing(rows, aim, best)
    done = sum(row.status == "completed" for row in rows)
    header = join(tag("h1", title), tag("p", f"{done} of {len(rows)} runs completed.", class_="plan"))
    sections = [
        ("runs", "Runs", join(_table(path, rows, best), *(tag("p", line, class_="note") for line in sentences))),
        ("learning", "Learning", _curves(order[:CURVES], aim)),
    ]
    return page.assembled(title, header, Html(""), [s for s in sections if s[2]], path.absolute().name)


def _table(path: pathlib.Path, rows: Sequence[SweepRow], best: SweepRow | None) -> Html:
    head = results.head(rows)
    first = len(rows[0].values) if rows else 0
    cells: list[list] = [list(row) for row in results.cells(rows, best)]
    for row, texts in zip(rows, cells):
        report = pathlib.Path(row.folder, page.NAME)
        if report.is_file():
            link = urllib.parse.quote(os.path.relpath(report, path))
            texts[first] = tag("a", texts[first], href=link)
    return table(head, cells, numbers=range(first + 1, len(head)))


def _curves(rows: Sequence[SweepRow], aim: Aim | None) -> Html:
    """Draws loss and metric of the best runs over updates."""
    if aim is None:
        return Html("")
    records = [run_files.read(pathlib.Path(row.folder)) for row in rows]
    charts = []
    for name in dict.fromkeys([f"val_{aim.metric}", "loss"]):
        lines = []
        for colour, (row, record) in enumerate(zip(rows, records), 1):
            at = [(run_files.number(e.get("updates")), run_files.number(e.get(name))) for e in record.epochs]
            points = [(x, y) for x, y in at if x is not None]
            lines.append(Line(row.name, [x for x, _ in points], [y for _, y in points], colour))
        charts.append(plot(name, lines, text=value))
    return tag("div", *charts, class_="charts") if any(charts) else Html("")
