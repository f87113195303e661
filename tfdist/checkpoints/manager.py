"""When checkpoints are taken, which one a run resumes from, and the thread that writes them."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoints import callback_state, files, resume, training_state
from tfdist.checkpoints.resume import Chosen, Position
from tfdist.config import schedule
from tfdist.distributed.distribution import Distribution
from tfdist.errors import TrainingError, UserError
from tfdist.models import keras_internals


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What a checkpoint is taken of and put back into."""

    model: keras.Model
    distribution: Distribution
    callbacks: Any
    """A Keras `CallbackList`."""
    batch: int
    per_epoch: int | None
    seed: int
    examples: int | None = None
    """Of the data, where that is known: one more, and each would come at another place."""

    def identity(self) -> dict[str, Any]:
        """What must be the same for the order of the examples to be the same."""
        known = {} if self.examples is None else {"number of examples": self.examples}
        return {
            "global batch": self.batch,
            "updates per epoch": self.per_epoch,
            "seed of the order": self.seed,
            **known,
        }


class Checkpoints:
    """The checkpoints of one run, for `fit(checkpoints=...)`.

    Args:
      folder: where they are; only the chief's matters.
      every: a duration as in the experiment (`100 steps`, `1 epoch`) or a time (`60 seconds`, `5 minutes`); `off` for
        none at all.
      keep: how many of the newest to keep.
      best: metric whose best epoch is kept besides, such as `val_accuracy`; `min` or `max` before it says which is
        better where the name does not.
      asynchronous: write beside the training, one at a time.
      resume: `auto` goes on from the newest valid one if there is any, `require` insists on one, `never` begins anew.
      changed: resume though experiment, batch or data have changed; only where an epoch has ended.
      experiment: fields of the experiment, kept in each checkpoint and compared on resume.
      say: shows a line to a person; called on the chief only.
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
        say: Callable[[str], None] = lambda line: None,
    ):
        self.folder = pathlib.Path(folder)
        self.every, self._keep, self._asynchronous = every, keep, asynchronous
        schedule.interval("checkpoint.every", every)
        if keep < 1:
            raise UserError(f"checkpoint.keep must be at least 1, got {keep}")
        self._best_name, self._best_sign = schedule.better(best)
        self._resume, self._changed, self._experiment = resume, changed, dict(experiment or {})
        self.say = say
        self.resumed_from: int | None = None
        self.failure = ""
        """Why the last checkpoint could not be written, or nothing."""
        self.saved = 0
        self.paused = 0.0
        """Seconds for which training has waited for checkpoints."""
        self.writing = 0.0
        """Seconds that taking and writing them took in all."""
        self._updates, self._seconds = math.inf, math.inf
        self._last = time.monotonic()
        self._thread: threading.Thread | None = None
        self._good: list[pathlib.Path] = []
        self._best: dict[str, Any] = {"value": None, "update": None}
        self._held: Chosen | None = None
        """Where the run began, in memory, until there is a checkpoint."""

    @property
    def off(self) -> bool:
        return self.every == "off"

    # -- resuming -----------------------------------------------------------

    def begin(self, run: Run) -> Position | None:
        """Puts the newest valid checkpoint back into the run: where it goes on, or None for its beginning.

        To be called on all workers.

        Raises:
          UserError: there is none to be used, though there should be.
        """
        self._updates, self._seconds = schedule.interval(
            "checkpoint.every", self.every, run.per_epoch, run.batch, math.inf
        )
        chosen = None
        if run.distribution.is_chief and self._resume != "never":
            choose = resume.Choice(self.folder, run.identity(), self._experiment, self._changed, self.say)
            chosen = choose.newest(self._resume == "require")
        position = self._restore(run, chosen)
        if position is None:
            return None
        self.resumed_from = position.update
        if chosen:
            self._good = files.found(self.folder)[::-1]
            self.say(f"resuming after update {position.update} from {chosen.path}")
        self._last = time.monotonic()
        return position

    def _restore(self, run: Run, chosen: resume.Chosen | None) -> Position | None:
        model = run.model
        told = run.distribution.peers.gather("the checkpoint to resume from", chosen.state if chosen else None)[0]
        if told is None:
            return None
        optimizer = keras_internals.inner_optimizer(model.optimizer)
        rate = keras_internals.rate_setting(optimizer)
        rate = rate if isinstance(rate, keras.Variable) else None
        rate_here = None if rate is None else float(rate.numpy())
        training_state.restore(model, run.distribution, run.callbacks, chosen.tensors if chosen else {})
        if told["replicas"] != run.distribution.replicas:
            training_state.separate_streams(model, run.distribution)
        callback_state.restore(run.callbacks, told["callbacks"])
        model.history.history = {name: [_value(v) for v in values] for name, values in told["history"].items()}
        model.history.epoch = list(told["epochs"])
        self._best = told["best"]
        position = Position(**told["position"])
        position.logs = {name: _value(v) for name, v in position.logs.items()}
        if any(told["run"].get(name, value) != value for name, value in run.identity().items()):
            position.update = position.epoch * (run.per_epoch or 0)
            _set(optimizer.iterations, position.update)
        if rate is not None and resume.differences(self._experiment, told["experiment"]):
            _set(rate, rate_here)
        return position

    def back(self, run: Run, bad: int) -> Position:
        """Puts the newest checkpoint with finite weights from before update `bad` back, after training has gone wrong.

        Raises:
          TrainingError: there is none.
        """
        self.wait()
        paths = files.found(self.folder) if run.distribution.is_chief else []
        choose = resume.Choice(self.folder, run.identity(), self._experiment, False, self.say)
        while True:
            chosen = None
            while paths and chosen is None:
                path = paths.pop(0)
                if files.update_of(path) <= bad:
                    chosen = choose.load(path)
            position = self._restore(run, chosen)
            if position is None:
                raise TrainingError(
                    f"the loss is no longer finite after update {bad}, and no checkpoint from before can be used: "
                    "set train.on_nonfinite=stop, lower the learning rate, or save more often"
                )
            if all(np.isfinite(np.asarray(w, np.float64)).all() for w in run.model.get_weights()):
                return position

    def hold(self, run: Run, position: Position) -> None:
        """Keeps the state in memory for `oom_note`, until the first checkpoint is on the disk."""
        tensors = training_state.capture(run.model, run.distribution, run.callbacks)
        self._held = Chosen(self.folder, copy.deepcopy(self._content(run, position)), tensors)

    def again(self, run: Run) -> Position:
        """Puts the newest checkpoint of this run back, or its beginning; in one process.

        Raises:
          TrainingError: there is none that can be read.
        """
        self.wait()
        choose = resume.Choice(self.folder, run.identity(), self._experiment, False, self.say)
        chosen = next(filter(None, (choose.load(path) for path in reversed(self._good))), None)
        if chosen is None and self._held is not None:
            tensors = {name: np.asarray(tensor) for name, tensor in self._held.tensors.items()}
            chosen = Chosen(self.folder, copy.deepcopy(self._held.state), tensors)
        position = self._restore(run, chosen)
        if position is None:
            raise TrainingError(f"no checkpoint in {self.folder} can be used to go back to: start the run again")
        return position

    # -- saving -------------------------------------------------------------

    def limit(self, done: int) -> float:
        """How many more updates there are to the next checkpoint that is due by count."""
        return math.inf if self._updates == math.inf else self._updates - done % self._updates

    def due(self, done: int) -> bool:
        """Whether a checkpoint is due by count; the same on all workers."""
        return self._updates != math.inf and done % self._updates == 0

    def late(self) -> bool:
        """Whether one is due by the clock of this worker; the chief's counts."""
        return time.monotonic() - self._last >= self._seconds

    def improved(self, logs: Mapping[str, Any], done: int) -> bool:
        """Whether the epoch that has ended is the best so far; the same on all workers."""
        if not self._best_name:
            return False
        if self._best_name.startswith("val_") and not any(name.startswith("val_") for name in logs):
            return False  # no validation after this epoch
        if self._best_name not in logs:
            raise UserError(
                f"checkpoint.best={self._best_name} is not measured: choose one of {', '.join(sorted(logs))}"
            )
        value = float(logs[self._best_name])
        before = self._best["value"]
        if not math.isfinite(value) or (before is not None and self._best_sign * value <= self._best_sign * before):
            return False
        self._best = {"value": value, "update": done}
        return True

    def save(self, run: Run, position: Position, wait: bool = False) -> None:
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
        content = self._content(run, position)
        self._thread = threading.Thread(
            target=self._write, args=(position.update, content, tensors), name="tfdist checkpoint"
        )
        self._thread.start()
        self.writing += time.perf_counter() - captured
        if wait or not self._asynchronous:
            self.wait()
        if not wait:
            self.paused += time.perf_counter() - start

    def _content(self, run: Run, position: Position) -> dict[str, Any]:
        return {
            "position": dataclasses.asdict(position) | {"logs": {k: _plain(v) for k, v in position.logs.items()}},
            "run": run.identity(),
            "replicas": run.distribution.replicas,
            "strategy": run.distribution.name,
            "experiment": self._experiment,
            "callbacks": callback_state.capture(run.callbacks),
            "history": {k: [_plain(v) for v in values] for k, values in run.model.history.history.items()},
            "epochs": list(run.model.history.epoch),
            "best": dict(self._best),
        }

    def finish(self) -> None:
        """Waits for the last one, and says what they have cost."""
        self.wait()
        if self.saved:
            self.say(
                f"{self.saved} checkpoint{'s' * (self.saved > 1)} in {self.folder}: training waited "
                f"{self.paused:.2f} s of the {self.writing:.2f} s that writing took"
            )

    def _write(self, done: int, content: dict, tensors: dict[str, Any]) -> None:
        start = time.perf_counter()
        missing = not self.folder.parent.exists()
        try:
            path = files.write(self.folder, done, content, lambda prefix: training_state.write(prefix, tensors))
        except Exception as error:  # TensorFlow's differ by version, and a callback's state may be anything
            why = " ".join(str(getattr(error, "message", None) or error).split())[:200]
            kept = f"the one of update {files.update_of(self._good[-1])} is kept" if self._good else "there is none"
            self.failure = f"the checkpoint after update {done} could not be written ({why})"
            self.say(f"WARNING: {self.failure}: training goes on, {kept}; free or repair {self.folder}")
            return
        finally:
            self.writing += time.perf_counter() - start
        if missing and self.saved:
            self.say(f"WARNING: {self.folder.parent} had gone and was made anew")
        self.failure, self.saved, self._held = "", self.saved + 1, None
        self._good.append(path)
        newest = self._good[-self._keep :]
        best = [p for p in self._good if files.update_of(p) == self._best["update"]]
        self._good = [p for p in self._good if p in newest or p in best[-1:]]
        files.prune(self.folder, set(self._good))

    def wait(self) -> None:
        """Until the one that is being written is on the disk, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _set(variable: Any, value: Any) -> None:
    for one in getattr(variable.value, "values", (variable.value,)):
        one.assign(tf.cast(value, one.dtype))


def _plain(value: Any) -> Any:
    """For JSON; metrics by class are arrays."""
    return {"array": np.asarray(value).tolist()} if np.ndim(value) else float(value)


def _value(stored: Any) -> Any:
    return np.asarray(stored["array"]) if isinstance(stored, dict) else stored
