"""The strategies of a process alone: one replica on one device, or one on each of its devices."""

from concurrent import futures

from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError


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

    def all_sum(tensors: "list[tf.Tensor]") -> "list[tf.Tensor]":
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensors)

    def all_gather(tensors: "list[tf.Tensor]") -> "list[tf.Tensor]":
        return [tf.distribute.get_replica_context().all_gather(tensor, 0) for tensor in tensors]

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
        all_gather=all_gather,
    )
