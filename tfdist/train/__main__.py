"""Trains an experiment: `python -m tfdist.train --strategy=mirrored`.

Exit codes: 0 done; 1 a failure inside training; 2 the input or the environment
is wrong; 143 stopped by a signal.
"""

import dataclasses
import json
import os
import shutil
from typing import TYPE_CHECKING

from absl import flags

from tfdist import config
from tfdist.config import runtime_options, schedule, validation
from tfdist.config.commands import command_line, standard_streams
from tfdist.errors import UserError

if TYPE_CHECKING:
    from tfdist.monitoring.recorder import Result


def train_and_evaluate(experiment: config.Experiment, environment: runtime_options.Environment) -> "Result | None":
    """Runs an experiment from beginning to end; raises UserError or TrainingError, which the run folder tells, too.

    Returns the `tfdist.monitoring.recorder.Result` that was also written to `result.json`; None after a dry run.
    """
    # Imported here, so that --help answers at once.
    from tfdist.checkpoints import bucket_folder, resume
    from tfdist.train import ahead_of_time
    from tfdist.trainer import worker_session

    _check(experiment, environment)
    placement, train = ahead_of_time.locate(environment), experiment.train
    if train.virtual_replicas and placement.options.threads is None and not placement.selection.gpus:
        # The number of threads changes the last bits, and TensorFlow's default is the number of cores.
        placement = dataclasses.replace(placement, options=dataclasses.replace(placement.options, threads=1))
    parts = placement.replicas, train.accumulate
    schedule.check_batch(train.batch_size, *parts, virtual_replicas=train.virtual_replicas)
    writes = placement.cluster.is_chief and not environment.dry_run
    folder = bucket_folder.opened(runtime_options.workdir(experiment, environment), writes, placement.cluster.is_chief)
    folder.create()
    if environment.dry_run and placement.cluster.is_chief:
        folder.could_be_created()
    try:
        resume.same_experiment(folder, experiment, environment, placement.cluster.attempt)
        distribution = ahead_of_time.create(placement, environment.topology, config.flat(experiment))

        def work() -> "Result | None":
            from tfdist.train import dry_run, preparation, run

            where = environment, placement, folder, distribution
            prepared = preparation.prepare(experiment, *where)
            if not environment.dry_run:
                return run.Run(prepared, *where).train()
            dry_run.rehearse(prepared, *where)
            return None

        return worker_session.reporting_failures(distribution.peers, work)
    finally:
        folder.release()


def _check(experiment: config.Experiment, environment: runtime_options.Environment) -> None:
    """Checks fields and flags before anything on this machine is looked at; raises UserError."""
    from tfdist.train import ahead_of_time

    validation.validate(experiment)
    if environment.topology and experiment.train.virtual_replicas:
        raise UserError("--topology compiles the step without virtual replicas", "set train.virtual_replicas=0")
    if environment.topology and experiment.train.zero_stage:
        raise UserError("--topology compiles the step with whole optimizer state", "set train.zero_stage=0")
    ahead_of_time.check(environment)
    schedule.interval(experiment.checkpoint.every)
    schedule.better(experiment.checkpoint.best)
    schedule.better(experiment.train.monitor, "train.monitor")
    if experiment.checkpoint.every == "off" and (environment.resume == "require" or environment.resume_changed):
        what = "checkpoint.every=off, and a resume is asked for"
        raise UserError(what, "set it to a time, or leave out the --resume flag")
    if environment.requeue and not os.environ.get("SLURM_JOB_ID"):
        what = "--requeue is for Slurm's jobs, and SLURM_JOB_ID is not set"
        raise UserError(what, "use it under sbatch, or leave it out")
    if environment.requeue and not shutil.which("scontrol"):
        raise UserError("--requeue needs Slurm's scontrol, which is not on PATH", "install it there, or leave it out")


def _main(argv: list[str]) -> int:
    if flags.FLAGS.list:
        print(command_line.listing())
        return 0
    if flags.FLAGS.print_config:
        validation.validate(flags.FLAGS.config)
        print(json.dumps(dataclasses.asdict(flags.FLAGS.config), indent=2))
        return 0
    environment = runtime_options.from_flags(flags.FLAGS)
    if not environment.dry_run:
        standard_streams.dispensable()  # the result of a run is in its folder
    result = train_and_evaluate(flags.FLAGS.config, environment)
    return 143 if result and result.status == "preempted" else 0


def main() -> None:
    runtime_options.define_flags()
    flags.DEFINE_bool("list", False, "Print the experiments and flag files that come with tfdist, and stop.")
    flags.DEFINE_bool("print_config", False, "Print the experiment with all its fields as JSON, and stop.")
    command_line.main(_main)


if __name__ == "__main__":
    main()
