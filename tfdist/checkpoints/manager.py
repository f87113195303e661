"""The checkpoints of one run: when they are taken, written and deleted, and which one a run resumes from."""

import copy
import math
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tfdist.checkpoints import bucket_folder, files, training_run, training_state
from tfdist.checkpoints.resume import LoadedCheckpoint, Position, choose, load
from tfdist.checkpoints.training_run import TrainingRun
from tfdist.config import buckets, schedule
from tfdist.config.messages import logger
from tfdist.data.spec import Structure
from tfdist.errors import TrainingError, UserError, one_line, printable
from tfdist.keras_bridge import setups

HELD_S = 1.0  # least seconds of training between two states that are held in memory for when a worker is lost
HELD_SHARE = 0.01  # the largest share of the time that holding them may take
_WRITTEN = set[str]()  # the folders of checkpoints of this process


class Checkpoints:
    """The checkpoints of one run, for `fit(checkpoints=...)`. Progress is logged on the chief only.

    Args:
      folder: a path or such as `s3://bucket/folder`; only the chief's matters.
      every: a duration as in the experiment (`100 steps`, `1 epoch`) or a time (`60 seconds`, `5 minutes`); or `off`.
      keep: number of newest checkpoints to keep.
      best: metric whose best epoch is kept, too, such as `val_accuracy`; `min` or `max` before it says which is
        better where the name does not.
      asynchronous: write in a thread beside the training, one at a time.
      resume: `auto` resumes from the newest valid one if there is any, `require` insists on one, `never` starts anew.
      changed: resume though experiment, batch or data have changed; only at the end of an epoch.
      experiment: fields of the experiment, kept in each checkpoint and compared on resume.
      data_sha256: digest of what the model was built for (`spec_file.digest`), kept in each checkpoint.
      facts: of the description of the data, the user's code and the model's file, kept and compared on resume.
      storage: what stands behind the folder, if that is a copy made by the caller.
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
        facts: Mapping[str, object] | None = None,
        storage: files.Disk | None = None,
    ):
        buckets.check("folder", os.fspath(folder))  # before it is a path, which takes gs:// for gs:/
        schedule.interval(every)
        if keep < 1:
            raise UserError(f"checkpoint.keep must be at least 1, got {keep}")
        self._best_metric = schedule.better(best)
        self.folder, kept_at = bucket_folder.checkpoints_at(folder)
        self._keep, self._storage = keep, storage or kept_at
        self._name = self._storage.shown(self.folder)
        self._every, self._asynchronous, self._resume, self._changed = every, asynchronous, resume, changed
        self._experiment, self._data_sha256, self.facts = dict(experiment or {}), data_sha256, dict(facts or {})
        self.off = every == "off"
        self.begun: Callable[[], None] = lambda: None  # called once nothing of the run to resume is refused any more
        self.cannot_hold: Callable[[set[str]], None] = lambda names: None  # called with variables of no layer
        self.resumed_from: int | None = None  # update
        self.paused = 0.0  # seconds for which training has waited for checkpoints
        self._updates, self._seconds = math.inf, math.inf
        self._last = time.monotonic()
        self.hold_at = self._last  # when to hold the state again, by the clock of this worker; the chief's counts
        self._best: dict[str, Any] = {"value": None, "update": None, "metric": best}
        self._thread: threading.Thread | None = None  # which writes one; on the chief only
        self.kept: list[pathlib.Path] = []  # those of this run that are on the disk, the oldest first
        self.in_memory: LoadedCheckpoint | None = None  # a state newer than what is on the disk, if any is held
        self.failure = ""  # why the last one could not be written
        self.unwritten: set[int] = set()  # updates whose checkpoints could not be written, since the last that was
        self._warned = ""  # the reason that was last given in a warning
        self.saved = 0
        self.seconds = 0.0  # that taking and writing them took

    def begin(self, run: TrainingRun) -> Position | None:
        """Restores the newest valid checkpoint, if any, and returns its position; called on all workers."""
        self._updates, self._seconds = schedule.interval(self._every, run.updates_per_epoch, run.global_batch)
        chosen = None
        self.facts |= run.facts
        if not self._experiment:  # which would tell what else has changed
            self.facts |= setups.of_training(run.model) | setups.of_callbacks(run.model, run.callbacks.callbacks)
        if run.distribution.is_chief:
            self._storage.begin()
            if self._resume != "never":
                chosen = choose(
                    self.folder,
                    run.identity(),
                    self._experiment,
                    self._changed,
                    self._storage,
                    self.facts,
                    required=self._resume == "require",
                )
        position = self._restore(run, chosen, first=True)
        self.begun()
        if position is None:
            return None
        self.resumed_from = position.update
        if chosen:
            self.facts = chosen.state.get("facts", {}) | self.facts  # a rate is a fact of the first start alone
            self.kept = files.newest_first(self.folder)[::-1]
            mixed = ", of an earlier call of fit in this process: give each call its folder" * (self._name in _WRITTEN)
            logger.info(f"resuming after update {position.update} from {self._storage.shown(chosen.path)}{mixed}")
        self._last = time.monotonic()
        return position

    def back(self, run: TrainingRun, bad: int) -> Position:
        """Restores the newest checkpoint with finite weights from before update `bad`; called on all workers."""
        self.wait()
        self.in_memory = None
        paths = files.newest_first(self.folder) if run.distribution.is_chief else []
        usable = filter(None, (load(path, self._storage) for path in paths if files.update_of(path) <= bad))
        while True:
            position = self._restore(run, next(usable, None))
            if position is None:
                raise TrainingError(
                    f"the loss is no longer finite after update {bad}, and no checkpoint from before can be used: "
                    "set train.on_nonfinite=stop, lower the learning rate, or save more often"
                )
            if all(np.isfinite(np.asarray(w, np.float64)).all() for w in run.model.get_weights()):
                return position

    def again(self, run: TrainingRun) -> Position:
        """Restores the newest checkpoint of this run, or its beginning; in one process."""
        self.wait()
        chosen = next(filter(None, (load(path, self._storage) for path in reversed(self.kept))), None)
        held = self.in_memory
        if chosen is None and held is not None:
            chosen = LoadedCheckpoint(self.folder, copy.deepcopy(held.state), held.tensors)
        position = self._restore(run, chosen)
        if position is None:
            raise TrainingError(f"no checkpoint in {self._name} can be used to go back to: start the run again")
        return position

    def _restore(self, run: TrainingRun, checkpoint: LoadedCheckpoint | None, first: bool = False) -> Position | None:
        position, best = training_run.restore(run, checkpoint, self._experiment, self.facts if first else {})
        if position is not None:
            same = best.get("metric", self._best["metric"]) == self._best["metric"]  # another's value says nothing
            self._best |= best if same else {"value": None, "update": None}
        return position

    def limit(self, done: int) -> float:
        """Returns the number of updates until the next checkpoint that is due by count."""
        return math.inf if self._updates == math.inf else self._updates - done % self._updates

    def due(self, done: int) -> bool:
        """Tells whether a checkpoint is due by count; the same on all workers."""
        return self._updates != math.inf and done % self._updates == 0

    def late(self) -> bool:
        """Tells whether one is due by the clock of this worker; the chief's counts."""
        return time.monotonic() - self._last >= self._seconds

    def improved(self, logs: Mapping[str, Structure], done: int) -> bool:
        """Tells whether the epoch that has ended is the best so far; the same on all workers."""
        metric, sign = self._best_metric
        if not metric:
            return False
        if metric.startswith("val_") and not any(name.startswith("val_") for name in logs):
            return False  # no validation after this epoch
        if metric not in logs:
            raise UserError(f"checkpoint.best={metric} is not measured", f"choose one of {', '.join(sorted(logs))}")
        value, best = float(logs[metric]), self._best["value"]
        if not math.isfinite(value) or (best is not None and sign * value <= sign * best):
            return False
        self._best |= {"value": value, "update": done}
        return True

    def save(self, run: TrainingRun, position: Position, wait: bool = False) -> None:
        """Takes a checkpoint; called on all workers at the same update. `wait` until it is on the disk at the end."""
        start = time.perf_counter()
        self.wait()  # one at a time: a slow disk slows down training instead of filling the memory
        captured = time.perf_counter()
        self._last = time.monotonic()
        tensors = training_state.capture(run.model, run.distribution, run.callbacks)
        if not run.distribution.is_chief:
            return
        state = self._state(run, position)
        _WRITTEN.add(self._name)
        self.seconds += time.perf_counter() - captured
        self.start(state, tensors)
        if wait or not self._asynchronous:
            self.wait()
        if not wait:
            self.paused += time.perf_counter() - start

    def hold(self, run: TrainingRun, position: Position) -> None:
        """Keeps the state in the chief's memory for `again` and `write_held`, until a newer one is on the disk.

        Called on all workers at the same update.
        """
        start = time.monotonic()
        tensors = training_state.capture(run.model, run.distribution, run.callbacks)
        if not run.distribution.is_chief:
            return
        # Copied here, and not by TensorFlow in the next update, so that the time that it takes is known.
        copied = {name: np.array(tensor) for name, tensor in tensors.items()}
        self.in_memory = LoadedCheckpoint(self.folder, self._state(run, position), copied)
        now = time.monotonic()
        self.hold_at = now + max(HELD_S, (now - start) / HELD_SHARE)

    def finish(self) -> None:
        """Waits for the last checkpoint, and logs what checkpoints have cost."""
        self.wait()
        if len(self.unwritten) > 1:
            logger.info(f"WARNING: the last {len(self.unwritten)} checkpoints could not be written")
        if self.saved:
            logger.info(
                f"{self.saved} checkpoint{'s' * (self.saved > 1)} in {self._name}: training waited "
                f"{self.paused:.2f} s of the {self.seconds:.2f} s that writing took"
            )

    def _state(self, run: TrainingRun, position: Position) -> dict[str, object]:
        return training_run.state_of(run, position, self._experiment, self._data_sha256, self.facts, self._best)

    def start(self, state: dict[str, Any], tensors: dict[str, Structure]) -> None:
        """Begins to write a checkpoint in a thread, and deletes all but the newest and the best one.

        Call `wait` for the previous one first.
        """
        self._thread = threading.Thread(target=self._write, args=(state, tensors), name="tfdist checkpoint")
        self._thread.start()

    def write_held(self) -> None:
        """Begins to write what is in memory, after the one that is being written; from any thread.

        The state of the other workers is no use when a worker is lost: they are in the middle of an update.
        """
        held, before = self.in_memory, self._thread
        if held is None:
            return

        def write() -> None:
            if before is not None:
                before.join()
            if self._write(held.state, held.tensors):
                update = held.state["position"]["update"]
                logger.info(f"the state after update {update} was in memory and is saved, since a worker is lost")

        # Else it would be a daemon, as the thread that calls this may be, and the exit would not wait for it.
        self._thread = threading.Thread(target=write, name="tfdist checkpoint", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Returns when the one that is being written is on the disk, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, state: dict[str, Any], tensors: dict[str, Structure]) -> bool:
        """Writes a checkpoint; returns whether it is on the disk."""
        update, best = state["position"]["update"], state["best"]["update"]
        start, missing = time.perf_counter(), not self.folder.parent.exists()
        try:
            write = lambda prefix: training_state.write(prefix, tensors)
            path = files.write(self.folder, update, state, write, self._storage.publish)
        except Exception as error:  # TensorFlow's differ by version, and a callback's state may be anything
            self._fail(update, error)
            return False
        finally:
            self.seconds += time.perf_counter() - start
        if missing and self.saved:
            logger.info(f"WARNING: {self.folder.parent} was deleted and has been made again")
        if len(self.unwritten) > 1:
            logger.info(f"checkpoints are written again; {len(self.unwritten)} before update {update} were not")
        self.unwritten, self._warned = set(), ""
        self.failure, self.saved = "", self.saved + 1
        if self.in_memory and self.in_memory.state["position"]["update"] <= update:
            self.in_memory = None
        self.kept.append(path)
        newest = self.kept[-self._keep :]
        best_ones = [kept for kept in self.kept if files.update_of(kept) == best]
        self.kept = [kept for kept in self.kept if kept in newest or kept in best_ones[-1:]]
        files.prune(self.folder, set(self.kept))
        self._storage.prune({kept.name for kept in self.kept})
        return True

    def _fail(self, update: int, error: Exception) -> None:
        """Records that a checkpoint could not be written, and warns once for each reason."""
        if isinstance(error, OSError) and error.strerror:
            why = error.strerror.lower()
        else:
            text = one_line(getattr(error, "message", None) or error)
            text = re.sub(r"\{\{.*?\}\}|\[Op:.*", "", text)  # {{function_node ...}} and [Op:SaveV2] name: ...
            text = re.sub(re.escape(str(self.folder)) + r"\S*", "", text)  # each checkpoint has another path
            why = printable(text.strip(" ;:,") or type(error).__name__, 120)
        fix = f"look at {error.place}" if isinstance(error, buckets.BucketError) else f"free or repair {self.folder}"
        kept = f"the one of update {files.update_of(self.kept[-1])} is kept" if self.kept else "there is none"
        self.failure = f"the checkpoint after update {update} could not be written ({why})"
        self.unwritten.add(update)
        if why != self._warned:
            self._warned = why
            logger.info(f"WARNING: {self.failure}: training goes on, {kept}; {fix}")
