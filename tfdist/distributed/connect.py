"""From flags, devices and workers to the choice of a strategy, and to a `Distribution` that has been started."""

import dataclasses
import logging
import os
import platform
import re
import sys
from collections.abc import Mapping
from concurrent import futures
from typing import TYPE_CHECKING

from tfdist.cluster import discovery, registration
from tfdist.cluster.peers import Peers
from tfdist.config import cpu_kernels, messages, packages
from tfdist.config.runtime_options import PlacementOptions, checked_keywords
from tfdist.distributed import gpus, tf_devices, tpu_host
from tfdist.distributed.distribution import Distribution, of_strategy
from tfdist.distributed.strategies import horovod, tpu
from tfdist.errors import UserError

if TYPE_CHECKING:
    import tensorflow as tf


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """The answer to "where does this run", found without TensorFlow."""

    options: PlacementOptions
    survey: gpus.Survey
    selection: gpus.Selection
    cluster: discovery.Cluster
    choice: "StrategyChoice"

    replicas = property(lambda self: self.choice.replicas * self.cluster.size)
    """Replicas of all workers, as far as known without TensorFlow."""


def locate(options: PlacementOptions) -> Placement:
    """Looks at GPUs and environment variables and chooses a strategy; takes no device. Raises UserError."""
    packages.check_backend(os.environ)
    unusable = tpu_host.unusable()
    if unusable:
        raise UserError(f"TensorFlow cannot be imported: {unusable}")
    survey = gpus.Survey() if options.uses_cpu else gpus.survey()
    workers = discovery.find(os.environ)
    selection = gpus.select("none" if options.uses_cpu else options.devices, survey, os.environ)
    if workers.source != discovery.LAUNCH:  # which has divided them
        selection = gpus.share(selection, workers.local_rank, workers.local_size)
    choice = choose(options, selection, workers, os.environ)
    if choice.name == "multi_worker":  # those of Horovod get a secret from it
        discovery.check_secret(workers, options.insecure)
    return Placement(options, survey, selection, workers, choice)


def create(placement: Placement, facts: Mapping[str, str] | None = None) -> Distribution:
    """Starts TensorFlow on the chosen devices, once all workers have met with the same `facts`; raises UserError."""
    where, name, workers = placement.options, placement.choice.name, placement.cluster
    late = "tensorflow" in sys.modules
    cpu_kernels.ask_for(where.cpu_kernels)
    kernels = cpu_kernels.in_use() if late else cpu_kernels.wanted()
    versions = {"the version of Python": platform.python_version()}
    for package in ("tfdist", "tensorflow", "keras", *(["horovod"] if name == "horovod" else [])):
        versions[f"the version of {package}"] = packages.version(package)
    facts = {"replicas per worker": str(placement.choice.replicas), **versions, **(facts or {})}
    if not placement.selection.gpus:
        facts["the CPU kernels (--cpu_kernels)"] = kernels
    met_before = workers if name == "multi_worker" else discovery.ALONE
    peers = registration.meet(met_before, facts, where.start_timeout, where.stall_timeout)
    try:
        distribution = _start(placement, facts, peers)
        cpu_kernels.check(where.cpu_kernels)
        if distribution.device_kind == "CPU":
            cpu_kernels.keep_nan()
    except Exception as error:
        # The others would wait for this worker in a constructor that nothing interrupts.
        peers.fail(str(error), 2 if isinstance(error, UserError) else 1)
        raise
    messages.chief_only(distribution.is_chief)
    if not distribution.is_chief:
        import keras

        keras.utils.disable_interactive_logging()  # what callbacks of Keras print, the chief prints
    elif late and distribution.device_kind == "CPU" and cpu_kernels.wanted() != kernels:
        messages.logger.info(
            "TensorFlow was imported before tfdist.connect() and computes with Eigen's kernels, where oneDNN's are "
            "mostly faster on this CPU: connect first, or set TF_ENABLE_ONEDNN_OPTS=1 before Python starts"
        )
    return distribution


_OF_OWN_FUNCTIONS = re.compile(
    r"<function ((training|evaluation|prediction|own_step)_call|Step|ReplicaSyncCheck)\..*tf\.function retracing|"
    r"Using \w+ eagerly has significant overhead"
)


def _own_traces(record: logging.LogRecord) -> bool:
    """Leaves out what TensorFlow says of tfdist's own functions: each training traces new ones, and its check none."""
    return not _OF_OWN_FUNCTIONS.search(record.getMessage())


def _quiet_tensorflow() -> None:
    """Keeps TensorFlow from telling of each strategy and each sum, which a notebook shows twice."""
    import tensorflow as tf

    log = tf.get_logger()  # which chooses a level when it is first asked for
    if _own_traces not in log.filters:
        log.addFilter(_own_traces)
    if log.level in (logging.NOTSET, logging.INFO):
        log.setLevel(logging.WARNING)


def _start(placement: Placement, facts: Mapping[str, str], peers: Peers) -> Distribution:
    """Starts the strategy once the workers have met; those of Horovod meet here, since it knows where."""
    where = placement.options
    tpu_host.keep_from_asking(os.environ)
    refused = _tried(placement) if placement.choice.name == "tpu" else None
    if placement.choice.name == "tpu" and not refused:
        tpu_host.prepare(os.environ)
    devices = tf_devices.prepare(where, placement.survey, placement.selection, placement.cluster.local_size)
    _quiet_tensorflow()
    # XLA loses on the CPU: forward and backward at 0.5 to 1.0 of the plain loop (benchmarks/README.md).
    jit = "off" if where.jit == "auto" and devices[0].startswith("CPU") else where.jit
    reason = placement.choice.reason
    match placement.choice.name:
        case "default":
            return default(reason, devices[0], jit)
        case "mirrored":
            return mirrored(devices, reason, jit)
        case "multi_worker":
            from tfdist.distributed.strategies import multi_worker

            return multi_worker.create(devices, reason, peers, jit, where.communication, where.bucket_bytes)
        case "tpu":
            return _tpu(placement, devices, jit, refused)
        case _:
            hvd, hosts = horovod.start(where.start_timeout)
            peers = registration.meet(horovod.cluster(hvd, hosts), facts, where.start_timeout, where.stall_timeout)
            return horovod.create(hvd, devices[0], reason, peers, jit)


def _tried(placement: Placement) -> UserError | None:
    """Tries elsewhere to start a TPU of which no device is seen here; returns why `auto` has to go on without.

    Before this process imports TensorFlow, which takes seconds. Raises UserError if somebody has asked for the TPU.
    """
    where = placement.options
    if where.tpu != "local" or tpu_host.has_device():
        return None
    environ = dict(os.environ)
    tpu_host.prepare(environ)
    limit = where.start_timeout if tpu_host.hint(environ) else tpu.WITHOUT_A_SIGN_S
    try:
        tpu.try_elsewhere(where.tpu, min(limit, where.start_timeout) + tpu.IMPORT_S, environ)
    except UserError as error:
        if where.strategy != "auto":
            raise
        return error
    return None


def _tpu(placement: Placement, names: tuple[str, ...], jit: str, refused: UserError | None) -> Distribution:
    """Starts a TPU, unless it is known to be `refused`; under `auto`, what there is besides where it does not start."""
    where = placement.options
    sign = where.tpu != "local" or tpu_host.hint(os.environ)
    limit = where.start_timeout if sign else min(where.start_timeout, tpu.WITHOUT_A_SIGN_S)
    try:
        if refused:
            raise refused
        return tpu.create(where.tpu, placement.choice.reason, limit)
    except UserError as error:
        if where.strategy != "auto" or where.tpu != "local":
            raise
        messages.logger.info(f"WARNING: {error}")
        here = f"{len(names)} {names[0].partition(':')[0]}{'s' * (len(names) > 1)} here"
        reason = f"{here}; not tpu, though {placement.choice.reason}: it has not started"
        return mirrored(names, reason, jit) if len(names) > 1 else default(reason, names[0], jit)


_CONNECTED: dict[tuple[PlacementOptions, str, discovery.Cluster], Distribution] = {}
"""Results of `connect` by its arguments."""
_IN_ORDER: list[Distribution] = []  # the same, the latest one last


@checked_keywords
def connect(
    strategy: str = "auto",
    *,
    devices: str = "all",
    virtual_devices: int | None = None,
    tpu: str = "local",
    threads: int | None = None,
    cpu_kernels: str = "auto",
    jit: str = "auto",
    communication: str = "auto",
    bucket_bytes: int | None = None,
    insecure: bool = False,
    start_timeout: float = 120.0,
    stall_timeout: float = 600.0,
) -> Distribution:
    """Chooses and starts a strategy by the same rules as the command line, whose flags the arguments are.

    Must come before TensorFlow has done anything else in the process when it splits the CPU or sets threads. Asked
    again for the same, as a cell of a notebook that runs twice does, it returns what it returned before.

    Args:
      strategy: `auto`, `default`, `mirrored`, `multi_worker`, `tpu` or `horovod`.
      devices: GPUs: `all`, `none`, numbers as the driver counts, such as `0,3`, or `idle:2` for the two least used.
      virtual_devices: number of devices into which the CPU is split.
      tpu: `local`, or the name of a TPU in the Cloud.
      threads: threads per device for TensorFlow.
      cpu_kernels: what TensorFlow computes with on a CPU: `auto`, `onednn` or `eigen`.
      jit: compilation of forward and backward pass by XLA: `on`, `off`, or `auto` for on GPUs.
      communication: how `multi_worker` sums: `auto`, `ring` or `nccl`.
      bucket_bytes: bytes of small tensors that `multi_worker` sums together.
      insecure: go on without a secret where other hosts can reach this one.
      start_timeout: seconds to wait for other workers to start.
      stall_timeout: seconds without progress after which a worker is taken for lost.

    Returns:
      A `Distribution`; create the model under its `scope()`.

    Raises:
      UserError: the strategy or an option cannot be used here.
    """
    placement = locate(PlacementOptions(**locals()))
    asked = placement.options, placement.choice.name, placement.cluster
    if asked not in _CONNECTED:
        _CONNECTED[asked] = create(placement)
        messages.logger.info(_CONNECTED[asked].announcement())
    latest = _CONNECTED[asked]
    _IN_ORDER[:] = [*(one for one in _IN_ORDER if one is not latest), latest]
    return latest


def latest() -> Distribution | None:
    """Returns what was connected last, if anything."""
    return _IN_ORDER[-1] if _IN_ORDER else None


def current(strategy: "tf.distribute.Strategy") -> Distribution:
    """Returns the distribution of `fit`, `evaluate` and `predict` where none is given.

    It is the connected one under whose scope the model was created; of a model that was created under none, the latest
    one, which then refuses it: training on one device of the many that were connected would be a surprise.
    """
    # The others have TensorFlow's default strategy, as a model has that was created under none.
    own = [one for one in _IN_ORDER if one.strategy is strategy and one.name not in ("default", "horovod")]
    connected = own or _IN_ORDER
    return connected[-1] if connected else default("tfdist.connect() was not called")


@dataclasses.dataclass(frozen=True, slots=True)
class StrategyChoice:
    """A strategy by name, and the reason in words for a person."""

    name: str
    reason: str
    replicas: int  # replicas in this process, as far as known without TensorFlow


def choose(
    options: PlacementOptions, selection: gpus.Selection, cluster: discovery.Cluster, environ: Mapping[str, str]
) -> StrategyChoice:
    """Applies the rules of `--strategy=auto`, or checks an explicit choice; raises UserError if it cannot run here."""
    virtual = options.virtual_devices
    devices = virtual or max(1, len(selection.gpus))
    what = f"{virtual} virtual CPU devices" if virtual else f"{len(selection.gpus)} GPUs" if selection.gpus else "1 CPU"
    name, reason = options.strategy, "asked for"
    if name == "auto":
        name, reason = _automatic(devices, what, options, cluster, environ)
    if name == "tpu" and cluster.size > 1:
        raise UserError(
            f"--strategy=tpu drives all cores from one process and there are {cluster.size} workers ({cluster.source})",
            "start one process",
        )
    if name == "tpu" and (problem := tpu_host.problem()):
        raise UserError(f"--strategy=tpu cannot run here: {problem}")
    if name in ("default", "mirrored") and cluster.size > 1:
        what = f"--strategy={name} trains in one process and there are {cluster.size} workers ({cluster.source})"
        raise UserError(what, "use --strategy=multi_worker, or start one process")
    if name == "multi_worker" and cluster.source == discovery.HOROVODRUN:
        what = "--strategy=multi_worker under horovodrun has no addresses"
        raise UserError(what, "use --strategy=horovod, or python -m tfdist.launch")
    if name == "horovod" and devices > 1:
        what = f"--strategy=horovod uses one device per process, this one has {what}"
        raise UserError(what, "start as many processes, or pick one with --devices")
    if name == "mirrored" and devices < 2 and not selection.opaque:
        what = f"--strategy=mirrored needs at least 2 devices, found 1 ({'1 GPU' if selection.gpus else 'the CPU'})"
        raise UserError(what, "use --virtual_devices=2 to split the CPU, or --strategy=default")
    return StrategyChoice(name, reason, devices if name in ("mirrored", "multi_worker") else 1)


def _automatic(
    devices: int, what: str, options: PlacementOptions, cluster: discovery.Cluster, environ: Mapping[str, str]
) -> tuple[str, str]:
    if cluster.source == discovery.HOROVODRUN:
        return "horovod", "started by horovodrun (HOROVOD_RANK is set)"
    if cluster.size > 1:
        return "multi_worker", f"there are {cluster.size} workers ({cluster.source})"
    if options.virtual_devices:  # somebody asks for this machine's CPU, whatever else there is
        return ("mirrored" if devices > 1 else "default"), f"{what} here"
    if options.tpu != "local":
        return "tpu", f"--tpu={options.tpu} asks for it"
    without = ""
    if options.devices == "all":  # else somebody asks for GPUs, or for the CPU
        hint = tpu_host.hint(environ)
        problem = tpu_host.problem() if hint else ""
        if hint and not problem:
            return "tpu", f"{hint} says that there is a TPU"
        without = f"; not tpu, though {hint} says that there is one: {problem}" if hint else ""
    return ("mirrored" if devices > 1 else "default"), f"{what} here{without}"


def default(reason: str, device: str = "CPU:0", jit: str = "off") -> Distribution:
    """Builds the strategy of one replica on one device, whose collectives return their input."""
    import tensorflow as tf

    # A scope, in which this thread may be, is the thread's own: in another one TensorFlow's default is the current one.
    with futures.ThreadPoolExecutor(1) as elsewhere:
        strategy = elsewhere.submit(tf.distribute.get_strategy).result()
    return Distribution(name="default", reason=reason, strategy=strategy, replicas=1, devices=(device,), jit=jit)


def mirrored(names: tuple[str, ...], reason: str, jit: str = "off") -> Distribution:
    """Builds the strategy of one replica per device of this process (`tf.distribute.MirroredStrategy`)."""
    import tensorflow as tf

    from tfdist.distributed.collectives import mend_variables, sum_in_order

    if len(names) < 2:
        what = f"--strategy=mirrored needs at least 2 devices, found {len(names)} ({', '.join(names)})"
        raise UserError(what, "use --virtual_devices=2 to split the CPU, or --strategy=default")
    mend_variables(is_chief=True)
    # Between CPUs of one process TensorFlow would choose its ring collective, which costs 0.7 to 0.4 of
    # the speed; adding up in one place needs no copies there. GPUs keep the default, NCCL.
    reduction = tf.distribute.ReductionToOneDevice(accumulation_fn=sum_in_order) if names[0].startswith("CPU") else None
    strategy = tf.distribute.MirroredStrategy([f"/{name}" for name in names], cross_device_ops=reduction)
    return of_strategy(strategy, name="mirrored", reason=reason, devices=names, jit=jit)
