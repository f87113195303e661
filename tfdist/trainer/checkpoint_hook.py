"""When the loop takes checkpoints, and how it goes back to one."""

import contextlib
import dataclasses
import math
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.checkpoints import resume
from tfdist.checkpoints.manager import Checkpoints
from tfdist.checkpoints.resume import Position
from tfdist.checkpoints.training_run import TrainingRun
from tfdist.config.messages import logger
from tfdist.data.batch_layout import Layout
from tfdist.errors import TrainingError
from tfdist.keras_bridge import layer_state, setups
from tfdist.step.step_calls import OutOfMemory
from tfdist.trainer import callbacks as callbacks_lib
from tfdist.trainer.agreement import NOTHING_DUE, Decisions, Due

_FOREIGN: weakref.WeakKeyDictionary[keras.Model, dict[str, bool]] = weakref.WeakKeyDictionary()
"""What a step writes or draws from and no checkpoint holds, and whether a line has told it, by model.

Only the call of fit that traces a step sees that, with checkpoints or without.
"""


class CheckpointHook:
    """Called by the loop at each point where a checkpoint may be taken; does nothing with `checkpoints` None."""

    def __init__(self, checkpoints: Checkpoints | None, run: TrainingRun):
        self._checkpoints = None if checkpoints is None or checkpoints.off else checkpoints
        self._run = run
        if self._checkpoints:  # which compares callbacks as they were before `on_train_begin`
            setups.of_callbacks(run.model, run.callbacks.callbacks)
        self._saved: tuple | None = None  # place of the last one
        self._rollbacks = 0
        self._foreign = _FOREIGN.setdefault(run.model, {})

    def _place(self, position: Position) -> tuple[int, int, int, bool]:
        return position.update, position.epoch, position.begun, position.measured

    def begin(self, position: Position, saves: bool) -> Position:
        """Returns where the training begins, or resumes; `saves`: whether it needs a checkpoint of its beginning."""
        if self._checkpoints is None:
            return position
        self._run.distribution.peers.watch.on_loss = self._checkpoints.write_held
        self._tell_foreign_state()
        resumed = self._checkpoints.begin(self._run)
        if resumed is not None:
            self._saved = self._place(resumed)
            return resumed
        if self._run.distribution.workers == 1:
            self._checkpoints.hold(self._run, position)
        if saves:
            self._save(position)
        return position

    @contextlib.contextmanager
    def noting_foreign_state(self, call: Any, arguments: tuple) -> Iterator[None]:
        """Warns, after the first call with these arguments, of what it changes and a checkpoint does not hold."""
        with layer_state.noting_writes() as writes:
            yield
        foreign = layer_state.foreign(self._run.model, writes, generators=True)
        names = {write.variable.name.partition(":")[0] for write in foreign}
        if self._run.model.run_eagerly or tf.config.functions_run_eagerly():
            names |= {"Python"} if setups.runs_own(self._run.model, "train") else set()
        else:
            kinds = layer_state.kinds_of(call.get_concrete_function(*arguments).graph)
            names |= {*layer_state.drawing(kinds), *kinds & layer_state.PYTHON}
        if new := names - self._foreign.keys():
            self._foreign.update(dict.fromkeys(new, False))
            self._tell_foreign_state()

    def _tell_foreign_state(self) -> None:
        if self._checkpoints is None or not self._foreign:
            return
        self._checkpoints.cannot_hold({*self._foreign})
        if not all(self._foreign.values()):
            what = f"writes, or draws from, what no checkpoint holds ({', '.join(sorted(self._foreign))})"
            logger.info(
                f"WARNING: the training step {what}: use add_weight, generators that are attributes of the model, "
                "keras.random, and tf.numpy_function(..., stateful=False) for Python that does not draw"
            )
            self._foreign.update(dict.fromkeys(self._foreign, True))

    def limit(self, position: Position) -> float:
        """Returns how many updates there may be before the next checkpoint, or the next one to skip."""
        limit = math.inf if self._checkpoints is None else self._checkpoints.limit(position.update)
        return min([limit, *[u - position.update for u in position.skipped if u >= position.update]])

    def due(self) -> Due:
        """Returns the actions that are due by this worker's clock."""
        if self._checkpoints is None:
            return NOTHING_DUE
        several = self._run.distribution.workers > 1
        return Due(self._checkpoints.late(), several and time.monotonic() >= self._checkpoints.hold_at)

    def after_call(self, position: Position, decisions: Decisions, logs: Mapping | None = None) -> None:
        """Takes a checkpoint, if one is due by number or the chief's clock, or an epoch with these logs is the best."""
        if self._checkpoints is None:
            return
        improved = logs is not None and self._checkpoints.improved(logs, position.update)
        if improved or decisions.due.save or self._checkpoints.due(position.update):
            self._save(position)
        elif decisions.due.hold:
            self._checkpoints.hold(self._run, position)

    def end(self, position: Position) -> None:
        """Takes the last checkpoint when training ends or is interrupted, and waits until it is on the disk."""
        if self._checkpoints is None:
            return
        peers = self._run.distribution.peers
        self._checkpoints.wait()
        failed = peers.gather("the last checkpoint", bool(self._checkpoints.failure))[0]
        if failed or self._place(position) != self._saved:
            with peers.during("saving"):
                self._save(position, wait=True)
        peers.watch.on_loss = lambda: None

    def roll_back(self, error: TrainingError, update: int, position: Position, most: int) -> Position:
        """Returns to the last good checkpoint, from which the offending updates will be left out.

        The loss shows a weight that is not finite one update later than it came about: that one is left out as well.

        `error`: to raise when this was tried `most` times; `update`: the first with a loss that is not finite.
        """
        if self._checkpoints is None or self._rollbacks == most:
            raise error
        self._rollbacks += 1
        bad = sorted({*position.skipped, max(0, update - 1), update})
        good = self._checkpoints.back(self._run, max(0, update - 1))
        good.skipped = bad
        self._saved = None
        self._run.model.stop_training = False
        if self._run.distribution.is_chief:
            logger.info(
                f"WARNING: {error}; back to update {good.update}, and without updates "
                f"{', '.join(str(u + 1) for u in bad)} from there ({self._rollbacks} of {most} times)"
            )
        for callback in callbacks_lib.with_hooks(self._run.callbacks):
            callback.on_rollback(good.update, bad)
        return good

    def halve_micro_batches(self, error: OutOfMemory, layout: Layout, ordered: bool) -> tuple[Layout, Position]:
        """Returns smaller micro-batches, and the last good checkpoint, after an update for which memory was missing.

        Raises an error where that cannot be: there are no checkpoints; or other workers, whose collectives are broken
        now; or the data is not `ordered`, and its order depends on how often it has been begun.
        """
        accumulate = min(2 * layout.accumulate, layout.batch // layout.replicas)
        text = f"{error}, at {layout.max_micro_rows} example{'s' * (layout.max_micro_rows > 1)} at a time"
        if accumulate == layout.accumulate:
            raise TrainingError(f"{text}, the fewest there can be: use a smaller model or more memory") from error
        if self._checkpoints is None or self._run.distribution.workers > 1 or not ordered:
            raise OutOfMemory(f"{text}: {resume.accumulate_advice(accumulate)}") from error
        position = self._checkpoints.again(self._run)
        self._saved = None
        smaller = dataclasses.replace(layout, accumulate=accumulate)
        logger.info(
            f"WARNING: {text}: from update {position.update} on again, at {smaller.max_micro_rows} "
            f"(train.accumulate={accumulate}), with the same result"
        )
        for callback in callbacks_lib.with_hooks(self._run.callbacks):
            callback.on_accumulate(accumulate)
        return smaller, position

    def _save(self, position: Position, wait: bool = False) -> None:
        assert self._checkpoints is not None
        self._checkpoints.save(self._run, position, wait)
        self._saved = self._place(position)
        for callback in callbacks_lib.with_hooks(self._run.callbacks):
            callback.on_checkpoint(position.update)
