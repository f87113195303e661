"""The recorder of a run and the sinks of its measurements: display, timeline, TensorBoard, profiler."""

import math
import pathlib
import platform
import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import keras
import psutil
import tensorflow as tf

from tfdist import config
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.config.messages import logger
from tfdist.config.runtime_options import DisplayOptions
from tfdist.config.schedule import Plan
from tfdist.distributed.gpus import DriverGPU, Survey, survey
from tfdist.monitoring import progress
from tfdist.monitoring.flops import FlopsModel
from tfdist.monitoring.recorder import TIMELINE, Recorder, learning_rate, until
from tfdist.monitoring.report.page import ADVICE, INPUT_LIMIT, JUDGED_S
from tfdist.trainer.callbacks import Call, Callback, Spent

if TYPE_CHECKING:
    from tensorboard.compat.proto import event_pb2

USAGE_EVERY_S = 5.0  # between two samples of the machine; nvidia-smi alone takes a tenth of one
EVERY_S = 0.5  # between two samples at the beginning of a run
THINNING = 400  # later the interval is the run's seconds divided by this: a day has 2,000 samples, not 86,400


def create(
    display: DisplayOptions,
    folder: RunFolder,
    experiment: config.Experiment,
    plan: Plan,
    flops: FlopsModel,
    recorder: Recorder,
    gpus: Sequence[DriverGPU] = (),
    profiled: tuple[int, int] = (0, 0),
    is_chief: bool = True,
) -> list[keras.callbacks.Callback]:
    """Returns the monitors of a run on one worker; those other than the chief's only keep step with it.

    `recorder`, whose values the others read, comes first. `gpus` are this worker's; `profiled` are the first and the
    last update of the profile, (0, 0) for none. Some have a `stop`, to call in the end, also after an error.
    """
    monitors: list[keras.callbacks.Callback] = [recorder]
    if is_chief:
        usage = Usage(tuple(gpu.number for gpu in gpus))
        board = Board(folder.path / "tensorboard") if display.tensorboard else None
        monitors += progress.create(display.progress, plan, recorder, usage.latest)
        monitors.append(Timeline(folder, recorder, usage, flops, experiment, board))
    if profiled[1]:
        monitors.append(Profiler(*profiled, recorder, folder.path, is_chief))
    return monitors


def peak_memory() -> int:
    """Returns the peak resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_device_memory() -> int | None:
    """Returns the peak bytes of the fullest GPU; None without one."""
    gpus = tf.config.list_logical_devices("GPU")
    return max((tf.config.experimental.get_memory_info(gpu.name)["peak"] for gpu in gpus), default=None)


class Usage:
    """Samples cores, memory and the GPUs of these driver numbers in a thread, so that a slow driver delays nothing."""

    def __init__(self, numbers: tuple[int, ...], survey: Callable[[], Survey] = survey):
        self._numbers, self._survey = numbers, survey
        self._process = psutil.Process()
        self._latest: progress.Sample = {"cpu": 0.0, "memory": 0, "gpus": []}
        self._over = threading.Event()
        self._process.cpu_percent()  # the next one is over the time since this one

    def start(self) -> None:
        self._sample()
        if self._numbers:
            threading.Thread(target=self._watch, name="tfdist usage", daemon=True).start()

    def latest(self) -> progress.Sample:
        if not self._numbers:
            self._sample()  # two files of /proc
        return self._latest.copy()

    def stop(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(USAGE_EVERY_S):
            self._sample()

    def _sample(self) -> None:
        known = lambda value: None if math.isnan(value) else value
        fields = ("number", "load", "memory_used", "memory_total")
        samples = [
            {field: known(getattr(gpu, field)) for field in fields}
            for gpu in (self._survey().gpus if self._numbers else ())
            if gpu.number in self._numbers
        ]
        memory = self._process.memory_info().rss
        self._latest = {"cpu": self._process.cpu_percent() / 100, "memory": memory, "gpus": samples}


class Timeline(Callback):
    """Samples a run into `timeline.jsonl` and TensorBoard's `board`; on the chief only.

    The callbacks of `recorder`, which counts updates and adds up time, run before these.
    """

    takes_many_updates = True

    def __init__(
        self,
        folder: RunFolder,
        recorder: Recorder,
        usage: Usage,
        flops: FlopsModel,
        experiment: config.Experiment,
        board: "Board | None",
    ):
        super().__init__()
        self._folder, self._recorder, self._usage, self._board = folder, recorder, usage, board
        self._flops, self._experiment = flops, experiment
        self._window, self._examples = Spent(), 0  # since the last sample
        self._last = -math.inf
        self._opened = self._warned = False

    def get_state(self) -> dict:
        return {}  # the recorder keeps it

    def set_state(self, state: dict) -> None:
        """Resumes from a checkpoint: later samples are dropped."""
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
        if call.steady:
            self._examples += call.examples
            self._window += call.spent

    def on_train_batch_end(self, batch, logs=None):
        now = time.monotonic()
        if now - self._last >= max(EVERY_S, (now - self._recorder.begun) / THINNING):
            self._sample(now, logs or {})

    def on_epoch_end(self, epoch, logs=None):
        if self._board:
            measured = {name: value for name, value in (logs or {}).items() if name.startswith("val_")}
            self._board.scalars(self._recorder.updates, measured)

    def on_train_end(self, logs=None):
        if self._examples:
            self._sample(time.monotonic(), logs or {})

    def stop(self) -> None:
        self._usage.stop()
        if self._board:
            self._board.close()

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            self._flops.count()
            if self._board:
                self._board.begin(self._recorder.updates)

    def _sample(self, now: float, logs: Mapping[str, object]) -> None:
        self._open()
        metrics = {name: v for name, v in logs.items() if isinstance(v, (int, float)) and not name.startswith("val_")}
        spent = self._window
        rate = self._examples / spent.seconds if self._examples else None
        step = {"learning_rate": learning_rate(self.model), "gradient_norm": self._recorder.gradient_norm}
        speed = {"examples_per_second": rate, "flops_per_second": self._flops.rates(rate)["flops_per_second"]}
        shares = {name: spent.share(name) for name in ("input", "all_reduce", "python")}
        usage = self._usage.latest()
        line = {"updates": self._recorder.updates, "seconds": round(now - self._recorder.begun, 3)}
        self._folder.append(TIMELINE, {**line, **metrics, **step, **speed, **shares, **usage})
        if self._board:  # which groups by the part before a slash
            scalars: dict[str, object] = {**metrics, **step}
            scalars |= {f"speed/{name}": value for name, value in speed.items()}
            scalars |= {f"share/{name}": value for name, value in shares.items()}
            scalars |= {"device/cores": usage["cpu"], "device/memory_bytes": usage["memory"]}
            for gpu in usage["gpus"]:
                scalars[f"device/gpu_{gpu['number']}_load"] = gpu["load"]
                scalars[f"device/gpu_{gpu['number']}_memory_MiB"] = gpu["memory_used"]
            self._board.scalars(self._recorder.updates, scalars)
        self._last, self._window, self._examples = now, Spent(), 0
        whole = self._recorder.spent
        share = whole.share("input") or 0.0
        if share > INPUT_LIMIT and whole.seconds > JUDGED_S and not self._warned:
            self._warned = True
            logger.info(f"WARNING: {100 * share:.0f} % of the time goes into waiting for input. {ADVICE['input']}")

    def _mark(self, what: str) -> None:
        line = {"updates": self._recorder.updates, "seconds": round(self._recorder.seconds, 3), "mark": what}
        self._folder.append(TIMELINE, line)


class Board:
    """Writes `train` and `validation` below `folder`, event by event; a full disk stops nothing else.

    Not by TensorBoard's writer: its thread would print a traceback, which a launcher takes for the cause of failures.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._writers: dict[str, tf.io.TFRecordWriter] = {}
        self._broken = False

    def begin(self, update: int) -> None:
        """Invalidates what was written of later updates."""
        from tensorboard.compat.proto import event_pb2

        for run in ("train", "validation"):  # TensorBoard drops what an earlier file has of this step and later ones
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(run, event_pb2.Event(wall_time=time.time(), step=update + 1, session_log=start))

    def scalars(self, update: int, values: Mapping[str, object]) -> None:
        """Adds the numbers among `values` to `train`; those of `val_` names to `validation`, by the rest."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        summaries: dict[str, summary_pb2.Summary] = {}
        for name, value in values.items():
            if isinstance(value, (int, float)):
                run = "validation" if name.startswith("val_") else "train"
                summary = summaries.setdefault(run, summary_pb2.Summary())
                summary.MergeFrom(scalar_pb(name.removeprefix("val_"), value))
        for run, summary in summaries.items():
            self._add(run, event_pb2.Event(wall_time=time.time(), step=update, summary=summary))

    def close(self) -> None:
        for writer in self._writers.values():
            self._try(writer.close)
        self._writers.clear()

    def _add(self, run: str, event: "event_pb2.Event") -> None:
        def write() -> None:
            if run not in self._writers:
                (self._folder / run).mkdir(parents=True, exist_ok=True)
                # TensorBoard reads files in the order of their names.
                name = f"events.out.tfevents.{time.time_ns()}.{platform.node()}"
                self._writers[run] = tf.io.TFRecordWriter(str(self._folder / run / name))
                version = type(event)(wall_time=time.time(), file_version="brain.Event:2")
                self._writers[run].write(version.SerializeToString())
            self._writers[run].write(event.SerializeToString())
            self._writers[run].flush()

        if not self._broken:
            self._try(write)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # of the disk
            if not self._broken:
                logger.info(f"WARNING: {self._folder} cannot be written ({error}): training goes on without it")
            self._broken = True


class Profiler(Callback):
    """Traces the updates `first` to `last` for TensorBoard (`--profile`), counted by `recorder`, which runs before it.

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
