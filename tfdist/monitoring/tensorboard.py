"""What TensorBoard shows of a run: scalars over updates, training and validation in one plot, the experiment."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tfdist.config.messages import logger

if TYPE_CHECKING:
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

FLUSH_S = 10


class Board:
    """Writes `tensorboard/train` and `tensorboard/validation`, in threads of their own.

    A disk that is full stops this and nothing else.

    Args:
      folder: where both are written.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._writers: dict[str, EventFileWriter] = {}
        self._broken = False
        self._report = threading.excepthook

    def begin(self, update: int, experiment: Mapping[str, str]) -> None:
        """Tells the experiment, and that what was written of later updates is void."""
        from tensorboard.compat.proto import event_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb

        threading.excepthook = self._thread_failed
        rows = "".join(f"| {name.removeprefix('config.')} | `{value}` |\n" for name, value in experiment.items())
        text = text_pb("experiment", f"| field | value |\n|---|---|\n{rows}")
        for run in ("train", "validation"):  # TensorBoard drops what an earlier file has of this step and later ones
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(run, event_pb2.Event(wall_time=time.time(), step=update + 1, session_log=start))
        self._add("train", event_pb2.Event(wall_time=time.time(), step=update, summary=text))

    def scalars(self, run: str, update: int, values: Mapping[str, object]) -> None:
        """Adds the numbers among `values`.

        Args:
          run: `train` or `validation`.
        """
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        summary = summary_pb2.Summary()
        for name, value in numbers.items():
            summary.MergeFrom(scalar_pb(name, value))
        self._add(run, event_pb2.Event(wall_time=time.time(), step=update, summary=summary))

    def close(self) -> None:
        """Writes what is left."""
        for writer in self._writers.values():
            self._try(writer.close)
        self._writers.clear()
        if threading.excepthook == self._thread_failed:
            threading.excepthook = self._report

    def _add(self, run: str, event: event_pb2.Event) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._broken:
            return
        if run not in self._writers:
            self._try(lambda: self._writers.update({run: EventFileWriter(str(self._folder / run), 100, FLUSH_S)}))
        if not self._broken:
            self._try(lambda: self._writers[run].add_event(event))

    def _thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        """Leaves out the traceback of a writer's thread: the next event raises its error here, for the warning.

        A launcher would take the traceback for the cause of whatever fails next.
        """
        if "tensorboard" not in type(failure.thread).__module__:
            self._report(failure)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # of the disk, by way of TensorBoard's thread
            if not self._broken:
                logger.info(f"WARNING: {self._folder} cannot be written ({error}): training goes on without it")
            self._broken = True
