"""Keras 3 on JAX: a process that trains one workload by Keras' own fit, as often as it is asked to (see `serving.py`).

    KERAS_BACKEND=jax python benchmarks/keras_on_jax.py WORKLOAD REPLICAS

Several devices train by `keras.distribution.DataParallel`. What counts are all epochs but the first.
"""

import os
import sys

NAME, REPLICAS = sys.argv[1], int(sys.argv[2])
# One thread per device, as all others have; with a pool of one thread for all of them, two would wait for each other.
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={REPLICAS} --xla_cpu_multi_thread_eigen=false"

import time  # noqa: E402

import keras  # noqa: E402
import serving  # noqa: E402
import workloads  # noqa: E402

work = workloads.WORKLOADS[NAME]
if REPLICAS > 1:
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices("cpu")))
x, y = work.data(REPLICAS)
batch = work.batch * REPLICAS
whole = len(x) // batch * batch
model = workloads.compiled(work.model(), steps_per_execution=1)


class Clock(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.start = time.perf_counter()
        self.seconds = time.perf_counter() - self.start


def run():
    clock = Clock()
    model.fit(x[:whole], y[:whole], batch_size=batch, epochs=1 + work.epochs, callbacks=[clock], verbose=0)
    return clock.seconds


serving.serve(run, whole * work.epochs)
