"""Trains an experiment: `python -m tfdist.train --strategy=mirrored`.

Exit codes: 0 done; 1 a failure inside training; 2 the input or the environment
is wrong; 143 stopped by a signal.
"""

from __future__ import annotations

import os
from typing import Any

from absl import flags

from tfdist import command, config, environment, validation
from tfdist.errors import UserError


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
        return session.in_touch(distribution.peers, lambda: _run(experiment, where, site, folder, distribution, batch))
    finally:
        folder.release()


def _run(
    experiment: config.Experiment, where: environment.Environment, site: Any, folder: Any, distribution: Any, batch: Any
) -> Any:
    """What every worker does once the strategy has been started."""
    from tfdist.run import Run

    run = Run(experiment, where, site, folder, distribution, batch, _say)
    return run.rehearse() if where.dry_run else run.train()


def _say(line: str) -> None:
    print(f"tfdist: {line}", flush=True)


def _main(argv: list[str]) -> int:
    del argv
    result = train_and_evaluate(flags.FLAGS.config, environment.from_flags(flags.FLAGS))
    return 143 if result and result.status == "preempted" else 0


def main() -> None:
    """Entry point of `python -m tfdist.train`."""
    environment.define_flags()
    command.main(_main)


if __name__ == "__main__":
    main()
