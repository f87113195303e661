"""The tables of a report: experiment, environment, starts of the workers, mistakes."""

import base64
from typing import Any

import numpy as np

from tfdist import config
from tfdist.config.runtime_options import Environment
from tfdist.monitoring.confusion import Findings
from tfdist.monitoring.report.html import Html, join, table, tag
from tfdist.monitoring.report.run_files import Record, mapping, number, sequence

IN_MATRIX = 26  # classes up to which there is a matrix
PAIRS = 10


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
    if side > IN_MATRIX:
        text = f"{side:,} classes are too many for a matrix; these are confused most:"
        return tag("p", text, class_="note")
    counts, names = findings.confusion(), [findings.name(i) for i in range(side)]
    totals, predicted = counts.sum(1), counts.sum(0)
    largest = (counts - np.diag(np.diag(counts))).max()
    # Percent of the color: of its row on the diagonal, of the largest mistake elsewhere.
    strength = lambda i, j: 45 * counts[i, i] / totals[i] if i == j else 15 + 45 * counts[i, j] / largest

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
