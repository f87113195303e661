"""A run on one worker, once its strategy has been started: from the data to the results in its folder."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

from tfdist import config
from tfdist.checkpoints import manager, oom_note, resume
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.config import field_syntax
from tfdist.config import schedule as schedule_lib
from tfdist.config.runtime_options import Environment
from tfdist.data import class_weights, spec_file
from tfdist.data.datasets import registry
from tfdist.distributed.connect import Site
from tfdist.distributed.distribution import Distribution
from tfdist.engine import evaluation, fit, preconditions
from tfdist.engine.worker_session import Signals
from tfdist.errors import Interrupted, PeerError, TrainingError
from tfdist.models import build as models
from tfdist.models import optimizers
from tfdist.monitoring import error_analysis, flops, monitors, run_environment
from tfdist.monitoring import recorder as recorder_lib
from tfdist.monitoring.progress import numbers
from tfdist.monitoring.report import page
from tfdist.train import batch_size_search, dry_run, slurm_requeue
from tfdist.train.early_stopping import Patience


class Run:
    """An experiment with its data, schedule, model and checkpoints, ready to train.

    Args:
      experiment: what to train; its batch and micro-batches may still change here.
      where: where to run and what to show.
      site: what was found there.
      folder: of the run.
      distribution: the strategy, started.
      batch: what this worker knows of `train.batch_size=auto`.
      say: shows a line to a person; only the chief does.

    Raises:
      UserError: experiment, data or model cannot be used.
    """

    def __init__(
        self,
        experiment: config.Experiment,
        where: Environment,
        site: Site,
        folder: RunFolder,
        distribution: Distribution,
        batch: batch_size_search.Found,
        say: Callable[[str], None],
    ):
        self._where, self._site, self._folder, self._distribution = where, site, folder, distribution
        self._say = say = say if distribution.is_chief else lambda line: None
        say(f"strategy {distribution.name}, because {distribution.reason}: {_replicas(distribution)}")
        if site.selection.gpus:
            say(f"devices: {site.selection.describe()}")
        if site.survey.problem:
            say(f"WARNING: {site.survey.problem}: python -m tfdist.doctor says more")

        experiment = batch_size_search.agreed(experiment, batch, distribution, say)
        self._experiment, self._learnt = self._as_learnt(experiment)
        experiment = self._experiment
        models.set_precision(experiment.train.precision)
        data = distribution.peers.once(lambda: registry.load(experiment, not where.dry_run, say))
        distribution.peers.check_same(registry.facts(data), "the data set")
        self._schedule = schedule_lib.make(experiment, data.examples, distribution.replicas)
        say(f"{experiment.name}: {self._schedule.describe()}")
        self._class_weights = class_weights.told(experiment.train.class_weight, data, say)
        with distribution.scope():
            self._model = models.build(experiment, data.spec, quiet=not distribution.is_chief)
            optimizer = optimizers.build(experiment, self._schedule)
            self._data = models.compiled(self._model, optimizer, experiment, data)
            optimizers.exclude(self._model, experiment.optimizer)
        self._checkpoints = self._wanted_checkpoints()
        self._profiled = schedule_lib.profiled(where.profile, self._schedule)
        self._goes_on = resume.goes_on(folder, where, site.cluster.attempt, self._checkpoints.off)

        patience = experiment.train.patience
        self._early = [Patience(experiment.train.monitor, patience)] if patience else []
        self._evaluation: dict[str, float] = {}

    def rehearse(self) -> None:
        """`--dry_run`: tells the plan, and what would be refused later."""
        with self._distribution.scope():
            memory = dry_run.memory(self._model, len(self._distribution.devices), self._site.selection.gpus)
        if self._distribution.is_chief:
            intent = resume.intent(self._folder, self._goes_on)
            lines = dry_run.lines(self._experiment, self._schedule, self._model, self._data, memory, intent)
            print("\n".join(lines), flush=True)

    def train(self) -> recorder_lib.Result:
        """Trains, evaluates and saves.

        Returns:
          What was also written to `result.json`.

        Raises:
          TrainingError: training failed.
        """
        self._begin_folder()
        self._begin_watching()
        peers = self._distribution.peers

        def last_words(why: str) -> None:
            # In silence: a thread calls this, while the main thread may hold the lock of the stream.
            oom_note.heed(self._folder, why)
            record(self._folder, self._result("failed", why), None, lambda line: None)

        peers.last_words = last_words
        self._weights = ("", 0.0)
        status, reason = "completed", ""
        try:
            with peers.seeing_signals(), Signals() as signals:
                self._fit(signals)
                self._evaluate(signals)
                reason = "".join(callback.reason for callback in self._early)
        except Interrupted as stopped:
            status, reason = "preempted", str(stopped)
            evaluation.settle(self._model, self._distribution)
        except PeerError:
            raise
        except TrainingError:
            self._weights = recorder_lib.fingerprint(self._model)
            raise
        finally:
            self._watching.stop()
        return self._finish(status, reason)

    def _as_learnt(self, experiment: config.Experiment) -> tuple[config.Experiment, int]:
        """With as many micro-batches as the attempt before has found to be needed; 0 where none did."""
        goes_on = resume.unfinished(self._folder, self._where, self._site.cluster.attempt)
        mine = oom_note.noted(self._folder) if goes_on else 1
        most = experiment.train.batch_size // self._distribution.replicas
        noted = min(self._distribution.peers.gather("micro-batches of the run before", mine)[0], most)
        if noted <= experiment.train.accumulate:
            return experiment, 0
        self._say(
            f"train.accumulate={noted} instead of {experiment.train.accumulate}: the run before ran out of memory"
        )
        train = dataclasses.replace(experiment.train, accumulate=noted)
        return dataclasses.replace(experiment, train=train), noted

    def _wanted_checkpoints(self) -> manager.Checkpoints:
        wanted = self._experiment.checkpoint
        own = preconditions.own_step(self._model)
        if own and wanted.every != "off":
            self._say(f"no checkpoints: {type(self._model).__name__} has its own {own}, which Keras' fit runs")
        return manager.Checkpoints(
            self._folder.checkpoints,
            every="off" if own else wanted.every,
            keep=wanted.keep,
            best=wanted.best,
            asynchronous=wanted.asynchronous,
            resume="auto" if self._site.cluster.attempt else self._where.resume,
            changed=self._where.resume_changed,
            experiment=config.flat(self._experiment),
            say=self._say,
        )

    def _begin_folder(self) -> None:
        folder = self._folder
        moved = None if self._goes_on else folder.set_aside()
        if moved:
            self._say(f"the earlier run in {folder.path} is now in {moved}")
        if self._learnt:
            oom_note.note(folder, self._learnt)
        folder.write("experiment.json", dataclasses.asdict(self._experiment))
        spec_file.write(folder.write_text, self._data.spec)
        folder.write("environment.json", run_environment.environment(self._distribution, self._site))

    def _begin_watching(self) -> None:
        distribution, precision = self._distribution, self._experiment.train.precision
        self._recorder = recorder_lib.Recorder(self._folder, self._schedule)
        gpus = [] if distribution.devices[0].startswith("CPU") else list(self._site.selection.gpus)
        work = flops.Work(self._model, self._data.train, [g.name for g in gpus], distribution.workers, precision)
        self._watching = monitors.Watching(
            self._where, self._folder, self._recorder, self._schedule, distribution.is_chief, work, self._say
        )
        self._watching.start(self._experiment, [g.number for g in gpus], self._profiled)

    def _fit(self, signals: Signals) -> None:
        experiment, schedule = self._experiment, self._schedule
        fit.fit(
            self._model,
            self._data.train,
            distribution=self._distribution,
            batch_size=experiment.train.batch_size,
            epochs=schedule.epochs,
            steps=schedule.updates,
            accumulate=experiment.train.accumulate,
            steps_per_call=experiment.train.steps_per_call or "auto",
            shuffle=experiment.data.shuffle,
            seed=experiment.seed,
            validation_data=self._data.eval,
            validation_freq=schedule.eval_every,
            validation_batch_size=experiment.eval.batch_size,
            class_weight=self._class_weights,
            callbacks=[self._recorder, *self._watching.callbacks, *self._early],
            reduce_dtype=experiment.optimizer.reduce_dtype,
            checkpoints=None if self._checkpoints.off else self._checkpoints,
            on_nonfinite=experiment.train.on_nonfinite,
            max_rollbacks=experiment.train.max_rollbacks,
            learning_rates=field_syntax.layer_rates(experiment.optimizer),
            layer_decay=experiment.optimizer.layer_decay,
            measure_average=experiment.optimizer.ema_momentum > 0,
            should_stop=signals.reason,
            verbose=0,
        )

    def _evaluate(self, signals: Signals) -> None:
        self._evaluation = evaluation.evaluate(
            self._model,
            self._data.eval,
            distribution=self._distribution,
            batch_size=self._experiment.eval.batch_size,
            should_stop=signals.reason,
        )
        self._recorder.evaluated(self._evaluation)

    def _finish(self, status: str, reason: str) -> recorder_lib.Result:
        """Saves the model, the report and the result, and tells of them."""
        folder, distribution, say = self._folder, self._distribution, self._say
        self._weights = recorder_lib.fingerprint(self._model)
        with distribution.peers.during("saving"), optimizers.portable(self._model):
            folder.save_model(self._model)
            self._checkpoints.finish()
        _same_everywhere(distribution.peers, self._weights[0])
        if self._checkpoints.failure:
            raise TrainingError(self._checkpoints.failure)
        done = self._result(status, reason)
        found = None
        if status == "completed":  # who is pre-empted has no time
            found = error_analysis.of_run(
                self._model, self._data.eval, self._data.spec, distribution, self._experiment.eval.batch_size, say
            )
        record(folder, done, found, say)
        say(_summary(done, folder.path))
        if status == "preempted" and self._checkpoints.saved:
            say("the same command goes on from there")
        if status == "preempted" and self._where.requeue and distribution.is_chief:
            say(slurm_requeue.again(os.environ))
        return done

    def _result(self, status: str, reason: str) -> recorder_lib.Result:
        """As far as the run has come."""
        recorder, distribution = self._recorder, self._distribution
        return recorder_lib.Result(
            status=status,
            reason=reason,
            strategy=distribution.name,
            replicas=distribution.replicas,
            workers=distribution.workers,
            global_batch=self._schedule.global_batch,
            updates=recorder.updates,
            epochs=recorder.epochs,
            examples_seen=recorder.examples_seen,
            seconds=round(time.time() - recorder.begun, 3),
            seconds_to_first_update=recorder.first_update,
            examples_per_second=recorder.examples_per_second,
            history=recorder.history,
            evaluation=self._evaluation,
            weights_sha256=self._weights[0],
            weights_norm=self._weights[1],
            resumed_from=self._checkpoints.resumed_from,
            rollbacks=recorder.rollbacks,
            accumulate=recorder.accumulate,
            restarts=self._site.cluster.attempt,
            versions=run_environment.versions(),
            time=dataclasses.asdict(recorder.spent),
            **self._watching.totals(recorder.examples_per_second),
        )


def record(folder: RunFolder, done: recorder_lib.Result, found: Any, say: Callable[[str], None]) -> None:
    """The report, and last of all the result."""
    content = dataclasses.asdict(done)
    page.write(folder, content, found, say)
    try:
        folder.write("result.json", content)
    except TrainingError:  # the report may have taken the last of the disk, and this matters more
        folder.remove(page.NAME)
        folder.write("result.json", content)


def _same_everywhere(peers: Any, weights_sha256: str) -> None:
    """The last look: every worker has ended with the same weights."""
    ends = peers.gather("the weights at the end", weights_sha256)
    different = [f"{rank} ({peers.hosts[rank]})" for rank, sha256 in enumerate(ends) if sha256 != ends[0]]
    if different:
        raise TrainingError(
            f"worker {', '.join(different)} has ended with other weights than worker 0: do not use them, "
            "and look for a callback that changes weights on some workers only"
        )


def _replicas(distribution: Distribution) -> str:
    count = distribution.replicas
    xla = {"off": "", "on": ", compiled by XLA", "auto": ", compiled by XLA where it can"}[distribution.jit]
    return f"{count} replica{'s' * (count > 1)} on {', '.join(distribution.devices)}{xla}"


def _summary(result: recorder_lib.Result, path: Any) -> str:
    done = f"{result.status}: {result.updates} updates in {result.seconds:.1f} s"
    speed = f", {result.examples_per_second:,.0f} examples/s" if result.examples_per_second else ""
    if result.flops_per_second:
        speed += f", {flops.words(result.flops_per_second, result.flops_share)}"
    why = f" ({result.reason})" if result.reason else ""
    quality = f"\ntfdist: evaluation: {numbers(result.evaluation)}" if result.evaluation else ""
    return f"{done}{speed}{why}{quality}\ntfdist: results are in {path}{os.sep}: report.html, result.json, model.keras"
