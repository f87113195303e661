"""Transfer learning in two parts, and TensorFlow's tutorial of several workers."""

import keras
import numpy as np
import tensorflow as tf

from programs.surface.program import L, Program, rng

# -- transfer learning --------------------------------------------------------


def backbone():
    """Stands for a network with weights that somebody else has trained, statistics of BatchNorm among them."""
    model = keras.Sequential([keras.Input((16, 16, 3)), L.Conv2D(6, 3, strides=2, use_bias=False)], name="xception")
    model.add(L.BatchNormalization())
    model.add(L.Activation("relu"))
    model.add(L.SeparableConv2D(8, 3))
    model.add(L.BatchNormalization())
    r = rng(1)
    model.set_weights([r.uniform(0.1, 0.6, w.shape) for w in model.get_weights()])
    return model


def on_top(dropout):
    def build():
        base = backbone()
        base.trainable = False
        inputs = keras.Input((16, 16, 3))
        x = L.Rescaling(scale=1 / 127.5, offset=-1)(inputs)
        x = base(x, training=False)
        x = L.Dropout(dropout)(L.GlobalAveragePooling2D()(x))
        model = keras.Model(inputs, L.Dense(1)(x))
        return compiled(model, 1e-3)

    return build


def compiled(model, rate):
    model.compile(
        keras.optimizers.Adam(rate),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy()],
    )
    return model


def tuned(statistics):
    def change(model):
        """The same model for the second part, which trains slowly.

        Keras hands the `training=True` of fit to every layer, whatever `base(x, training=False)` has said: BatchNorm
        predicts on only where it stays frozen.
        """
        base = model.get_layer("xception")
        base.trainable = True
        for layer in base.layers:
            if isinstance(layer, L.BatchNormalization):
                layer.trainable = statistics
        return compiled(model, 1e-5)

    return change


def pets(n):
    r = rng()
    images, labels = r.integers(0, 256, (n, 16, 16, 3)).astype("uint8"), r.integers(0, 2, n)
    data = tf.data.Dataset.from_tensor_slices((images, labels.astype("int64")))
    resize = keras.layers.Resizing(16, 16)
    return data.map(lambda x, y: (resize(x), y)).batch(16).prefetch(tf.data.AUTOTUNE).cache()


def transfer(name, dropout, statistics, **kwargs):
    return Program(
        f"transfer learning{name}",
        on_top(dropout),
        pets,
        lambda folder: {"validation_data": pets(17)},
        then=(tuned(statistics),),
        rows=(32, 41),
        **kwargs,
    )


# -- the tutorial of several workers ----------------------------------------------


def cnn():
    layers = [L.Reshape((28, 28, 1)), L.Conv2D(4, 3, activation="relu"), L.Flatten(), L.Dense(16, activation="relu")]
    model = keras.Sequential([keras.Input((28, 28)), *layers, L.Dense(10)])
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(learning_rate=0.001),
        metrics=["accuracy"],
    )
    return model


def mnist(n):
    """Shuffled, and without an end. Workers need the seed; and Keras, that it looks at the first batch beforehand."""
    r = rng()
    x, y = r.integers(0, 256, (n, 28, 28)).astype("uint8"), r.integers(0, 10, n).astype("int64")
    x = x / np.float32(255)
    return (
        tf.data.Dataset.from_tensor_slices((x, y)).shuffle(n, seed=5, reshuffle_each_iteration=False).repeat().batch(24)
    )


def outputs(model, folder):
    return [model(next(iter(mnist(61)))[0], training=False)]


EXAMPLES = [
    transfer("", 0.2, True, unlike_one="Keras draws one mask per replica"),
    transfer(", without dropout", 0.0, True, refused={"several": "normalizes with the rows of its own replica"}),
    transfer(", BatchNorm kept frozen", 0.0, False),
    Program("several workers", cnn, mnist, lambda folder: {"steps_per_epoch": 4}, outputs, rows=(61,), epochs=3,
            only_fit="the data has no end"),
]  # fmt: skip
