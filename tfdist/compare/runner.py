"""A comparison of strategies, from its first run to its verdict. TensorFlow only where weights are read."""

import dataclasses
import json
import os
import pathlib
import platform
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import psutil
from rich.console import Console

from tfdist import config
from tfdist.checkpoints import run_folder
from tfdist.cluster.env_vars import HOLD
from tfdist.compare import presentation, results, trial
from tfdist.compare.results import Row
from tfdist.config.messages import logger
from tfdist.errors import TrainingError, UserError
from tfdist.verification import weight_distance

RECORD = "compare.json"
_LOOK_S = 0.3  # at what other programs do


class Comparison:
    """A comparison under way, and its record in `compare.json`.

    `train_flags`: gives flags of `tfdist.train` for the experiment, with some of its fields changed.
    """

    def __init__(
        self,
        settings: trial.Settings,
        experiment: config.Experiment,
        train_flags: Callable[[dict[str, str]], list[str]],
        folder: run_folder.RunFolder,
    ):
        self._settings, self._experiment, self._folder = settings, experiment, folder
        self._train_flags = train_flags
        self._console = Console(highlight=False, emoji=False)
        self._cores = None if settings.machine.gpus else settings.machine.cores
        self._rows: list[Row] = []
        trials = trial.plan(settings, folder.path, train_flags({}))
        exact = experiment.train.virtual_replicas > 0
        # With other threads the bits are others.
        self._trials = [t for t in trials if not exact or t.threads == settings.threads]

    def commands(self) -> str:
        """Returns what would be started, for `--dry_run`."""
        why = lambda t: f" cannot run here: {t.unavailable}" if t.unavailable else ""
        return "\n".join(f"# {t.name}{why(t)}\n{t.shell()}" for t in self._trials)

    def run(self) -> int:
        """Runs everything and shows what came out; returns the exit code."""
        names = "; ".join(t.name for t in self._trials)
        logger.info(f"comparing {self._experiment.name} on {self._settings.machine.describe()}: {names}")
        self._save("running", [])  # or, killed now, the folder would be no comparison's
        try:
            for number, t in enumerate(self._trials, 1):
                self._rows.append(self._measure(t, f"{number} of {len(self._trials)}"))
                self._save("running", [])
                first = self._rows[0]
                if first.status == "unavailable":
                    raise UserError(f"the experiment does not run on one device: {first.reason}")
                if first.status == "failed":
                    log = f"{first.folder}/{trial.LOG}"
                    raise TrainingError(f"the reference, {first.name}, has failed: {first.reason} (log: {log})")
            self._rows = [results.rated(row, self._rows[0], self._cores) for row in self._rows]
            self._compare_weights()
        except BaseException as error:
            self._save("failed" if isinstance(error, Exception) else "interrupted", [])
            if not isinstance(error, Exception):
                done = ", ".join(row.name for row in self._rows if row.status == "completed")
                logger.info(f"stopped; finished: {done}" if done else "stopped; nothing was finished")
            raise
        lines = results.verdict(self._rows)
        self._save("completed", lines)
        self._show(lines)
        return results.exit_code(self._rows)

    def _measure(self, t: trial.Trial, place: str) -> Row:
        row = Row(t.name, t.strategy, t.replicas, t.threads, t.shell(), str(t.folder), "unavailable", t.unavailable)
        if t.unavailable:
            logger.info(f"{t.name} ({place}) cannot run here: {t.unavailable}")
            return row
        logger.info(f"{t.name} ({place}) ...")
        # While no run of ours is under way.
        busy = round(psutil.cpu_percent(_LOOK_S) / 100 * (psutil.cpu_count() or 1), 2)
        outcome = trial.run(t, self._settings.time_limit)
        seconds, status = round(outcome.seconds, 3), outcome.status
        row = dataclasses.replace(row, status=status, reason=outcome.reason, seconds=seconds, others_busy=busy)
        if outcome.status == "completed":
            figures = results.measured(_read(t.folder / "result.json"), _read(t.folder / "environment.json"))
            row = dataclasses.replace(row, **figures)
            logger.info(f"{t.name}: {row.examples_per_second or 0:,.0f} examples/s, {outcome.seconds:.0f} s in all")
        else:
            logger.info(f"{t.name}: {outcome.reason}")
        return row

    def _compare_weights(self) -> None:
        e = self._experiment
        exact = e.train.virtual_replicas > 0
        tolerance = 0.0 if exact else weight_distance.tolerance(e.train.precision, e.optimizer.reduce_dtype)
        limit = results.EVALUATION * tolerance
        reference = self._rows[0] = dataclasses.replace(self._rows[0], weights="reference")
        for i, row in enumerate(self._rows[1:], 1):
            if row.status != "completed":
                continue
            try:
                difference = weight_distance.difference(pathlib.Path(reference.folder), pathlib.Path(row.folder))
            except ValueError as error:
                self._rows[i] = dataclasses.replace(row, status="failed", reason=f"no weights to compare: {error}")
                continue
            row = results.judged(row, reference, difference, tolerance)
            agree = difference.distance <= tolerance and not results.other_loss(row.loss, reference.loss, limit)
            self._rows[i] = row if exact or agree else self._checked(i, row)

    def _checked(self, i: int, row: Row) -> Row:
        """Finds out whether weights that differ come from a wrong sum, or from what may differ.

        That is rounding which has grown, or layers that depend on the number of replicas: these are held still.
        """
        result = _read(pathlib.Path(self._rows[0].folder) / "result.json")
        warms_up = bool(re.search("[1-9]", self._experiment.optimizer.warmup))
        fields = weight_distance.check_flags(result["updates"], warms_up)
        updates, folder = int(fields["config.train.steps"]), self._folder.path / "check"
        given = self._train_flags(fields)
        for t in (self._trials[0], self._trials[i]):
            alike = dataclasses.replace(self._settings, threads=t.threads)
            again = trial.make(alike, t.strategy, t.replicas, folder, given, t.name)
            again = dataclasses.replace(again, environ={**again.environ, HOLD: "1"})
            if (again.folder / "result.json").exists():  # the reference, for another row
                continue
            logger.info(f"{row.name} differs: {t.name} once more, {updates} updates in float64 ...")
            outcome = trial.run(again, self._settings.time_limit)
            if outcome.status != "completed":
                return dataclasses.replace(row, why=f"{row.why}; the check in float64 failed: {outcome.reason}")
        first = folder / self._trials[0].folder.name
        try:
            difference = weight_distance.difference(first, again.folder)
        except ValueError as error:
            return dataclasses.replace(row, why=f"{row.why}; no check in float64: {error}")
        ours, theirs = (results.measured(_read(f / "result.json"), {})["loss"] for f in (again.folder, first))
        most = weight_distance.CHECK_TOLERANCE
        return results.checked(row, difference, most, updates, results.other_loss(ours, theirs, most))

    def _show(self, verdict: Sequence[str]) -> None:
        s, machine = self._settings, self._settings.machine.describe()
        each = "TensorFlow's own number of threads" if s.threads is None else f"--threads={s.threads}"
        about = f"On {machine}, with {each} for each replica and --jit={s.jit}; one run each."
        title = f"{self._experiment.name} on {machine}"
        self._console.print()
        presentation.show(self._console, self._rows, about, verdict)
        text = presentation.markdown(title, self._rows, about, verdict)
        try:
            (self._folder.path / "compare.md").write_text(text, encoding="utf-8")
            presentation.draw(self._folder.path / "compare.png", title, self._rows, about)
        except OSError as error:
            what = f"{self._folder.path} cannot be written ({error.strerror})"
            raise TrainingError(f"{what}: free or repair that disk") from None
        logger.info(f"results are in {self._folder.path}{os.sep}: {RECORD}, compare.md, compare.png")

    def _save(self, status: str, verdict: Sequence[str]) -> None:
        record = {
            "status": status,
            "experiment": config.flat(self._experiment),
            "settings": dataclasses.asdict(self._settings),
            "environment": {"host": platform.node(), "python": platform.python_version(), "argv": sys.argv[1:]},
            "rows": [dataclasses.asdict(row) for row in self._rows],
            "verdict": list(verdict),
        }
        if self._rows and self._rows[0].status == "completed":
            record["environment"] |= _read(pathlib.Path(self._rows[0].folder) / "result.json").get("versions", {})
        self._folder.write(RECORD, record)


def _read(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_bytes())
