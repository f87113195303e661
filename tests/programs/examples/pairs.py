"""Siamese networks: a contrastive loss on pairs, and triplets with a train_step; and a student that has a teacher."""

import keras
import numpy as np
import tensorflow as tf

from programs.surface.program import L, Program, normal, rng

ops = keras.ops

# -- contrastive loss on pairs ------------------------------------------------


def contrastive_loss(margin=1):
    """Returns a loss by which pairs that are alike (0) come near, and others (1) go as far apart as `margin`."""

    def loss(y_true, y_pred):
        far = ops.square(ops.maximum(margin - y_pred, 0))
        return ops.mean((1 - y_true) * ops.square(y_pred) + y_true * far)

    return loss


def siamese_of_pairs(synchronized):
    def build():
        image = keras.Input((28, 28, 1))
        x = L.BatchNormalization(synchronized=synchronized)(image)
        x = L.AveragePooling2D(pool_size=(2, 2))(L.Conv2D(4, (5, 5), activation="tanh")(x))
        x = L.AveragePooling2D(pool_size=(2, 2))(L.Conv2D(6, (5, 5), activation="tanh")(x))
        x = L.BatchNormalization(synchronized=synchronized)(L.Flatten()(x))
        tower = keras.Model(image, L.Dense(10, activation="tanh")(x))
        one, other = keras.Input((28, 28, 1)), keras.Input((28, 28, 1))
        apart = L.Lambda(lambda v: ops.sqrt(ops.sum(ops.square(v[0] - v[1]), axis=1, keepdims=True) + 1e-7))
        distance = apart([tower(one), tower(other)])
        distance = L.BatchNormalization(synchronized=synchronized)(distance)
        model = keras.Model([one, other], L.Dense(1, activation="sigmoid")(distance))
        model.compile(loss=contrastive_loss(margin=1), optimizer="RMSprop", metrics=["accuracy"])
        return model

    return build


def image_pairs(n):
    y = rng().integers(0, 2, n).astype("float32")
    return [normal(n, 28, 28, 1), normal(n, 28, 28, 1, seed=3)], y


# -- triplets ---------------------------------------------------------------------


class DistanceLayer(L.Layer):
    """How far the anchor is from the positive and from the negative."""

    def call(self, anchor, positive, negative):
        return ops.sum(tf.square(anchor - positive), -1), ops.sum(tf.square(anchor - negative), -1)


class SiameseModel(keras.Model):
    """Its loss has an entry per triplet, of which the tape gives the gradient of the sum; `mean` takes the mean."""

    def __init__(self, siamese_network, mean, margin=0.5):
        super().__init__()
        self.siamese_network, self.margin, self.mean = siamese_network, margin, mean
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        return self.siamese_network(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._compute_loss(data)
            if self.mean:
                loss = tf.reduce_mean(loss)
        gradients = tape.gradient(loss, self.siamese_network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.siamese_network.trainable_weights))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        self.loss_tracker.update_state(self._compute_loss(data))
        return {"loss": self.loss_tracker.result()}

    def _compute_loss(self, data):
        near, far = self.siamese_network(data)
        return tf.maximum(near - far + self.margin, 0.0)

    @property
    def metrics(self):
        return [self.loss_tracker]


def siamese_of_triplets(mean):
    """The last layers of a frozen backbone train on."""

    def build():
        backbone = keras.Sequential([keras.Input((12, 12, 3)), L.Conv2D(4, 3, strides=2), L.BatchNormalization()])
        backbone.add(L.Conv2D(6, 3, activation="relu", name="trains"))
        for layer in backbone.layers:
            layer.trainable = layer.name == "trains"
        x = L.Dense(8, activation="relu")(L.Flatten()(backbone.outputs[0]))
        embedding = keras.Model(backbone.inputs, L.Dense(6)(x), name="Embedding")
        three = [keras.Input((12, 12, 3), name=name) for name in ("anchor", "positive", "negative")]
        network = keras.Model(inputs=three, outputs=DistanceLayer()(*(embedding(2 * image) for image in three)))
        model = SiameseModel(network, mean)
        model.compile(optimizer=keras.optimizers.Adam(0.0001))
        return model

    return build


def triplets(n):
    """A data set zipped of three."""
    parts = (tf.data.Dataset.from_tensor_slices(normal(n, 12, 12, 3, seed=seed)) for seed in range(3))
    return tf.data.Dataset.zip(tuple(parts)).batch(16, drop_remainder=False).prefetch(tf.data.AUTOTUNE)


OF_THREE = "predict would give the model the first of the three"

# -- distillation -------------------------------------------------------------------


class Distiller(keras.Model):
    """Trains a student by a teacher's softened outputs."""

    def __init__(self, student, teacher):
        super().__init__()
        self.teacher, self.student = teacher, student

    def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn
        self.alpha, self.temperature = alpha, temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        by_teacher = ops.softmax(self.teacher(x, training=False) / self.temperature, axis=1)
        by_student = ops.softmax(y_pred / self.temperature, axis=1)
        soft = self.distillation_loss_fn(by_teacher, by_student) * (self.temperature**2)
        return self.alpha * self.student_loss_fn(y, y_pred) + (1 - self.alpha) * soft

    def call(self, x):
        return self.student(x)


def of_digits(filters, name):
    layers = [L.Conv2D(filters, (3, 3), strides=(2, 2), padding="same"), L.LeakyReLU(negative_slope=0.2)]
    layers += [L.MaxPooling2D(pool_size=(2, 2), strides=(1, 1), padding="same")]
    layers += [L.Conv2D(2 * filters, (3, 3), strides=(2, 2), padding="same"), L.Flatten(), L.Dense(10)]
    return keras.Sequential([keras.Input((28, 28, 1)), *layers], name=name)


def sparse():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def teacher():
    model = of_digits(6, "teacher")
    model.compile(keras.optimizers.Adam(), sparse(), metrics=[keras.metrics.SparseCategoricalAccuracy()])
    return model


def distiller(trained):
    """What is trained after the teacher."""
    model = Distiller(student=of_digits(3, "student"), teacher=trained)
    model.compile(
        optimizer=keras.optimizers.Adam(),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss_fn=sparse(),
        distillation_loss_fn=keras.losses.KLDivergence(),
        alpha=0.1,
        temperature=10,
    )
    return model


def alone(trained):
    """The student without its teacher, for comparison; the last part of the example."""
    model = keras.models.clone_model(trained.student)
    model.compile(keras.optimizers.Adam(), sparse(), metrics=[keras.metrics.SparseCategoricalAccuracy()])
    return model


def digits(n):
    return rng().uniform(0, 1, (n, 28, 28, 1)).astype("float32"), rng().integers(0, 10, n).astype(np.int64)


EXAMPLES = [
    Program("siamese pairs", siamese_of_pairs(False), image_pairs, rows=(32, 41), batch=16,
            refused={"several": "normalizes with the rows of its own replica"}),
    Program("siamese pairs, synchronized", siamese_of_pairs(True), image_pairs, rows=(32, 41), batch=16),
    Program("siamese triplets", siamese_of_triplets(False), triplets, rows=(32, 41), only_fit=OF_THREE,
            refused={"several": "train_step of SiameseModel computes is no mean over examples"}),
    Program(
        "siamese triplets, by the mean",
        siamese_of_triplets(True),
        triplets,
        rows=(32, 41),
        only_fit=OF_THREE,
        precision="float64",  # the last bias cancels out: Adam makes much of its rounding
    ),
    Program("distillation", teacher, digits, then=(distiller, alone), rows=(32, 41), batch=16),
]  # fmt: skip
