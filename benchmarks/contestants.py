"""A process that trains one workload in one way, as often as it is asked to (see `serving.py`).

    python benchmarks/contestants.py WORKLOAD REPLICAS tfdist|keras|bare

One thread per replica. What counts are whole epochs after a first one, in which things are compiled.
"""

import logging
import sys
import time

import serving

import tfdist

logging.getLogger("tfdist").setLevel("WARNING")  # standard output is read as answers
NAME, REPLICAS, WAY = sys.argv[1], int(sys.argv[2]), sys.argv[3]
DISTRIBUTION = (
    tfdist.connect("default", threads=1)
    if REPLICAS == 1
    else tfdist.connect("mirrored", virtual_devices=REPLICAS, threads=1)
)

import tensorflow as tf  # noqa: E402
import workloads  # noqa: E402

WORK = workloads.WORKLOADS[NAME]
X, Y = WORK.data(REPLICAS)
BATCH = WORK.batch * REPLICAS
STEPS = len(X) // BATCH


class Clock(tfdist.Callback):
    """Seconds from the end of the first epoch to the end of the last."""

    takes_many_updates = True

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.start = time.perf_counter()
        self.seconds = time.perf_counter() - self.start


def in_scope(**kwargs):
    with DISTRIBUTION.scope():
        return workloads.compiled(WORK.model(), **kwargs)


def ours():
    """tfdist.fit, with its data by index, reshuffled each epoch, metrics and callbacks."""
    model = in_scope()

    def run():
        clock = Clock()
        tfdist.fit(
            model, X[: STEPS * BATCH], Y[: STEPS * BATCH], distribution=DISTRIBUTION, batch_size=BATCH,
            epochs=1 + WORK.epochs, callbacks=[clock], verbose=0,
            check_agreement="off",  # as in Keras' fit, BatchNorm looks at the rows of its own replica
        )  # fmt: skip
        return clock.seconds

    return run


def keras_fit():
    """Keras' own fit at its best: one data set that repeats, and many steps per execution where that works (K5)."""
    steps = 16 if REPLICAS == 1 else 1
    model = in_scope(steps_per_execution=min(steps, STEPS))
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).cache().batch(BATCH, drop_remainder=True).repeat()
    dataset = dataset.prefetch(tf.data.AUTOTUNE)

    def run():
        clock = Clock()
        model.fit(dataset, steps_per_epoch=STEPS, epochs=1 + WORK.epochs, callbacks=[clock], verbose=0)
        return clock.seconds

    return run


def bare():
    """A tf.function of many steps with nothing around it: no metrics, no shuffling, TensorFlow's fused Adam."""
    model = WORK.model()
    variables = [v.value for v in model.trainable_variables]
    slots = [(tf.Variable(tf.zeros_like(v)), tf.Variable(tf.zeros_like(v))) for v in variables]
    steps, x, y = tf.Variable(0.0), tf.constant(X), tf.constant(Y)

    @tf.function(autograph=False)
    def epoch():
        def body(i):
            steps.assign_add(1.0)
            images = tf.slice(x, tf.concat([[i * BATCH], [0] * len(WORK.shape)], 0), [BATCH, *WORK.shape])
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    tf.slice(y, [i * BATCH], [BATCH]), model(images, training=True)
                )
                loss = tf.reduce_mean(losses)
            for variable, (m, v), grad in zip(variables, slots, tape.gradient(loss, variables)):
                tf.raw_ops.ResourceApplyAdam(
                    var=variable.handle, m=m.handle, v=v.handle, beta1_power=0.9**steps, beta2_power=0.999**steps,
                    lr=1e-3, beta1=0.9, beta2=0.999, epsilon=1e-7, grad=grad,
                )  # fmt: skip
            return (i + 1,)

        return tf.while_loop(lambda i: i < STEPS, body, (tf.constant(0),))

    def run():
        epoch()
        start = time.perf_counter()
        for _ in range(WORK.epochs):
            epoch()
        return time.perf_counter() - start

    return run


WAYS = {"tfdist": ours, "keras": keras_fit, "bare": bare}

if __name__ == "__main__":
    serving.serve(WAYS[WAY](), STEPS * BATCH * WORK.epochs)
