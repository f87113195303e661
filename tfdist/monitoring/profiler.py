"""`--profile=FROM:TO`: a trace of some updates for TensorBoard's profiler, which `tensorboard` shows."""

import pathlib

import tensorflow as tf

from tfdist.config.messages import logger
from tfdist.monitoring.recorder import Recorder
from tfdist.trainer.callbacks import Callback


class Profiler(Callback):
    """Traces the updates `first` to `last`, counted from 1 by `recorder`, whose callbacks run before these.

    All workers need it, so that their calls have the same length; the chief alone `traces`.
    """

    takes_many_updates = True

    def __init__(self, first: int, last: int, recorder: Recorder, folder: pathlib.Path, traces: bool):
        super().__init__()
        self._first, self._last, self._recorder = first, last, recorder
        self._folder, self._traces = folder, traces
        self._running = self._over = False

    def limit_call(self, update: int) -> float:
        """Returns the number of updates per call after `update`, so that a call ends at each end of the trace."""
        ends = [end - update for end in (self._first - 1, self._last) if end > update]
        return min(ends, default=float("inf"))

    def on_train_batch_begin(self, batch, logs=None):
        done = self._recorder.updates
        if self._over or not self._traces:
            return
        if done >= self._last:
            self._over = True
            where = f"--profile={self._first}:{self._last}"
            logger.info(f"WARNING: no profile: training resumed from update {done}, after {where}")
        elif done >= self._first - 1 and not self._running:
            self._running = True
            # Without Python's calls: tracing one would cost more than the call.
            options = tf.profiler.experimental.ProfilerOptions(python_tracer_level=0)
            tf.profiler.experimental.start(str(self._folder / "tensorboard"), options)

    def on_train_batch_end(self, batch, logs=None):
        if self._recorder.updates >= self._last:
            self.stop()

    def stop(self) -> None:
        """Ends a trace that is still running; also after an error."""
        if not self._running:
            return
        self._running, self._over = False, True
        tf.profiler.experimental.stop()
        last = min(self._last, self._recorder.updates)
        shown_by = f"tensorboard --logdir={self._folder / 'tensorboard'} (pip install xprof)"
        logger.info(f"profile of updates {self._first} to {last}: {shown_by}")
