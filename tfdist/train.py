"""Trains an experiment: `python -m tfdist.train --strategy=mirrored --config=configs/digits.py`.

Exit codes: 0 done; 1 a failure inside training; 2 the input or the environment
is wrong; 143 stopped by a signal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import signal
import time
from importlib import metadata
from typing import Any

from absl import flags

from tfdist import command, config, environment
from tfdist.errors import Interrupted, PeerError, TrainingError, UserError


def train_and_evaluate(experiment: config.Experiment, where: environment.Environment) -> Any:
    """Runs an experiment from beginning to end.

    Args:
      experiment: what to train.
      where: where to run and what to show.

    Returns:
      The `tfdist.history.Result` that was also written to `result.json`.

    Raises:
      UserError: experiment or environment cannot be used.
      TrainingError: training failed; the run folder says so too.
    """
    from tfdist import plan, requeue, run_folder, strategy

    config.validate(experiment)
    plan.interval("checkpoint.every", experiment.checkpoint.every)
    plan.better(experiment.checkpoint.best)
    if experiment.checkpoint.every == "off" and (where.resume == "require" or where.resume_changed):
        raise UserError(
            "checkpoint.every=off, and a resume is asked for: set it to a time, or leave out the --resume flag"
        )
    requeue.check(where.requeue, os.environ)
    site = strategy.locate(where)
    plan.check_batch(experiment.train.batch_size, site.replicas, experiment.train.accumulate)
    folder = run_folder.RunFolder(run_folder.workdir(experiment, where), site.cluster.is_chief, _say)
    folder.create()
    try:
        _same_experiment(folder, experiment, where, site.cluster.attempt)
        distribution = strategy.create(site, config.flat(experiment))
        return _in_touch(experiment, where, site, folder, distribution)
    finally:
        folder.release()


def _same_experiment(folder: Any, experiment: config.Experiment, where: environment.Environment, attempt: int) -> None:
    """Refuses a folder that holds a run of another experiment."""
    from tfdist import resume

    earlier = folder.earlier() if folder.holds_run else None
    if earlier is None or where.resume_changed or _begins_anew(where, attempt):
        return
    odd = resume.differences(config.flat(experiment), config.flat(earlier))
    if odd:
        raise UserError(resume.refusal(str(folder.path), odd))


def _begins_anew(where: environment.Environment, attempt: int) -> bool:
    """A run that the launcher starts again goes on, whatever was asked for at first."""
    return where.resume == "never" and attempt == 0


def _goes_on(folder: Any, where: environment.Environment, attempt: int, no_checkpoints: bool) -> bool:
    """Whether this run continues the one in the folder, instead of setting it aside."""
    from tfdist import checkpoint

    if attempt > 0:
        return True
    if _begins_anew(where, attempt) or no_checkpoints:
        return False
    if where.resume == "require" or where.resume_changed:
        return True
    try:
        return not folder.completed and bool(checkpoint.found(folder.checkpoints))
    except OSError:
        return True  # and the resume says what is wrong


def _in_touch(experiment: config.Experiment, where: environment.Environment, site: Any, folder: Any, distribution: Any):
    """Trains, and lets the other workers know when it fails."""
    peers = distribution.peers
    try:
        return _train(experiment, where, site, folder, distribution)
    except BaseException as error:
        failure = _failure(error, peers)
        reason = str(failure) or type(failure).__name__
        peers.fail(reason, {UserError: 2, KeyboardInterrupt: 130}.get(type(failure), 1))
        if not isinstance(failure, UserError):
            with contextlib.suppress(TrainingError):  # the reason itself may be that nothing can be written
                peers.last_words(reason)
        if failure is error:
            raise
        raise failure from error


def _failure(error: BaseException, peers: Any) -> BaseException:
    """What ends the run: an error that TensorFlow raises outside of a call may come from a lost worker."""
    import tensorflow as tf

    from tfdist import calls

    if isinstance(error, SystemExit):
        return TrainingError(f"something in the run called sys.exit({error.code!r}): let the training end by itself")
    return calls.cause(error, peers) if isinstance(error, tf.errors.OpError) else error


def _train(experiment: config.Experiment, where: environment.Environment, site: Any, folder: Any, distribution: Any):
    """The run itself, once the strategy has been started."""
    from tfdist import evaluation as evaluation_lib
    from tfdist import history, loop, models, optimizers, plan, progress, requeue
    from tfdist.datasets import catalog

    say = _say if distribution.is_chief else lambda line: None
    say(f"strategy {distribution.name}, because {distribution.reason}: {_replicas(distribution)}")
    if site.selection.gpus:
        say(f"devices: {site.selection.describe()}")

    _set_precision(experiment.train.precision)
    data = distribution.peers.once(lambda: catalog.load(experiment))
    schedule = plan.make(experiment, data.examples, distribution.replicas)
    say(f"{experiment.name}: {schedule.describe()}")
    with distribution.scope():
        model = models.build(experiment, data.spec)
        data = _compile(model, optimizers.build(experiment, schedule), experiment, data)
    checkpoints = _checkpoints(experiment, model, where, site, folder, say)
    moved = None if _goes_on(folder, where, site.cluster.attempt, checkpoints.off) else folder.set_aside()
    if moved:
        say(f"the earlier run in {folder.path} is now in {moved}")
    folder.write("experiment.json", dataclasses.asdict(experiment))
    folder.write("environment.json", _environment(distribution, site))

    recorder = history.Recorder(folder, schedule)
    shown = progress.create(where.progress if distribution.is_chief else "none", schedule)
    status, reason, weights = "completed", "", ("", 0.0)
    evaluation: dict[str, float] = {}

    def result(status: str, reason: str) -> history.Result:
        return history.Result(
            status=status,
            reason=reason,
            strategy=distribution.name,
            replicas=distribution.replicas,
            workers=distribution.workers,
            global_batch=schedule.global_batch,
            updates=recorder.updates,
            epochs=recorder.epochs,
            examples_seen=recorder.examples_seen,
            seconds=round(time.time() - recorder.begun, 3),
            seconds_to_first_update=recorder.first_update,
            examples_per_second=recorder.examples_per_second,
            history=recorder.history,
            evaluation=evaluation,
            weights_sha256=weights[0],
            weights_norm=weights[1],
            resumed_from=checkpoints.resumed_from,
            rollbacks=recorder.rollbacks,
            restarts=site.cluster.attempt,
            versions=_versions(),
        )

    peers = distribution.peers
    # In silence: a thread calls this, while the main thread may hold the lock of the stream.
    peers.last_words = lambda why: _record(folder, result("failed", why), None, lambda line: None)
    try:
        with peers.seeing_signals(), _Signals() as signals:
            loop.fit(
                model,
                data.train,
                distribution=distribution,
                batch_size=experiment.train.batch_size,
                epochs=schedule.epochs,
                steps=schedule.updates,
                accumulate=experiment.train.accumulate,
                steps_per_call=experiment.train.steps_per_call or "auto",
                shuffle=experiment.data.shuffle,
                seed=experiment.seed,
                validation_data=data.eval,
                validation_freq=schedule.eval_every,
                validation_batch_size=experiment.eval.batch_size,
                callbacks=[recorder, *shown],
                reduce_dtype=experiment.optimizer.reduce_dtype,
                checkpoints=None if checkpoints.off else checkpoints,
                on_nonfinite=experiment.train.on_nonfinite,
                max_rollbacks=experiment.train.max_rollbacks,
                should_stop=signals.reason,
                verbose=0,
            )
            evaluation = evaluation_lib.evaluate(
                model,
                data.eval,
                distribution=distribution,
                batch_size=experiment.eval.batch_size,
                should_stop=signals.reason,
            )
            recorder.evaluated(evaluation)
    except Interrupted as stopped:
        status, reason = "preempted", str(stopped)
        evaluation_lib.average_statistics(model, distribution)
    except PeerError:
        raise
    except TrainingError:
        weights = history.fingerprint(model)
        raise
    finally:
        for display in shown:
            getattr(display, "stop", lambda: None)()

    weights = history.fingerprint(model)
    with peers.during("saving"):
        folder.save_model(model)
        checkpoints.finish()
    _same_everywhere(peers, weights[0])
    if checkpoints.failure:
        raise TrainingError(checkpoints.failure)
    done = result(status, reason)
    found = None if status == "preempted" else _findings(model, data, distribution, experiment)
    _record(folder, done, found, say)
    say(_summary(done, folder.path))
    if status == "preempted" and checkpoints.saved:
        say("the same command goes on from there")
    if status == "preempted" and where.requeue and distribution.is_chief:
        say(requeue.again(os.environ))
    return done


def _checkpoints(
    experiment: config.Experiment, model: Any, where: environment.Environment, site: Any, folder: Any, say: Any
) -> Any:
    """As the experiment wants them."""
    from tfdist import checks, saving

    wanted = experiment.checkpoint
    own = checks.own_step(model)
    if own and wanted.every != "off":
        say(f"no checkpoints: {type(model).__name__} has its own {own}, which Keras' fit runs")
    return saving.Checkpoints(
        folder.checkpoints,
        every="off" if own else wanted.every,
        keep=wanted.keep,
        best=wanted.best,
        asynchronous=wanted.asynchronous,
        resume="auto" if site.cluster.attempt else where.resume,
        changed=where.resume_changed,
        experiment=config.flat(experiment),
        say=say,
    )


def _findings(model: Any, data: Any, distribution: Any, experiment: config.Experiment) -> Any:
    """What a classifier gets wrong, for the report: no reason for a run to fail."""
    from tfdist import predictions

    try:
        return predictions.of_run(model, data.eval, data.spec, distribution, experiment.eval.batch_size)
    except PeerError:
        raise
    except Exception as error:
        if distribution.workers > 1 and not isinstance(error, UserError):
            raise  # the others wait for this worker
        _say(f"WARNING: no look at the mistakes: {type(error).__name__}: {error}")
        return None


def _record(folder: Any, done: Any, found: Any, say: Any) -> None:
    """The report, and last of all the result."""
    from tfdist import report

    content = dataclasses.asdict(done)
    report.write(folder, content, found, say)
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


def _say(line: str) -> None:
    print(f"tfdist: {line}", flush=True)


def _replicas(distribution: Any) -> str:
    count = distribution.replicas
    xla = {"off": "", "on": ", compiled by XLA", "auto": ", compiled by XLA where it can"}[distribution.jit]
    return f"{count} replica{'s' * (count > 1)} on {', '.join(distribution.devices)}{xla}"


def _set_precision(precision: str) -> None:
    import keras

    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)


def _compile(model: Any, optimizer: Any, experiment: config.Experiment, data: Any) -> Any:
    """Gives the model its optimizer, and a loss that fits the data unless it brought one.

    Returns:
      The data, its targets in the form that the loss wants.
    """
    import keras

    from tfdist.data import one_hot

    smoothing = experiment.train.label_smoothing
    if model.compiled or data.spec.classes is None:
        if smoothing:
            raise UserError(
                f"train.label_smoothing={smoothing} is for classification with tfdist's own loss: set it to 0"
            )
        if not model.compiled:
            model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
        elif model.dtype_policy.name == "mixed_float16":
            model.optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        else:
            model.optimizer = optimizer
        return data
    weighted = len(getattr(data.train, "columns", ())) == 3
    reduction = "mean_with_sample_weight" if weighted else "sum_over_batch_size"
    loss: Any
    if smoothing:
        loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=smoothing, reduction=reduction)
        train, evaluation = one_hot(data.train, data.spec.classes), one_hot(data.eval, data.spec.classes)
        data = dataclasses.replace(data, train=train, eval=evaluation)
    else:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    metrics = {"weighted_metrics" if weighted else "metrics": ["accuracy"]}
    model.compile(optimizer=optimizer, loss=loss, **metrics)
    return data


def _environment(distribution: Any, site: Any) -> dict:
    return {
        "strategy": distribution.name,
        "reason": distribution.reason,
        "devices": list(distribution.devices),
        "replicas": distribution.replicas,
        "workers": distribution.workers,
        "hosts": list(distribution.peers.hosts),
        "found_by": site.cluster.source,
        "jit": distribution.jit,
        "gpus": [dataclasses.asdict(g) for g in site.survey.gpus],
        "driver_problem": site.survey.problem,
        "flags": dataclasses.asdict(site.environment),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("tfdist", "tensorflow", "keras", "tensorflow-datasets", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def _summary(result: Any, path: Any) -> str:
    from tfdist.progress import numbers

    done = f"{result.status}: {result.updates} updates in {result.seconds:.1f} s"
    speed = f", {result.examples_per_second:,.0f} examples/s" if result.examples_per_second else ""
    why = f" ({result.reason})" if result.reason else ""
    quality = f"\ntfdist: evaluation: {numbers(result.evaluation)}" if result.evaluation else ""
    return f"{done}{speed}{why}{quality}\ntfdist: results are in {path}{os.sep}: report.html, result.json, model.keras"


class _Signals:
    """Remembers SIGINT, SIGTERM and SIGUSR1 until the current call is finished; a second SIGINT stops at once."""

    def __init__(self):
        self.received = ""
        self._before: dict = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def reason(self) -> str:
        """Why the run shall stop, or nothing."""
        return f"stopped by {self.received} after the update in progress" if self.received else ""

    def _receive(self, number: int, frame: object) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name


def _run(argv: list[str]) -> int:
    del argv
    result = train_and_evaluate(flags.FLAGS.config, environment.from_flags(flags.FLAGS))
    return 143 if result.status == "preempted" else 0


def main() -> None:
    """Entry point of `python -m tfdist.train`."""
    environment.define_flags()
    command.main(_run)


if __name__ == "__main__":
    main()
