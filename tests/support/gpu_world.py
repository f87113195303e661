"""Trains in a process of its own, since TensorFlow configures devices once: `gpu_world.py WORLD MODEL PRECISION OUT`.

WORLD: `keras` (its `fit` on the CPU, the judge), `one` (a GPU) or `two` (two replicas on halves of one GPU).
"""

import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.distributed.connect import mirrored

L = keras.layers


def distribution(world):
    """Two replicas on one card are made here: NCCL, which takes a card for each, is not what is tested."""
    gpu = tf.config.list_physical_devices("GPU")[0]
    if world == "one":
        return tfdist.connect("default", devices="0")
    tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=4000)] * 2)
    return mirrored(("GPU:0", "GPU:1"), "two halves of a GPU", "auto")


def mlp():
    x, y = np.random.default_rng(1).standard_normal((300, 20)).astype("float32"), np.arange(300) % 5
    layers = [keras.Input((20,)), L.Dense(64, "relu"), L.Dense(5)]
    return keras.Sequential(layers), keras.optimizers.AdamW(1e-3, clipnorm=1.0), x, y


def convolutions():
    x, y = np.random.default_rng(1).standard_normal((300, 16, 16, 3)).astype("float32"), np.arange(300) % 5
    layers = [keras.Input((16, 16, 3)), L.Conv2D(16, 3, padding="same"), L.BatchNormalization(synchronized=JUDGED)]
    layers += [L.ReLU(), L.MaxPooling2D(), L.DepthwiseConv2D(3), L.GroupNormalization(4), L.Conv2DTranspose(8, 3)]
    return keras.Sequential([*layers, L.GlobalAveragePooling2D(), L.Dense(5)]), momentum(), x, y


def gpt():
    x = np.random.default_rng(1).integers(0, 50, (300, 24))
    inputs = keras.Input((24,), dtype="int32")
    h = L.Embedding(50, 32)(inputs)
    for _ in range(2):
        normal = L.LayerNormalization()(h)
        h = h + L.MultiHeadAttention(4, 8)(normal, normal, use_causal_mask=True)
        h = h + L.Dense(32)(L.Dense(64, "gelu")(L.LayerNormalization()(h)))
    return keras.Model(inputs, L.Dense(50)(h)), momentum(), x, np.roll(x, -1, 1)


def lstm():
    rng = np.random.default_rng(1)
    x = rng.integers(1, 50, (300, 15))
    x[:, 10:] *= rng.integers(0, 2, (300, 1))
    options = {"use_cudnn": keras.config.floatx() != "float64" and "auto"}  # where tfdist refuses it
    layers = [keras.Input((15,), dtype="int32"), L.Embedding(50, 16, mask_zero=True)]
    layers += [L.Bidirectional(L.LSTM(16, return_sequences=True, **options)), L.GRU(16, **options), L.Dense(5)]
    return keras.Sequential(layers), momentum(), x, np.arange(300) % 5


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def flat(weights):
    return np.concatenate([weight.reshape(-1).astype("float64") for weight in weights])


if __name__ == "__main__":
    world, name, precision, out = sys.argv[1:]
    JUDGED = world != "keras"
    keras.config.set_floatx(precision)
    tf.config.experimental.enable_tensor_float_32_execution(False)  # TF32 has ten bits of each factor
    given = distribution(world) if JUDGED else None
    keras.utils.set_random_seed(3)
    with given.scope() if given else tf.device("CPU:0"):
        model, optimizer, x, y = globals()[name]()
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        rng = np.random.default_rng(5)  # alike on all devices
        kernels = [v.ndim > 1 and "kernel" in v.name for v in model.weights]
        model.set_weights([rng.normal(0, 0.2, w.shape) if k else w for k, w in zip(kernels, model.get_weights())])
        before = flat(model.get_weights())
        options = {"batch_size": 64, "epochs": 2, "shuffle": False, "verbose": 0}
        fit = (lambda *a, **k: tfdist.fit(model, *a, distribution=given, **k)) if given else model.fit
        losses = fit(x, y, **options).history["loss"]
    np.savez(out, before=before, after=flat(model.get_weights()), losses=losses)
