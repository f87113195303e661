"""A variational autoencoder, and a generative adversarial network of convolutions."""

import keras
import numpy as np
import tensorflow as tf

from programs.surface.program import L, Program, rng

ops = keras.ops
DRAWS = "each replica draws its own noise"

# -- VAE ------------------------------------------------------------------------


class Sampling(L.Layer):
    """Draws a point of latent space; without `noise` always the middle."""

    def __init__(self, noise=True, **kwargs):
        super().__init__(**kwargs)
        self.noise, self.seed_generator = noise, keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_variance = inputs
        drawn = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + self.noise * ops.exp(0.5 * log_variance) * drawn


class VAE(keras.Model):
    """Has no `call`: nobody but its train_step asks for one."""

    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder, decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.kl_loss_tracker]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            z_mean, z_log_var, z = self.encoder(data)
            reconstruction = self.decoder(z)
            each = ops.sum(keras.losses.binary_crossentropy(data, reconstruction), axis=(1, 2))
            reconstruction_loss = ops.mean(each)
            kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights))
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "kl_loss": self.kl_loss_tracker.result(),
        }


def vae(noise):
    def build():
        image = keras.Input((28, 28, 1))
        x = L.Conv2D(4, 3, activation="relu", strides=2, padding="same")(image)
        x = L.Conv2D(6, 3, activation="relu", strides=2, padding="same")(x)
        x = L.Dense(8, activation="relu")(L.Flatten()(x))
        mean, log_variance = L.Dense(2, name="z_mean")(x), L.Dense(2, name="z_log_var")(x)
        z = Sampling(noise)([mean, log_variance])
        encoder = keras.Model(image, [mean, log_variance, z], name="encoder")
        latent = keras.Input((2,))
        x = L.Reshape((7, 7, 6))(L.Dense(7 * 7 * 6, activation="relu")(latent))
        x = L.Conv2DTranspose(6, 3, activation="relu", strides=2, padding="same")(x)
        x = L.Conv2DTranspose(4, 3, activation="relu", strides=2, padding="same")(x)
        out = L.Conv2DTranspose(1, 3, activation="sigmoid", padding="same")(x)
        model = VAE(encoder, keras.Model(latent, out, name="decoder"))
        model.compile(keras.optimizers.Adam())
        return model

    return build


def digits(n):
    return (rng().uniform(0, 1, (n, 28, 28, 1)).astype("float32"),)


def grid(model, folder):
    """Digits over latent space, and where the images lie in it."""
    z = np.stack(np.meshgrid([-1.0, 0.0, 1.0], [-1.0, 1.0]), -1).reshape(-1, 2).astype("float32")
    return [model.decoder.predict(z, verbose=0), model.encoder.predict(digits(9)[0], verbose=0)[0]]


NO_CALL = "the model has no call, and no test_step"

# -- DCGAN ------------------------------------------------------------------------


class GAN(keras.Model):
    """Two optimizers, and labels with noise. Without `noise`, the latent points are always the same."""

    def __init__(self, discriminator, generator, latent_dim, noise):
        super().__init__()
        self.discriminator, self.generator, self.latent_dim = discriminator, generator, latent_dim
        self.seed_generator, self.noise = keras.random.SeedGenerator(1337), noise

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def latent(self, count):
        drawn = keras.random.normal((count, self.latent_dim), seed=self.seed_generator)
        return drawn if self.noise else 0 * drawn + 0.5

    def train_step(self, real_images):
        batch_size = ops.shape(real_images)[0]
        generated = self.generator(self.latent(batch_size))
        both = ops.concatenate([generated, real_images], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        labels += 0.05 * self.noise * keras.random.uniform(ops.shape(labels), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights))

        points, misleading = self.latent(batch_size), ops.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(misleading, self.discriminator(self.generator(points)))
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights))

        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class GANMonitor(keras.callbacks.Callback):
    """Writes what the generator makes after each epoch."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.seed_generator = folder, keras.random.SeedGenerator(42)

    def on_epoch_end(self, epoch, logs=None):
        points = keras.random.normal((3, self.model.latent_dim), seed=self.seed_generator)
        np.save(self.folder / f"generated_{epoch}.npy", ops.convert_to_numpy(self.model.generator(points) * 255))


def dcgan(noise):
    def build():
        discriminator = keras.Sequential([keras.Input((16, 16, 3)), L.Conv2D(4, 4, strides=2, padding="same")])
        for layer in (L.LeakyReLU(0.2), L.Conv2D(8, 4, strides=2, padding="same"), L.LeakyReLU(0.2), L.Flatten()):
            discriminator.add(layer)
        discriminator.add(L.Dropout(0.2 if noise else 0.0))
        discriminator.add(L.Dense(1, activation="sigmoid"))
        generator = keras.Sequential([keras.Input((6,)), L.Dense(4 * 4 * 6), L.Reshape((4, 4, 6))])
        for filters in (6, 8):
            generator.add(L.Conv2DTranspose(filters, 4, strides=2, padding="same"))
            generator.add(L.LeakyReLU(0.2))
        generator.add(L.Conv2D(3, 5, padding="same", activation="sigmoid"))
        gan = GAN(discriminator, generator, 6, noise)
        gan.compile(keras.optimizers.Adam(1e-4), keras.optimizers.Adam(1e-4), loss_fn=keras.losses.BinaryCrossentropy())
        return gan

    return build


def faces(n):
    images = rng().integers(0, 256, (n, 16, 16, 3)).astype("float32")
    return tf.data.Dataset.from_tensor_slices(images).batch(16).map(lambda x: x / 255.0)


def written(model, folder):
    return [np.load(path) for path in sorted(folder.glob("generated_*.npy"))]


EXAMPLES = [
    Program("VAE", vae(True), digits, look=grid, rows=(32, 41), batch=16, only_fit=NO_CALL, unlike_one=DRAWS),
    Program("VAE, without noise", vae(False), digits, look=grid, rows=(32, 41), batch=16, only_fit=NO_CALL),
    Program("DCGAN", dcgan(True), faces, lambda folder: {"callbacks": [GANMonitor(folder)]}, written, rows=(32, 41),
            only_fit=NO_CALL, unlike_one=DRAWS),
    Program("DCGAN, without noise", dcgan(False), faces, lambda folder: {"callbacks": [GANMonitor(folder)]}, written,
            rows=(32, 41), only_fit=NO_CALL),
]  # fmt: skip
