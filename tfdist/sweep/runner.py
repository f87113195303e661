"""A sweep under way: the trials of an Optuna study, each a run in a process of its own. No TensorFlow."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import math
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import optuna
from optuna import distributions, samplers, storages
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from tfdist import config
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.compare import trial
from tfdist.config import schedule
from tfdist.config.messages import logger
from tfdist.errors import TrainingError, UserError, shown
from tfdist.monitoring.report import run_files
from tfdist.sweep import results, space
from tfdist.sweep.results import SweepRow
from tfdist.sweep.space import Combination

RECORD, TABLE, PAGE, JOURNAL = "sweep.json", "sweep.md", "sweep.html", "study.journal"
_LOOK_S = 0.5
"""How often the main thread looks up, so that signals are heard."""
_STATUS = {TrialState.COMPLETE: "completed", TrialState.FAIL: "failed"}
"""The status of a row by the state of its trial, where the words differ."""


@dataclasses.dataclass(frozen=True, slots=True)
class DevicePlace:
    """Devices for one run at a time, which no other place has; where there are none, all of them."""

    gpus: tuple[str, ...] = ()
    """Entries for CUDA_VISIBLE_DEVICES."""
    cores: tuple[int, ...] = ()

    def environ(self) -> dict[str, str]:
        """Returns the variables of a run in this place."""
        visible = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        return visible if self.gpus else {}


def places(parallel: int, gpus: Sequence[str], cores: Sequence[int]) -> list[DevicePlace]:
    """Divides the GPUs, or where there are none the cores, evenly among so many runs.

    Raises:
      UserError: there are fewer of them than runs.
    """
    if parallel == 1:
        return [DevicePlace()]
    there, word = (gpus, "GPUs") if gpus else (cores, "cores")
    each = len(there) // parallel
    if not each:
        raise UserError(f"--parallel={parallel} runs need devices of their own, found {len(there)} {word}: use fewer")
    parts = [slice(i * each, (i + 1) * each) for i in range(parallel)]
    return [DevicePlace(tuple(gpus[part]), () if gpus else tuple(cores[part])) for part in parts]


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """The settings of a study."""

    space: space.Space
    base: config.Experiment
    metric: str = ""
    """By which runs are compared, as asked for; the study takes the loss where nothing is."""
    trials: int = 0
    """Their number; 0 for the grid."""
    sampler: str = "tpe"
    prune: bool = False

    @property
    def aim(self) -> schedule.Aim:
        """Returns what the study optimizes and prunes by."""
        return schedule.better(self.metric or "loss", "--metric")

    def study(self, storage: storages.BaseStorage | None = None) -> optuna.Study:
        """Opens the study of this search space, or creates it."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        fields = "; ".join(f"{name}={values}" for name, values in self.space.items())
        return optuna.create_study(
            storage=storage,
            study_name=f"{'search' if self.trials else 'grid'} by {self.aim} over {fields}",
            direction="maximize" if self.aim.better > 0 else "minimize",
            load_if_exists=True,
        )

    def ask(self, study: optuna.Study, number: int) -> tuple[optuna.Trial, Combination]:
        """Starts the next trial; what is sampled depends on this number, and on the results that TPE knows."""
        study.sampler = (samplers.TPESampler if self.sampler == "tpe" else samplers.RandomSampler)(seed=number)
        asked = study.ask({name: _distribution(values) for name, values in self.space.items()})
        made: dict[str, Any] = {name: asked.params[name] for name in self.space}
        for name, values in self.space.items():
            if isinstance(values, space.Range) and isinstance(values.low, float):  # short enough for a folder's name
                made[name] = min(max(float(f"{made[name]:.6g}"), values.low), values.high)
        return asked, Combination(made)

    def preview(self) -> list[Combination]:
        """Returns the grid, or what is sampled first; later values of TPE depend on the results."""
        if not self.trials:
            return space.grid(self.space)
        study = self.study()
        return [self.ask(study, i)[1] for i in range(self.trials if self.sampler == "random" else min(self.trials, 10))]


def _distribution(values: Sequence[Any] | space.Range) -> distributions.BaseDistribution:
    if not isinstance(values, space.Range):
        return distributions.CategoricalDistribution(values)
    kind = distributions.FloatDistribution if isinstance(values.low, float) else distributions.IntDistribution
    return kind(values.low, values.high, log=values.log)


class _SweepStopped(Exception):  # noqa: N818  what ends the wait for a run, and no error
    """The sweep has been interrupted."""


class Sweep:
    """Runs the trials of a study, which processes may share; the study and `sweep.json` say how far it is.

    Args:
      title: what to call it.
      command: returns the run of a combination.
      path: the folder of the sweep.
      where: a place for each run that is under way at a time.
    """

    def __init__(
        self,
        title: str,
        search: Search,
        command: Callable[[Combination], trial.Trial],
        path: pathlib.Path,
        where: Sequence[DevicePlace],
    ):
        self._title, self._search, self._command, self._where = title, search, command, where
        self._path, self._folder, self._stop = path, RunFolder(str(path)), threading.Event()
        self._ended: dict[int, SweepRow] = {}

    def run(self) -> int:
        """Runs what is not finished and shows the results; returns the exit code.

        Raises:
          UserError: the folder holds something else or cannot be written, or a run does not measure the metric.
          TrainingError: the folder cannot be written any more.
        """
        self._folder.could_be_created()
        strange = sorted(os.listdir(self._path)) if self._path.is_dir() else []
        if strange and not {RECORD, JOURNAL}.intersection(strange):
            raise UserError(f"--workdir={self._path} holds no sweep but {strange[0]}: choose another folder")
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            with open(self._path / JOURNAL, "ab") as shared:
                self._begin(shared)
                try:
                    self._run()
                except BaseException:
                    self._save("interrupted")
                    logger.info("stopped; the same command goes on from there")
                    raise
                return self._show()
        except OSError as error:
            raise TrainingError(
                f"{self._path} cannot be written ({error.strerror}): free or repair that disk"
            ) from None

    def _begin(self, shared: IO[bytes]) -> None:
        """Opens the study, and queues what is new, what has failed, and what processes that are gone had begun."""
        with self._locked():
            alone = True
            try:
                fcntl.flock(shared, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                alone = False
            journal = JournalFileBackend(str(self._path / JOURNAL))
            try:
                self._study = self._search.study(storages.JournalStorage(journal))
            except (ValueError, KeyError, AssertionError):  # Optuna asserts that it can read what it has added
                damaged = self._path / JOURNAL
                raise UserError(f"{damaged} is damaged: remove it, and no finished run is repeated") from None
            rows = self._latest()
            known = [Combination(t.user_attrs["values"]) for t in rows.values()]
            new = [] if self._search.trials else [c for c in space.grid(self._search.space) if c.folder not in rows]
            done = sum(map(self._finished, [*known, *new]))
            for combination, t in zip(known, rows.values()):
                if alone and t.state == TrialState.RUNNING:
                    self._again(t.number, combination)
                elif t.state == TrialState.FAIL:
                    self._queue(combination)
            for combination in new:
                self._queue(combination)
            fcntl.flock(shared, fcntl.LOCK_SH)  # for as long as this process lives
            self._save("running")
        finished = f", {done} of them finished before" if done else ""
        logger.info(f"{self._title}: {self._search.trials or len(self._latest())} runs{finished}")

    def _run(self) -> None:
        with concurrent.futures.ThreadPoolExecutor(len(self._where)) as pool:
            open_ = {pool.submit(self._work, place) for place in self._where}
            try:
                while open_:  # no wait without an end: a signal is only heard between two
                    closed, open_ = concurrent.futures.wait(open_, _LOOK_S, concurrent.futures.FIRST_COMPLETED)
                    for future in closed:
                        future.result()
            finally:
                self._stop.set()

    def _work(self, place: DevicePlace) -> None:
        """Makes one run after the other, in a thread of its own."""
        if place.cores:
            os.sched_setaffinity(0, place.cores)  # of this thread, and so of what it starts
        while not self._stop.is_set() and (claimed := self._claim()):
            self._one(*claimed, place)

    def _claim(self) -> tuple[optuna.Trial, Combination] | None:
        """Takes a trial that nobody else has; None if there is none left."""
        with self._locked():
            while True:
                trials = self._study.get_trials(deepcopy=False)
                running = [t.user_attrs.get("values") for t in trials if t.state == TrialState.RUNNING]
                # One without values was another's twin, see below. One that failed and was queued again counts once.
                begun = sum(t.state != TrialState.FAIL or "values" not in t.user_attrs for t in trials)
                if begun >= self._search.trials and all(t.state != TrialState.WAITING for t in trials):
                    return None
                asked, combination = self._search.ask(self._study, begun)
                if combination.values not in running:
                    asked.set_user_attr("values", combination.values)
                    self._save("running")
                    return asked, combination
                self._study.tell(asked, state=TrialState.FAIL)  # its folder is in use, and its result will be the same

    def _one(self, asked: optuna.Trial, combination: Combination, place: DevicePlace) -> None:
        """Makes one run, unless it is finished, and tells the study what came out."""
        t = dataclasses.replace(self._command(combination), environ=place.environ())
        state, outcome, reported = TrialState.COMPLETE, dict[str, Any](), set[int]()

        def tick(seconds: float) -> None:
            if self._stop.is_set():
                raise _SweepStopped
            outcome["seconds"] = round(seconds, 3)
            if self._search.prune and (news := self._report(asked, combination, reported)) and asked.should_prune():
                raise optuna.TrialPruned(news)

        try:
            if not self._finished(combination):
                logger.info(f"{combination.name} ...")
                ended = trial.run(t, float("inf"), tick)
                if ended.code != 0:
                    state = TrialState.FAIL
                    outcome |= {"status": "refused" if ended.refused else "failed", "reason": ended.reason}
        except optuna.TrialPruned as pruned:
            state, outcome = TrialState.PRUNED, outcome | {"status": "pruned", "reason": str(pruned)}
        except BaseException:
            with self._locked():
                self._again(asked.number, combination)
            raise
        with self._locked():
            self._report(asked, combination, reported)
            row = self._row(combination, state, outcome)
            worst = -self._search.aim.better * math.inf
            value = row.evaluation.get(self._search.aim.metric, worst) if state == TrialState.COMPLETE else None
            asked.set_user_attr("outcome", outcome)
            self._study.tell(asked, value, state)
            self._save("running")
        if outcome:
            measured = ", ".join(f"{name} {number:.4f}" for name, number in row.evaluation.items())
            what = measured if state == TrialState.COMPLETE else f"{row.status}: {row.reason}"
            logger.info(f"{row.name}: {what} ({outcome['seconds']:.0f} s; log: {t.folder}/{trial.LOG})")
        results.metric_of([row], self._search.metric)

    def _report(self, asked: optuna.Trial, combination: Combination, reported: set[int]) -> str:
        """Reports what a run has measured after epochs that are not reported yet; returns the last of it in words."""
        name, news = f"val_{self._search.aim.metric}", ""
        for line in run_files.lines(self._path / combination.folder / "history.jsonl"):
            epoch, value = run_files.number(line.get("epoch")), run_files.number(line.get(name))
            if epoch is not None and value is not None and epoch not in reported:
                reported.add(int(epoch))
                asked.report(value, int(epoch))
                news = f"{name} {value:.4f} after epoch {int(epoch)}"
        return news

    def _finished(self, combination: Combination) -> bool:
        """Tells whether the folder of a run holds one that has come to its end.

        Raises:
          UserError: it holds a run of another experiment.
        """
        run = RunFolder(str(self._path / combination.folder), writes=False)
        earlier = run.earlier()
        if earlier is None:
            return False
        there, here = config.flat(earlier), config.flat(combination.experiment(self._search.base))
        automatic = {"config.train.batch_size"} if here["config.train.batch_size"] == "0" else set()
        for name in sorted(there.keys() & here.keys() - automatic):
            if there[name] != here[name]:
                raise UserError(
                    f"{run.path} holds a run with --{name}={there[name]}, and this sweep has {here[name]}: "
                    "choose another --workdir, or remove it"
                )
        return run.completed

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lets one thread of all processes at a time take trials and write the record."""
        with open(self._path / ".study.lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _queue(self, combination: Combination) -> None:
        values = dict(combination.values)
        self._study.enqueue_trial(values, user_attrs={"values": values})

    def _again(self, number: int, combination: Combination) -> None:
        """Leaves a run that was stopped to another process, or to the next start."""
        self._study.tell(number, state=TrialState.FAIL)
        self._queue(combination)

    def _latest(self) -> dict[str, FrozenTrial]:
        """Returns the last trial of each run, by its folder."""
        trials = [t for t in self._study.get_trials(deepcopy=False) if "values" in t.user_attrs]
        return {Combination(t.user_attrs["values"]).folder: t for t in trials}

    def _row(self, combination: Combination, state: TrialState, outcome: Mapping[str, Any]) -> SweepRow:
        folder, status = str(self._path / combination.folder), _STATUS.get(state, state.name.lower())
        row = SweepRow(combination.name, combination.values, folder, self._command(combination).shell(), status)
        return results.completed(row) if state == TrialState.COMPLETE else dataclasses.replace(row, **outcome)

    def _rows(self) -> list[SweepRow]:
        rows = []
        for t in self._latest().values():
            row = self._ended.get(t.number) or self._row(
                Combination(t.user_attrs["values"]), t.state, t.user_attrs.get("outcome", {})
            )
            if t.state.is_finished():
                self._ended[t.number] = row
            rows.append(row)
        return rows

    def _save(self, status: str) -> None:
        rows = [dataclasses.asdict(row) for row in self._rows()]
        self._folder.write(RECORD, {"status": status, "title": self._title, "rows": rows})

    def _show(self) -> int:
        with self._locked():
            rows = self._rows()
            elsewhere = sum(row.status in ("waiting", "running") for row in rows)
            self._save("running" if elsewhere else "completed")
            aim = results.metric_of(rows, self._search.metric)
            best = next(iter(results.ranked(rows, aim)), None)
            closing = results.closing(rows, aim, best)
            self._folder.write_text(TABLE, results.markdown(self._title, rows, best, closing))
            self._folder.write_text(PAGE, results.render_page(self._title, self._path, rows, aim))
        columns = Table(box=None, pad_edge=False)
        for name in results.head(rows):
            columns.add_column(name, justify="left" if name in (*self._search.space, "status") else "right")
        for cells in results.cells(rows, best):
            columns.add_row(*map(shown, cells))
        console = Console(highlight=False, emoji=False, markup=False)
        console.print()
        console.print(columns)
        for line in closing:
            console.print(shown(line))
        if elsewhere:
            logger.info(f"{elsewhere} runs go on in other processes; the same command takes what they leave")
        logger.info(f"results are in {self._path}{os.sep}: {PAGE}, {TABLE}, {RECORD}")
        return int(any(row.status in ("failed", "refused") for row in rows))
