"""Trains an experiment: `python -m tfdist.train --strategy=mirrored --config=configs/digits.py`.

Exit codes: 0 done; 1 a failure inside training; 2 the input or the environment
is wrong; 143 stopped by a signal.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

from absl import flags

from tfdist import command, config, environment, fields, validation
from tfdist.errors import Interrupted, PeerError, TrainingError, UserError


def train_and_evaluate(experiment: config.Experiment, where: environment.Environment) -> Any:
    """Runs an experiment from beginning to end.

    Args:
      experiment: what to train.
      where: where to run and what to show.

    Returns:
      The `tfdist.history.Result` that was also written to `result.json`; None after a dry run.

    Raises:
      UserError: experiment or environment cannot be used.
      TrainingError: training failed; the run folder says so too.
    """
    from tfdist import batch_finder, plan, requeue, resume, run_folder, session, strategy

    validation.validate(experiment)
    plan.interval("checkpoint.every", experiment.checkpoint.every)
    plan.better(experiment.checkpoint.best)
    plan.better(experiment.train.monitor, "train.monitor")
    if experiment.checkpoint.every == "off" and (where.resume == "require" or where.resume_changed):
        raise UserError(
            "checkpoint.every=off, and a resume is asked for: set it to a time, or leave out the --resume flag"
        )
    requeue.check(where.requeue, os.environ)
    site = strategy.locate(where)
    if not batch_finder.is_auto(experiment):
        plan.check_batch(experiment.train.batch_size, site.replicas, experiment.train.accumulate)
    writes = site.cluster.is_chief and not where.dry_run
    folder = run_folder.RunFolder(run_folder.workdir(experiment, where), writes, _say)
    folder.create()
    try:
        before = batch_finder.recorded(experiment, folder, where, site.cluster.attempt)
        same = batch_finder.with_batch(experiment, before) if before else experiment
        resume.same_experiment(folder, same, where, site.cluster.attempt)
        batch = batch_finder.Found(before)
        if batch_finder.is_auto(same):
            batch = batch_finder.find(experiment, where, site)
        distribution = strategy.create(site, config.flat(experiment))
        work = lambda: _train(experiment, where, site, folder, distribution, batch)
        return session.in_touch(distribution.peers, work)
    finally:
        folder.release()


def _train(
    experiment: config.Experiment, where: environment.Environment, site: Any, folder: Any, distribution: Any, batch: Any
) -> Any:
    """The run itself, once the strategy has been started."""
    from tfdist import (
        again,
        batch_finder,
        described,
        flops,
        history,
        loop,
        models,
        optimizers,
        plan,
        provenance,
        requeue,
        resume,
        watchers,
    )
    from tfdist import class_weights as class_weights_lib
    from tfdist import evaluation as evaluation_lib
    from tfdist.data import check_same
    from tfdist.datasets import catalog
    from tfdist.signals import Signals
    from tfdist.stopping import Patience

    say = _say if distribution.is_chief else lambda line: None
    say(f"strategy {distribution.name}, because {distribution.reason}: {_replicas(distribution)}")
    if site.selection.gpus:
        say(f"devices: {site.selection.describe()}")
    if site.survey.problem:
        say(f"WARNING: {site.survey.problem}: python -m tfdist.doctor says more")

    experiment = batch_finder.agreed(experiment, batch, distribution, say)
    experiment, learnt = _learnt(experiment, where, site, folder, distribution, say)
    models.set_precision(experiment.train.precision)
    data = distribution.peers.once(lambda: catalog.load(experiment, not where.dry_run, say))
    check_same(catalog.facts(data), distribution.peers, "the data set")
    schedule = plan.make(experiment, data.examples, distribution.replicas)
    say(f"{experiment.name}: {schedule.describe()}")
    class_weights = class_weights_lib.told(experiment.train.class_weight, data, say)
    with distribution.scope():
        model = models.build(experiment, data.spec, say)
        data = models.compiled(model, optimizers.build(experiment, schedule), experiment, data)
        optimizers.exclude(model, experiment.optimizer)
    checkpoints = _checkpoints(experiment, model, where, site, folder, say)
    first, last = plan.profiled(where.profile, schedule)
    goes_on = resume.goes_on(folder, where, site.cluster.attempt, checkpoints.off)
    if where.dry_run:
        return _tell_plan(experiment, schedule, model, data, site, distribution, resume.intent(folder, goes_on))
    moved = None if goes_on else folder.set_aside()
    if moved:
        say(f"the earlier run in {folder.path} is now in {moved}")
    if learnt:
        again.note(folder, learnt)
    folder.write("experiment.json", dataclasses.asdict(experiment))
    described.write(folder, data.spec)
    folder.write("environment.json", provenance.environment(distribution, site))

    recorder = history.Recorder(folder, schedule)
    gpus = [] if distribution.devices[0].startswith("CPU") else list(site.selection.gpus)
    work = flops.Work(model, data.train, [g.name for g in gpus], distribution.workers, experiment.train.precision)
    watching = watchers.Watching(where, folder, recorder, schedule, distribution.is_chief, work, say)
    watching.start(experiment, [g.number for g in gpus], (first, last))
    early = [Patience(experiment.train.monitor, experiment.train.patience)] * (experiment.train.patience > 0)
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
            accumulate=recorder.accumulate,
            restarts=site.cluster.attempt,
            versions=provenance.versions(),
            time=dataclasses.asdict(recorder.spent),
            **watching.totals(recorder.examples_per_second),
        )

    peers = distribution.peers

    def last_words(why: str) -> None:
        # In silence: a thread calls this, while the main thread may hold the lock of the stream.
        again.heed(folder, why)
        _record(folder, result("failed", why), None, lambda line: None)

    peers.last_words = last_words
    try:
        with peers.seeing_signals(), Signals() as signals:
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
                class_weight=class_weights,
                callbacks=[recorder, *watching.callbacks, *early],
                reduce_dtype=experiment.optimizer.reduce_dtype,
                checkpoints=None if checkpoints.off else checkpoints,
                on_nonfinite=experiment.train.on_nonfinite,
                max_rollbacks=experiment.train.max_rollbacks,
                learning_rates=fields.layer_rates(experiment.optimizer),
                layer_decay=experiment.optimizer.layer_decay,
                measure_average=experiment.optimizer.ema_momentum > 0,
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
            reason = "".join(callback.reason for callback in early)
    except Interrupted as stopped:
        status, reason = "preempted", str(stopped)
        evaluation_lib.settle(model, distribution)
    except PeerError:
        raise
    except TrainingError:
        weights = history.fingerprint(model)
        raise
    finally:
        watching.stop()

    weights = history.fingerprint(model)
    with peers.during("saving"), optimizers.portable(model):
        folder.save_model(model)
        checkpoints.finish()
    _same_everywhere(peers, weights[0])
    if checkpoints.failure:
        raise TrainingError(checkpoints.failure)
    done = result(status, reason)
    found = None
    if status == "completed":  # who is pre-empted has no time
        from tfdist import predictions

        found = predictions.of_run(model, data.eval, data.spec, distribution, experiment.eval.batch_size, say)
    _record(folder, done, found, say)
    say(_summary(done, folder.path))
    if status == "preempted" and checkpoints.saved:
        say("the same command goes on from there")
    if status == "preempted" and where.requeue and distribution.is_chief:
        say(requeue.again(os.environ))
    return done


def _learnt(
    experiment: config.Experiment, where: environment.Environment, site: Any, folder: Any, distribution: Any, say: Any
) -> tuple[config.Experiment, int]:
    """The experiment with as many micro-batches as the attempt before has found to be needed; 0 where none did."""
    from tfdist import again, resume

    mine = again.noted(folder) if resume.unfinished(folder, where, site.cluster.attempt) else 1
    batch = experiment.train.batch_size
    noted = min(distribution.peers.gather("micro-batches of the run before", mine)[0], batch // distribution.replicas)
    if noted <= experiment.train.accumulate:
        return experiment, 0
    say(f"train.accumulate={noted} instead of {experiment.train.accumulate}: the run before ran out of memory")
    train = dataclasses.replace(experiment.train, accumulate=noted)
    return dataclasses.replace(experiment, train=train), noted


def _tell_plan(
    experiment: config.Experiment, schedule: Any, model: Any, data: Any, site: Any, distribution: Any, intent: str
) -> None:
    """`--dry_run`: the plan, and what would be refused later."""
    from tfdist import rehearsal

    with distribution.scope():
        total = rehearsal.memory(model, len(distribution.devices), site.selection.gpus)
    if distribution.is_chief:
        print("\n".join(rehearsal.lines(experiment, schedule, model, data, total, intent)), flush=True)


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


def _record(folder: Any, done: Any, found: Any, say: Any) -> None:
    """The report, and last of all the result."""
    from tfdist import report

    content = dataclasses.asdict(done)
    report.write(folder, content, found, say)
    try:
        folder.write("result.json", content)
    except TrainingError:  # the report may have taken the last of the disk, and this matters more
        folder.remove(report.NAME)
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


def _summary(result: Any, path: Any) -> str:
    from tfdist import flops
    from tfdist.progress import numbers

    done = f"{result.status}: {result.updates} updates in {result.seconds:.1f} s"
    speed = f", {result.examples_per_second:,.0f} examples/s" if result.examples_per_second else ""
    if result.flops_per_second:
        speed += f", {flops.words(result.flops_per_second, result.flops_share)}"
    why = f" ({result.reason})" if result.reason else ""
    quality = f"\ntfdist: evaluation: {numbers(result.evaluation)}" if result.evaluation else ""
    return f"{done}{speed}{why}{quality}\ntfdist: results are in {path}{os.sep}: report.html, result.json, model.keras"


def _run(argv: list[str]) -> int:
    del argv
    result = train_and_evaluate(flags.FLAGS.config, environment.from_flags(flags.FLAGS))
    return 143 if result and result.status == "preempted" else 0


def main() -> None:
    """Entry point of `python -m tfdist.train`."""
    environment.define_flags()
    command.main(_run)


if __name__ == "__main__":
    main()
