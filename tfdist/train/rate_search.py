"""`--find_learning_rate`: a range test. The rate grows with each update, and the loss tells which can be used.

The loss of each update is the mean over its global batch, so the test says the same under every strategy.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import keras

from tfdist.checkpoints.run_folder import RunFolder
from tfdist.config import field_syntax, local_files
from tfdist.config.messages import logger
from tfdist.distributed.distribution import Distribution
from tfdist.errors import TrainingError
from tfdist.train import rate_range
from tfdist.train.preparation import Preparation
from tfdist.train.rate_range import HIGHEST, LOWEST, UPDATES, WARM, Point, suggested
from tfdist.trainer import fit

if TYPE_CHECKING:
    from tfdist.train.rate_range import Point

_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#666666"  # Okabe and Ito's
_ABOVE = 1.3
"""Share of the loss's fall that is shown above where it began; a loss that grows would push all else to the floor."""


def _draw(path: pathlib.Path, name: str, points: Sequence[Point], suggested: float | None) -> None:
    """Writes a PNG.

    Args:
      suggested: the rate to begin with, if there is one.

    Raises:
      OSError: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    rates, means = [point.rate for point in points], [point.smoothed for point in points]
    axes.plot(rates, [point.loss for point in points], color=_GREY, alpha=0.35, linewidth=1, label="loss of the batch")
    axes.plot(rates, means, color=_BLUE, linewidth=2, label="smoothed")
    if suggested is not None:
        axes.axvline(suggested, color=_ORANGE, linewidth=1.5, linestyle="--", label=f"to begin with: {suggested:g}")
    lowest, first = min(means), max(means[: max(1, len(means) // 4)])
    room = max(abs(first - lowest), 1e-12)
    axes.set_ylim(lowest - 0.1 * room, lowest + (1 + _ABOVE) * room)
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    axes.set_title(f"{name}: {len(points)} updates with a growing learning rate", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    try:
        with local_files.replacing(path) as temporary:
            figure.savefig(temporary, format="png")
    finally:
        pyplot.close(figure)


TABLE, PICTURE = "learning_rates.csv", "learning_rates.png"


class _Growing(keras.callbacks.TerminateOnNaN):
    """Collects the loss of each update, and ends the test when it has grown beyond all use.

    A loss that is not finite is no error: that is what Keras' class stands for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Looks at one update, which is what counts as an epoch here."""
        self.losses.append(float((logs or {})["loss"]))
        if not math.isfinite(self.losses[-1]) or rate_range.diverged(rate_range.smoothed(self.losses)):
            self.model.stop_training = True


def run(prepared: Preparation, check_agreement: str, folder: RunFolder, distribution: Distribution) -> None:
    """Makes the test and leaves a table and a picture of it in the run folder, and nothing else.

    Args:
      prepared: the experiment, its optimizer made for `plan`.
      check_agreement: see `--check_agreement`.
      folder: the run folder.
      distribution: the strategy, started.

    Raises:
      TrainingError: the very first losses are not finite, or the folder cannot be written.
    """
    experiment, watch = prepared.experiment, _Growing()
    logger.info(f"a test of learning rates: {UPDATES} updates, from {LOWEST:g} to {HIGHEST:g}")
    fit.fit(
        prepared.model,
        prepared.data.train,
        distribution=distribution,
        batch_size=experiment.train.batch_size,
        epochs=UPDATES,
        steps_per_epoch=1,
        steps_per_call=1,
        accumulate=experiment.train.accumulate,
        virtual_replicas=experiment.train.virtual_replicas,
        shuffle=experiment.data.shuffle,
        seed=experiment.seed,
        class_weight=prepared.class_weights,
        callbacks=[watch],
        reduce_dtype=experiment.optimizer.reduce_dtype,
        lr_multipliers=field_syntax.layer_rates(experiment.optimizer),
        layer_decay=experiment.optimizer.layer_decay,
        check_agreement=prepared.check_agreement(check_agreement),
        verbose=0,
    )
    found = rate_range.points(watch.losses)
    if len(found) <= WARM:
        raise TrainingError(
            f"the loss is not finite after {len(found)} updates at rates below {LOWEST:g}, so no rate is at fault: "
            "look at data and model"
        )
    if folder.writes:
        _write(folder, found, experiment.name)
        tell(found, folder)


def _write(folder: RunFolder, found: Sequence[Point], name: str) -> None:

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["update", "learning_rate", "loss", "smoothed"])
    writer.writerows(dataclasses.astuple(point) for point in found)
    folder.write_text(TABLE, text.getvalue())
    try:
        _draw(folder.path / PICTURE, name, found, suggested(found))
    except OSError as error:
        raise TrainingError(f"{folder.path} cannot be written ({error.strerror}): free or repair that disk") from None
    folder.push()


def tell(found: Sequence[Point], folder: RunFolder) -> None:
    """Says what comes of it."""
    judged = found[WARM:]
    lowest, last = min(judged, key=lambda point: point.smoothed), found[-1]
    rate = suggested(found)
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
