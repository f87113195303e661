"""Trains an experiment with several values of some fields, and says which are best.

    python -m tfdist.sweep --config=digits_mlp \\
        --over="optimizer.learning_rate=1e-2,1e-1; train.batch_size=32,64"

Every combination is a run of its own in a folder below --workdir, in a process
of its own; --parallel=N runs so many side by side, each on its own GPUs or
cores. With --trials=20, Optuna chooses the values, also from ranges such as
optimizer.learning_rate=log:1e-4:1e-1. Started again, the same command repeats
no finished run and goes on with the others; started twice, or on several
machines with one file system, it shares the work.

Exit codes: 0 no run has failed; 1 one has failed or was refused; 2 the input is
wrong; 130 or 143 ended by a signal.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import pathlib
import sys

from absl import flags

from tfdist import config
from tfdist.compare import trial
from tfdist.config import field_syntax, runtime_options, schedule, validation
from tfdist.config.commands import command_line
from tfdist.errors import UserError, shown
from tfdist.sweep import results, space

OF_ALL_RUNS = (
    "strategy", "devices", "virtual_devices", "tpu", "threads", "cpu_kernels", "jit", "check_agreement", "tensorboard",
)  # fmt: skip
"""Environment flags that are handed on to every run."""
LOGS = "logs"
"""Folder of what the runs have printed."""
_OWN = ("over", "trials", "sampler", "prune", "parallel", "metric", "workdir", "dry_run", *OF_ALL_RUNS)


def check(values: flags.FlagValues) -> None:
    """Checks the flags by themselves.

    Raises:
      UserError: one has a value that cannot be used, or two contradict each other.
    """
    if values.parallel < 1:
        raise UserError(f"--parallel must be at least 1, got {values.parallel}")
    if values.trials < 0:
        raise UserError(f"--trials must be at least 1, got {values.trials}")
    if values.trials and values.sampler == "grid":
        raise UserError(f"--sampler=grid runs all combinations: leave --trials={values.trials} out, or choose random")
    if not values.trials and values.sampler in ("random", "tpe"):
        raise UserError(f"--sampler={values.sampler} draws as many runs as it is told: give --trials=20, say")
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


def searched(values: flags.FlagValues, experiment: config.Experiment) -> dict[str, list[object] | space.Range]:
    """Returns the search space.

    Raises:
      UserError: `--over` cannot be used, or contradicts another flag.
    """
    fields = space.parse(values.over, experiment)
    if not values.trials:
        space.grid(fields)
    space.check(fields, experiment)
    given = config.flat(values.config)
    for name in fields:
        if f"config.{name}" in values and values[f"config.{name}"].present:
            raise UserError(f"--config.{name}={given[f'config.{name}']} and --over both say what {name} is: give one")
        if name in results.OF_LOSS and (values.trials or values.prune) and not values.metric:
            raise UserError(f"--over changes {name}, so losses cannot be compared: give --metric=accuracy, say")
    return fields


def command(values: flags.FlagValues, path: pathlib.Path, combination: space.Combination) -> trial.Trial:
    """Returns the run of a combination."""
    fields = config.flat(values.config)
    file = getattr(values["config"], "config_filename", "")
    words = [f"--config={file}"] if values["config"].present else []
    words += [f"--{name}={fields[name]}" for name in values if name.startswith("config.") and values[name].present]
    # The GPUs of a run side by side with others are those that it is shown.
    handed_on = [name for name in OF_ALL_RUNS if values[name].present and (values.parallel == 1 or name != "devices")]
    if values.parallel > 1 and values.devices == "none":
        handed_on.append("devices")
    words += [f"--{name}={values[name].value}" for name in handed_on]
    words += [f"--config.{name}={value}" for name, value in combination.values.items()]
    words += [f"--workdir={path / combination.folder}", "--progress=none"]
    # Its output does not go into the run's folder, which an earlier run may be in, and is renamed with it.
    log = path / LOGS / combination.folder
    return trial.Trial(combination.name, values.strategy, 1, None, (sys.executable, "-m", "tfdist.train", *words), log)


def _run(argv: list[str]) -> int:
    del argv
    values = flags.FLAGS
    check(values)
    experiment = validation.validate(values.config)
    fields = searched(values, experiment)
    if importlib.util.find_spec("optuna") is None:
        raise UserError("a sweep needs the package optuna, which is not installed: pip install 'tfdist[sweep]'")
    from tfdist.sweep import runner

    path = pathlib.Path(os.path.expanduser(values.workdir) or os.path.join("runs", f"sweep-{experiment.name}"))
    make = functools.partial(command, values, path)
    # The loss alone is known to be measured before the first run.
    metric = values.metric or ("loss" if values.trials else "")
    search = runner.Search(fields, experiment, metric, values.trials, values.sampler or "tpe", values.prune)
    gpus = trial.find_hardware(values.devices, os.environ).gpus if values.parallel > 1 else ()
    where = runner.places(values.parallel, gpus, sorted(os.sched_getaffinity(0)))
    if values.dry_run:
        for combination in search.preview():
            print(f"# {shown(combination.name)}\n{make(combination).shell()}")
        return 0
    command_line.clean_up_when_ended()
    title = f"{experiment.name} over {', '.join(fields)}"
    return runner.Sweep(title, search, make, path, where).run()


def main() -> None:
    """Entry point of `python -m tfdist.sweep`."""
    runtime_options.define_flags()
    for field in dataclasses.fields(runtime_options.Environment):
        if field.name not in OF_ALL_RUNS:
            delattr(flags.FLAGS, field.name)
    flags.DEFINE_string(
        "over",
        "",
        "Fields and their values or range: optimizer.learning_rate=log:1e-4:1e-1; optimizer.momentum=uniform:0:0.9; "
        "train.batch_size=32,64.",
    )
    flags.DEFINE_integer("trials", 0, "Number of runs whose values are sampled; 0: all combinations.")
    flags.DEFINE_enum(
        "sampler",
        None,
        ["grid", "random", "tpe"],
        "How values are chosen: grid, or with --trials tpe, Optuna's default.",
    )
    flags.DEFINE_bool("prune", False, "Stop a run whose validation metric is worse than the others' median.")
    flags.DEFINE_integer("parallel", 1, "Runs side by side, each on GPUs or cores of its own.")
    flags.DEFINE_string(
        "metric", "", "By which runs are compared; empty: loss with --trials, else accuracy where that is measured."
    )
    flags.DEFINE_string("workdir", "", "Folder for the runs; runs/sweep-<experiment name> if empty.")
    flags.DEFINE_bool("dry_run", False, "Print the commands, and start nothing.")
    parse = functools.partial(command_line.parse, own=_OWN)
    command_line.main(_run, parse, "interrupted")


if __name__ == "__main__":
    main()
