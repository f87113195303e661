"""Says what this machine has, which strategy that means, and what is wrong.

`python -m tfdist.doctor` takes the flags of `tfdist.train` that matter to that,
a `--workdir` to examine the checkpoints there, and other hosts to ask
(`--peers` here, `--listen` there). It says how to fix what is wrong, changes
nothing, and what does not answer is a finding and no reason to wait.

Exit codes: 0 nothing fails (warnings may stand); 2 something does, or the flags
are wrong; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

from absl import flags

from tfdist import config
from tfdist.cluster import addresses
from tfdist.cluster.discovery import Cluster
from tfdist.config import buckets, cpu_kernels, runtime_options, validation
from tfdist.config.commands import command_line
from tfdist.config.messages import aside
from tfdist.distributed import gpus, tpu_host
from tfdist.doctor import (
    checkpoints,
    dataset,
    disk,
    display,
    gpu_software,
    machine,
    network,
    packages,
    peer_query,
    tensorflow_probe,
    workers,
)
from tfdist.doctor.check import FAIL, Check, Task, run, worst
from tfdist.errors import UserError

T = TypeVar("T")
TIME_LIMIT_S = 10.0
DRIVER_S = 5.0
_LEFT_S = 1.0
"""For the start of Python and for printing."""
_START_S = 5.0
"""How long the doctor of a peer may start after this one, where the same command runs on all hosts."""
_OF_TRAIN = ("strategy", "devices", "virtual_devices", "tpu", "insecure")


@dataclasses.dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What to examine."""

    experiment: config.Experiment
    where: runtime_options.PlacementOptions
    workdir: str = ""
    """A run folder, which need not exist; empty for the machine in general."""
    peers: tuple[str, ...] = ()
    """`host:port` of doctors on other hosts, to ask."""
    listen: addresses.Address | None = None
    """Host and port at which to answer doctors of other hosts."""
    master_port: int | None = None
    """Where a launcher is to meet, if somebody says so."""
    time_limit: float = TIME_LIMIT_S

    @property
    def folder(self) -> pathlib.Path:
        """The run folder, or the one that the experiment would get."""
        if self.bucket:
            return buckets.copy_of(self.bucket)
        return pathlib.Path(self.workdir or os.path.join("runs", self.experiment.name))

    @property
    def bucket(self) -> str:
        """The URL of a run folder in a bucket, or nothing."""
        return self.workdir if buckets.is_url(self.workdir) else ""


class _Begun(NamedTuple):
    """What several checks need, and takes its time: it is under way while they wait for it."""

    survey: Future[gpus.Survey]
    answer: Future[tensorflow_probe.Answer]
    place: Future[workers.Place]
    findings: Future[list[checkpoints.Finding]]


def examine(options: DoctorOptions, environ: Mapping[str, str]) -> display.Report:
    """Makes all checks at once; waits for none beyond the time limit."""
    limit = options.time_limit
    seconds = max(limit - _LEFT_S, limit / 2)
    until = time.monotonic() + seconds
    here, versions = machine.look(machine.groups()), packages.versions()
    begun = _begin(options, environ, seconds)
    checks = run(_tasks(options, environ, here, versions, begun), until)
    survey, answer = _value(begun.survey), _value(begun.answer)
    return display.Report(
        workdir=options.workdir,
        versions=versions,
        machine=here,
        tpu=tpu_host.hint(environ),
        survey=survey,
        answer=answer,
        names=tensorflow_probe.names(answer, survey, environ) if survey and answer else {},
        place=_value(begun.place),
        checks=checks,
        findings=_value(begun.findings),
    )


def _begin(options: DoctorOptions, environ: Mapping[str, str], seconds: float) -> _Begun:
    """Begins what several checks need; `seconds` are there for all of it."""
    survey = _later(lambda: gpus.survey(min(DRIVER_S, 0.6 * seconds)))
    return _Begun(
        survey=survey,
        answer=_later(lambda: tensorflow_probe.ask(environ, 0.9 * seconds)),
        place=_later(lambda: workers.find(options.where, survey.result(), environ, several=bool(options.peers))),
        findings=_later(lambda: _findings(options)),
    )


def _findings(options: DoctorOptions) -> list[checkpoints.Finding]:
    if options.bucket:
        return checkpoints.of_bucket(options.bucket)
    return checkpoints.examine(options.folder / "checkpoints") if options.workdir else []


def _tasks(
    options: DoctorOptions,
    environ: Mapping[str, str],
    here: machine.MachineFacts,
    versions: dict[str, str],
    begun: _Begun,
) -> list[Task]:
    """Returns all checks, to be made at once."""
    folder, place = options.folder, begun.place
    newest = checkpoints.newest_size(folder / "checkpoints") if options.workdir else 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    secret = environ.get("TFDIST_SECRET", "")
    patience = _START_S if options.listen else 0.0

    def needs_horovod() -> bool:
        choice = place.result().choice
        return choice is not None and choice.name == "horovod"

    def seen() -> list[Check]:
        return tensorflow_probe.tensorflow(begun.answer.result(), begun.survey.result(), environ)

    def has_code() -> list[Check]:
        there = gpu_software.usable(begun.survey.result(), environ)
        built_for = begun.answer.result().capabilities
        return gpu_software.code(built_for, there, gpu_software.capabilities(DRIVER_S) if built_for else {})

    tasks = [
        Task(
            "driver", lambda: tensorflow_probe.driver(begun.survey.result()), "nvidia-smi hangs in the driver: reboot"
        ),
        Task("tensorflow", seen),
        Task("gpu code", has_code),
        Task("packages", packages.conflicts),
        Task("keras", lambda: packages.backend(environ)),
        Task("horovod", lambda: packages.horovod(needs_horovod())),
        Task("tpu", lambda: packages.tpu(environ)),
        Task("workers", lambda: place.result().checks),
        Task("ports", lambda: _ports(options, place.result().cluster)),
        *(Task(f"peer {p}", partial(network.peer, p, versions, secret, patience)) for p in options.peers),
        Task("cores", lambda: machine.cores(here)),
        Task("cpu", lambda: machine.kernels(cpu_kernels.instruction_sets(), environ)),
        Task("memory", lambda: machine.memory(here)),
        Task("shared memory", machine.shared_memory),
        Task("open files", lambda: machine.open_files(soft, hard, place.result().cluster.size)),
        Task("disk", lambda: disk.room(folder, newest, options.experiment.checkpoint.keep), "mount that disk anew"),
        Task("write speed", lambda: disk.speed(folder), "put --workdir on another disk"),
        Task("data set", lambda: dataset.check(options.experiment.data, environ)),
    ]
    if options.bucket:
        tasks.append(Task("bucket", lambda: disk.bucket(options.bucket), "look for what stops requests on their way"))
    if options.workdir:
        kept = f"{options.workdir.rstrip('/')}/checkpoints"
        verified = lambda: checkpoints.checks(kept, begun.findings.result())
        tasks.append(Task("checkpoints", verified, "read all of them with --time_limit=600"))
        whole = lambda: checkpoints.run_files(options.workdir, begun.findings.result())
        tasks.append(Task("run folder", whole, "read all of it with --time_limit=600"))
    return tasks


def _ports(options: DoctorOptions, around: Cluster) -> list[Check]:
    """Checks the ports that a run would open here, but for the one at which this doctor answers others."""
    answering = options.listen.port if options.listen else None
    needed = bool(options.master_port) or around.size > 1
    own = network.own_ports(around, options.master_port)
    return [check for host, port in own if port != answering for check in network.port_here(host, port, needed)]


def _later(work: Callable[[], T]) -> Future[T]:
    """Begins something that several checks need. Not in a pool, whose threads would be waited for at exit."""
    future: Future[T] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # belongs to those who ask for the result
            future.set_exception(error)

    threading.Thread(target=do, daemon=True).start()
    return future


def _value(future: Future[T]) -> T | None:
    """Returns what has come in time; None for what has not, or has failed."""
    return future.result() if future.done() and not future.exception() else None


def _options() -> DoctorOptions:
    """Reads the flags.

    Raises:
      UserError: one makes no sense.
    """
    values: Any = flags.FLAGS
    if values["listen_seconds"].present and not values.listen:
        raise UserError(f"--listen_seconds={values.listen_seconds:g} without --listen", "give the port to answer at")
    for name in ("listen_seconds", "time_limit"):
        if not 0 < values[name].value < 1e6:
            raise UserError(f"--{name} must be a positive number of seconds, got {values[name].value:g}")
    peers = tuple(" ".join(p.split()) for p in values.peers)
    for peer in peers:
        addresses.split(peer, "--peers")
    listen = None
    if values.listen:
        alone = values.listen.isdigit()
        port = addresses.checked_port(values.listen, "--listen") if alone else 0
        listen = addresses.Address(network.ALL, port) if alone else addresses.split(values.listen, "--listen")
    buckets.check("--workdir", values.workdir)
    if values.master_port is not None:
        addresses.checked_port(str(values.master_port), "--master_port")
    return DoctorOptions(
        experiment=validation.validate(values.config),
        where=runtime_options.from_flags(values),
        workdir=os.path.expanduser(values.workdir),
        peers=peers,
        listen=listen,
        master_port=values.master_port,
        time_limit=values.time_limit,
    )


def _show(report: display.Report, environ: Mapping[str, str]) -> None:
    if flags.FLAGS.json:
        print(json.dumps(display.as_json(report, environ), indent=2), flush=True)
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    show = partial(console.print, soft_wrap=True)  # the lines are as long as they are to be
    for colour, line in display.lines(report, console.width if console.is_terminal else 0):
        # Only the first word has the colour: long coloured lines are hard to read.
        word, space, rest = line.partition(" ")
        show(word, style=None if console.no_color else colour or None, end="")
        show(space + rest)
    show("\nFor a bug report:", "```", *display.bug_report(report, environ), "```", sep="\n")


def _run(argv: list[str]) -> int:
    del argv
    begun, options, environ = time.monotonic(), _options(), dict(os.environ)
    with contextlib.ExitStack() as stack:
        if options.listen:
            try:
                listener = peer_query.PeerListener(
                    *options.listen, packages.versions(), environ.get("TFDIST_SECRET", "")
                )
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                raise UserError(
                    f"--listen={flags.FLAGS.listen} cannot be used ({reason})", "choose a free port on this machine"
                ) from None
            stack.callback(listener.close)
        report = examine(options, environ)
        _show(report, environ)
        if options.listen:
            _wait(begun + flags.FLAGS.listen_seconds)
    return 2 if worst(report.checks) == FAIL else 0


def _wait(until: float) -> None:
    """Gives the doctors of other hosts time to ask."""
    left = max(0.0, until - time.monotonic())
    aside.info(f"answering other doctors at {flags.FLAGS.listen} for {left:.0f} s more; Ctrl-C ends it")
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(left)


def _define_flags() -> None:
    runtime_options.define_flags()
    values: Any = flags.FLAGS
    for name in runtime_options.HELP:
        if name not in _OF_TRAIN:  # what would change nothing here is refused
            delattr(values, name)
    flags.DEFINE_string("workdir", "", "Folder of a run to examine, such as runs/digits; it need not exist yet.")
    flags.DEFINE_bool("json", False, "Print the findings as JSON.")
    flags.DEFINE_list("peers", [], "Ask the doctors of other hosts: host:port,... (start them with --listen).")
    flags.DEFINE_string("listen", "", "Answer the doctors of other hosts at this port, or host:port, of this machine.")
    flags.DEFINE_float("listen_seconds", 60.0, "Seconds for which --listen answers.")
    flags.DEFINE_integer("master_port", None, "Port where tfdist.launch is to meet; 29500 if nothing else tells.")
    flags.DEFINE_float("time_limit", TIME_LIMIT_S, "Seconds for all checks; what takes longer is a warning.")


def main() -> None:
    """Runs `python -m tfdist.doctor`."""
    _define_flags()
    command_line.main(_run, command_line.parse, "interrupted, nothing was changed")


if __name__ == "__main__":
    main()
