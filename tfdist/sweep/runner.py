"""A sweep under way: which of its runs are finished, and the others one after the other or side by side."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import queue
import threading
import urllib.parse
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from tfdist import config
from tfdist.checkpoints import integrity
from tfdist.checkpoints.files import DamagedError
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.compare import trial
from tfdist.config.messages import logger
from tfdist.config.schedule import Aim
from tfdist.errors import TrainingError, UserError, shown
from tfdist.monitoring.report import page, run_files
from tfdist.monitoring.report.html import Html, join, table, tag
from tfdist.monitoring.report.line_chart import Line, plot, value
from tfdist.sweep import results
from tfdist.sweep.grid import Combination
from tfdist.sweep.results import SweepRow

CURVES = 6
"""Runs whose curves are drawn at most; a page has so many colours."""


def render_page(title: str, path: pathlib.Path, rows: Sequence[SweepRow], aim: Aim | None) -> str:
    """Returns the page.

    Args:
      path: the folder of the sweep.
      aim: the metric by which runs are compared, if there is one.
    """
    order = results.ranked(rows, aim)
    best = order[0] if order else None
    sentences = results.closing(rows, aim, best)
    done = sum(row.status == "completed" for row in rows)
    header = join(tag("h1", title), tag("p", f"{done} of {len(rows)} runs completed.", class_="plan"))
    sections = [
        ("runs", "Runs", join(_table(path, rows, best), *(tag("p", line, class_="note") for line in sentences))),
        ("learning", "Learning", _curves(order[:CURVES], aim)),
    ]
    return page.assembled(title, header, Html(""), [s for s in sections if s[2]], path.absolute().name)


def _table(path: pathlib.Path, rows: Sequence[SweepRow], best: SweepRow | None) -> Html:
    head = results.head(rows)
    first = len(rows[0].values) if rows else 0
    cells: list[list] = [list(row) for row in results.cells(rows, best)]
    for row, texts in zip(rows, cells):
        report = pathlib.Path(row.folder, page.NAME)
        if report.is_file():
            link = urllib.parse.quote(os.path.relpath(report, path))
            texts[first] = tag("a", texts[first], href=link)
    return table(head, cells, numbers=range(first + 1, len(head)))


def _curves(rows: Sequence[SweepRow], aim: Aim | None) -> Html:
    """Draws loss and metric of the best runs over updates."""
    if aim is None:
        return Html("")
    records = [run_files.read(pathlib.Path(row.folder)) for row in rows]
    charts = []
    for name in dict.fromkeys([f"val_{aim.metric}", "loss"]):
        lines = []
        for colour, (row, record) in enumerate(zip(rows, records), 1):
            at = [(run_files.number(e.get("updates")), run_files.number(e.get(name))) for e in record.epochs]
            points = [(x, y) for x, y in at if x is not None]
            lines.append(Line(row.name, [x for x, _ in points], [y for _, y in points], colour))
        charts.append(plot(name, lines, text=value))
    return tag("div", *charts, class_="charts") if any(charts) else Html("")


RECORD, TABLE, PAGE = "sweep.json", "sweep.md", "sweep.html"
LOGS = "logs"
"""Folder of what the runs have printed."""
_LOOK_S = 0.5
"""How often the main thread looks up, so that signals are heard."""


@dataclasses.dataclass(frozen=True, slots=True)
class DevicePlace:
    """Devices for one run at a time, which no other place has."""

    gpus: tuple[str, ...] = ()
    """Entries for CUDA_VISIBLE_DEVICES."""
    cores: tuple[int, ...] = ()
    """None for all of them."""

    def environ(self) -> dict[str, str]:
        """Returns the variables of a run in this place."""
        if not self.gpus:
            return {}
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}


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
    parts = [tuple(there[i * each : (i + 1) * each]) for i in range(parallel)]
    return [DevicePlace(gpus=part) if gpus else DevicePlace(cores=part) for part in parts]  # type: ignore[arg-type]


class _SweepStopped(Exception):  # noqa: N818  what ends the wait for a run, and no error
    """The sweep has been interrupted."""


class Sweep:
    """A sweep and its record in `sweep.json`.

    Args:
      title: what to call it.
      trials: the runs, as commands.
      combinations: their experiments, in the same order.
      folder: of the sweep; made by the caller.
      metric: by which the runs are compared, as asked for.
      where: a place for each run that is under way at a time.
    """

    def __init__(
        self,
        title: str,
        trials: Sequence[trial.Trial],
        combinations: Sequence[Combination],
        folder: RunFolder,
        metric: str,
        where: Sequence[DevicePlace],
    ):
        self._title, self._trials, self._folder, self._metric = title, trials, folder, metric
        self._where: queue.SimpleQueue[DevicePlace] = queue.SimpleQueue()
        for place in where:
            self._where.put(place)
        self._parallel = len(where)
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._rows = []
        for t, c in zip(trials, combinations):
            row = SweepRow(c.name, c.values, str(folder.path / c.folder), t.shell())
            finished = _finished(pathlib.Path(row.folder), c.experiment)
            self._rows.append(results.completed(row) if finished else row)

    def run(self) -> int:
        """Runs what is not finished and shows what came out; returns the exit code."""
        waiting = [i for i, row in enumerate(self._rows) if row.status != "completed"]
        done = len(self._rows) - len(waiting)
        finished = f", {done} of them finished before" if done else ""
        logger.info(f"{self._title}: {len(self._rows)} runs{finished}")
        try:
            results.metric_of(self._rows, self._metric)
            self._save("running")
            self._run(waiting)
        except BaseException:
            self._save("interrupted")
            logger.info("stopped; the same command goes on from there")
            raise
        self._save("completed")
        self._show()
        return 0 if all(row.status == "completed" for row in self._rows) else 1

    def _run(self, waiting: Sequence[int]) -> None:
        with concurrent.futures.ThreadPoolExecutor(self._parallel) as pool:
            futures = [pool.submit(self._one, i) for i in waiting]
            try:
                open_ = set(futures)
                while open_:  # no wait without an end: a signal is only heard between two
                    closed, open_ = concurrent.futures.wait(open_, _LOOK_S, concurrent.futures.FIRST_COMPLETED)
                    for future in closed:
                        future.result()
            finally:
                self._stop.set()
                pool.shutdown(wait=True, cancel_futures=True)

    def _one(self, i: int) -> None:
        """Makes one run in a thread of its own."""
        place, t = self._where.get(), self._trials[i]
        try:
            if place.cores:
                os.sched_setaffinity(0, place.cores)  # of this thread, and so of what it starts
            self._note(i, dataclasses.replace(self._rows[i], status="running"))
            logger.info(f"{self._rows[i].name} ...")
            outcome = trial.run(dataclasses.replace(t, environ=place.environ()), float("inf"), self._tick)
        finally:
            self._where.put(place)
        row = self._rows[i]
        if outcome.code == 0:
            row = results.completed(row)
            measured = ", ".join(f"{name} {number:.4f}" for name, number in row.evaluation.items())
            logger.info(f"{row.name}: {measured} ({outcome.seconds:.0f} s)")
        else:
            status = "refused" if outcome.refused else "failed"
            row = dataclasses.replace(row, status=status, reason=outcome.reason, seconds=round(outcome.seconds, 3))
            logger.info(f"{row.name}: {status}: {outcome.reason} (log: {t.folder}/{trial.LOG})")
        self._note(i, row)
        results.metric_of([row], self._metric)

    def _tick(self, seconds: float) -> None:
        del seconds
        if self._stop.is_set():
            raise _SweepStopped

    def _note(self, i: int, row: SweepRow) -> None:
        with self._lock:
            self._rows[i] = row
            self._save("running")

    def _best(self) -> tuple[Aim | None, SweepRow | None]:
        aim = results.metric_of(self._rows, self._metric)
        order = results.ranked(self._rows, aim)
        return aim, order[0] if order else None

    def _save(self, status: str) -> None:
        self._folder.write(
            RECORD,
            {"status": status, "title": self._title, "rows": [dataclasses.asdict(row) for row in self._rows]},
        )

    def _show(self) -> None:
        aim, best = self._best()
        closing = results.closing(self._rows, aim, best)
        self._folder.write_text(TABLE, results.markdown(self._title, self._rows, best, closing))
        self._folder.write_text(PAGE, render_page(self._title, self._folder.path, self._rows, aim))
        columns = Table(box=None, pad_edge=False)
        for name in results.head(self._rows):
            columns.add_column(name, justify="left" if name in (*self._rows[0].values, "status") else "right")
        for cells in results.cells(self._rows, best):
            columns.add_row(*map(shown, cells))
        console = Console(highlight=False, emoji=False, markup=False)
        console.print()
        console.print(columns)
        for line in closing:
            console.print(shown(line))
        logger.info(f"results are in {self._folder.path}{os.sep}: {PAGE}, {TABLE}, {RECORD}")


def _finished(path: pathlib.Path, experiment: config.Experiment) -> bool:
    """Tells whether a folder holds a run of this experiment that has come to its end.

    Raises:
      UserError: it holds a run of another one.
    """
    run = RunFolder(str(path), writes=False)
    earlier = run.earlier()
    if earlier is None:
        return False
    there, here = config.flat(earlier), config.flat(experiment)
    automatic = {"config.train.batch_size"} if here["config.train.batch_size"] == "0" else set()
    for name in sorted(there.keys() & here.keys() - automatic):
        if there[name] != here[name]:
            raise UserError(
                f"{path} holds a run with --{name}={there[name]}, and this sweep has {here[name]}: "
                "choose another --workdir, or remove it"
            )
    if not run.completed:
        return False
    try:
        integrity.read_result(path)
    except DamagedError as error:
        raise UserError(f"{path} is damaged: {error}: copy it back, or remove that folder to train it again") from None
    return True


@contextlib.contextmanager
def held(path: pathlib.Path) -> Iterator[RunFolder]:
    """Holds the folder of a sweep for this process alone, and yields it.

    Raises:
      UserError: it holds something else, is in use, or cannot be written.
    """
    with contextlib.suppress(OSError):
        strange = sorted({entry.name for entry in path.iterdir()})
        if strange and not (path / RECORD).is_file():
            raise UserError(f"--workdir={path} holds no sweep but {strange[0]}: choose another folder")
    folder = RunFolder(str(path))
    folder.create()
    try:
        yield folder
    except OSError as error:
        raise TrainingError(f"{path} cannot be written ({error.strerror}): free or repair that disk") from None
    finally:
        folder.release()
