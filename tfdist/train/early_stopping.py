"""Early stopping for the command: patience counted in evaluations, the best weights at the end."""

from __future__ import annotations

from collections.abc import Iterable

import keras

from tfdist.config import schedule
from tfdist.errors import UserError
from tfdist.trainer.callbacks import Callback


def check_measured(field: str, metric: str, model: keras.Model) -> None:
    """Checks before the first epoch that a metric is one that there is going to be.

    Args:
      field: that of the experiment which asks for it.
      model: whose metrics are built.

    Raises:
      UserError: it is not.
    """
    known = {m.name for one in model.metrics for m in getattr(one, "metrics", [one])}
    name = metric.removeprefix("val_")
    # Of several outputs, each metric has the name of its output before its own.
    if name not in known and not any(name.endswith(f"_{k}") for k in known):
        raise _unknown(field, metric, {prefix + k for k in known for prefix in ("", "val_")})


def _unknown(field: str, metric: str, known: Iterable[str]) -> UserError:
    return UserError(f"{field}={metric} is not measured: choose one of {', '.join(sorted(known))}")


class Measured(Callback):
    """Checks before the first epoch that the metrics are measured which fields of the experiment name.

    Args:
      metrics: by field.
    """

    takes_many_updates = True

    def __init__(self, metrics: dict[str, str]):
        super().__init__()
        self._metrics = metrics

    def on_train_begin(self, logs=None):
        for field, metric in self._metrics.items():
            check_measured(field, metric, self.model)


class Patience(Callback, keras.callbacks.EarlyStopping):
    """Ends the training when a metric has stopped improving, and puts the weights of its best evaluation back.

    Args:
      monitor: metric such as `val_loss`; `min` or `max` before it says which is better where the name does not.
      patience: evaluations in a row without an improvement after which it ends.
    """

    takes_many_updates = True

    def __init__(self, monitor: str, patience: int):
        name, sign = schedule.better(monitor, "train.monitor")
        mode = "max" if sign > 0 else "min"
        super().__init__(monitor=name, patience=patience, mode=mode, restore_best_weights=True)

    def get_monitor_value(self, logs):
        """Returns the metric, or None after an epoch without an evaluation."""
        logs = logs or {}
        if self.monitor.startswith("val_") and not any(name.startswith("val_") for name in logs):
            return None
        if self.monitor not in logs:
            raise _unknown("train.monitor", self.monitor, logs)
        return float(logs[self.monitor])

    @property
    def reason(self) -> str:
        """Says why training has ended, or with which weights; nothing if it came to its end with the last ones."""
        if self.best_weights is None:
            return ""
        best = f"the weights are those of epoch {self.best_epoch + 1}"
        if self.stopped_epoch:
            times = f"{self.patience} evaluation{'s' * (self.patience > 1)}"
            return f"early stopping: {self.monitor} has not improved for {times}; {best}"
        return f"{best}, the best by {self.monitor}" if self.best_epoch != self.model.history.epoch[-1] else ""
