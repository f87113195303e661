"""The segments of a run between two starts of its workers: number of workers, updates, and why they ended."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tfdist.checkpoints import state_shape
from tfdist.cluster.discovery import ALONE, Cluster
from tfdist.cluster.env_vars import ROUNDS


class _Round(NamedTuple):
    """A start of the workers, as the launcher reports it."""

    nodes: int
    workers: int
    ended: str = ""  # why
    at: float | None = None  # time at which the end began


class _Started(NamedTuple):
    """A segment, as a checkpoint taken in it records it."""

    attempt: int
    update: int  # updates before it
    first: float | None  # time of its first update


_STARTED: state_shape.Shape = {
    "attempt": state_shape.count,
    "update": state_shape.count,
    "first": state_shape.optional(state_shape.number),
}


class Segments:
    """The launcher reports in `environ` why earlier ones ended, checkpoints which updates are kept."""

    def __init__(self, cluster: Cluster = ALONE, environ: Mapping[str, str] = MappingProxyType({})):
        report = json.loads(environ.get(ROUNDS, "") or "{}")
        self._launch: str = report.get("launch", "")
        rounds = [_Round(*row) for row in report.get("rounds", [])]
        self._rounds = [*rounds, _Round(report.get("nodes", 1), cluster.size)]
        self._own = _Started(cluster.attempt, 0, None)
        self._before: dict[int, _Started] = {}  # earlier ones, by attempt
        self._began = False

    def get_state(self) -> dict[str, object]:
        """For a checkpoint."""
        return {"launch": self._launch, "begun": [list(begun) for begun in (*self._before.values(), self._own)]}

    def resume(self, update: int, state: Mapping[str, Any]) -> None:
        """Resumes from a checkpoint, or goes back to one; ValueError, TypeError or KeyError for another `state`."""
        self._own = self._own._replace(update=min(self._own.update, update) if self._began else update)
        self._began = True
        # The reasons why those of an earlier launch ended are not known.
        begun = [_Started(*row) for row in state["begun"]] if state.get("launch", "") == self._launch != "" else []
        for each in begun:
            state_shape.require(each._asdict(), _STARTED)
        self._before = {each.attempt: each for each in begun if each.attempt < self._own.attempt}

    def updated(self) -> None:
        """Records that an update was made."""
        self._began = True
        if self._own.first is None:
            self._own = self._own._replace(first=time.time())

    def record(self, updates: int, ended: str) -> list[dict[str, object]]:
        """Returns all segments, the oldest first, for `result.json`: of a run of `updates`, the last `ended` thus."""
        started = {**self._before, self._own.attempt: self._own}
        rows: list[dict[str, object]] = []
        end, first = updates, None
        for back, this in enumerate(reversed(self._rounds)):
            attempt = self._own.attempt - back
            # Updates that came into no checkpoint were repeated later: nothing was kept of such a segment.
            begun = started.get(attempt, _Started(attempt, end, None))
            begin = min(begun.update, end)
            # Clocks of two machines, or of one before and after it was set: never negative.
            lost = round(max(first - this.at, 0.0), 3) if first is not None and this.at is not None else None
            row = {"attempt": attempt, "nodes": this.nodes, "workers": this.workers, "from_update": begin}
            rows.append(row | {"updates": end - begin, "ended": this.ended or ended, "seconds_lost": lost})
            end, first = begin, begun.first
        return rows[::-1]
