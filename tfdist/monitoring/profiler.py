"""`--profile=FROM:TO`: a trace of some updates for TensorBoard's profiler, and its summary as text."""

import collections
import pathlib
import re
from typing import TYPE_CHECKING

import tensorflow as tf

from tfdist.config.messages import logger
from tfdist.monitoring.recorder import Recorder
from tfdist.trainer.callbacks import Callback
from tfdist.trainer.timing import Call, Spent

if TYPE_CHECKING:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

SHOWN = 10  # operations in the text
FILE = "profile.txt"
_ENTRIES = (("input", "input"), ("compute", "compute"), ("all_reduce", "all-reduce"), ("python", "Python"))
_WRAPPINGS = re.compile(r"(while|body|cond|then|else)(/_\d+)?/|replica_\d+/")


class Profiler(Callback):
    """Traces the updates `first` to `last`, counted from 1 by `recorder`, whose callbacks run before these.

    All workers need it, so that their calls have the same length; the chief alone `traces`.
    """

    takes_many_updates = True

    def __init__(self, first: int, last: int, recorder: Recorder, folder: pathlib.Path, traces: bool):
        super().__init__()
        self._first, self._last, self._recorder = first, last, recorder
        self._folder, self._traces = folder, traces
        self._spent = Spent()
        self._updates = 0
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

    def on_call(self, call: Call) -> None:
        if self._running and call.steady:
            self._spent += call.spent
            self._updates += call.updates

    def on_train_batch_end(self, batch, logs=None):
        if self._recorder.updates >= self._last:
            self.stop()

    def stop(self) -> None:
        """Ends a trace that is still running; also after an error."""
        if not self._running:
            return
        self._running, self._over = False, True
        tf.profiler.experimental.stop()
        traces = sorted((self._folder / "tensorboard").glob("plugins/profile/*/*.xplane.pb"))
        last = min(self._last, self._recorder.updates)
        text = summary(traces[-1].read_bytes(), self._updates, self._spent)
        (self._folder / FILE).write_text(f"updates {self._first} to {last} of {self._folder}\n{text}")
        logger.info(f"profile of updates {self._first} to {last}: {self._folder / FILE}")
        logger.info(f"its trace: tensorboard --logdir={self._folder / 'tensorboard'} (pip install xprof)")


def summary(trace: bytes, updates: int, spent: Spent) -> str:
    """Returns the split of the time, and the costliest operations of an XSpace, as TensorFlow's profiler writes it.

    `spent` is the time of those `updates` that were traced in calls that compiled nothing.
    """
    times, counts, communication = operations(trace)
    total = sum(times.values())
    if updates:
        shares = [(spent.share(name), what) for name, what in _ENTRIES]
        split = ", ".join(f"{what} {100 * share:.1f} %" for share, what in shares if share is not None)
        lines = [f"{1e3 * spent.seconds / updates:.3f} ms each: {split}"]
    else:
        lines = ["all of them were in calls that were still compiled: choose later ones for the split of their time"]
    if spent.all_reduce is None and total:
        lines.append(f"communication is {100 * communication / total:.1f} % of the devices' time")
    lines += [
        "",
        f"the {SHOWN} costliest operations, over all replicas",
        f"{'ms':>10} {'share':>7} {'times':>7}  operation",
    ]
    for name, seconds in times.most_common(SHOWN):
        lines.append(f"{1e3 * seconds:10.3f} {100 * seconds / total:5.1f} % {counts[name]:7d}  {name}")
    return "\n".join(lines) + "\n"


def operations(trace: bytes) -> tuple[collections.Counter, collections.Counter, float]:
    """Returns seconds and executions by operation, and the seconds of communication, of the GPUs or else the CPU."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(trace)
    devices = [p for p in space.planes if p.name.startswith("/device:GPU")]
    times: collections.Counter = collections.Counter()
    counts: collections.Counter = collections.Counter()
    communication = 0.0
    for plane in devices or [p for p in space.planes if p.name.startswith("/host:CPU")]:
        for line in plane.lines:
            if devices and not line.name.startswith("Stream"):
                continue  # the same kernels again, grouped by their cause
            for event in line.events:
                if name := _operation(plane, event):
                    seconds = event.duration_ps / 1e12
                    times[name] += seconds
                    counts[name] += 1
                    communication += seconds if re.search("(?i)nccl|allreduce|collective", name) else 0.0
    return times, counts, communication


def _operation(plane: "xplane_pb2.XPlane", event: "xplane_pb2.XEvent") -> str:
    """Returns `layer/name (Type)` of an event that is an operation of TensorFlow, else an empty string."""
    name = plane.event_metadata[event.metadata_id].name
    for stat in event.stats:  # a GPU's kernel has the operation that it belongs to
        if plane.stat_metadata[stat.metadata_id].name == "tf_op":
            name = stat.str_value or plane.stat_metadata[stat.ref_value].name
    path, colon, kind = name.rpartition(":")
    if colon and re.fullmatch(r"\w+", kind) and not path.endswith(":"):
        return f"{_WRAPPINGS.sub('', path)} ({kind})"
    return name if plane.name.startswith("/device:GPU") else ""
