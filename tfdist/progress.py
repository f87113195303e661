"""What a person sees while it runs: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from typing import Any

import keras
from rich import progress as rich_progress
from rich.console import Console

from tfdist.plan import Plan

PLAIN_EVERY_S = 30.0
"""Seconds between plain lines within an epoch."""


def create(kind: str, plan: Plan) -> list[keras.callbacks.Callback]:
    """Callbacks for `--progress`; none for `none`."""
    if kind == "none":
        return []
    if kind == "bar" or (kind == "auto" and sys.stdout.isatty()):
        return [Bar(plan)]
    return [Plain(plan)]


def numbers(logs: dict[str, Any] | None) -> str:
    """Metrics in one short line, the loss first."""
    values = {k: v for k, v in (logs or {}).items() if isinstance(v, (int, float))}
    names = sorted(values, key=lambda k: (k.startswith("val_"), k not in ("loss", "val_loss"), k))
    return "  ".join(f"{name} {values[name]:.4f}" for name in names)


class _Display(keras.callbacks.Callback):
    takes_many_updates = True

    def __init__(self, plan: Plan):
        super().__init__()
        self._plan = plan
        self._width = len(str(plan.epochs))
        self._updates = self._before = 0

    def _rate(self, updates: int, seconds: float) -> str:
        examples = min(updates * self._plan.global_batch, self._plan.examples)
        return f"{examples / seconds:,.0f} examples/s" if seconds > 0 else ""

    def _epoch_line(self, epoch: int, seconds: float, logs: dict | None) -> str:
        rate = self._rate(self._updates - self._before, seconds) if self._updates > self._before else ""
        return f"epoch {epoch + 1:{self._width}d}/{self._plan.epochs}  {numbers(logs)}  {rate}".rstrip()

    def get_state(self) -> dict:
        """For a checkpoint."""
        return {"in_epoch": self._updates}

    def set_state(self, state: dict) -> None:
        """Goes on from a checkpoint."""
        self._updates = state["in_epoch"]

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch, self._before = epoch, self._updates  # of a resumed epoch, some are done
        self._start = self._last = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self._updates = batch + 1
        self._last = time.perf_counter()


class Plain(_Display):
    """A line per epoch, and one every half minute in long epochs."""

    def on_train_begin(self, logs=None):
        self._said = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        if self._last - self._said >= PLAIN_EVERY_S:
            self._said = self._last
            share = f"update {batch + 1}/{self._plan.updates_per_epoch}  "
            rate = self._rate(self._updates - self._before, self._last - self._start)
            print(f"epoch {self._epoch + 1}/{self._plan.epochs}  {share}{numbers(logs)}  {rate}", flush=True)

    def on_epoch_end(self, epoch, logs=None):
        print(self._epoch_line(epoch, self._last - self._start, logs), flush=True)
        self._said, self._updates = time.perf_counter(), 0


class Bar(_Display):
    """One bar over the whole run, and a line for each epoch above it."""

    def __init__(self, plan: Plan):
        super().__init__(plan)
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(bar_width=None),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            rich_progress.TextColumn("{task.fields[rate]}"),
            console=self._console,
            transient=True,
        )

    def on_train_begin(self, logs=None):
        self._bar.start()
        self._task = self._bar.add_task("compiling", total=self._plan.updates, rate="")

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        loss = f"  loss {logs['loss']:.4f}" if logs and "loss" in logs else ""
        self._bar.update(
            self._task,
            completed=self._epoch * self._plan.updates_per_epoch + batch + 1,
            description=f"epoch {self._epoch + 1}/{self._plan.epochs}{loss}",
            rate=self._rate(self._updates - self._before, self._last - self._start),
        )

    def on_epoch_end(self, epoch, logs=None):
        self._bar.console.print(self._epoch_line(epoch, self._last - self._start, logs))
        self._updates = 0

    def stop(self) -> None:
        """Gives the terminal back; also after an error."""
        self._bar.stop()

    def on_train_end(self, logs=None):
        self.stop()
