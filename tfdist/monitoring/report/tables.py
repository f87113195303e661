"""The tables of a report: experiment, environment, starts of the workers, and other runs in the same folder."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable
from typing import Any

from tfdist import config
from tfdist.config.runtime_options import Environment
from tfdist.monitoring.report.html import Html, join, table, tag
from tfdist.monitoring.report.line_chart import short, value
from tfdist.monitoring.report.run_files import Record, mapping, neighbours, number, sequence

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


def direction(metric: str) -> int:
    """Returns +1 where more of a metric is better, -1 where less is, 0 where its name does not tell."""
    if re.search(r"acc|auc|precision|recall|f1|iou|top_", metric):
        return 1
    return -1 if re.search(r"loss|error|entropy|perplexity|^m[as]e$|rmse", metric) else 0


def _fields(run: Record) -> dict[str, str]:
    """Returns all fields; those that the run's version did not have have their defaults."""
    return {**config.flat(config.Experiment()), **config.flat(run.experiment)}


def _columns(shown: list[tuple[Record, dict[str, str]]]) -> dict[str, list[Html | str]]:
    """Returns by name the figures of all runs, marked where they are the best of the completed ones."""
    evaluations = [mapping(run.result.get("evaluation")) for run, _ in shown]
    smoothings = {fields.get("config.train.label_smoothing") for _, fields in shown}
    columns: dict[str, tuple[list[float | None], int, Callable[[float], str]]] = {}
    for name in dict.fromkeys(name for evaluation in evaluations for name in evaluation):
        better = direction(name)
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
