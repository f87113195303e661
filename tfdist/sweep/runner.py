"""A sweep under way: the trials of an Optuna study, each a run in a process of its own. No TensorFlow."""

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
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from tfdist import config
from tfdist.checkpoints import integrity, resume
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.cluster.peers import differing_facts
from tfdist.compare import trial
from tfdist.config import schedule
from tfdist.config.messages import logger
from tfdist.config.user_functions import CODE, SETUP
from tfdist.errors import TrainingError, UserError, shown
from tfdist.monitoring.report import run_files
from tfdist.sweep import results, space
from tfdist.sweep.space import Values

RECORD, TABLE, PAGE, JOURNAL = "sweep.json", "sweep.md", "sweep.html", "study.journal"
_BATCH = "config.train.batch_size"
Place = tuple[Mapping[str, str], Sequence[int]]
"""Environment variables and cores of one run at a time; no cores: all of them."""


def places(parallel: int, gpus: Sequence[str], cores: Sequence[int]) -> list[Place]:
    """Divides the GPUs, or where there are none the cores, evenly among so many runs."""
    if parallel == 1:
        return [({}, ())]
    each = len(gpus or cores) // parallel
    if not each:
        there = f"{len(gpus)} GPUs" if gpus else f"{len(cores)} cores"
        raise UserError(f"--parallel={parallel} runs need devices of their own, found {there}", "use fewer")
    parts = [slice(i * each, (i + 1) * each) for i in range(parallel)]
    if not gpus:
        return [({}, cores[part]) for part in parts]
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return [({**order, "CUDA_VISIBLE_DEVICES": ",".join(gpus[part])}, ()) for part in parts]


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    space: space.Space
    base: config.Experiment
    metric: str = ""  # as asked for; the study takes the loss where none is
    trials: int = 0  # 0 for the grid
    sampler: str = "tpe"
    prune: bool = False
    aim = property(lambda self: schedule.better(self.metric or "loss", "--metric"))
    """Returns what the study optimizes and prunes by."""

    def study(self, storage: storages.BaseStorage | None = None) -> optuna.Study:
        """Opens the study of this search space, or creates it."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        fields = "; ".join(f"{name}={choices}" for name, choices in self.space.items())
        name = f"{'search' if self.trials else 'grid'} by {self.aim} over {fields}"
        way = StudyDirection.MAXIMIZE if self.aim.better > 0 else StudyDirection.MINIMIZE
        return optuna.create_study(storage=storage, study_name=name, direction=way, load_if_exists=True)

    def ask(self, study: optuna.Study, number: int) -> tuple[optuna.Trial, Values]:
        """Starts the next trial; what is sampled depends on this number, and with TPE on the results so far."""
        study.sampler = (samplers.TPESampler if self.sampler == "tpe" else samplers.RandomSampler)(seed=number)
        asked = study.ask({name: _distribution(choices) for name, choices in self.space.items()})
        values = {name: asked.params[name] for name in self.space}
        for name, choices in self.space.items():
            if isinstance(choices, space.Range) and isinstance(choices.low, float):  # short, for the folder's name
                values[name] = min(max(float(f"{values[name]:.6g}"), choices.low), choices.high)
        return asked, values


def _distribution(choices: Sequence[Any] | space.Range) -> distributions.BaseDistribution:
    if not isinstance(choices, space.Range):
        return distributions.CategoricalDistribution(choices)
    kind = distributions.FloatDistribution if isinstance(choices.low, float) else distributions.IntDistribution
    return kind(choices.low, choices.high, log=choices.log)


@dataclasses.dataclass(slots=True)
class Sweep:
    """Runs the trials of a study, which processes may share; `command` makes the run with some values."""

    title: str
    search: Search
    command: Callable[[Values], trial.Trial]
    path: pathlib.Path
    where: Sequence[Place]  # one for each run that is under way at a time
    _stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    _study: optuna.Study = dataclasses.field(init=False)

    def run(self) -> int:
        """Runs what is not finished and shows the results; returns the exit code."""
        RunFolder(str(self.path)).could_be_created()
        strange = sorted(os.listdir(self.path)) if self.path.is_dir() else []
        if strange and not {RECORD, JOURNAL}.intersection(strange):
            raise UserError(f"--workdir={self.path} holds no sweep but {strange[0]}", "choose another folder")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with open(self.path / JOURNAL, "ab") as shared:
                self._begin(shared)
                try:
                    with concurrent.futures.ThreadPoolExecutor(len(self.where)) as pool:
                        threads = [pool.submit(self._work, *place) for place in self.where]
                        try:
                            for thread in concurrent.futures.as_completed(threads):
                                thread.result()
                        finally:
                            self._stop.set()
                except BaseException:
                    self._save("interrupted")
                    logger.info("stopped; the same command goes on from there")
                    raise
                return self._show()
        except OSError as error:
            raise TrainingError(f"{self.path} cannot be written ({error.strerror}): free or repair that disk") from None

    def _begin(self, shared: IO[bytes]) -> None:
        """Opens the study, and queues what is new, what has failed, and what processes that are gone had begun."""
        with self._locked():
            alone = False
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(shared, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            try:
                self._study = self.search.study(storages.JournalStorage(JournalFileBackend(shared.name)))
                rows = self._latest()
                runs = {folder: t.user_attrs["values"] for folder, t in rows.items()}
                runs |= {} if self.search.trials else {space.folder(v): v for v in space.grid(self.search.space)}
                finished = {folder for folder, values in runs.items() if self._finished(values)}
                for folder, values in runs.items():
                    state = rows[folder].state if folder in rows else TrialState.FAIL
                    gone = state == TrialState.COMPLETE and folder not in finished
                    pruned = state == TrialState.PRUNED and not self.search.prune
                    if state == TrialState.RUNNING and alone:
                        self._queue(values, rows[folder].number)
                    elif state == TrialState.FAIL or gone or pruned:
                        self._queue(values)
            except (ValueError, KeyError, AssertionError):  # Optuna asserts that it can read what it has added
                raise UserError(f"{shared.name} is damaged", "remove it, and no finished run is repeated") from None
            fcntl.flock(shared, fcntl.LOCK_SH)  # for as long as this process lives
            self._save("running")
        before = f", {len(finished)} of them finished before" if finished else ""
        logger.info(f"{self.title}: {self.search.trials or len(runs)} runs{before}")

    def _work(self, environ: Mapping[str, str], cores: Sequence[int]) -> None:
        """Makes one run after the other, in a thread of its own."""
        if cores:
            os.sched_setaffinity(0, cores)  # of this thread, and so of what it starts
        while not self._stop.is_set() and (claimed := self._claim()):
            self._one(*claimed, environ)

    def _claim(self) -> tuple[optuna.Trial, Values] | None:
        """Takes a trial that nobody else has; None if there is none left."""
        with self._locked():
            while True:
                trials = self._study.get_trials(deepcopy=False)
                running = [t.user_attrs.get("values") for t in trials if t.state == TrialState.RUNNING]
                # One without values was another's twin, see below. One that failed and was queued again counts once.
                begun = sum(t.state != TrialState.FAIL or "values" not in t.user_attrs for t in trials)
                if begun >= self.search.trials and all(t.state != TrialState.WAITING for t in trials):
                    return None
                asked, values = self.search.ask(self._study, begun)
                if values not in running:
                    asked.set_user_attr("values", values)
                    self._save("running")
                    return asked, values
                self._study.tell(asked, state=TrialState.FAIL)  # its folder is in use, and its result will be the same

    def _one(self, asked: optuna.Trial, values: Values, environ: Mapping[str, str]) -> None:
        """Makes one run, unless it is finished, and tells the study what came out."""
        folder, metric, reported = self.path / space.folder(values), self.search.aim.metric, set[int]()
        made = dataclasses.replace(self.command(values), environ=environ)
        state, outcome = TrialState.COMPLETE, dict[str, Any]()

        def tick(seconds: float) -> None:
            if self._stop.is_set():
                raise concurrent.futures.CancelledError
            outcome["seconds"] = round(seconds, 3)
            if self.search.prune and (news := _report(asked, folder, metric, reported)) and asked.should_prune():
                raise optuna.TrialPruned(news)

        try:
            if not self._finished(values):
                logger.info(f"{made.name} ...")
                ended = trial.run(made, math.inf, tick)
                if ended.status != "completed":
                    state, refused = TrialState.FAIL, ended.status == "unavailable"
                    outcome |= {"status": "refused" if refused else "failed", "reason": ended.reason}
        except optuna.TrialPruned as pruned:
            state, outcome = TrialState.PRUNED, outcome | {"status": "pruned", "reason": str(pruned)}
        except BaseException:  # another process makes it, or the next one
            with self._locked():
                self._queue(values, asked.number)
            raise
        value = None
        if state == TrialState.COMPLETE and (odd := self._other_data(values)):
            state, outcome = TrialState.FAIL, {"status": "refused", "reason": odd}
        if state == TrialState.COMPLETE:
            outcome = results.measured(folder)
            value = outcome["evaluation"].get(metric, -self.search.aim.better * math.inf)
        with self._locked():
            _report(asked, folder, metric, reported)
            asked.set_user_attr("outcome", outcome)
            self._study.tell(asked, value, state)
            self._save("running")
        row = self._row(values, **outcome)
        figures = ", ".join(f"{name} {figure:.4f}" for name, figure in row.evaluation.items())
        logger.info(f"{row.name}: {row.status}: {row.reason or figures} (log: {made.folder}/{trial.LOG})")
        if not row.reason:
            results.metric_of([row], self.search.metric)

    def _finished(self, values: Values) -> bool:
        """Tells whether the folder of a run holds one that has come to its end; refuses other and damaged ones."""
        run = RunFolder(str(self.path / space.folder(values)), writes=False)
        there, here = run.earlier(), config.flat(space.experiment(values, self.search.base))
        if there is None:
            return False
        there = config.flat(there)
        if here[_BATCH] == "0":  # automatic
            here[_BATCH] = there[_BATCH]
        if odd := resume.differences(here, there):
            raise UserError(f"{run.path} holds another run ({odd[0]})", "choose another --workdir, or remove it")
        if run.completed:
            integrity.check_trusted(run.path, str(run.path))  # or the result may be another run's
        return run.completed

    def _other_data(self, values: Values) -> str:
        """Tells how the data of a run differ from those of runs that finished before; empty if they do not."""
        facts = lambda name: run_files.mapping(run_files.read(self.path / name).result.get("facts"))
        about_data = lambda v: {f: v[f] for f in v if f.startswith(("data.", "train.precision"))}
        first: dict[str, tuple[str, Values]] = {}  # of the runs with the same fields of the data
        for name, t in self._latest().items():
            if t.state == TrialState.COMPLETE and t.user_attrs["values"] != values:
                first.setdefault(str(about_data(t.user_attrs["values"])), (name, t.user_attrs["values"]))
        for name, before in first.values():
            swept = {field for field in values if before[field] != values[field]}
            for fact, *_ in differing_facts(facts(name), facts(space.folder(values))):
                if _may_be_compared(fact, swept, str([(before[field], values[field]) for field in swept])):
                    return f"data or code have changed since {name} ({fact}): use another --workdir"
        return ""

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lets one thread of all processes at a time take trials and write the record."""
        with open(self.path / ".study.lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _queue(self, values: Values, stopped: int | None = None) -> None:
        """Queues a run, in place of a trial that was stopped if one was."""
        if stopped is not None:
            self._study.tell(stopped, state=TrialState.FAIL)
        self._study.enqueue_trial(values, user_attrs={"values": values})

    def _latest(self) -> dict[str, FrozenTrial]:
        """Returns the last trial of each run, by its folder."""
        trials = [t for t in self._study.get_trials(deepcopy=False) if "values" in t.user_attrs]
        return {space.folder(t.user_attrs["values"]): t for t in trials}

    def _row(self, values: Values, **outcome: Any) -> results.SweepRow:
        made = self.command(values)
        return results.SweepRow(made.name, values, str(self.path / space.folder(values)), made.shell(), **outcome)

    def _save(self, status: str) -> list[results.SweepRow]:
        rows = []
        for folder, t in self._latest().items():  # of what is completed, its own result has a checksum
            known = t.state == TrialState.COMPLETE and (self.path / folder / integrity.RESULT).exists()
            outcome = results.measured(self.path / folder) if known else t.user_attrs.get("outcome", {})
            rows.append(self._row(t.user_attrs["values"], **{"status": t.state.name.lower()} | outcome))
        content = {"status": status, "title": self.title, "rows": [dataclasses.asdict(row) for row in rows]}
        RunFolder(str(self.path)).write(RECORD, content)
        return rows

    def _show(self) -> int:
        with self._locked():
            elsewhere = sum(t.state in (TrialState.WAITING, TrialState.RUNNING) for t in self._latest().values())
            rows = self._save("running" if elsewhere else "completed")
            aim = results.metric_of(rows, self.search.metric)
            table = results.markdown(self.title, rows, aim)
            RunFolder(str(self.path)).write_text(TABLE, table)
            RunFolder(str(self.path)).write_text(PAGE, results.render_page(self.title, self.path, rows, aim))
        print("", *map(shown, table.splitlines()[2:]), sep="\n")
        if elsewhere:
            logger.info(f"{elsewhere} runs go on in other processes; the same command takes what they leave")
        logger.info(f"results are in {self.path}{os.sep}: {PAGE}, {TABLE}, {RECORD}")
        return int(any(row.status in ("failed", "refused") for row in rows))


# What follows which fields: of a loss, targets may have another form.
_FOLLOWING = {
    "model.": (resume.MODEL_FILE, SETUP),
    **dict.fromkeys(("train.loss", "train.label_smoothing", "train.metrics"), ("target", "label", SETUP)),
    "train.class_weight": ("weight",),
    "data.shuffle": ("shuffle",),
    "optimizer.layer_": ("lr_multipliers", "layer_decay"),
}


def _may_be_compared(fact: str, swept: set[str], values: str) -> bool:
    """Tells whether runs in which these fields differ, with these values, must have this fact in common."""
    if fact.startswith(CODE):
        return True
    follows = [words for start, words in _FOLLOWING.items() if any(field.startswith(start) for field in swept)]
    if any(word in fact for words in follows for word in words):
        return False
    fields = {field for field in swept - {"data.shuffle"} if field.startswith(("data.", "train.precision"))}
    fields -= {"data.train_split" if fact.endswith(" of the validation") else "data.eval_split"}
    # Of inputs alone; mixup and cutmix make rows of shares of classes.
    inputs_only = {"data.cache", "data.image_size", "data.resize", *["data.augment"] * ("mix" not in values)}
    return not fields or (fields <= inputs_only and ("target" in fact or "label" in fact))


def _report(asked: optuna.Trial, folder: pathlib.Path, metric: str, reported: set[int]) -> str:
    """Reports what a run has measured after epochs that are not reported yet; returns the last of it in words."""
    name, news = f"val_{metric}", ""
    for line in run_files.lines(folder / "history.jsonl"):
        epoch, value = run_files.number(line.get("epoch")), run_files.number(line.get(name))
        if epoch is not None and value is not None and epoch not in reported:
            reported.add(int(epoch))
            asked.report(value, int(epoch))
            news = f"{name} {value:.4f} after epoch {int(epoch)}"
    return news
