"""Horovod: one process per replica, its own rendezvous and its own all-reduce. The only module that imports it.

`horovod.tensorflow` works under Keras 3 as a library of collectives;
`hvd.DistributedOptimizer` and its Keras callbacks do not (they reduce nothing,
or crash), so only the former is used.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from typing import Any

from tfdist.distributed import horovod_install, wire
from tfdist.distributed.addresses import join
from tfdist.distributed.cluster import Cluster
from tfdist.distributed.distribution import Distribution
from tfdist.distributed.peers import Peers
from tfdist.errors import UserError


def start() -> Any:
    """Starts Horovod in this process and returns its module.

    Raises:
      UserError: it is not built for this TensorFlow, or does not start.
    """
    problem = horovod_install.problem()
    if problem:
        raise UserError(problem)
    try:
        import horovod.tensorflow as hvd

        hvd.init()
    except Exception as error:  # an ImportError, an OSError of a library, or a RuntimeError of its rendezvous
        line = " ".join(str(error).split())[:200]
        raise UserError(
            f"Horovod does not start ({line}): start with horovodrun or mpirun, or rebuild it with "
            "python -m tfdist.horovod_build"
        ) from error
    return hvd


def cluster(hvd: Any) -> Cluster:
    """The workers as Horovod has found them, and where they meet for their heartbeats, agreed on through it."""
    import numpy as np

    listener, text = None, ""
    if hvd.rank() == 0:
        listener = wire.listen(_own_host(hvd), 0)
        text = f"{join(*listener.getsockname()[:2])} {secrets.token_hex(16)}"
    line = np.zeros(256, np.uint8)
    line[: len(text)] = np.frombuffer(text.encode(), np.uint8)
    if hvd.size() > 1:
        line = hvd.broadcast(line, 0, name="tfdist.distributed.rendezvous").numpy()
    master, secret = line.tobytes().rstrip(b"\0").decode().split()
    return Cluster(
        "horovodrun",
        rank=hvd.rank(),
        size=hvd.size(),
        local_rank=hvd.local_rank(),
        local_size=hvd.local_size(),
        master=master,
        secret=secret,
        meeting_fd=listener.detach() if listener else None,
    )


def _own_host(hvd: Any) -> str:
    """An address of this machine that the other workers reach: of the interface that leads to horovodrun."""
    if hvd.local_size() == hvd.size():
        return "127.0.0.1"
    driver = (
        os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((driver, 9))  # sends nothing: it asks for the route
        return probe.getsockname()[0]


def create(hvd: Any, name: str, reason: str, peers: Peers, jit: str) -> Distribution:
    """One replica in this process, and Horovod between the processes.

    Args:
      hvd: of `start`.
      name: this worker's device.
    """
    import tensorflow as tf

    from tfdist.distributed import collectives

    def reduce(tensors: list) -> list:
        return hvd.grouped_allreduce(tensors, op=hvd.Sum) if tensors else []

    def all_sum(tensors: list) -> list:
        if hvd.size() == 1:
            return tensors
        # It knows no bfloat16; a sum in float32 is at least as good.
        known = [tf.cast(t, tf.float32) if t.dtype == tf.bfloat16 else t for t in tensors]
        return [tf.cast(s, t.dtype) for s, t in zip(collectives.bucketed(known, reduce), tensors)]

    def average(variables: list) -> None:
        for variable, total in zip(variables, all_sum([tf.convert_to_tensor(v.value) for v in variables])):
            variable.assign(total / hvd.size())

    def broadcast(variables: list) -> None:
        if hvd.size() > 1:
            hvd.broadcast_variables([v.value for v in variables], root_rank=0)

    @contextlib.contextmanager
    def totals(variables: list) -> Iterator[None]:
        values = [tf.identity(v.value) for v in variables]
        for variable, total in zip(variables, all_sum(values)):
            variable.assign(total)
        yield
        for variable, value in zip(variables, values):
            variable.assign(value)

    def all_reduce(reduce_op: Any, value: Any, options: Any = None) -> Any:
        del options
        op = hvd.Average if getattr(reduce_op, "value", reduce_op).upper() == "MEAN" else hvd.Sum
        return tf.nest.map_structure(lambda t: hvd.allreduce(t, op=op), value)

    # Layers reduce through the replica context, as synchronized BatchNorm does; here it would reduce over one replica.
    context = tf.distribute.get_replica_context()
    context.all_reduce = all_reduce

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
        all_sum=all_sum,
        average=average,
        broadcast=broadcast,
        totals=totals,
        peers=peers,
    )
