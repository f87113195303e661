"""The run folder: what a run leaves behind, and the measurements that go into it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import time
from typing import Any

import keras
import numpy as np
import psutil

from tfdist.errors import UserError
from tfdist.plan import Plan


@dataclasses.dataclass(slots=True)
class Result:
    """What `result.json` holds; the names are a contract."""

    status: str
    """`completed`, `preempted` or `failed`."""
    reason: str
    strategy: str
    replicas: int
    workers: int
    global_batch: int
    updates: int
    epochs: int
    examples_seen: int
    seconds: float
    seconds_to_first_update: float | None
    """From the start of the process."""
    examples_per_second: float | None
    """Steady state: compilation and validation excluded."""
    history: dict[str, list]
    evaluation: dict[str, float]
    weights_sha256: str
    """Over the weights in order, as little-endian float32 bytes."""
    weights_norm: float
    """Sum of squares in float64."""
    resumed_from: int | None
    versions: dict[str, str]


class RunFolder:
    """Creates and writes a `--workdir`. Every file appears whole or not at all."""

    def __init__(self, path: str):
        self.path = pathlib.Path(path)

    def create(self) -> pathlib.Path | None:
        """Makes the folder; one that holds an earlier result is set aside first, never written over.

        Returns:
          Where the earlier run went, or None.

        Raises:
          UserError: the folder cannot be made or written.
        """
        moved = None
        try:
            if (self.path / "result.json").exists():
                moved = next(p for i in range(1, 1_000_000) if not (p := self.path.with_name(f"{self.path.name}.{i}")).exists())
                self.path.rename(moved)
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise UserError(
                f"--workdir={self.path} cannot be written ({error.strerror}): choose another folder"
            ) from None
        return moved

    def write(self, name: str, content: dict) -> None:
        """Writes one JSON file, durably."""
        self._replace(name, (json.dumps(_strict(content), indent=2) + "\n").encode())

    def append(self, name: str, line: dict) -> None:
        """Adds one line of JSON to a file."""
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(_strict(line)) + "\n")

    def save_model(self, model: keras.Model) -> None:
        """Writes `model.keras`. Keras writes in place, so a kill would leave half a file: it gets another name first."""
        temporary = self.path / f".model-{os.getpid()}.keras"
        try:
            model.save(temporary)
            _sync(temporary)
            os.replace(temporary, self.path / "model.keras")
        finally:
            temporary.unlink(missing_ok=True)

    def _replace(self, name: str, content: bytes) -> None:
        temporary = self.path / f".{name}.{os.getpid()}"
        temporary.write_bytes(content)
        _sync(temporary)
        os.replace(temporary, self.path / name)


def _sync(path: pathlib.Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _strict(value: Any) -> Any:
    """JSON has no NaN or Infinity; readers other than Python's refuse them."""
    if isinstance(value, dict):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    if isinstance(value, np.ndarray):
        return _strict(value.tolist())
    if isinstance(value, (float, np.floating)):
        return float(value) if np.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value


class Recorder(keras.callbacks.Callback):
    """Measures a run and writes `history.jsonl`."""

    takes_many_updates = True

    def __init__(self, folder: RunFolder, plan: Plan):
        super().__init__()
        self._folder = folder
        self._plan = plan
        self._process_start = psutil.Process().create_time()
        self.begun = time.time()
        self.first_update: float | None = None
        """Seconds from the start of the process to the end of the first update."""
        self.updates = 0
        self.epochs = 0
        self.history: dict[str, list] = {}
        self._rates: list[tuple[int, float]] = []
        self._in_epoch = 0
        self._epoch_start = 0.0
        self._first_call: tuple[int, float] | None = None

    def on_epoch_begin(self, epoch, logs=None):
        self._in_epoch, self._first_call = 0, None
        self._epoch_start = self._last = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self._last = time.perf_counter()
        if self.first_update is None:
            self.first_update = time.time() - self._process_start
        self.updates += batch + 1 - self._in_epoch
        self._in_epoch = batch + 1
        if self._first_call is None:
            self._first_call = (batch + 1, self._last)

    def on_epoch_end(self, epoch, logs=None):
        logs = dict(logs or {})
        self.epochs = epoch + 1
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
        examples, seconds = self._examples(0, self._in_epoch), self._last - self._epoch_start
        if epoch == 0 and self._first_call:  # what came before was compiled on the way
            updates, at = self._first_call
            examples, seconds = self._examples(updates, self._in_epoch), self._last - at
        self._rates.append((examples, seconds))
        rate = examples / seconds if seconds > 0 and examples else None
        line = {"epoch": self.epochs, "updates": self.updates, "seconds": round(time.time() - self.begun, 3)}
        self._folder.append("history.jsonl", line | {"examples_per_second": rate} | logs)

    def evaluated(self, values: dict[str, float]) -> None:
        """Notes an evaluation outside of an epoch."""
        self._folder.append("history.jsonl", {"evaluation": values, "updates": self.updates})

    @property
    def examples_seen(self) -> int:
        epochs, rest = divmod(self.updates, self._plan.updates_per_epoch)
        return epochs * self._plan.examples + self._examples(0, rest)

    @property
    def examples_per_second(self) -> float | None:
        """Over all epochs but the first, in which things are compiled, unless it is the only one."""
        rates = self._rates[1:] or self._rates
        seconds = sum(s for _, s in rates)
        return sum(n for n, _ in rates) / seconds if seconds > 0 else None

    def _examples(self, first: int, last: int) -> int:
        batch = self._plan.global_batch
        return min(last * batch, self._plan.examples) - min(first * batch, self._plan.examples)


def fingerprint(model: keras.Model) -> tuple[str, float]:
    """`weights_sha256` and `weights_norm` of a model."""
    digest, norm = hashlib.sha256(), 0.0
    for weight in model.get_weights():
        array = np.asarray(weight)
        digest.update(np.ascontiguousarray(array, "<f4").tobytes())
        norm += float(np.square(array.astype(np.float64)).sum())
    return digest.hexdigest(), norm
