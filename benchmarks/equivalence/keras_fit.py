"""A script as Keras' documentation has it. Keras on TensorFlow and on JAX and `tfdist run` train it.

python keras_fit.py [one | mirrored N | horovod | data_parallel N] [synchronized] [whole] [dropped]
"""

import contextlib
import os
import sys

import problem

way = (sys.argv[1:2] or ["one"])[0]
if way == "data_parallel":
    devices = int(sys.argv[2])
    os.environ |= {"KERAS_BACKEND": "jax", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}

import keras  # noqa: E402

scope, wrap = contextlib.nullcontext(), lambda optimizer: optimizer
rank, world = (
    int(os.environ.get(name, os.environ.get("HOROVOD_" + name.removeprefix("WORLD_"), default)))
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))
)
if way == "data_parallel" and devices > 1:
    keras.distribution.set_distribution(keras.distribution.DataParallel())
elif way == "mirrored":
    import tensorflow as tf

    devices = int(sys.argv[2])
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * devices
    )
    scope = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(devices)]).scope()
elif way == "horovod":
    import horovod.tensorflow.keras as hvd

    hvd.init()
    wrap = hvd.DistributedOptimizer

x, y = problem.data()
with scope:
    norm = keras.layers.LayerNormalization(epsilon=problem.EPSILON)
    if problem.NORM == "batch":
        norm = keras.layers.BatchNormalization(
            momentum=problem.NORM_MOMENTUM, epsilon=problem.EPSILON, synchronized="synchronized" in sys.argv
        )
    model = keras.Sequential(
        [
            keras.Input((problem.FEATURES,)),
            keras.layers.Dense(problem.HIDDEN, use_bias=False),
            norm,
            keras.layers.Activation("tanh"),
            keras.layers.Dense(problem.CLASSES),
        ]
    )
    model.set_weights(problem.first_weights())
    optimizer = keras.optimizers.SGD(
        problem.LEARNING_RATE,
        momentum=problem.MOMENTUM,
        global_clipnorm=problem.CLIP_NORM,
        gradient_accumulation_steps=None if "whole" in sys.argv else problem.ACCUMULATE,
    )
    model.compile(wrap(optimizer), keras.losses.SparseCategoricalCrossentropy(from_logits=True))


class Recorder(keras.callbacks.Callback):
    def get_state(self):  # tells tfdist that a resume may begin within an epoch
        return {}

    def set_state(self, state):
        pass

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch + 1

    def on_train_batch_begin(self, batch, logs=None):
        problem.maybe_kill(self.epoch, batch, rank, world)

    def on_epoch_end(self, epoch, logs=None):
        if rank == 0:
            problem.record(epoch + 1, self.model.get_weights())


callbacks = [Recorder()]
if "BACKUP" in os.environ and rank == 0:
    callbacks.append(keras.callbacks.BackupAndRestore(os.environ["BACKUP"]))
if "dropped" in sys.argv:  # JAX' arrays must divide by the devices: only whole batches
    x, y = (
        x[: len(x) // problem.MICRO_BATCH * problem.MICRO_BATCH],
        y[: len(y) // problem.MICRO_BATCH * problem.MICRO_BATCH],
    )
size = problem.MICRO_BATCH * (problem.ACCUMULATE if "whole" in sys.argv else 1)
if way == "horovod":  # Horovod's guide: each rank trains on its share, with batches of its own
    x, y, size = x[rank::world], y[rank::world], size // world
model.fit(x, y, batch_size=size, epochs=problem.EPOCHS, shuffle=False, callbacks=callbacks, verbose=0)
