"""What the doctor found, as lines for a person, as JSON, and as a block for a bug report. No TensorFlow."""

from __future__ import annotations

import dataclasses
import getpass
import math
import os
import re
import textwrap
from collections.abc import Mapping

from tfdist.distributed import gpus
from tfdist.doctor.check import FAIL, OK, WARN, Check, worst
from tfdist.doctor.checkpoints import Finding
from tfdist.doctor.machine import MachineFacts
from tfdist.doctor.tensorflow_probe import Answer
from tfdist.doctor.workers import Place

COLOURS = {OK: "green", WARN: "yellow", FAIL: "bold red"}
_HANG = 6
"""Columns before a finding; its further lines and the fix stand below it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """All that was found. What did not come in time is None."""

    workdir: str
    """The run folder that was examined; empty if none was named."""
    versions: Mapping[str, str]
    machine: MachineFacts
    tpu: str
    """What suggests a TPU; empty if nothing does."""
    survey: gpus.Survey | None
    answer: Answer | None
    names: Mapping[int, str]
    """TensorFlow's name of a GPU by the driver's number."""
    place: Place | None
    checks: list[Check]
    findings: list[Finding] | None
    """The checkpoints of the run folder."""


def lines(report: Report, width: int) -> list[tuple[str, str]]:
    """Returns colour (or "") and text of each line, none longer than `width`; 0 leaves them as long as they are."""
    shown = [("", line) for text in _devices(report) for line in _wrapped(text, width, 2)]
    shown += [("", ""), *(("", line) for text in _strategy(report) for line in _wrapped(text, width, 4)), ("", "")]
    for check in report.checks:
        text = f"{check.status:<{_HANG}}{check.name}: {check.finding}"
        first, *rest = _wrapped(text, width, _HANG)
        shown += [(COLOURS[check.status], first), *(("", line) for line in rest)]
        if check.fix:
            shown += [("", line) for line in _wrapped(f"{'':{_HANG}}fix: {check.fix}", width, _HANG + 5)]
    counts = {status: sum(c.status == status for c in report.checks) for status in (OK, WARN, FAIL)}
    summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return [*shown, ("", ""), ("", f"{len(report.checks)} checks: {summary}")]


def _wrapped(text: str, width: int, hang: int) -> list[str]:
    if not width:
        return [text]
    return textwrap.wrap(
        text, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False, tabsize=1
    )


def _devices(report: Report) -> list[str]:
    m = report.machine
    cores = f"{m.cores} core{'s' * (m.cores > 1)}" + (f" (limited to {m.quota:g})" if m.quota else "")
    memory = f"{m.memory_free / 2**30:.1f} of {m.memory_total / 2**30:.1f} GiB memory free"
    shown = [f"host {m.host}: {m.system}, {cores}, {memory}"]
    if report.survey is None:
        shown.append("GPUs: nvidia-smi does not answer")
    else:
        none = "unknown, see what fails below" if report.survey.problem else "none that a driver lists"
        shown += [_gpu(g, report) for g in report.survey.gpus] or [f"GPUs: {none}"]
    shown.append(f"TPU: {report.tpu} says that there is one" if report.tpu else "TPU: nothing says that there is one")
    return shown


def _gpu(gpu: gpus.DriverGPU, report: Report) -> str:
    used, total, load = (
        "?" if math.isnan(v) else f"{v:,.0f}" for v in (gpu.memory_used, gpu.memory_total, 100 * gpu.load)
    )
    if report.answer is None or report.answer.problem:
        seen = "TensorFlow did not answer"
    else:
        seen = f"TensorFlow's {report.names[gpu.number]}" if gpu.number in report.names else "not seen by TensorFlow"
    return f"GPU {gpu.number}: {gpu.name}, {used} of {total} MiB used, load {load} %, driver {gpu.driver}, {seen}"


def _strategy(report: Report) -> list[str]:
    if report.place is None:
        return ["strategy: unknown, because nvidia-smi does not answer"]
    choice = report.place.choice
    first = f"strategy {choice.name}, because {choice.reason}" if choice else "strategy: none, see what fails below"
    return [first, *(f"  not {name}: {reason}" for name, reason in report.place.others.items())]


def bug_report(report: Report, environ: Mapping[str, str]) -> list[str]:
    """Returns the lines of a block to paste: nothing in it names the user, the home folder or the secret of a run."""
    names = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    block = [names, *_devices(report)[1:], *_strategy(report)[:1]]
    block[1:1] = [_devices(report)[0].replace(f"host {report.machine.host}: ", "")]
    if report.survey and report.survey.gpus and report.answer and report.answer.said:
        block.append(f"TensorFlow said: {'; '.join(report.answer.said)}")
    for check in report.checks:
        if check.status != OK:
            block.append(f"{check.status:<{_HANG}}{check.name}: {check.finding}")
    return [redacted(line, environ) for line in block]


def redacted(text: str, environ: Mapping[str, str]) -> str:
    """Returns a text without what tells who somebody is."""
    secret, home = environ.get("TFDIST_SECRET", ""), os.path.expanduser("~").rstrip("/")
    if secret:
        text = text.replace(secret, "<secret>")
    if home:
        text = text.replace(home, "~")
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return text
    return re.sub(rf"(?<!\w){re.escape(user)}(?!\w)", "<user>", text)


def as_json(report: Report, environ: Mapping[str, str]) -> dict[str, object]:
    """Returns what was found as programs read it; NaN is null."""
    place, survey = report.place, report.survey or gpus.Survey(problem="no answer")
    return {
        "status": worst(report.checks),
        "workdir": report.workdir,
        "versions": dict(report.versions),
        "machine": dataclasses.asdict(report.machine),
        "gpus": [
            {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in dataclasses.asdict(g).items()}
            | {"tensorflow": report.names.get(g.number)}
            for g in survey.gpus
        ],
        "tpu": report.tpu,
        "strategy": {
            "name": place.choice.name if place and place.choice else None,
            "reason": place.choice.reason if place and place.choice else None,
            "others": dict(place.others) if place else {},
        },
        "checks": [dataclasses.asdict(c) for c in report.checks],
        "checkpoints": None if report.findings is None else [dataclasses.asdict(f) for f in report.findings],
        "bug_report": bug_report(report, environ),
    }
