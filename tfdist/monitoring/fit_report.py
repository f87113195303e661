"""`tfdist.Report`: a page, `result.json` and TensorBoard files about the calls of `fit` of a script."""

import atexit
import collections
import dataclasses
import os
import pathlib
import time
from typing import Any

import numpy as np

from tfdist.checkpoints import state_shape
from tfdist.checkpoints.run_folder import RunFolder, strict
from tfdist.config import field_syntax
from tfdist.config.messages import logger
from tfdist.distributed.distribution import Distribution
from tfdist.monitoring.monitors import Board, peak_memory
from tfdist.monitoring.recorder import learning_rate, versions
from tfdist.monitoring.report import curves, page
from tfdist.monitoring.report.html import Html
from tfdist.trainer.callbacks import Call, Callback, Spent

LISTED = 200  # the newest calls in the table and in `result.json`: a search makes thousands
DRAWN = 20  # the newest calls with a section of their own
QUIET = 20  # within a call, and after many, seconds without a write for each second that a write takes

_STATE: state_shape.Shape = {
    "seconds": state_shape.finite,
    "examples": state_shape.count,
    "steady": state_shape.count,
    "time": state_shape.mapping,
    "lines": state_shape.list_of(state_shape.mapping),
}


class Report(Callback):
    """Writes `report.html`, `result.json` and `tensorboard/` about each call of `fit` that it is given to.

    The files are written on the chief, at the end of each call, and of its epochs as often as that costs little. One
    object reports all calls of a process; a folder's earlier files are replaced.

    ```python
    report = tfdist.Report("runs/mine")
    tfdist.fit(model, x, y, epochs=3, callbacks=[report])
    ```

    `folder`: where the files are written.
    """

    chief_only = True
    takes_many_updates = True

    def __init__(self, folder: str | os.PathLike | RunFolder):
        super().__init__()
        if not isinstance(folder, RunFolder):
            field_syntax.check_local("the folder of a Report", os.fspath(folder))
            folder = RunFolder(str(pathlib.Path(folder).expanduser()))
        self._folder = folder
        self._calls: collections.deque[dict[str, Any]] = collections.deque(maxlen=LISTED)
        self._sections: collections.deque[tuple[str, str, Html]] = collections.deque(maxlen=DRAWN)  # of ended calls
        self._lines: list[dict[str, Any]] = []  # of the running one, for each epoch
        self._number = 0
        self._call: dict[str, Any] = {}  # the record of the running one
        self._board: Board | None = None
        self._written = self._cost = 0.0
        self._warned = False

    def __deepcopy__(self, memo: object) -> "Report":
        return self  # KerasTuner copies the callbacks for each trial

    def get_state(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._begun
        record = {"seconds": seconds, "examples": self._examples, "steady": self._steady, "lines": list(self._lines)}
        return record | {"time": dataclasses.asdict(self._spent)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Resumes from a checkpoint, which may be at the end of the call."""
        state_shape.require(state, _STATE)
        self._begun = time.monotonic() - state["seconds"]
        self._examples, self._steady, self._lines = state["examples"], state["steady"], list(state["lines"])
        self._spent = Spent(**state["time"])
        self._updates = self._lines[-1]["updates"] if self._lines else 0
        self._close_board()  # the next one drops what it has of later updates

    def on_train_begin(self, logs=None):
        self.end_call("unfinished")  # one that an error has ended
        self._number += 1
        self._begun, self._updates, self._before = time.monotonic(), 0, 0
        self._examples = self._steady = 0
        self._spent, self._of_epoch, self._of_examples = Spent(), Spent(), 0
        self._lines = []
        self._call = {"call": self._number, "model": self.model.name, "status": "unfinished", "reason": ""}
        self._calls.append(self._call)
        self._update()

    def on_epoch_begin(self, epoch, logs=None):
        self._before = self._lines[-1]["updates"] if self._lines else 0
        self._of_epoch, self._of_examples = Spent(), 0

    def on_call(self, call: Call) -> None:
        self._examples += call.examples
        if call.steady:
            self._spent += call.spent
            self._of_epoch += call.spent
            self._steady += call.examples
            self._of_examples += call.examples

    def on_train_batch_end(self, batch, logs=None):
        self._updates = self._before + batch + 1

    def on_epoch_end(self, epoch, logs=None):
        logs = {name: v for name, v in (logs or {}).items() if isinstance(v, (int, float, np.number, np.ndarray))}
        speed = self._of_examples / self._of_epoch.seconds if self._of_epoch.seconds else None
        rate = learning_rate(self.model) if self.model.optimizer else None
        line = {"epoch": epoch + 1, "updates": self._updates, "seconds": round(time.monotonic() - self._begun, 3)}
        self._lines.append(strict(line | {"examples_per_second": speed, "learning_rate": rate} | logs))
        if self._board is None:
            self._board = Board(self._folder.path / "tensorboard" / f"call_{self._number:04d}")
            self._board.begin(self._before)
        self._board.scalars(self._updates, {**logs, "learning_rate": rate, "speed/examples_per_second": speed})
        self._write_if_cheap()

    def on_train_end(self, logs=None):
        self.end_call("completed")

    def end_call(self, status: str, reason: str = "") -> None:
        """Records the end of the running call, if there is one."""
        if not self._call:
            return
        if status != "unfinished":
            self._update()
        self._call |= {"status": status, "reason": reason}
        self._sections.append(page.section_of_call(self._folder.path, self._call, self._lines))
        self._call = {}
        self._close_board()
        if self._number <= DRAWN:
            self._write()
        else:  # of a loop over short calls
            self._write_if_cheap()
            atexit.unregister(self._write)
            atexit.register(self._write)

    def end(self, status: str, distribution: Distribution) -> None:
        """Writes the files once more, when the script has ended thus."""
        self.distribution = distribution
        self._write(status)

    def _close_board(self) -> None:
        if self._board:
            self._board.close()
        self._board = None

    def _update(self) -> None:
        """Brings the record of the running call up to date."""
        history: dict[str, list[Any]] = {}
        for line in self._lines:
            for name, value in ((name, value) for name, value in line.items() if name not in curves.NO_METRICS):
                history.setdefault(name, []).append(value)
        self._call |= {
            "updates": self._updates,
            "epochs": len(self._lines),
            "examples_seen": self._examples,
            "seconds": round(time.monotonic() - self._begun, 3),
            "examples_per_second": self._steady / self._spent.seconds if self._spent.seconds else None,
            "replicas": self.distribution.replicas if self.distribution else 1,
            "workers": self.distribution.workers if self.distribution else 1,
            "time": dataclasses.asdict(self._spent),
            "history": history,
        }

    def _write_if_cheap(self) -> None:
        if time.monotonic() - self._written > QUIET * self._cost:
            self._write()

    def _write(self, status: str = "") -> None:
        """Writes the page, then `result.json`; a disk that is full stops nothing."""
        began, where = time.monotonic(), self.distribution
        sections = list(self._sections)
        if self._call:
            self._update()
            sections.append(page.section_of_call(self._folder.path, self._call, self._lines))
        last = self._calls[-1] if self._calls else {"status": "completed", "reason": ""}
        result = {"status": status or last["status"], "reason": last["reason"], "calls": list(self._calls)}
        result |= {"calls_made": self._number, "peak_memory_bytes": peak_memory(), "versions": versions()}
        if where:
            result |= {"strategy": where.name, "why": where.reason, "devices": list(where.devices)}
            result |= {"replicas": where.replicas, "workers": where.workers}
        try:
            result = strict(result)
            self._folder.write_text(page.NAME, page.of_calls(self._folder.path, result, sections[-DRAWN:]))
            self._folder.write("result.json", result)
        except Exception as error:
            if not self._warned:
                logger.info(f"WARNING: no report: {error}")
            self._warned = True
        self._written, self._cost = time.monotonic(), time.monotonic() - began
