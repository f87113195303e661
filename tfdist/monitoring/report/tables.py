"""The tables of a report: experiment, environment, starts of the workers."""

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
