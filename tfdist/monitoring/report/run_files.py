"""Tolerant reader of run folders: any file may be missing, cut off, or of another version."""

import dataclasses
import math
import pathlib

from tfdist.config import local_files


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    path: pathlib.Path
    experiment: dict
    environment: dict
    result: dict
    lines: list[dict]  # of `history.jsonl`
    samples: list[dict]  # lines of `timeline.jsonl` that are measurements
    marks: list[dict]  # those that are events

    epochs = property(lambda self: [line for line in self.lines if number(line.get("epoch")) is not None])
    name = property(lambda self: str(self.experiment.get("name") or self.path.name))


def read(path: pathlib.Path, result: dict | None = None) -> Record:
    """Reads a run folder; `result` is the content that `result.json` is going to have, None to read it."""
    timeline = lines(path / "timeline.jsonl")
    return Record(
        path=path,
        experiment=local_files.read_object(path / "experiment.json") or {},
        environment=local_files.read_object(path / "environment.json") or {},
        result=(local_files.read_object(path / "result.json") or {}) if result is None else result,
        lines=lines(path / "history.jsonl"),
        samples=[line for line in timeline if "mark" not in line],
        marks=[line for line in timeline if "mark" in line],
    )


def number(value: object) -> float | None:
    """Returns a finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def mapping(value: object) -> dict:
    """Returns a dict, empty for anything else."""
    return value if isinstance(value, dict) else {}


def sequence(value: object) -> list:
    """Returns a list, empty for anything else."""
    return value if isinstance(value, list) else []


def lines(path: pathlib.Path) -> list[dict]:
    """Reads the lines of JSON that are whole; the last may have been cut off by a kill."""
    try:
        text = local_files.content(path).decode(errors="replace")
    except OSError:
        return []
    return [line for line in map(local_files.json_object, text.splitlines()) if line is not None]
