"""The tables of a report: experiment, environment, starts of the workers, other runs in the folder, mistakes."""

import base64
import contextlib
import urllib.parse
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist import config
from tfdist.config import schedule
from tfdist.config.runtime_options import Environment
from tfdist.errors import UserError
from tfdist.monitoring.confusion import Findings
from tfdist.monitoring.report.html import Html, join, table, tag
from tfdist.monitoring.report.line_chart import short, value
from tfdist.monitoring.report.run_files import Record, mapping, neighbours, number, sequence

WITH_NUMBERS = 26  # classes up to which each cell of the matrix shows its count
AS_PICTURE = 100  # classes up to which the matrix is drawn at all
PAIRS = 10
SHOWN = 20  # other runs that are shown at most, the newest
NOT_A_DIFFERENCE = ("config.name", "config.data.data_dir")
SAME_TASK = ("config.data.name", "config.data.eval_split", "config.data.options")  # else runs are not compared


def experiment(record: Record) -> Html:
    """Returns the fields that differ from the defaults, then all of them."""
    if not record.experiment:
        return tag("p", "experiment.json cannot be read.", class_="note")
    fields, defaults = config.flat(record.experiment), config.flat(config.Experiment())
    every = [[n.removeprefix("config."), text] for n, text in fields.items()]
    values = [defaults.get(n, "no such field now") for n in fields]
    changed = [[*row, default] for row, default in zip(every, values) if row[1] != default]
    first = tag("p", "All fields have their defaults.", id="changed")
    if changed:
        first = table(["field", "here", "default"], changed, id="changed")
    rest = table(["field", "value"], every, id="fields")
    return join(first, tag("details", tag("summary", f"All {len(every)} fields"), rest))


def environment(record: Record) -> Html:
    """Returns strategy and the reason for it, devices, hosts and versions."""
    e, result = record.environment, record.result
    if not e:
        return tag("p", "environment.json cannot be read.", class_="note")
    defaults = Environment()
    flags = {k: v for k, v in mapping(e.get("flags")).items() if v != getattr(defaults, k, None)}
    hosts = [str(h) for h in sequence(e.get("hosts")) if h]
    digest = result.get("weights_sha256")
    gpus = []
    for gpu in map(mapping, sequence(e.get("gpus"))):
        memory = f" ({size / 1024:.0f} GiB)" if (size := number(gpu.get("memory_total"))) else ""
        gpus.append(f"{gpu.get('number', '?')}: {gpu.get('name', 'GPU')}{memory}")
    rows: list[list[Any]] = [
        ["Strategy", join(tag("b", e.get("strategy", "")), f", because {e['reason']}" if e.get("reason") else "")],
        ["Replicas", f"{e.get('replicas', '?')} on {e.get('workers', '?')} worker{'s' * (e.get('workers') != 1)}"],
        ["Devices of the chief", _short(sequence(e.get("devices")))],
        ["GPUs of the driver", _short(gpus) or "none"],
        ["Driver", e.get("driver_problem")],
        ["Host", f"{e.get('host', '')}, {e.get('cpus', '?')} CPU cores"],
        ["Workers", _short(hosts) if len(hosts) > 1 else ""],
        ["Workers found by", e.get("found_by")],
        ["CPU kernels", e.get("cpu_kernels")],
        ["XLA", e.get("jit")],
        ["Flags", " ".join(f"--{k}={v}" for k, v in flags.items())],
        ["Versions", ", ".join(f"{k} {v}" for k, v in mapping(e.get("versions") or result.get("versions")).items())],
        ["Weights", join(tag("code", str(digest)), " (SHA-256)") if digest else ""],
    ]
    return tag("dl", *(join(tag("dt", name), tag("dd", text)) for name, text in rows if text), id="environment-facts")


def segments(record: Record) -> Html:
    """Returns each start of the workers, if there was more than one: their number, updates, and why they ended."""
    starts = [mapping(s) for s in sequence(record.result.get("segments"))]
    if len(starts) < 2:
        return Html("")
    keys = ("nodes", "workers", "from_update", "updates", "ended", "seconds_lost")
    head = ["nodes", "workers", "from update", "updates kept", "ended", "seconds to the next first update"]
    rows = [["" if s.get(key) is None else s[key] for key in keys] for s in starts]
    return table(head, rows, id="segment-rows")


def _short(values: list, most: int = 16) -> str:
    rest = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(str(v) for v in values[:most]) + rest


def other_runs(record: Record) -> Html:
    """Returns the table of this run and the others on the same data."""
    own = _fields(record)
    around = [(run, _fields(run)) for run in neighbours(record.path)]
    others = [(run, fields) for run, fields in around if all(fields.get(n) == own.get(n) for n in SAME_TASK)]
    elsewhere = len(around) - len(others)
    notes = []
    if len(others) > SHOWN:
        notes.append(f"The newest {SHOWN} of {len(others)} other runs on this data are shown.")
    if elsewhere:
        notes.append(f"{elsewhere} run{'s' * (elsewhere > 1)} on other data left out.")
    if not others:
        return tag("p", " ".join(["No other run on this data in the same folder.", *notes]), class_="note")
    shown = [(record, own), *others[:SHOWN]]
    columns = _columns(shown)
    rows = []
    for i, (run, fields) in enumerate(shown):
        name, differs = run.path.absolute().name, [n for n in {**own, **fields} if own.get(n) != fields.get(n)]
        link = tag("a", name, href=f"../{urllib.parse.quote(name)}/report.html")
        title = join(tag("b", name), " (this run)") if i == 0 else link if (run.path / "report.html").exists() else name
        replicas = run.result.get("replicas", "?")
        strategy = f"{run.result.get('strategy', '?')}, {replicas} replica{'s' * (replicas != 1)}"
        parts = [
            join(tag("code", f"{n.removeprefix('config.')}={fields.get(n, '')}"), " ")
            for n in differs
            if n not in NOT_A_DIFFERENCE
        ]
        different = "-" if i == 0 else join(*parts) if parts else "nothing"
        rows.append([title, run.result.get("status"), *(cells[i] for cells in columns.values()), strategy, different])
    head = ["run", "status", *columns, "strategy", "differs from this run in"]
    return join(
        table(head, rows, range(2, 2 + len(columns)), id="comparison"),
        tag("p", " ".join(["★ the best of the completed runs.", *notes]), class_="note"),
    )


def _fields(run: Record) -> dict[str, str]:
    """Returns all fields; those that the run's version did not have have their defaults."""
    return {**config.flat(config.Experiment()), **config.flat(run.experiment)}


def _columns(shown: list[tuple[Record, dict[str, str]]]) -> dict[str, list[Html | str]]:
    """Returns by name the figures of all runs, marked where they are the best of the completed ones."""
    evaluations = [mapping(run.result.get("evaluation")) for run, _ in shown]
    smoothings = {fields.get("config.train.label_smoothing") for _, fields in shown}
    columns: dict[str, tuple[list[float | None], int, Callable[[float], str]]] = {}
    for name in dict.fromkeys(name for evaluation in evaluations for name in evaluation):
        better = 0
        with contextlib.suppress(UserError):  # its name does not tell whether more of it is better
            better = schedule.better(name).better
        if better < 0 and len(smoothings) > 1:
            better = 0  # losses of smoothed and of plain targets are two scales
        columns[name] = ([number(e.get(name)) for e in evaluations], better, value)
    for key, name, better in (("examples_per_second", "examples/s", 1), ("seconds", "seconds", -1)):
        columns[name] = ([number(run.result.get(key)) for run, _ in shown], better, short)

    done = [run.result.get("status") == "completed" for run, _ in shown]
    cells: dict[str, list[Html | str]] = {}
    for name, (figures, better, text) in columns.items():
        completed = {y for y, complete in zip(figures, done) if y is not None and complete}
        best = max(completed, key=lambda y: better * y) if better and len(completed) > 1 else None
        if any(y is not None for y in figures):
            cells[name] = [
                "-" if y is None else tag("b", "★ ", text(y), class_="best") if y == best and complete else text(y)
                for y, complete in zip(figures, done)
            ]
    return cells


def mistakes(findings: Findings) -> Html:
    """Returns accuracy, the matrix, the most frequent mistakes and the worst examples."""
    count = len(findings.labels)
    over = f"the first {count:,} examples" if findings.partial else f"{count:,} examples"
    right = int((findings.labels == findings.predictions).sum())
    intro = f"{right:,} of {over} of the evaluation data are right ({100 * findings.accuracy:.2f} %)."
    parts = [tag("p", intro, id="quality-count")]
    if findings.left_out:
        why = "their scores are not finite, or their labels are no classes"
        parts.append(tag("p", f"{findings.left_out:,} examples are left out: {why}.", class_="warn"))
    if count:
        parts += [tag("div", _matrix(findings), _pairs(findings), class_="beside"), _worst(findings)]
    return join(*parts)


def _matrix(findings: Findings) -> Html:
    side = findings.classes
    if side > AS_PICTURE:
        text = f"{side:,} classes are too many for a matrix; these are confused most:"
        return tag("p", text, class_="note")
    counts, names = findings.confusion(), [findings.name(i) for i in range(side)]
    totals, predicted = counts.sum(1), counts.sum(0)
    largest = (counts - np.diag(np.diag(counts))).max()
    # Percent of the color: of its row on the diagonal, of the largest mistake elsewhere.
    strength = lambda i, j: 45 * counts[i, i] / totals[i] if i == j else 15 + 45 * counts[i, j] / largest

    if side > WITH_NUMBERS:  # more than can be read: squares
        squares = []
        for i, j in np.argwhere(counts):
            kind, style = "hit" if i == j else "miss", f"--v:{strength(i, j) * 1.6:.0f}%"
            square = tag("rect", x=j, y=i, width=1, height=1, class_=kind, style=style)
            what = f"{counts[i, j]:,}: {names[i]} taken for {names[j]}"
            squares.append(square if i == j else tag("g", tag("title", what), square))
        caption = f"{side} true classes from top to bottom, predictions from left to right"
        ground = tag("rect", x=0, y=0, width=side, height=side, class_="ground")
        texts = (tag("title", "Confusion matrix"), tag("desc", caption))
        svg = tag("svg", *texts, ground, *squares, viewBox=f"0 0 {side} {side}", role="img")
        return tag("figure", svg, tag("figcaption", caption), class_="matrix", id="confusion")

    def cell(i: int, j: int) -> Html:
        if not counts[i, j]:
            return tag("td")
        what = f"{counts[i, j]:,} of {totals[i]:,}: {names[i]} taken for {names[j]}"
        kind, style = "hit" if i == j else "miss", f"--v:{strength(i, j):.0f}%"
        return tag("td", f"{counts[i, j]:,}", class_=kind, style=style, title="" if i == j else what)

    share = lambda i, total: tag("td", f"{100 * counts[i, i] / total:.0f} %" if total else "-", class_="sum")
    head = [tag("th", name, scope="col") for name in names]
    rows = [
        tag("tr", tag("th", names[i], scope="row"), *(cell(i, j) for j in range(side)), share(i, totals[i]))
        for i in range(side)
    ]
    matrix = tag(
        "table",
        tag("thead", tag("tr", tag("th", "true ↓ as →"), *head, tag("th", "recall", scope="col"))),
        tag("tbody", *rows),
        tag("tfoot", tag("tr", tag("th", "precision", scope="row"), *map(share, range(side), predicted), tag("td"))),
        class_="confusion long" if any(len(name) > 5 for name in names) else "confusion",
        id="confusion",
    )
    note = tag("p", "Rows are the true classes, columns the predictions.", class_="note")
    return tag("div", note, tag("div", matrix, class_="scroll", tabindex="0"))


def _pairs(findings: Findings) -> Html:
    pairs = findings.mistakes(PAIRS)
    if not pairs:
        return tag("p", "No mistake among them.", class_="note")
    totals = np.bincount(findings.labels, minlength=findings.classes)
    rows = [
        [findings.name(label), findings.name(prediction), f"{times:,}", f"{100 * times / totals[label]:.1f} %"]
        for label, prediction, times in pairs
    ]
    more = len(findings.mistakes(findings.classes**2)) - len(pairs)
    return tag(
        "div",
        tag("p", "Most frequent mistakes", class_="note"),
        table(["true", "taken for", "times", "of its class"], rows, (2, 3), id="mistakes"),
        tag("p", f"and {more:,} other pairs", class_="note") if more else "",
    )


def _worst(findings: Findings) -> Html:
    cards = []
    for example in findings.worst:
        label, prediction = findings.name(example.label), findings.name(example.prediction)
        picture: Html | str = ""
        if example.png:
            source = "data:image/png;base64," + base64.b64encode(example.png).decode()
            picture = tag("img", src=source, alt=f"Example {example.row}: true {label}, predicted {prediction}")
        sure, wrong = f" · {100 * example.probability:.0f}\u00a0%", example.label != example.prediction
        card = (
            picture,
            tag("span", "true ", tag("b", label)),
            tag("span", "as ", tag("b", prediction), sure, class_="wrong" if wrong else None),
            tag("small", f"loss {example.loss:.2f} · #{example.row}"),
        )
        cards.append(tag("li", *card))
    note = "Those with the highest cross-entropy: what they are, what they are taken for, how surely, and their row."
    return join(
        tag("h3", "Worst examples"), tag("p", note, class_="note"), tag("ul", *cards, class_="worst", id="worst")
    )
