"""Trains an experiment with several values of some fields, and says which are best.

    python -m tfdist.sweep --config=digits_mlp \\
        --over="optimizer.learning_rate=1e-2,1e-1; train.batch_size=32,64"

Every combination is a run of its own in a folder below --workdir, in a process
of its own; --parallel=N runs so many side by side, each on its own GPUs or
cores. Started again, the same command repeats no run that is finished and goes
on with those that are not. Other values may be added.

Exit codes: 0 all runs are completed; 1 one has failed or was refused; 2 the
input is wrong; 130 or 143 ended by a signal.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import sys

from absl import flags

from tfdist import config
from tfdist.compare import trial
from tfdist.config import field_syntax, runtime_options, schedule, validation
from tfdist.config.commands import command_line
from tfdist.errors import UserError, shown
from tfdist.sweep import grid, runner

OF_ALL_RUNS = (
    "strategy", "devices", "virtual_devices", "tpu", "threads", "cpu_kernels", "jit", "check_agreement", "tensorboard",
)  # fmt: skip
"""Environment flags that are handed on to every run."""
_OWN = ("over", "parallel", "metric", "workdir", "dry_run", *OF_ALL_RUNS)


def check(values: flags.FlagValues) -> None:
    """Checks the flags by themselves.

    Raises:
      UserError: one has a value that cannot be used, or two contradict each other.
    """
    if values.parallel < 1:
        raise UserError(f"--parallel must be at least 1, got {values.parallel}")
    if values.strategy in ("multi_worker", "horovod"):
        raise UserError(
            f"--strategy={values.strategy} needs several processes, and a sweep makes each run in one: "
            "use auto, default or mirrored"
        )
    if values.parallel > 1 and values.strategy == "tpu":
        raise UserError("--parallel shares out GPUs or cores, and a TPU is used as a whole: leave it out")
    if values.metric:
        schedule.better(values.metric, "--metric")
    field_syntax.check_local("--workdir", values.workdir)
    runtime_options.from_flags(values)


def trials(values: flags.FlagValues, combinations: list[grid.Combination], path: pathlib.Path) -> list[trial.Trial]:
    """Returns the runs, as commands.

    Raises:
      UserError: a field is given as well as swept over.
    """
    fields = config.flat(values.config)
    given = {name: fields[name] for name in values if name.startswith("config.") and values[name].present}
    for name in combinations[0].values:
        if f"config.{name}" in given:
            raise UserError(f"--config.{name}={given[f'config.{name}']} and --over both say what {name} is: give one")
    file = getattr(values["config"], "config_filename", "")
    common = [f"--config={file}"] if values["config"].present else []
    common += [f"--{name}={value}" for name, value in given.items()]
    # The GPUs of a run side by side with others are those that it is shown.
    handed_on = [name for name in OF_ALL_RUNS if values[name].present and (values.parallel == 1 or name != "devices")]
    if values.parallel > 1 and values.devices == "none":
        handed_on.append("devices")
    common += [f"--{name}={values[name].value}" for name in handed_on]
    made = []
    for one in combinations:
        where = [f"--workdir={path / one.folder}", "--progress=none"]
        command = (sys.executable, "-m", "tfdist.train", *common, *one.flags(), *where)
        # Its output does not go into the run's folder, which an earlier run may be in, and is renamed with it.
        made.append(trial.Trial(one.name, values.strategy, 1, None, command, path / runner.LOGS / one.folder))
    return made


def _places(values: flags.FlagValues) -> list[runner.DevicePlace]:
    if values.parallel == 1:
        return runner.places(1, (), ())
    gpus = trial.find_hardware(values.devices, os.environ).gpus
    return runner.places(values.parallel, gpus, sorted(os.sched_getaffinity(0)))


def _run(argv: list[str]) -> int:
    del argv
    values = flags.FLAGS
    check(values)
    experiment = validation.validate(values.config)
    combinations = grid.combinations(grid.parse(values.over, experiment), experiment)
    path = pathlib.Path(os.path.expanduser(values.workdir) or os.path.join("runs", f"sweep-{experiment.name}"))
    runs, where = trials(values, combinations, path), _places(values)
    if values.dry_run:
        print("\n".join(f"# {shown(t.name)}\n{t.shell()}" for t in runs))
        return 0
    command_line.clean_up_when_ended()
    title = f"{experiment.name} over {', '.join(combinations[0].values)}"
    with runner.held(path) as folder:
        return runner.Sweep(title, runs, combinations, folder, values.metric, where).run()


def main() -> None:
    """Entry point of `python -m tfdist.sweep`."""
    runtime_options.define_flags()
    for field in dataclasses.fields(runtime_options.Environment):
        if field.name not in OF_ALL_RUNS:
            delattr(flags.FLAGS, field.name)
    flags.DEFINE_string(
        "over", "", "Fields and their values, as in optimizer.learning_rate=1e-3,1e-2; train.epochs=3,9."
    )
    flags.DEFINE_integer("parallel", 1, "Runs side by side, each on GPUs or cores of its own.")
    flags.DEFINE_string("metric", "", "By which runs are compared, such as loss; accuracy where that is measured.")
    flags.DEFINE_string("workdir", "", "Folder for the runs; runs/sweep-<experiment name> if empty.")
    flags.DEFINE_bool("dry_run", False, "Print the commands, and start nothing.")
    parse = functools.partial(command_line.parse, own=_OWN)
    command_line.main(_run, parse, "interrupted")


if __name__ == "__main__":
    main()
