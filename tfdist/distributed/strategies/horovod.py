"""Horovod: one process per replica, its own rendezvous and its own all-reduce. The only module that imports it.

`horovod.tensorflow` works under Keras 3 as a library of collectives;
`hvd.DistributedOptimizer` and its Keras callbacks do not (they reduce nothing,
or crash), so only the former is used.
"""

from __future__ import annotations

import os
import secrets
import socket
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from tfdist.cluster import wire
from tfdist.cluster.addresses import join
from tfdist.cluster.discovery import HOROVODRUN, Cluster
from tfdist.cluster.peers import Peers
from tfdist.distributed import horovod_install
from tfdist.distributed.distribution import Distribution
from tfdist.distributed.strategies import horovod_start
from tfdist.errors import UserError, one_line

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


class StartedHorovod(NamedTuple):
    """Horovod, as it runs in this process."""

    module: ModuleType
    hosts: tuple[str, ...]
    """Of each process, by rank; none where nobody can tell."""


def start(limit: float) -> StartedHorovod:
    """Starts Horovod in this process.

    Args:
      limit: seconds that the other processes may take to come.

    Raises:
      UserError: it is not built for this TensorFlow, or does not start, or a process has not come.
    """
    problem = horovod_install.problem()
    if problem:
        raise UserError(problem)
    try:
        import horovod.tensorflow as hvd

        hosts = horovod_start.meet(limit, os.environ)
        with horovod_start.bounded(limit):
            hvd.init()
    except UserError:
        raise
    except Exception as error:  # an ImportError, an OSError of a library, or a RuntimeError of its rendezvous
        raise UserError(
            f"Horovod does not start ({one_line(error, 200)}): start with horovodrun or mpirun, or rebuild it with "
            "python -m tfdist.horovod_build"
        ) from error
    return StartedHorovod(hvd, hosts)


def cluster(started: StartedHorovod) -> Cluster:
    """Returns the workers as Horovod has found them, and where they meet for their heartbeats, agreed on through it."""
    import numpy as np

    hvd = started.module
    listener, text = None, ""
    if hvd.rank() == 0:
        listener = wire.listen(_own_host(hvd), 0)
        text = f"{join(*listener.getsockname()[:2])} {secrets.token_hex(16)}"
    line = np.zeros(256, np.uint8)
    line[: len(text)] = np.frombuffer(text.encode(), np.uint8)
    if hvd.size() > 1:
        line = hvd.broadcast(line, 0, name="tfdist.rendezvous").numpy()
    master, secret = line.tobytes().rstrip(b"\0").decode().split()
    return Cluster(
        HOROVODRUN,
        rank=hvd.rank(),
        size=hvd.size(),
        local_rank=hvd.local_rank(),
        local_size=hvd.local_size(),
        master=master,
        hosts=started.hosts,
        secret=secret,
        meeting_fd=listener.detach() if listener else None,
    )


def _own_host(hvd: ModuleType) -> str:
    """Returns an address at which the other workers reach this machine: of the interface that leads to horovodrun."""
    if hvd.local_size() == hvd.size():
        return "127.0.0.1"
    driver = (
        os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((driver, 9))  # sends nothing: it asks for the route
        return probe.getsockname()[0]


def create(hvd: ModuleType, name: str, reason: str, peers: Peers, jit: str) -> Distribution:
    """Builds the strategy of one replica in this process, and Horovod between the processes.

    Args:
      hvd: what `start` returns.
      name: TensorFlow's name of this worker's device.
      reason: why this strategy, in words for a person.
      peers: the workers, which have met.
      jit: see `Distribution.jit`.
    """
    import tensorflow as tf

    _reduce_in_layers(hvd)
    collectives = _Collectives(hvd)
    return Distribution(
        name="horovod",
        reason=reason,
        strategy=tf.distribute.get_strategy(),
        replicas=hvd.size(),
        devices=(name,),
        jit=jit,
        run=lambda fn, args: fn(*args),
        local=lambda value: (value,),
        replica_id=hvd.rank,
        all_sum=collectives.all_sum,
        average=collectives.average,
        broadcast=collectives.broadcast,
        communication="horovod",
        unsummed=("bfloat16",),
        peers=peers,
    )


class _Collectives:
    """The operations of a `Distribution` in which Horovod talks to the other processes."""

    def __init__(self, hvd: ModuleType):
        self._hvd = hvd

    def all_sum(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums each tensor over all processes."""
        import tensorflow as tf

        from tfdist.distributed.collectives import bucketed

        hvd = self._hvd
        if hvd.size() == 1:
            return tensors

        def reduce(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            return hvd.grouped_allreduce(tensors, op=hvd.Sum) if tensors else []

        # It knows no bfloat16; a sum in float32 is at least as good.
        known = [tf.cast(t, tf.float32) if t.dtype == tf.bfloat16 else t for t in tensors]
        return [tf.cast(s, t.dtype) for s, t in zip(bucketed(known, reduce), tensors)]

    def average(self, variables: list[keras.Variable]) -> None:
        """Sets each variable to its mean over all processes."""
        import tensorflow as tf

        totals = self.all_sum([tf.convert_to_tensor(v.value) for v in variables])
        for variable, total in zip(variables, totals):
            variable.assign(total / self._hvd.size())

    def broadcast(self, variables: list[keras.Variable]) -> None:
        """Gives each variable the chief's value."""
        if self._hvd.size() > 1:
            self._hvd.broadcast_variables([v.value for v in variables], root_rank=0)


def _reduce_in_layers(hvd: ModuleType) -> None:
    """Lets layers reduce over the processes.

    They do so through the replica context, as synchronized BatchNorm does,
    which here would reduce over one replica.
    """
    import tensorflow as tf

    def all_reduce(reduce_op: tf.distribute.ReduceOp | str, value: object, options: object = None) -> object:
        del options
        op = hvd.Average if getattr(reduce_op, "value", reduce_op).upper() == "MEAN" else hvd.Sum
        return tf.nest.map_structure(lambda t: hvd.allreduce(t, op=op), value)

    tf.distribute.get_replica_context().all_reduce = all_reduce
