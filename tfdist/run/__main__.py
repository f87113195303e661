"""Trains any Keras script, unmodified, on all devices: `tfdist run [flags] SCRIPT|-m MODULE [arguments of the script]`.

The script's `model.fit`, `evaluate`, `predict` and their relatives are carried out by tfdist, with the result of one
device. Exit codes: the script's own; 2 the input or the environment is wrong; 143 stopped by a signal, state saved.
"""

import dataclasses
import glob
import os
import sys
from collections.abc import Sequence

from absl import flags

from tfdist.config import field_syntax, runtime_options
from tfdist.config.commands import command_line, help_page, standard_streams
from tfdist.config.runtime_options import PlacementOptions, ResumeOptions
from tfdist.errors import UserError
from tfdist.launch import plan as launch_plan
from tfdist.run import Program

_USAGE = "write tfdist run [flags] SCRIPT [arguments], or -m MODULE [arguments]"


def _define_flags() -> None:
    names = [name for part in (PlacementOptions, ResumeOptions) for name in runtime_options.names(part)]
    runtime_options.define_flags([*(name for name in names if name != "requeue"), "check_agreement"])
    flags.FLAGS["workdir"].help = "Folder where each fit keeps its checkpoints; empty: nothing is kept."
    flags.FLAGS["resume"].help = "Continue with the calls of fit in --workdir, or never: set them aside."
    flags.DEFINE_integer("virtual_replicas", 0, "Slices of every batch; the same bits on any number of devices.")
    flags.DEFINE_enum("sync_batch_norm", "on", ("on", "off"), "BatchNormalization over all replicas, or each alone.")
    flags.DEFINE_enum("show", "chief", ("chief", "all"), "Whose standard output is shown.")
    flags.DEFINE_string("checkpoint_every", "60 seconds", "Time between checkpoints of a fit, such as 5 minutes.")
    for name, (_, text) in launch_plan.OPTIONS.items():
        flags.DEFINE_string(name, None, text)


def split(argv: Sequence[str]) -> tuple[list[str], Program | None]:
    """Returns the command's own flags, and the program behind them with all that follows it."""
    i = 0
    while i < len(argv):
        argument = argv[i]
        if argument == "-m":
            if i + 1 == len(argv):
                raise UserError("-m names no module", _USAGE)
            return list(argv[:i]), Program(argv[i + 1], True, tuple(argv[i + 2 :]))
        if argument == "--":
            argv = [*argv[:i], *argv[i + 1 :]]
            continue
        if not argument.startswith("-"):
            return list(argv[:i]), Program(argument, False, tuple(argv[i + 1 :]))
        name = argument.lstrip("-")
        takes_next = "=" not in name and name in flags.FLAGS and not flags.FLAGS[name].boolean
        i += 1 + takes_next
    return list(argv), None


def _parse(argv: list[str]) -> list[str]:
    """Parses what stands before the script, which may have the same flags itself."""
    own, program = split(argv[1:])
    if program is None and not help_page.is_asked(own):
        command_line.parse_own([argv[0], *own])
        raise UserError("there is no script to run", _USAGE)
    command_line.parse_own([argv[0], *own], tuple(runtime_options.HELP))
    assert program is not None
    if not program.is_module and not os.path.isfile(program.name):
        scripts = tuple(glob.glob(os.path.join(glob.escape(os.path.dirname(program.name)), "*.py")))
        near = field_syntax.suggest(program.name, scripts) if scripts else ""
        raise UserError(f"there is no script {program.name!r}{near}", "give the path of a file, or -m MODULE")
    return [argv[0], *program.command]


def _run(argv: Sequence[str]) -> int:
    program = split(argv[1:])[1]
    assert program is not None
    values = flags.FLAGS
    launch: dict[str, str] = {
        name: str(values[name].value) for name in launch_plan.OPTIONS if values[name].value is not None
    }
    environment = runtime_options.from_flags(values)
    if not environment.workdir:
        for name in ("checkpoint_every", "resume", "resume_changed"):
            if values[name].present:
                raise UserError(f"--{name} is about what --workdir keeps", "give --workdir")
        if ":" in launch.get("nnodes", ""):
            what = f"--nnodes={launch['nnodes']} starts the script again whenever a machine comes or leaves"
            raise UserError(what, "give --workdir to continue, or one number of machines")
    if launch:
        return _launched(launch, environment, program)
    if "PYTHONHASHSEED" not in os.environ:
        # Drawn anew in each process, it orders the sets of text from which scripts make vocabularies: each worker would
        # have its own, and a run that goes on after a kill another.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONHASHSEED": "0"})
    if values.virtual_replicas and environment.threads is None:
        environment = dataclasses.replace(environment, threads=1)  # their number decides about the last bits
    with standard_streams.held_back():
        from tfdist.run import script

    return script.run(program, environment, values)


def _launched(launch: dict[str, str], placement: PlacementOptions, program: Program) -> int:
    """Starts the workers, each of which is this command without the launcher's flags."""
    from tfdist.launch import coordinator
    from tfdist.launch.worker_process import Events, Screen

    if placement.strategy not in ("auto", "multi_worker"):
        what = f"--strategy={placement.strategy} is not for several workers of one launcher"
        instead = "start it with horovodrun" if placement.strategy == "horovod" else "leave out --nproc_per_node"
        raise UserError(what, f"{instead}, or use --strategy=multi_worker")
    given = [f"--{name}={value}" for name, value in launch.items()] + ["--insecure"] * placement.insecure
    given.append(f"--start_timeout={placement.start_timeout:g}")
    flag = flags.FLAGS
    kept = [f for f in flag.get_flags_for_module(sys.argv[0]) if f.name not in (*launch_plan.OPTIONS, "insecure")]
    shared = [flag[name] for name in runtime_options.HELP if name in flag and name != "insecure"]
    own = [f.serialize() for f in (*shared, *kept) if f.present]
    options, rest = launch_plan.parse([*given, "--", "-m", "tfdist.run", *own, *program.command])
    plan = launch_plan.make_plan(options, rest, os.environ)
    with Events() as events:
        return coordinator.run(plan, events, Screen())


def main() -> None:
    _define_flags()
    command_line.main(_run, _parse, "interrupted")


if __name__ == "__main__":
    main()
