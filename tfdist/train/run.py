"""The story of a run on one worker, once everything is prepared: from the first update to the results."""

import contextlib
import dataclasses
import os
import subprocess

from tfdist.checkpoints import integrity, own_work, resume
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.config import field_syntax
from tfdist.config.messages import logger
from tfdist.config.runtime_options import Environment
from tfdist.data import spec_file
from tfdist.distributed.connect import Placement
from tfdist.distributed.distribution import Distribution
from tfdist.errors import Interrupted, PeerError, TrainingError
from tfdist.keras_bridge import layer_state
from tfdist.models import optimizers
from tfdist.monitoring import flops, monitors
from tfdist.monitoring import recorder as recorder_lib
from tfdist.monitoring.progress import numbers
from tfdist.monitoring.recorder import Recorder, Result, Segments, fingerprint
from tfdist.monitoring.report import page
from tfdist.monitoring.report.line_chart import label
from tfdist.train import early_stopping
from tfdist.train.preparation import Preparation
from tfdist.trainer import evaluation, fit
from tfdist.trainer.plan import data_facts
from tfdist.trainer.worker_session import Signals

_RECORDED = ("updates", "epochs", "examples_seen", "examples_per_second", "history", "rollbacks", "accumulate")
SLURM_S = 30.0  # seconds to wait for an answer of Slurm's controller: the job's time is nearly over


class Run:
    """A prepared experiment on one worker."""

    def __init__(
        self,
        prepared: Preparation,
        environment: Environment,
        placement: Placement,
        folder: RunFolder,
        distribution: Distribution,
    ):
        self._prepared, self._environment, self._placement = prepared, environment, placement
        self._folder, self._distribution = folder, distribution
        self._experiment, self._schedule = prepared.experiment, prepared.schedule
        self._model, self._data, self._checkpoints = prepared.model, prepared.data, prepared.checkpoints
        train = self._experiment.train
        self._early_stopping = [early_stopping.Patience(train.monitor, train.patience)] if train.patience else []
        self._evaluation: dict[str, float] = {}
        self._weights_sha256, self._weights_norm = "", 0.0

    def train(self) -> Result:
        """Trains, evaluates and saves; returns the content of `result.json`."""
        moved = None if self._prepared.resumes else self._folder.set_aside()
        if moved:
            logger.info(f"the earlier run in {self._folder.name} is now in {moved}")
        self._begin_monitoring()
        if self._prepared.resumes and not self._checkpoints.off:
            self._checkpoints.begun = self._begin_folder  # one that is refused leaves the earlier run's files alone
        else:
            self._begin_folder()
        peers, status, reason = self._distribution.peers, "completed", ""
        try:
            with peers.seeing_signals(), Signals() as signals:
                self._fit(signals)
                self._evaluate(signals)
                reason = "".join(callback.reason for callback in self._early_stopping)
        except Interrupted as stopped:
            status, reason = "preempted", str(stopped)
            layer_state.settle(self._model, self._distribution, self._experiment.train.virtual_replicas)
        except PeerError:
            raise
        except TrainingError:
            self._weights_sha256, self._weights_norm = fingerprint(self._model)
            raise
        finally:
            for monitor in self._monitors:
                getattr(monitor, "stop", lambda: None)()
        return self._finish(status, reason)

    def _begin_folder(self) -> None:
        """Writes experiment and environment."""
        folder = self._folder
        if self._prepared.recovered_accumulate:
            resume.write_accumulate(folder, self._prepared.recovered_accumulate)
        own_work.write_experiment(folder, self._experiment)
        spec_file.write(folder.write_text, self._data.spec)
        where = self._distribution, self._placement, self._environment
        folder.write("environment.json", {**recorder_lib.environment(*where), "code": self._prepared.code})
        folder.push()
        self._distribution.peers.watch.last_words = self._write_failure

    def _begin_monitoring(self) -> None:
        distribution, precision = self._distribution, self._experiment.train.precision
        gpus = [] if distribution.device_kind == "CPU" else list(self._placement.selection.gpus)
        names = [gpu.name for gpu in gpus]
        self._flops = flops.FlopsModel(self._model, self._data.train, names, distribution.workers, precision)
        self._recorder = Recorder(self._folder, self._schedule, Segments(self._placement.cluster, os.environ))
        run = self._environment, self._folder, self._experiment, self._schedule, self._flops, self._recorder
        self._monitors = monitors.create(*run, gpus, self._prepared.profiled, distribution.is_chief)

    def _fit(self, signals: Signals) -> None:
        experiment, schedule, prepared = self._experiment, self._schedule, self._prepared
        train, optimizer, check = experiment.train, experiment.optimizer, self._environment.check_agreement
        fields = early_stopping.monitored(experiment, self._model)
        # Replicas that normalize by themselves, as configured, are not checked for `auto`; virtual ones need it so.
        accepted = not experiment.model.sync_batch_norm and not train.virtual_replicas
        fit.fit(
            self._model,
            self._data.train,
            batch_size=train.batch_size,
            epochs=schedule.epochs,
            verbose=0,
            validation_data=self._data.eval,
            validation_freq=schedule.eval_every,
            validation_batch_size=experiment.eval.batch_size,
            shuffle=experiment.data.shuffle,
            class_weight=prepared.class_weights,
            distribution=self._distribution,
            steps=schedule.updates,
            seed=experiment.seed,
            accumulate=train.accumulate,
            virtual_replicas=train.virtual_replicas,
            steps_per_call=train.steps_per_call or "auto",
            reduce_dtype=optimizer.reduce_dtype,
            callbacks=[
                *([early_stopping.Measured(fields)] if fields else []),
                *self._monitors,
                *self._early_stopping,
                *prepared.callbacks,
            ],
            checkpoints=None if self._checkpoints.off else self._checkpoints,
            on_nonfinite=train.on_nonfinite,
            max_rollbacks=train.max_rollbacks,
            evaluate_ema=optimizer.ema_momentum > 0,
            lr_multipliers=field_syntax.layer_rates(optimizer),
            layer_decay=optimizer.layer_decay,
            zero_stage=train.zero_stage,
            audit=train.audit,
            check_agreement="off" if check == "auto" and accepted else check,
            should_stop=signals.reason,
        )
        done = self._checkpoints.resumed_from or 0
        if done > schedule.updates:
            told = f"the checkpoint has {done:,} updates, and the experiment asks for {schedule.updates:,}"
            logger.info(f"WARNING: nothing was trained: {told}; --resume=never begins anew")

    def _evaluate(self, signals: Signals) -> None:
        self._evaluation = evaluation.evaluate(
            self._model,
            self._data.eval,
            distribution=self._distribution,
            batch_size=self._experiment.eval.batch_size,
            virtual_replicas=self._experiment.train.virtual_replicas,
            check_agreement="off",  # the training has run the equivalence check
            verbose=0,
            should_stop=signals.reason,
        )
        self._recorder.evaluated(self._evaluation)

    def _finish(self, status: str, reason: str) -> Result:
        """Saves the model, the report and the result, and logs a summary."""
        folder, distribution, peers = self._folder, self._distribution, self._distribution.peers
        self._weights_sha256, self._weights_norm = fingerprint(self._model)
        with peers.during("saving"), optimizers.portable(self._model):
            folder.save_model(self._model)
            self._checkpoints.finish()
        sums, hosts = peers.gather("the weights at the end", self._weights_sha256), peers.hosts
        different = [f"{rank} ({hosts[rank]})" for rank, sha256 in enumerate(sums) if sha256 != sums[0]]
        if different:
            raise TrainingError(
                f"worker {', '.join(different)} has ended with other weights than worker 0: do not use them, "
                "and look for a callback that changes weights on some workers only"
            )
        if self._checkpoints.failure:
            raise TrainingError(self._checkpoints.failure)
        if self._checkpoints.off:  # else they are there already
            self._checkpoints.facts |= data_facts(self._data.train, self._data.eval)
        result = self._result(status, reason)
        write_result(folder, result)
        logger.info(result_lines(result, folder))
        if status == "preempted" and self._checkpoints.saved:
            logger.info("the same command resumes from there")
        if status == "preempted" and self._environment.requeue and distribution.is_chief:
            logger.info(requeued(os.environ["SLURM_JOB_ID"]))
        return result

    def _write_failure(self, reason: str) -> None:
        """Writes the result of a run that an error has ended, on this worker or another one."""
        resume.record_accumulate_advice(self._folder, reason)
        # Without logging: a thread may call this, while the main thread holds the lock of the logger or of the stream.
        write_result(self._folder, self._result("failed", reason), silent=True)

    def _result(self, status: str, reason: str) -> Result:
        recorder, distribution = self._recorder, self._distribution
        return Result(
            status=status,
            reason=reason,
            strategy=distribution.name,
            replicas=distribution.replicas,
            workers=distribution.workers,
            global_batch=self._schedule.global_batch,
            seconds=round(recorder.seconds, 3),
            seconds_to_first_update=recorder.first_update,
            evaluation=self._evaluation,
            weights_sha256=self._weights_sha256,
            weights_norm=self._weights_norm,
            files=dict(self._folder.checksums),
            facts=dict(self._checkpoints.facts),
            resumed_from=self._checkpoints.resumed_from,
            shards=self._experiment.train.virtual_replicas,
            arithmetic=distribution.arithmetic(),
            restarts=self._placement.cluster.attempt,
            segments=recorder.segments.record(recorder.updates, reason or status),
            goodput=recorder.segments.goodput(),
            versions=recorder_lib.versions(),
            time=dataclasses.asdict(recorder.spent),
            peak_memory_bytes=monitors.peak_memory(),
            peak_device_memory_bytes=monitors.peak_device_memory(),
            **{name: getattr(recorder, name) for name in _RECORDED},
            **self._flops.rates(recorder.examples_per_second),
        )


def requeued(job: str) -> str:
    """Puts this job of Slurm's, which was pre-empted, back into the queue; returns the line to show a person."""
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=SLURM_S)
        why = "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    return f"WARNING: job {job} is not requeued: {why}" if why else f"job {job} is in the queue again"


def write_result(folder: RunFolder, result: Result, silent: bool = False) -> None:
    """Writes the report, and last of all `result.json`.

    `silent` logs no problem of the report. Raises TrainingError if the disk has no room even for the result alone, or
    the bucket cannot be written.
    """
    content = integrity.sealed(dataclasses.asdict(result))
    problem = page.write(folder, content)
    if problem and not silent:
        logger.info(problem)
    try:
        folder.write(integrity.RESULT, content)
    except TrainingError:  # the report may have taken the last of the disk, and this matters more
        with contextlib.suppress(TrainingError):  # read-only by now, say
            folder.remove(page.NAME)
        folder.write(integrity.RESULT, content)
    folder.push(patient=not silent)


def result_lines(result: Result, folder: RunFolder) -> str:
    """Returns the summary in two or three lines; names the files that exist."""
    done = f"{result.status}: {result.updates} updates in {result.seconds:.1f} s"
    speed = f", {result.examples_per_second:,.0f} examples/s" if result.examples_per_second else ""
    if result.flops_per_second:
        share = "" if result.flops_share is None else f" ({result.flops_share:.0%} of the devices' peak)"
        speed += f", {label(float(f'{result.flops_per_second:.3g}'))}FLOP/s{share}"
    why = f" ({result.reason})" if result.reason else ""
    quality = f"\ntfdist: evaluation: {numbers(result.evaluation)}" if result.evaluation else ""
    files = [name for name in (page.NAME, "result.json", "model.keras") if (folder.path / name).exists()]
    return f"{done}{speed}{why}{quality}\ntfdist: results are in {folder.name}/: {', '.join(files)}"
