"""What the users of generated programs have written themselves: layers, losses, metrics, callbacks, data."""

import keras
import numpy as np
import tensorflow as tf

ops = keras.ops
serializable = keras.saving.register_keras_serializable("generated")


@serializable
class ScalesAndCounts(keras.layers.Layer):
    """Has a weight, and a count of its calls."""

    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", regularizer="l2")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32")

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1)
        return x * self.factor


@serializable
class AddsPenalty(keras.layers.Layer):
    """Passes on what it gets, whose mean square it adds to the loss."""

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


@serializable
class KeepsMean(keras.layers.Layer):
    """Subtracts a moving average over examples, which it keeps."""

    def build(self, shape):
        self.average = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.average.assign(0.9 * self.average + 0.1 * ops.mean(ops.cast(x, self.average.dtype), 0))
        return x - 0.5 * ops.stop_gradient(ops.cast(self.average, x.dtype))


@serializable
class RunningMaximum(keras.layers.Layer):
    """Keeps the largest number that it has seen."""

    def build(self, shape):
        self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.largest.assign(ops.maximum(self.largest, ops.cast(ops.max(x), self.largest.dtype)))
        return x


@serializable
class OwnMetric(keras.layers.Layer):
    """Has a metric of what goes through it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.size = keras.metrics.Mean(name="size")

    def call(self, x):
        self.size.update_state(ops.mean(ops.square(x), -1))
        return x


@serializable
class Tied(keras.layers.Layer):
    """Goes through a dense layer and back through its transpose."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(4, activation="tanh")

    def call(self, x):
        return ops.matmul(self.dense(x), ops.transpose(ops.cast(self.dense.kernel, self.compute_dtype)))


@serializable
class Chain(keras.Model):
    """A model that is a subclass, of layers that are called one after the other, and some heads."""

    def __init__(self, parts, heads, **kwargs):
        super().__init__(**kwargs)
        self.parts, self.heads = parts, heads

    def call(self, x, training=None):
        for part in self.parts:
            x = part(x)
        if isinstance(self.heads, dict):
            return {name: head(x) for name, head in self.heads.items()}
        given = [head(x) for head in self.heads]
        return given[0] if len(given) == 1 else given


@serializable
class OwnObjective(keras.Model):
    """Adds to its loss what it computes from its outputs."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + sum(0.1 * ops.mean(ops.square(output)) for output in keras.tree.flatten(y_pred))


@serializable
class LogsMore(keras.Model):
    """Logs a number of its own beside the metrics."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        size = ops.mean(ops.abs(keras.tree.flatten(y_pred)[0]))
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "size": size}


@serializable
class OwnStep(keras.Model):
    """Trains by a step of its own, which is a function of TensorFlow's."""

    @tf.function
    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs, weight)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {**self.compute_metrics(x, y, outputs, weight), "own": loss}


@serializable
class OwnFit(keras.Model):
    """Trains in two calls, and multiplies its predictions."""

    def fit(self, *args, epochs=1, callbacks=None, **options):
        first = super().fit(*args, **{**options, "epochs": 1 + options.get("initial_epoch", 0)})
        history = super().fit(*args, epochs=epochs, callbacks=callbacks, **options)
        history.history["at first"] = first.history["loss"]
        return history

    def predict(self, *args, **options):
        return keras.tree.map_structure(lambda outputs: 2 * outputs, super().predict(*args, **options))


@serializable
class Doubles(keras.optimizers.SGD):
    """Doubles what it is given, before anything is clipped."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(None if g is None else 2.0 * g, v) for g, v in grads_and_vars])


@serializable
class Centres(keras.optimizers.Adam):
    """Takes the mean from each gradient."""

    def apply(self, grads, trainable_variables=None):
        return super().apply([None if g is None else g - ops.mean(g) for g in grads], trainable_variables)


@serializable
class Remembers(keras.optimizers.Optimizer):
    """Has a state of its own, one for all weights and one for each."""

    def __init__(self, learning_rate=0.05, name="remembers", **kwargs):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)

    def build(self, variables):
        super().build(variables)
        self.size = self.add_variable((), "zeros", name="size")
        self.last = [self.add_variable_from_reference(v, "last") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        last = self.last[self._get_variable_index(variable)]
        self.assign(last, 0.5 * last + gradient)
        self.assign_add(self.size, ops.cast(ops.sum(ops.square(gradient)), self.size.dtype))
        rate = ops.cast(learning_rate / (1.0 + self.size), variable.dtype)
        self.assign_sub(variable, rate * last)


@serializable
def by_example(y_true, y_pred):
    return ops.mean(ops.abs(ops.cast(y_true, y_pred.dtype) - y_pred) ** 1.5, -1)


@serializable
def by_element(y_true, y_pred):
    return ops.square(ops.cast(y_true, y_pred.dtype) - y_pred)


@serializable
def to_one_number(y_true, y_pred):
    return ops.mean(ops.square(ops.cast(y_true, y_pred.dtype) - y_pred))


@serializable
def sum_to_one_number(y_true, y_pred):
    return 0.05 * ops.sum(ops.square(ops.cast(y_true, y_pred.dtype) - y_pred))


@serializable
def root_of_the_mean(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(ops.cast(y_true, y_pred.dtype) - y_pred)))


@serializable
def embedded_norm(y_true, y_pred):
    return ops.sqrt(ops.sum(ops.square(y_pred), -1))


@serializable
class OwnLoss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.max(ops.abs(ops.cast(y_true, y_pred.dtype) - y_pred), -1)


@serializable
class Largest(keras.metrics.Metric):
    """The largest output, whatever the targets are."""

    def __init__(self, name="largest", **kwargs):
        super().__init__(name=name, **kwargs)
        self.value = self.add_weight(shape=(), initializer="zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.cast(ops.max(y_pred), self.value.dtype)))

    def result(self):
        return 1.0 * self.value


@serializable
class LateMean(keras.metrics.Metric):
    """A mean by column, whose variables are made when the first outputs are there."""

    def __init__(self, name="late", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = None

    def update_state(self, y_true, y_pred, sample_weight=None):
        if self.total is None:
            self.total = self.add_variable((y_pred.shape[-1],), "zeros", name="total")
            self.count = self.add_variable((), "zeros", name="count")
        values = ops.cast(y_pred, self.total.dtype)
        self.total.assign(self.total + ops.sum(values, 0))
        self.count.assign(self.count + ops.cast(ops.shape(values)[0], self.count.dtype))

    def result(self):
        return 0.0 if self.total is None else ops.sum(self.total / ops.maximum(self.count, 1.0))


@serializable
class TwoNumbers(keras.metrics.Mean):
    """A metric whose result is a dict."""

    def __init__(self, name="two", **kwargs):
        super().__init__(name=name, **kwargs)

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(by_example(y_true, y_pred), sample_weight)

    def result(self):
        return {"once": super().result(), "twice": 2 * super().result()}


class Notes(keras.callbacks.Callback):
    """Writes down what it is told, and what it sees of the model."""

    def __init__(self, notes):
        super().__init__()
        self.notes = notes

    def on_train_begin(self, logs=None):
        self.notes.append(("train begins", dict(logs or {})))

    def on_epoch_begin(self, epoch, logs=None):
        self.notes.append((f"epoch {epoch} begins", {"rate": self.model.optimizer.learning_rate}))

    def on_epoch_end(self, epoch, logs=None):
        self.notes.append((f"epoch {epoch}", {**(logs or {}), "updates": self.model.optimizer.iterations}))

    def on_test_end(self, logs=None):
        self.notes.append(("test", dict(logs or {})))

    def on_train_end(self, logs=None):
        self.notes.append(("train ends", dict(logs or {})))


class BatchNotes(Notes):
    """The same, by batch too."""

    def on_train_batch_end(self, batch, logs=None):
        self.notes.append((f"batch {batch}", dict(logs or {})))

    def on_test_batch_end(self, batch, logs=None):
        self.notes.append((f"test batch {batch}", dict(logs or {})))


class Rates(keras.callbacks.Callback):
    """Sets the learning rate of each update."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.05 / (1 + batch)


class Stops(keras.callbacks.Callback):
    """Ends the training at the second batch of the second epoch, or the first one of a later one."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch + batch >= 2:
            self.model.stop_training = True


def shrink(model):
    for weight in model.trainable_weights:
        weight.assign(0.9 * weight)


class Rows(keras.utils.PyDataset):
    """Batches of arrays, nested as these are."""

    def __init__(self, data, size, **kwargs):
        super().__init__(**kwargs)
        self.data, self.size = data, size

    def __len__(self):
        return -(-len(keras.tree.flatten(self.data)[0]) // self.size)

    def __getitem__(self, i):
        return keras.tree.map_structure(lambda a: a[i * self.size : (i + 1) * self.size], self.data)


def endless(data, size):
    """Yields the batches of arrays, again and again."""
    rows = Rows(data, size)
    while True:
        yield from (rows[i] for i in range(len(rows)))


class Draw:
    """Data by name and number of rows, from one generator."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def normal(self, *shape):
        return self.random.normal(size=shape)

    def classes(self, n):
        return self.random.integers(0, 5, n)

    def yes_or_no(self, *shape):
        return self.random.integers(0, 2, shape).astype("float32")

    def weights(self, *shape):
        drawn = self.random.uniform(0.2, 3.0, shape)
        drawn.flat[1::5] = 0.0
        return drawn

    def tokens(self, n):
        x = self.random.integers(1, 12, (n, 6))
        x[np.arange(6)[None] >= self.random.integers(0, 7, n)[:, None]] = 0  # some have none at all
        return x.astype("int32")

    def padded(self, n):
        return self.normal(n, 6, 3) * (self.tokens(n) > 0)[:, :, None]

    def words(self, n):
        return tf.gather(list("rgbk"), self.random.integers(0, 4, (n, 2)))

    def sentences(self, n):
        return tf.strings.reduce_join(self.words(n), axis=-1, separator=" ")
