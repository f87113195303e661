"""A run as it went: samples of its measures over time, in `timeline.jsonl` and for TensorBoard."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from tfdist.checkpoints.run_folder import RunFolder
from tfdist.config.messages import logger
from tfdist.monitoring.flops import Work
from tfdist.monitoring.recorder import TIMELINE, Recorder, learning_rate, until
from tfdist.monitoring.system_usage import Sample, Usage
from tfdist.monitoring.tensorboard import Board
from tfdist.trainer.callbacks import Callback
from tfdist.trainer.timing import INPUT_LIMIT, Call, Spent

EVERY_S = 0.5
"""Seconds between two samples at the beginning of a run."""
THINNING = 400
"""Later they are so many times fewer than the run's seconds: a day has 2,000 samples, not 86,400."""
JUDGED_S = 3.0
"""Seconds of training before anything is said of it."""


class Timeline(Callback):
    """Samples a run; on the chief only.

    Args:
      folder: where `timeline.jsonl` goes.
      recorder: knows the updates and the time; its callbacks come before these.
      usage: samples the machine.
      work: what the run computes.
      experiment: fields by name, for TensorBoard.
      board: TensorBoard's files, or None.
      advice: what to do about an input that is too slow.
    """

    takes_many_updates = True

    def __init__(
        self,
        folder: RunFolder,
        recorder: Recorder,
        usage: Usage,
        work: Work,
        experiment: Mapping[str, str],
        board: Board | None,
        advice: str,
    ):
        super().__init__()
        self._folder, self._recorder, self._usage, self._board = folder, recorder, usage, board
        self._work, self._experiment, self._advice = work, experiment, advice
        self._window, self._all = Spent(), Spent()
        self._examples = 0
        self._norm: float | None = None
        self._last = -math.inf
        self._opened = self._warned = False

    def get_state(self) -> dict:
        """Nothing: the recorder keeps it."""
        return {}

    def set_state(self, state: dict) -> None:
        """Goes on from a checkpoint: what was sampled after it is dropped."""
        self._folder.cut(TIMELINE, lambda line: until(line, self._recorder.updates))
        if not self._opened:
            self._open()
            self._mark("resumed")

    def on_checkpoint(self, update: int) -> None:
        self._mark("checkpoint")

    def on_rollback(self, update: int, skipped: list[int]) -> None:
        self._mark("rollback")

    def on_train_begin(self, logs=None):
        self._usage.start()

    def on_call(self, call: Call) -> None:
        """Takes the measures of a call."""
        self._norm = call.gradient_norm
        if call.steady:
            self._examples += call.examples
            self._window += call.spent
            self._all += call.spent

    def on_train_batch_end(self, batch, logs=None):
        now = time.monotonic()
        if now - self._last >= max(EVERY_S, (now - self._recorder.begun) / THINNING):
            self._sample(now, logs or {})

    def on_epoch_end(self, epoch, logs=None):
        logs = logs or {}
        if self._board and any(name.startswith("val_") for name in logs):
            validation = {name.removeprefix("val_"): v for name, v in logs.items() if name.startswith("val_")}
            self._board.scalars("validation", self._recorder.updates, validation)

    def on_train_end(self, logs=None):
        if self._examples:
            self._sample(time.monotonic(), logs or {})

    def stop(self) -> None:
        """Ends the threads; also after an error."""
        self._usage.stop()
        if self._board:
            self._board.close()

    def _open(self) -> None:
        if self._opened:
            return
        self._opened = True
        self._work.count()
        if self._board:
            self._board.begin(self._recorder.updates, self._experiment)

    def _sample(self, now: float, logs: Mapping[str, object]) -> None:
        self._open()
        measures = {name: v for name, v in logs.items() if isinstance(v, (int, float)) and not name.startswith("val_")}
        spent = self._window
        rate = self._examples / spent.seconds if self._examples else None
        rest = {
            "learning_rate": learning_rate(self.model),
            "gradient_norm": self._norm,
            "examples_per_second": rate,
            "flops_per_second": self._work.measures(rate)["flops_per_second"],
            "input": spent.share("input"),
            "all_reduce": spent.share("all_reduce"),
            "python": spent.share("python"),
        }
        usage = self._usage.latest()
        line = {"updates": self._recorder.updates, "seconds": round(now - self._recorder.begun, 3)}
        self._folder.append(TIMELINE, {**line, **measures, **rest, **usage})
        if self._board:
            self._board.scalars("train", self._recorder.updates, {**measures, **_shown(rest, usage)})
        self._last, self._window, self._examples = now, Spent(), 0
        self._judge()

    def _judge(self) -> None:
        share = self._all.share("input") or 0.0
        if share > INPUT_LIMIT and self._all.seconds > JUDGED_S and not self._warned:
            self._warned = True
            logger.info(f"WARNING: {100 * share:.0f} % of the time goes into waiting for input: {self._advice}")

    def _mark(self, what: str) -> None:
        line = {
            "updates": self._recorder.updates,
            "seconds": round(self._recorder.seconds, 3),
            "mark": what,
        }
        self._folder.append(TIMELINE, line)


def _shown(rest: Mapping[str, float | None], usage: Sample) -> dict[str, float | None]:
    """Gives the measures the names under which TensorBoard groups them."""
    scalars: dict[str, float | None] = {"learning_rate": rest["learning_rate"], "gradient_norm": rest["gradient_norm"]}
    scalars |= {f"speed/{name}": rest[name] for name in ("examples_per_second", "flops_per_second")}
    scalars |= {f"share/{name}": rest[name] for name in ("input", "all_reduce", "python")}
    scalars |= {"device/cores": usage["cpu"], "device/memory_bytes": usage["memory"]}
    for gpu in usage["gpus"]:
        scalars[f"device/gpu_{gpu['number']}_load"] = gpu["load"]
        scalars[f"device/gpu_{gpu['number']}_memory_MiB"] = gpu["memory_used"]
    return scalars
