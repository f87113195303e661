"""Who watches a run, besides its recorder: the display, the timeline with TensorBoard, the profiler."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist import config
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.config import field_syntax
from tfdist.config.runtime_options import DisplayOptions
from tfdist.config.schedule import Plan
from tfdist.monitoring import progress
from tfdist.monitoring.flops import Work
from tfdist.monitoring.profiler import Profiler
from tfdist.monitoring.recorder import Recorder
from tfdist.monitoring.system_usage import Usage, peak_memory
from tfdist.monitoring.tensorboard import Board
from tfdist.monitoring.timeline import Timeline


class Watching:
    """The watchers of one run on one worker.

    Args:
      display: which of them are wanted.
      folder: the run's.
      recorder: its callbacks come before theirs.
      plan: the run's.
      is_chief: the others only keep step with it.
      work: what the run computes.
    """

    def __init__(
        self,
        display: DisplayOptions,
        folder: RunFolder,
        recorder: Recorder,
        plan: Plan,
        is_chief: bool,
        work: Work,
    ):
        self._display, self._folder, self._recorder, self._plan = display, folder, recorder, plan
        self._is_chief, self._work = is_chief, work
        self.callbacks: list[keras.callbacks.Callback] = []

    def start(self, experiment: config.Experiment, gpus: list[int], profiled: tuple[int, int]) -> None:
        """Makes the callbacks.

        Args:
          gpus: numbers of this worker's GPUs, as the driver counts.
          profiled: first and last update of the profile, (0, 0) for none.
        """
        display, folder, recorder = self._display, self._folder, self._recorder
        if self._is_chief:
            usage = Usage(tuple(gpus))
            board = Board(folder.path / "tensorboard") if display.tensorboard else None
            self.callbacks += progress.create(display.progress, self._plan, usage.latest)
            fields = config.flat(experiment)
            self.callbacks.append(Timeline(folder, recorder, usage, self._work, fields, board, advice(experiment)))
        if profiled[1]:
            self.callbacks.append(Profiler(*profiled, recorder, folder.path, self._is_chief))

    def totals(self, examples_per_second: float | None) -> dict[str, Any]:
        """Returns what `result.json` holds of memory and FLOPs."""
        gpus = tf.config.list_logical_devices("GPU")
        peaks = [tf.config.experimental.get_memory_info(gpu.name)["peak"] for gpu in gpus]
        return {
            "peak_memory_bytes": peak_memory(),
            "peak_device_memory_bytes": max(peaks, default=None),
            **self._work.measures(examples_per_second),
        }

    def stop(self) -> None:
        """Ends what threads and terminals they hold; also after an error."""
        for callback in self.callbacks:
            getattr(callback, "stop", lambda: None)()


def advice(experiment: config.Experiment) -> str:
    """Says what to do when training waits for this experiment's data."""
    if field_syntax.is_reference(experiment.data.name) and not field_syntax.files(experiment.data.name):
        return f"make the pipeline of {experiment.data.name} parallel (num_parallel_calls), or return arrays"
    if experiment.data.cache != "memory":
        return (
            "--config.data.cache=memory keeps the decoded examples, if they fit; else more CPU cores, or smaller images"
        )
    return "use more CPU cores for it (--threads)"
