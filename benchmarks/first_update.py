"""The least that a script needs for one update of digits: what `python -m tfdist.train` is measured against.

Imports TensorFlow and TFDS, reads the same data, builds the same model, makes one compiled update; prints the seconds
since its process began.
"""

import os
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import psutil
import tensorflow as tf
import tensorflow_datasets as tfds

import tfdist.data.datasets.digits  # noqa: F401  registers the data set with TFDS


def main():
    import keras

    x, y = tfds.load("digits", split="train", batch_size=-1, as_supervised=True)
    layers = [keras.Input((8, 8, 1), dtype="uint8"), keras.layers.Rescaling(1 / 16)]
    for width in (64, 128):
        layers += [
            keras.layers.Conv2D(width, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Activation("gelu"),
        ]
    layers += [keras.layers.AveragePooling2D(2), keras.layers.Flatten(), keras.layers.Dense(128, activation="gelu")]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.02)
    loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    optimizer.build(model.trainable_variables)

    @tf.function
    def update(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_fn(tf.one_hot(labels, 10), model(images, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    update(x[:48], y[:48]).numpy()
    print(time.time() - psutil.Process().create_time())


main()
