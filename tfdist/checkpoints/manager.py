"""The checkpoints of one run: when they are taken, and which one a run goes on from."""

from __future__ import annotations

import copy
import math
import os
import pathlib
import time
from collections.abc import Mapping

import numpy as np

from tfdist.checkpoints import files, training_run, training_state
from tfdist.checkpoints import storage as storage_lib
from tfdist.checkpoints.options import CheckpointOptions
from tfdist.checkpoints.resume import LoadedCheckpoint, Position, ResumeChoice
from tfdist.checkpoints.training_run import BestEpoch, TrainingRun
from tfdist.checkpoints.writer import CheckpointWriter
from tfdist.config import buckets, schedule
from tfdist.config.messages import logger
from tfdist.data.structures import Structure
from tfdist.errors import TrainingError, UserError

HELD_S = 1.0
"""Seconds of training, at least, between two states that are held in memory for when a worker is lost."""
HELD_SHARE = 0.01
"""The part of the time, at most, that holding them may take."""


class Checkpoints:
    """The checkpoints of one run, for `fit(checkpoints=...)`.

    What becomes of them is said by the logger `tfdist`, on the chief only.

    Args:
      folder: where they are, a path or such as `s3://bucket/folder`; only the chief's matters.
      every: a duration as in the experiment (`100 steps`, `1 epoch`) or a time (`60 seconds`, `5 minutes`); `off` for
        none at all.
      keep: how many of the newest to keep.
      best: metric whose best epoch is kept besides, such as `val_accuracy`; `min` or `max` before it says which is
        better where the name does not.
      asynchronous: write beside the training, one at a time.
      resume: `auto` goes on from the newest valid one if there is any, `require` insists on one, `never` begins anew.
      changed: resume though experiment, batch or data have changed; only where an epoch has ended.
      experiment: fields of the experiment, kept in each checkpoint and compared on resume.
      data_sha256: digest of what the model was built for (`spec_file.digest`), kept in each checkpoint.
      storage: what stands behind the folder, if that is a copy that somebody else has made.

    Raises:
      UserError: one of these cannot be.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        every: str = "60 seconds",
        keep: int = 3,
        best: str = "",
        asynchronous: bool = True,
        resume: str = "auto",
        changed: bool = False,
        experiment: Mapping[str, str] | None = None,
        data_sha256: str = "",
        storage: storage_lib.Disk | None = None,
    ):
        buckets.check("folder", os.fspath(folder))  # before it is a path, which takes gs:// for gs:/
        here, kept_at = storage_lib.at(folder)
        self._storage = storage or kept_at
        self._name = self._storage.shown(here)
        self._options = CheckpointOptions(
            here, every, keep, best, asynchronous, resume, changed, dict(experiment or {}), data_sha256
        )
        self._writer = CheckpointWriter(self.folder, keep, self._storage)
        self.resumed_from: int | None = None
        """The update that the run went on from."""
        self.paused = 0.0
        """Seconds for which training has waited for checkpoints."""
        self._updates, self._seconds = math.inf, math.inf
        self._last = self._hold_at = time.monotonic()
        self._best = BestEpoch()

    @property
    def folder(self) -> pathlib.Path:
        """Returns where the checkpoints are on this machine."""
        return self._options.folder

    @property
    def off(self) -> bool:
        """Tells whether there are to be no checkpoints at all."""
        return self._options.off

    @property
    def failure(self) -> str:
        """Returns why the last checkpoint could not be written, or nothing."""
        return self._writer.failure

    @property
    def saved(self) -> int:
        """Returns how many have been written."""
        return self._writer.saved

    @property
    def writing(self) -> float:
        """Returns the seconds that taking and writing them took in all."""
        return self._writer.seconds

    # -- resuming -----------------------------------------------------------

    def begin(self, run: TrainingRun) -> Position | None:
        """Puts the newest valid checkpoint back into the run: where it goes on, or None for its beginning.

        To be called on all workers.

        Raises:
          UserError: there is none to be used, though there should be.
        """
        options = self._options
        self._updates, self._seconds = schedule.interval(
            "checkpoint.every", options.every, run.updates_per_epoch, run.global_batch, math.inf
        )
        chosen = None
        if run.distribution.is_chief:
            self._storage.begin()
        if run.distribution.is_chief and options.resume != "never":
            chosen = self._choice(run, options.changed).newest(options.resume == "require")
        position = self._put_back(run, chosen)
        if position is None:
            return None
        self.resumed_from = position.update
        if chosen:
            self._writer.kept = files.found(self.folder)[::-1]
            logger.info(f"resuming after update {position.update} from {self._storage.shown(chosen.path)}")
        self._last = time.monotonic()
        return position

    def back(self, run: TrainingRun, bad: int) -> Position:
        """Puts the newest checkpoint with finite weights from before update `bad` back, after training has gone wrong.

        To be called on all workers.

        Raises:
          TrainingError: there is none.
        """
        self.wait()
        self._writer.in_memory = None
        paths = files.found(self.folder) if run.distribution.is_chief else []
        choice = self._choice(run)
        while True:
            chosen = None
            while paths and chosen is None:
                path = paths.pop(0)
                if files.update_of(path) <= bad:
                    chosen = choice.load(path)
            position = self._put_back(run, chosen)
            if position is None:
                raise TrainingError(
                    f"the loss is no longer finite after update {bad}, and no checkpoint from before can be used: "
                    "set train.on_nonfinite=stop, lower the learning rate, or save more often"
                )
            if all(np.isfinite(np.asarray(w, np.float64)).all() for w in run.model.get_weights()):
                return position

    def hold(self, run: TrainingRun, position: Position) -> None:
        """Keeps the state in memory for `again` and `write_held`, until one as new is on the disk.

        To be called on all workers at the same update; it is held on the chief.
        """
        start = time.monotonic()
        tensors = training_state.capture(run.model, run.distribution, run.callbacks)
        if not run.distribution.is_chief:
            return
        # Copied here, and not by TensorFlow in the next update, so that the time that it takes is known.
        copied = {name: np.array(tensor) for name, tensor in tensors.items()}
        self._writer.in_memory = LoadedCheckpoint(self.folder, copy.deepcopy(self._state(run, position)), copied)
        now = time.monotonic()
        self._hold_at = now + max(HELD_S, (now - start) / HELD_SHARE)

    def should_hold(self) -> bool:
        """Tells whether it is time to hold the state once more, by the clock of this worker; the chief's counts."""
        return time.monotonic() >= self._hold_at

    def write_held(self) -> None:
        """Begins to write what `hold` keeps, if it is newer than what is on the disk; from any thread of the chief.

        What the others still have when a worker is lost is no use: as a rule they are in the middle of an update.
        """
        self._writer.write_held()

    def again(self, run: TrainingRun) -> Position:
        """Puts the newest checkpoint of this run back, or its beginning; in one process.

        Raises:
          TrainingError: there is none that can be read.
        """
        self.wait()
        choice = self._choice(run)
        chosen = next(filter(None, (choice.load(path) for path in reversed(self._writer.kept))), None)
        held = self._writer.in_memory
        if chosen is None and held is not None:
            chosen = LoadedCheckpoint(self.folder, copy.deepcopy(held.state), held.tensors)
        position = self._put_back(run, chosen)
        if position is None:
            raise TrainingError(f"no checkpoint in {self._name} can be used to go back to: start the run again")
        return position

    def _choice(self, run: TrainingRun, changed: bool = False) -> ResumeChoice:
        return ResumeChoice(self.folder, run.identity(), self._options.experiment, changed, self._storage)

    def _put_back(self, run: TrainingRun, checkpoint: LoadedCheckpoint | None) -> Position | None:
        restored = training_run.put_back(run, checkpoint, self._options.experiment)
        if restored is None:
            return None
        position, self._best = restored
        return position

    # -- saving -------------------------------------------------------------

    def limit(self, done: int) -> float:
        """Returns how many more updates there are to the next checkpoint that is due by count."""
        return math.inf if self._updates == math.inf else self._updates - done % self._updates

    def due(self, done: int) -> bool:
        """Tells whether a checkpoint is due by count; the same on all workers."""
        return self._updates != math.inf and done % self._updates == 0

    def late(self) -> bool:
        """Tells whether one is due by the clock of this worker; the chief's counts."""
        return time.monotonic() - self._last >= self._seconds

    def improved(self, logs: Mapping[str, Structure], done: int) -> bool:
        """Tells whether the epoch that has ended is the best so far; the same on all workers."""
        metric, sign = self._options.best_metric
        if not metric:
            return False
        if metric.startswith("val_") and not any(name.startswith("val_") for name in logs):
            return False  # no validation after this epoch
        if metric not in logs:
            raise UserError(f"checkpoint.best={metric} is not measured: choose one of {', '.join(sorted(logs))}")
        value, before = float(logs[metric]), self._best.value
        if not math.isfinite(value) or (before is not None and sign * value <= sign * before):
            return False
        self._best = BestEpoch(value, done)
        return True

    def save(self, run: TrainingRun, position: Position, wait: bool = False) -> None:
        """Takes a checkpoint; to be called on all workers at the same update.

        Args:
          wait: come back when it is on the disk; nobody trains meanwhile.
        """
        start = time.perf_counter()
        self.wait()  # one at a time: a slow disk slows down training instead of filling the memory
        captured = time.perf_counter()
        self._last = time.monotonic()
        tensors = training_state.capture(run.model, run.distribution, run.callbacks)
        if not run.distribution.is_chief:
            return
        state = self._state(run, position)
        self._writer.seconds += time.perf_counter() - captured
        self._writer.start(position.update, state, tensors, self._best.update)
        if wait or not self._options.asynchronous:
            self.wait()
        if not wait:
            self.paused += time.perf_counter() - start

    def wait(self) -> None:
        """Returns when the checkpoint that is being written is on the disk, or has failed."""
        self._writer.wait()

    def finish(self) -> None:
        """Waits for the last one, and says what they have cost."""
        self.wait()
        if len(self._writer.unwritten) > 1:
            logger.info(f"WARNING: the last {len(self._writer.unwritten)} checkpoints could not be written")
        if self.saved:
            logger.info(
                f"{self.saved} checkpoint{'s' * (self.saved > 1)} in {self._name}: training waited "
                f"{self.paused:.2f} s of the {self.writing:.2f} s that writing took"
            )

    def _state(self, run: TrainingRun, position: Position) -> dict[str, object]:
        options = self._options
        return training_run.state_of(run, position, options.experiment, options.data_sha256, self._best)
