"""Models with a train_step, test_step or predict_step of their own, as Keras' guides write them."""

import keras
import numpy as np
import tensorflow as tf

from programs.surface.optimizers import by_kind
from programs.surface.program import L, Program, classes, compiled, features, normal, numbers, sparse

ops, metrics = keras.ops, keras.metrics


def small(units=5, activation=None, width=6):
    return keras.Sequential([keras.Input((width,)), L.Dense(6, activation="tanh"), L.Dense(units, activation)])


class Plain(keras.Model):
    """The guide's first example: the loss of compile(), the step of one's own."""

    def __init__(self):
        super().__init__()
        self.net = small()

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class Normalized(Plain):
    """The same, with statistics of the whole batch, through which each replica's loss has gradients on all."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([L.Dense(6, activation="tanh"), L.BatchNormalization(synchronized=True), small()])


class Constrained(Plain):
    """The same, with weights that are constrained."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([L.Dense(6, activation="tanh"), L.Dense(5, kernel_constraint="unit_norm")])


def constrained():
    averaged = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2}
    return compiled(Constrained(), "mse", keras.optimizers.RMSprop(1e-2, **averaged), metrics=["mae"])


class Weighted(Plain):
    """The guide's second example: weights, and metrics that the model keeps itself."""

    def __init__(self):
        super().__init__()
        self.loss_tracker, self.error = metrics.Mean(name="loss"), metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self):
        return [self.loss_tracker, self.error]

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = keras.losses.mean_squared_error(y, y_pred)
            loss = ops.mean(loss if weight is None else loss * weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.error.update_state(y, y_pred, sample_weight=weight)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        self.loss_tracker.update_state(ops.mean(keras.losses.mean_squared_error(y, y_pred)))
        self.error.update_state(y, y_pred, sample_weight=weight)
        return {m.name: m.result() for m in self.metrics}


def weighed_numbers(n):
    return *numbers(n), np.linspace(0.2, 3.0, n).astype("float32")


class OwnTestStep(Plain):
    """Trains as Keras does, and measures in its own way."""

    train_step = keras.Model.train_step

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self._loss_tracker.update_state(ops.mean(ops.abs(y - y_pred)), sample_weight=ops.shape(x)[0])
        return self.get_metrics_result()


class OwnPredictStep(OwnTestStep):
    test_step = keras.Model.test_step

    def predict_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        return 2.0 * self(x, training=False)


class Clips(Plain):
    """Clips gradients by hand."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.1)
        self.optimizer.apply(gradients, self.trainable_variables)
        self._loss_tracker.update_state(loss, sample_weight=ops.shape(x)[0])
        return {"loss": self._loss_tracker.result()}


class GAN(keras.Model):
    """Two optimizers. The noise comes with the data, so that it is the same under every strategy."""

    def __init__(self):
        super().__init__()
        self.discriminator, self.generator = small(1), small(6, width=3)
        self.d_loss, self.g_loss = metrics.Mean(name="d_loss"), metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    def call(self, x):
        return self.generator(x["noise"])

    def losses_of(self, x):
        generated = self.generator(x["noise"])
        logits = self.discriminator(ops.concatenate([generated, x["real"]], 0))
        labels = ops.concatenate([ops.ones_like(logits[: ops.shape(generated)[0]]), 0 * x["real"][:, :1]], 0)
        fooled = self.discriminator(generated)
        return self.loss_fn(labels, logits), self.loss_fn(ops.zeros_like(fooled), fooled)

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape(persistent=True) as tape:
            d_loss, g_loss = self.losses_of(x)
        for loss, net, optimizer in (
            (d_loss, self.discriminator, self.d_optimizer),
            (g_loss, self.generator, self.g_optimizer),
        ):
            optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}

    def test_step(self, data):
        d_loss, g_loss = self.losses_of(data[0] if isinstance(data, tuple) else data)
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


def gan():
    model = GAN()
    model.compile(
        keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.05), keras.losses.BinaryCrossentropy(from_logits=True)
    )
    return model


class Distiller(keras.Model):
    """Keras' example: compute_loss of one's own, with a teacher."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = small(), small()
        self.teacher.trainable = False

    def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        teacher = self.teacher(x, training=False)
        soft = self.distillation_loss_fn(ops.softmax(teacher / 3), ops.softmax(y_pred / 3)) * 9
        return 0.3 * self.student_loss_fn(y, y_pred) + 0.7 * soft

    def call(self, x):
        return self.student(x)


def distiller():
    model = Distiller()
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    model.compile(keras.optimizers.SGD(0.1), [accuracy], sparse(), keras.losses.KLDivergence())
    return model


class Contrastive(keras.Model):
    """SimCLR: the others of the batch are the negatives."""

    def __init__(self):
        super().__init__()
        self.net, self.tracker = small(4), metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, x):
        return self.net(x)

    def contrast(self, x):
        a, b = (ops.normalize(self.net(view), axis=-1) for view in (x, 1.1 * x + 0.1))
        logits = ops.matmul(a, ops.transpose(b)) / 0.5
        return keras.losses.sparse_categorical_crossentropy(ops.arange(ops.shape(x)[0]), logits, from_logits=True)

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            loss = ops.mean(self.contrast(x))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        self.tracker.update_state(ops.mean(self.contrast(data[0] if isinstance(data, tuple) else data)))
        return {"loss": self.tracker.result()}


def contrastive():
    model = Contrastive()
    model.compile(keras.optimizers.SGD(0.1))
    return model


class Siamese(keras.Model):
    """Keras' example of triplets; add_loss does without a step of one's own."""

    def __init__(self):
        super().__init__()
        self.net = small(3)

    def call(self, x):
        anchor, near, far = (self.net(x[name]) for name in ("anchor", "near", "far"))
        to_near, to_far = (ops.sum(ops.square(anchor - other), -1) for other in (near, far))
        self.add_loss(ops.mean(ops.softplus(to_near - to_far + 0.5)))
        return to_near, to_far


def siamese():
    model = Siamese()
    model.compile(keras.optimizers.SGD(0.05))
    return model


def triplets(n):
    return ({"anchor": features(n), "near": features(n) + 0.1 * normal(n, 6, seed=1), "far": normal(n, 6, seed=2)},)


class WithoutOptimizerOfKeras(Plain):
    """Updates its variables by hand."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = ops.mean(ops.square(y - self(x, training=True)))
        for variable in self.trainable_variables:
            variable.assign_sub(0.1 * tape.gradient(loss, variable))
        return {"loss": loss}


class SetsRate(Plain):
    """Makes a step of a length that Polyak's rule finds in the batch."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(y - self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.learning_rate = 0.3 * loss / sum(ops.sum(g * g) for g in gradients)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


class LeavesOut(Plain):
    """Gives the optimizer no weights without a gradient."""

    def __init__(self):
        super().__init__()
        self.unused = L.Dense(3)
        self.unused.build((None, 6))
        self.mean = metrics.Mean(name="mean")

    metrics = property(lambda self: [*super().metrics, self.mean])  # names that twice

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(y - self(x, training=True)))
        found = zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.optimizer.apply_gradients([(g, v) for g, v in found if g is not None])
        return {"loss": loss}


class Crops(Plain):
    """Calls layers that are not built yet with what `call` is not given."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([L.Dense(6, activation="tanh"), L.Dense(5)])

    def train_step(self, data):
        x, y = data
        return super().train_step((x[:, :4], y))


class Looks(Plain):
    """Looks at values, as when it is debugged."""

    def train_step(self, data):
        logs = super().train_step(data)
        assert float(data[0][0, 0]) < 100
        return logs


def eagerly():
    return compiled(Looks(), "mse", keras.optimizers.SGD(0.1, momentum=0.9), metrics=["mae"], run_eagerly=True)


NO_MEAN = {"several": "computes is not a mean over examples"}


def step(name, build, data, **kwargs):
    return Program(f"step {name}", build, data, **kwargs)


PROGRAMS = [
    step("plain", lambda: compiled(Plain(), "mse", metrics=[metrics.MeanAbsoluteError(name="mae")]), numbers),
    step("that crops", lambda: compiled(Crops(), "mse", metrics=["mae"]), numbers, only_fit="call takes cropped rows"),
    step("that is run eagerly", eagerly, numbers, rows=(61,), eagerly="it looks at values",
         refused=dict.fromkeys(("multi_worker 2", "horovod 2"), "run_eagerly=True")),
    step("with batch normalization", lambda: compiled(Normalized(), "mse"), numbers,
         precision="float64", tolerance=1e-12),
    step("with two optimizers in one, in float64", lambda: compiled(Plain(), "mse", by_kind()), numbers,
         precision="float64", tolerance=1e-12),
    step("with weights", lambda: compiled(Weighted(), "mse"), weighed_numbers),
    step("for tests", lambda: compiled(OwnTestStep(), "mse"), numbers),
    step("for predictions", lambda: compiled(OwnPredictStep(), "mse"), numbers),
    step("with averages of constrained weights", constrained, numbers),
    step("that leaves out weights, with averages",
         lambda: compiled(LeavesOut(), "mse", keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8)), numbers),
    step("that sets the learning rate", lambda: compiled(SetsRate(), "mse"), numbers,
         refused={"several": "computes the learning rate from the batch"}),
    step("that clips", lambda: compiled(Clips(), "mse"), numbers, refused=NO_MEAN),
    step("without an optimizer", lambda: compiled(WithoutOptimizerOfKeras(), "mse"), numbers,
         refused={"several": "after an update: add it up over the replicas"}),
    step("GAN", gan, lambda n: ({"real": features(n), "noise": normal(n, 3, seed=9)},)),
    step("distillation", distiller, classes),
    step("contrastive", contrastive, lambda n: (features(n),), refused=NO_MEAN),
    step("siamese by add_loss", siamese, triplets),
]  # fmt: skip
