"""Trains an experiment with several values of some fields; says which are best.

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

import functools
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable

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
_OWN = ("over", "trials", "sampler", "prune", "parallel", "metric", "workdir", "dry_run", *OF_ALL_RUNS)


def searched(values: flags.FlagValues, experiment: config.Experiment) -> space.Space:
    """Checks the flags and returns the search space."""
    if bool(values.trials) == (values.sampler == "grid"):
        raise UserError("--sampler=random and tpe need --trials=20, say, and --sampler=grid runs all combinations")
    if values.strategy in ("multi_worker", "horovod"):
        why = f"--strategy={values.strategy} needs several processes, and a sweep makes each run in one"
        raise UserError(why, "use auto, default or mirrored")
    if values.parallel > 1 and values.strategy == "tpu":
        raise UserError("--parallel shares out GPUs or cores, and a TPU is used as a whole", "leave it out")
    if values.metric:
        schedule.better(values.metric, "--metric")
    field_syntax.check_local("--workdir", values.workdir)
    runtime_options.from_flags(values)
    fields = space.parse(values.over)
    if not values.trials:
        space.grid(fields)
    space.check(fields, experiment)
    given = config.flat(values.config)
    for name in fields:
        if f"config.{name}" in values and values[f"config.{name}"].present:
            raise UserError(f"--config.{name}={given[f'config.{name}']} and --over both say what {name} is", "give one")
        if name in results.OF_LOSS and (values.trials or values.prune) and not values.metric:
            raise UserError(f"--over changes {name}, so losses cannot be compared", "give --metric=accuracy, say")
    return fields


def command(values: flags.FlagValues, path: pathlib.Path) -> Callable[[space.Values], trial.Trial]:
    """Returns the function that makes the run with some values."""
    common = trial.config_flags(values, {})
    # The GPUs of a run side by side with others are those that it is shown.
    handed_on = [name for name in OF_ALL_RUNS if values[name].present and (values.parallel == 1 or name != "devices")]
    if values.parallel > 1 and values.devices == "none":
        handed_on.append("devices")
    common += [f"--{name}={values[name].value}" for name in handed_on]

    def made(chosen: space.Values) -> trial.Trial:
        folder = space.folder(chosen)
        own = [*(f"--config.{name}={value}" for name, value in chosen.items()), f"--workdir={path / folder}"]
        words = (sys.executable, "-m", "tfdist.train", *common, *own, "--progress=none")
        # Its output does not go into the run's folder, which an earlier run may be in, and is renamed with it.
        return trial.Trial(space.title(chosen), values.strategy, 1, None, words, path / "logs" / folder)

    return made


def _run(argv: list[str]) -> int:
    values = flags.FLAGS
    if not values.sampler:
        values["sampler"].value = "tpe" if values.trials else "grid"
    experiment = validation.validate(values.config)
    fields = searched(values, experiment)
    if importlib.util.find_spec("optuna") is None:
        raise UserError("a sweep needs the package optuna, which is not installed", "pip install 'tfdist[sweep]'")
    from tfdist.sweep import runner

    path = pathlib.Path(os.path.expanduser(values.workdir) or os.path.join("runs", f"sweep-{experiment.name}"))
    # With --trials the metric is wanted before the first run; the loss is always measured.
    metric = values.metric or ("loss" if values.trials else "")
    search = runner.Search(fields, experiment, metric, values.trials, values.sampler, values.prune)
    gpus = trial.find_hardware(values.devices, os.environ).gpus if values.parallel > 1 else ()
    where = runner.places(values.parallel, gpus, sorted(os.sched_getaffinity(0)))
    make = command(values, path)
    if values.dry_run:
        if values.trials:
            raise UserError("--dry_run lists combinations, and --trials samples values by results", "leave one out")
        print("\n".join(f"# {shown(t.name)}\n{t.shell()}" for t in map(make, space.grid(fields))))
        return 0
    command_line.clean_up_when_ended()
    return runner.Sweep(f"{experiment.name} over {', '.join(fields)}", search, make, path, where).run()


def main() -> None:
    runtime_options.define_flags(OF_ALL_RUNS)
    over = "Fields with values or ranges: optimizer.learning_rate=log:1e-4:1e-1; optimizer.weight_decay=uniform:0:0.1; "
    flags.DEFINE_string("over", "", f"{over}train.batch_size=32,64.")
    flags.DEFINE_integer("trials", 0, "Number of runs whose values are sampled; 0: all combinations.", lower_bound=0)
    sampler = "How values are chosen; grid unless --trials is given, and tpe, Optuna's default, with it."
    flags.DEFINE_enum("sampler", None, ["grid", "random", "tpe"], sampler)
    flags.DEFINE_bool("prune", False, "Stop a run whose validation metric is worse than the others' median.")
    flags.DEFINE_integer("parallel", 1, "Runs side by side, each on GPUs or cores of its own.", lower_bound=1)
    metric = "By which runs are compared; empty: the loss with --trials, else accuracy where that is measured."
    flags.DEFINE_string("metric", "", metric)
    flags.DEFINE_string("workdir", "", "Folder for the runs; runs/sweep-<experiment name> if empty.")
    flags.DEFINE_bool("dry_run", False, "Print the commands, and start nothing.")
    parse = functools.partial(command_line.parse, own=_OWN)
    command_line.main(_run, parse, "interrupted")


if __name__ == "__main__":
    main()
