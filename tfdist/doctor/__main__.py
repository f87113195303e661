"""Says what this machine has, which strategy that means, and what is wrong.

`python -m tfdist.doctor` takes the flags of `tfdist.train` that matter to that,
and a `--workdir` to examine the checkpoints there. It says how to fix what is
wrong, and changes nothing. What does not answer in time is reported.

Exit codes: 0 nothing fails (warnings may stand); 2 something does, or the flags
are wrong; 130 interrupted.
"""

import json
import os
import pathlib
import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from absl import flags

from tfdist.cluster import addresses
from tfdist.config import buckets, runtime_options, validation
from tfdist.config.commands import command_line
from tfdist.distributed import gpus, tpu_host
from tfdist.distributed.child_process import later
from tfdist.doctor import checkpoints, display, machine, tensorflow_probe, workers
from tfdist.doctor.check import FAIL, Check, Finding, run, worst
from tfdist.errors import UserError

DRIVER_S = 5.0
_LEFT_S = 1.0  # for the start of Python and for printing
_OF_TRAIN = ("strategy", "devices", "virtual_devices", "tpu", "insecure")


def examine(values: flags.FlagValues, environ: Mapping[str, str]) -> display.Report:
    """Makes all checks at once, and waits for none beyond the time limit; `UserError` where a flag makes no sense."""
    limit, master_port = values.time_limit, values.master_port
    if not 0 < limit < 1e6:
        raise UserError(f"--time_limit must be a positive number of seconds, got {limit:g}")
    buckets.check("--workdir", values.workdir)
    if master_port is not None:
        addresses.checked_port(str(master_port), "--master_port")
    experiment, where = validation.validate(values.config), runtime_options.from_flags(values)
    seconds = max(limit - _LEFT_S, limit / 2)
    until = time.monotonic() + seconds
    workdir = os.path.expanduser(values.workdir)
    folder = pathlib.Path(runtime_options.workdir(experiment, where))  # or the one that the experiment would get
    if buckets.is_url(workdir):
        folder = buckets.copy_of(workdir)
    here, versions, keep = machine.look(machine.groups()), machine.versions(), experiment.checkpoint.keep
    newest = checkpoints.newest_size(folder / "checkpoints") if workdir else 0
    kept = f"{workdir.rstrip('/')}/checkpoints"
    # Several checks need these, which take their time: they are under way while the checks wait for them.
    survey = later(lambda: gpus.survey(min(DRIVER_S, 0.6 * seconds)))
    answer = later(lambda: tensorflow_probe.ask(environ, 0.9 * seconds))
    place = later(lambda: workers.find(where, survey.result(), environ))
    saved: Future[list[checkpoints.Checkpoint]] = later(partial(checkpoints.examine, kept) if workdir else list)

    def ports() -> list[Finding]:
        around = place.result().cluster
        needed, own = bool(master_port) or around.size > 1, workers.own_ports(around, master_port)
        return [f for host, port in own for f in workers.port_here(host, port, needed)]

    checks = [
        Check("driver", lambda: tensorflow_probe.driver(survey.result()), "nvidia-smi hangs in the driver: reboot"),
        Check("tensorflow", lambda: tensorflow_probe.tensorflow(answer.result(), survey.result(), environ)),
        Check("packages", machine.conflicts),
        Check("keras", lambda: machine.backend(environ)),
        Check("horovod", lambda: machine.horovod(needed=getattr(place.result().choice, "name", "") == "horovod")),
        Check("tpu", lambda: machine.tpu(environ)),
        Check("workers", lambda: place.result().findings),
        Check("ports", ports),
        Check("cores", lambda: machine.cores(here)),
        Check("memory", lambda: machine.memory(here)),
        Check("shared memory", machine.shared_memory),
        Check("disk", lambda: machine.room(folder, newest, keep), "mount that disk anew"),
    ]
    if buckets.is_url(workdir):
        checks.append(Check("bucket", lambda: machine.bucket(workdir), "look for what stops requests on their way"))
    if workdir:
        fix = "read all of it with --time_limit=600"
        checks.append(Check("checkpoints", lambda: checkpoints.checks(kept, saved.result()), fix))
        checks.append(Check("run folder", lambda: checkpoints.run_files(workdir, saved.result()), fix))
    findings = run(checks, until)
    came: Any = (f.result() if f.done() and not f.exception() else None for f in (survey, answer, place, saved))
    return display.Report(workdir, versions, here, tpu_host.hint(environ), environ, findings, *came)


def _show(report: display.Report) -> None:
    if flags.FLAGS.json:
        print(json.dumps(display.as_json(report), indent=2), flush=True)
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    show = partial(console.print, soft_wrap=True)  # the lines are as long as they are to be
    for color, line in display.lines(report):
        # Only the first word has the color: long colored lines are hard to read.
        word, space, rest = line.partition(" ")
        show(word, style=None if console.no_color else color or None, end="")
        show(space + rest)
    show("\nFor a bug report:", "```", *display.bug_report(report), "```", sep="\n")


def _run(argv: list[str]) -> int:
    report = examine(flags.FLAGS, dict(os.environ))
    _show(report)
    return 2 if worst(report.findings) == FAIL else 0


def main() -> None:
    runtime_options.define_flags(_OF_TRAIN)
    flags.DEFINE_string("workdir", "", "Folder of a run to examine, such as runs/digits; it need not exist yet.")
    flags.DEFINE_bool("json", False, "Print the findings as JSON.")
    flags.DEFINE_integer("master_port", None, "Port where tfdist.launch is to meet; 29500 if nothing else tells.")
    flags.DEFINE_float("time_limit", 10.0, "Seconds for all checks; what takes longer is a warning.")
    command_line.main(_run, command_line.parse, "interrupted, nothing was changed")


if __name__ == "__main__":
    main()
