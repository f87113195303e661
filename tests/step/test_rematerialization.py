"""What is computed again in the backward pass trains the model that it trains without, and in less memory."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.covering import first
from support.refusals import refused
from support.training_cases import all_same

import tfdist

L = keras.layers


class Block(L.Layer):
    """Draws, counts, adds losses, and leaves it to the model to say whether it trains."""

    def __init__(self, way="plain"):
        super().__init__()
        self.hidden, self.out = L.Dense(16, activation="gelu"), L.Dense(8, activity_regularizer="l2")
        self.normalization, self.dropout = L.BatchNormalization(synchronized=True), L.Dropout(0.3, seed=5)
        self.seen, self.seeds = keras.metrics.Sum(), keras.random.SeedGenerator(7)
        self.calls = 0
        self.inner = keras.remat(self.computed) if way == "keras.remat" else self.computed
        self.way, self.scale = way, 1.0

    def build(self, shape):
        self.hidden.build(shape)
        self.normalization.build((None, 16))
        self.out.build((None, 16))

    def computed(self, x):
        self.calls += 1
        self.add_loss(1e-3 * keras.ops.mean(x**2))
        factor = keras.random.uniform((keras.ops.shape(x)[0], 1), dtype=x.dtype, seed=self.seeds)
        hidden = self.normalization(self.hidden(x)) * factor
        self.seen.update_state(hidden)
        return self.out(self.dropout(hidden))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)

    def call(self, x):
        scaled = lambda t, scale: self.inner(t) * scale * self.scale
        scaled = tf.recompute_grad(scaled) if self.way == "tf.recompute_grad" else scaled
        return x + scaled(x, tf.constant(0.5, x.dtype))


class Stack(keras.Model):
    """Builds its layers when it is called first."""

    def __init__(self):
        super().__init__()
        self.blocks, self.last = [Block() for _ in range(3)], L.Dense(1)

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def residual(size=8):
    x = inputs = keras.Input((size,))
    for seed in range(2):
        y = L.BatchNormalization(synchronized=True)(L.Dense(16, activation="relu")(x))
        x = L.add([x, L.Dense(size)(L.Dropout(0.2, seed=seed)(y))])
    return keras.Model(inputs, L.Dense(1)(x))


def nested():
    inputs = keras.Input((8,))
    return keras.Model(inputs, L.Dense(1)(L.Dropout(0.1, seed=9)(residual()(L.Dense(8)(inputs)))))


def two_outputs():
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((4,), name="b")}
    early = L.Dense(8)(L.concatenate(list(inputs.values())))
    late = L.Dense(1)(L.LayerNormalization()(L.add([early, L.Dense(8, activation="tanh")(early)])))
    return keras.Model(inputs, {"early": L.Dense(1)(early), "late": late, "taken": early})


def sequences():
    dropped = dict(dropout=0.2, recurrent_dropout=0.1, seed=1)
    layers = [L.Embedding(20, 8, mask_zero=True), L.LSTM(8, return_sequences=True, **dropped), L.GRU(4), L.Dense(1)]
    return keras.Sequential([keras.Input((6,)), *layers])


BLOCKS = lambda way: keras.Sequential([keras.Input((8,)), Block(way), Block(way), L.Dense(1)])
MODELS = {
    "blocks": BLOCKS, "unbuilt": lambda way: Stack(), "residual": lambda way: residual(),
    "nested": lambda way: nested(), "two outputs": lambda way: two_outputs(), "sequences": lambda way: sequences(),
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_float64():
    keras.utils.clear_session()  # as scripts do between two models: it replaces what Keras keeps for each thread
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


def examples(name, n=24):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(n, 8)), random.normal(size=(n, 1))
    if name == "sequences":
        return random.integers(0, 20, (n, 6)), y
    return ({"a": x[:, :4], "b": x[:, 4:]}, {"early": y, "late": -y, "taken": x}) if name == "two outputs" else (x, y)


def trained(name, way, distribution, fit=tfdist.fit, n=24, **options):
    keras.utils.set_random_seed(3)
    scope = keras.RematScope() if way == "keras.RematScope" else contextlib.nullcontext()
    with distribution.scope() if fit is tfdist.fit else contextlib.nullcontext(), scope:
        model = MODELS[name](way)
    if way == "tfdist.remat":
        tfdist.remat(model)
    with distribution.scope() if fit is tfdist.fit else contextlib.nullcontext():
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", jit_compile=options.pop("jit", False))
    x, y = examples(name, n)
    options = options | ({"distribution": distribution} if fit is tfdist.fit else {})
    history = fit(model, x, y, batch_size=6, epochs=2, shuffle=False, verbose=0, **options).history
    return model, [*(v.numpy() for v in model.variables), *history.values()]


WAYS = [
    *(("blocks", way) for way in ("tfdist.remat", "keras.remat", "tf.recompute_grad")),
    ("unbuilt", "tfdist.remat"),
    *((n, w) for n in ("residual", "nested", "two outputs", "sequences") for w in ("tfdist.remat", "keras.RematScope")),
]

QUICK = ("residual", "tfdist.remat", 2)
CASES = sorted(((*way, replicas) for way in WAYS for replicas in (1, 2)), key=lambda case: case != QUICK)


@pytest.mark.parametrize("name, way, replicas", first(0, CASES))
def test_it_trains_what_it_trains_without(connect, name, way, replicas):
    _, expected = trained(name, "plain", connect(replicas), n=22, check_agreement="off")
    _, seen = trained(name, way, connect(replicas), n=22)
    all_same(seen, expected, rtol=1e-11, atol=1e-13)


class Attribute(keras.Model):
    """Hands a tensor to a block by an attribute, and reads what it adds to the loss."""

    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = L.Dense(8), Block(), L.Dense(1)

    def call(self, x):
        self.block.scale = self.first(x)
        return self.last(self.block(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            distance = tf.reduce_mean((self(x, training=True) - y) ** 2)
            penalty = 10.0 * sum(self.block.losses)
        # As a GAN does: a weight moves before another gradient is asked for.
        self.optimizer.apply(tape.gradient(penalty, self.block.trainable_variables), self.block.trainable_variables)
        gradients = tape.gradient(distance, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"distance": distance, "penalty": penalty}


@pytest.mark.whole
def test_a_step_of_the_models_own_sees_the_same(connect):
    ended = []
    for with_remat in False, True:
        keras.utils.set_random_seed(3)
        model = Attribute()
        if with_remat:
            tfdist.remat(model.block)
        model.compile(keras.optimizers.SGD(0.01))
        model(examples("blocks")[0])
        model.optimizer.build(model.trainable_variables)
        options = dict(batch_size=6, shuffle=False, verbose=0, distribution=connect(1), check_agreement="off")
        history = tfdist.fit(model, *examples("blocks"), **options).history
        ended.append([*(v.numpy() for v in model.variables), *history.values()])
    all_same(*ended, rtol=1e-11, atol=1e-13)


class Branches(L.Layer):
    """Reads state in both branches first, writes a weight that trains, and hands on complex numbers."""

    def __init__(self):
        super().__init__()
        self.dense, self.frozen, self.clipped = L.Dense(8), L.Dense(8, trainable=False), L.Dense(8, use_bias=False)

    def build(self, shape):
        for layer in self.dense, self.frozen, self.clipped:
            layer.build((None, 8))

    def call(self, x):
        self.clipped.kernel.assign(keras.ops.clip(self.clipped.kernel, -0.3, 0.3) * 0.9)
        positive = keras.ops.mean(x) > 0
        x = keras.ops.cond(positive, lambda: self.frozen(x), lambda: 2.0 * self.frozen(x))
        return tf.signal.fft(tf.cast(self.clipped(self.dense(x)), tf.complex128))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "complex128")


class Back(L.Layer):
    def call(self, x):
        return tf.math.real(tf.signal.ifft(x))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "float64")


@pytest.mark.whole
def test_branches_written_weights_and_complex_numbers(connect):
    ended = []
    for with_remat in False, True:
        keras.utils.set_random_seed(3)
        x = inputs = keras.Input((8,))
        layers = [Branches(), Back()]
        x = layers[0](L.SpectralNormalization(L.Dense(8))(x))
        model = keras.Model(inputs, L.Dense(1)(layers[1](x)))
        for layer in [*layers, model.layers[1]] if with_remat else []:
            tfdist.remat(layer)
        model.compile(keras.optimizers.SGD(0.01), "mse")
        options = dict(batch_size=6, shuffle=False, verbose=0, distribution=connect(1))
        history = tfdist.fit(model, *examples("residual"), **options).history
        ended.append([*(v.numpy() for v in model.variables), *history.values()])
    all_same(*ended, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["residual", pytest.param("unbuilt", marks=pytest.mark.whole)])
def test_it_trains_what_keras_trains_and_predicts_and_exports(connect, name, tmp_path):
    _, expected = trained(name, "plain", connect(1), fit=keras.Model.fit)
    model, seen = trained(name, "tfdist.remat", connect(1))
    all_same(seen, expected, rtol=1e-9, atol=1e-11)
    x, _ = examples(name)
    expected = tfdist.predict(model, x, verbose=0)
    all_same([model.predict(x, verbose=0)], [expected], rtol=1e-12)
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    all_same([exported.serve(x)], [expected], rtol=1e-12)


@pytest.mark.parametrize("options", first(0, [{"accumulate": 2}, {"jit": True}]), ids=str)
def test_it_does_so_by_xla_and_in_parts(connect, options):
    _, expected = trained("residual", "plain", connect(1), check_agreement="off", **options)
    _, seen = trained("residual", "tfdist.remat", connect(1), check_agreement="off", **options)
    all_same(seen, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.whole
def test_layers_are_called_again_in_the_backward_pass_and_only_there(connect):
    calls = {}
    for way in "plain", "tfdist.remat":
        model, _ = trained("blocks", way, connect(1))
        block = model.layers[0]
        before = block.calls
        tfdist.predict(model, examples("blocks")[0], verbose=0)
        calls[way] = before, block.calls - before
    (once, predicted), (twice, still) = calls.values()
    assert twice >= 2 * (once - 1) and predicted == still == 1
    assert not any("remat" in key for key in model.get_config())


class ByTensorFlow(Block):
    def computed(self, x):
        return super().computed(x) * tf.random.uniform(tf.shape(x), dtype="float64")


class InALoop(Block):
    def computed(self, x):
        return tf.map_fn(lambda row: row * tf.random.uniform([8], dtype="float64"), super().computed(x))


class OwnVariable(Block):
    def build(self, shape):
        super().build(shape)
        self.count = tf.Variable(0.0)

    def computed(self, x):
        self.count.assign_add(1.0)
        return super().computed(x)


class OwnFunction(Block):
    @tf.function
    def computed(self, x):
        return self.hidden(x)[:, :8]


class OwnWeight(OwnVariable):
    def computed(self, x):
        return self.out(self.hidden(x)) * tf.cast(self.count, x.dtype)


class Flagged(Block):
    """Is another layer when it is called again."""

    def computed(self, x):
        hidden = self.hidden(x)
        return self.out(hidden) if self.calls else self.out(keras.ops.tanh(hidden))

    def call(self, x):
        self.calls = 0
        x = self.inner(x)
        self.calls = 1
        return self.inner(x)


REFUSED = {
    ByTensorFlow: "draws by TensorFlow's RandomUniform", InALoop: "draws by TensorFlow's RandomUniform",
    OwnVariable: "writes a variable", OwnFunction: "(trains variables of TensorFlow|reads weights in a tf.function)",
    OwnWeight: "trains variables of TensorFlow", Flagged: "computes something else when it is called again",
}  # fmt: skip


@pytest.mark.parametrize("layer", first(3, REFUSED))
def test_what_would_not_be_the_same_again_is_refused(connect, layer):
    model = keras.Sequential([keras.Input((8,)), layer("keras.remat"), L.Dense(1)])
    model.compile("sgd", "mse")
    what = REFUSED[layer]
    with refused(f"the model {what}.*, and computes parts of itself again in the backward pass"):
        tfdist.fit(model, *examples("blocks"), verbose=0, distribution=connect(1))


class Tied(L.Layer):
    """Returns one of its weights, and a constant."""

    def build(self, shape):
        self.kernel, self.places = self.add_weight(shape=(8, 8)), tf.constant(np.linspace(0, 1, 8))

    def call(self, x):
        return x @ self.kernel, self.kernel, self.places

    def compute_output_spec(self, x):
        return tuple(keras.KerasTensor(shape, x.dtype) for shape in (x.shape, (8, 8), (8,)))


@pytest.mark.parametrize("head", first(1, ["softmax", "sigmoid"]))
def test_the_loss_of_a_saturated_output_is_that_of_its_logits(connect, head):
    """Of the probabilities it would be clipped, and its gradient zero."""
    x, y = examples("blocks")[0] * 100, np.arange(24) % 5
    loss = "sparse_categorical_crossentropy"
    loss, y = (loss, y) if head == "softmax" else ("binary_crossentropy", np.eye(5)[y])
    ended = []
    for with_remat in False, True:
        keras.utils.set_random_seed(3)
        inputs = keras.Input((8,))
        outputs, kernel, places = Tied()(inputs)
        model = keras.Model(inputs, L.Dense(5, activation=head)(outputs @ keras.ops.transpose(kernel) + places))
        if with_remat:
            tfdist.remat(model)
        model.compile(keras.optimizers.SGD(1e-4), loss)
        history = tfdist.fit(model, x, y, shuffle=False, verbose=0, distribution=connect(1)).history
        ended.append([*model.get_weights(), *history.values()])
    all_same(*ended, rtol=1e-11, atol=1e-13)


def test_what_is_no_block_is_refused():
    with refused("tfdist.remat got str: give a layer or a model"):
        tfdist.remat("blocks")

    class Flat(keras.Model):
        def __init__(self):
            super().__init__(name="flat")
            self.one = L.Dense(1)

    with refused("tfdist.remat found no block: no layer of Flat 'flat' holds other layers: give it single layers"):
        tfdist.remat(Flat())


@pytest.mark.parametrize("replicas", first(1, [1, 2]))
def test_scripts_build_layers_that_hold_others_in_a_scope(connect, replicas):
    """Keras cannot: a layer within another is called with keyword arguments, which TensorFlow refuses in a graph."""
    tfdist.patch_keras(connect(replicas))
    try:
        ended = []
        for scope in contextlib.nullcontext(), keras.RematScope():
            keras.utils.set_random_seed(3)
            with scope:
                model = BLOCKS("plain")
            model.compile(keras.optimizers.SGD(0.01), "mse")
            model.fit(*examples("blocks"), batch_size=6, shuffle=False, verbose=0)
            ended.append([v.numpy() for v in model.variables])
    finally:
        tfdist.unpatch_keras()
    all_same(*ended, rtol=1e-11, atol=1e-13)
