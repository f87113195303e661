"""One process of a group that trains a workload in several ways; the driver (bench_workers.py) says which and when.

    python benchmarks/worker.py GROUP WORKLOAD PORT EPOCHS        with RANK and WORLD_SIZE, or under horovodrun

GROUP is default, multi_worker, ring (which is multi_worker over gRPC), horovod or torch. One thread per process.
Connects to 127.0.0.1:PORT, says its rank and what it can do, and for each name it is sent answers the seconds of so
many epochs, and the most memory it ever took.
"""

import json
import os
import resource
import socket
import sys
import time

GROUP, NAME, PORT, EPOCHS = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
BETAS = dict(beta1=0.9, beta2=0.999, epsilon=1e-7, lr=1e-3)


def timed(call, times):
    start = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - start


def tensorflow_ways():
    """(rank, ways) of this process of tfdist and of bare loops on the same strategy."""
    import tfdist

    over_grpc = {"communication": "ring"} if GROUP == "ring" else {}
    distribution = tfdist.connect("multi_worker" if GROUP == "ring" else GROUP, threads=1, **over_grpc)
    import tensorflow as tf
    import workloads

    work, rank, workers = workloads.WORKLOADS[NAME], distribution.rank, distribution.workers
    strategy = distribution.strategy
    x, y = work.data(workers)
    batch = work.batch * workers
    steps = len(x) // batch

    class Clock(tfdist.Callback):
        takes_many_updates = True

        def on_epoch_end(self, epoch, logs=None):
            self.start = time.perf_counter() if epoch == 0 else self.start
            self.seconds = time.perf_counter() - self.start

    with distribution.scope():
        ours = workloads.compiled(work.model())

    def fit():
        clock = Clock()
        tfdist.fit(
            ours, x[: steps * batch], y[: steps * batch], distribution=distribution, batch_size=batch,
            epochs=1 + EPOCHS, callbacks=[clock], verbose=0,
            check_agreement="off",  # as in Keras' fit, BatchNorm looks at the rows of its own replica
        )  # fmt: skip
        return clock.seconds

    options = tf.distribute.experimental.CommunicationOptions

    def all_reduce(grads):
        if GROUP == "horovod":
            import horovod.tensorflow as hvd

            return hvd.grouped_allreduce(grads, op=hvd.Average)
        # The best of each: all gradients in one pack, or one collective per gradient for large ones.
        one_pack = options(bytes_per_pack=0 if NAME == "wide" else 1 << 30)
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, grads, one_pack)

    with distribution.scope():
        model = work.model()
        variables = [v.value for v in model.trainable_variables]
        slots = [(tf.Variable(tf.zeros(v.shape)), tf.Variable(tf.zeros(v.shape))) for v in variables]
        count = tf.Variable(0.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    local_x, local_y = tf.constant(x[rank::workers]), tf.constant(y[rank::workers])

    def update(images, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True)))
        grads = all_reduce(tape.gradient(loss, [v.value for v in model.trainable_variables]))
        own = lambda v: getattr(v, "values", (v,))[0]
        step = tf.convert_to_tensor(own(count)) + 1.0
        with tf.control_dependencies(grads):
            for variable, (m, v), grad in zip(variables, slots, grads):
                tf.raw_ops.ResourceApplyAdam(
                    var=own(variable).handle, m=own(m).handle, v=own(v).handle, beta1_power=0.9**step,
                    beta2_power=0.999**step, grad=grad, **BETAS,
                )  # fmt: skip
        own(count).assign_add(1.0)

    @tf.function(autograph=False)
    def epoch():
        def body(i):
            images = tf.slice(
                local_x, tf.concat([[i * work.batch], [0] * len(work.shape)], 0), [work.batch, *work.shape]
            )
            strategy.run(update, args=(images, tf.slice(local_y, [i * work.batch], [work.batch])))
            return (i + 1,)

        return tf.while_loop(lambda i: i < steps, body, (tf.constant(0),), parallel_iterations=1)

    ways = {"tfdist": fit}
    if GROUP in ("ring", "horovod"):
        ways["bare"] = lambda: timed(epoch, EPOCHS)
    if GROUP == "ring" and "tf_keras" in os.environ.get("TFDIST_BENCH", ""):
        ways["tf_keras"] = legacy_fit(strategy, workloads, x, y, batch, steps)
    return rank, ways


def legacy_fit(strategy, workloads, x, y, batch, steps):
    """tf_keras at its best: one data set that repeats, so that its distributed iterator lives across epochs."""
    import tensorflow as tf
    import tf_keras

    with strategy.scope():
        model = workloads.legacy(NAME, tf_keras)
        model.compile(
            tf_keras.optimizers.Adam(1e-3),
            tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=steps,
        )
    auto = tf.data.Options()
    auto.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensor_slices((x, y)).cache().repeat().batch(batch, drop_remainder=True)
    data = data.prefetch(tf.data.AUTOTUNE).with_options(auto)

    class Clock(tf_keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.start = time.perf_counter() if epoch == 0 else self.start
            self.seconds = time.perf_counter() - self.start

    def fit():
        clock = Clock()
        model.fit(data, steps_per_epoch=steps, epochs=1 + EPOCHS, callbacks=[clock], verbose=0)
        return clock.seconds

    return fit


def torch_ways():
    """(rank, ways) of PyTorch's DistributedDataParallel over Gloo, fused Adam."""
    import torch
    import torch.distributed as dist
    import torch_models

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    shape, classes, size, examples = torch_models.SIZES[NAME]
    steps = examples // size
    torch.manual_seed(0)
    x = torch.randn(steps * size, *shape)
    y = torch.randint(0, classes, (steps * size,))
    model = torch.nn.parallel.DistributedDataParallel(torch_models.MODELS[NAME](), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    loss = torch.nn.CrossEntropyLoss()

    def epoch():
        order = torch.randperm(len(x))
        for i in range(steps):
            rows = order[i * size : (i + 1) * size]
            optimizer.zero_grad(set_to_none=True)
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()

    return rank, {"ddp": lambda: timed(epoch, EPOCHS)}


def main():
    rank, ways = torch_ways() if GROUP == "torch" else tensorflow_ways()
    with socket.create_connection(("127.0.0.1", PORT)) as driver, driver.makefile("rw") as talk:
        print(json.dumps({"group": GROUP, "rank": rank, "ways": list(ways)}), file=talk, flush=True)
        for line in talk:
            seconds = ways[line.strip()]()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(json.dumps({"seconds": seconds, "peak_mb": peak}), file=talk, flush=True)


if __name__ == "__main__":
    main()
