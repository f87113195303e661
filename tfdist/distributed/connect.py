"""From flags, devices and workers to a `Distribution` that has been started."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from tfdist.config.runtime_options import OF_A_RUN, Environment
from tfdist.distributed import cluster, gpus, rendezvous, strategy_choice, tf_devices
from tfdist.distributed.distribution import Distribution
from tfdist.distributed.peers import Peers
from tfdist.distributed.strategies import horovod, multi_worker
from tfdist.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """The answer to "where does this run", found without TensorFlow."""

    environment: Environment
    survey: gpus.Survey
    selection: gpus.Selection
    cluster: cluster.Cluster
    choice: strategy_choice.Choice

    @property
    def replicas(self) -> int:
        """Over all workers, as far as known without TensorFlow."""
        return self.choice.replicas * self.cluster.size


def locate(environment: Environment) -> Site:
    """Looks at GPUs and environment variables and chooses a strategy; takes no device.

    Raises:
      UserError: what was asked for cannot run here.
    """
    asks_for_cpu = environment.virtual_devices or environment.devices == "none"
    survey = gpus.Survey() if asks_for_cpu else gpus.survey()
    workers = cluster.find(os.environ)
    selection = gpus.select("none" if asks_for_cpu else environment.devices, survey, os.environ)
    if workers.source != "tfdist.launch":  # which has divided them
        selection = gpus.share(selection, workers.local_rank, workers.local_size)
    choice = strategy_choice.choose(environment, selection, workers, os.environ)
    return Site(environment, survey, selection, workers, choice)


def create(
    site: Site, facts: Mapping[str, str] | None = None, say: Callable[[str], None] | None = None
) -> Distribution:
    """Starts TensorFlow on the chosen devices, once all workers have met.

    Args:
      facts: what must be the same on all workers, by name.
      say: shows a line to a person; standard error if not given.

    Raises:
      UserError: TensorFlow does not see the devices, or was started before; or
        the workers did not all come, or differ.
    """
    say = say or (lambda line: print(f"tfdist: {line}", file=sys.stderr, flush=True))
    where, name, workers = site.environment, site.choice.name, site.cluster
    facts = {"replicas per worker": str(site.choice.replicas), **_versions(name), **(facts or {})}
    alone = workers if name == "multi_worker" else cluster.ALONE
    peers = rendezvous.meet(alone, facts, say, where.start_timeout, where.stall_timeout)
    try:
        return _start(site, facts, say, peers)
    except Exception as error:
        # The others would wait for this worker in a constructor that nothing interrupts.
        peers.fail(str(error), 2 if isinstance(error, UserError) else 1)
        raise


def _start(site: Site, facts: Mapping[str, str], say: Callable[[str], None], peers: Peers) -> Distribution:
    """`create`, once the workers have met; those of Horovod meet here, since it knows where."""
    where = site.environment
    found = tf_devices.prepare(where, site.survey, site.selection, site.cluster.local_size)
    # XLA loses on the CPU: forward and backward at 0.5 to 1.0 of the plain loop (benchmarks/README.md).
    jit = "off" if site.environment.jit == "auto" and found.kind == "CPU" else site.environment.jit
    reason = site.choice.reason
    match site.choice.name:
        case "default":
            return default(reason, found.names[0], jit)
        case "mirrored":
            return mirrored(found.names, reason, jit)
        case "multi_worker":
            return multi_worker.create(found.names, reason, peers, jit, where.communication, where.bucket_bytes)
        case _:
            module = horovod.start()
            peers = rendezvous.meet(horovod.cluster(module), facts, say, where.start_timeout, where.stall_timeout)
            return horovod.create(module, found.names[0], reason, peers, jit)


def _versions(strategy: str) -> dict[str, str]:
    """Versions of what must compute the same on all workers."""
    names = ["tfdist", "tensorflow", "keras", *(["horovod"] if strategy == "horovod" else [])]
    found = {"Python": platform.python_version()}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {f"the version of {name}": version for name, version in found.items()}


def connect(strategy: str = "auto", **environment: Any) -> Distribution:
    """Chooses and starts a strategy by the same rules as the command line.

    Must come before TensorFlow has done anything else in the process when it
    splits the CPU or sets threads.

    Args:
      strategy: `auto`, `default`, `mirrored`, `multi_worker` or `horovod`.
      **environment: the other environment flags, e.g. `virtual_devices=3`,
        `devices="0,1"`, `threads=4`, `jit="on"`.

    Returns:
      A `Distribution`; create the model under its `scope()`.

    Raises:
      UserError: the strategy or an option cannot be used here.
    """
    known = {f.name for f in dataclasses.fields(Environment)} - {"strategy", *OF_A_RUN}
    unknown = set(environment) - known
    if unknown:
        raise UserError(f"connect() has no option {sorted(unknown)[0]!r}: known are {', '.join(sorted(known))}")
    return create(locate(Environment(strategy=strategy, **environment)))


def default(reason: str, device: str = "CPU:0", jit: str = "off") -> Distribution:
    """One replica on one device: every collective returns its input."""
    import tensorflow as tf

    return Distribution(
        name="default",
        reason=reason,
        strategy=tf.distribute.get_strategy(),
        replicas=1,
        devices=(device,),
        jit=jit,
        run=lambda fn, args: fn(*args),
        local=lambda value: (value,),
        replica_id=lambda: 0,
        all_sum=lambda tensors: tensors,
        average=lambda variables: None,
    )


def mirrored(names: tuple[str, ...], reason: str, jit: str = "off") -> Distribution:
    """One replica per device of this process (`tf.distribute.MirroredStrategy`).

    Raises:
      UserError: fewer than two devices.
    """
    import tensorflow as tf

    from tfdist.distributed.collectives import sum_in_order

    if len(names) < 2:
        raise UserError(
            f"--strategy=mirrored needs at least 2 devices, found {len(names)} ({', '.join(names)}): "
            "use --virtual_devices=2 to split the CPU, or --strategy=default"
        )
    # Between CPUs of one process TensorFlow would choose its ring collective, which costs 0.7 to 0.4 of
    # the speed; adding up in one place needs no copies there. GPUs keep the default, NCCL.
    reduction = tf.distribute.ReductionToOneDevice(accumulation_fn=sum_in_order) if names[0].startswith("CPU") else None
    strategy = tf.distribute.MirroredStrategy([f"/{name}" for name in names], cross_device_ops=reduction)

    def all_sum(tensors: list) -> list:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensors)

    def average(variables: list) -> None:
        for variable in variables:
            copies = getattr(variable.value, "values", (variable.value,))
            mean = sum_in_order([tf.identity(copy) for copy in copies]) / len(copies)
            for copy in copies:
                copy.assign(mean)

    return Distribution(
        name="mirrored",
        reason=reason,
        strategy=strategy,
        replicas=len(names),
        devices=names,
        jit=jit,
        run=lambda fn, args: strategy.run(fn, args=args),
        local=strategy.experimental_local_results,
        replica_id=lambda: tf.distribute.get_replica_context().replica_id_in_sync_group,
        all_sum=all_sum,
        average=average,
    )
