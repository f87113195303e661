"""What the doctor found, as lines for a person, as JSON, and as a block for a bug report. No TensorFlow."""

import collections
import dataclasses
import getpass
import math
import os
import re
from collections.abc import Mapping

from tfdist.checkpoints.run_folder import strict
from tfdist.distributed import gpus
from tfdist.doctor import tensorflow_probe
from tfdist.doctor.check import FAIL, OK, WARN, Finding, worst
from tfdist.doctor.checkpoints import Checkpoint
from tfdist.doctor.machine import MachineFacts
from tfdist.doctor.workers import Place

COLOURS = {OK: "green", WARN: "yellow", FAIL: "bold red"}
_HANG = 6  # columns before a finding; the fix stands below it


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """All that was found. What did not come in time is None."""

    workdir: str  # empty if none was named
    versions: Mapping[str, str]
    machine: MachineFacts
    tpu: str  # what suggests one; empty if nothing does
    environ: Mapping[str, str]
    findings: list[Finding]
    survey: gpus.Survey | None
    answer: tensorflow_probe.Answer | None
    place: Place | None
    checkpoints: list[Checkpoint] | None

    def tensorflow_name(self, gpu: gpus.DriverGPU) -> str | None:
        """Returns TensorFlow's name of a GPU, if it sees that."""
        if not (self.survey and self.answer):
            return None
        return tensorflow_probe.names(self.answer, self.survey, self.environ).get(gpu.number)


def lines(report: Report) -> list[tuple[str, str]]:
    """Returns color (or "") and text of each line."""
    shown = [("", text) for text in (*_devices(report), "", *_strategy(report), "")]
    for finding in report.findings:
        shown.append((COLOURS[finding.status], _line(finding)))
        if finding.fix:
            shown.append(("", f"{'':{_HANG}}fix: {finding.fix}"))
    counts = collections.Counter(f.status for f in report.findings)
    summary = ", ".join(f"{counts[status]} {status}" for status in (OK, WARN, FAIL) if counts[status])
    return [*shown, ("", ""), ("", f"{len(report.findings)} checks: {summary}")]


def _line(finding: Finding) -> str:
    return f"{finding.status:<{_HANG}}{finding.name}: {finding.finding}"


def _devices(report: Report) -> list[str]:
    m = report.machine
    cores = f"{m.cores} core{'s' * (m.cores > 1)}" + (f" (limited to {m.quota:g})" if m.quota else "")
    memory = f"{m.memory_free / 2**30:.1f} of {m.memory_total / 2**30:.1f} GiB memory free"
    if report.survey is None:
        listed = ["GPUs: nvidia-smi does not answer"]
    else:
        none = "unknown, see what fails below" if report.survey.problem else "none that a driver lists"
        listed = [_gpu(g, report) for g in report.survey.gpus] or [f"GPUs: {none}"]
    tpu = f"TPU: {report.tpu or 'nothing'} says that there is one"
    return [f"host {m.host}: {m.system}, {cores}, {memory}", *listed, tpu]


def _gpu(gpu: gpus.DriverGPU, report: Report) -> str:
    figures = gpu.memory_used, gpu.memory_total, 100 * gpu.load
    used, total, load = ("?" if math.isnan(v) else f"{v:,.0f}" for v in figures)
    if report.answer is None or report.answer.problem:
        seen = "TensorFlow did not answer"
    else:
        name = report.tensorflow_name(gpu)
        seen = f"TensorFlow's {name}" if name else "not seen by TensorFlow"
    return f"GPU {gpu.number}: {gpu.name}, {used} of {total} MiB used, load {load} %, driver {gpu.driver}, {seen}"


def _strategy(report: Report) -> list[str]:
    if report.place is None:
        return ["strategy: unknown, because nvidia-smi does not answer"]
    choice = report.place.choice
    first = f"strategy {choice.name}, because {choice.reason}" if choice else "strategy: none, see what fails below"
    return [first, *(f"  not {name}: {reason}" for name, reason in report.place.others.items())]


def bug_report(report: Report) -> list[str]:
    """Returns the lines of a block to paste: nothing in it names the user, the home folder or the secret of a run."""
    names = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    block = [names, *_devices(report)[1:], *_strategy(report)[:1]]
    block[1:1] = [_devices(report)[0].replace(f"host {report.machine.host}: ", "")]
    if report.survey and report.survey.gpus and report.answer and report.answer.said:
        block.append(f"TensorFlow said: {'; '.join(report.answer.said)}")
    block += [_line(finding) for finding in report.findings if finding.status != OK]
    return [redacted(line, report.environ) for line in block]


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
    return text if user == "tfdist" else re.sub(rf"(?<!\w){re.escape(user)}(?!\w)", "<user>", text)  # the image's


def as_json(report: Report) -> dict[str, object]:
    """Returns what was found as programs read it; NaN is null."""
    place, survey = report.place, report.survey or gpus.Survey(problem="no answer")
    choice = place.choice if place else None
    return {
        "status": worst(report.findings),
        "workdir": report.workdir,
        "versions": dict(report.versions),
        "machine": dataclasses.asdict(report.machine),
        "gpus": [strict(dataclasses.asdict(g)) | {"tensorflow": report.tensorflow_name(g)} for g in survey.gpus],
        "tpu": report.tpu,
        "strategy": {
            "name": choice.name if choice else None,
            "reason": choice.reason if choice else None,
            "others": dict(place.others) if place else {},
        },
        "checks": [dataclasses.asdict(f) for f in report.findings],
        "checkpoints": None if report.checkpoints is None else [dataclasses.asdict(c) for c in report.checkpoints],
        "bug_report": bug_report(report),
    }
