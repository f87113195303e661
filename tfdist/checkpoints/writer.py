"""The thread that writes checkpoints, and which of them stay on the disk."""

from __future__ import annotations

import pathlib
import re
import threading
import time

from tfdist.checkpoints import files, training_state
from tfdist.checkpoints.resume import LoadedCheckpoint
from tfdist.checkpoints.storage import DISK, Disk
from tfdist.config.buckets import BucketError
from tfdist.config.messages import logger
from tfdist.data.structures import Structure
from tfdist.errors import one_line, printable


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time, beside the training; on the chief only.

    Args:
      folder: where they are.
      keep: how many of the newest stay, besides the best.
      storage: what stands behind the folder.
    """

    def __init__(self, folder: pathlib.Path, keep: int, storage: Disk = DISK):
        self._folder, self._keep, self._storage = folder, keep, storage
        self._thread: threading.Thread | None = None
        self.kept: list[pathlib.Path] = []
        """Those of this run that are on the disk, the oldest first."""
        self.in_memory: LoadedCheckpoint | None = None
        """A state of this run from after the newest that is on the disk, if any is held."""
        self.failure = ""
        """Why the last one could not be written, or nothing."""
        self.unwritten: set[int] = set()
        """Updates whose checkpoints could not be written, since the last one that was."""
        self._told = ""
        """The reason that a warning has given for it."""
        self.saved = 0
        """How many have been written."""
        self.seconds = 0.0
        """How long taking and writing them took in all."""

    def start(self, update: int, state: dict, tensors: dict[str, Structure], best: int | None) -> None:
        """Begins to write a checkpoint; `wait` for the one before must come first.

        Args:
          update: updates made so far.
          state: what `state.json` will hold.
          tensors: of `training_state.capture`.
          best: the update whose checkpoint stays though newer ones come, or None.
        """
        arguments = (update, state, tensors, best)
        self._thread = threading.Thread(target=self._write, args=arguments, name="tfdist checkpoint")
        self._thread.start()

    def write_held(self) -> None:
        """Begins to write what is in memory, after the one that is being written; from any thread."""
        held, before = self.in_memory, self._thread
        if held is None:
            return
        state, tensors = held.state, held.tensors

        def write() -> None:
            if before is not None:
                before.join()
            update = state["position"]["update"]
            if self._write(update, state, tensors, state["best"]["update"]):
                logger.info(f"the state after update {update} was in memory and is saved, since a worker is lost")

        # Else it would be a daemon, as the thread that calls this may be, and nobody would wait for it.
        self._thread = threading.Thread(target=write, name="tfdist checkpoint", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Returns when the one that is being written is on the disk, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, update: int, state: dict, tensors: dict[str, Structure], best: int | None) -> bool:
        """Writes a checkpoint; returns whether it is on the disk."""
        start = time.perf_counter()
        missing = not self._folder.parent.exists()
        try:
            write = lambda prefix: training_state.write(prefix, tensors)
            path = files.write(self._folder, update, state, write, self._storage.publish)
        except Exception as error:  # TensorFlow's differ by version, and a callback's state may be anything
            self._fail(update, _reason(error, self._folder), _repair(error, self._folder))
            return False
        finally:
            self.seconds += time.perf_counter() - start
        if missing and self.saved:
            logger.info(f"WARNING: {self._folder.parent} had gone and was made anew")
        if len(self.unwritten) > 1:
            logger.info(f"checkpoints are written again; {len(self.unwritten)} before update {update} were not")
        self.unwritten, self._told = set(), ""
        self.failure, self.saved = "", self.saved + 1
        if self.in_memory and self.in_memory.state["position"]["update"] <= update:
            self.in_memory = None
        self.kept.append(path)
        newest = self.kept[-self._keep :]
        best_ones = [kept for kept in self.kept if files.update_of(kept) == best]
        self.kept = [kept for kept in self.kept if kept in newest or kept in best_ones[-1:]]
        files.prune(self._folder, set(self.kept))
        self._storage.prune({kept.name for kept in self.kept})
        return True

    def _fail(self, update: int, why: str, repair: str) -> None:
        """Notes that a checkpoint could not be written, and says so once for each reason."""
        kept = f"the one of update {files.update_of(self.kept[-1])} is kept" if self.kept else "there is none"
        self.failure = f"the checkpoint after update {update} could not be written ({why})"
        self.unwritten.add(update)
        if why != self._told:
            self._told = why
            logger.info(f"WARNING: {self.failure}: training goes on, {kept}; {repair}")


def _repair(error: Exception, folder: pathlib.Path) -> str:
    """Returns what to do about it."""
    return f"look at {error.place}" if isinstance(error, BucketError) else f"free or repair {folder}"


def _reason(error: Exception, folder: pathlib.Path) -> str:
    """Returns why a file could not be written, without the names that TensorFlow gives to its nodes and files."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = one_line(getattr(error, "message", None) or error)
    text = re.sub(r"\{\{.*?\}\}|\[Op:.*", "", text)  # {{function_node ...}} and [Op:SaveV2] name: ...
    text = re.sub(re.escape(str(folder)) + r"\S*", "", text)  # each checkpoint has another path
    return printable(text.strip(" ;:,") or type(error).__name__, 120)
