"""Trains an experiment: `python -m tfdist.train --strategy=mirrored`.

Exit codes: 0 done; 1 a failure inside training; 2 the input or the environment
is wrong; 143 stopped by a signal.
"""

from __future__ import annotations

import os
from typing import Any

from absl import flags

from tfdist import config
from tfdist.config import command_line, runtime_options, validation
from tfdist.errors import UserError


def train_and_evaluate(experiment: config.Experiment, where: runtime_options.Environment) -> Any:
    """Runs an experiment from beginning to end.

    Args:
      experiment: what to train.
      where: where to run and what to show.

    Returns:
      The `tfdist.monitoring.recorder.Result` that was also written to `result.json`; None after a dry run.

    Raises:
      UserError: experiment or environment cannot be used.
      TrainingError: training failed; the run folder says so too.
    """
    from tfdist.checkpoints import resume, run_folder
    from tfdist.config import schedule
    from tfdist.distributed import connect
    from tfdist.engine import worker_session
    from tfdist.train import batch_size_search, slurm_requeue

    validation.validate(experiment)
    schedule.interval("checkpoint.every", experiment.checkpoint.every)
    schedule.better(experiment.checkpoint.best)
    schedule.better(experiment.train.monitor, "train.monitor")
    if experiment.checkpoint.every == "off" and (where.resume == "require" or where.resume_changed):
        raise UserError(
            "checkpoint.every=off, and a resume is asked for: set it to a time, or leave out the --resume flag"
        )
    slurm_requeue.check(where.requeue, os.environ)
    site = connect.locate(where)
    if not batch_size_search.is_auto(experiment):
        schedule.check_batch(experiment.train.batch_size, site.replicas, experiment.train.accumulate)
    writes = site.cluster.is_chief and not where.dry_run
    folder = run_folder.RunFolder(runtime_options.workdir(experiment, where), writes)
    folder.create()
    try:
        before = batch_size_search.recorded(experiment, folder, where, site.cluster.attempt)
        same = batch_size_search.with_batch(experiment, before) if before else experiment
        resume.same_experiment(folder, same, where, site.cluster.attempt)
        batch = batch_size_search.Found(before)
        if batch_size_search.is_auto(same):
            batch = batch_size_search.find(experiment, where, site)
        distribution = connect.create(site, config.flat(experiment))
        return worker_session.in_touch(
            distribution.peers, lambda: _run(experiment, where, site, folder, distribution, batch)
        )
    finally:
        folder.release()


def _run(
    experiment: config.Experiment,
    where: runtime_options.Environment,
    site: Any,
    folder: Any,
    distribution: Any,
    batch: Any,
) -> Any:
    """What every worker does once the strategy has been started."""
    from tfdist.train.run import Run

    run = Run(experiment, where, site, folder, distribution, batch, _say)
    return run.rehearse() if where.dry_run else run.train()


def _say(line: str) -> None:
    print(f"tfdist: {line}", flush=True)


def _main(argv: list[str]) -> int:
    del argv
    result = train_and_evaluate(flags.FLAGS.config, runtime_options.from_flags(flags.FLAGS))
    return 143 if result and result.status == "preempted" else 0


def main() -> None:
    """Entry point of `python -m tfdist.train`."""
    runtime_options.define_flags()
    command_line.main(_main)


if __name__ == "__main__":
    main()
