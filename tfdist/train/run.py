"""A run on one worker, once everything is prepared: from the first update to the results in its folder."""

from __future__ import annotations

import contextlib
import dataclasses
import os

from tfdist import config
from tfdist.checkpoints import integrity, oom_note, own_work, resume, training_run
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.cluster.peers import Peers
from tfdist.config import field_syntax
from tfdist.config import schedule as schedule_lib
from tfdist.config.messages import logger
from tfdist.config.runtime_options import Environment
from tfdist.data import spec_file
from tfdist.distributed import arithmetic
from tfdist.distributed.connect import Placement
from tfdist.distributed.distribution import Distribution
from tfdist.errors import Interrupted, PeerError, TrainingError, shown
from tfdist.keras_bridge import layer_statistics, own_steps
from tfdist.models import optimizers
from tfdist.monitoring import error_analysis, flops, monitors, run_environment
from tfdist.monitoring import recorder as recorder_lib
from tfdist.monitoring.confusion import Findings
from tfdist.monitoring.progress import numbers
from tfdist.monitoring.recorder import Result
from tfdist.monitoring.report import page
from tfdist.monitoring.segments import Segments
from tfdist.step import step_calls
from tfdist.train import ahead_of_time, dry_run, early_stopping, slurm_requeue
from tfdist.train.early_stopping import Patience
from tfdist.train.preparation import Preparation
from tfdist.trainer import evaluation, fit
from tfdist.trainer.worker_session import Signals


def write_result(folder: RunFolder, result: Result, mistakes: Findings | None, silent: bool = False) -> None:
    """Writes the report, and last of all `result.json`.

    Args:
      mistakes: what a classifier gets wrong, for the report.
      silent: whether to keep from a person what is wrong with the report.

    Raises:
      TrainingError: the disk has no room even for the result alone, or the bucket cannot be written.
    """
    content = integrity.sealed(dataclasses.asdict(result))
    problem = page.write(folder, content, mistakes)
    if problem and not silent:
        logger.info(problem)
    try:
        folder.write(integrity.RESULT, content)
    except TrainingError:  # the report may have taken the last of the disk, and this matters more
        with contextlib.suppress(TrainingError):  # read-only by now, say
            folder.remove(page.NAME)
        folder.write(integrity.RESULT, content)
    folder.push(patient=not silent)


def check_same_weights(peers: Peers, weights_sha256: str) -> None:
    """Looks for the last time whether every worker has ended with the same weights.

    Raises:
      TrainingError: one has not; the message names it.
    """
    checksums = peers.gather("the weights at the end", weights_sha256)
    different = [f"{rank} ({peers.hosts[rank]})" for rank, sha256 in enumerate(checksums) if sha256 != checksums[0]]
    if different:
        raise TrainingError(
            f"worker {', '.join(different)} has ended with other weights than worker 0: do not use them, "
            "and look for a callback that changes weights on some workers only"
        )


def result_lines(result: Result, folder: RunFolder) -> str:
    """Returns what to tell a person at the end, in two or three lines; names the files that are really there."""
    done = f"{result.status}: {result.updates} updates in {result.seconds:.1f} s"
    speed = f", {result.examples_per_second:,.0f} examples/s" if result.examples_per_second else ""
    if result.flops_per_second:
        speed += f", {flops.words(result.flops_per_second, result.flops_share)}"
    why = f" ({result.reason})" if result.reason else ""
    quality = f"\ntfdist: evaluation: {numbers(result.evaluation)}" if result.evaluation else ""
    files = [name for name in (page.NAME, "result.json", "model.keras") if (folder.path / name).exists()]
    return f"{done}{speed}{why}{quality}\ntfdist: results are in {folder.name}/: {', '.join(files)}"


class Run:
    """A prepared experiment under way on one worker.

    Args:
      prepared: the experiment with its data, schedule, model and checkpoints.
      environment: where it runs and what to show.
      placement: what was found there.
      folder: the run folder.
      distribution: the strategy, started.
    """

    def __init__(
        self,
        prepared: Preparation,
        environment: Environment,
        placement: Placement,
        folder: RunFolder,
        distribution: Distribution,
    ):
        self._prepared = prepared
        self._environment, self._placement = environment, placement
        self._folder, self._distribution = folder, distribution
        self._experiment, self._schedule = prepared.experiment, prepared.schedule
        self._model, self._data, self._checkpoints = prepared.model, prepared.data, prepared.checkpoints
        patience = self._experiment.train.patience
        self._early_stopping = [Patience(self._experiment.train.monitor, patience)] if patience else []
        self._measured = self._needed_metrics()
        self._segments = Segments(placement.cluster, os.environ)
        self._evaluation: dict[str, float] = {}
        self._weights_sha256, self._weights_norm = "", 0.0

    def rehearse(self) -> None:
        """Prints the plan for `--dry_run`.

        Raises:
          UserError: a replica does not fit on its device, or the run would be refused.
        """
        topology = self._environment.topology
        available = (
            ahead_of_time.available(topology)
            if topology
            else dry_run.available(len(self._distribution.devices), self._placement.selection.gpus)
        )
        with self._distribution.scope():
            memory = dry_run.memory(self._model, available)
        if self._measured:
            # Builds the metrics, as a training does.
            step_calls.step_of(self._model, self._distribution, self._data.train).prepare_training()
            for field, metric in self._measured.items():
                early_stopping.check_measured(field, metric, self._model)
        if self._distribution.is_chief:
            if self._prepared.resumes and not self._checkpoints.off:
                self._check_resume()
            intent = resume.intent(self._folder, self._prepared.resumes)
            lines = dry_run.lines(self._experiment, self._schedule, self._model, self._data, memory, intent)
            print("\n".join(map(shown, lines)), flush=True)
        if topology:
            print("\n".join(ahead_of_time.rehearse(self._prepared, self._distribution, topology)), flush=True)

    def _needed_metrics(self) -> dict[str, str]:
        """Returns the metrics that there must be, by the field that names them."""
        experiment, fields = self._experiment, {}
        if experiment.train.patience:
            fields["train.monitor"] = schedule_lib.better(experiment.train.monitor).metric
        # Callbacks and steps of one's own may add numbers to the logs.
        own = experiment.train.callbacks or own_steps.replaced(self._model, own_steps.TRAINING)
        if experiment.checkpoint.best and not own:
            fields["checkpoint.best"] = schedule_lib.better(experiment.checkpoint.best).metric
        return fields

    def _check_resume(self) -> None:
        """Reads the checkpoint that the run would go on from."""
        schedule, source, identity = self._schedule, self._data.train, {}
        if source.size is not None:  # else only the feed knows its batches
            identity = training_run.identity(
                schedule.global_batch, schedule.updates_per_epoch, self._experiment.seed, source.size
            )
        choice = resume.ResumeChoice(
            self._folder.checkpoints,
            identity,
            config.flat(self._experiment),
            self._environment.resume_changed,
            self._folder.storage,
        )
        choice.newest(self._environment.resume == "require", read_only=True)

    def train(self) -> recorder_lib.Result:
        """Trains, evaluates and saves.

        Returns:
          What was also written to `result.json`.

        Raises:
          TrainingError: training failed.
        """
        self._begin_folder()
        self._begin_monitoring()
        peers = self._distribution.peers
        peers.last_words = self._write_failure
        status, reason = "completed", ""
        try:
            with peers.seeing_signals(), Signals() as signals:
                self._fit(signals)
                self._evaluate(signals)
                reason = "".join(callback.reason for callback in self._early_stopping)
        except Interrupted as stopped:
            status, reason = "preempted", str(stopped)
            layer_statistics.settle(self._model, self._distribution, self._experiment.train.virtual_replicas)
        except PeerError:
            raise
        except TrainingError:
            self._take_fingerprint()
            raise
        finally:
            self._monitors.stop()
        return self._finish(status, reason)

    def _begin_folder(self) -> None:
        """Writes what was asked for and where it runs; an earlier run that is not resumed is renamed."""
        folder = self._folder
        moved = None if self._prepared.resumes else folder.set_aside()
        if moved:
            logger.info(f"the earlier run in {folder.name} is now in {moved}")
        if self._prepared.learnt_accumulate:
            oom_note.write(folder, self._prepared.learnt_accumulate)
        own_work.write_experiment(folder, self._experiment)
        spec_file.write(folder.write_text, self._data.spec)
        where = run_environment.environment(self._distribution, self._placement, self._environment)
        folder.write("environment.json", where)
        folder.push()

    def _begin_monitoring(self) -> None:
        """Starts what records the run, and what shows it to a person."""
        distribution, precision = self._distribution, self._experiment.train.precision
        self._recorder = recorder_lib.Recorder(self._folder, self._schedule, self._segments)
        gpus = [] if distribution.device_kind == "CPU" else list(self._placement.selection.gpus)
        work = flops.Work(self._model, self._data.train, [g.name for g in gpus], distribution.workers, precision)
        self._monitors = monitors.Watching(
            self._environment,
            self._folder,
            self._recorder,
            self._schedule,
            distribution.is_chief,
            work,
        )
        self._monitors.start(self._experiment, [g.number for g in gpus], self._prepared.profiled)

    def _write_failure(self, reason: str) -> None:
        """Leaves the result of a run that another worker or an error has ended."""
        oom_note.record_advice(self._folder, reason)
        # In silence: a thread may call this, while the main thread holds the lock of the logger or of the stream.
        write_result(self._folder, self._result("failed", reason), None, silent=True)

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
            virtual_replicas=experiment.train.virtual_replicas,
            steps_per_call=experiment.train.steps_per_call or "auto",
            shuffle=experiment.data.shuffle,
            seed=experiment.seed,
            validation_data=self._data.eval,
            validation_freq=schedule.eval_every,
            validation_batch_size=experiment.eval.batch_size,
            class_weight=self._prepared.class_weights,
            callbacks=[
                *([early_stopping.Measured(self._measured)] if self._measured else []),
                self._recorder,
                *self._monitors.callbacks,
                *self._early_stopping,
                *self._prepared.callbacks,
            ],
            reduce_dtype=experiment.optimizer.reduce_dtype,
            checkpoints=None if self._checkpoints.off else self._checkpoints,
            on_nonfinite=experiment.train.on_nonfinite,
            max_rollbacks=experiment.train.max_rollbacks,
            lr_multipliers=field_syntax.layer_rates(experiment.optimizer),
            layer_decay=experiment.optimizer.layer_decay,
            evaluate_ema=experiment.optimizer.ema_momentum > 0,
            check_agreement=self._prepared.check_agreement(self._environment.check_agreement),
            should_stop=signals.reason,
            verbose=0,
        )

    def _evaluate(self, signals: Signals) -> None:
        self._evaluation = evaluation.evaluate(
            self._model,
            self._data.eval,
            distribution=self._distribution,
            batch_size=self._experiment.eval.batch_size,
            virtual_replicas=self._experiment.train.virtual_replicas,
            check_agreement="off",  # the training has asked
            verbose=0,
            should_stop=signals.reason,
        )
        self._recorder.evaluated(self._evaluation)

    def _finish(self, status: str, reason: str) -> recorder_lib.Result:
        """Saves the model, the report and the result, and tells a person of them."""
        folder, distribution = self._folder, self._distribution
        self._take_fingerprint()
        with distribution.peers.during("saving"), optimizers.portable(self._model):
            folder.save_model(self._model)
            self._checkpoints.finish()
        check_same_weights(distribution.peers, self._weights_sha256)
        if self._checkpoints.failure:
            raise TrainingError(self._checkpoints.failure)
        result = self._result(status, reason)
        mistakes = None
        if status == "completed":  # a run that is pre-empted has no time for it
            batch, shards = self._experiment.eval.batch_size, self._experiment.train.virtual_replicas
            mistakes = error_analysis.of_run(self._model, self._data.eval, self._data.spec, distribution, batch, shards)
        write_result(folder, result, mistakes)
        logger.info(result_lines(result, folder))
        if status == "preempted" and self._checkpoints.saved:
            logger.info("the same command goes on from there")
        if status == "preempted" and self._environment.requeue and distribution.is_chief:
            logger.info(slurm_requeue.again(os.environ))
        return result

    def _take_fingerprint(self) -> None:
        self._weights_sha256, self._weights_norm = recorder_lib.fingerprint(self._model)

    def _result(self, status: str, reason: str) -> recorder_lib.Result:
        """Returns the result as far as the run has come."""
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
            seconds=round(recorder.seconds, 3),
            seconds_to_first_update=recorder.first_update,
            examples_per_second=recorder.examples_per_second,
            history=recorder.history,
            evaluation=self._evaluation,
            weights_sha256=self._weights_sha256,
            weights_norm=self._weights_norm,
            files=self._folder.checksums,
            resumed_from=self._checkpoints.resumed_from,
            rollbacks=recorder.rollbacks,
            accumulate=recorder.accumulate,
            shards=self._experiment.train.virtual_replicas,
            arithmetic=arithmetic.facts(distribution),
            restarts=self._placement.cluster.attempt,
            segments=self._segments.record(recorder.updates, reason or status),
            versions=run_environment.versions(),
            time=dataclasses.asdict(recorder.spent),
            **self._monitors.totals(recorder.examples_per_second),
        )
