"""Predicts speed on N machines: `python -m tfdist.plan --link=10Gbit`.

Measures the experiment's updates on one device of this machine, and what a sum
over two workers costs it; from that and from the link it predicts updates a
second on so many machines, for `--strategy=multi_worker` on CPUs. All it says
of more than one worker is a prediction.

Exit codes: 0 done; 1 what was measured has failed; 2 the input is wrong; 130
interrupted.
"""

from __future__ import annotations

import functools
import os

from absl import flags

from tfdist.checkpoints import run_folder
from tfdist.config import cpu_kernels, field_syntax, runtime_options, validation
from tfdist.config.commands import command_line
from tfdist.errors import UserError
from tfdist.plan import quantities
from tfdist.plan.cost import NetworkLink
from tfdist.plan.report import RECORD, Request

LONGEST_S = 600.0
_OWN = (
    "nodes", "link", "latency", "nproc_per_node", "threads", "cpu_kernels", "bucket_bytes", "seconds", "workdir",
)  # fmt: skip
_FILES = {RECORD, "plan.md", "plan.png", run_folder.LOCK}


def request(values: flags.FlagValues) -> Request:
    """Returns what the flags ask for.

    Raises:
      UserError: a flag has a value that cannot be used.
    """
    if not values.link:
        raise UserError("--link is missing: give the bandwidth between the machines, such as 10Gbit")
    nodes = quantities.counts(values.nodes)
    cores, each = len(os.sched_getaffinity(0)), values.nproc_per_node
    if each < 1:
        raise UserError(f"--nproc_per_node must be a whole number of at least 1, got {each}")
    if not 0 < values.seconds <= LONGEST_S:
        raise UserError(f"--seconds must be more than 0 and at most {LONGEST_S:g}, got {values.seconds:g}")
    environment = runtime_options.Environment(
        strategy="default",
        devices="none",
        threads=max(1, cores // each) if values.threads is None else values.threads,
        cpu_kernels=values.cpu_kernels,
        bucket_bytes=values.bucket_bytes,
    )
    link = NetworkLink(quantities.bits_per_second(values.link), quantities.latency_seconds(values.latency))
    return Request(nodes, each, link, environment, values.seconds)


def _run(argv: list[str]) -> int:
    del argv
    values = flags.FLAGS
    wanted, experiment = request(values), validation.validate(values.config)
    if experiment.train.batch_size == 0:
        raise UserError("train.batch_size=auto depends on the machine: give a number to plan with")
    if experiment.train.shards:
        raise UserError(
            f"train.shards={experiment.train.shards} is not planned with, whose updates take longer and send more: "
            "set train.shards=0"
        )
    field_syntax.check_local("--workdir", values.workdir)
    path = os.path.expanduser(values.workdir) or os.path.join("runs", f"plan-{experiment.name}")
    folder = run_folder.RunFolder(path)
    folder.create()
    try:
        strange = sorted({entry.name for entry in folder.path.iterdir()} - _FILES)
        if strange:
            raise UserError(f"--workdir={path} holds no plan but {strange[0]}: choose another folder")
        cpu_kernels.ask_for(values.cpu_kernels)  # for the workers, too
        from tfdist.plan import planning

        return planning.plan(experiment, wanted, folder)
    finally:
        folder.release()


def main() -> None:
    """Entry point of `python -m tfdist.plan`."""
    d = runtime_options.Environment()
    flags.DEFINE_list("nodes", ["1", "2", "4", "8", "16", "32", "64"], "Numbers of machines to predict for.")
    flags.DEFINE_string("link", "", "Bandwidth of each machine's link, such as 10Gbit or 100Mbit.")
    flags.DEFINE_string("latency", "0.1ms", "Time that a message is under way, half of what ping tells: 0.1ms, 50us.")
    flags.DEFINE_integer("nproc_per_node", 1, "Workers on each machine, as tfdist.launch has it.")
    flags.DEFINE_integer("threads", None, "Threads per worker; this machine's cores shared among them if not given.")
    flags.DEFINE_enum("cpu_kernels", d.cpu_kernels, cpu_kernels.CHOICES, "Kernels of the CPU.")
    flags.DEFINE_integer("bucket_bytes", None, "Tensors below this size travel together, as in tfdist.train.")
    flags.DEFINE_float("seconds", 4.0, "How long to measure updates of each batch size.")
    flags.DEFINE_string("workdir", "", "Folder for the results; runs/plan-<experiment name> if empty.")
    command_line.main(_run, functools.partial(command_line.parse, own=_OWN), "interrupted")


if __name__ == "__main__":
    main()
