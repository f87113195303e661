"""Legacy Keras (`tf_keras`) under MultiWorkerMirroredStrategy, as TensorFlow's tutorial has it; started by TF_CONFIG.

Its optimizers cannot accumulate, so an update is one batch of as many examples.
"""

import json
import os
import sys

import problem
import tensorflow as tf
import tf_keras

task = json.loads(os.environ.get("TF_CONFIG", "{}"))
rank = task.get("task", {}).get("index", 0)
world = len(task.get("cluster", {}).get("worker", [0]))
strategy = tf.distribute.MultiWorkerMirroredStrategy() if world > 1 else tf.distribute.get_strategy()
with strategy.scope():
    layers = tf_keras.layers
    norm = layers.LayerNormalization(epsilon=problem.EPSILON)
    if problem.NORM == "batch":
        norm = layers.BatchNormalization(
            momentum=problem.NORM_MOMENTUM, epsilon=problem.EPSILON, synchronized="synchronized" in sys.argv
        )
    model = tf_keras.Sequential(
        [
            tf_keras.Input((problem.FEATURES,)),
            layers.Dense(problem.HIDDEN, use_bias=False),
            norm,
            layers.Activation("tanh"),
            layers.Dense(problem.CLASSES),
        ]
    )
    model.set_weights(problem.first_weights())
    model.compile(
        tf_keras.optimizers.SGD(problem.LEARNING_RATE, momentum=problem.MOMENTUM, global_clipnorm=problem.CLIP_NORM),
        tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


class Recorder(tf_keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch + 1

    def on_train_batch_begin(self, batch, logs=None):
        problem.maybe_kill(self.epoch, batch, rank, world)

    def on_epoch_end(self, epoch, logs=None):
        weights = self.model.get_weights()
        if rank == 0:
            problem.record(epoch + 1, weights)


callbacks = [Recorder()]
if "BACKUP" in os.environ:
    callbacks.append(tf_keras.callbacks.BackupAndRestore(os.environ["BACKUP"]))
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
rows = tf.data.Dataset.from_tensor_slices(problem.data()).batch(problem.MICRO_BATCH * problem.ACCUMULATE)
model.fit(rows.with_options(options), epochs=problem.EPOCHS, callbacks=callbacks, verbose=0)
