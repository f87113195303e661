"""`--find_learning_rate`: a range test. The rate grows with each update, and the loss shows which rates are usable.

L. N. Smith, *Cyclical Learning Rates for Training Neural Networks*, 2017, https://arxiv.org/abs/1506.01186,
section 3.3. The loss of each update is the mean over its global batch, so the result is the same under every strategy.
"""

import csv
import dataclasses
import io
import math
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import keras

from tfdist.checkpoints.run_folder import RunFolder
from tfdist.config import local_files
from tfdist.config.messages import logger
from tfdist.config.schedule import Decay, Plan
from tfdist.distributed.distribution import Distribution
from tfdist.errors import TrainingError
from tfdist.trainer import fit

if TYPE_CHECKING:
    from tfdist.train.preparation import Preparation

LOWEST, HIGHEST = 1e-6, 10.0
UPDATES = 200
TABLE, PICTURE = "learning_rates.csv", "learning_rates.png"
WARM = 10  # first updates, whose losses are ignored
SAFE = 10.0  # the suggested rate is that of the lowest loss divided by this
_KEEPS = 0.9  # weight of the previous mean in the smoothed loss
_DIVERGED = 4.0  # the test ends when the smoothed loss is this multiple of the lowest
_BLUE, _ORANGE, _GRAY = "#0072B2", "#D55E00", "#666666"  # Okabe and Ito's
_ABOVE = 1.3  # share of the fall that is shown above the first value; growing losses push all to the floor


class Point(NamedTuple):
    """One update of the test."""

    update: int  # from 1 on
    rate: float
    loss: float  # of its batch, before the update
    smoothed: float


def plan(schedule: Plan) -> Plan:
    """Returns the plan of the test in place of that of the run: rates from `LOWEST` to `HIGHEST`, by one factor."""
    decay = Decay("exponential", factor=HIGHEST / LOWEST, every=UPDATES - 1)
    epochs = -(-UPDATES // schedule.updates_per_epoch)
    rates = {"warmup": 0, "decay": decay, "base_rate": LOWEST, "rate": LOWEST}
    return dataclasses.replace(schedule, updates=UPDATES, epochs=epochs, **rates)  # type: ignore[arg-type]


def run(prepared: "Preparation", check_agreement: str, folder: RunFolder, distribution: Distribution) -> None:
    """Runs the test, whose optimizer was made for `plan`; writes a table and a picture to the folder, nothing else."""
    losses = _Losses()
    logger.info(f"a test of learning rates: {UPDATES} updates, from {LOWEST:g} to {HIGHEST:g}")
    fit.fit(
        prepared.model,
        prepared.data.train,
        distribution=distribution,
        epochs=UPDATES,
        steps_per_epoch=1,
        steps_per_call=1,
        callbacks=[losses],
        **prepared.fit_options(check_agreement),
    )
    results = points(losses.losses)
    if len(results) <= WARM:
        raise TrainingError(
            f"the loss is not finite after {len(results)} updates at rates below {LOWEST:g}, so no rate is at fault: "
            "look at data and model"
        )
    if not folder.writes:
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["update", "learning_rate", "loss", "smoothed"])
    writer.writerows(results)
    folder.write_text(TABLE, text.getvalue())
    try:
        _draw(folder.path / PICTURE, prepared.experiment.name, results)
    except OSError as error:
        raise TrainingError(f"{folder.path} cannot be written ({error.strerror}): free or repair that disk") from None
    folder.push()
    log_result(results, folder)


class _Losses(keras.callbacks.TerminateOnNaN):
    """Collects the loss of each update and ends the test when it diverges; NaN is no error under Keras' class."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Records one update, which counts as an epoch here."""
        self.losses.append(float((logs or {})["loss"]))
        if not math.isfinite(self.losses[-1]) or diverged(smoothed(self.losses)):
            self.model.stop_training = True


def diverged(means: Sequence[float]) -> bool:
    """Tells whether the last of these smoothed losses is far above the lowest."""
    lowest = min(means[WARM:], default=math.inf)
    return means[-1] - lowest > (_DIVERGED - 1) * abs(lowest)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Returns the moving averages of losses, corrected for their start at zero."""
    means, mean = [], 0.0
    for i, loss in enumerate(losses, 1):
        mean = _KEEPS * mean + (1 - _KEEPS) * loss
        means.append(mean / (1 - _KEEPS**i))
    return means


def points(losses: Sequence[float]) -> list[Point]:
    """Returns the updates of the test before the first loss that is not finite."""
    finite = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    step = (HIGHEST / LOWEST) ** (1 / (UPDATES - 1))
    rows = zip(losses[:finite], smoothed(losses[:finite]))
    return [Point(i + 1, LOWEST * step**i, loss, mean) for i, (loss, mean) in enumerate(rows)]


def suggested(results: Sequence[Point]) -> float | None:
    """Returns a learning rate with two digits; None where the loss has not fallen."""
    judged = results[WARM:]
    if not judged:
        return None
    lowest = min(judged, key=lambda point: point.smoothed)
    if judged[0].smoothed - lowest.smoothed < 0.02 * abs(judged[0].smoothed):
        return None
    return float(f"{lowest.rate / SAFE:.1e}")


def _draw(path: pathlib.Path, name: str, results: Sequence[Point]) -> None:
    """Writes a PNG; raises OSError if it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    rates, means = [point.rate for point in results], [point.smoothed for point in results]
    axes.plot(rates, [point.loss for point in results], color=_GRAY, alpha=0.35, linewidth=1, label="loss of the batch")
    axes.plot(rates, means, color=_BLUE, linewidth=2, label="smoothed")
    rate = suggested(results)
    if rate is not None:
        axes.axvline(rate, color=_ORANGE, linewidth=1.5, linestyle="--", label=f"to begin with: {rate:g}")
    lowest, first = min(means), max(means[: max(1, len(means) // 4)])
    room = max(abs(first - lowest), 1e-12)
    axes.set_ylim(lowest - 0.1 * room, lowest + (1 + _ABOVE) * room)
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    axes.set_title(f"{name}: {len(results)} updates with a growing learning rate", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    try:
        with local_files.replacing(path) as temporary:
            figure.savefig(temporary, format="png")
    finally:
        pyplot.close(figure)


def log_result(results: Sequence[Point], folder: RunFolder) -> None:
    """Logs the suggested rate."""
    judged = results[WARM:]
    lowest, last = min(judged, key=lambda point: point.smoothed), results[-1]
    rate = suggested(results)
    if rate is None:
        logger.info(f"the loss has not fallen at any rate up to {last.rate:.2g}: look at data, model and train.loss")
    else:
        grows = f", and grows from there until {last.rate:.2g}" if last.smoothed > 2 * abs(lowest.smoothed) else ""
        logger.info(
            f"the loss falls from {judged[0].smoothed:.4g} to {lowest.smoothed:.4g}, at a rate of "
            f"{lowest.rate:.2g}{grows}"
        )
        logger.info(f"a tenth of that is a rate to begin with: --config.optimizer.learning_rate={rate:g}")
    logger.info(f"results are in {folder.name}/: {TABLE}, {PICTURE}")
