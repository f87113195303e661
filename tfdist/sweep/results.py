"""The result of a sweep: a row per run, the best of them, the table and the page. No TensorFlow."""

import contextlib
import dataclasses
import os
import pathlib
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfdist.config import schedule
from tfdist.errors import UserError
from tfdist.monitoring.report import curves, line_chart, page, run_files
from tfdist.monitoring.report.html import Html, join, table, tag

CURVES = 6  # runs whose curves are drawn at most; a page has so many colors
NONE = "-"
USUAL = ("accuracy", "loss")  # metrics by which runs are compared, the first that there is
OF_LOSS = ("train.loss", "train.label_smoothing")
"""Fields with other values of which a loss is another quantity, which says nothing of which run is better."""


@dataclasses.dataclass(frozen=True, slots=True)
class SweepRow:
    """One run; the names are those of `sweep.json`. None where there is nothing to tell."""

    name: str
    values: Mapping[str, object]  # by field
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


def measured(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the fields of the row of a completed run, from the files in its folder."""
    result = run_files.read(folder).result
    numbers = {name: run_files.number(result.get(name)) for name in ("seconds", "examples_per_second", "weights_norm")}
    metrics = {name: run_files.number(value) for name, value in run_files.mapping(result.get("evaluation")).items()}
    evaluation = {name: value for name, value in metrics.items() if value is not None}
    updates = int(run_files.number(result.get("updates")) or 0)
    odd = ", ".join(sorted(metrics.keys() - evaluation.keys()))
    reason = f"not finite: {odd}" if odd else ""
    return {"status": "completed", **numbers, "updates": updates, "evaluation": evaluation, "reason": reason}


def metric_of(rows: Sequence[SweepRow], asked: str) -> schedule.Aim | None:
    """Returns the metric by which runs are compared, `--metric` if given; None while no run has measured one."""
    there = {name for row in rows for name in row.evaluation}
    if not there:
        return None
    if asked:
        aim = schedule.better(asked, "--metric")
        if aim.metric not in there:
            raise UserError(f"--metric={asked}: the runs measure {', '.join(sorted(there))}", "choose one of them")
        return aim
    for name in (*USUAL, *sorted(there)):
        if name in there and not (name.endswith("loss") and _other_losses(rows)):
            with contextlib.suppress(UserError):  # its name does not tell whether more of it is better
                return schedule.better(name, "--metric")
    return None


def _other_losses(rows: Sequence[SweepRow]) -> str:
    """Returns the field whose values give the runs different losses; empty for none."""
    return next((name for row in rows for name in row.values if name in OF_LOSS), "")


def ranked(rows: Iterable[SweepRow], aim: schedule.Aim | None) -> list[SweepRow]:
    """Returns the runs that have measured the metric, the best first."""
    if aim is None:
        return []
    there = [row for row in rows if aim.metric in row.evaluation]
    return sorted(there, key=lambda row: -aim.better * row.evaluation[aim.metric])


def cells(rows: Sequence[SweepRow], best: Sequence[SweepRow]) -> list[list[str]]:
    """Returns the names of the columns, and the figures of each run; a star is before the best."""
    names = dict.fromkeys(name for row in rows for name in row.evaluation)
    metrics = sorted(names, key=lambda name: (name not in USUAL, name))
    figure = lambda number, form: NONE if number is None else format(number, form)
    head = [*(rows[0].values if rows else ()), "status", *metrics, "examples/s", "seconds"]
    lines = [head]
    for row in rows:
        status = ("★ " if row in best[:1] else "") + row.status
        figures = [figure(row.evaluation.get(name), ".4f") for name in metrics]
        figures += [figure(row.examples_per_second, ",.0f"), figure(row.seconds, ",.1f")]
        lines.append([*map(str, row.values.values()), status, *figures])
    return lines


def closing(rows: Sequence[SweepRow], aim: schedule.Aim | None) -> list[str]:
    """Returns what there is to say of the sweep, in sentences."""
    lines = []
    if aim and (order := ranked(rows, aim)):
        lines.append(f"Best by {aim.metric}: {order[0].name} ({order[0].evaluation[aim.metric]:.4f}).")
    if aim is None and any(row.evaluation for row in rows):
        lines.append(f"No run is called the best: with another {_other_losses(rows)} a loss is another quantity.")
    return lines + [f"{row.name} {row.status}: {row.reason}." for row in rows if row.status in ("failed", "refused")]


def markdown(title: str, rows: Sequence[SweepRow], aim: schedule.Aim | None) -> str:
    """Returns the table as a page of Markdown, which is aligned for a terminal."""
    lines = [[text.replace("|", "\\|") for text in line] for line in cells(rows, ranked(rows, aim))]
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    body = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    return "\n".join([f"# {title}", "", *body, "", *closing(rows, aim)]) + "\n"


def render_page(title: str, path: pathlib.Path, rows: Sequence[SweepRow], aim: schedule.Aim | None) -> str:
    """Returns the page of the sweep in a folder."""
    order = ranked(rows, aim)
    head, *lines = cells(rows, order)
    linked: list[list] = [[*line] for line in lines]
    first = head.index("status")
    for row, texts in zip(rows, linked):
        report = pathlib.Path(row.folder, page.NAME)
        if report.is_file():
            texts[first] = tag("a", texts[first], href=urllib.parse.quote(os.path.relpath(report, path)))
    done = sum(row.status == "completed" for row in rows)
    notes = [tag("p", line, class_="note") for line in closing(rows, aim)]
    header = join(tag("h1", title), tag("p", f"{done} of {len(rows)} runs completed.", class_="plan"))
    sections = [
        ("runs", "Runs", join(table(head, linked, numbers=range(first + 1, len(head))), *notes)),
        ("learning", "Learning", _curves(order[:CURVES], aim)),
    ]
    return page.assembled(title, header, Html(""), [s for s in sections if s[2]], path.absolute().name)


def _curves(rows: Sequence[SweepRow], aim: schedule.Aim | None) -> Html:
    """Draws loss and metric of the best runs over examples, of which updates of other batch sizes see other numbers."""
    charts, records = [], [run_files.read(pathlib.Path(row.folder)) for row in rows]
    for name in dict.fromkeys([f"val_{aim.metric}", "loss"]) if aim else ():
        lines = []
        for color, (row, record) in enumerate(zip(rows, records), 1):
            updates, seen = (run_files.number(record.result.get(key)) for key in ("updates", "examples_seen"))
            if updates and seen:
                lines.append(curves.curve(row.name, record.epochs, name, color, over=updates / seen))
        charts.append(line_chart.plot(name, lines, "examples seen", text=line_chart.value))
    return tag("div", *charts, class_="charts") if any(charts) else Html("")
