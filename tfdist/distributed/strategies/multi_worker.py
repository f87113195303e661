"""`tf.distribute.MultiWorkerMirroredStrategy`: replicas on the devices of several processes.

Keras' `fit` crashes under it (keras issue 20585); the step of tfdist does not
use what crashes. The strategy itself is started only when all workers have met.
"""

import contextlib
import functools
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy as home
from tensorflow.python.distribute import multi_worker_util
from tensorflow.python.eager import context

from tfdist.cluster.addresses import split
from tfdist.cluster.peers import Peers
from tfdist.distributed import collectives, shared_memory_sum
from tfdist.distributed.distribution import Distribution, not_forked, of_strategy
from tfdist.distributed.shared_memory_sum import SharedMemorySum
from tfdist.errors import UserError, one_line


class Ring:
    """All-reduces over TensorFlow's ring on gRPC, with one replica per worker."""

    GROUP_KEY = 1 << 20  # beyond those that TensorFlow counts up from 1

    IN_FLIGHT = 8  # sums that may be under way at a time: gRPC holds copies of each meanwhile

    def __init__(self, replicas: int, device: str):
        self._replicas = replicas
        self._numbers = itertools.count(1)
        # A tf.function runs stateful operations one after the other as they were traced, a clock that waits for the
        # last gradient among them. Those with resources wait for their input, and for others with the same resource
        # alone; nobody reads or writes these. One sum that travels by itself has nothing to overtake.
        with tf.device(f"/device:{device}"):
            self._orders = [
                tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=f"tfdist.order.{i}")
                for i in range(self.IN_FLIGHT)
            ]

    def reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums each tensor over all replicas."""
        if self._replicas == 1:
            return tensors
        sums = []
        for tensor, number in zip(tensors, self._numbers):
            order = [self._orders[number % self.IN_FLIGHT]] if len(tensors) > 1 else []
            sums.append(
                tf.raw_ops.CollectiveReduceV2(
                    input=tensor,
                    group_size=self._replicas,
                    group_key=self.GROUP_KEY,
                    instance_key=number,
                    ordering_token=order,
                    merge_op="Add",
                    final_op="Id",
                    communication_hint="ring",
                )
            )
        return sums


class SharedMemory:
    """All-reduces through the memory of the host; a tf.function makes these sums in the order of its trace."""

    def __init__(self, through: SharedMemorySum, workers: int):
        self._through, self._workers = through, workers
        self._keys = itertools.count(1)

    def reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums each tensor over all replicas; those of half precision in float32."""
        sums = []
        for tensor, key in zip(tensors, self._keys):
            # NumPy adds float16 one by one, and does not know bfloat16.
            given = tf.cast(tensor, tf.float32) if tensor.dtype in (tf.float16, tf.bfloat16) else tensor
            total = tf.numpy_function(functools.partial(self._through.sum, key), [given], given.dtype, name="tfdist")
            total.set_shape(tensor.shape)
            sums.append(tf.cast(total, tensor.dtype))
        return sums

    def gather(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Concatenates each flat tensor over all replicas."""
        wholes = []
        for tensor, key in zip(tensors, self._keys):
            bits = tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])  # NumPy does not know bfloat16
            whole = tf.numpy_function(functools.partial(self._through.gather, key), [bits], tf.uint8, name="tfdist")
            whole = tf.bitcast(tf.reshape(whole, [-1, tensor.dtype.size]), tensor.dtype)
            # A copy, since weights that it is assigned to would keep its memory from the next sums.
            wholes.append(tf.raw_ops.DeepCopy(x=tf.ensure_shape(whole, [self._workers * tensor.shape[0]])))
        return wholes


HEARTBEAT_S = 10  # TensorFlow's own heartbeats; `Peers` is faster and can say who
REGISTER_S = 60  # to start TensorFlow's server, which all do in the same moment; a slow worker needs seconds
_ASK_S = 1.0
_PAUSE_S = 0.05


def create(
    names: tuple[str, ...], reason: str, peers: Peers, jit: str, communication: str, bucket_bytes: int | None
) -> Distribution:
    """Starts the strategy; must come before any TensorFlow operation, or raises UserError.

    Args:
      names: TensorFlow's names of this worker's devices; each worker has as many.
      communication: `auto`, `ring` (gRPC) or `nccl`. Only `auto` takes the memory that workers of one host share.
      bucket_bytes: see `collectives.bucketed`; None for its default.
    """
    if communication == "nccl" and names[0].startswith("CPU"):
        raise UserError("--communication=nccl sums between GPUs, and this worker has none", "leave it out")
    may_share = communication == "auto" and names == ("CPU:0",)
    if communication == "auto":
        communication = "nccl" if names[0].startswith("GPU") else "ring"
    implementation = getattr(tf.distribute.experimental.CommunicationImplementation, communication.upper())
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    collectives.mend_variables(peers.rank == 0)
    strategy = _start(names, peers, options)
    bucket = collectives.BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    replicas = len(names) * peers.size

    def all_sum(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return collectives.bucketed(tensors, reduce, bucket)

    def all_gather(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if shared:
            return in_memory.gather(tensors)
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return collectives.gather_by_sum(tensors, all_sum, replica, replicas)

    shared = shared_memory_sum.between(peers) if may_share else None
    if shared:
        in_memory = SharedMemory(shared, replicas)
        reduce = in_memory.reduce
    elif communication == "ring" and len(names) == 1:
        reduce = Ring(replicas, names[0]).reduce
    else:
        # TensorFlow's own layer keeps an order per device. Without it NCCL deadlocks, and so do several CPUs of one
        # process, whose collectives a tf.function would run one after the other.
        of_replica = tf.distribute.get_replica_context
        reduce = lambda tensors: of_replica().all_reduce(tf.distribute.ReduceOp.SUM, tensors, options)
    if len(names) == 1 and communication == "ring":
        _reduce_in_layers(strategy, reduce)
    return of_strategy(
        strategy,
        name="multi_worker",
        reason=reason,
        devices=names,
        jit=jit,
        all_sum=all_sum,
        all_gather=all_gather,
        creating=_explaining_failed_broadcasts,
        peers=peers,
        communication="shared memory" if shared else communication,
    )


@contextlib.contextmanager
def _explaining_failed_broadcasts(scope: contextlib.AbstractContextManager[object]) -> Iterator[object]:
    """Enters the scope of the strategy; UserError for a variable that the chief cannot send, or that others lack."""

    process = os.getpid()

    def create(creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        not_forked(process)
        try:
            return creator(**kwargs)
        except (tf.errors.InvalidArgumentError, tf.errors.InternalError) as error:
            dtype = tf.as_dtype(kwargs["dtype"]).name if kwargs.get("dtype") else "this type"
            if "ollective instance" in str(error):  # of another type or shape
                what = f"this worker creates {kwargs.get('name')!r} of {dtype} where another creates another variable"
                raise UserError(what, "run the same script with the same arguments on all workers") from None
            if "CollectiveBcast" not in str(error):
                raise
            raise UserError(
                f"a variable of {dtype} cannot be created with multi_worker, where TensorFlow sends the chief's first "
                "value to the others and cannot send this type",
                "use --strategy=mirrored, or a layer without it (quantize after the training)",
            ) from None

    with scope as strategy, tf.variable_creator_scope(create):
        yield strategy


def _reduce_in_layers(
    strategy: tf.distribute.MultiWorkerMirroredStrategy, reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]]
) -> None:
    """Makes layers, such as a synchronized BatchNorm, sum through their replica context as gradients are summed."""
    theirs = strategy.extended.batch_reduce_to

    def batch_reduce_to(
        reduce_op: tf.distribute.ReduceOp,
        pairs: Sequence[tuple[object, object]],
        options: tf.distribute.experimental.CommunicationOptions,
    ) -> list[object]:
        values = [value for value, _ in pairs]
        if not all(isinstance(value, tf.Tensor) for value in values):  # sparse, or not of one replica
            return theirs(reduce_op, pairs, options)
        sums = reduce(values)
        return [s / strategy.num_replicas_in_sync for s in sums] if reduce_op == tf.distribute.ReduceOp.MEAN else sums

    strategy.extended.batch_reduce_to = batch_reduce_to


def _start(
    names: tuple[str, ...], peers: Peers, options: tf.distribute.experimental.CommunicationOptions
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Starts TensorFlow's servers on all workers together; raises UserError, or PeerError if one was lost meanwhile."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    if peers.size > 1:
        spec = tf.train.ClusterSpec({"worker": list(peers.addresses)})
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            spec, task_type="worker", task_id=peers.rank, rpc_layer="grpc"
        )
        # The strategy takes what is there; its own setting waits an hour for a worker that dies in this moment.
        context.context().configure_coordination_service(
            service_type="standalone",
            service_leader=multi_worker_util.coordination_leader(spec.as_cluster_def()),
            cluster_register_timeout_in_ms=1000 * REGISTER_S,
            heartbeat_timeout_in_ms=1000 * HEARTBEAT_S,
            coordinated_jobs=[home.coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=peers.size)],
        )
        service = context.context().coordination_service
        if "cluster_register_with_barrier" in service.DESCRIPTOR.fields_by_name:  # TensorFlow 2.18 has none
            # Without it the time limit is not for the last worker to register: that one waits an hour all the same.
            service.cluster_register_with_barrier = True
        # The wait holds Python's lock: nothing ends it earlier. So it begins when all are there, TensorFlow imported.
        peers.gather("the start of TensorFlow's servers")
    extended = home.CollectiveAllReduceExtended
    theirs = extended._initialize_local_devices
    if names[0].startswith("CPU"):
        # It takes one CPU per worker even where there are more.
        extended._initialize_local_devices = lambda self, resolver, worker_device: (
            tuple(f"{worker_device}/device:{name}" for name in names),
            "CPU",
        )
    try:
        peers.release_port()
        _wait_for_the_chief(peers)
        strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # which TensorFlow's server swallows otherwise
        return strategy
    except (tf.errors.OpError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "program startup" in str(error):
            what = "--strategy=multi_worker must be started before TensorFlow has done anything else in this process"
            raise UserError(what, "call tfdist.connect() first") from None
        if peers.verdict():
            raise peers.error() from error
        at = peers.addresses[peers.rank] if peers.addresses else "this machine"
        what = f"TensorFlow cannot start its server at {at} ({one_line(error, 200)})"
        raise UserError(what, "free that port, and look at the other workers") from error
    finally:
        extended._initialize_local_devices = theirs


def _wait_for_the_chief(peers: Peers) -> None:
    """Waits until the chief's server listens: gRPC, refused once, asks again after ever longer pauses."""
    if peers.rank == 0:
        return
    deadline = time.monotonic() + REGISTER_S
    while time.monotonic() < deadline and not peers.failure:
        try:
            socket.create_connection(split(peers.addresses[0]), timeout=_ASK_S).close()
            return
        except OSError:  # TensorFlow will say what is wrong
            time.sleep(_PAUSE_S)
