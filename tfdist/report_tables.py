"""The tables of a report: the experiment, the environment and why, and the other runs beside it."""

from __future__ import annotations

import os
import re
import urllib.parse
from typing import Any

from tfdist import config
from tfdist.chart import value
from tfdist.markup import Html, join, table, tag
from tfdist.records import Record, mapping, neighbours, number

OTHERS = 20
"""Earlier runs that are shown at most, the newest."""
NOT_A_DIFFERENCE = ("config.name", "config.data.data_dir")
SAME_TASK = ("config.data.name", "config.data.eval_split", "config.data.options")
"""Fields in which runs must agree for their results to be compared."""


def experiment(record: Record) -> Html:
    """The fields that differ from the defaults, then all of them."""
    if not record.experiment:
        return tag("p", "experiment.json cannot be read.", class_="note")
    fields, defaults = config.flat(record.experiment), config.flat(config.Experiment())
    changed = [
        [_field(n), text, defaults.get(n, "no such field now")] for n, text in fields.items() if defaults.get(n) != text
    ]
    every = [[_field(n), text] for n, text in fields.items()]
    first = (
        table(["field", "here", "default"], changed, id="changed")
        if changed
        else tag("p", "All fields have their defaults.", id="changed")
    )
    return join(
        first, tag("details", tag("summary", f"All {len(every)} fields"), table(["field", "value"], every, id="fields"))
    )


def environment(record: Record) -> Html:
    """Where it ran, and why under this strategy."""
    e, result = record.environment, record.result
    if not e:
        return tag("p", "environment.json cannot be read.", class_="note")
    flags = mapping(e.get("flags"))
    hosts = [str(h) for h in _listed(e.get("hosts")) if h]
    rows: list[list[Any]] = [
        ["Strategy", join(tag("b", e.get("strategy", "")), f", because {e['reason']}" if e.get("reason") else "")],
        ["Replicas", f"{e.get('replicas', '?')} on {e.get('workers', '?')} worker{'s' * (e.get('workers') != 1)}"],
        ["Devices of the chief", _short(_listed(e.get("devices")))],
        ["GPUs of the driver", _short([_gpu(mapping(g)) for g in _listed(e.get("gpus"))]) or "none"],
        ["Driver", e.get("driver_problem")],
        ["Host", f"{e.get('host', '')}, {e.get('cpus', '?')} CPU cores"],
        ["Workers", _short(hosts) if len(hosts) > 1 else ""],
        ["Workers found by", e.get("found_by")],
        ["XLA", e.get("jit")],
        ["Flags", " ".join(f"--{k}={v}" for k, v in flags.items() if _given(k, v))],
        ["Versions", ", ".join(f"{k} {v}" for k, v in mapping(e.get("versions") or result.get("versions")).items())],
        [
            "Weights",
            join(tag("code", str(result.get("weights_sha256", ""))), " (SHA-256)")
            if result.get("weights_sha256")
            else "",
        ],
    ]
    return tag("dl", *(join(tag("dt", name), tag("dd", text)) for name, text in rows if text), id="environment-facts")


def comparison(record: Record) -> Html:
    """This run and the others in the same folder on the same data, the best of each figure marked."""
    own = config.flat(record.experiment)
    others: list[tuple[Record, dict[str, str]]] = []
    elsewhere = 0
    for other in neighbours(record.path):
        fields = config.flat(other.experiment)
        if all(fields.get(name) == own.get(name) for name in SAME_TASK):
            others.append((other, fields))
        else:
            elsewhere += 1
    notes = []
    if len(others) > OTHERS:
        notes.append(f"The newest {OTHERS} of {len(others)} other runs on this data are shown.")
    if elsewhere:
        notes.append(f"{elsewhere} run{'s' * (elsewhere > 1)} on other data left out.")
    note = tag("p", " ".join(notes), class_="note") if notes else ""
    if not others:
        return join(tag("p", "No other run on this data in the same folder.", class_="note", id="comparison"), note)
    shown = [(record, own), *others[:OTHERS]]
    metrics = list(dict.fromkeys(name for run, _ in shown for name in mapping(run.result.get("evaluation"))))
    columns: list[tuple[str, list, int, Any]] = [
        (name, [number(mapping(run.result.get("evaluation")).get(name)) for run, _ in shown], direction(name), value)
        for name in metrics
    ]
    for key, name, better in (("examples_per_second", "examples/s", 1), ("seconds", "seconds", -1)):
        columns.append(
            (
                name,
                [number(run.result.get(key)) for run, _ in shown],
                better,
                lambda y: f"{y:,.0f}" if y >= 100 else f"{y:.1f}",
            )
        )
    done = [run.result.get("status") == "completed" for run, _ in shown]
    rows = []
    for i, (run, fields) in enumerate(shown):
        where = _name(run, i == 0)
        replicas = run.result.get("replicas", "?")
        how = f"{run.result.get('strategy', '?')}, {replicas} replica{'s' * (replicas != 1)}"
        rows.append(
            [
                where,
                run.result.get("status"),
                "-" if i == 0 else _differences(own, fields),
                how,
                *(_figure(ys, i, better, text, done) for _, ys, better, text in columns),
            ]
        )
    head = ["run", "status", "differs from this run in", "strategy", *(name for name, *_ in columns)]
    return join(
        table(head, rows, len(columns), id="comparison"),
        tag("p", "★ the best of the completed runs", class_="note"),
        note,
    )


def direction(metric: str) -> int:
    """+1 where more of a metric is better, -1 where less is, 0 where its name does not tell."""
    if re.search(r"acc|auc|precision|recall|f1|iou|top_", metric):
        return 1
    return -1 if re.search(r"loss|error|entropy|perplexity|^m[as]e$|rmse", metric) else 0


def _figure(ys: list, i: int, better: int, text: Any, done: list[bool]) -> Html | str:
    if ys[i] is None:
        return "-"
    known = [better * y for y, whole in zip(ys, done) if y is not None and whole]
    best = better and done[i] and len(known) > 1 and better * ys[i] == max(known)
    return tag("b", "★ ", text(ys[i]), class_="best") if best else text(ys[i])


def _name(run: Record, this: bool) -> Html:
    name = run.path.absolute().name
    if this:
        return join(tag("b", name), " (this run)")
    if not os.path.exists(run.path / "report.html"):
        return join(name)
    return tag("a", name, href=f"../{urllib.parse.quote(name)}/report.html")


def _differences(own: dict[str, str], other: dict[str, str]) -> Html | str:
    names = [n for n in {**own, **other} if own.get(n) != other.get(n) and n not in NOT_A_DIFFERENCE]
    parts = [tag("code", f"{_field(n)}={other.get(n, 'not there')}") for n in names]
    return join(*(join(part, " ") for part in parts)) if parts else "nothing"


def _field(name: str) -> str:
    return name.removeprefix("config.")


def _listed(value: Any) -> list:
    return value if isinstance(value, list) else []


def _short(values: list, most: int = 16) -> str:
    rest = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(str(v) for v in values[:most]) + rest


def _gpu(gpu: dict) -> str:
    size = number(gpu.get("memory_total"))
    return f"{gpu.get('number', '?')}: {gpu.get('name', 'GPU')}" + (f" ({size / 1024:.0f} GiB)" if size else "")


def _given(name: str, text: Any) -> bool:
    """Whether a flag says something: the environment's own defaults do not."""
    from tfdist.environment import Environment

    return text != getattr(Environment(), name, None)
