"""`report.html`: one page about one run, made from the files of its folder. No TensorFlow, no network."""

import base64
import functools
import hashlib
import html
import pathlib
import re
import string
import time
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from tfdist import config
from tfdist.checkpoints.run_folder import RunFolder, strict
from tfdist.config.messages import sized
from tfdist.config.runtime_options import Environment
from tfdist.errors import TrainingError
from tfdist.monitoring.report import curves, run_files
from tfdist.monitoring.report.html import Html, join, table, tag
from tfdist.monitoring.report.line_chart import label, value
from tfdist.monitoring.report.run_files import Record, mapping, number, sequence

NAME = "report.html"
JUDGED_S = 3.0  # least seconds of training for advice on where they went
INPUT_LIMIT = 0.2  # share of the time spent waiting for input from which on it is worth a person's attention
PARTS = ("compute", "input", "all_reduce", "python")
ADVICE = {
    "input": "Input-bound: hold the decoded data in memory (data.cache=memory), make reading and decoding cheaper or "
    "parallel, or use more CPU cores (--threads).",
    "all_reduce": "Held up by the sum over replicas and by slower ones: raise train.batch_size, send half the bytes "
    "(optimizer.reduce_dtype=bfloat16), or use a faster network.",
    "python": "Held up by Python between calls: let train.steps_per_call=0 choose, and look for slow callbacks.",
}


def write(folder: RunFolder, result: dict) -> str:
    """Writes the report of a run that has ended. It never makes a run fail.

    `result` is the content that `result.json` is going to have; that file is written last. Returns a warning, empty if
    nothing went wrong. It is not logged here: this is also called when a run has failed and another thread may log.
    """
    if not folder.writes:
        return ""
    try:
        folder.write_text(NAME, render(folder.path, strict(result)))
    except Exception as error:
        kind = "" if isinstance(error, TrainingError) else f"{type(error).__name__}: "
        return f"WARNING: no report: {kind}{error}"
    return ""


def render(path: pathlib.Path, result: dict | None = None) -> str:
    """Returns the page of a run folder, of which any file may be missing; `result` None to read `result.json`."""
    record = run_files.read(path, result)
    sections = [
        ("time", "Where the time went", lambda: _time(record)),
        ("learning", "Learning", lambda: curves.learning(record)),
        ("speed", "Speed and devices", lambda: curves.speed(record)),
        ("segments", "Starts of the workers", lambda: _segments_table(record)),
        ("experiment", "Experiment", lambda: _experiment_table(record)),
        ("environment", "Environment", lambda: _environment_table(record)),
    ]
    bodies = [(name, heading, _tolerant(make)) for name, heading, make in sections]
    return _under_header(record, [section for section in bodies if section[2]])


def section_of_call(path: pathlib.Path, call: dict, lines: list[dict]) -> tuple[str, str, Html]:
    """Returns the section of a call of `fit` for `of_calls`: `call` as in `result.json`, a line for each epoch."""
    last = {name: y for name, y in (lines[-1] if lines else {}).items() if name not in curves.NO_METRICS}
    record = Record(path, {}, {}, call | {"evaluation": last}, lines, [], [])
    parts = [_tolerant(functools.partial(make, record)) for make in (_figures, _time, curves.learning)]
    reason = [tag("p", call["reason"], class_="why")] if call["reason"] else []
    body = re.sub(' id="[a-z-]+"', "", join(*reason, *parts))  # which other calls have, too
    return f"call-{call['call']}", f"Call {call['call']}: {call['model']}, {call['status']}", Html(body)


def of_calls(path: pathlib.Path, result: dict, sections: Sequence[tuple[str, str, Html]]) -> str:
    """Returns the page of a script's calls of `fit`, of which the newest have `sections`."""
    calls = result["calls"]

    def row(call: dict) -> list[object]:
        speed, history = number(call["examples_per_second"]), call["history"]
        ends = [number(history[name][-1]) if history.get(name) else None for name in ("loss", "val_loss")]
        counts = [f"{call[name]:,}" for name in ("epochs", "updates", "examples_seen")]
        texts = ["-" if y is None else value(y) for y in ends]
        rate = label(float(f"{speed:.4g}")) if speed else "-"
        return [call["call"], call["model"], call["status"], *counts, duration(call["seconds"]), rate, *texts]

    head = ["call", "model", "status", "epochs", "updates", "examples", "time", "examples/s", "loss", "val loss"]
    more = f"The newest {len(calls)} of {result['calls_made']:,}." if result["calls_made"] > len(calls) else ""
    listed = table(head, [row(call) for call in reversed(calls)], (0, *range(3, len(head))), id="calls")
    nothing = tag("p", "fit was not called.", class_="note")
    environment = {"strategy": result.get("strategy"), "reason": result.get("why")}
    totals = {name: sum(call[name] for call in calls) for name in ("updates", "epochs", "seconds")} if calls else {}
    record = Record(path.absolute(), {}, environment, result | totals, [], [], [])
    first = "calls-of-fit", "Calls of fit", join(listed, tag("p", more)) if calls else nothing
    return _under_header(record, [first, *reversed(sections)])


def _under_header(record: Record, sections: Sequence[tuple[str, str, Html]]) -> str:
    """Returns a page with the header and the figures of a record above these sections."""
    written = f"tfdist {mapping(record.result.get('versions')).get('tfdist', '')}, {time.strftime('%Y-%m-%d %H:%M %Z')}"
    return assembled(
        f"{record.name}: {record.result.get('status', 'not finished')}",
        _tolerant(lambda: _header(record)),
        _tolerant(lambda: _figures(record)),
        sections,
        f"{record.path.absolute().name} · written by {written}",
    )


def assembled(title: str, header: Html, figures: Html, sections: Sequence[tuple[str, str, Html]], footer: str) -> str:
    """Returns a page of these parts, in the style of all pages; `sections` have an anchor, a heading and a body."""
    page = string.Template(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    script = re.search(r"<script>(.*?)</script>", page.template, re.DOTALL)
    digest = hashlib.sha256(script[1].encode() if script else b"").digest()
    return page.substitute(
        script_sha256=base64.b64encode(digest).decode(),
        title=html.escape(title),
        header=header,
        links=join(*(tag("a", heading, href=f"#{name}") for name, heading, _ in sections)),
        figures=figures,
        sections=join(
            *(tag("section", tag("h2", heading), body, id=name, class_="card") for name, heading, body in sections)
        ),
        footer=html.escape(footer),
    )


def _tolerant(make: Callable[[], Html]) -> Html:
    """Returns a part of the page, or an error message: a part that fails leaves the others alone."""
    try:
        return make()
    except Exception as error:
        return tag("p", f"This part could not be made: {type(error).__name__}: {error}", class_="warn broken")


def _header(record: Record) -> Html:
    result, environment = record.result, record.environment
    status = str(result.get("status", "not finished"))
    kind = status if status in ("completed", "preempted", "failed") else "unknown"
    parts = [tag("h1", record.name, " ", tag("span", status, class_=f"pill {kind}"))]
    if result.get("reason"):
        parts.append(tag("p", str(result["reason"]), class_="warn" if kind == "failed" else "why", id="reason"))
    get, planned = lambda key: number(result.get(key)), mapping(record.experiment.get("train"))
    total, steps = number(planned.get("epochs")), number(planned.get("steps"))
    plan = []
    if (updates := get("updates")) is not None:
        plan.append(f"{updates:,.0f}{f' of {steps:,.0f}' if steps else ''} updates")
    if batch := get("global_batch"):
        plan.append(f"of {batch:,.0f} examples")
    if (replicas := get("replicas")) and replicas > 1:
        plan.append(f"on {replicas:,.0f} replicas")
    if (epochs := get("epochs")) is not None:
        plan.append(f"· {epochs:,.0f}{f' of {total:,.0f}' if total else ''} epochs")
    names = [str(mapping(record.experiment.get(part)).get("name", "")) for part in ("data", "model", "optimizer")]
    parts.append(tag("p", " · ".join(filter(None, [*names, " ".join(plan)])), class_="plan", id="plan"))
    if environment.get("reason"):
        strategy = f"Strategy {environment.get('strategy')}, because {environment['reason']}."
        parts.append(tag("p", strategy, class_="plan"))

    events = []
    if get("resumed_from") is not None:
        events.append(f"Resumed from update {result['resumed_from']:,}.")
    if result.get("restarts"):
        events.append(f"Started again by the launcher {result['restarts']} time{'s' * (result['restarts'] != 1)}.")
    logged = [mapping(line["rollback"]) for line in record.lines if "rollback" in line]
    # The file has those before a rollback to the same checkpoint too.
    for rollback in max(logged, [mapping(r) for r in sequence(result.get("rollbacks"))], key=len)[:10]:
        skipped = [str(update) for update in sequence(rollback.get("skipped"))]
        events.append(f"Loss not finite: went back to update {rollback.get('to')} and left out {_short(skipped, 12)}.")
    if events:
        parts.append(tag("ul", *(tag("li", text) for text in events), class_="happened", id="happened"))
    return join(*parts)


def _figures(record: Record) -> Html:
    result = {name: y for name, v in record.result.items() if (y := number(v)) is not None}
    metrics = {name: number(v) for name, v in mapping(record.result.get("evaluation")).items()}
    tiles = [(curves.title(name), value(y), "") for name, y in metrics.items() if y is not None]
    workers, share = result.get("workers") or 1, result.get("flops_share")
    peak = "" if share is None else f"{100 * share:.1f} % of the peak (MFU)"
    for key, name, text, more in (
        ("seconds", "Time", duration, ""),
        ("examples_per_second", "Examples/s", lambda y: label(float(f"{y:.4g}")), "steady state"),
        ("seconds_to_first_update", "To the first update", duration, "from process start"),
        ("replicas", "Replicas", "{:.0f}".format, f"on {workers:.0f} worker{'s' * (workers != 1)}"),
        ("peak_memory_bytes", "Peak memory", sized, "this process"),
        ("peak_device_memory_bytes", "Peak GPU memory", sized, "per device"),
        ("flops_per_second", "Model FLOP/s", lambda y: label(float(f"{y:.3g}")), peak),
    ):
        if key in result:
            tiles.append((name, text(result[key]), more))
    columns = -(-len(tiles) // -(-len(tiles) // 7)) if tiles else 1  # rows of about the same length
    boxes = [
        tag("div", tag("dt", name), tag("dd", tag("b", text), tag("small", more) if more else ""))
        for name, text, more in tiles
    ]
    return tag("dl", *boxes, class_="figures", style=f"--columns:{columns}")


def _time(record: Record) -> Html:
    """Draws a bar of where the seconds of training went, with advice."""
    spent = mapping(record.result.get("time"))
    seconds = {part: y for part in PARTS if (y := number(spent.get(part))) is not None and y >= 0}
    total = sum(seconds.values())
    if not total:
        return Html("")
    shares = {part: y / total for part, y in seconds.items()}
    bar, legend = [], []
    for part, y in seconds.items():
        bar.append(tag("span", class_=f"part {part}", style=f"width:{100 * shares[part]:.2f}%"))
        key, share = tag("i", class_=f"key part {part}"), tag("b", f"{100 * shares[part]:.1f} %")
        legend.append(tag("li", key, curves.WORDS[part], " ", share, f" {duration(y)}"))
    worst = max((part for part in seconds if part in ADVICE), key=lambda part: shares[part], default="")
    if total < JUDGED_S:
        advice = "Too short a time to judge by."
    elif worst and shares[worst] > INPUT_LIMIT:
        doing = curves.WORDS[worst] if worst == "input" else f"in {curves.WORDS[worst]}"
        advice = f"{100 * shares[worst]:.0f} % {doing}. {ADVICE[worst]}"
    else:
        busy = f"{100 * shares.get('compute', 0):.0f} % computing: "
        advice = busy + "only faster or more devices, or a lower precision, would make this much faster."
    if record.result.get("replicas") != 1 and "all_reduce" not in seconds:
        advice += " The all-reduce cannot be told apart here and counts as computing."
    since = "" if record.result.get("resumed_from") is None else " since it was resumed"
    words = ", ".join(f"{curves.WORDS[part]} {100 * share:.1f} %" for part, share in shares.items())
    return join(
        tag("div", *bar, class_="bar", role="img", aria_label=f"Shares of the time: {words}"),
        tag("ul", *legend, class_="parts", id="time-parts"),
        tag("p", advice, id="advice"),
        tag("p", f"Seconds of training{since}, the first calls, which compile, left out.", class_="note"),
    )


def duration(seconds: float) -> str:
    """Formats seconds as `0.42 s`, `11.3 s`, `12 min 30 s` or `3 h 12 min`."""
    if seconds < 99.95:
        return f"{seconds:.1f} s" if seconds >= 0.95 else f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _experiment_table(record: Record) -> Html:
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


def _environment_table(record: Record) -> Html:
    """Returns strategy and the reason for it, devices, hosts and versions."""
    e, result = record.environment, record.result
    if not e:
        return tag("p", "environment.json cannot be read.", class_="note")
    defaults = Environment()
    flags = {k: v for k, v in mapping(e.get("flags")).items() if v != getattr(defaults, k, None)}
    hosts = [str(h) for h in sequence(e.get("hosts")) if h]
    digest, gpus = result.get("weights_sha256"), []
    for gpu in map(mapping, sequence(e.get("gpus"))):
        memory = f" ({mib / 1024:.0f} GiB)" if (mib := number(gpu.get("memory_total"))) else ""
        gpus.append(f"{gpu.get('number', '?')}: {gpu.get('name', 'GPU')}{memory}")
    spent = {k: v for k, v in mapping(result.get("goodput")).items() if number(v) is not None}
    share = spent.pop("share", None)
    parts = ", ".join(f"{name} {seconds:,.1f} s" for name, seconds in spent.items())
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
        ["Goodput", f"{share:.1%} of the time since the launch ended in the model ({parts})" if share else ""],
        ["Weights", join(tag("code", str(digest)), " (SHA-256)") if digest else ""],
    ]
    return tag("dl", *(join(tag("dt", name), tag("dd", text)) for name, text in rows if text), id="environment-facts")


def _segments_table(record: Record) -> Html:
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
