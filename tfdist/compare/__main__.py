"""Compares strategies: `python -m tfdist.compare --strategies=default,mirrored`.

Runs the same experiment under each, one after the other, in processes of their
own, and tells whether all end with the same weights, how fast each is against
one device, where the time goes, and which one to use on this machine. The
reference is `default` on one device; it runs first, also where it is not asked
for.

When a run ends with other weights, it and the reference are run once more for
a few updates in float64: a sum over replicas that is wrong is wrong there, too,
and rounding that has grown is not.

Exit codes: 0 all that ran end with the same; 1 one does not, or failed; 2 the
input is wrong, or nothing could be compared; 130 or 143 ended by a signal.
"""

import contextlib
import functools
import os
import pathlib
from collections.abc import Iterator

from absl import flags

from tfdist.checkpoints import folder_lock, run_folder
from tfdist.compare import runner, trial
from tfdist.config import field_syntax, runtime_options, validation
from tfdist.config.commands import command_line
from tfdist.config.messages import logger
from tfdist.errors import UserError

STRATEGIES = ("default", "mirrored", "multi_worker", "horovod", "tpu")
_OWN = ("strategies", "replicas", "workdir", "devices", "threads", "jit", "time_limit", "dry_run")


def settings(values: flags.FlagValues) -> trial.Settings:
    """Returns what the flags ask for; raises `UserError` where a value cannot be used."""
    for name in values.strategies:
        if name not in STRATEGIES:
            raise UserError(f"unknown strategy {name!r} in --strategies{field_syntax.suggest(name, STRATEGIES)}")
    for text in values.replicas:
        if not (text.isascii() and text.isdigit() and int(text) > 0):
            raise UserError(f"--replicas must be integers of at least 1, such as 2,4: got {text!r}")
    if not values.strategies:
        raise UserError("--strategies names none: give some of " + ",".join(STRATEGIES))
    if not values.time_limit > 0:
        raise UserError(f"--time_limit must be a positive number of seconds, got {values.time_limit}")
    # It refuses what cannot be.
    place = runtime_options.PlacementOptions(devices=values.devices, threads=values.threads, jit=values.jit)
    hardware = trial.find_hardware(place.devices, os.environ)
    # One thread makes a CPU replica one core, so that two of them have twice as much to compute with.
    threads = place.threads if place.threads or hardware.gpus else 1
    replicas = tuple(sorted({int(text) for text in values.replicas})) or hardware.default_replicas(threads or 1)
    strategies = tuple(dict.fromkeys(values.strategies))
    return trial.Settings(strategies, replicas, threads, place.jit, place.devices, values.time_limit, hardware)


def train_flags(values: flags.FlagValues, jit: str, changed: dict[str, str]) -> list[str]:
    """Returns flags of `tfdist.train` for the experiment that was given here, with some fields changed."""
    own = [name for name in values if name.startswith("config.checkpoint.") and values[name].present]
    if own:
        raise UserError(f"--{own[0]} is not for a comparison, whose runs save once, at their end", "leave it out")
    # Never due, and so written once, at the end: nothing interrupts what is measured, and the weights have names.
    once = {"config.checkpoint.every": "1000000000 steps", "config.checkpoint.keep": "1", "config.checkpoint.best": ""}
    return [*trial.config_flags(values, once | changed), f"--jit={jit}", "--progress=none", "--notensorboard"]


@contextlib.contextmanager
def _own_folder(path: pathlib.Path) -> Iterator[run_folder.RunFolder]:
    """Holds the folder for this comparison alone; an earlier one is renamed."""
    folder = run_folder.RunFolder(str(path))
    with contextlib.suppress(OSError):
        strange = sorted({entry.name for entry in path.iterdir()} - {folder_lock.LOCK})
        if strange and not (path / runner.RECORD).is_file():
            raise UserError(f"--workdir={path} holds no comparison but {strange[0]}", "choose another folder")
    folder.create()
    try:
        if (path / runner.RECORD).exists():
            moved = path.rename(run_folder.unused(path))
            folder.release()
            (moved / folder_lock.LOCK).unlink(missing_ok=True)
            logger.info(f"the earlier comparison in {path} is now in {moved}")
            folder.create()
        yield folder
    finally:
        folder.release()


def _run(argv: list[str]) -> int:
    values = flags.FLAGS
    wanted, experiment = settings(values), validation.validate(values.config)
    given = functools.partial(train_flags, values, wanted.jit)
    field_syntax.check_local("--workdir", values.workdir)
    path = pathlib.Path(os.path.expanduser(values.workdir) or os.path.join("runs", f"compare-{experiment.name}"))
    if values.dry_run:
        print(runner.Comparison(wanted, experiment, given, run_folder.RunFolder(str(path))).commands())
        return 0
    command_line.clean_up_when_ended()
    with _own_folder(path) as folder:
        return runner.Comparison(wanted, experiment, given, folder).run()


def main() -> None:
    d = runtime_options.PlacementOptions()
    flags.DEFINE_list("strategies", list(STRATEGIES[:4]), f"Strategies to compare, of {', '.join(STRATEGIES)}.")
    flags.DEFINE_list(
        "replicas",
        [],
        "Numbers of replicas, such as 2,4; if not given 2, 4, 8, ... up to the GPUs or cores. default always has 1, "
        "mirrored at least 2.",
    )
    flags.DEFINE_string("workdir", "", "Folder for the results; runs/compare-<experiment name> if empty.")
    flags.DEFINE_string("devices", d.devices, "GPUs to use: all, none, driver numbers such as 0,3, or idle:2.")
    flags.DEFINE_integer("threads", None, "Threads per replica; 1 on a CPU, TensorFlow's own number on GPUs.")
    flags.DEFINE_enum("jit", d.jit, runtime_options.JIT, "Compile with XLA, alike in all runs; auto: on GPUs.")
    flags.DEFINE_float("time_limit", 3600.0, "Seconds after which a run that is not over is ended.")
    flags.DEFINE_bool("dry_run", False, "Print the commands, and start nothing.")
    command_line.main(_run, functools.partial(command_line.parse, own=_OWN), "interrupted")


if __name__ == "__main__":
    main()
