"""Who the workers are, which strategy follows from it, and the ports that a run would open here. No TensorFlow."""

import dataclasses
import errno
from collections.abc import Callable, Mapping

from tfdist.cluster import discovery, env_vars, wire
from tfdist.cluster.addresses import Address, join, split
from tfdist.cluster.discovery import ALONE, Cluster
from tfdist.config.runtime_options import STRATEGIES, PlacementOptions
from tfdist.distributed import connect, gpus, tpu_host
from tfdist.distributed.connect import StrategyChoice
from tfdist.doctor.check import Finding, fail, ok, refused, warn
from tfdist.errors import UserError

ALL = "0.0.0.0"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """This process among the workers, and what it would train with."""

    cluster: Cluster
    choice: StrategyChoice | None  # None where a run would be refused
    others: Mapping[str, str]  # the strategies that are not chosen, each with the reason
    findings: list[Finding]


def find(options: PlacementOptions, survey: gpus.Survey, environ: Mapping[str, str]) -> Place:
    """Applies the rules of `tfdist.train` (see `connect.locate`), and goes on where those stop."""
    try:
        workers = discovery.find(environ)
        findings = [ok(_describe(workers), "workers")]
    except UserError as error:
        workers, findings = ALONE, [refused(error, "workers")]
    refusals = [c for c in findings if c.status == "fail"]
    findings += _batch_script(workers, environ)
    try:
        devices, listed = ("none", gpus.Survey()) if options.uses_cpu else (options.devices, survey)
        selection = gpus.select(devices, listed, environ)
    except UserError as error:
        selection = gpus.Selection((), None)
        refusals.append(refused(error, "strategy"))
        findings.append(refusals[-1])
    if workers.source != discovery.LAUNCH:  # which has divided them
        selection = gpus.share(selection, workers.local_rank, workers.local_size)
    if refusals:
        return Place(workers, None, {}, findings)
    choose = lambda name: connect.choose(dataclasses.replace(options, strategy=name), selection, workers, environ)
    choice = None
    try:
        choice = choose(options.strategy)
        findings.append(ok(f"{choice.name}, because {choice.reason}", "strategy"))
        if choice.name == "multi_worker":
            discovery.check_secret(workers, options.insecure)
    except UserError as error:
        findings.append(refused(error, "secret" if choice else "strategy"))
    if choice and choice.name == "multi_worker" and workers.size > 1:
        # TensorFlow's server cannot be bound to an address or asked for a password: this is no matter of settings.
        what = (
            "a worker's gRPC port listens on all interfaces without authentication: "
            "who reaches it reads and writes files of this user"
        )
        fix = "keep the workers in a private network, or firewall them from all but each other"
        findings.append(warn(what, fix, "open ports"))
    others = _others(choice.name if choice else "", options.strategy, not workers.source, choose, environ)
    return Place(workers, choice, others, findings)


def _describe(workers: Cluster) -> str:
    if not workers.source:
        return "this process is alone: no launcher has set variables here"
    text = f"this is worker {workers.rank} of {workers.size} by {workers.source}"
    if workers.size == 1:
        return text
    here = f", {workers.local_rank + 1} of {workers.local_size} on this host" if workers.local_size > 1 else ""
    if workers.source == discovery.HOROVODRUN:
        return text + here
    everybody = f"; in order of rank: {', '.join(workers.addresses)}" if workers.addresses else ""
    return f"{text}{here}; they meet at {workers.master or 'an address that nothing tells'}{everybody}"


def _batch_script(workers: Cluster, environ: Mapping[str, str]) -> list[Finding]:
    """Warns of Slurm's batch script, which is easily taken for a start of workers."""
    nodes, tasks = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES"), environ.get("SLURM_NTASKS")
    if not environ.get("SLURM_JOB_ID") or workers.size > 1 or {nodes, tasks} <= {None, "", "1"}:
        return []
    size = f"{nodes or '?'} nodes and {tasks or '?'} tasks"
    what = f"Slurm job {environ['SLURM_JOB_ID']} has {size}, and this process is none of them but the batch script"
    return [warn(what, "start it with srun: srun python -m tfdist.train", "surroundings")]


def _others(
    chosen: str, asked: str, alone: bool, choose: Callable[[str], StrategyChoice], environ: Mapping[str, str]
) -> dict[str, str]:
    """Returns, by name, why each other strategy is not chosen; `alone`: no launcher has started this process."""
    reasons, unstarted = {}, dict[str, str]()
    if alone:
        several = "this process is the only worker: start several with tfdist.launch, srun, mpirun or TF_CONFIG"
        unstarted = {"multi_worker": several, "horovod": "horovodrun has not started this process"}
    for name in STRATEGIES:
        if name in (asked, chosen):
            continue
        try:
            instead = choose(name)
            picked = f"it would pick {instead.name}, because {instead.reason}"
            reasons[name] = picked if name == "auto" else unstarted.get(name, "it would run")
        except UserError as error:
            reasons[name] = str(error)
        if name == "tpu" and not tpu_host.hint(environ):
            reasons[name] = "nothing says that there is a TPU"
    return reasons


def own_ports(workers: Cluster, master_port: int | None) -> list[Address]:
    """Returns the addresses that a run would open here before TensorFlow starts; a launcher meets at `master_port`."""
    if master_port:
        return [Address(ALL, master_port)]
    if workers.addresses:  # TensorFlow then takes the same port, on all interfaces
        host, port = split(workers.addresses[workers.rank])
        return [Address(host, port), Address(ALL, port)]
    if workers.source in (discovery.LAUNCH, discovery.TORCHRUN, discovery.HOROVODRUN):
        return []  # the launcher holds it already
    if workers.size > 1:
        return [split(workers.master)] if workers.master and workers.rank == 0 else []
    return [Address(ALL, env_vars.PORT)]  # where launchers meet unless told otherwise


def port_here(host: str, port: int, needed: bool = True) -> list[Finding]:
    """Checks whether a port of this host is free; `needed` is one that a run as it is described would open."""
    name, at = f"port {port}", "it" if host == ALL else join(host, port)
    try:
        wire.listen(host, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            if not needed:
                what = f"{at} is taken; tfdist.launch would meet there"
                return [warn(what, "choose another with --master_port", name)]
            return [fail(f"{at} is taken", "end the program that has it (ss -tlnp), or choose another port", name)]
        why, fix = (error.strerror or str(error)).lower(), "choose an address of this host, and a port from 1024 on"
        return [fail(f"{at} cannot be used ({why})", fix, name)]
    return [ok(f"{at} is free" if host != ALL else "free on all interfaces", name)]
