"""The result of a sweep: a row per run, the best of them, tables and the page. No TensorFlow."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence

from tfdist.config import schedule
from tfdist.errors import UserError
from tfdist.monitoring.report import line_chart, page, run_files
from tfdist.monitoring.report.html import Html, join, table, tag

CURVES = 6
"""Runs whose curves are drawn at most; a page has so many colours."""
NONE = "-"
USUAL = ("accuracy", "loss")
"""Metrics by which runs are compared, the first that there is."""
OF_LOSS = ("train.loss", "train.label_smoothing")
"""Fields with other values of which a loss is another quantity, which says nothing of which run is better."""


@dataclasses.dataclass(frozen=True, slots=True)
class SweepRow:
    """One run; the names are those of `sweep.json`. None where there is nothing to tell."""

    name: str
    values: Mapping[str, object]
    """By field."""
    folder: str
    command: str
    status: str = "waiting"
    """`waiting`, `running`, `completed`, `pruned`, `refused` (the experiment cannot be used) or `failed`."""
    reason: str = ""
    seconds: float | None = None
    updates: int | None = None
    examples_per_second: float | None = None
    evaluation: Mapping[str, float] = dataclasses.field(default_factory=dict)
    weights_norm: float | None = None


def completed(row: SweepRow) -> SweepRow:
    """Returns the row of a run that has come to its end, from the files in its folder."""
    result = run_files.read(pathlib.Path(row.folder)).result
    number = lambda name: run_files.number(result.get(name))
    measured = {name: run_files.number(value) for name, value in run_files.mapping(result.get("evaluation")).items()}
    return dataclasses.replace(
        row,
        status="completed",
        reason="",
        seconds=number("seconds"),
        updates=int(number("updates") or 0),
        examples_per_second=number("examples_per_second"),
        evaluation={name: value for name, value in measured.items() if value is not None},
        weights_norm=number("weights_norm"),
    )


def metric_of(rows: Iterable[SweepRow], asked: str) -> schedule.Aim | None:
    """Returns the metric by which runs are compared; None while no run has measured one that can be.

    Args:
      asked: `--metric`, empty for what is usual.

    Raises:
      UserError: the runs do not measure it.
    """
    rows = list(rows)
    measured = next((row.evaluation for row in rows if row.evaluation), None)
    if measured is None:
        return None
    if not asked:
        return _usual(measured, bool(other_losses(rows)))
    aim = schedule.better(asked, "--metric")
    if aim.metric not in measured:
        raise UserError(f"--metric={asked}: the runs measure {', '.join(sorted(measured))}: choose one of them")
    return aim


def _usual(measured: Mapping[str, float], other_losses: bool) -> schedule.Aim | None:
    """Returns the first metric that can tell runs apart, if there is one."""
    for name in (*USUAL, *sorted(measured)):
        if name in measured and not (name.endswith("loss") and other_losses):
            with contextlib.suppress(UserError):  # its name does not tell whether more of it is better
                return schedule.better(name, "--metric")
    return None


def other_losses(rows: Sequence[SweepRow]) -> str:
    """Returns the field whose values give the runs different losses; empty for none."""
    return next((name for row in rows for name in row.values if name in OF_LOSS), "")


def ranked(rows: Iterable[SweepRow], aim: schedule.Aim | None) -> list[SweepRow]:
    """Returns the runs that have measured the metric, the best first."""
    if aim is None:
        return []
    there = [row for row in rows if aim.metric in row.evaluation]
    return sorted(there, key=lambda row: -aim.better * row.evaluation[aim.metric])


def head(rows: Sequence[SweepRow]) -> list[str]:
    """Returns the names of the columns of `cells`."""
    return [*(rows[0].values if rows else ()), "status", *_metrics(rows), "examples/s", "seconds"]


def cells(rows: Sequence[SweepRow], best: SweepRow | None) -> list[list[str]]:
    """Returns the figures of each run; a star is before the best."""
    metrics = _metrics(rows)
    return [
        [
            *(str(value) for value in row.values.values()),
            ("★ " if row is best else "") + row.status,
            *(f"{row.evaluation[name]:.4f}" if name in row.evaluation else NONE for name in metrics),
            NONE if row.examples_per_second is None else f"{row.examples_per_second:,.0f}",
            NONE if row.seconds is None else f"{row.seconds:,.1f}",
        ]
        for row in rows
    ]


def markdown(title: str, rows: Sequence[SweepRow], best: SweepRow | None, closing: Sequence[str]) -> str:
    """Returns the table as a page of Markdown."""
    line = lambda parts: "| " + " | ".join(part.replace("|", "\\|") for part in parts) + " |"
    names = head(rows)
    body = [line(names), "|" + "---|" * len(names), *map(line, cells(rows, best))]
    return "\n".join([f"# {title}", "", *body, "", *closing]) + "\n"


def closing(rows: Sequence[SweepRow], aim: schedule.Aim | None, best: SweepRow | None) -> list[str]:
    """Returns what there is to say of the sweep, in sentences."""
    lines = []
    if best is not None and aim is not None:
        lines.append(f"Best by {aim.metric}: {best.name} ({best.evaluation[aim.metric]:.4f}).")
    if aim is None and any(row.evaluation for row in rows):
        lines.append(f"No run is called the best: with another {other_losses(rows)} a loss is another quantity.")
    lines += [f"{row.name} {row.status}: {row.reason}." for row in rows if row.status in ("failed", "refused")]
    return lines


def _metrics(rows: Sequence[SweepRow]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row.evaluation)
    return sorted(names, key=lambda name: (name not in USUAL, name))


def render_page(title: str, path: pathlib.Path, rows: Sequence[SweepRow], aim: schedule.Aim | None) -> str:
    """Returns the page.

    Args:
      path: the folder of the sweep.
      aim: the metric by which runs are compared, if there is one.
    """
    order = ranked(rows, aim)
    best = order[0] if order else None
    sentences = closing(rows, aim, best)
    done = sum(row.status == "completed" for row in rows)
    header = join(tag("h1", title), tag("p", f"{done} of {len(rows)} runs completed.", class_="plan"))
    sections = [
        ("runs", "Runs", join(_table(path, rows, best), *(tag("p", line, class_="note") for line in sentences))),
        ("learning", "Learning", _curves(order[:CURVES], aim)),
    ]
    return page.assembled(title, header, Html(""), [s for s in sections if s[2]], path.absolute().name)


def _table(path: pathlib.Path, rows: Sequence[SweepRow], best: SweepRow | None) -> Html:
    first = len(rows[0].values) if rows else 0
    lines: list[list] = [list(line) for line in cells(rows, best)]
    for row, texts in zip(rows, lines):
        report = pathlib.Path(row.folder, page.NAME)
        if report.is_file():
            texts[first] = tag("a", texts[first], href=urllib.parse.quote(os.path.relpath(report, path)))
    names = head(rows)
    return table(names, lines, numbers=range(first + 1, len(names)))


def _curves(rows: Sequence[SweepRow], aim: schedule.Aim | None) -> Html:
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
            lines.append(line_chart.Line(row.name, [x for x, _ in points], [y for _, y in points], colour))
        charts.append(line_chart.plot(name, lines, text=line_chart.value))
    return tag("div", *charts, class_="charts") if any(charts) else Html("")
