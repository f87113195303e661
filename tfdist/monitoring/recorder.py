"""Records a run: `history.jsonl`, the fields of `result.json`, its segments, and `environment.json`."""

import dataclasses
import hashlib
import json
import os
import pathlib
import platform
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import numpy as np

from tfdist.checkpoints import resume
from tfdist.checkpoints import state_shape as check
from tfdist.checkpoints.run_folder import RunFolder, strict
from tfdist.cluster.discovery import ALONE, Cluster
from tfdist.cluster.env_vars import ROUNDS
from tfdist.config import cpu_kernels, packages
from tfdist.config.runtime_options import Environment
from tfdist.config.schedule import Plan
from tfdist.distributed.connect import Placement
from tfdist.distributed.distribution import Distribution
from tfdist.keras_bridge import keras_internals
from tfdist.trainer.callbacks import Call, Callback, Spent

HISTORY = "history.jsonl"  # a line per epoch and evaluation
TIMELINE = "timeline.jsonl"  # samples and marks over time (see `monitors.Timeline`)


@dataclasses.dataclass(slots=True)
class Result:
    """The content of `result.json`; the names are a contract."""

    status: str  # `completed`, `preempted` or `failed`
    reason: str
    strategy: str
    replicas: int
    workers: int
    global_batch: int
    updates: int
    epochs: int
    examples_seen: int
    seconds: float
    seconds_to_first_update: float | None  # from the start of the process to its end
    examples_per_second: float | None  # steady state: compilation and validation excluded
    history: dict[str, list]
    evaluation: dict[str, float]
    weights_sha256: str  # digest of the weights in order, as little-endian float32 bytes
    weights_norm: float  # sum of squares in float64
    files: dict[str, dict]  # size and SHA-256 of each file that later commands use
    facts: dict[str, object]  # of data and code, by which a sweep notices that they have changed
    resumed_from: int | None  # the update that this process resumed from
    rollbacks: list[dict]  # after a loss that was not finite: `to` which update, and which were `skipped`
    accumulate: int  # at the end: more than `train.accumulate` after out-of-memory errors
    shards: int  # slices of every batch; 0 for one per replica
    arithmetic: dict[str, str]  # see `Distribution.arithmetic`: what determines the last bits
    restarts: int  # times that the launcher has restarted the workers
    segments: list[dict]  # see `Segments`
    goodput: dict[str, float | None]  # see `Segments.goodput`
    versions: dict[str, str]
    time: dict[str, float | None]  # seconds of this worker in steady state, see `callbacks.Spent`
    peak_memory_bytes: int  # of the chief's process
    peak_device_memory_bytes: int | None  # of its fullest GPU
    flops_per_example: int | None  # model FLOPs, forward and backward (see `flops`)
    flops_per_second: float | None
    flops_share: float | None  # share of the devices' peak, where that is known


class _Started(NamedTuple):
    """A segment, as a checkpoint taken in it records it."""

    attempt: int
    update: int  # updates before it
    first: float | None  # time of its first update
    saved: float | None = None  # time of the checkpoint


_STARTED = {"attempt": check.count, "update": check.count} | dict.fromkeys(
    ("first", "saved"), check.optional(check.number)
)


class Segments:
    """The parts of a run between two starts of its workers: number of workers, updates, and why they ended.

    The launcher reports in `environ` why earlier ones ended, checkpoints which updates are kept.
    """

    def __init__(self, cluster: Cluster = ALONE, environ: Mapping[str, str] = MappingProxyType({})):
        report = json.loads(environ.get(ROUNDS, "") or "{}")
        self._launch: str = report.get("launch", "")
        self._since: float = report.get("since", time.time() - process_age())
        # Starts of the workers: nodes, workers, why that round ended, and the time at which its end began.
        self._rounds = [*report.get("rounds", []), [report.get("nodes", 1), cluster.size, "", None]]
        self._own = _Started(cluster.attempt, 0, None)
        self._before: dict[int, _Started] = {}  # earlier ones, by attempt
        self._began = False

    def get_state(self) -> dict[str, object]:
        own = self._own._replace(saved=time.time())
        return {"launch": self._launch, "begun": [list(begun) for begun in (*self._before.values(), own)]}

    def resume(self, update: int, state: Mapping[str, Any]) -> None:
        """Resumes from a checkpoint, or goes back to one; ValueError, TypeError or KeyError for another `state`."""
        self._own = self._own._replace(update=min(self._own.update, update) if self._began else update)
        self._began = True
        # The reasons why those of an earlier launch ended are not known.
        begun = [_Started(*row) for row in state["begun"]] if state.get("launch", "") == self._launch != "" else []
        for each in begun:
            check.require(each._asdict(), _STARTED)
        self._before = {each.attempt: each for each in begun if each.attempt < self._own.attempt}

    def updated(self) -> None:
        self._began = True
        if self._own.first is None:
            self._own = self._own._replace(first=time.time())

    def record(self, updates: int, ended: str) -> list[dict[str, object]]:
        """Returns all segments, the oldest first, for `result.json`: of a run of `updates`, the last `ended` thus."""
        started = {**self._before, self._own.attempt: self._own}
        rows: list[dict[str, object]] = []
        end, first = updates, None
        for back, (nodes, workers, why, at) in enumerate(reversed(self._rounds)):
            attempt = self._own.attempt - back
            # Updates that came into no checkpoint were repeated later: nothing was kept of such a segment.
            begun = started.get(attempt, _Started(attempt, end, None))
            begin = min(begun.update, end)
            # Clocks of two machines, or of one before and after it was set: never negative.
            lost = round(max(first - at, 0.0), 3) if first is not None and at is not None else None
            row = {"attempt": attempt, "nodes": nodes, "workers": workers, "from_update": begin}
            rows.append(row | {"updates": end - begin, "ended": why or ended, "seconds_lost": lost})
            end, first = begin, begun.first
        return rows[::-1]

    def goodput(self) -> dict[str, float | None]:
        """Returns the share of the time since the launch that ended in the model, and the seconds of all parts.

        `start` is until the first update, `recomputed` from a checkpoint to the end of the updates that it does not
        have, and `restarts` from there to the next update.
        """
        now = time.time()
        parts = {"start": 0.0, "recomputed": 0.0, "restarts": 0.0, "training": 0.0}
        before: _Started | None = None
        for each in (*self._before.values(), self._own._replace(saved=now)):
            first = each.first or each.saved or now
            if before is None:
                parts["start"] = first - self._since
            else:
                rounds = self._rounds[: before.attempt - self._own.attempt]  # up to the one of `before`
                ended = (rounds[-1][3] if rounds else None) or before.saved or first
                parts["recomputed"] += ended - (before.saved or ended)
                parts["restarts"] += first - ended
            parts["training"] += (each.saved or first) - first
            before = each
        wall = now - self._since
        seconds = {name: round(max(0.0, value), 3) for name, value in parts.items()}  # a clock may have been set
        return {"share": round(seconds["training"] / wall, 4) if wall > 0 else None, **seconds}


def process_age() -> float:
    """Returns the seconds since this process was started, by a clock that is never set."""
    fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # the 22nd field is its start in ticks
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks


# Of `Recorder.get_state`; earlier versions had no `lines`, and some no `segments`.
_STATE: check.Shape = {
    **dict.fromkeys(("updates", "in_epoch", "epochs"), check.count),
    "seconds": check.finite,
    "history": check.by_name(check.list_of(lambda v: check.array(v) or check.mapping(v))),
    "rollbacks": check.list_of(check.mapping),
    "lines": check.list_of(check.mapping),
}


class Recorder(Callback):
    """Measures a run and writes `history.jsonl`."""

    takes_many_updates = True
    wants_gradient_norm = True

    def __init__(self, folder: RunFolder, plan: Plan, segments: Segments | None = None):
        super().__init__()
        self.segments = segments or Segments()
        self._folder, self._plan = folder, plan
        # Wall clocks jump (NTP, a board without a battery): a duration must not become negative by it.
        self.begun = time.monotonic()
        self.first_update: float | None = None  # seconds from the start of the process to its end
        self.updates = 0
        self.epochs = 0
        self.history: dict[str, list] = {}
        self.rollbacks: list[dict] = []
        self.accumulate = plan.accumulate
        self.spent = Spent()  # in steady state
        self.of_epoch = Spent()  # in the running epoch
        self.gradient_norm: float | None = None  # in the last call
        self._rates: list[tuple[int, float]] = []
        self._in_epoch = 0  # those of the running epoch
        self._compiled = self._file_is_cut = False
        self._lines: list[dict] = []  # of `history.jsonl`, without the evaluation at the end

    def get_state(self) -> dict:
        return {
            "updates": self.updates,
            "in_epoch": self._in_epoch,
            "epochs": self.epochs,
            "seconds": self.seconds,
            "history": {name: [np.asarray(v).tolist() for v in values] for name, values in self.history.items()},
            "rollbacks": self.rollbacks,
            "segments": self.segments.get_state(),
            "lines": list(self._lines),
        }

    def set_state(self, state: dict) -> None:
        """Resumes from a checkpoint: later records are dropped. ValueError if it is not what `get_state` returns."""
        check.require({"lines": [], **state}, _STATE)
        self.updates, self._in_epoch, self.epochs = state["updates"], state["in_epoch"], state["epochs"]
        self.begun = time.monotonic() - state["seconds"]
        self.history = {name: list(values) for name, values in state["history"].items()}
        # A checkpoint that training has gone back to has no later rollbacks.
        self.rollbacks = max(self.rollbacks, state["rollbacks"], key=len)
        self.segments.resume(self.updates, state.get("segments", {}))
        self._file_is_cut = True
        recorded = state.get("lines")

        def keep(line: dict) -> bool:
            epoch = recorded is None or "epoch" not in line or line in recorded  # not one of changed digits
            return epoch and "evaluation" not in line and until(line, self.updates)

        self._lines = self._folder.cut(HISTORY, keep, recorded or [])

    def on_rollback(self, update: int, skipped: list[int]) -> None:
        self.rollbacks = [*self.rollbacks, {"to": update, "skipped": skipped}]
        self._write({"rollback": self.rollbacks[-1], "updates": update})

    def on_accumulate(self, accumulate: int) -> None:
        """Records that micro-batches have become smaller, for the next attempt too."""
        self.accumulate = accumulate
        resume.write_accumulate(self._folder, accumulate)

    def on_epoch_begin(self, epoch, logs=None):
        if not self._file_is_cut:  # an attempt that was killed before its first checkpoint has left lines
            self._file_is_cut = True
            for name in (HISTORY, TIMELINE):
                self._folder.cut(name, lambda line: False)
        self.of_epoch = Spent()
        self._rate_from, self._epoch_start = self._in_epoch, time.perf_counter()
        self._last = self._epoch_start

    def on_call(self, call: Call) -> None:
        self.of_epoch += call.spent
        self.gradient_norm = call.gradient_norm
        if call.steady:
            self.spent += call.spent

    def on_train_batch_end(self, batch, logs=None):
        self._last = time.perf_counter()
        self.segments.updated()
        if self.first_update is None:
            self.first_update = process_age()
        self.updates += batch + 1 - self._in_epoch
        self._in_epoch = batch + 1
        if not self._compiled:  # the time so far includes compilation
            self._compiled = True
            self._rate_from, self._epoch_start = self._in_epoch, self._last

    def on_epoch_end(self, epoch, logs=None):
        logs = dict(logs or {})
        self.epochs = epoch + 1
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
        examples, seconds = self._examples(self._rate_from, self._in_epoch), self._last - self._epoch_start
        self._rates.append((examples, seconds))
        rate = examples / seconds if seconds > 0 and examples else None
        line = {"epoch": self.epochs, "updates": self.updates, "seconds": round(self.seconds, 3)}
        rates = {"examples_per_second": rate, "learning_rate": learning_rate(self.model)}
        spent = {"gradient_norm": self.gradient_norm, "time": dataclasses.asdict(self.of_epoch)}
        self._write(line | rates | spent | logs)
        self._in_epoch = 0

    def _write(self, line: dict) -> None:
        self._lines.append(strict(line))
        self._folder.append(HISTORY, line)

    def evaluated(self, values: dict[str, float]) -> None:
        """Records an evaluation outside of an epoch."""
        self._folder.append(HISTORY, {"evaluation": values, "updates": self.updates})

    seconds = property(lambda self: time.monotonic() - self.begun)
    """Seconds of training so far, those before a resume included."""

    @property
    def examples_seen(self) -> int:
        epochs, rest = divmod(self.updates, self._plan.updates_per_epoch)
        return epochs * self._plan.examples + self._examples(0, rest)

    @property
    def examples_per_second(self) -> float | None:
        """Mean over all epochs but the first, which compiles, unless it is the only one."""
        rates = self._rates[1:] or self._rates
        seconds = sum(s for _, s in rates)
        return sum(n for n, _ in rates) / seconds if seconds > 0 else None

    def _examples(self, first: int, last: int) -> int:
        batch = self._plan.global_batch
        return min(last * batch, self._plan.examples) - min(first * batch, self._plan.examples)


def learning_rate(model: keras.Model) -> float:
    """Returns the learning rate of the last update; a schedule of Keras tells that of the next one, 0 at the end."""
    optimizer = keras_internals.inner_optimizer(model.optimizer)
    rate = keras_internals.rate_setting(optimizer)
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return float(rate(keras.ops.maximum(optimizer.iterations - 1, 0)))
    return float(optimizer.learning_rate)


def fingerprint(model: keras.Model) -> tuple[str, float]:
    """Returns `weights_sha256` and `weights_norm` of a model."""
    digest, norm = hashlib.sha256(), 0.0
    for weight in model.get_weights():
        array = np.asarray(weight)
        digest.update(np.ascontiguousarray(array, "<f4").tobytes())
        norm += float(np.square(array.astype(np.float64)).sum())
    return digest.hexdigest(), norm


def until(line: dict, updates: int) -> bool:
    """Tells whether a line was written before there were more updates than these."""
    number = line.get("updates", 0)
    return isinstance(number, (int, float)) and number <= updates


def environment(distribution: Distribution, placement: Placement, options: Environment) -> dict[str, object]:
    """Returns the content of `environment.json`; the options of `placement` count where those of the run differ."""
    return {
        "strategy": distribution.name,
        "reason": distribution.reason,
        "devices": list(distribution.devices),
        "replicas": distribution.replicas,
        "workers": distribution.workers,
        "hosts": list(distribution.peers.hosts),
        "found_by": placement.cluster.source,
        "communication": distribution.communication,
        "jit": distribution.jit,
        "gpus": [dataclasses.asdict(g) for g in placement.survey.gpus],
        "driver_problem": placement.survey.problem,
        "flags": {**dataclasses.asdict(options), **dataclasses.asdict(placement.options)},
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "cpu_kernels": cpu_kernels.in_use(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of what decides about the numbers."""
    names = ("tfdist", "tensorflow", "keras", "tensorflow-datasets", "numpy")
    return {"python": platform.python_version(), **{name: packages.version(name) or "unknown" for name in names}}
