"""Early stopping: patience counted in evaluations, the best weights at the end."""

from collections.abc import Iterable, Mapping

import keras

from tfdist import config
from tfdist.config import schedule
from tfdist.errors import UserError
from tfdist.keras_bridge import preconditions
from tfdist.trainer.callbacks import Callback


def monitored(experiment: config.Experiment, model: keras.Model) -> dict[str, str]:
    """Returns the metrics that must be measured, by the field of the experiment that names them."""
    fields = {}
    if experiment.train.patience:
        fields["train.monitor"] = schedule.better(experiment.train.monitor).metric
    # The user's callbacks and steps may add numbers to the logs.
    own = experiment.train.callbacks or preconditions.replaced(model, preconditions.TRAINING)
    if experiment.checkpoint.best and not own:
        fields["checkpoint.best"] = schedule.better(experiment.checkpoint.best).metric
    return fields


def check_measured(metrics: Mapping[str, str], model: keras.Model) -> None:
    """Raises UserError if one of the metrics by field will not be measured by a model whose metrics are built."""
    names = {m.name for one in model.metrics for m in getattr(one, "metrics", [one])}
    for field, metric in metrics.items():
        name = metric.removeprefix("val_")
        # With several outputs, each metric's name has the name of its output as a prefix.
        if name not in names and not any(name.endswith(f"_{k}") for k in names):
            raise _not_measured(field, metric, {prefix + k for k in names for prefix in ("", "val_")})


def _not_measured(field: str, metric: str, names: Iterable[str]) -> UserError:
    return UserError(f"{field}={metric} is not measured", f"choose one of {', '.join(sorted(names))}")


class Measured(Callback):
    """Checks `monitored` metrics before the first epoch."""

    takes_many_updates = True

    def __init__(self, metrics: dict[str, str]):
        super().__init__()
        self._metrics = metrics

    def on_train_begin(self, logs=None):
        check_measured(self._metrics, self.model)


class Patience(Callback, keras.callbacks.EarlyStopping):
    """Ends the training after `patience` evaluations in a row without a better metric, and restores the best weights.

    `min` or `max` before the metric says which is better where its name does not.
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
            raise _not_measured("train.monitor", self.monitor, logs)
        return float(logs[self.monitor])

    @property
    def reason(self) -> str:
        """Returns why training has ended, or with which weights; empty if it completed with the last ones."""
        if self.best_weights is None:
            return ""
        best = f"the weights are those of epoch {self.best_epoch + 1}"
        if self.stopped_epoch:
            times = f"{self.patience} evaluation{'s' * (self.patience > 1)}"
            return f"early stopping: {self.monitor} has not improved for {times}; {best}"
        return f"{best}, the best by {self.monitor}" if self.best_epoch != self.model.history.epoch[-1] else ""
