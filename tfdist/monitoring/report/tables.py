"""The tables of a report: the experiment, and the environment and why."""

from __future__ import annotations

from typing import Any

from tfdist import config
from tfdist.config.runtime_options import Environment
from tfdist.monitoring.report.html import Html, join, table, tag
from tfdist.monitoring.report.run_files import Record, mapping, number, sequence


def experiment(record: Record) -> Html:
    """Returns the fields that differ from the defaults, then all of them."""
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
    """Returns where it ran, and why under this strategy."""
    e, result = record.environment, record.result
    if not e:
        return tag("p", "environment.json cannot be read.", class_="note")
    flags = mapping(e.get("flags"))
    hosts = [str(h) for h in sequence(e.get("hosts")) if h]
    rows: list[list[Any]] = [
        ["Strategy", join(tag("b", e.get("strategy", "")), f", because {e['reason']}" if e.get("reason") else "")],
        ["Replicas", f"{e.get('replicas', '?')} on {e.get('workers', '?')} worker{'s' * (e.get('workers') != 1)}"],
        ["Devices of the chief", _short(sequence(e.get("devices")))],
        ["GPUs of the driver", _short([_gpu(mapping(g)) for g in sequence(e.get("gpus"))]) or "none"],
        ["Driver", e.get("driver_problem")],
        ["Host", f"{e.get('host', '')}, {e.get('cpus', '?')} CPU cores"],
        ["Workers", _short(hosts) if len(hosts) > 1 else ""],
        ["Workers found by", e.get("found_by")],
        ["CPU kernels", e.get("cpu_kernels")],
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


def segments(record: Record) -> Html:
    """Returns each start of the workers, if there was more than one: how many, what they did, why they ended."""
    starts = [mapping(s) for s in sequence(record.result.get("segments"))]
    if len(starts) < 2:
        return Html("")
    rows = [
        [
            s.get("nodes"),
            s.get("workers"),
            s.get("from_update"),
            s.get("updates"),
            s.get("ended"),
            s.get("seconds_lost"),
        ]
        for s in starts
    ]
    head = ["nodes", "workers", "from update", "updates kept", "ended", "seconds to the next first update"]
    return table(head, [["" if cell is None else cell for cell in row] for row in rows], id="segment-rows")


def _field(name: str) -> str:
    return name.removeprefix("config.")


def _short(values: list, most: int = 16) -> str:
    rest = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(str(v) for v in values[:most]) + rest


def _gpu(gpu: dict) -> str:
    size = number(gpu.get("memory_total"))
    return f"{gpu.get('number', '?')}: {gpu.get('name', 'GPU')}" + (f" ({size / 1024:.0f} GiB)" if size else "")


def _given(name: str, text: object) -> bool:
    """Whether a flag says something: the environment's own defaults do not."""
    return text != getattr(Environment(), name, None)
