"""Trains a variational autoencoder, whose own `train_step` computes its loss and keeps means of two parts of it.

tfdist run --virtual_devices=2 examples/variational_autoencoder.py
"""

import importlib.resources

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
digits = np.loadtxt(importlib.resources.files("tfdist.data.datasets") / "digits.csv.gz", delimiter=",")
images = digits[:, :64].astype("float32") / 16


class Sampling(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, mean, log_variance):
        noise = keras.random.normal(keras.ops.shape(mean), seed=self.seed_generator)
        return mean + keras.ops.exp(0.5 * log_variance) * noise


class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.layers.Dense(64, activation="gelu"), keras.layers.Dense(2 * 4)])
        self.sample = Sampling()
        self.decoder = keras.Sequential([keras.layers.Dense(64, activation="gelu"), keras.layers.Dense(64)])
        self.means = [keras.metrics.Mean(name) for name in ("loss", "reconstruction", "divergence")]

    def call(self, x):
        mean, log_variance = keras.ops.split(self.encoder(x), 2, axis=-1)
        return self.decoder(self.sample(mean, log_variance)), mean, log_variance

    def train_step(self, x):
        with tf.GradientTape() as tape:
            output, mean, log_variance = self(x, training=True)
            reconstruction = keras.ops.mean(keras.ops.sum((x - output) ** 2, -1))
            square = mean**2 + keras.ops.exp(log_variance) - log_variance - 1
            divergence = 0.1 * keras.ops.mean(keras.ops.sum(square, -1))
            loss = reconstruction + divergence
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        for mean, value in zip(self.means, (loss, reconstruction, divergence)):
            mean.update_state(value)
        return {mean.name: mean.result() for mean in self.means}


model = Autoencoder()
model.compile(keras.optimizers.Adam(3e-3))
history = model.fit(images, batch_size=64, epochs=10, shuffle=False, verbose=2)
print(f"loss {history.history['loss'][-1]:.6f}, reconstruction {history.history['reconstruction'][-1]:.4f}")
