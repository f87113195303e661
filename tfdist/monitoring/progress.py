"""Display of a run: a progress bar on a terminal, plain lines anywhere else."""

import contextlib
import datetime
import json
import os
import shutil
import ssl
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import keras
from rich import progress as rich_progress
from rich.console import Console
from rich.table import Column

from tfdist.config.schedule import Plan
from tfdist.monitoring.recorder import Recorder
from tfdist.monitoring.report.page import duration
from tfdist.trainer.callbacks import Callback

# `cpu` in busy cores, `memory` in bytes, and `gpus`, each with its `number` in the driver, `load`, the share of time in
# which it is busy, and `memory_used` and `memory_total` in MiB: None for what the driver does not report.
Sample: TypeAlias = dict[str, Any]
PLAIN_EVERY_S = 30.0  # between plain lines within an epoch
POST_EVERY_S = 5.0  # between posts to Kubeflow Trainer, which asks for no more
INPUT_SHOWN = 0.05  # least share of the time spent waiting for input that is shown


def create(
    kind: str, plan: Plan, recorder: Recorder, usage: Callable[[], Sample] = lambda: {"gpus": []}
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks for `--progress`; that of `recorder` runs before; `usage` samples the machine."""
    trainer = all(f"KUBEFLOW_TRAINER_SERVER_{name}" in os.environ for name in ("URL", "CA_CERT", "TOKEN"))
    told: list[keras.callbacks.Callback] = [TrainJobStatus(plan, recorder)] if trainer else []
    if kind == "none":
        return told
    # A notebook's cell that runs a command gives it a terminal, but displays it as a file.
    terminal = sys.stdout.isatty() and "JPY_PARENT_PID" not in os.environ
    return [(Bar if kind == "bar" or (kind == "auto" and terminal) else Plain)(plan, recorder, usage), *told]


def numbers(logs: Mapping[str, object] | None) -> str:
    """Formats metrics in one short line, the loss first, each with its value on validation data."""
    values = {k: v for k, v in (logs or {}).items() if isinstance(v, (int, float))}
    names = sorted(values, key=lambda k: (k != "loss", k))
    return "  ".join(
        f"{name} {_number(values[name])}"
        + (f" (val {_number(values['val_' + name])})" if "val_" + name in values else "")
        for name in names
        if name.removeprefix("val_") == name or name.removeprefix("val_") not in values
    )


def _number(value: float) -> str:
    return f"{value:.4f}" if not value or 1e-3 <= abs(value) < 1e5 else f"{value:.3e}"


def rate(per_second: float) -> str:
    """Formats examples per second, in at most 9 characters."""
    unit, size = ("M", 1e6) if per_second >= 1e7 else ("k", 1e3) if per_second >= 1e5 else ("", 1)
    return f"{per_second / size:,.0f}{unit} ex/s"


class _Display(Callback):
    takes_many_updates = True

    def __init__(self, plan: Plan, recorder: Recorder, usage: Callable[[], Sample]):
        super().__init__()
        self._plan, self._recorder, self._usage = plan, recorder, usage

    def _speed(self) -> str:
        """Formats the speed of this epoch, and the share of input that slows it down."""
        seconds, updates = self._last - self._start, self._recorder.updates - self._before
        if seconds <= 0 or updates <= 0:
            return ""
        examples = min(updates * self._plan.global_batch, self._plan.examples)
        waits = self._recorder.of_epoch.share("input") or 0.0
        return rate(examples / seconds) + (f"  input {100 * waits:.0f}%" if waits >= INPUT_SHOWN else "")

    def _gpus(self) -> str:
        """Formats load and memory of all GPUs."""
        gpus = self._usage()["gpus"]
        known = lambda field: [gpu[field] for gpu in gpus if gpu[field] is not None]
        loads, used, total = known("load"), known("memory_used"), known("memory_total")
        load = f"gpu {100 * sum(loads) / len(loads):.0f}%" if loads else ""
        return f"{load} {sum(used) / 1024:.0f}/{sum(total) / 1024:.0f}G".strip() if used and total else load

    def _epoch(self, epoch: int) -> str:
        return f"epoch {epoch + 1:{len(str(self._plan.epochs))}d}/{self._plan.epochs}"

    def _line(self, epoch: int, logs: Mapping[str, object] | None, share: str = "", left: str = "") -> str:
        """Formats a line of an epoch, which is broken at the width of the terminal, if stdout is one."""
        parts = (self._epoch(epoch), share, numbers(logs), self._speed(), self._gpus(), left)
        line, width = "  ".join(filter(None, parts)), max(40, shutil.get_terminal_size().columns)
        if not sys.stdout.isatty() or len(line) <= width:
            return line
        return textwrap.fill(line, width, subsequent_indent="    ", drop_whitespace=True)

    def on_epoch_begin(self, epoch, logs=None):
        self._now, self._before = epoch, self._recorder.updates  # of a resumed epoch, some are done
        self._start = self._last = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self._last = time.perf_counter()


class Plain(_Display):
    """A line per epoch, and one every half minute in long epochs."""

    def on_train_begin(self, logs=None):
        self._printed = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        if self._last - self._printed >= PLAIN_EVERY_S:
            self._printed = self._last
            share, done = f"update {batch + 1}/{self._plan.updates_per_epoch}", self._recorder.updates - self._before
            left = (self._plan.updates - self._recorder.updates) * (self._last - self._start) / done
            print(self._line(self._now, logs, share, f"{duration(left)} left"), flush=True)

    def on_epoch_end(self, epoch, logs=None):
        print(self._line(epoch, logs), flush=True)
        self._printed = time.perf_counter()


class Bar(_Display):
    """One bar over the whole run, and a line for each epoch above it."""

    def __init__(self, plan: Plan, recorder: Recorder, usage: Callable[[], Sample]):
        super().__init__(plan, recorder, usage)
        # Without the widths, rich truncates these on a narrow terminal, instead of the bar.
        count, clock = Column(min_width=2 * len(str(plan.updates)) + 1), Column(min_width=5)
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(bar_width=None),
            rich_progress.MofNCompleteColumn(table_column=count),
            rich_progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True, table_column=clock),
            rich_progress.TextColumn("{task.fields[speed]}"),
            console=Console(highlight=False, soft_wrap=True),
            transient=True,
        )

    def on_train_begin(self, logs=None):
        self._bar.start()
        self._task = self._bar.add_task("compiling", total=self._plan.updates, speed="")

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        loss = f" loss {_number(logs['loss'])}" if logs and "loss" in logs else ""
        speed = " ".join(filter(None, (self._speed(), self._gpus())))
        words = self._epoch(self._now) + loss
        self._bar.update(self._task, completed=self._recorder.updates, description=words, speed=speed)

    def on_epoch_end(self, epoch, logs=None):
        self._bar.console.print(self._line(epoch, logs))

    def stop(self) -> None:
        """Restores the terminal; also after an error."""
        self._bar.stop()

    def on_train_end(self, logs=None):
        self.stop()


class TrainJobStatus(Callback):
    """Tells Kubeflow Trainer how far its TrainJob is, from a thread; what goes wrong there is nothing to the training.

    https://trainer.kubeflow.org says what is posted: the feature gate TrainJobStatus of Trainer 2.2 and newer.
    """

    takes_many_updates = True

    def __init__(self, plan: Plan, recorder: Recorder):
        super().__init__()
        self._plan, self._recorder = plan, recorder
        self._posting, self._next, self._first = threading.Thread(), 0.0, (0, 0.0)
        self._logs: dict[str, object] = {}

    def on_train_batch_end(self, batch, logs=None):
        now = time.monotonic()
        self._logs |= logs or {}
        self._first = self._first if self._first[0] else (self._recorder.updates, now)
        if now >= self._next and not self._posting.is_alive():
            self._post(now)

    def on_epoch_end(self, epoch, logs=None):
        self._logs |= logs or {}

    def on_train_end(self, logs=None):
        if self._posting.ident:  # else a finished run has begun again, and made no update
            self._posting.join(POST_EVERY_S)
            self._post(time.monotonic())
            self._posting.join(POST_EVERY_S)

    def _post(self, now: float) -> None:
        done, self._next = self._recorder.updates, now + POST_EVERY_S
        left, made = self._plan.updates - done, done - self._first[0]
        named = [{"name": k[:64], "value": f"{v:.6g}"} for k, v in self._logs.items() if isinstance(v, (int, float))]
        status: dict[str, Any] = {"progressPercentage": 100 * done // self._plan.updates, "metrics": named[:256]}
        status |= {"estimatedRemainingSeconds": round(left * (now - self._first[1]) / made)} if made else {}
        status["lastUpdatedTime"] = datetime.datetime.now(datetime.timezone.utc).isoformat()
        body = json.dumps({"trainerStatus": status}).encode()
        self._posting = threading.Thread(target=self._send, args=(body,), daemon=True)
        self._posting.start()

    def _send(self, body: bytes) -> None:
        url, ca, path = (os.environ[f"KUBEFLOW_TRAINER_SERVER_{name}"] for name in ("URL", "CA_CERT", "TOKEN"))
        with contextlib.suppress(Exception), open(path) as token:  # read anew, since it is renewed every hour
            headers = {"Authorization": f"Bearer {token.read().strip()}", "Content-Type": "application/json"}
            request, context = urllib.request.Request(url, body, headers), ssl.create_default_context(cafile=ca)
            urllib.request.urlopen(request, timeout=POST_EVERY_S, context=context).close()
